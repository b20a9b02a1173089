//! What is left of a function while its groups are found, and the order of the program that they leave.

use std::collections::{BTreeSet, HashMap};

use crate::graph::{Function, Op, Var};
use crate::prim::Prim;
use crate::shape::Shape;

/// A set of nodes to run together.
pub(super) struct FoundGroup {
    /// The nodes of the body, in program order.
    pub(super) nodes: Vec<usize>,
    /// Those of them that nothing else needs.
    pub(super) removed: Vec<usize>,
    /// What the body reads.
    pub(super) inputs: Vec<Var>,
    /// Nodes whose values are given out.
    pub(super) exported: Vec<usize>,
}

/// A function of which some nodes are in groups. Items are its nodes, then the groups in the order they were found.
pub(super) struct FusionState<'f> {
    pub(super) function: &'f Function,
    /// The groups found.
    pub(super) groups: Vec<FoundGroup>,
    /// The iteration space that a node could have in a group.
    spaces: Vec<Option<Shape>>,
    /// The nodes that read a node's values, once for each time.
    users: Vec<Vec<usize>>,
    /// The nodes that read a state version that this node replaces: they come before it.
    state_readers: Vec<Vec<usize>>,
    is_output: Vec<bool>,
    /// The group that a node was removed into.
    group_of: Vec<Option<usize>>,
    /// The groups that read a node's values.
    group_readers: Vec<Vec<usize>>,
    /// How many of `users` are left, and of those how many could be in a group.
    users_left: Vec<usize>,
    fusible_users_left: Vec<usize>,
    /// Where each item stands in the program; slots of removed nodes are empty.
    slots: Vec<usize>,
    items: Vec<Option<usize>>,
    /// Slots of the nodes that a group can begin with.
    seeds: BTreeSet<usize>,
}

impl<'f> FusionState<'f> {
    pub(super) fn new(function: &'f Function) -> Self {
        let count = function.nodes.len();
        let mut users = vec![Vec::new(); count];
        for (i, node) in function.nodes.iter().enumerate() {
            for input in &node.inputs {
                users[input.index()].push(i);
            }
        }
        let mut is_output = vec![false; count];
        for output in &function.outputs {
            is_output[output.var.index()] = true;
        }
        let spaces: Vec<_> = (0..count).map(|node| space(function, node)).collect();
        let fusible = |users: &Vec<usize>| users.iter().filter(|u| spaces[**u].is_some()).count();
        let mut state = Self {
            function,
            groups: Vec::new(),
            state_readers: state_readers(function),
            is_output,
            group_of: vec![None; count],
            group_readers: vec![Vec::new(); count],
            users_left: users.iter().map(Vec::len).collect(),
            fusible_users_left: users.iter().map(fusible).collect(),
            slots: (0..count).collect(),
            items: (0..count).map(Some).collect(),
            seeds: BTreeSet::new(),
            spaces,
            users,
        };
        state.seeds = (0..count).filter(|node| state.is_seed(*node)).collect();
        state
    }

    /// The first node in the program that a group can begin with.
    pub(super) fn next_seed(&self) -> Option<usize> {
        self.seeds.first().and_then(|slot| self.items[*slot])
    }

    /// Where an item stands in the program.
    pub(super) fn slot(&self, item: usize) -> usize {
        self.slots[item]
    }

    /// The item at `slot`, if it is occupied.
    pub(super) fn item_at(&self, slot: usize) -> Option<usize> {
        self.items[slot]
    }

    /// Is the node in no group, or copied into groups only?
    pub(super) fn is_left(&self, node: usize) -> bool {
        self.group_of[node].is_none()
    }

    /// The item that has the values of `node`.
    pub(super) fn item_of(&self, node: usize) -> usize {
        self.group_of[node].map_or(node, |group| self.function.nodes.len() + group)
    }

    /// The nodes that read values of `node`, those in groups included.
    pub(super) fn users(&self, node: usize) -> &[usize] {
        &self.users[node]
    }

    /// Is `node` read by others than the `inside` uses of a group being grown, or an output?
    pub(super) fn is_used_outside(&self, node: usize, inside: usize) -> bool {
        self.is_output[node] || self.users_left[node] > inside || !self.group_readers[node].is_empty()
    }

    /// The items that an item comes after.
    pub(super) fn items_before(&self, item: usize) -> impl Iterator<Item = usize> {
        let nodes = self.function.nodes.len();
        let (inputs, readers) = match item.checked_sub(nodes) {
            Some(group) => (&self.groups[group].inputs, None),
            None => (&self.function.nodes[item].inputs, Some(&self.state_readers[item])),
        };
        let inputs = inputs.iter().map(|v| v.index());
        inputs.chain(readers.into_iter().flatten().copied()).map(|node| self.item_of(node))
    }

    /// Values that are as cheap to make as to read: every group that reads one makes its own.
    pub(super) fn is_leaf(&self, node: usize) -> bool {
        match &self.function.nodes[node].op {
            Op::Prim(Prim::Const(literal)) => !literal.vector,
            Op::Prim(Prim::Iota { .. }) => true,
            // Of a row value inside a group it is an op of the group; of anything else, a way of reading.
            Op::Prim(Prim::Broadcast(_)) => {
                let input = self.function.nodes[node].inputs[0].index();
                !self.is_left(input) || self.is_leaf(input) || !matches!(self.function.nodes[input].op, Op::Prim(_))
            }
            _ => false,
        }
    }

    /// The iteration space that `node` could have in a group.
    pub(super) fn space(&self, node: usize) -> Option<&Shape> {
        self.spaces[node].as_ref()
    }

    /// Can a group begin with `node`? Leaves have nothing to compute: they go into the groups that use them, and stand
    /// alone for other users.
    fn is_seed(&self, node: usize) -> bool {
        self.is_left(node) && self.spaces[node].is_some() && (self.fusible_users_left[node] == 0 || !self.is_leaf(node))
    }

    /// Puts a group in the place of its nodes: where the last of them stood, or before the first item that reads it.
    pub(super) fn take(&mut self, found: FoundGroup) {
        let group = self.groups.len();
        let mut changed = Vec::new();
        for node in &found.removed {
            self.group_of[*node] = Some(group);
            self.items[self.slots[*node]] = None;
            self.seeds.remove(&self.slots[*node]);
            for input in &self.function.nodes[*node].inputs {
                let input = input.index();
                self.users_left[input] -= 1;
                self.fusible_users_left[input] -= usize::from(self.spaces[*node].is_some());
                changed.push(input);
            }
        }
        for input in &found.inputs {
            self.group_readers[input.index()].push(group);
        }
        let place = found.removed.iter().map(|n| self.slots[*n]).max().unwrap_or_default();
        let item = self.function.nodes.len() + group;
        self.slots.push(place);
        self.items[place] = Some(item);
        let first_reader = found.exported.iter().flat_map(|n| self.readers_of(*n)).map(|item| self.slots[item]).min();
        // Broadcasts of what is in a group now are leaves.
        let mut open = found.removed.clone();
        self.groups.push(found);
        while let Some(node) = open.pop() {
            for user in &self.users[node] {
                if self.is_left(*user) && matches!(self.function.nodes[*user].op, Op::Prim(Prim::Broadcast(_))) {
                    changed.push(*user);
                    open.push(*user);
                }
            }
        }
        for node in changed.into_iter().filter(|node| self.group_of[*node].is_none()).collect::<Vec<_>>() {
            if self.is_seed(node) {
                self.seeds.insert(self.slots[node]);
            } else {
                self.seeds.remove(&self.slots[node]);
            }
        }
        if let Some(first) = first_reader.filter(|first| *first < place) {
            self.reorder(first, place);
        }
    }

    /// The items outside its own group that read values of `node`.
    fn readers_of(&self, node: usize) -> impl Iterator<Item = usize> {
        let left = self.users[node].iter().copied().filter(|user| self.is_left(*user));
        left.chain(self.group_readers[node].iter().map(|group| self.function.nodes.len() + group))
    }

    fn before(&self, item: usize) -> std::vec::IntoIter<usize> {
        self.items_before(item).collect::<Vec<_>>().into_iter()
    }

    /// Puts the items of slots `first..=last` in an order in which each comes after what it needs, otherwise as they stand.
    fn reorder(&mut self, first: usize, last: usize) {
        let occupied: Vec<usize> = (first..=last).filter(|slot| self.items[*slot].is_some()).collect();
        let window: Vec<usize> = occupied.iter().filter_map(|slot| self.items[*slot]).collect();
        let seeds: Vec<usize> = self.seeds.range(first..=last).filter_map(|slot| self.items[*slot]).collect();
        let mut done: HashMap<usize, bool> = window.iter().map(|item| (*item, false)).collect();
        let mut order = Vec::with_capacity(window.len());
        for root in window {
            let mut stack = vec![(root, self.before(root))];
            while let Some((item, mut before)) = stack.pop() {
                if done.get(&item).is_none_or(|done| *done) {
                    continue;
                }
                if let Some(next) = before.next() {
                    stack.push((item, before));
                    stack.push((next, self.before(next)));
                } else {
                    done.insert(item, true);
                    order.push(item);
                }
            }
        }
        for item in &seeds {
            self.seeds.remove(&self.slots[*item]);
        }
        for (slot, item) in occupied.into_iter().zip(order) {
            self.slots[item] = slot;
            self.items[slot] = Some(item);
        }
        for item in seeds {
            self.seeds.insert(self.slots[item]);
        }
    }
}

/// What a primitive can be in a group.
pub(super) fn space(function: &Function, node: usize) -> Option<Shape> {
    let n = &function.nodes[node];
    let Op::Prim(prim) = &n.op else { return None };
    match prim {
        p if p.is_elementwise() => Some(n.outputs[0].shape.clone()),
        Prim::Broadcast(shape) | Prim::Iota { shape, .. } => Some(shape.clone()),
        Prim::Reduce { axis, .. } => {
            let input = &function.ty(n.inputs[0]).shape;
            (*axis + 1 == input.rank()).then(|| input.clone())
        }
        _ => None,
    }
}

/// For each node that replaces state versions, the other nodes that read those.
fn state_readers(function: &Function) -> Vec<Vec<usize>> {
    let mut readers: HashMap<Var, Vec<usize>> = HashMap::new();
    let is_state = |var: &&Var| function.ty(**var).state;
    for (i, node) in function.nodes.iter().enumerate() {
        for var in node.inputs.iter().filter(is_state) {
            readers.entry(*var).or_default().push(i);
        }
    }
    let of_node = |(i, node): (usize, &crate::graph::Node)| {
        if !node.outputs.iter().any(|t| t.state) {
            return Vec::new();
        }
        let states = node.inputs.iter().filter(is_state);
        states.flat_map(|var| &readers[var]).copied().filter(|reader| *reader != i).collect()
    };
    function.nodes.iter().enumerate().map(of_node).collect()
}

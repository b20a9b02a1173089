//! A function whose fused groups are open: their nodes stand among the others.

use std::collections::HashMap;

use crate::graph::{Function, GroupKind, Node, Op, Var};
use crate::passes::order::Draft;
use crate::prim::Prim;

/// The most values that a node with all that it inlines reads: pointers and extents of so many fit the 4 KB of a launch's parameters.
pub(super) const MAX_INPUTS: usize = 128;

/// What a node is to fusion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Another name for memory: an argument, or a read of a state.
    Name,
    /// An element is computed from elements of the inputs at places that follow from its own.
    Element,
    /// In the group of this number, which has a reduction over rows.
    Rows(usize),
    /// A launch of its own, or a call.
    Launch,
}

pub(super) struct Opened {
    pub(super) function: Function,
    pub(super) kinds: Vec<Kind>,
    /// The nodes that read a node, once for each time.
    pub(super) users: Vec<Vec<usize>>,
    /// Of a read of a state, the node that replaces what it reads, if one does.
    pub(super) replaced_by: Vec<Option<usize>>,
    /// By node: does the function return it?
    pub(super) returned: Vec<bool>,
}

impl Opened {
    pub(super) fn new(function: &Function) -> Self {
        let (function, rows) = open(function);
        let (function, rows) = sink_updates(function, rows);
        let kinds = (0..function.nodes.len()).map(|node| kind(&function, node, rows[node])).collect();
        let mut users = vec![Vec::new(); function.nodes.len()];
        for (index, node) in function.nodes.iter().enumerate() {
            node.inputs.iter().for_each(|v| users[v.index()].push(index));
        }
        let mut returned = vec![false; function.nodes.len()];
        function.outputs.iter().for_each(|output| returned[output.var.index()] = true);
        Self { replaced_by: replaced_by(&function), kinds, users, returned, function }
    }

    /// Can the node be in a group?
    pub(super) fn is_fusible(&self, node: usize) -> bool {
        matches!(self.kinds[node], Kind::Element | Kind::Rows(_))
    }

    /// Is the node its input under another shape?
    pub(super) fn is_reshape(&self, node: usize) -> bool {
        matches!(self.function.nodes[node].op, Op::Prim(Prim::Reshape(_)))
    }

    pub(super) fn inputs(&self, node: usize) -> impl DoubleEndedIterator<Item = usize> + '_ {
        self.function.nodes[node].inputs.iter().map(|v| v.index())
    }
}

/// `function` with its fused groups open, and by node the number of the group with a reduction that it was in.
fn open(function: &Function) -> (Function, Vec<Option<usize>>) {
    let mut opened = Function { nodes: Vec::new(), ..function.clone() };
    let mut rows = Vec::new();
    let mut known: HashMap<Var, Var> = HashMap::new();
    for (index, node) in function.nodes.iter().enumerate() {
        let inputs: Vec<Var> = node.inputs.iter().map(|v| known[v]).collect();
        let group = match &node.op {
            Op::Group(group) if group.kind == GroupKind::Fused => group,
            _ => {
                for out in 0..node.outputs.len() {
                    known.insert(function.var(index, out), opened.var(opened.nodes.len(), out));
                }
                opened.nodes.push(Node { inputs, ..node.clone() });
                rows.push(None);
                continue;
            }
        };
        let reduces = group.body.nodes.iter().any(|n| matches!(n.op, Op::Prim(Prim::Reduce { .. })));
        let keeps = reduces && group.body.args.len() <= MAX_INPUTS;
        let mut inner: Vec<Var> = Vec::with_capacity(group.body.nodes.len());
        for of in &group.body.nodes {
            if let Op::Arg(arg) = of.op {
                inner.push(inputs[arg]);
                continue;
            }
            inner.push(opened.var(opened.nodes.len(), 0));
            let inputs = of.inputs.iter().map(|v| inner[v.index()]).collect();
            opened.nodes.push(Node { inputs, scope: node.scope.clone(), ..of.clone() });
            rows.push(keeps.then_some(index));
        }
        for (out, output) in group.body.outputs.iter().enumerate() {
            known.insert(function.var(index, out), inner[output.var.index()]);
        }
    }
    for output in &mut opened.outputs {
        output.var = known[&output.var];
    }
    (opened, rows)
}

fn kind(function: &Function, index: usize, rows: Option<usize>) -> Kind {
    let node = &function.nodes[index];
    let prim = match &node.op {
        Op::Arg(_) | Op::Prim(Prim::StateRead | Prim::Component(_)) => return Kind::Name,
        Op::Prim(prim) => prim,
        _ => return Kind::Launch,
    };
    let plain = |v: &Var| function.ty(*v).format.is_none() && !function.ty(*v).state;
    if !node.inputs.iter().all(plain) || !plain(&function.var(index, 0)) {
        return Kind::Launch;
    }
    if let Some(group) = rows {
        return Kind::Rows(group);
    }
    match prim {
        Prim::Concat { .. } if node.inputs.len() > MAX_INPUTS => Kind::Launch,
        p if p.is_elementwise() => Kind::Element,
        Prim::Const(literal) if !literal.vector => Kind::Element,
        Prim::Iota { .. }
        | Prim::Broadcast(_)
        | Prim::Reshape(_)
        | Prim::Transpose(_)
        | Prim::Slice { .. }
        | Prim::Concat { .. }
        | Prim::Pad { .. }
        | Prim::Gather { .. } => Kind::Element,
        _ => Kind::Launch,
    }
}

/// For each read of a state, the node that replaces the version that it reads.
fn replaced_by(function: &Function) -> Vec<Option<usize>> {
    let mut updates: HashMap<Var, usize> = HashMap::new();
    for (index, node) in function.nodes.iter().enumerate().filter(|(_, n)| n.outputs.iter().any(|t| t.state)) {
        for var in node.inputs.iter().filter(|v| function.ty(**v).state) {
            updates.insert(*var, index);
        }
    }
    let of = |node: &Node| match node.op {
        Op::Prim(Prim::StateRead) => updates.get(&node.inputs[0]).copied(),
        _ => None,
    };
    function.nodes.iter().map(of).collect()
}

/// Moves updates of states behind the nodes that compute elements of what they replace, so that more can be computed from it in place.
fn sink_updates(function: Function, rows: Vec<Option<usize>>) -> (Function, Vec<Option<usize>>) {
    let replaced = replaced_by(&function);
    if replaced.iter().all(Option::is_none) {
        return (function, rows);
    }
    let mut place: Vec<usize> = (0..function.nodes.len()).map(|node| 2 * node).collect();
    // By node, where it stands at the latest: an update that reads what another replaces stays ahead of the other.
    let mut latest = vec![usize::MAX; function.nodes.len()];
    // By node, the updates that it comes before as it reads what they replace, through elements.
    let mut before: Vec<Vec<usize>> = Vec::with_capacity(function.nodes.len());
    for (index, node) in function.nodes.iter().enumerate() {
        let of_inputs = union(node.inputs.iter().map(|v| &before[v.index()]));
        for update in of_inputs.iter().copied().filter(|update| *update != index) {
            place[update] = place[update].max(2 * index + 1);
            if update > index {
                latest[index] = latest[index].min(2 * update - 1);
            }
        }
        before.push(match (kind(&function, index, rows[index]), replaced[index]) {
            (Kind::Launch, _) => Vec::new(),
            (Kind::Name, Some(update)) => vec![update],
            _ => of_inputs,
        });
    }
    let Some(order) = Draft::new(function.clone()).order_by(|node| place[node].min(latest[node])) else {
        return (function, rows);
    };
    let marked: Vec<(Node, Option<usize>)> = function.nodes.iter().cloned().zip(rows).collect();
    let order = contiguous(order, |node| marked[node].1);
    let mut moved = vec![0; order.len()];
    order.iter().enumerate().for_each(|(new, old)| moved[*old] = new);
    let mut sunk = Function { nodes: Vec::new(), ..function };
    let renamed = |sunk: &Function, v: Var| sunk.var(moved[v.index()], v.out as usize);
    let mut rows = Vec::with_capacity(order.len());
    for old in order {
        let (node, group) = marked[old].clone();
        let inputs = node.inputs.iter().map(|v| renamed(&sunk, *v)).collect();
        sunk.nodes.push(Node { inputs, ..node });
        rows.push(group);
    }
    for i in 0..sunk.outputs.len() {
        sunk.outputs[i].var = renamed(&sunk, sunk.outputs[i].var);
    }
    (sunk, rows)
}

/// `order` with the nodes of each group together, where the last of them stands. What came between them, as an update that some of them
/// depend on, depends on none of them: it was ahead of all of them before it was moved.
fn contiguous(order: Vec<usize>, group: impl Fn(usize) -> Option<usize>) -> Vec<usize> {
    let positions = order.iter().enumerate();
    let last: HashMap<usize, usize> = positions.filter_map(|(at, node)| Some((group(*node)?, at))).collect();
    let positions = order.into_iter().enumerate();
    let mut placed: Vec<(usize, usize)> =
        positions.map(|(at, node)| (group(node).map_or(at, |group| last[&group]), node)).collect();
    placed.sort_by_key(|(at, _)| *at);
    placed.into_iter().map(|(_, node)| node).collect()
}

/// All updates of these lists, in order.
pub(super) fn union<'a>(of: impl IntoIterator<Item = &'a Vec<usize>>) -> Vec<usize> {
    let mut all: Vec<usize> = of.into_iter().flatten().copied().collect();
    all.sort_unstable();
    all.dedup();
    all
}

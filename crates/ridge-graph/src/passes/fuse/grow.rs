//! Grows one group from its first node along uses, in program order.

use std::collections::{BTreeSet, HashMap, HashSet};

use super::state::{FoundGroup, FusionState};
use crate::graph::{Op, Var};
use crate::prim::Prim;
use crate::shape::Shape;

/// The group that begins with node `seed`.
pub(super) fn grow(state: &FusionState<'_>, seed: usize) -> FoundGroup {
    let wanted = state.space(seed).cloned().unwrap_or_default();
    let mut growing = GrowingGroup {
        state,
        seed,
        row: row_of(&wanted),
        wanted,
        nodes: Vec::new(),
        members: HashSet::new(),
        candidates: BTreeSet::new(),
        inputs: BTreeSet::new(),
    };
    growing.join(seed);
    // Passes in program order: what joins can let a candidate before it join in the next pass.
    loop {
        let (mut from, mut joined) = (state.slot(seed), false);
        while let Some(slot) = growing.candidates.range(from..).next().copied() {
            from = slot + 1;
            let Some(candidate) = state.item_at(slot) else { continue };
            if growing.stays_acyclic(candidate) {
                growing.join(candidate);
                joined = true;
            }
        }
        if !joined {
            break;
        }
    }
    growing.absorb_leaves();
    growing.finish()
}

/// The shape of a row value of `space`.
fn row_of(space: &Shape) -> Shape {
    let mut dims = space.0.clone();
    if let Some(last) = dims.last_mut() {
        *last = 1.into();
    }
    Shape(dims)
}

struct GrowingGroup<'s> {
    state: &'s FusionState<'s>,
    seed: usize,
    /// The iteration space, and the shape of its row values.
    wanted: Shape,
    row: Shape,
    nodes: Vec<usize>,
    /// The same, to look up.
    members: HashSet<usize>,
    /// Slots of the nodes that read from the group or feed it, and fit.
    candidates: BTreeSet<usize>,
    /// Slots of the items outside that the group reads.
    inputs: BTreeSet<usize>,
}

impl GrowingGroup<'_> {
    fn join(&mut self, node: usize) {
        let state = self.state;
        let slot = state.slot(node);
        self.nodes.push(node);
        self.members.insert(node);
        self.candidates.remove(&slot);
        self.inputs.remove(&slot);
        for input in &state.function.nodes[node].inputs {
            let item = state.item_of(input.index());
            if !self.members.contains(&item) {
                self.inputs.insert(state.slot(item));
                self.consider(item);
            }
        }
        for user in state.users(node) {
            self.consider(*user);
        }
    }

    /// Makes an item that touches the group a candidate, if it could be in it.
    fn consider(&mut self, item: usize) {
        let state = self.state;
        let is_node = item < state.function.nodes.len() && state.is_left(item);
        if is_node
            && state.slot(item) >= state.slot(self.seed)
            && !self.members.contains(&item)
            && !state.is_leaf(item)
            && self.fits(item)
        {
            self.candidates.insert(state.slot(item));
        }
    }

    /// Can `candidate` run in the group's iteration space?
    fn fits(&self, candidate: usize) -> bool {
        let Some(own) = self.state.space(candidate) else { return false };
        let is_reduce = matches!(self.state.function.nodes[candidate].op, Op::Prim(Prim::Reduce { .. }));
        *own == self.wanted || (!is_reduce && *own == self.row)
    }

    /// Would the group with `candidate` still depend on nothing that depends on it? The group without it does not, so
    /// what is left is that the candidate depends on the group through others, or the group so on the candidate.
    fn stays_acyclic(&self, candidate: usize) -> bool {
        let state = self.state;
        let own = state.items_before(candidate).filter(|item| !self.members.contains(item)).collect();
        let slot = state.slot(candidate);
        let later = self.inputs.range(slot + 1..).filter_map(|slot| state.item_at(*slot)).collect();
        !self.reaches(own, candidate, state.slot(self.seed)) && !self.reaches(later, candidate, slot)
    }

    /// Does one of `open` depend on the group or the candidate, by items behind slot `floor`?
    fn reaches(&self, mut open: Vec<usize>, candidate: usize, floor: usize) -> bool {
        let mut seen = HashSet::new();
        while let Some(item) = open.pop() {
            if item == candidate || self.members.contains(&item) {
                return true;
            }
            // What an item needs comes before it, so nothing before the floor depends on what is there.
            if self.state.slot(item) > floor && seen.insert(item) {
                open.extend(self.state.items_before(item));
            }
        }
        false
    }

    /// Takes the leaves that the group's ops read into its body.
    fn absorb_leaves(&mut self) {
        let state = self.state;
        let mut at = 0;
        while at < self.nodes.len() {
            for input in &state.function.nodes[self.nodes[at]].inputs {
                let leaf = input.index();
                let is_leaf = state.is_left(leaf) && state.is_leaf(leaf) && !self.members.contains(&leaf);
                let scalar = matches!(state.function.nodes[leaf].op, Op::Prim(Prim::Const(_)));
                if is_leaf && (scalar || self.fits(leaf)) {
                    self.nodes.push(leaf);
                    self.members.insert(leaf);
                }
            }
            at += 1;
        }
        self.nodes.sort_unstable_by_key(|node| state.slot(*node));
    }

    fn finish(self) -> FoundGroup {
        let Self { state, seed, nodes, members, .. } = self;
        let inputs_of = |node: &usize| state.function.nodes[*node].inputs.iter();
        let (mut inputs, mut known): (Vec<Var>, HashSet<Var>) = (Vec::new(), HashSet::new());
        let mut inside: HashMap<usize, usize> = HashMap::new();
        for var in nodes.iter().flat_map(inputs_of) {
            *inside.entry(var.index()).or_default() += 1;
            if !members.contains(&var.index()) && known.insert(*var) {
                inputs.push(*var);
            }
        }
        let used_outside = |n: &usize| state.is_used_outside(*n, inside.get(n).copied().unwrap_or_default());
        // A leaf that the group began with is all that it computes.
        let absorbed = |n: &usize| *n != seed && state.is_leaf(*n);
        // A leaf stays for its other users, and with it the leaves that it reads.
        let (mut kept, mut read_by_kept) = (HashSet::new(), HashSet::new());
        for node in nodes.iter().rev().filter(|n| absorbed(n)) {
            if used_outside(node) || read_by_kept.contains(node) {
                kept.insert(*node);
                read_by_kept.extend(inputs_of(node).map(|v| v.index()));
            }
        }
        // What others need is given out, others being also the leaves that stay.
        let is_exported = |n: &usize| !absorbed(n) && (used_outside(n) || read_by_kept.contains(n));
        let exported = nodes.iter().copied().filter(is_exported).collect();
        let removed = nodes.iter().copied().filter(|n| !kept.contains(n)).collect();
        FoundGroup { nodes, removed, inputs, exported }
    }
}

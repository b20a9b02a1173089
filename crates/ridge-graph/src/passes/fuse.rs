//! Fusion of what no kernel claimed: chains of elementwise ops, with reductions over the last axis, become groups that
//! a backend runs row by row or tile by tile in its fastest memory.
//!
//! A group works over one iteration space, the shape of its widest values. Each value inside is either full (of that
//! shape) or a row value (the last extent 1). Broadcasts from elsewhere are read with strides.
//!
//! All groups of a function are found first, then it is rebuilt once. Groups that are found are items of the program's
//! order like nodes, so that the next one is grown as if the function had been rebuilt: `fuse/state.rs` has the order and
//! what is left of the function, `fuse/grow.rs` grows one group.

mod grow;
#[cfg(test)]
mod reference;
mod state;

use super::claim::extract;
use super::order::Draft;
use super::pattern::outputs_of;
use crate::graph::{Function, Graph, Group, GroupKind, Node, Op};
use state::FusionState;

/// Fuses within every function.
pub fn fuse(graph: &mut Graph) {
    for function in &mut graph.functions {
        let mut state = FusionState::new(function);
        while let Some(seed) = state.next_seed() {
            let found = grow::grow(&state, seed);
            state.take(found);
        }
        if !state.groups.is_empty() {
            *function = rebuild(function, &state);
        }
    }
}

/// The function with its groups in the places of their nodes.
fn rebuild(function: &Function, state: &FusionState<'_>) -> Function {
    let mut draft = Draft::new(function.clone());
    for found in &state.groups {
        let results = outputs_of(function, found.exported.iter().copied());
        let body = extract(function, &found.nodes, &found.inputs, &results);
        let outputs = body.outputs.iter().map(|o| body.ty(o.var).clone()).collect();
        // The scope of the group is that of the first op that it gives out.
        let scope = found.exported.first().map_or_else(|| "".into(), |n| function.nodes[*n].scope.clone());
        for node in &found.removed {
            draft.nodes[*node] = None;
        }
        let group = Group { kind: GroupKind::Fused, body };
        let new = draft.push(Node { op: Op::Group(group.into()), inputs: found.inputs.clone(), outputs, scope });
        for (old, new) in results.into_iter().zip(new) {
            draft.replace(old, new);
        }
    }
    draft.finish(|item| state.slot(item))
}

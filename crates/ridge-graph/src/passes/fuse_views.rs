//! Second stage of fusion, for backends whose fused groups compute an element of any shape from its index: slices, transposes,
//! concatenations, gathers and other views become index arithmetic of what reads them, and groups that do not depend on each other
//! share a launch.
//!
//! [`fuse`](super::fuse()) has made groups of one iteration space each. Here they are open again (`open`), but for groups with a reduction, which
//! stay together. Then every value is either *stored* or *inlined*: computed again by whatever reads it (`choose`). Values are stored that
//! a kernel or the caller reads, and those that would cost more to compute again than to read.
//!
//! A value's *level* is the number of launches that it comes after. Stored values of one level cannot depend on each other except by
//! inlining, so neighbouring ones become one group, whatever their shapes (`merge`).

mod choose;
mod merge;
mod open;
#[cfg(test)]
mod tests;

use super::claim::extract;
use super::order::Draft;
use super::pattern::outputs_of;
use crate::graph::{Function, Graph, Group, GroupKind, Node, Op};
use merge::Launch;
use open::Opened;

/// Fuses views and groups within every function, after [`fuse`](super::fuse()).
pub fn fuse_views(graph: &mut Graph) {
    for function in &mut graph.functions {
        // A function whose launches would depend on each other keeps the groups that it has.
        if let Some(fused) = fused(function) {
            *function = fused;
        }
    }
}

/// The function with its views fused. `None`, where launches would depend on each other, is a defect of this pass.
fn fused(function: &Function) -> Option<Function> {
    let opened = Opened::new(function);
    let choices = choose::Choices::new(&opened);
    let launches = merge::launches(&opened, &choices);
    rebuild(&opened, &choices, &launches)
}

/// The function with a group for each launch, in place of all fusible nodes.
fn rebuild(opened: &Opened, choices: &choose::Choices, launches: &[Launch]) -> Option<Function> {
    let function = &opened.function;
    let count = function.nodes.len();
    let mut draft = Draft::new(function.clone());
    for node in (0..count).filter(|node| opened.is_fusible(*node) && !choices.is_alias(*node)) {
        draft.nodes[node] = None;
    }
    for launch in launches {
        let results = outputs_of(function, launch.exported.iter().copied());
        let body = extract(function, &launch.nodes, &launch.inputs, &results);
        let outputs = body.outputs.iter().map(|o| body.ty(o.var).clone()).collect();
        let scope = function.nodes[launch.exported[0]].scope.clone();
        let group = Group { kind: GroupKind::Fused, body };
        let new = draft.push(Node { op: Op::Group(group.into()), inputs: launch.inputs.clone(), outputs, scope });
        for (old, new) in results.into_iter().zip(new) {
            draft.replace(old, new);
        }
    }
    draft.try_finish(|item| if item < count { 2 * item + 1 } else { launches[item - count].place })
}

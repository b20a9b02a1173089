//! Which lowered graphs a deterministic device takes: those whose every op gives a row the same bits whatever is computed beside it.
//!
//! Kernels state that by their offers ([`Numerics`](ridge_graph::passes::Numerics)), so those that do not are not chosen. What is left is
//! what the ops of such kernels open into, which primitives compute in an order that depends on the step, or far too slowly.

use ridge_graph::{Function, Graph, GroupKind, Node, Op, Prim, Var};
use ridge_runtime::{Result, RuntimeError};

/// Refuses a lowered graph that has an op without a deterministic kernel.
///
/// # Errors
/// Names the op, where it is, and what to do.
pub(crate) fn check(graph: &Graph) -> Result<()> {
    for function in &graph.functions {
        for node in &function.nodes {
            if let Some(why) = refused(function, node) {
                return Err(RuntimeError::Unsupported {
                    backend: "cuda",
                    op: node.op_name().into(),
                    at: if node.scope.is_empty() { function.name.to_string() } else { node.scope.to_string() },
                    why: format!("{why}; leave --deterministic out, or use --device cpu"),
                });
            }
        }
    }
    Ok(())
}

/// Why the results of a node depend on what is computed beside them, if they do.
fn refused(function: &Function, node: &Node) -> Option<&'static str> {
    match &node.op {
        Op::Prim(Prim::LinearRecurrence { .. } | Prim::LinearRecurrenceGradient { .. }) => {
            Some("recurrences are computed in chunks that depend on the step")
        }
        Op::Prim(Prim::Collective { .. }) => Some("the order of sums over ranks depends on their size"),
        Op::Prim(Prim::Scatter { add: true, .. }) => Some("sums of rows have no deterministic kernel"),
        Op::Prim(Prim::MatMul { trans_a, .. }) => {
            let a = &function.ty(node.inputs[0]).shape.0;
            let depth = if *trans_a { a.len().checked_sub(2).map(|at| &a[at]) } else { a.last() };
            if a.len() > 2 || depth.is_some_and(|depth| depth.as_const().is_none()) {
                return Some("this attention, or product by experts, has no deterministic kernel");
            }
            let decoded = node.inputs.iter().any(|input| is_decoded(function, *input));
            decoded.then_some("weights in a storage format have no deterministic kernel; --format bf16 decodes them once")
        }
        Op::Group(group) if matches!(group.kind, GroupKind::Fused) => {
            let body = &group.body;
            let grows = |node: &Node| match &node.op {
                Op::Prim(Prim::Reduce { axis, .. }) => body.ty(node.inputs[0]).shape.0[*axis].as_const().is_none(),
                _ => false,
            };
            body.nodes.iter().any(grows).then_some("it sums over an extent of the step")
        }
        _ => None,
    }
}

/// Is the value decoded from the components of a format?
fn is_decoded(function: &Function, value: Var) -> bool {
    let made = &function.nodes[value.index()];
    match &made.op {
        Op::Prim(Prim::Component(_)) => true,
        Op::Prim(Prim::Reshape(_) | Prim::Transpose(_) | Prim::Cast(_)) => is_decoded(function, made.inputs[0]),
        Op::Group(group) if matches!(group.kind, GroupKind::Fused) => {
            made.inputs.iter().any(|input| matches!(function.nodes[input.index()].op, Op::Prim(Prim::Component(_))))
        }
        _ => false,
    }
}

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
            decoded
                .then_some("weights in a storage format have no deterministic kernel; --format bf16 decodes them once")
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

#[cfg(test)]
mod tests {
    use ridge_graph::ops::PagedAttention;
    use ridge_graph::{Builder, DType, FormatRef, Sym, Type};

    use super::*;
    use crate::kernels::CudaKernelRegistry;

    /// Why a graph is refused.
    fn why(build: impl FnOnce(&mut Builder) -> ridge_graph::Result<Var>) -> Option<String> {
        let mut g = Builder::new();
        let y = g.scoped("layers.3.mlp", build).expect("types");
        let graph = g.finish(vec![("y".into(), y)]).expect("finishes");
        let registry = CudaKernelRegistry::builtin().deterministic();
        let lowered = ridge_runtime::lower(&graph, &["y"], &registry.claims()).expect("lowers");
        check(&lowered).err().map(|why| why.to_string())
    }

    fn linear(g: &mut Builder, format: Option<FormatRef>) -> ridge_graph::Result<Var> {
        let x = g.step_input("x", Type::tensor(DType::BF16, [40, 512]))?;
        let w = Type::tensor(DType::BF16, [64, 512]);
        let w = g.weight("w", format.map_or(w.clone(), |format| w.stored_as(format)))?;
        g.linear(x, w)
    }

    fn attention(g: &mut Builder, slopes: bool, sides: usize) -> ridge_graph::Result<Var> {
        let q = g.step_input("q", Type::tensor(DType::BF16, [5, 4, 64]))?;
        let kv = g.state("kv", Type::state(DType::BF16, [9, sides, 2, 16, 64]))?;
        let table = g.step_input("table", Type::tensor(DType::I32, [2, 4]))?;
        let [ids, positions] = ["ids", "positions"].map(|name| g.step_input(name, Type::tensor(DType::I32, [5])));
        let op = PagedAttention::new(0.125, Sym::new("pairs"), Sym::new("cached"));
        let more = if slopes { vec![g.weight("slopes", Type::tensor(DType::F32, [4]))?] } else { Vec::new() };
        g.attention_with([q, kv, table, ids?, positions?], &more, PagedAttention { slopes, ..op })
    }

    #[test]
    fn plain_weights_and_attention_are_taken() {
        assert_eq!(why(|g| linear(g, None)), None);
        assert_eq!(why(|g| attention(g, false, 2)), None);
    }

    #[test]
    fn what_has_no_deterministic_kernel_is_refused_where_it_is() {
        let formats = ridge_graph::format::all();
        assert!(formats.len() > 10);
        for format in formats {
            if format.check(&Type::tensor(DType::BF16, [64, 512]).shape).is_ok() {
                let why =
                    why(|g| linear(g, Some(format.clone()))).unwrap_or_else(|| panic!("{} is taken", format.name()));
                assert!(why.contains("layers.3.mlp") && why.contains("--format bf16"), "{}: {why}", format.name());
            }
        }
        for (slopes, sides) in [(true, 2), (false, 1)] {
            let why = why(|g| attention(g, slopes, sides)).expect("is refused");
            assert!(why.contains("layers.3.mlp") && why.contains("leave --deterministic out"), "{why}");
        }
    }
}

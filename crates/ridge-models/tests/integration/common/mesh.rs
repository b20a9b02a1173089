//! Two ranks by evaluation in lockstep, beside the whole graph.

use ridge_graph::shard::{MeshAxis, Placement, Sharded, shard, slice_for_rank, unite};
use ridge_graph::{Arg, Bindings, Graph, Precision, Tensor, Value, evaluate, evaluate_mesh};
use ridge_models::parallel::tensor_parallel;

use super::Fixture;

pub(crate) const RANKS: usize = 2;

pub(crate) fn tp() -> MeshAxis {
    MeshAxis::new("tp", RANKS)
}

pub(crate) fn sharded(fixture: &Fixture, graph: &Graph) -> Sharded {
    let place = tensor_parallel(&fixture.config, &tp()).expect("divides");
    shard(graph, &tp(), &place, &|output| &*output.name != "next").unwrap_or_else(|e| panic!("{e}"))
}

/// `value` of an argument placed so, as `rank` has it.
pub(crate) fn share(value: &Value, placement: Placement, rank: usize) -> Value {
    slice_for_rank(value, placement, &tp(), rank).unwrap_or_else(|e| panic!("{e}"))
}

/// A step by evaluation of the whole graph and of both ranks in lockstep. Gives the outputs of each rank put together
/// beside those of the whole.
pub(crate) fn on_mesh(
    graph: &Graph,
    local: &Sharded,
    value: &dyn Fn(&Arg) -> Option<Value>,
    bindings: &Bindings,
) -> Vec<(String, Tensor, Tensor)> {
    let whole = evaluate(graph, value, bindings, Precision::Exact).expect("evaluates");
    let args = &graph.main().args;
    let of_rank = |rank: usize, arg: &Arg| {
        let index = args.iter().position(|a| a.name == arg.name)?;
        Some(share(&value(&args[index])?, local.args[index], rank))
    };
    let by_rank =
        evaluate_mesh(&local.graph, &[("tp", RANKS)], &of_rank, bindings, Precision::Exact).expect("evaluates");
    whole
        .into_iter()
        .enumerate()
        .map(|(i, (name, want))| {
            let shares: Vec<Tensor> = by_rank.iter().map(|outputs| outputs[i].1.tensor().clone()).collect();
            if local.outputs[i] == Placement::Replicate {
                assert_eq!(shares[0], shares[1], "{name} on both ranks");
            }
            (name, unite(&shares, local.outputs[i]), want.tensor().clone())
        })
        .collect()
}

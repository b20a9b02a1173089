//! Gradients over tensor-parallel and data-parallel ranks.

use crate::support::sharding::{assert_same, collectives, tp};
use ridge_graph::grad::{float_weights, gradient};
use ridge_graph::sample::Rng;
use ridge_graph::shard::{Placement, Sharded, shard};
use ridge_graph::{Arg, Builder, DType, Graph, Output, Result, Shape, Tensor, Type, Value};

const TOKENS: usize = 6;
const HIDDEN: usize = 4;
const VOCAB: usize = 8;

fn f32s(shape: &[usize]) -> Type {
    Type::tensor(DType::F32, Shape::new(shape.iter().copied()))
}

/// Two calls of a normalised gated MLP with residual between an embedding and output weights; the loss is the sum over
/// tokens.
fn model() -> Result<Graph> {
    let mut g = Builder::new();
    let layer = g.function("layer", |g| {
        let x = g.arg("x", f32s(&[TOKENS, HIDDEN]));
        let norm = g.weight("norm", f32s(&[HIDDEN]))?;
        let (gate, up) = (g.weight("gate", f32s(&[8, HIDDEN]))?, g.weight("up", f32s(&[8, HIDDEN]))?);
        let down = g.weight("down", f32s(&[HIDDEN, 8]))?;
        let h = g.rms_norm(x, norm, 1e-5)?;
        let (a, b) = (g.linear(h, gate)?, g.linear(h, up)?);
        let m = g.swiglu(a, b)?;
        let y = g.linear(m, down)?;
        Ok(vec![g.add(x, y)?])
    })?;
    let ids = g.step_input("ids", Type::tensor(DType::I32, [TOKENS]))?;
    let targets = g.step_input("targets", Type::tensor(DType::I32, [TOKENS]))?;
    let table = g.weight("embedding", f32s(&[VOCAB, HIDDEN]))?;
    let head = g.weight("head", f32s(&[VOCAB, HIDDEN]))?;
    let mut x = g.embedding(table, ids, DType::F32)?;
    for i in 0..2 {
        x = g.scoped(&format!("layers.{i}"), |g| g.call(layer, &[x]))?[0];
    }
    let logits = g.linear(x, head)?;
    let losses = g.cross_entropy(logits, targets)?;
    let loss = g.reduce_sum(losses, 0)?;
    let loss = g.reshape(loss, Shape::default())?;
    g.finish(vec![("loss".into(), loss)])
}

fn args(graph: &Graph) -> Vec<(String, Value)> {
    let mut rng = Rng::new(3);
    let mut value = |arg: &Arg| -> Tensor {
        let shape = arg.ty.shape.as_const().expect("constant");
        match arg.ty.dtype {
            DType::F32 => rng.normal(DType::F32, &shape),
            dtype => rng.integers(dtype, &shape, 0, VOCAB as i64),
        }
    };
    graph.main().args.iter().map(|a| (a.name.to_string(), value(a).into())).collect()
}

fn by_columns(arg: &Arg) -> Placement {
    match arg.name.rsplit('.').next() {
        Some("gate" | "up") => Placement::shard(0),
        Some("down") => Placement::shard(1),
        _ => Placement::Replicate,
    }
}

fn by_tokens(arg: &Arg) -> Placement {
    if matches!(&*arg.name, "ids" | "targets") { Placement::shard(0) } else { Placement::Replicate }
}

fn sharded(graph: &Graph, place: &dyn Fn(&Arg) -> Placement) -> Sharded {
    shard(graph, &tp(), place, &|_: &Output| false).unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn tensor_parallel_gradients_are_cut_as_their_weights_are() {
    let graph = model().expect("builds");
    let graph = gradient(&graph, "loss", &float_weights(&graph)).expect("differentiates");
    let local = sharded(&graph, &by_columns);
    assert_same("gradients", &graph, &local, &tp(), &args(&graph));
    for (output, placement) in local.graph.main().outputs.iter().zip(&local.outputs) {
        let Some(weight) = output.name.strip_prefix("grad.") else { continue };
        let arg = graph.main().arg_index(weight).expect("a weight");
        assert_eq!(*placement, local.args[arg], "{weight}");
    }
    // Forward once after the second linear, backward once before the first (Shoeybi et al. 2019, figure 3).
    let wanted = [("layer_fwd", vec!["all_reduce"]), ("layer_bwd", vec!["all_reduce"]), ("main", vec![])];
    assert_eq!(collectives(&local.graph), wanted.map(|(name, found)| (name.to_owned(), found)));
}

#[test]
fn data_parallel_gradients_are_summed_once_at_the_end() {
    let graph = model().expect("builds");
    let weights = float_weights(&graph);
    let graph = gradient(&graph, "loss", &weights).expect("differentiates");
    let local = sharded(&graph, &by_tokens);
    assert_same("gradients", &graph, &local, &tp(), &args(&graph));
    for (name, found) in collectives(&local.graph) {
        // One for each weight, and the loss.
        let wanted = if name == "main" { weights.len() + 1 } else { 0 };
        assert_eq!(found, vec!["all_reduce"; wanted], "{name}");
    }
}

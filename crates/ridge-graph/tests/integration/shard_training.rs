//! Gradients over tensor-parallel and data-parallel ranks.

use crate::support::sharding::{assert_same, collectives, tp};
use ridge_graph::grad::{float_weights, gradient};
use ridge_graph::sample::Rng;
use ridge_graph::shard::{MeshAxis, Placement, Sharded, gather_again, gather_weights, shard, slice_for_rank, unite};
use ridge_graph::{
    Arg, Bindings, Builder, CollectiveKind, DType, Graph, Op, Output, Precision, Prim, Result, Shape, Tensor, Type,
    Value, evaluate, evaluate_mesh,
};

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

/// What each of two data-parallel ranks has of `name`: weights in halves along `dim`, inputs of its own.
fn of_rank(graph: &Graph, whole: &Graph, inputs: &[Vec<(String, Value)>], rank: usize, arg: &Arg) -> Option<Value> {
    let value = inputs[rank].iter().find(|(name, _)| **name == *arg.name)?.1.clone();
    let (local, all) = (&graph.main().args[graph.main().arg_index(&arg.name)?], &whole.main().args);
    let all = &all.iter().find(|a| a.name == arg.name)?.ty;
    let cut = (0..all.shape.rank()).find(|dim| all.shape.0[*dim] != local.ty.shape.0[*dim]);
    let placement = cut.map_or(Placement::Replicate, Placement::shard);
    Some(slice_for_rank(&value, placement, &MeshAxis::new("dp", 2), rank).expect("divides"))
}

/// The gatherings of parameters and the nodes that use what they give, in the order of main.
fn gathers_and_users(graph: &Graph) -> Vec<String> {
    let main = graph.main();
    let is_gather = |index: usize| {
        matches!(main.nodes[index].op, Op::Prim(Prim::Collective { kind: CollectiveKind::AllGather(_), .. }))
    };
    let mut found: Vec<String> = Vec::new();
    for (index, node) in main.nodes.iter().enumerate() {
        let said = if is_gather(index) {
            format!("gather {}", node.scope.rsplit_once('.').map_or(&*node.scope, |(layer, _)| layer))
        } else if node.inputs.iter().any(|v| is_gather(v.index())) {
            format!("use {}", node.scope)
        } else {
            continue;
        };
        if found.last() != Some(&said) {
            found.push(said);
        }
    }
    found
}

#[test]
fn gathered_weights_give_the_gradients_of_whole_ones_in_shares() {
    let whole = model().expect("builds");
    let axis = MeshAxis::new("dp", 2);
    let gathered = gather_weights(&whole, &axis).expect("divides");
    let weights = float_weights(&whole);
    let plain = gradient(&whole, "loss", &weights).expect("differentiates");
    let local = gather_again(&gradient(&gathered, "loss", &weights).expect("differentiates")).expect("is consistent");
    // Equal weights, and a batch of its own for each rank.
    let first = args(&whole);
    let mut rng = Rng::new(77);
    let mut own = |(name, value): &(String, Value)| match value.tensor().dtype {
        DType::F32 => (name.clone(), value.clone()),
        dtype => (name.clone(), rng.integers(dtype, &[TOKENS], 0, VOCAB as i64).into()),
    };
    let second: Vec<_> = first.iter().map(&mut own).collect();
    let inputs = [first, second];
    let alone = |inputs: &[(String, Value)]| {
        let given = |arg: &Arg| inputs.iter().find(|(name, _)| **name == *arg.name).map(|(_, v)| v.clone());
        evaluate(&plain, &given, &Bindings::new(), Precision::Exact).expect("evaluates")
    };
    let apart = [alone(&inputs[0]), alone(&inputs[1])];
    let given = |rank: usize, arg: &Arg| of_rank(&local, &whole, &inputs, rank, arg);
    let ranks = evaluate_mesh(&local, &[("dp", 2)], &given, &Bindings::new(), Precision::Exact).expect("evaluates");
    for (i, (name, _)) in apart[0].iter().enumerate() {
        let shares: Vec<Tensor> = ranks.iter().map(|outputs| outputs[i].1.tensor().clone()).collect();
        let Some(weight) = name.strip_prefix("grad.") else {
            // Each rank has the loss of its own batch.
            for rank in 0..2 {
                assert!((shares[rank].floats()[0] - apart[rank][i].1.tensor().floats()[0]).abs() < 1e-12);
            }
            continue;
        };
        let shape = &whole.main().args[whole.main().arg_index(weight).expect("a weight")].ty.shape;
        let dim = (0..shape.rank()).find(|dim| shape.as_const().unwrap()[*dim] != shares[0].shape[*dim]);
        let united = unite(&shares, Placement::shard(dim.expect("it is cut")));
        let (a, b) = (apart[0][i].1.tensor().floats(), apart[1][i].1.tensor().floats());
        for (got, wanted) in united.floats().iter().zip(a.iter().zip(b).map(|(a, b)| a + b)) {
            assert!((got - wanted).abs() < 1e-11 * (1.0 + wanted.abs()), "{name}: {got} and {wanted}");
        }
    }
}

#[test]
fn weights_are_gathered_one_user_ahead_forward_and_again_backward() {
    let gathered = gather_weights(&model().expect("builds"), &MeshAxis::new("dp", 2)).expect("divides");
    let graph = gradient(&gathered, "loss", &float_weights(&gathered)).expect("differentiates");
    let again = gather_again(&graph).expect("is consistent");
    let order = [
        "gather embedding",
        "gather layers.0",
        "use ",
        "gather layers.1",
        "use layers.0",
        "gather head",
        "use layers.1",
        "gather head",
        "use ",
        "gather layers.1",
        "use ",
        "gather layers.0",
        "use layers.1",
        "use layers.0",
    ];
    assert_eq!(gathers_and_users(&again), order);
    // Nothing merges them.
    let mut tidied = again.clone();
    ridge_graph::passes::tidy(&mut tidied);
    assert_eq!(gathers_and_users(&tidied), order);
}

#[test]
fn weights_that_do_not_divide_or_are_stored_in_a_format_are_named() {
    let graph = model().expect("builds");
    let error = gather_weights(&graph, &MeshAxis::new("dp", 3)).unwrap_err().to_string();
    assert!(error.starts_with("embedding: f32[8, 4]: no axis divides over the 3 ranks of `dp`"), "{error}");
}

//! Sharding over two axes, and the communication that training's placements lead to.

use crate::support::sharding::{assert_close, assert_same, collectives, normal, tp};
use ridge_graph::sample::Rng;
use ridge_graph::shard::{MeshAxis, Placement, shard, slice_for_rank, unite};
use ridge_graph::{
    Arg, Bindings, Builder, CollectiveKind, DType, Graph, Op, Precision, Prim, Result, Tensor, Type, Value, Var,
    evaluate, evaluate_mesh,
};

fn f32s(shape: &[usize]) -> Type {
    Type::tensor(DType::F32, ridge_graph::Shape::new(shape.iter().copied()))
}

fn graph(build: impl FnOnce(&mut Builder) -> Result<Vec<(String, Var)>>) -> Graph {
    let mut g = Builder::new();
    let outputs = build(&mut g).expect("builds");
    g.finish(outputs).expect("finishes")
}

fn random_args(graph: &Graph) -> Vec<(String, Value)> {
    let mut rng = Rng::new(7);
    let mut value = |ty: &Type| match ty.dtype {
        DType::F32 => normal(&mut rng, &ty.shape.as_const().expect("constant")),
        dtype => rng.integers(dtype, &ty.shape.as_const().expect("constant"), 0, 6),
    };
    graph.main().args.iter().map(|a| (a.name.to_string(), value(&a.ty).into())).collect()
}

/// A gated MLP with residual, and the mean square of what it gives.
fn mlp() -> Graph {
    graph(|g| {
        let x = g.step_input("x", f32s(&[4, 8]))?;
        let (gate, up) = (g.weight("gate", f32s(&[16, 8]))?, g.weight("up", f32s(&[16, 8]))?);
        let down = g.weight("down", f32s(&[8, 16]))?;
        let (a, b) = (g.linear(x, gate)?, g.linear(x, up)?);
        let m = g.swiglu(a, b)?;
        let y = g.linear(m, down)?;
        let y = g.add(x, y)?;
        let square = g.mul(y, y)?;
        let loss = g.reshape(square, [32usize])?;
        let loss = g.reduce_sum(loss, 0)?;
        Ok(vec![("y".into(), y), ("loss".into(), loss)])
    })
}

#[test]
fn axes_are_applied_one_after_another() {
    let graph = mlp();
    let (tp, dp) = (MeshAxis::new("tp", 2), MeshAxis::new("dp", 4));
    let by_columns = |arg: &Arg| match &*arg.name {
        "gate" | "up" => Placement::shard(0),
        "down" => Placement::shard(1),
        _ => Placement::Replicate,
    };
    let by_tokens = |arg: &Arg| if &*arg.name == "x" { Placement::shard(0) } else { Placement::Replicate };
    let inner = shard(&graph, &tp, &by_columns, &|_| false).expect("tensor parallel");
    let both = shard(&inner.graph, &dp, &by_tokens, &|_| false).expect("then data parallel");
    assert_eq!(both.outputs, [Placement::shard(0), Placement::Replicate]);
    assert_eq!(collectives(&both.graph)[0].1, ["all_reduce", "all_reduce"]);

    let args = random_args(&graph);
    let find = |name: &str| args.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone());
    let none = Bindings::new();
    let whole = evaluate(&graph, &|arg| find(&arg.name), &none, Precision::Exact).expect("evaluates");
    let share = |rank: usize, arg: &Arg| {
        let value = slice_for_rank(&find(&arg.name)?, by_columns(arg), &tp, rank % 2).ok()?;
        slice_for_rank(&value, by_tokens(arg), &dp, rank / 2).ok()
    };
    let by_rank =
        evaluate_mesh(&both.graph, &[("dp", 4), ("tp", 2)], &share, &none, Precision::Exact).expect("evaluates");
    for tp_rank in 0..2 {
        for (i, placement) in both.outputs.iter().enumerate() {
            let parts: Vec<Tensor> = (0..4).map(|r| by_rank[r * 2 + tp_rank][i].1.tensor().clone()).collect();
            assert_close(&whole[i].0, &unite(&parts, *placement), whole[i].1.tensor());
        }
    }
}

#[test]
fn a_gradient_of_cut_tokens_meets_a_cut_moment_in_one_reduce_scatter() {
    // Rajbhandari et al. 2020, "ZeRO", stage 1: each rank keeps its part of the optimiser's state.
    let graph = graph(|g| {
        let (x, dy) = (g.step_input("x", f32s(&[6, 8]))?, g.step_input("dy", f32s(&[6, 4]))?);
        let moment = g.state("moment", Type::state(DType::F32, [4usize, 8]))?;
        let grad = g.matmul(dy, x, true, false, DType::F32)?;
        let old = g.state_read(moment)?;
        let beta = g.constant(DType::F32, 0.9)?;
        let kept = g.mul(old, beta)?;
        let new = g.add(kept, grad)?;
        g.state_write(moment, new)?;
        Ok(vec![])
    });
    let place = |_: &Arg| Placement::shard(0);
    let sharded = shard(&graph, &tp(), &place, &|_| false).expect("shards");
    assert_eq!(collectives(&sharded.graph)[0].1, ["reduce_scatter"]);
    assert_same("moment", &graph, &sharded, &tp(), &random_args(&graph));
}

#[test]
fn rows_added_to_zeros_are_summands_of_an_embedding_gradient() {
    let graph = graph(|g| {
        let dy = g.step_input("dy", f32s(&[4, 3]))?;
        let ids = g.step_input("ids", Type::tensor(DType::I32, [4usize]))?;
        let table = g.weight("table", f32s(&[5, 3]))?;
        let zeros = g.full_like(table, 0.0)?;
        let grad = g.scatter_add(zeros, ids, dy, 0)?;
        Ok(vec![("grad".into(), grad)])
    });
    let place = |arg: &Arg| if &*arg.name == "table" { Placement::Replicate } else { Placement::shard(0) };
    let sharded = shard(&graph, &tp(), &place, &|_| false).expect("shards");
    assert_eq!(collectives(&sharded.graph)[0].1, ["all_reduce"]);
    assert_same("grad", &graph, &sharded, &tp(), &random_args(&graph));
}

#[test]
fn what_repeats_along_the_cut_is_made_locally() {
    let graph = graph(|g| {
        let x = g.step_input("x", f32s(&[4, 6]))?;
        let bias = g.weight("bias", f32s(&[6]))?;
        let two = g.full_like(x, 2.0)?;
        let bias = g.broadcast(bias, [4usize, 6])?;
        let both = g.mul(two, bias)?;
        let y = g.add(x, both)?;
        let column = g.iota([4usize, 6], 1, DType::F32)?;
        let y = g.mul(y, column)?;
        Ok(vec![("y".into(), y)])
    });
    let place = |arg: &Arg| if &*arg.name == "x" { Placement::shard(0) } else { Placement::Replicate };
    let sharded = shard(&graph, &tp(), &place, &|_| false).expect("shards");
    assert_eq!((collectives(&sharded.graph)[0].1.len(), sharded.outputs[0]), (0, Placement::shard(0)));
    assert_same("y", &graph, &sharded, &tp(), &random_args(&graph));
    // Along the other axis it varies, and each rank takes its part of it.
    let columns = |arg: &Arg| if &*arg.name == "x" { Placement::shard(1) } else { Placement::Replicate };
    let sharded = shard(&graph, &tp(), &columns, &|_| false).expect("shards");
    assert_eq!((&collectives(&sharded.graph)[0].1, sharded.outputs[0]), (&vec!["split"; 2], Placement::shard(1)));
    assert_eq!(sharded.graph.cost().bytes_sent.as_const(), Some(0));
    assert_same("y", &graph, &sharded, &tp(), &random_args(&graph));
}

#[test]
fn a_value_is_converted_once_for_all_its_uses() {
    let graph = graph(|g| {
        let x = g.step_input("x", f32s(&[4, 6]))?;
        let sum = g.reduce_sum(x, 0)?;
        let (a, b) = (g.exp(sum)?, g.tanh(sum)?);
        let c = g.mul(a, b)?;
        Ok(vec![("sum".into(), sum), ("c".into(), c)])
    });
    let sharded = shard(&graph, &tp(), &|_| Placement::shard(0), &|_| false).expect("shards");
    assert_eq!(collectives(&sharded.graph)[0].1, ["all_reduce"]);
    assert_same("sum", &graph, &sharded, &tp(), &random_args(&graph));
}

#[test]
fn collectives_carry_the_axis_and_its_ranks() {
    let sharded = shard(
        &mlp(),
        &MeshAxis::new("dp", 4),
        &|arg| {
            if &*arg.name == "x" { Placement::shard(0) } else { Placement::Replicate }
        },
        &|output| &*output.name == "y",
    )
    .expect("shards");
    let found: Vec<&Prim> = sharded
        .graph
        .main()
        .nodes
        .iter()
        .filter_map(|n| match &n.op {
            Op::Prim(p @ Prim::Collective { .. }) => Some(p),
            _ => None,
        })
        .collect();
    let of = |kind| Prim::Collective { kind, mesh: "dp".into(), ranks: 4 };
    assert_eq!(found, [&of(CollectiveKind::AllGather(0)), &of(CollectiveKind::AllReduce)]);
}

#[test]
fn what_does_not_divide_says_what_would() {
    let graph = mlp();
    let refuse = |ranks, place: Placement| {
        let place = |arg: &Arg| if &*arg.name == "gate" { place } else { Placement::Replicate };
        shard(&graph, &MeshAxis::new("tp", ranks), &place, &|_| false).expect_err("does not fit").to_string()
    };
    assert_eq!(
        refuse(3, Placement::shard(0)),
        "gate: f32[16, 8]: axis 0 is 16 pieces of 1 element, too few or uneven for 3 ranks of `tp`; take a number of \
         ranks that divides 16, or replicate it"
    );
    assert!(refuse(2, Placement::Shard { dim: 0, multiple: 5 }).contains("not a multiple of 5"));
    assert!(refuse(2, Placement::shard(2)).contains("no axis 2"));
    assert!(refuse(0, Placement::Replicate).contains("no ranks"));
}

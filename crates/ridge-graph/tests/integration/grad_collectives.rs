//! Gradients of collectives: of a loss that all ranks share in, with respect to what each of them has, against finite
//! differences in f64.

use ridge_graph::grad::gradient;
use ridge_graph::sample::Rng;
use ridge_graph::{
    Arg, Bindings, Builder, CollectiveKind, DType, Graph, Precision, Prim, Tensor, Type, Value, evaluate_mesh,
};

const RANKS: usize = 3;
const SHAPE: [usize; 3] = [2, 6, 3];
const STEP: f64 = 1e-4;

/// Twice through the collective, with something that is not linear before, between and behind.
fn shared_loss(kind: CollectiveKind) -> Graph {
    let mut g = Builder::new();
    let x = g.weight("x", Type::tensor(DType::F32, SHAPE)).unwrap();
    let prim = || Prim::Collective { kind, mesh: "dp".into(), ranks: RANKS };
    let squared = g.mul(x, x).unwrap();
    let given = g.prim(prim(), &[squared]).unwrap()[0];
    let given = g.sin(given).unwrap();
    let weights = g.step_input("weights", g.ty(given).unwrap().clone()).unwrap();
    let mut loss = g.mul(given, weights).unwrap();
    for axis in 0..3 {
        loss = g.reduce_sum(loss, axis).unwrap();
    }
    let loss = g.reshape(loss, ridge_graph::Shape::default()).unwrap();
    g.finish(vec![("loss".into(), loss)]).unwrap()
}

/// Output `name` of every rank.
fn on_ranks(graph: &Graph, xs: &[Tensor], weights: &[Tensor], name: &str) -> Vec<Vec<f64>> {
    let given =
        |rank: usize, arg: &Arg| Some(Value::from(if &*arg.name == "x" { &xs[rank] } else { &weights[rank] }.clone()));
    let outputs = evaluate_mesh(graph, &[("dp", RANKS)], &given, &Bindings::new(), Precision::Exact).unwrap();
    let of_rank =
        |rank: &Vec<(String, Value)>| rank.iter().find(|(n, _)| n == name).unwrap().1.tensor().floats().to_vec();
    outputs.iter().map(of_rank).collect()
}

#[test]
fn gradients_are_the_slopes_of_what_all_ranks_lose() {
    let kinds = [
        CollectiveKind::AllReduce,
        CollectiveKind::AllGather(1),
        CollectiveKind::ReduceScatter(1),
        CollectiveKind::ReduceScatter(2),
        CollectiveKind::AllToAll { split: 1, concat: 0 },
        CollectiveKind::AllToAll { split: 1, concat: 1 },
        CollectiveKind::AllToAll { split: 2, concat: 1 },
        CollectiveKind::Broadcast(1),
        CollectiveKind::Reduce(2),
        CollectiveKind::Send { from: 0, to: 2 },
        CollectiveKind::Send { from: 1, to: 1 },
    ];
    for kind in kinds {
        let graph = shared_loss(kind);
        let with_gradient = gradient(&graph, "loss", &["x"]).unwrap();
        let mut rng = Rng::new(7);
        let mut ranks = |shape: &[usize]| (0..RANKS).map(|_| rng.normal(DType::F32, shape)).collect::<Vec<Tensor>>();
        let xs = ranks(&SHAPE);
        let given = graph.main().args.iter().find(|a| &*a.name == "weights").unwrap().ty.shape.as_const().unwrap();
        let weights = ranks(&given);
        let grads = on_ranks(&with_gradient, &xs, &weights, "grad.x");
        assert_eq!(grads[0].len(), SHAPE.iter().product::<usize>());
        let total = |xs: &[Tensor]| on_ranks(&graph, xs, &weights, "loss").concat().iter().sum::<f64>();
        for rank in 0..RANKS {
            for element in [0, 4, 17, 35] {
                let moved = |by: f64| {
                    let mut xs = xs.clone();
                    let mut floats = xs[rank].floats().to_vec();
                    floats[element] += by;
                    xs[rank].data = ridge_graph::Data::Float(floats);
                    total(&xs)
                };
                let slope = |step: f64| (moved(step) - moved(-step)) / (2.0 * step);
                let slope = (4.0 * slope(STEP / 2.0) - slope(STEP)) / 3.0;
                let got = grads[rank][element];
                assert!(
                    (got - slope).abs() < 1e-8 * (1.0 + slope.abs()),
                    "{kind:?}, rank {rank}: {got}, slope {slope}"
                );
            }
        }
    }
}

#[test]
fn every_collective_that_sends_has_a_transpose_whose_transpose_it_is() {
    for kind in [
        CollectiveKind::AllReduce,
        CollectiveKind::AllGather(1),
        CollectiveKind::AllToAll { split: 0, concat: 2 },
        CollectiveKind::Broadcast(1),
        CollectiveKind::Send { from: 0, to: 2 },
    ] {
        assert_eq!(kind.transpose().and_then(CollectiveKind::transpose), Some(kind));
    }
    assert_eq!(CollectiveKind::Split(0).transpose(), None);
}

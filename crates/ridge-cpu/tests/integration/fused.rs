//! Fused chains: what they are made of, rounding on the way, many live values, long rows and none.

use std::sync::Arc;

use crate::common::{Unclaimed, poisoned, run};
use ridge_graph::conformance::judge_graph;
use ridge_graph::sample::Rng;
use ridge_graph::{
    Arg, Bindings, Builder, Combine, DType, Graph, GroupKind, Op, Precision, Result, Role, Tensor, Type, Value, Var,
    evaluate,
};
use ridge_runtime::{Backend, lower};

fn finished(build: impl FnOnce(&mut Builder) -> Result<Vec<Var>>) -> Graph {
    let mut g = Builder::new();
    let outputs = build(&mut g).expect("builds");
    g.finish(outputs.into_iter().enumerate().map(|(i, v)| (i.to_string(), v)).collect()).expect("finishes")
}

fn value(arg: &Arg) -> Value {
    let shape = arg.ty.shape.as_const().expect("no symbols");
    let mut rng = Rng::new(arg.name.len() as u64);
    Value::Plain(if arg.ty.dtype.is_float() {
        rng.normal(arg.ty.dtype, &shape)
    } else {
        rng.integers(arg.ty.dtype, &shape, -50, 50)
    })
}

/// Launches of the lowered graph.
fn launches(graph: &Graph) -> usize {
    let names: Vec<&str> = graph.main().outputs.iter().filter(|o| o.role == Role::Data).map(|o| &*o.name).collect();
    let lowered = lower(graph, &names, &[]).expect("lowers");
    let fused = |op: &Op| matches!(op, Op::Group(group) if group.kind == GroupKind::Fused);
    assert!(lowered.main().nodes.iter().all(|n| fused(&n.op) || matches!(n.op, Op::Arg(_))), "{lowered}");
    lowered.main().nodes.iter().filter(|n| fused(&n.op)).count()
}

fn results(graph: &Graph) -> Vec<Tensor> {
    let backend: Arc<dyn Backend> = Arc::new(Unclaimed(poisoned(2)));
    run(&backend, graph, &Bindings::new(), &value).expect("runs")
}

fn right(graph: &Graph) {
    if let Err(why) = judge_graph(graph, &|arg| Some(value(arg)), &Bindings::new(), &results(graph)) {
        panic!("{why:.600} in\n{graph}");
    }
}

#[test]
fn every_op_of_a_chain_rounds_to_its_dtype() {
    for dtype in [DType::BF16, DType::F16, DType::F8E4M3, DType::F8E5M2] {
        let graph = finished(|g| {
            let ty = Type::tensor(dtype, [5usize, 700]);
            let (a, b) = (g.step_input("a", ty.clone())?, g.step_input("bb", ty)?);
            let mut x = a;
            for i in 0..40 {
                x = if i % 2 == 0 { g.mul(x, b)? } else { g.add(x, a)? };
                x = g.min(x, a)?;
            }
            Ok(vec![x])
        });
        assert_eq!(launches(&graph), 1);
        let meaning =
            evaluate(&graph, &|arg| Some(value(arg)), &Bindings::new(), Precision::Rounded).expect("evaluates");
        let got = results(&graph);
        let pairs = got[0].floats().iter().zip(meaning[0].1.tensor().floats());
        let wrong = pairs.enumerate().find(|(_, (a, b))| a != b && !(a.is_nan() && b.is_nan()));
        assert_eq!(wrong, None, "{dtype}");
    }
}

#[test]
fn many_values_are_alive_at_once() {
    let graph = finished(|g| {
        let x = g.step_input("x", Type::tensor(DType::F32, [3usize, 1111]))?;
        let mut all = vec![x];
        for i in 0..120 {
            let c = g.constant(DType::F32, f64::from(i) / 7.0)?;
            let next = g.add(all[all.len() - 1], c)?;
            all.push(if i % 3 == 0 { g.cos(next)? } else { next });
        }
        // Each is read again, last first.
        let mut sum = x;
        for v in all.into_iter().rev() {
            sum = g.sub(sum, v)?;
        }
        Ok(vec![sum])
    });
    assert_eq!(launches(&graph), 1);
    right(&graph);
}

#[test]
fn rows_of_any_length_are_reduced_within_a_chain() {
    for shape in [[3, 0], [0, 7], [7, 1], [1, 1], [1000, 3], [5, 1023], [4, 1025], [2, 30_000]] {
        let graph = finished(|g| {
            let x = g.step_input("x", Type::tensor(DType::F32, shape))?;
            let largest = g.reduce_max(x, 1)?;
            let below = g.sub(x, largest)?;
            let weight = g.exp(below)?;
            let total = g.reduce_sum(weight, 1)?;
            let least = g.reduce(Combine::Min, weight, 1)?;
            let share = g.div(weight, total)?;
            Ok(vec![share, largest, least])
        });
        assert_eq!(launches(&graph), 1, "{shape:?}");
        right(&graph);
    }
}

#[test]
fn integers_and_truths_mix_with_floats() {
    let graph = finished(|g| {
        let x = g.step_input("x", Type::tensor(DType::F32, [6usize, 5, 40]))?;
        let n = g.step_input("nn", Type::tensor(DType::I64, [5usize, 1]))?;
        let place = g.iota([6usize, 5, 40], 2, DType::I64)?;
        let before = g.lt(place, n)?;
        let limit = g.constant(DType::F32, 0.25)?;
        let small = g.lt(x, limit)?;
        let both = g.and(before, small)?;
        let neither = g.or(before, small)?;
        let neither = g.not(neither)?;
        let wide = g.cast(x, DType::I8)?;
        let wide = g.cast(wide, DType::I64)?;
        let sum = g.add(wide, place)?;
        let chosen = g.select(both, sum, place)?;
        let any = g.reduce(Combine::Max, neither, 2)?;
        let count = g.cast(both, DType::I32)?;
        let count = g.reduce_sum(count, 2)?;
        let back = g.cast(chosen, DType::BF16)?;
        Ok(vec![chosen, any, count, back, neither])
    });
    assert_eq!(launches(&graph), 1);
    right(&graph);
}

#[test]
fn operands_are_read_through_broadcasts_over_any_axes() {
    let graph = finished(|g| {
        let shape = [4usize, 3, 5, 70];
        let x = g.step_input("x", Type::tensor(DType::F32, shape))?;
        let mut y = x;
        for (i, of) in
            [&[][..], &[70], &[5, 1], &[3, 1, 70], &[4, 1, 5, 1], &[1, 3, 1, 1], &[4, 3, 1, 70]].into_iter().enumerate()
        {
            let ty = Type::tensor(DType::F32, ridge_graph::Shape::new(of.iter().copied()));
            let b = g.step_input(&"b".repeat(i + 2), ty)?;
            y = if i % 2 == 0 { g.mul(y, b)? } else { g.add(y, b)? };
        }
        Ok(vec![y])
    });
    assert_eq!(launches(&graph), 1);
    right(&graph);
}

//! The second stage of fusion, against the meaning of what it fuses.

mod states;

use super::fuse_views;
use super::open::MAX_INPUTS;
use crate::conformance::all_samples;
use crate::dim::Bindings;
use crate::dtype::DType;
use crate::eval::{Precision, evaluate};
use crate::graph::{Arg, Builder, Graph, GroupKind, Op};
use crate::passes::{decompose, fuse, tidy};
use crate::sample::Rng;
use crate::shape::Shape;
use crate::tensor::{Tensor, Value};
use crate::types::Type;

/// `graph` after the first stage of fusion.
fn lowered(graph: &Graph) -> Graph {
    let mut graph = graph.clone();
    while decompose(&mut graph, |_| false).expect("decomposes") {
        tidy(&mut graph);
    }
    fuse(&mut graph);
    tidy(&mut graph);
    graph
}

fn fused(graph: &Graph) -> Graph {
    let mut graph = lowered(graph);
    fuse_views(&mut graph);
    graph
}

/// Nodes other than arguments.
fn launches(graph: &Graph) -> Vec<&str> {
    let nodes = graph.main().nodes.iter().filter(|n| !matches!(n.op, Op::Arg(_)));
    nodes.map(crate::graph::Node::op_name).collect()
}

#[test]
fn every_op_means_the_same_with_its_views_fused() {
    for dtype in [DType::F32, DType::BF16] {
        for (name, sample) in all_samples(dtype, 11) {
            let graph = sample.graph().expect("builds");
            let value = |arg: &Arg| Some(sample.inputs[arg.name.parse::<usize>().expect("a number")].clone());
            let run = |graph: &Graph| {
                let outputs = evaluate(graph, &value, &Bindings::new(), Precision::Rounded);
                outputs.unwrap_or_else(|why| panic!("{name}: {why}\n{graph}"))
            };
            let bits = |outputs: Vec<(String, Value)>| {
                outputs.into_iter().map(|(name, v)| (name, v.tensor().to_bytes())).collect::<Vec<_>>()
            };
            let mut open = graph.clone();
            while decompose(&mut open, |_| false).expect("decomposes") {}
            assert_eq!(bits(run(&fused(&graph))), bits(run(&open)), "{name} in {dtype}");
        }
    }
}

#[test]
fn views_around_a_product_take_one_launch_ahead_of_it_and_one_behind() {
    let mut g = Builder::new();
    let (tokens, heads, width) = (3, 4, 8);
    let x = g.step_input("x", Type::tensor(DType::BF16, [tokens, 2 * heads * width])).expect("fresh");
    let w = g.weight("w", Type::tensor(DType::F32, [heads, width, width])).expect("fresh");
    let mut build = || {
        let halves = [g.slice(x, 1, 0, heads * width)?, g.slice(x, 1, heads * width, heads * width)?];
        let a = g.reshape(halves[0], Shape::new([tokens, heads, width]))?;
        let a = g.transpose(a, &[1, 0, 2])?;
        let a = g.cast(a, DType::F32)?;
        let gate = g.sigmoid(halves[1])?;
        let y = g.matmul(a, w, false, false, DType::F32)?;
        let y = g.transpose(y, &[1, 0, 2])?;
        let y = g.reshape(y, Shape::new([tokens, heads * width]))?;
        let y = g.cast(y, DType::BF16)?;
        let y = g.mul(y, gate)?;
        let sorted = g.sort(y, 1, true, 3)?;
        Ok::<_, crate::error::GraphError>((sorted.0, gate))
    };
    let (y, gate) = build().expect("builds");
    let graph = g.finish(vec![("y".into(), y), ("gate".into(), gate)]).expect("finishes");
    assert_eq!(launches(&fused(&graph)), ["fused", "matmul", "fused", "sort"]);
}

#[test]
fn what_is_read_of_a_state_is_read_before_its_update() {
    let mut g = Builder::new();
    let x = g.step_input("x", Type::tensor(DType::F32, [2, 6])).expect("fresh");
    let s = g.state("s", Type::state(DType::F32, [2, 6])).expect("fresh");
    let old = g.state_read(s).expect("reads");
    let part = g.slice(old, 1, 0, 3).expect("slices");
    let mut sorted = g.sort(x, 1, true, 6).expect("sorts").0;
    sorted = g.add(sorted, old).expect("adds");
    g.state_write(s, sorted).expect("writes");
    // Behind the update in the program, and before it in the order that fusion gives.
    let part = g.neg(part).expect("negates");
    let part = g.concat(&[part, part], 1).expect("joins");
    let graph = g.finish(vec![("part".into(), part)]).expect("finishes");
    let lowered = fused(&graph);
    let mut rng = Rng::new(3);
    let (x, old) = (rng.normal(DType::F32, &[2, 6]), rng.normal(DType::F32, &[2, 6]));
    let value = |arg: &Arg| Some(Value::from(if &*arg.name == "x" { x.clone() } else { old.clone() }));
    let run = |graph: &Graph| -> Vec<Tensor> {
        let outputs = evaluate(graph, &value, &Bindings::new(), Precision::Rounded).expect("evaluates");
        outputs.into_iter().map(|(_, v)| v.tensor().clone()).collect()
    };
    assert_eq!(run(&lowered), run(&graph));
    let main = lowered.main();
    let update = main.nodes.iter().position(|n| n.outputs.iter().any(|t| t.state) && !matches!(n.op, Op::Arg(_)));
    let fused = main.nodes.iter().rposition(|n| matches!(&n.op, Op::Group(g) if g.kind == GroupKind::Fused));
    assert!(fused < update, "{lowered}");
}

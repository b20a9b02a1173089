//! Random numbers keyed by seed, step and call path: what dropout drops, forwards, backwards, again and on a mesh.

use crate::support::gradients::{floats, run, total};
use crate::support::sharding::{assert_same, tp};
use ridge_graph::grad::{float_weights, gradient};
use ridge_graph::sample::Rng;
use ridge_graph::shard::{Placement, shard};
use ridge_graph::{Arg, Bindings, Builder, DType, Dim, FuncId, Graph, Result, Role, Shape, Tensor, Type, Value, Var};

const ROWS: usize = 64;
const COLUMNS: usize = 96;
const RATE: f64 = 0.25;
const LAYERS: usize = 4;

fn x_type() -> Type {
    Type::tensor(DType::F32, [ROWS, COLUMNS])
}

/// Drops twice in one scope, and gives both.
fn layer(g: &mut Builder) -> Result<FuncId> {
    let half = g.function("half", |g| {
        let x = g.arg("x", x_type());
        Ok(vec![g.dropout(x, RATE)?])
    })?;
    g.function("layer", |g| {
        let x = g.arg("x", x_type());
        let first = g.dropout(x, RATE)?;
        let second = g.dropout(x, RATE)?;
        // A function that calls functions: both calls are in one scope.
        let mut inner = g.scoped("mlp", |g| g.call(half, &[x]))?;
        inner.extend(g.scoped("mlp", |g| g.call(half, &[x]))?);
        Ok([vec![first, second], inner].concat())
    })
}

/// Masks of several calls of `layer`, then of main itself: each the dropout of its own weight `w.<n>`.
fn masks() -> Graph {
    let mut g = Builder::new();
    let layer = layer(&mut g).unwrap();
    let mut outputs = Vec::new();
    let mut loss = g.constant(DType::F32, 0.0).unwrap();
    let mut give = |g: &mut Builder, y: Var| {
        let part = total(g, y).unwrap();
        loss = g.add(loss, part).unwrap();
        outputs.push((format!("y.{}", outputs.len()), y));
    };
    for i in 0..LAYERS {
        let w = g.weight(&format!("w.{i}"), x_type()).unwrap();
        for y in g.scoped(&format!("layers.{i}"), |g| g.call(layer, &[w])).unwrap() {
            give(&mut g, y);
        }
    }
    let w = g.weight("w.main", x_type()).unwrap();
    let y = g.dropout(w, RATE).unwrap();
    give(&mut g, y);
    outputs.push(("loss".into(), loss));
    g.finish(outputs).unwrap()
}

fn scalar(value: i64) -> Value {
    Tensor::int(DType::I64, &[], vec![value]).into()
}

/// Every float argument is ones, so that outputs are masks times the scale.
fn given(graph: &Graph, seed: i64, step: i64) -> Vec<(String, Value)> {
    let value = |arg: &Arg| match &*arg.name {
        Builder::RANDOM_SEED => scalar(seed),
        Builder::RANDOM_STEP => scalar(step),
        _ => {
            let shape = arg.ty.shape.as_const().unwrap();
            let count = shape.iter().product();
            Tensor::float(arg.ty.dtype, &shape, vec![1.0; count]).into()
        }
    };
    graph.main().args.iter().map(|arg| (arg.name.to_string(), value(arg))).collect()
}

fn masks_of(graph: &Graph, seed: i64, step: i64) -> Vec<Vec<f64>> {
    let outputs = run(graph, &given(graph, seed, step), &Bindings::new()).unwrap();
    (0..4 * LAYERS + 1).map(|i| floats(&outputs, &format!("y.{i}"))).collect()
}

#[test]
fn each_call_and_each_use_drops_other_elements_at_the_rate() {
    let graph = masks();
    assert_eq!(graph.functions.len(), 3, "each function is there once");
    assert!(graph.main().args.iter().all(|arg| arg.role != Role::Key), "main has step inputs for it");
    let all = masks_of(&graph, 7, 0);
    let scale = 1.0 / (1.0 - RATE);
    let n = (ROWS * COLUMNS) as f64;
    for (i, mask) in all.iter().enumerate() {
        assert!(mask.iter().all(|y| *y == 0.0 || (*y - scale).abs() < 1e-12), "mask {i}");
        let dropped = mask.iter().filter(|y| **y == 0.0).count() as f64;
        let deviation = (n * RATE * (1.0 - RATE)).sqrt();
        assert!((dropped - n * RATE).abs() < 5.0 * deviation, "mask {i} drops {dropped} of {n}");
        // Of independent masks, as many agree as chance has it.
        for (j, other) in all[..i].iter().enumerate() {
            let agree = mask.iter().zip(other).filter(|(a, b)| a == b).count() as f64;
            let expected = RATE * RATE + (1.0 - RATE) * (1.0 - RATE);
            let deviation = (n * expected * (1.0 - expected)).sqrt();
            assert!((agree - n * expected).abs() < 5.0 * deviation, "masks {i} and {j} agree in {agree} of {n}");
        }
    }
}

#[test]
fn a_mask_is_a_function_of_seed_and_step() {
    let graph = masks();
    let first = masks_of(&graph, 7, 3);
    assert_eq!(masks_of(&masks(), 7, 3), first, "the same seed and step, in a graph built again");
    // Seeds and steps that differ in their high words alone too.
    for (seed, step) in [(7, 4), (8, 3), (7 + (1 << 40), 3), (7, 3 + (1 << 33)), (3, 7), (-7, 3)] {
        let other = masks_of(&graph, seed, step);
        assert!(first.iter().zip(&other).all(|(a, b)| a != b), "seed {seed}, step {step}");
    }
}

#[test]
fn the_backward_pass_drops_what_the_forward_pass_dropped() {
    let graph = masks();
    let wrt = float_weights(&graph);
    let step = gradient(&graph, "loss", &wrt).unwrap();
    assert!(step.functions.iter().any(|f| &*f.name == "layer_bwd"), "{step}");
    let outputs = run(&step, &given(&step, 11, 2), &Bindings::new()).unwrap();
    for (i, name) in wrt.iter().enumerate() {
        // The loss sums all masks of a weight of ones, so its gradient is the sum of the masks.
        let masks = if i < LAYERS { 4 * i..4 * i + 4 } else { 4 * LAYERS..4 * LAYERS + 1 };
        let mut sum = vec![0.0; ROWS * COLUMNS];
        for mask in masks {
            let mask = floats(&outputs, &format!("y.{mask}"));
            sum.iter_mut().zip(mask).for_each(|(s, m)| *s += m);
        }
        let got = floats(&outputs, &format!("grad.{name}"));
        assert!(got.iter().zip(&sum).all(|(a, b)| (a - b).abs() < 1e-9), "{name}");
    }
}

#[test]
fn a_graph_gone_on_with_has_other_keys() {
    let mut g = Builder::new();
    let x = g.step_input("x", x_type()).unwrap();
    let y = g.dropout(x, RATE).unwrap();
    let (mut g, outputs) = Builder::reopen(g.finish(vec![("y.0".into(), y)]).unwrap());
    let x = g.step_input("x", x_type()).unwrap();
    let y = g.dropout(x, RATE).unwrap();
    let graph = g.finish(outputs.into_iter().chain([("y.1".into(), y)]).collect()).unwrap();
    let outputs = run(&graph, &given(&graph, 1, 1), &Bindings::new()).unwrap();
    assert_ne!(floats(&outputs, "y.0"), floats(&outputs, "y.1"));
}

#[test]
fn ranks_drop_what_one_device_would() {
    for cut in [Placement::shard(0), Placement::shard(1), Placement::shard(2), Placement::Replicate] {
        let mut g = Builder::new();
        let ty = Type::tensor(DType::F32, [4, 6, 8]);
        let layer = g.function("layer", |g| {
            let x = g.arg("x", ty.clone());
            let x = g.dropout(x, RATE)?;
            Ok(vec![g.scoped("out", |g| g.dropout(x, RATE))?])
        });
        let mut x = g.step_input("x", ty.clone()).unwrap();
        for i in 0..2 {
            x = g.scoped(&format!("layers.{i}"), |g| g.call(*layer.as_ref().unwrap(), &[x])).unwrap()[0];
        }
        let graph = g.finish(vec![("y".into(), x)]).unwrap();
        let place = |arg: &Arg| if &*arg.name == "x" { cut } else { Placement::Replicate };
        let sharded = shard(&graph, &tp(), &place, &|_| false).unwrap();
        assert_eq!(sharded.outputs, [cut], "x is not gathered");
        let mut args = given(&graph, 5, 9);
        args.iter_mut().filter(|(name, _)| name == "x").for_each(|(_, x)| {
            *x = Rng::new(3).normal(DType::F32, &[4, 6, 8]).into();
        });
        assert_same(&format!("{cut}"), &graph, &sharded, &tp(), &args);
    }
}

#[test]
fn rows_are_counted_over_symbolic_extents() {
    let mut g = Builder::new();
    let (a, b) = (Dim::sym("a"), Dim::sym("b"));
    let x = g.step_input("x", Type::tensor(DType::F32, [a, b.clone(), 5.into()])).unwrap();
    let y = g.dropout(x, 0.5).unwrap();
    let flat = g.step_input("flat", Type::tensor(DType::F32, [b * 3, 5.into()])).unwrap();
    let same_key = g.dropout(flat, 0.5).unwrap();
    let graph = g.finish(vec![("y".into(), y), ("flat".into(), same_key)]).unwrap();
    let ones = |shape: &[usize]| Value::from(Tensor::float(DType::F32, shape, vec![1.0; shape.iter().product()]));
    let inputs = vec![
        ("x".to_owned(), ones(&[3, 7, 5])),
        ("flat".to_owned(), ones(&[21, 5])),
        (Builder::RANDOM_SEED.to_owned(), scalar(1)),
        (Builder::RANDOM_STEP.to_owned(), scalar(1)),
    ];
    let outputs = run(&graph, &inputs, &Bindings::new().with("a", 3).with("b", 7)).unwrap();
    let y = floats(&outputs, "y");
    let rows: Vec<&[f64]> = y.chunks(5).collect();
    assert_eq!(rows.len(), 21);
    let distinct: std::collections::HashSet<Vec<u64>> =
        rows.iter().map(|row| row.iter().map(|y| y.to_bits()).collect()).collect();
    assert!(distinct.len() > 10, "rows of several axes have keys of their own");
    assert_ne!(y, floats(&outputs, "flat"), "two uses have keys of their own");
}

#[test]
fn mistakes_are_refused_by_name() {
    let mut g = Builder::new();
    let scalar = g.constant(DType::F32, 1.0).unwrap();
    let refused = g.dropout(scalar, 0.5).unwrap_err().to_string();
    assert!(refused.contains("scalar"), "{refused}");
    let x = g.step_input("x", x_type()).unwrap();
    for rate in [1.0, -0.1, f64::NAN] {
        let refused = g.dropout(x, rate).unwrap_err().to_string();
        assert!(refused.contains("at least 0 and below 1"), "{refused}");
    }
    let mut g = Builder::new();
    g.step_input(Builder::RANDOM_STEP, Type::tensor(DType::I32, Shape::default())).unwrap();
    let refused = g.random_key().unwrap_err().to_string();
    assert!(refused.contains(Builder::RANDOM_STEP), "{refused}");
}

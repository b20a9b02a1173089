//! What is joined, and that it means the same.

use super::*;
use crate::dim::Bindings;
use crate::error::Result;
use crate::eval::{Precision, evaluate};
use crate::grad::gradient;
use crate::graph::{Arg, Builder};
use crate::passes::{Pattern, decompose, tidy};
use crate::sample::Rng;
use crate::shape::Shape;
use crate::tensor::Value;
use crate::types::Type;

const SHAPE: [usize; 2] = [3, 8];

fn kernels() -> Vec<Kernel> {
    ["layer_norm_gradients(x, w, ...)", "rms_norm_gradients(x, w, ...)"]
        .map(|pattern| Kernel::at_roofline("gradients", Pattern::parse(pattern), |_| true))
        .into()
}

fn values(graph: &Graph) -> Vec<(String, Vec<f64>)> {
    let value = |arg: &Arg| {
        let seed = arg.name.bytes().fold(7, |seed, byte| seed * 31 + u64::from(byte));
        let shape = arg.ty.shape.as_const().expect("fixed shapes");
        Some(Value::Plain(Rng::new(seed).normal(arg.ty.dtype, &shape)))
    };
    let all = evaluate(graph, &value, &Bindings::new(), Precision::Exact).expect("evaluates");
    all.into_iter().map(|(name, value)| (name, value.tensor().floats().to_vec())).collect()
}

/// The joined gradients of `graph`, which must mean the same joined, and opened again.
fn joined(graph: &Graph) -> Vec<NormGradients> {
    let mut grouped = graph.clone();
    group_norm_gradients(&mut grouped, &kernels());
    let found = |graph: &Graph| -> Vec<NormGradients> {
        graph.functions.iter().flat_map(|f| &f.nodes).filter_map(|n| composite::<NormGradients>(n).copied()).collect()
    };
    let all = found(&grouped);
    let wanted = values(graph);
    assert_eq!(values(&grouped), wanted, "{grouped}");
    decompose(&mut grouped, |node| composite::<NormGradients>(node).is_none()).expect("decomposes");
    tidy(&mut grouped);
    assert!(found(&grouped).is_empty());
    assert_eq!(values(&grouped), wanted, "{grouped}");
    all
}

/// A graph of x, a weight, dy and r, of which `build` gives the outputs.
fn graph(build: impl FnOnce(&mut Builder, [Var; 4]) -> Result<Vec<Var>>) -> Graph {
    let mut g = Builder::new();
    let row = |g: &mut Builder, name: &str| g.arg(name, Type::tensor(DType::BF16, SHAPE));
    let (x, dy, r) = (row(&mut g, "x"), row(&mut g, "dy"), row(&mut g, "r"));
    let w = g.weight("w", Type::tensor(DType::BF16, [SHAPE[1]])).expect("is new");
    let outputs = build(&mut g, [x, w, dy, r]).expect("builds");
    let outputs = outputs.into_iter().enumerate().map(|(i, var)| (i.to_string(), var)).collect();
    g.finish(outputs).expect("finishes")
}

const EPS: f64 = 1e-5;

fn input(g: &mut Builder, centred: bool, [x, w, dy]: [Var; 3]) -> Result<Var> {
    Ok(g.composite(NormInputGradient { eps: EPS, centred }, &[x, w, dy])?[0])
}

fn weight(g: &mut Builder, centred: bool, [x, dy]: [Var; 2]) -> Result<Var> {
    Ok(g.composite(NormWeightGradient { eps: EPS, centred, dtype: DType::F32 }, &[x, dy])?[0])
}

fn sum(g: &mut Builder, dtype: DType, x: Var) -> Result<Var> {
    Ok(g.composite(SumRows { dtype }, &[x])?[0])
}

#[test]
fn all_parts_are_joined_whatever_their_order() {
    for centred in [false, true] {
        for swapped in [false, true] {
            let graph = graph(|g, [x, w, dy, r]| {
                let of_r = sum(g, DType::F16, r)?;
                let dw = weight(g, centred, [x, dy])?;
                let early = g.neg(dw)?;
                let dx = input(g, centred, [x, w, dy])?;
                let dx = if swapped { g.add(dx, r)? } else { g.add(r, dx)? };
                let all = sum(g, DType::F32, dx)?;
                let db = sum(g, DType::BF16, dy)?;
                Ok(vec![early, dx, db, all, of_r, dw])
            });
            let wanted = NormGradients {
                eps: EPS,
                centred,
                added: true,
                weight: DType::F32,
                bias: Some(DType::BF16),
                sum: Some(DType::F32),
                sum_added: Some(DType::F16),
            };
            assert_eq!(joined(&graph), [wanted]);
            let mut grouped = graph.clone();
            group_norm_gradients(&mut grouped, &[]);
            assert_eq!(grouped.to_string(), graph.to_string(), "no kernel takes it");
        }
    }
}

/// What is joined with the gradients to the input and to the weight: the addition, and the sums of dy, of the result and of r.
fn parts(graph: &Graph) -> Vec<[bool; 4]> {
    let all = joined(graph).into_iter();
    all.map(|op| [op.added, op.bias.is_some(), op.sum.is_some(), op.sum_added.is_some()]).collect()
}

#[test]
fn a_result_that_others_read_is_not_added() {
    let with = |read: fn(&mut Builder, Var) -> Result<Var>| {
        graph(|g, [x, w, dy, r]| {
            let (dx, dw) = (input(g, true, [x, w, dy])?, weight(g, true, [x, dy])?);
            let (added, other) = (g.add(r, dx)?, read(g, dx)?);
            let (of_dx, of_added) = (sum(g, DType::F32, dx)?, sum(g, DType::F32, added)?);
            Ok(vec![added, other, dw, of_dx, of_added])
        })
    };
    assert_eq!(parts(&with(|_, dx| Ok(dx))), [[false, false, true, false]]);
    assert_eq!(parts(&with(Builder::neg)), [[false, false, true, false]]);
    let twice = graph(|g, [x, w, dy, _]| {
        let (dx, dw) = (input(g, true, [x, w, dy])?, weight(g, true, [x, dy])?);
        Ok(vec![g.add(dx, dx)?, dw])
    });
    assert_eq!(parts(&twice), [[false; 4]]);
}

#[test]
fn what_depends_on_a_part_is_not_read_by_the_whole() {
    // What it is added to depends on the weight's gradient.
    let added = graph(|g, [x, w, dy, r]| {
        let (dx, dw) = (input(g, false, [x, w, dy])?, weight(g, false, [x, dy])?);
        let scale = g.cast(dw, DType::BF16)?;
        let r = g.mul(r, scale)?;
        let of_r = sum(g, DType::F32, r)?;
        Ok(vec![g.add(r, dx)?, of_r])
    });
    assert_eq!(parts(&added), [[false; 4]]);
    // dy depends on the sum of r.
    let before = graph(|g, [x, w, dy, r]| {
        let of_r = sum(g, DType::BF16, r)?;
        let dy = g.mul(dy, of_r)?;
        let (dx, dw) = (input(g, false, [x, w, dy])?, weight(g, false, [x, dy])?);
        Ok(vec![g.add(r, dx)?, dw])
    });
    assert_eq!(parts(&before), [[true, false, false, false]]);
}

#[test]
fn only_one_norm_of_one_cotangent_is_joined() {
    let apart = |build: fn(&mut Builder, [Var; 4]) -> Result<Var>| {
        let graph = graph(|g, all| {
            let [x, w, dy, _] = all;
            Ok(vec![input(g, true, [x, w, dy])?, build(g, all)?])
        });
        assert_eq!(joined(&graph), []);
    };
    apart(|g, [_, _, dy, r]| weight(g, true, [r, dy]));
    apart(|g, [x, _, _, r]| weight(g, true, [x, r]));
    apart(|g, [x, _, dy, _]| weight(g, false, [x, dy]));
    apart(|g, [x, _, dy, _]| {
        let op = NormWeightGradient { eps: 1e-6, centred: true, dtype: DType::BF16 };
        Ok(g.composite(op, &[x, dy])?[0])
    });
}

/// Three layers, each `x + linear(layer_norm(x))`, with biases.
#[test]
fn a_backward_pass_sums_the_rows_of_its_norms_in_their_gradients() {
    let mut g = Builder::new();
    let x = g.arg("x", Type::tensor(DType::F32, SHAPE));
    let width = SHAPE[1];
    let mut weights = Vec::new();
    let mut h = x;
    for layer in 0..3 {
        let mut new = |g: &mut Builder, name: &str, shape: &[usize]| {
            weights.push(format!("{name}{layer}"));
            g.weight(&format!("{name}{layer}"), Type::tensor(DType::F32, Shape::new(shape.iter().copied())))
                .expect("is new")
        };
        let (gain, shift) = (new(&mut g, "gain", &[width]), new(&mut g, "shift", &[width]));
        let (w, b) = (new(&mut g, "w", &[width, width]), new(&mut g, "b", &[width]));
        let normed = g.layer_norm(h, gain, shift, EPS).expect("normalises");
        let y = g.linear_bias(normed, w, Some(b)).expect("multiplies");
        h = g.add(h, y).expect("adds");
    }
    let square = g.mul(h, h).expect("multiplies");
    let sum = g.reduce_sum(square, 1).expect("sums");
    let loss = g.reduce_sum(sum, 0).expect("sums");
    let loss = g.reshape(loss, Shape::default()).expect("one element");
    let graph = g.finish(vec![("loss".into(), loss)]).expect("finishes");
    let mut graph = gradient(&graph, "loss", &weights).expect("differentiates");
    tidy(&mut graph);
    // The bias of the last layer gets the sum of what the last norm's gradient is added to. Nothing comes to x.
    let mut all = parts(&graph);
    all.sort_unstable();
    assert_eq!(all, [[true, true, true, false], [true, true, true, true]]);
}

//! Each kernel that claims several ops at once: small graphs with the ops in place, which the kernel must claim and
//! compute by the rule of tolerance, and graphs just beside the pattern, which it must leave.

use std::sync::Arc;

use crate::common::{Unclaimed, poisoned, run, same_bits};
use ridge_graph::conformance::judge_graph;
use ridge_graph::format::{Q8_0, ScaledFormat};
use ridge_graph::ops::{Rope, rope_frequencies};
use ridge_graph::passes::{Activations, round_activations};
use ridge_graph::sample::Rng;
use ridge_graph::{
    Arg, Bindings, Builder, DType, Dim, FormatRef, Graph, GroupKind, Op, Result, Role, Shape, Tensor, Type, Value, Var,
};
use ridge_runtime::{Backend, lower};

const FLOATS: [DType; 5] = [DType::F32, DType::BF16, DType::F16, DType::F8E4M3, DType::F8E5M2];

/// Values by the arguments' names: positions count up, slots are distinct and some are dropped.
fn value(arg: &Arg, rows: usize) -> Value {
    let salt = arg.name.bytes().fold(3u64, |h, b| h.wrapping_mul(31).wrapping_add(u64::from(b)));
    let mut rng = Rng::new(salt);
    let shape = arg.ty.shape.eval(&bindings(rows)).expect("rows is the only symbol");
    let tensor = match &*arg.name {
        "positions" => Tensor::int(DType::I32, &shape, (0..shape[0] as i64).map(|i| i * 7 % 50).collect()),
        "slots" => Tensor::int(
            DType::I32,
            &shape,
            (0..shape[0] as i64).map(|i| if i == 2 { -1 } else { i * 3 % 16 }).collect(),
        ),
        _ => rng.normal(arg.ty.dtype, &shape),
    };
    match &arg.ty.format {
        Some(format) => Value::stored(&tensor, format),
        None => Value::Plain(tensor),
    }
}

fn bindings(rows: usize) -> Bindings {
    Bindings::new().with("rows", rows)
}

/// The names of the kernels that claim something of the graph.
fn claimed(backend: &Arc<dyn Backend>, graph: &Graph) -> Vec<String> {
    let names: Vec<&str> = graph.main().outputs.iter().filter(|o| o.role == Role::Data).map(|o| &*o.name).collect();
    let lowered = lower(graph, &names, backend.kernels()).expect("lowers");
    let groups = lowered.main().nodes.iter().filter_map(|n| match &n.op {
        Op::Group(group) => match &group.kind {
            GroupKind::Kernel(name) => Some(name.to_string()),
            GroupKind::Fused => None,
        },
        _ => None,
    });
    groups.collect()
}

/// Builds a graph for each dtype and size, of which the first is the number bound to the symbol `rows`, and requires
/// that `kernels` claim it and that it is right.
fn holds(kernels: &[&str], sizes: &[[usize; 3]], build: impl Fn(&mut Builder, DType, [usize; 3]) -> Result<Vec<Var>>) {
    holds_taking(Activations::Exact, kernels, sizes, build);
}

/// As [`holds`], where products by weights in formats take activations so.
fn holds_taking(
    activations: Activations,
    kernels: &[&str],
    sizes: &[[usize; 3]],
    build: impl Fn(&mut Builder, DType, [usize; 3]) -> Result<Vec<Var>>,
) {
    let backends = [poisoned(1), poisoned(3)];
    let decomposed: Arc<dyn Backend> = Arc::new(Unclaimed(Arc::clone(&backends[0])));
    for dtype in FLOATS {
        for size in sizes {
            let mut g = Builder::new();
            let outputs = build(&mut g, dtype, *size).expect("builds");
            let named = outputs.into_iter().enumerate().map(|(i, v)| (i.to_string(), v)).collect();
            let mut graph = g.finish(named).expect("finishes");
            round_activations(&mut graph, activations);
            let mut found = claimed(&backends[0], &graph);
            found.sort_unstable();
            assert_eq!(found, kernels, "{graph}");
            let (bindings, value) = (bindings(size[0]), |arg: &Arg| value(arg, size[0]));
            let of = |backend| run(backend, &graph, &bindings, &value).expect("runs");
            let got = of(&backends[0]);
            let judged = |got: &[Tensor], how: &str| {
                if let Err(why) = judge_graph(&graph, &|arg| Some(value(arg)), &bindings, got) {
                    panic!("{kernels:?} {how}, {dtype} {size:?}: {why:.600}");
                }
            };
            judged(&got, "claimed");
            assert!(same_bits(&got, &of(&backends[1])), "{kernels:?}, {dtype} {size:?}: threads change the result");
            judged(&of(&decomposed), "decomposed");
        }
    }
}

/// A step input `[rows, shape..]`.
fn input(g: &mut Builder, name: &str, dtype: DType, shape: &[usize]) -> Result<Var> {
    let dims = std::iter::once(Dim::sym("rows")).chain(shape.iter().map(|n| Dim::from(*n)));
    g.step_input(name, Type::tensor(dtype, Shape(dims.collect())))
}

fn matrix(g: &mut Builder, name: &str, dtype: DType, rows: usize, cols: usize) -> Result<Var> {
    g.weight(name, Type::tensor(dtype, [rows, cols]))
}

fn quantised(g: &mut Builder, name: &str, dtype: DType, rows: usize, cols: usize) -> Result<Var> {
    g.weight(name, Type::tensor(dtype, [rows, cols]).stored_as(FormatRef::new(Q8_0)))
}

fn scaled(g: &mut Builder, name: &str, dtype: DType, rows: usize, cols: usize) -> Result<Var> {
    g.weight(name, Type::tensor(dtype, [rows, cols]).stored_as(FormatRef::new(ScaledFormat::INT8_ROWS)))
}

/// A plain weight, one in blocks, and one with scales of rows; the latter two by codes of activations too.
const WAYS: [(Weight, Activations); 5] = [
    (matrix, Activations::Exact),
    (quantised, Activations::Exact),
    (quantised, Activations::Int8),
    (scaled, Activations::Exact),
    (scaled, Activations::Int8),
];

type Weight = fn(&mut Builder, &str, DType, usize, usize) -> Result<Var>;

/// Tokens, outputs and inputs of a product: one row and many, on and off tiles.
const PRODUCTS: [[usize; 3]; 4] = [[1, 33, 64], [5, 7, 96], [40, 65, 32], [0, 3, 32]];

#[test]
fn a_residual_is_added_within_the_norm() {
    let sizes = [[5, 64, 0], [1, 1, 0], [3, 1000, 0], [0, 8, 0]];
    holds(&["add_rms_norm"], &sizes, |g, dtype, [_, hidden, _]| {
        let (x, r) = (input(g, "x", dtype, &[hidden])?, input(g, "r", dtype, &[hidden])?);
        let w = g.weight("w", Type::tensor(dtype, [hidden]))?;
        let sum = g.add(x, r)?;
        let y = g.rms_norm(sum, w, 1e-5)?;
        Ok(vec![sum, y])
    });
    // The sum stays inside where nobody else needs it.
    holds(&["add_rms_norm"], &sizes, |g, dtype, [_, hidden, _]| {
        let (x, r) = (input(g, "x", dtype, &[hidden])?, input(g, "r", dtype, &[hidden])?);
        let w = g.weight("w", Type::tensor(DType::F32, [hidden]))?;
        let sum = g.add(r, x)?;
        Ok(vec![g.rms_norm(sum, w, 1e-5)?])
    });
}

#[test]
fn a_residual_that_is_the_same_for_every_row_is_added_too() {
    holds(&["add_rms_norm"], &[[5, 64, 0], [2, 7, 0]], |g, dtype, [_, hidden, _]| {
        let x = input(g, "x", dtype, &[hidden])?;
        let r = g.weight("r", Type::tensor(dtype, [hidden]))?;
        let w = g.weight("w", Type::tensor(dtype, [hidden]))?;
        let sum = g.add(x, r)?;
        Ok(vec![g.rms_norm(sum, w, 1e-5)?])
    });
}

#[test]
fn keys_are_rotated_on_their_way_into_the_cache() {
    // (tokens, heads, elements of a head)
    for stored in [None, Some(DType::BF16)] {
        holds(&["rope_kv_write"], &[[5, 2, 16], [1, 1, 64], [0, 2, 8], [9, 3, 40]], |g, dtype, [_, heads, dim]| {
            let k = input(g, "k", dtype, &[heads, dim])?;
            let v = input(g, "v", dtype, &[heads, dim])?;
            let positions = input(g, "positions", DType::I32, &[])?;
            let slots = input(g, "slots", DType::I32, &[])?;
            let kv = g.state("kv", Type::state(stored.unwrap_or(dtype), [5, 2, heads, 4, dim]))?;
            // Part of a head is left as it is when it is of 40 elements.
            let rotary = if dim == 40 { 24 } else { dim };
            let rope = Rope { inv_freq: rope_frequencies(10_000.0, rotary).into(), scale: 1.0 };
            let k = g.rope(k, positions, &rope)?;
            g.kv_write(kv, k, v, slots)?;
            Ok(vec![])
        });
    }
}

#[test]
fn a_product_is_added_to_a_residual() {
    for (weight, activations) in WAYS {
        for bias in [false, true] {
            let kernel = if bias { "linear_bias_add" } else { "linear_add" };
            holds_taking(activations, &[kernel], &PRODUCTS, |g, dtype, [tokens, out, inner]| {
                let (x, r) = (input(g, "x", dtype, &[inner])?, input(g, "r", dtype, &[out])?);
                let w = weight(g, "w", dtype, out, inner)?;
                let b = if bias { Some(g.weight("b", Type::tensor(dtype, [out]))?) } else { None };
                let y = g.linear_bias(x, w, b)?;
                // The operands of a sum come in either order.
                Ok(vec![if tokens == 1 { g.add(y, r)? } else { g.add(r, y)? }])
            });
        }
    }
}

#[test]
fn a_product_that_others_need_is_not_hidden_in_a_sum() {
    holds(&["linear"], &PRODUCTS, |g, dtype, [_, out, inner]| {
        let (x, r) = (input(g, "x", dtype, &[inner])?, input(g, "r", dtype, &[out])?);
        let w = matrix(g, "w", dtype, out, inner)?;
        let y = g.linear(x, w)?;
        Ok(vec![y, g.add(r, y)?])
    });
}

#[test]
fn linears_of_one_input_are_one_kernel() {
    for (weight, activations) in WAYS {
        for biases in [false, true] {
            holds_taking(activations, &["linear_group"], &PRODUCTS, |g, dtype, [_, out, inner]| {
                let x = input(g, "x", dtype, &[inner])?;
                let mut outputs = Vec::new();
                for (i, rows) in [out, 2 * out + 1, 1].into_iter().enumerate() {
                    let w = weight(g, &format!("w{i}"), dtype, rows, inner)?;
                    let b = if biases { Some(g.weight(&format!("b{i}"), Type::tensor(dtype, [rows]))?) } else { None };
                    outputs.push(g.linear_bias(x, w, b)?);
                }
                Ok(outputs)
            });
        }
    }
}

#[test]
fn gate_and_up_are_multiplied_where_they_are_made() {
    for (weight, activations) in WAYS {
        holds_taking(activations, &["linear_swiglu"], &PRODUCTS, |g, dtype, [_, out, inner]| {
            let x = input(g, "x", dtype, &[inner])?;
            let (gate, up) = (weight(g, "gate", dtype, out, inner)?, weight(g, "up", dtype, out, inner)?);
            let (gate, up) = (g.linear(x, gate)?, g.linear(x, up)?);
            Ok(vec![g.swiglu(gate, up)?])
        });
    }
}

/// Two linears of x that are not grouped, since one has a bias.
fn two_products(g: &mut Builder, x: Var, dtype: DType, out: usize, inner: usize) -> Result<Vec<Var>> {
    let (a, b) = (quantised(g, "a", dtype, out, inner)?, quantised(g, "b", dtype, out + 3, inner)?);
    let bias = g.weight("bias", Type::tensor(dtype, [out + 3]))?;
    Ok(vec![g.linear(x, a)?, g.linear_bias(x, b, Some(bias))?])
}

#[test]
fn several_products_read_one_quantised_value() {
    let int8 = Activations::Int8;
    holds_taking(int8, &["linear", "linear_bias", "quantize"], &PRODUCTS, |g, dtype, [_, out, inner]| {
        let x = input(g, "x", dtype, &[inner])?;
        two_products(g, x, dtype, out, inner)
    });
    holds_taking(int8, &["linear", "linear_bias", "rms_norm_quantize"], &PRODUCTS, |g, dtype, [_, out, inner]| {
        let (x, gain) = (input(g, "x", dtype, &[inner])?, g.weight("gain", Type::tensor(DType::F32, [inner]))?);
        let x = g.rms_norm(x, gain, 1e-5)?;
        two_products(g, x, dtype, out, inner)
    });
    holds_taking(int8, &["add_rms_norm_quantize", "linear", "linear_bias"], &PRODUCTS, |g, dtype, [_, out, inner]| {
        let (x, r) = (input(g, "x", dtype, &[inner])?, input(g, "r", dtype, &[inner])?);
        let (sum, gain) = (g.add(x, r)?, g.weight("gain", Type::tensor(dtype, [inner]))?);
        let x = g.rms_norm(sum, gain, 1e-5)?;
        let mut outputs = two_products(g, x, dtype, out, inner)?;
        outputs.push(sum);
        Ok(outputs)
    });
    holds_taking(int8, &["linear", "linear_bias", "swiglu_quantize"], &PRODUCTS, |g, dtype, [_, out, inner]| {
        let (gate, up) = (input(g, "gate", dtype, &[inner])?, input(g, "up", dtype, &[inner])?);
        let x = g.swiglu(gate, up)?;
        two_products(g, x, dtype, out, inner)
    });
}

#[test]
fn products_have_the_same_bits_whoever_quantises_x() {
    let backend = poisoned(2);
    for dtype in [DType::F32, DType::BF16] {
        for [rows, out, inner] in [[1, 33, 64], [5, 7, 288], [40, 65, 1056]] {
            let of = |outputs: &[usize]| {
                let mut g = Builder::new();
                let x = input(&mut g, "x", dtype, &[inner]).expect("fresh");
                let both = two_products(&mut g, x, dtype, out, inner).expect("builds");
                let named = outputs.iter().map(|i| (i.to_string(), both[*i])).collect();
                let mut graph = g.finish(named).expect("finishes");
                round_activations(&mut graph, Activations::Int8);
                let kernels = claimed(&backend, &graph);
                (run(&backend, &graph, &bindings(rows), &|arg| value(arg, rows)).expect("runs"), kernels)
            };
            let ((both, shared), (first, alone), (second, _)) = (of(&[0, 1]), of(&[0]), of(&[1]));
            assert!(shared.contains(&"quantize".to_owned()) && !alone.contains(&"quantize".to_owned()));
            assert!(same_bits(&both, &[first, second].concat()), "{dtype}, {rows} x {inner} x {out}");
        }
    }
}

//! Kernels that claim patterns, at the sizes at which they change their ways: few and many rows, long and ragged
//! contexts, odd columns; each is held against its f64 meaning, and must be what runs.

mod common;
#[path = "../../ridge-cpu/tests/common/mod.rs"]
mod graphs;

use graphs::{run, same_bits};
use ridge_graph::conformance::judge_graph;
use ridge_graph::ops::PagedAttention;
use ridge_graph::sample::Rng;
use ridge_graph::{Arg, Bindings, Builder, DType, Graph, GroupKind, Op, Result, Role, Sym, Tensor, Type, Value, Var};
use ridge_runtime::{Backend, lower};

/// The names of the kernels that claim something of the graph.
fn claimed(backend: &dyn Backend, graph: &Graph) -> Vec<&'static str> {
    let names: Vec<&str> = graph.main().outputs.iter().filter(|o| o.role == Role::Data).map(|o| &*o.name).collect();
    let lowered = lower(graph, &names, backend.kernels()).expect("lowers");
    let groups = lowered.main().nodes.iter().filter_map(|n| match &n.op {
        Op::Group(group) => match group.kind {
            GroupKind::Kernel(name) => Some(name),
            GroupKind::Fused => None,
        },
        _ => None,
    });
    groups.collect()
}

/// Requires that `kernel` claims the graph and that the GPU's results are right and the same each time.
fn holds(kernel: &str, what: &str, graph: &Graph, value: impl Fn(&Arg) -> Value) {
    let Some(gpu) = common::gpu() else { return };
    assert_eq!(claimed(&*gpu, graph), [kernel], "{graph}");
    let got = run(&gpu, graph, &Bindings::new(), &value).expect("runs");
    assert!(same_bits(&got, &run(&gpu, graph, &Bindings::new(), &value).expect("runs")), "{kernel} {what}: other bits");
    if let Err(why) = judge_graph(graph, &|arg| Some(value(arg)), &Bindings::new(), &got) {
        panic!("{kernel}, {what}: {why:.800}");
    }
}

fn normal(arg: &Arg) -> Value {
    let salt = arg.name.bytes().fold(3u64, |h, b| h.wrapping_mul(31).wrapping_add(u64::from(b)));
    let shape = arg.ty.shape.as_const().expect("constant");
    Value::Plain(Rng::new(salt).normal(arg.ty.dtype, &shape))
}

fn built(build: impl FnOnce(&mut Builder) -> Result<Vec<Var>>) -> Graph {
    let mut g = Builder::new();
    let outputs = build(&mut g).expect("builds");
    g.finish(outputs.into_iter().enumerate().map(|(i, v)| (i.to_string(), v)).collect()).expect("finishes")
}

const ROWS: [usize; 8] = [1, 2, 7, 8, 9, 16, 17, 70];

#[test]
fn linears_of_few_and_many_rows_with_what_follows_them() {
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        for rows in ROWS {
            for (depth, columns) in [(8, 5), (264, 33), (1024, 48), (2056, 16)] {
                let x =
                    |g: &mut Builder, name: &str, width: usize| g.step_input(name, Type::tensor(dtype, [rows, width]));
                let weight =
                    |g: &mut Builder, name: &str, columns: usize| g.weight(name, Type::tensor(dtype, [columns, depth]));
                let what = format!("{dtype}, {rows} x {depth} x {columns}");
                let one = built(|g| {
                    let (x, w) = (x(g, "x", depth)?, weight(g, "w", columns)?);
                    Ok(vec![g.linear(x, w)?])
                });
                holds("linear", &what, &one, normal);
                let three = built(|g| {
                    let x = x(g, "x", depth)?;
                    let mut outputs = Vec::new();
                    for (name, columns) in [("q", columns), ("k", 17), ("v", columns + 3)] {
                        let w = weight(g, name, columns)?;
                        outputs.push(g.linear(x, w)?);
                    }
                    Ok(outputs)
                });
                holds("linear_group", &what, &three, normal);
                let added = built(|g| {
                    let (x, r, w) = (x(g, "x", depth)?, x(g, "r", columns)?, weight(g, "w", columns)?);
                    let y = g.linear(x, w)?;
                    Ok(vec![g.add(r, y)?])
                });
                holds("linear_add", &what, &added, normal);
                let gated = built(|g| {
                    let x = x(g, "x", depth)?;
                    let (gate, up) = (weight(g, "gate", columns)?, weight(g, "up", columns)?);
                    let (gate, up) = (g.linear(x, gate)?, g.linear(x, up)?);
                    Ok(vec![g.swiglu(gate, up)?])
                });
                holds("linear_swiglu", &what, &gated, normal);
            }
        }
    }
}

#[test]
fn rows_of_a_linear_do_not_depend_on_their_company() {
    let Some(gpu) = common::gpu() else { return };
    let all = Rng::new(5).normal(DType::BF16, &[16, 520]);
    let product = |rows: std::ops::Range<usize>| {
        let graph = built(|g| {
            let x = g.step_input("x", Type::tensor(DType::BF16, [rows.len(), 520]))?;
            let w = g.weight("w", Type::tensor(DType::BF16, [37, 520]))?;
            Ok(vec![g.linear(x, w)?])
        });
        let given = all.floats()[rows.start * 520..rows.end * 520].to_vec();
        let x = Tensor::float(DType::BF16, &[rows.len(), 520], given);
        let value = |arg: &Arg| if &*arg.name == "x" { Value::Plain(x.clone()) } else { normal(arg) };
        run(&gpu, &graph, &Bindings::new(), &value).expect("runs")[0].floats().to_vec()
    };
    let sixteen = product(0..16);
    for rows in [1, 3, 8, 9, 15] {
        assert_eq!(product(0..rows), sixteen[..rows * 37], "{rows} rows");
    }
    assert_eq!(product(7..8), sixteen[7 * 37..8 * 37], "a row alone");
}

#[test]
fn norms_of_rows_up_to_the_widest() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for (rows, width) in [(1, 8), (3, 264), (2, 4096), (5, 5120), (1, 16_384)] {
            let shape = Type::tensor(dtype, [rows, width]);
            let weight = Type::tensor(DType::BF16, [width]);
            let what = format!("{dtype}, {rows} x {width}");
            let alone = built(|g| {
                let (x, w) = (g.step_input("x", shape.clone())?, g.weight("w", weight.clone())?);
                Ok(vec![g.rms_norm(x, w, 1e-5)?])
            });
            holds("rms_norm", &what, &alone, normal);
            let added = built(|g| {
                let (x, r) = (g.step_input("x", shape.clone())?, g.step_input("r", shape.clone())?);
                let w = g.weight("w", weight.clone())?;
                let sum = g.add(x, r)?;
                Ok(vec![g.rms_norm(sum, w, 1e-5)?, sum])
            });
            holds("add_rms_norm", &what, &added, normal);
        }
    }
}

/// A step of sequences of these `(cached, new)` tokens, with some padding at the end, in blocks of 16 in no order.
struct Step {
    table: Tensor,
    ids: Tensor,
    positions: Tensor,
    blocks: usize,
}

impl Step {
    fn new(sequences: &[(usize, usize)], padding: usize, spare: usize) -> Self {
        let columns = sequences.iter().map(|(cached, new)| (cached + new).div_ceil(16)).max().unwrap_or(0) + spare;
        let blocks = sequences.len() * columns;
        let (mut ids, mut positions) = (Vec::new(), Vec::new());
        for (i, (cached, new)) in sequences.iter().enumerate() {
            ids.extend(std::iter::repeat_n(i as i64, *new));
            positions.extend((0..*new).map(|t| (cached + t) as i64));
        }
        ids.extend(std::iter::repeat_n(-1, padding));
        positions.extend(std::iter::repeat_n(0, padding));
        let int = |shape: &[usize], values: Vec<i64>| Tensor::int(DType::I32, shape, values);
        // A permutation, as 7 and the odd number of blocks have no common divisor or it does not matter.
        let table = (0..blocks as i64).map(|i| blocks as i64 - 1 - i).collect();
        Self {
            table: int(&[sequences.len(), columns], table),
            positions: int(&[positions.len()], positions),
            ids: int(&[ids.len()], ids),
            blocks,
        }
    }
}

#[test]
fn attention_of_long_ragged_and_windowed_steps() {
    let prompt: &[(usize, usize)] = &[(0, 150)];
    let ragged: &[(usize, usize)] = &[(0, 60), (70, 33), (3, 1), (200, 47)];
    let decode: &[(usize, usize)] = &[(300, 1), (15, 1), (0, 1), (530, 1)];
    let mixed: &[(usize, usize)] = &[(100, 1), (0, 40), (257, 1)];
    for (dtype, cache) in
        [(DType::BF16, DType::BF16), (DType::F16, DType::F16), (DType::F32, DType::F32), (DType::F32, DType::BF16)]
    {
        for (dim, heads, keys) in [(64, 4, 2), (128, 2, 1), (80, 1, 1), (256, 3, 1)] {
            for (sequences, padding) in [(prompt, 0), (ragged, 5), (decode, 0), (mixed, 2)] {
                for (window, softcap) in [(None, None), (Some(40), None), (None, Some(2.0))] {
                    // The meaning copies the cache for each token: not every combination is worth its time.
                    let special = window.is_some() || softcap.is_some();
                    if (special && (dim != 64 || dtype == DType::F16)) || (dim > 64 && dtype == DType::F32) {
                        continue;
                    }
                    let step = Step::new(sequences, padding, 1);
                    let tokens = step.ids.shape[0];
                    let op = PagedAttention::new(1.0 / (dim as f64).sqrt(), Sym::new("pairs"), Sym::new("cached"));
                    let op = PagedAttention { window, softcap, ..op };
                    let graph = built(|g| {
                        let q = g.step_input("q", Type::tensor(dtype, [tokens, heads, dim]))?;
                        let kv = g.state("kv", Type::state(cache, [step.blocks, 2, keys, 16, dim]))?;
                        let int = |g: &mut Builder, name: &str, of: &Tensor| g.step_input(name, of.ty());
                        let table = int(g, "table", &step.table)?;
                        let (ids, positions) = (int(g, "ids", &step.ids)?, int(g, "positions", &step.positions)?);
                        Ok(vec![g.attention(q, kv, table, ids, positions, op.clone())?])
                    });
                    let value = |arg: &Arg| match &*arg.name {
                        "table" => Value::Plain(step.table.clone()),
                        "ids" => Value::Plain(step.ids.clone()),
                        "positions" => Value::Plain(step.positions.clone()),
                        _ => normal(arg),
                    };
                    let what = format!("{dtype} over {cache}, dim {dim}, {sequences:?}, {window:?}, {softcap:?}");
                    holds("attention", &what, &graph, value);
                }
            }
        }
    }
}

#[test]
fn random_weights_are_those_of_the_host() {
    let Some(gpu) = common::gpu() else { return };
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let ty = Type::tensor(dtype, [33, 7]);
        let mut rng = Rng::new(9);
        let state = rng.state();
        let buffer = gpu.random(&ty, state, 0.25).expect("makes").expect("makes it on the device");
        let mut wanted = Vec::new();
        while wanted.len() < 33 * 7 {
            let bits = rng.bits();
            wanted.extend((0..4).rev().map(|i| {
                let part = (bits >> (16 * i)) as u16;
                (f64::from(part & 0xff) + f64::from(part >> 8) - 255.0) * 0.25
            }));
        }
        wanted.truncate(33 * 7);
        assert_eq!(dtype.decode(&gpu.read(&buffer).expect("reads")), wanted, "{dtype}");
    }
}

//! A deterministic GPU: a row has the same bits whatever is computed beside it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::common::deterministic_gpu;
use crate::running::{LoadedGraph, rows};
use ridge_graph::conformance::judge_graph;
use ridge_graph::ops::{PagedAttention, Rope, rope_frequencies};
use ridge_graph::sample::Rng;
use ridge_graph::{Arg, Bindings, Builder, DType, Dim, Graph, Result, Role, Sym, Tensor, Type, Value, Var};
use ridge_runtime::Backend;

/// Numbers of rows below, at and above those at which kernels for few rows end, and tiles do.
const COUNTS: [usize; 8] = [1, 2, 7, 16, 17, 64, 129, 200];

fn graph(build: impl FnOnce(&mut Builder) -> Result<Vec<Var>>) -> Graph {
    let mut g = Builder::new();
    let outputs = build(&mut g).expect("types");
    g.finish(outputs.into_iter().enumerate().map(|(i, var)| (i.to_string(), var)).collect()).expect("finishes")
}

/// Requires that every output of some rows of the inputs named `by_row` is those rows of the output of all of them.
fn rows_are_independent(
    gpu: &Arc<dyn Backend>,
    what: &str,
    graph: &Graph,
    given: &dyn Fn(&str) -> Tensor,
    by_row: &[&str],
    parts: impl IntoIterator<Item = Range<usize>>,
) {
    let bound = |count: usize| Bindings::new().with("tokens", count);
    let names = graph.main().args.iter().map(|arg| arg.name.to_string());
    let values: BTreeMap<String, Tensor> = names.map(|name| (name.clone(), given(&name))).collect();
    let whole_value = |arg: &Arg| Value::from(values[&*arg.name].clone());
    let total = values[by_row[0]].shape[0];
    let loaded = LoadedGraph::new(gpu, graph, &bound(total), &whole_value).expect("loads");
    let whole = loaded.step(&bound(total), &whole_value).expect("runs");
    // The meaning of large products takes long, and their tilings are held against it elsewhere.
    let large = graph
        .main()
        .args
        .iter()
        .any(|arg| arg.ty.shape.as_const().is_some_and(|shape| shape.iter().product::<usize>() > 1 << 20));
    if !large {
        judge_graph(graph, &|arg| Some(whole_value(arg)), &bound(total), &whole)
            .unwrap_or_else(|e| panic!("{what}: {e:.600}"));
    }
    for range in parts {
        let value = |arg: &Arg| match by_row.contains(&&*arg.name) {
            true => Value::from(rows(&values[&*arg.name], range.clone())),
            false => whole_value(arg),
        };
        let part = loaded.step(&bound(range.len()), &value).expect("runs");
        let results = graph.main().outputs.iter().zip(part.iter().zip(&whole)).filter(|(o, _)| o.role == Role::Data);
        for (_, (got, all)) in results {
            assert!(got.to_bytes() == rows(all, range.clone()).to_bytes(), "{what}: rows {range:?} of {total} differ");
        }
    }
}

/// The tensor that a name stands for: random numbers of its own.
fn random(name: &str, dtype: DType, shape: &[usize], factor: f64) -> Tensor {
    let mut rng = Rng::new(name.bytes().fold(7, |seed, byte| seed * 31 + u64::from(byte)));
    let tensor = rng.normal(dtype, shape);
    let scaled = tensor.floats().iter().map(|x| x * factor).collect();
    Tensor::float(dtype, shape, scaled).rounded()
}

#[test]
fn linears_of_a_row_do_not_depend_on_other_rows() {
    let Some(gpu) = deterministic_gpu() else { return };
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        for (depth, columns) in [(512, 1024), (776, 40), (4096, 256), (1024, 4096)] {
            if dtype == DType::F32 && columns > 256 {
                continue;
            }
            let tokens = Dim::sym("tokens");
            let x = |g: &mut Builder| g.step_input("x", Type::tensor(dtype, [&tokens, &depth.into()]));
            let matrix = |g: &mut Builder, name: &str| g.weight(name, Type::tensor(dtype, [columns, depth]));
            let vector = |g: &mut Builder, name: &str, of: usize| g.weight(name, Type::tensor(dtype, [of]));
            let cases = [
                (
                    "linear",
                    graph(|g| {
                        Ok(vec![{
                            let (x, w) = (x(g)?, matrix(g, "w")?);
                            g.linear(x, w)?
                        }])
                    }),
                ),
                (
                    "linear with bias",
                    graph(|g| {
                        let (x, w, b) = (x(g)?, matrix(g, "w")?, vector(g, "b", columns)?);
                        Ok(vec![g.linear_bias(x, w, Some(b))?])
                    }),
                ),
                (
                    "linear and sum",
                    graph(|g| {
                        let (x, w) = (x(g)?, matrix(g, "w")?);
                        let r = g.step_input("r", Type::tensor(dtype, [&tokens, &columns.into()]))?;
                        let y = g.linear(x, w)?;
                        Ok(vec![g.add(r, y)?])
                    }),
                ),
                (
                    "gate of a norm",
                    graph(|g| {
                        let (x, gain) = (x(g)?, vector(g, "gain", depth)?);
                        let h = g.rms_norm(x, gain, 1e-5)?;
                        let (gate, up) = (matrix(g, "gate")?, matrix(g, "up")?);
                        let (gate, up) = (g.linear(h, gate)?, g.linear(h, up)?);
                        Ok(vec![g.swiglu(gate, up)?])
                    }),
                ),
                (
                    "three of a norm",
                    graph(|g| {
                        let (x, gain) = (x(g)?, vector(g, "gain", depth)?);
                        let h = g.rms_norm(x, gain, 1e-5)?;
                        let weights = [matrix(g, "q")?, matrix(g, "k")?, matrix(g, "v")?];
                        weights.into_iter().map(|w| g.linear(h, w)).collect()
                    }),
                ),
            ];
            for (what, graph) in &cases {
                let given = |name: &str| match name {
                    "x" => random(name, dtype, &[200, depth], 1.0),
                    "r" => random(name, dtype, &[200, columns], 1.0),
                    "gain" => random(name, dtype, &[depth], 1.0),
                    "b" => random(name, dtype, &[columns], 1.0),
                    _ => random(name, dtype, &[columns, depth], 1.0 / (depth as f64).sqrt()),
                };
                let by_row = graph.main().args.iter().any(|arg| &*arg.name == "r");
                let by_row: &[&str] = if by_row { &["x", "r"] } else { &["x"] };
                // At the beginning, at the end, and between.
                let parts = COUNTS.iter().map(|count| (200 - count) / 2..(200 + count) / 2);
                let what = format!("{what}, {columns} x {depth} in {dtype}");
                rows_are_independent(&gpu, &what, graph, &given, by_row, parts);
            }
        }
    }
}

/// A step of a sequence: the tokens at these positions, of which those before `prompt` are its prompt.
struct Tokens {
    positions: Range<usize>,
    prompt: usize,
}

#[test]
fn attention_of_a_token_does_not_depend_on_the_step() {
    let Some(gpu) = deterministic_gpu() else { return };
    let sequences = [
        Tokens { positions: 0..290, prompt: 270 },
        Tokens { positions: 695..700, prompt: 40 },
        Tokens { positions: 1020..1031, prompt: 1025 },
        Tokens { positions: 0..3, prompt: 1 },
        Tokens { positions: 120..135, prompt: 128 },
        Tokens { positions: 2300..2302, prompt: 2000 },
    ];
    let columns = 2304 / 16;
    let int = |shape: &[usize], values: Vec<i64>| Tensor::int(DType::I32, shape, values);
    let ids: Vec<i64> =
        sequences.iter().enumerate().flat_map(|(i, s)| s.positions.clone().map(move |_| i as i64)).collect();
    let positions: Vec<i64> = sequences.iter().flat_map(|s| s.positions.clone().map(|p| p as i64)).collect();
    let total = ids.len();
    let blocks = sequences.len() * columns;
    for (dtype, cache, dim, heads, keys, window, softcap, sinks) in [
        (DType::BF16, DType::BF16, 128, 8, 2, None, None, false),
        (DType::BF16, DType::BF16, 64, 8, 8, None, None, true),
        (DType::F16, DType::F16, 128, 16, 1, Some(300), None, false),
        (DType::BF16, DType::BF16, 64, 4, 2, Some(130), Some(20.0), true),
        (DType::BF16, DType::I8, 128, 8, 2, None, None, false),
        // Without a prompt kernel all tokens go one by one.
        (DType::BF16, DType::BF16, 80, 4, 2, None, None, false),
        (DType::BF16, DType::BF16, 192, 6, 2, None, None, false),
    ] {
        let tokens = Dim::sym("tokens");
        let coded = cache == DType::I8;
        let graph = graph(|g| {
            let q = g.step_input("q", Type::tensor(dtype, [&tokens, &heads.into(), &dim.into()]))?;
            let kv = g.state("kv", Type::state(cache, [blocks, 2, keys, 16, dim]))?;
            let table = g.step_input("table", Type::tensor(DType::I32, [sequences.len(), columns]))?;
            let ids = g.step_input("ids", Type::tensor(DType::I32, [&tokens]))?;
            let positions = g.step_input("positions", Type::tensor(DType::I32, [&tokens]))?;
            let mut more = Vec::new();
            if coded {
                more.push(g.state("scales", Type::state(DType::F32, [blocks, 2, keys, 16]))?);
            }
            if sinks {
                more.push(g.weight("sinks", Type::tensor(DType::F32, [heads]))?);
            }
            more.push(g.step_input("prompts", Type::tensor(DType::I32, [sequences.len()]))?);
            let rotated = Rope { inv_freq: rope_frequencies(10_000.0, dim).into(), scale: 1.0 };
            let q = g.rope(q, positions, &rotated)?;
            let op = PagedAttention::new(1.0 / (dim as f64).sqrt(), Sym::new("pairs"), Sym::new("cached"));
            let op = PagedAttention { window, softcap, sinks, prompt_lengths: true, ..op };
            Ok(vec![g.attention_with([q, kv, table, ids, positions], &more, op)?])
        });
        let given = |name: &str| match name {
            "q" => random(name, dtype, &[total, heads, dim], 2.0),
            "kv" if coded => Rng::new(3).integers(cache, &[blocks, 2, keys, 16, dim], -127, 128),
            "kv" => random(name, cache, &[blocks, 2, keys, 16, dim], 1.0),
            "scales" => Tensor::float(DType::F32, &[blocks, 2, keys, 16], vec![0.01; blocks * 2 * keys * 16]).rounded(),
            "sinks" => random(name, DType::F32, &[heads], 1.0),
            "table" => int(&[sequences.len(), columns], (0..blocks as i64).rev().collect()),
            "ids" => int(&[total], ids.clone()),
            "positions" => int(&[total], positions.clone()),
            _ => int(&[sequences.len()], sequences.iter().map(|s| s.prompt as i64).collect()),
        };
        let alone = (0..total).filter(|at| at % 11 == 0 || *at > 260).map(|at| at..at + 1);
        let cuts = [0, 3, 130, 131, 148, 258, 259, 280, 292, 300, total];
        let parts = cuts.windows(2).map(|cut| cut[0]..cut[1]).chain([0..200, 100..300, 64..total, 250..total]);
        let what = format!("{dtype} over {cache}, dim {dim}, {heads} heads of {keys}, {window:?}, {softcap:?}");
        rows_are_independent(&gpu, &what, &graph, &given, &["q", "ids", "positions"], alone.chain(parts));
    }
}

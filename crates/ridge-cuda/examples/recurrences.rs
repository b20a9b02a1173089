//! Times linear recurrences on this machine's GPU, 16,384 tokens in all, in one sequence and in eight, in the shapes that flash-linear-attention
//! is measured in, with operands in f32, and in bf16 where keys decay alike; and their gradients, whose operands are f32.
//!
//! `cargo run --release -p ridge-cuda --example recurrences`

use std::process::ExitCode;
use std::sync::Arc;

use ridge_cuda::{Cuda, CudaOptions};
use ridge_graph::{Bindings, Builder, DType, Graph, Prim, Role, Shape, Type, Var};
use ridge_runtime::{Backend, Session};

/// A kind of recurrence: its name, heads, groups of keys, keys and values a head, whether each key decays by itself, and whether it has a part of
/// low rank.
type Kind = (&'static str, [usize; 4], bool, bool);

const KINDS: [Kind; 4] = [
    ("Mamba-2", [32, 32, 128, 64], false, false),
    ("Mamba-2, keys shared", [32, 1, 128, 64], false, false),
    ("gated delta rule", [16, 16, 128, 128], false, true),
    ("gated linear attention", [16, 16, 64, 128], true, false),
];

const TOKENS: usize = 16_384;

fn main() -> ExitCode {
    match table() {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            println!("{why}");
            ExitCode::FAILURE
        }
    }
}

fn table() -> Result<(), Box<dyn std::error::Error>> {
    let gpu: Arc<dyn Backend> = Arc::new(Cuda::new(CudaOptions::default())?);
    println!("{:<24} {:>8} {:>9}  {:>9}  {:>9}", "recurrence", "dtype", "sequences", "ms", "GB/s");
    for kind in &KINDS {
        for rows in [1, 8] {
            let (seconds, bytes) = time(&gpu, kind, rows, true)?;
            let rate = bytes as f64 / seconds / 1e9;
            println!("{:<24} {:>8} {rows:>9}  {:>9.3}  {rate:>9.0}", kind.0, "gradient", seconds * 1e3);
        }
        for dtype in [DType::F32, DType::BF16] {
            for rows in [1, 8] {
                let (seconds, bytes) = match dtype {
                    DType::F32 => time(&gpu, kind, rows, false)?,
                    // Keys decay alike.
                    _ if kind.2 => continue,
                    dtype => time_gated(&gpu, kind, rows, dtype)?,
                };
                let (name, dtype, rate) = (kind.0, dtype.name(), bytes as f64 / seconds / 1e9);
                println!("{name:<24} {dtype:>8} {rows:>9}  {:>9.3}  {rate:>9.0}", seconds * 1e3);
            }
        }
    }
    Ok(())
}

/// The same for operands in `dtype` and states in lines of a table.
fn time_gated(
    gpu: &Arc<dyn Backend>,
    kind: &Kind,
    rows: usize,
    dtype: DType,
) -> Result<(f64, usize), Box<dyn std::error::Error>> {
    let &(_, [heads, groups, key, value], _, delta) = kind;
    let mut g = Builder::new();
    let random = |g: &mut Builder, name: &str, dtype: DType, shape: [usize; 3]| {
        g.weight(name, Type::tensor(dtype, Shape::new(shape)))
    };
    let [q, k] = ["q", "k"].map(|name| random(&mut g, name, dtype, [TOKENS, groups, key]));
    let v = random(&mut g, "v", dtype, [TOKENS, heads, value]);
    let [weight, decay] = ["weight", "decay"].map(|name| random(&mut g, name, DType::F32, [TOKENS, heads, 1]));
    let half = g.constant(DType::F32, -0.05)?;
    let decay = g.add(decay?, half)?;
    let table = g.state("table", Type::state(DType::F32, [rows, heads * key * value]))?;
    let lines: Vec<f64> = (0..2 * rows).map(|i| (i / 2) as f64).collect();
    let lines = g.table(DType::I32, &lines)?;
    let lines = g.reshape(lines, Shape::new([rows, 2]))?;
    let starts = g.table(DType::I32, &bounds(rows))?;
    let [y, _] = g.gated_recurrence([q?, k?, v?, weight?, decay, table, lines, starts], delta)?;
    let graph = g.finish(vec![("y".into(), y)])?;
    let seconds = median(gpu, &graph, &["y"])?;
    let operands = 2 * groups * key + 2 * heads * value;
    let bytes = TOKENS * (operands * dtype.size_bytes() + 2 * heads * size_of::<f32>());
    Ok((seconds, bytes + 2 * rows * heads * key * value * size_of::<f32>()))
}

/// Where rows of as many tokens each begin and end.
fn bounds(rows: usize) -> Vec<f64> {
    (0..=rows).map(|row| (row * TOKENS / rows) as f64).collect()
}

/// The median time of the longest launch of a step of `graph`.
fn median(gpu: &Arc<dyn Backend>, graph: &Graph, outputs: &[&str]) -> Result<f64, Box<dyn std::error::Error>> {
    let mut session = Session::new(Arc::clone(gpu));
    for (seed, arg) in graph.args(Role::Weight).enumerate() {
        session.load_random(&arg.name, &arg.ty, seed as u64, if &*arg.name == "decay" { 0.01 } else { 0.05 })?;
    }
    session.allocate_states(graph, &Bindings::new())?;
    let compiled = session.compile(graph, outputs)?;
    let mut bucket = compiled.bucket(&Bindings::new())?;
    let mut times = Vec::new();
    for _ in 0..7 {
        // Beside it there are the sum of decays and a copy of the bounds.
        times.push(bucket.timed()?.iter().map(|launch| launch.seconds).fold(0.0, f64::max));
    }
    times.sort_by(f64::total_cmp);
    Ok(times[3])
}

/// The median time of a recurrence over `rows` sequences or of its gradient, and the bytes of its operands and results.
fn time(
    gpu: &Arc<dyn Backend>,
    kind: &Kind,
    rows: usize,
    gradient: bool,
) -> Result<(f64, usize), Box<dyn std::error::Error>> {
    let &(_, [heads, groups, key, value], per_key, low_rank) = kind;
    let mut g = Builder::new();
    let mut bytes = 0;
    let mut random = |g: &mut Builder, name: &str, shape: &[usize]| {
        bytes += shape.iter().product::<usize>() * size_of::<f32>();
        g.weight(name, Type::tensor(DType::F32, Shape::new(shape.iter().copied())))
    };
    let [q, k] = ["q", "k"].map(|name| random(&mut g, name, &[TOKENS, groups, key]));
    let v = random(&mut g, "v", &[TOKENS, heads, value])?;
    let decay = random(&mut g, "decay", &[TOKENS, heads, if per_key { key } else { 1 }])?;
    let state = random(&mut g, "state", &[rows, heads, key, value])?;
    let rank: Option<[Var; 2]> = match low_rank {
        true => {
            Some([random(&mut g, "erase", &[TOKENS, heads, key])?, random(&mut g, "write", &[TOKENS, heads, key])?])
        }
        false => None,
    };
    let cotangents = match gradient {
        true => Some([
            random(&mut g, "dy", &[TOKENS, heads, value])?,
            random(&mut g, "dafter", &[rows, heads, key, value])?,
        ]),
        false => None,
    };
    // What is random lies about 0; decays do not.
    let half = g.constant(DType::F32, -0.05)?;
    let decay = g.add(decay, half)?;
    let starts = g.table(DType::I32, &bounds(rows))?;
    if let Some(cotangents) = cotangents {
        let operands = [q?, k?, v, decay, state, starts].into_iter().chain(rank.into_iter().flatten());
        let operands = operands.chain(cotangents).collect::<Vec<_>>();
        let results = g.prim(Prim::LinearRecurrenceGradient { low_rank }, &operands)?;
        let names = (0..results.len()).map(|i| i.to_string()).collect::<Vec<_>>();
        let graph = g.finish(names.iter().map(|name| name.as_str().into()).zip(results).collect())?;
        let seconds = median(gpu, &graph, &names.iter().map(String::as_str).collect::<Vec<_>>())?;
        // Results are as many as operands but the cotangents, and of q and k for each head.
        let of_heads = 2 * TOKENS * (heads - groups) * key;
        let of_cotangents = TOKENS * heads * value + rows * heads * key * value;
        return Ok((seconds, 2 * bytes + of_heads * size_of::<f32>() - of_cotangents * size_of::<f32>()));
    }
    let [y, after] = g.linear_recurrence([q?, k?, v, decay, state, starts], rank)?;
    let graph = g.finish(vec![("y".into(), y), ("after".into(), after)])?;
    let seconds = median(gpu, &graph, &["y", "after"])?;
    Ok((seconds, bytes + (TOKENS * heads * value + rows * heads * key * value) * size_of::<f32>()))
}

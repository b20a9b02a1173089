//! Times linear recurrences on this machine's GPU, 16,384 tokens in all, in one sequence and in eight, in the shapes that flash-linear-attention
//! is measured in; the floor is that of operands and results at the measured bandwidth.
//!
//! `cargo run --release -p ridge-cuda --example recurrences`

use std::process::ExitCode;
use std::sync::Arc;

use ridge_cuda::{Cuda, CudaOptions};
use ridge_graph::{Bindings, Builder, DType, Role, Shape, Type, Var};
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
    println!("{:<24} {:>9}  {:>9}  {:>9}", "recurrence", "sequences", "ms", "GB/s");
    for kind in &KINDS {
        for rows in [1, 8] {
            let (seconds, bytes) = time(&gpu, kind, rows)?;
            println!("{:<24} {rows:>9}  {:>9.3}  {:>9.0}", kind.0, seconds * 1e3, bytes as f64 / seconds / 1e9);
        }
    }
    Ok(())
}

/// The median time of a recurrence over `rows` sequences, and the bytes of its operands and results.
fn time(gpu: &Arc<dyn Backend>, kind: &Kind, rows: usize) -> Result<(f64, usize), Box<dyn std::error::Error>> {
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
    // What is random lies about 0; decays do not.
    let half = g.constant(DType::F32, -0.05)?;
    let decay = g.add(decay, half)?;
    let bounds: Vec<f64> = (0..=rows).map(|row| (row * TOKENS / rows) as f64).collect();
    let starts = g.table(DType::I32, &bounds)?;
    let [y, after] = g.linear_recurrence([q?, k?, v, decay, state, starts], rank)?;
    let graph = g.finish(vec![("y".into(), y), ("after".into(), after)])?;
    let mut session = Session::new(Arc::clone(gpu));
    for (seed, arg) in graph.args(Role::Weight).enumerate() {
        session.load_random(&arg.name, &arg.ty, seed as u64, if &*arg.name == "decay" { 0.01 } else { 0.05 })?;
    }
    let compiled = session.compile(&graph, &["y", "after"])?;
    let mut bucket = compiled.bucket(&Bindings::new())?;
    let mut times = Vec::new();
    for _ in 0..7 {
        // Beside it there are the sum of decays and a copy of the bounds.
        times.push(bucket.timed()?.iter().map(|launch| launch.seconds).fold(0.0, f64::max));
    }
    times.sort_by(f64::total_cmp);
    Ok((times[3], bytes + (TOKENS * heads * value + rows * heads * key * value) * size_of::<f32>()))
}

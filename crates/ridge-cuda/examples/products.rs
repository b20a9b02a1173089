//! Times the matrix products of a Llama 3.1 8B layer on this machine's GPU, for some numbers of rows.
//!
//! `cargo run --release -p ridge-cuda --example products -- 2048 512 64`

use std::process::ExitCode;
use std::sync::Arc;

use ridge_cuda::{Cuda, CudaOptions};
use ridge_graph::{Bindings, Builder, DType, Role, Type};
use ridge_runtime::{Backend, Session};

/// Columns and depth of the weights, and what follows.
const WEIGHTS: [(usize, usize, &str); 8] = [
    (4096, 4096, ""),
    (1024, 4096, ""),
    (6144, 4096, ""),
    (14_336, 4096, ""),
    (4096, 14_336, ""),
    (4096, 4096, "added"),
    (4096, 14_336, "added"),
    (14_336, 4096, "gated"),
];

fn main() -> ExitCode {
    let rows: Vec<usize> = std::env::args().skip(1).filter_map(|a| a.parse().ok()).collect();
    match table(if rows.is_empty() { &[2048, 512, 128, 64, 32] } else { &rows }) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            println!("{why}");
            ExitCode::FAILURE
        }
    }
}

fn table(all_rows: &[usize]) -> Result<(), Box<dyn std::error::Error>> {
    let gpu: Arc<dyn Backend> = Arc::new(Cuda::new(CudaOptions::default())?);
    println!(
        "{:>6} {:>7} {:>7} {:>6}  {:>9}  {:>8}  {:>8}",
        "rows", "columns", "depth", "after", "us", "TFLOP/s", "bind ms"
    );
    for rows in all_rows {
        for (columns, depth, after) in WEIGHTS {
            let mut g = Builder::new();
            // An input drawn on the device: a step input would be zeros.
            let x = g.weight("x", Type::tensor(DType::BF16, [*rows, depth]))?;
            let w = g.weight("w", Type::tensor(DType::BF16, [columns, depth]))?;
            let mut y = g.linear(x, w)?;
            if after == "added" {
                let r = g.weight("r", Type::tensor(DType::BF16, [*rows, columns]))?;
                y = g.add(r, y)?;
            } else if after == "gated" {
                let up = g.weight("up", Type::tensor(DType::BF16, [columns, depth]))?;
                let up = g.linear(x, up)?;
                y = g.swiglu(y, up)?;
            }
            let graph = g.finish(vec![("y".into(), y)])?;
            let mut session = Session::new(Arc::clone(&gpu));
            for (seed, arg) in graph.args(Role::Weight).enumerate() {
                session.load_random(&arg.name, &arg.ty, seed as u64, 0.01)?;
            }
            let compiled = session.compile(&graph, &["y"])?;
            let start = std::time::Instant::now();
            let mut bucket = compiled.bucket(&Bindings::new())?;
            let bound = start.elapsed();
            let mut times = Vec::new();
            for _ in 0..7 {
                let mut seconds = 0.0;
                bucket.timed()?.iter().for_each(|launch| seconds += launch.seconds);
                times.push(seconds);
            }
            times.sort_by(f64::total_cmp);
            let products = if after == "gated" { 2.0 } else { 1.0 };
            let (seconds, flops) = (times[3], products * 2.0 * (*rows * columns * depth) as f64);
            println!(
                "{rows:>6} {columns:>7} {depth:>7} {after:>6}  {:>9.1}  {:>8.0}  {:>8.1}",
                seconds * 1e6,
                flops / seconds / 1e12,
                bound.as_secs_f64() * 1e3
            );
        }
    }
    Ok(())
}

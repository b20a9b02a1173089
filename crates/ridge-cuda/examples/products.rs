//! Times the matrix products of a Llama 3.1 8B layer on this machine's GPU, for some numbers of rows, by bf16 weights or by those
//! of a format of 8-bit codes, for which x becomes codes too: the time of that is included.
//!
//! `cargo run --release -p ridge-cuda --example products -- 2048 512 64`, `-- f8e4m3_b128 2048 512 64`

use std::process::ExitCode;
use std::sync::Arc;

use ridge_cuda::{Cuda, CudaOptions};
use ridge_graph::format::{Format, ScaledFormat};
use ridge_graph::sample::Rng;
use ridge_graph::{Arg, Bindings, Builder, DType, FormatRef, Role, Type};
use ridge_runtime::{Backend, Session, WeightData};

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
    let format = std::env::args().skip(1).find_map(|name| ScaledFormat::from_name(&name));
    match table(if rows.is_empty() { &[2048, 512, 128, 64, 32] } else { &rows }, format) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            println!("{why}");
            ExitCode::FAILURE
        }
    }
}

/// Codes that are all numbers, with scales that bring sums to about 1.
fn load_codes(
    session: &mut Session,
    arg: &Arg,
    format: ScaledFormat,
    seed: u64,
) -> Result<(), Box<dyn std::error::Error>> {
    let mut rng = Rng::new(seed);
    let parts = format.components(&arg.ty.shape).into_iter().map(|part| {
        let elements = part.shape.as_const().unwrap_or_default().iter().product::<usize>();
        match part.dtype {
            DType::F32 => (0..elements).flat_map(|_| 1e-3f32.to_le_bytes()).collect(),
            // Without the highest bit of the exponent, below that of NaN.
            _ => (0..elements.div_ceil(8)).flat_map(|_| (rng.bits() & 0xbfbf_bfbf_bfbf_bfbf).to_le_bytes()).collect(),
        }
    });
    let parts: Vec<WeightData> = parts.map(WeightData::Owned).collect();
    Ok(session.load(&arg.name, &arg.ty, parts)?)
}

fn table(all_rows: &[usize], format: Option<ScaledFormat>) -> Result<(), Box<dyn std::error::Error>> {
    let gpu: Arc<dyn Backend> = Arc::new(Cuda::new(CudaOptions::default())?);
    println!(
        "{:>6} {:>7} {:>7} {:>6}  {:>9}  {:>8}  {:>8}",
        "rows", "columns", "depth", "after", "us", "TFLOP/s", "bind ms"
    );
    for rows in all_rows {
        for (columns, depth, after) in WEIGHTS {
            let mut g = Builder::new();
            // An input drawn on the device: a step input would be zeros.
            let mut x = g.weight("x", Type::tensor(DType::BF16, [*rows, depth]))?;
            let weight = |g: &mut Builder, name: &str| {
                let plain = Type::tensor(DType::BF16, [columns, depth]);
                g.weight(name, format.map_or(plain.clone(), |format| plain.stored_as(FormatRef::new(format))))
            };
            if let Some(of_x) = format.and_then(ScaledFormat::of_activations) {
                x = g.quantize(x, of_x)?;
            }
            let w = weight(&mut g, "w")?;
            let mut y = g.linear(x, w)?;
            if after == "added" {
                let r = g.weight("r", Type::tensor(DType::BF16, [*rows, columns]))?;
                y = g.add(r, y)?;
            } else if after == "gated" {
                let up = weight(&mut g, "up")?;
                let up = g.linear(x, up)?;
                y = g.swiglu(y, up)?;
            }
            let graph = g.finish(vec![("y".into(), y)])?;
            let mut session = Session::new(Arc::clone(&gpu));
            for (seed, arg) in graph.args(Role::Weight).enumerate() {
                match format.filter(|_| arg.ty.format.is_some()) {
                    Some(format) => load_codes(&mut session, arg, format, seed as u64)?,
                    None => drop(session.load_random(&arg.name, &arg.ty, seed as u64, 0.01)?),
                }
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

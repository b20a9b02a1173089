//! What the paths cost that no hand-written kernel takes: fused chains against the machine's memory, matrix products
//! against its arithmetic, on one thread. Prints milliseconds, and GB/s of inputs and outputs or GFLOP/s.
//!
//! `cargo bench -p ridge-cpu --bench generic`

use std::sync::Arc;
use std::time::Instant;

use ridge_cpu::{Cpu, CpuOptions};
use ridge_graph::sample::Rng;
use ridge_graph::{Bindings, Builder, DType, Result, Role, Type, Var};
use ridge_runtime::Session;

/// Median seconds of a step of a graph of one output.
fn seconds(build: impl FnOnce(&mut Builder) -> Result<Var>) -> f64 {
    let mut g = Builder::new();
    let y = build(&mut g).expect("shapes fit");
    let graph = g.finish(vec![("y".into(), y)]).expect("y is main's");
    let cpu = Cpu::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }).expect("threads start");
    let session = Session::new(Arc::new(cpu));
    let compiled = session.compile(&graph, &["y"]).expect("compiles");
    let mut bucket = compiled.bucket(&Bindings::new()).expect("binds");
    let mut rng = Rng::new(1);
    let inputs: Vec<_> = compiled
        .graph()
        .args(Role::StepInput)
        .map(|a| rng.normal(a.ty.dtype, &a.ty.shape.as_const().expect("constant")).to_bytes())
        .collect();
    let mut times: Vec<f64> = (0..9)
        .map(|_| {
            inputs.iter().enumerate().for_each(|(i, bytes)| bucket.input(i).copy_from_slice(bytes));
            let start = Instant::now();
            bucket.submit().expect("runs");
            bucket.wait().expect("runs");
            start.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn input(g: &mut Builder, name: &str, dtype: DType, shape: [usize; 2]) -> Result<Var> {
    g.step_input(name, Type::tensor(dtype, shape))
}

const SHAPE: [usize; 2] = [512, 4096];

fn report(name: &str, seconds: f64, amount: f64, unit: &str) {
    println!("{name:34} {:9.3} ms {:8.2} {unit}", seconds * 1e3, amount / seconds * 1e-9);
}

fn main() {
    let elements = (SHAPE[0] * SHAPE[1]) as f64;
    for dtype in [DType::F32, DType::BF16] {
        let bytes = elements * dtype.size_bytes() as f64;
        let add = seconds(|g| {
            let (a, b) = (input(g, "a", dtype, SHAPE)?, input(g, "b", dtype, SHAPE)?);
            g.add(a, b)
        });
        report(&format!("add {dtype}"), add, 3.0 * bytes, "GB/s");
        let silu = seconds(|g| {
            let (a, b) = (input(g, "a", dtype, SHAPE)?, input(g, "b", dtype, SHAPE)?);
            let (x, y) = (g.cast(a, DType::F32)?, g.cast(b, DType::F32)?);
            let open = g.sigmoid(x)?;
            let z = g.mul(x, open)?;
            let z = g.mul(z, y)?;
            g.cast(z, dtype)
        });
        report(&format!("swiglu of primitives {dtype}"), silu, 3.0 * bytes, "GB/s");
        let norm = seconds(|g| {
            let (a, w) = (input(g, "a", dtype, SHAPE)?, input(g, "w", dtype, [1, SHAPE[1]])?);
            let x = g.cast(a, DType::F32)?;
            let square = g.mul(x, x)?;
            let sum = g.reduce_sum(square, 1)?;
            let scale = g.rsqrt(sum)?;
            let y = g.mul(x, scale)?;
            let w = g.cast(w, DType::F32)?;
            let y = g.mul(y, w)?;
            g.cast(y, dtype)
        });
        report(&format!("norm of primitives {dtype}"), norm, 2.0 * bytes, "GB/s");
        let columns = seconds(|g| {
            let a = input(g, "a", dtype, SHAPE)?;
            g.reduce_sum(a, 0)
        });
        report(&format!("sum of columns {dtype}"), columns, bytes, "GB/s");
        let turned = seconds(|g| {
            let a = input(g, "a", dtype, SHAPE)?;
            g.transpose(a, &[1, 0])
        });
        report(&format!("transpose {dtype}"), turned, 2.0 * bytes, "GB/s");
        for (trans_a, trans_b) in [(false, true), (false, false), (true, false)] {
            let n = 512;
            let product = seconds(|g| {
                let (a, b) = (input(g, "a", dtype, [n, n])?, input(g, "b", dtype, [n, n])?);
                g.matmul(a, b, trans_a, trans_b, dtype)
            });
            report(&format!("matmul {dtype} {trans_a} {trans_b}"), product, 2.0 * (n * n * n) as f64, "GFLOP/s");
        }
    }
    let sorted = seconds(|g| {
        let a = input(g, "a", DType::F32, [1, 128_000])?;
        Ok(g.sort(a, 1, true, 128_000)?.0)
    });
    report("sort of 128000", sorted, 128e3, "G/s");
}

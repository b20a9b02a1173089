//! What an op costs besides its kernel: a chain of norms over one row of 8 elements, some 10 ns of arithmetic each,
//! one launch a norm. Prints nanoseconds a launch, and a step's fixed cost from chains of two lengths.
//!
//! `cargo bench -p ridge-cpu --bench executor`

use std::sync::Arc;
use std::time::Instant;

use ridge_cpu::{Cpu, CpuOptions};
use ridge_graph::{Bindings, Builder, DType, Type};
use ridge_runtime::{Session, WeightData};

const HIDDEN: usize = 8;

/// Median nanoseconds of a step of `launches` norms.
fn step_nanos(threads: usize, launches: usize) -> f64 {
    let mut g = Builder::new();
    let w = g.weight("w", Type::tensor(DType::F32, [HIDDEN])).expect("a fresh name");
    let mut x = g.step_input("x", Type::tensor(DType::F32, [1, HIDDEN])).expect("a fresh name");
    for _ in 0..launches {
        x = g.rms_norm(x, w, 1e-5).expect("shapes fit");
    }
    let graph = g.finish(vec![("y".into(), x)]).expect("x is main's");
    let cpu = Cpu::new(CpuOptions { threads: Some(threads), ..CpuOptions::default() }).expect("threads start");
    let mut session = Session::new(Arc::new(cpu));
    let ones = DType::F32.encode([1.0; HIDDEN]);
    session.load("w", &Type::tensor(DType::F32, [HIDDEN]), vec![WeightData::Owned(ones)]).expect("loads");
    let compiled = session.compile(&graph, &["y"]).expect("compiles");
    let mut bucket = compiled.bucket(&Bindings::new()).expect("binds");
    let mut times: Vec<f64> = (0..2000)
        .map(|_| {
            bucket.input(0).copy_from_slice(&DType::F32.encode([0.5; HIDDEN]));
            let start = Instant::now();
            bucket.submit().expect("runs");
            bucket.wait().expect("runs");
            start.elapsed().as_nanos() as f64
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn main() {
    println!("threads  ns/launch  ns/step");
    for threads in [1, 2] {
        let (short, long) = (step_nanos(threads, 100), step_nanos(threads, 1100));
        let launch = (long - short) / 1000.0;
        println!("{threads:7}  {launch:9.1}  {:7.0}", short - 100.0 * launch);
    }
}

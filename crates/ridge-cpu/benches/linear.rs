//! Products with parameters: GFLOP/s and GB/s of weights for shapes of small and large models, each several times in
//! one step, so that the step's own cost is spread. Rates are those of the fastest step, which the rest of the machine
//! disturbed least; the median is beside it.
//!
//! `cargo bench -p ridge-cpu --bench linear -- [threads] [part of a shape's name]`

use std::sync::Arc;
use std::time::Instant;

use ridge_cpu::{Cpu, CpuOptions};
use ridge_graph::format::{BLOCK, ScaledFormat};
use ridge_graph::passes::{Activations, round_activations};
use ridge_graph::sample::Rng;
use ridge_graph::{Bindings, Builder, DType, FormatRef, Type};
use ridge_runtime::{Session, WeightData};

struct Case {
    name: &'static str,
    rows: usize,
    inner: usize,
    columns: usize,
    weight: DType,
    /// Dtype of x.
    x: DType,
    /// The format that it is stored in.
    format: Option<&'static str>,
    /// Is x rounded to codes?
    int8: bool,
    /// Distinct weights, so that together they are in memory rather than in cache, or not.
    weights: usize,
}

const fn case(name: &'static str, rows: usize, inner: usize, columns: usize, weight: DType, weights: usize) -> Case {
    Case { name, rows, inner, columns, weight, x: DType::F32, format: None, int8: false, weights }
}

/// By codes of x of bf16.
const fn codes(
    name: &'static str,
    format: &'static str,
    rows: usize,
    inner: usize,
    columns: usize,
    weights: usize,
) -> Case {
    let plain = case(name, rows, inner, columns, DType::F32, weights);
    Case { x: DType::BF16, format: Some(format), int8: true, ..plain }
}

fn cases() -> Vec<Case> {
    let (f32, bf16, f16) = (DType::F32, DType::BF16, DType::F16);
    vec![
        case("stories260K qkvo", 1, 64, 64, f32, 20),
        case("stories260K gate", 1, 64, 172, f32, 10),
        case("stories260K down", 1, 172, 64, f32, 5),
        case("stories260K head", 1, 64, 512, f32, 2),
        case("llama-1b gate f32", 1, 2048, 8192, f32, 4),
        case("llama-1b gate bf16", 1, 2048, 8192, bf16, 8),
        case("llama-1b gate f16", 1, 2048, 8192, f16, 8),
        Case { format: Some("q8_0"), ..case("llama-1b gate q8_0", 1, 2048, 8192, f32, 16) },
        Case { format: Some("q8_0"), x: bf16, ..case("llama-1b gate q8_0 by bf16", 1, 2048, 8192, f32, 16) },
        Case { format: Some("q4_0"), x: bf16, ..case("llama-1b gate q4_0 by bf16", 1, 2048, 8192, f32, 16) },
        Case { format: Some("q4_k"), x: bf16, ..case("llama-1b gate q4_k by bf16", 1, 2048, 8192, f32, 16) },
        Case { format: Some("q6_k"), x: bf16, ..case("llama-1b gate q6_k by bf16", 1, 2048, 8192, f32, 16) },
        codes("in L2, 512 columns, q8_0 int8", "q8_0", 1, 2048, 512, 1),
        codes("in L2, 512 columns, q4_k int8", "q4_k", 1, 2048, 512, 1),
        codes("in L2, 512 columns, q6_k int8", "q6_k", 1, 2048, 512, 1),
        codes("in L2, 512 columns, q8_0 int8 x64", "q8_0", 64, 2048, 512, 1),
        codes("in L2, 512 columns, q4_k int8 x64", "q4_k", 64, 2048, 512, 1),
        codes("in L2, 512 columns, q6_k int8 x64", "q6_k", 64, 2048, 512, 1),
        codes("in L2, 32 columns, q8_0 int8 x4", "q8_0", 4, 2048, 32, 1),
        codes("in L2, 32 columns, q4_k int8 x4", "q4_k", 4, 2048, 32, 1),
        codes("in L2, 32 columns, q8_0 int8 x8", "q8_0", 8, 2048, 32, 1),
        codes("in L2, 32 columns, q4_k int8 x8", "q4_k", 8, 2048, 32, 1),
        Case { x: bf16, ..case("in L2, 16 columns, bf16 by bf16 x128", 128, 2048, 16, bf16, 1) },
        Case { x: bf16, ..case("in L2, 64 columns, bf16 by bf16", 1, 2048, 64, bf16, 1) },
        case("in L2, 32 columns, f32 x64", 64, 1024, 32, f32, 1),
        case("in L2, 32 columns, bf16 x64", 64, 1024, 32, bf16, 1),
        codes("llama-1b gate q8_0 int8", "q8_0", 1, 2048, 8192, 16),
        codes("llama-1b down q8_0 int8", "q8_0", 1, 8192, 2048, 16),
        codes("llama-1b gate q4_0 int8", "q4_0", 1, 2048, 8192, 24),
        codes("llama-1b gate q4_k int8", "q4_k", 1, 2048, 8192, 24),
        codes("llama-1b down q4_k int8", "q4_k", 1, 8192, 2048, 24),
        codes("llama-1b gate q6_k int8", "q6_k", 1, 2048, 8192, 16),
        codes("llama-1b gate q5_k int8", "q5_k", 1, 2048, 8192, 16),
        codes("llama-1b gate iq4_xs int8", "iq4_xs", 1, 2048, 8192, 16),
        codes("llama-1b gate q4_k int8 x2", "q4_k", 2, 2048, 8192, 8),
        codes("llama-1b gate q8_0 int8 x4", "q8_0", 4, 2048, 8192, 8),
        codes("llama-1b gate q4_k int8 x4", "q4_k", 4, 2048, 8192, 8),
        codes("llama-1b gate q8_0 int8 x256", "q8_0", 256, 2048, 8192, 1),
        codes("llama-1b down q8_0 int8 x256", "q8_0", 256, 8192, 2048, 1),
        codes("llama-1b gate q4_0 int8 x256", "q4_0", 256, 2048, 8192, 1),
        codes("llama-1b gate q4_k int8 x256", "q4_k", 256, 2048, 8192, 1),
        codes("llama-1b down q4_k int8 x256", "q4_k", 256, 8192, 2048, 1),
        codes("llama-1b gate q6_k int8 x256", "q6_k", 256, 2048, 8192, 1),
        codes("8 bits: q8_0 x1", "q8_0", 1, 2048, 8192, 16),
        codes("8 bits: int8 x1", "int8_row", 1, 2048, 8192, 16),
        Case { format: Some("f8e4m3_row"), x: bf16, ..case("8 bits: f8 x1", 1, 2048, 8192, f32, 16) },
        Case { format: Some("f8e4m3_b128"), x: bf16, ..case("8 bits: f8 b128 x1", 1, 2048, 8192, f32, 16) },
        Case { x: bf16, ..case("8 bits: bf16 x1", 1, 2048, 8192, bf16, 8) },
        codes("8 bits: q8_0 x8", "q8_0", 8, 2048, 8192, 16),
        codes("8 bits: int8 x8", "int8_row", 8, 2048, 8192, 16),
        Case { format: Some("f8e4m3_row"), x: bf16, ..case("8 bits: f8 x8", 8, 2048, 8192, f32, 16) },
        Case { format: Some("f8e4m3_b128"), x: bf16, ..case("8 bits: f8 b128 x8", 8, 2048, 8192, f32, 16) },
        Case { x: bf16, ..case("8 bits: bf16 x8", 8, 2048, 8192, bf16, 8) },
        codes("8 bits: q8_0 x128", "q8_0", 128, 2048, 8192, 1),
        codes("8 bits: int8 x128", "int8_row", 128, 2048, 8192, 1),
        Case { format: Some("f8e4m3_row"), x: bf16, ..case("8 bits: f8 x128", 128, 2048, 8192, f32, 1) },
        Case { format: Some("f8e4m3_b128"), x: bf16, ..case("8 bits: f8 b128 x128", 128, 2048, 8192, f32, 1) },
        Case { x: bf16, ..case("8 bits: bf16 x128", 128, 2048, 8192, bf16, 1) },
        codes("8 bits: q8_0 x512", "q8_0", 512, 2048, 8192, 1),
        codes("8 bits: int8 x512", "int8_row", 512, 2048, 8192, 1),
        Case { format: Some("f8e4m3_row"), x: bf16, ..case("8 bits: f8 x512", 512, 2048, 8192, f32, 1) },
        Case { format: Some("f8e4m3_b128"), x: bf16, ..case("8 bits: f8 b128 x512", 512, 2048, 8192, f32, 1) },
        Case { x: bf16, ..case("8 bits: bf16 x512", 512, 2048, 8192, bf16, 1) },
        case("llama-1b down bf16", 1, 8192, 2048, bf16, 8),
        Case { x: bf16, ..case("llama-1b gate bf16 by bf16", 1, 2048, 8192, bf16, 8) },
        Case { x: bf16, ..case("llama-1b gate bf16 by bf16 x256", 256, 2048, 8192, bf16, 1) },
        Case { x: bf16, ..case("llama-1b down bf16 by bf16 x256", 256, 8192, 2048, bf16, 1) },
        case("llama-1b gate bf16 x4", 4, 2048, 8192, bf16, 4),
        case("llama-1b gate bf16 x16", 16, 2048, 8192, bf16, 2),
        case("llama-1b gate bf16 x256", 256, 2048, 8192, bf16, 1),
        case("llama-1b down bf16 x256", 256, 8192, 2048, bf16, 1),
        case("llama-1b gate f32 x256", 256, 2048, 8192, f32, 1),
        Case { format: Some("q8_0"), ..case("llama-1b gate q8_0 x256", 256, 2048, 8192, f32, 1) },
        Case { format: Some("q8_0"), x: bf16, ..case("llama-1b gate q8_0 by bf16 x256", 256, 2048, 8192, f32, 1) },
        Case { format: Some("q4_k"), x: bf16, ..case("llama-1b gate q4_k by bf16 x256", 256, 2048, 8192, f32, 1) },
        Case { format: Some("q6_k"), x: bf16, ..case("llama-1b gate q6_k by bf16 x256", 256, 2048, 8192, f32, 1) },
        Case { format: Some("q4_0"), x: bf16, ..case("llama-1b gate q4_0 by bf16 x256", 256, 2048, 8192, f32, 1) },
        Case { format: Some("mxfp4"), x: bf16, ..case("llama-1b gate mxfp4 by bf16 x256", 256, 2048, 8192, f32, 1) },
        Case { format: Some("q8_0"), x: bf16, ..case("llama-1b down q8_0 by bf16 x256", 256, 8192, 2048, f32, 1) },
    ]
}

fn format(name: &str) -> FormatRef {
    let scaled = ScaledFormat::from_name(name).map(FormatRef::new);
    scaled.or_else(|| FormatRef::from_name(name)).expect("a format")
}

/// Least and median seconds of one product, and bytes of its weight.
fn seconds(case: &Case, threads: usize) -> ([f64; 2], usize) {
    let mut g = Builder::new();
    let x = g.step_input("x", Type::tensor(case.x, [case.rows, case.inner])).expect("a fresh name");
    let plain = Type::tensor(case.weight, [case.columns, case.inner]);
    let ty = match case.format {
        Some(name) => plain.stored_as(format(name)),
        None => plain,
    };
    let names: Vec<String> = (0..case.weights).map(|i| format!("w{i}")).collect();
    let cpu = Cpu::new(CpuOptions { threads: Some(threads), ..CpuOptions::default() }).expect("threads start");
    let mut session = Session::new(Arc::new(cpu));
    let mut rng = Rng::new(1);
    let line: Vec<f32> = (0..case.inner * 8).map(|_| rng.gauss() as f32).collect();
    // Rows repeat, so that a few are encoded.
    let repeated = if case.format.is_some_and(|name| name.ends_with("b128")) { BLOCK } else { 8 };
    let rows = if case.columns.is_multiple_of(repeated) { repeated } else { case.columns };
    let values: Vec<f32> = line.iter().copied().cycle().take(rows * case.inner).collect();
    let parts = match &ty.format {
        Some(format) => format.encode(&values, &[rows, case.inner], None),
        None => vec![case.weight.encode(values.iter().map(|v| f64::from(*v)))],
    };
    let parts: Vec<Vec<u8>> = parts.into_iter().map(|part| part.repeat(case.columns / rows)).collect();
    let bytes: usize = parts.iter().map(Vec::len).sum();
    let mut outputs = Vec::new();
    for name in &names {
        session.load(name, &ty, parts.iter().cloned().map(WeightData::Owned).collect()).expect("loads");
        let w = g.weight(name, ty.clone()).expect("a fresh name");
        outputs.push((format!("y{name}"), g.linear(x, w).expect("shapes fit")));
    }
    let wanted: Vec<String> = outputs.iter().map(|(name, _)| name.clone()).collect();
    let mut graph = g.finish(outputs).expect("values are main's");
    if case.int8 {
        round_activations(&mut graph, Activations::Int8);
    }
    let wanted: Vec<&str> = wanted.iter().map(String::as_str).collect();
    let compiled = session.compile(&graph, &wanted).expect("compiles");
    let mut bucket = compiled.bucket(&Bindings::new()).expect("binds");
    let x = case.x.encode(line.iter().cycle().take(case.rows * case.inner).map(|v| f64::from(*v)));
    bucket.input(0).copy_from_slice(&x);
    let work = case.rows * case.inner * case.columns * case.weights;
    let mut times: Vec<f64> = (0..(2_000_000_000 / work.max(1)).clamp(5, 2000))
        .map(|_| {
            let start = Instant::now();
            bucket.submit().expect("runs");
            bucket.wait().expect("runs");
            start.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    ([times[0], times[times.len() / 2]].map(|t| t / case.weights as f64), bytes)
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let threads = args.first().and_then(|a| a.parse().ok()).unwrap_or(1);
    let part = args.get(1).map_or("", String::as_str);
    println!("{threads} threads");
    println!("{:28}{:>6}{:>6}{:>6}{:>12}{:>12}{:>10}{:>8}", "", "M", "K", "N", "us", "median", "GFLOP/s", "GB/s");
    for case in cases().iter().filter(|c| c.name.contains(part)) {
        let ([seconds, median], bytes) = seconds(case, threads);
        let products = (case.rows * case.inner * case.columns) as f64;
        println!(
            "{:28}{:6}{:6}{:6}{:12.2}{:12.2}{:10.1}{:8.1}",
            case.name,
            case.rows,
            case.inner,
            case.columns,
            seconds * 1e6,
            median * 1e6,
            2.0 * products / seconds / 1e9,
            bytes as f64 / seconds / 1e9
        );
    }
}

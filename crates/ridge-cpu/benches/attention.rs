//! Attention over a paged cache: time of a step, GFLOP/s of its two products, and GB/s of keys and values, which each
//! step reads once or more. Rates are those of the fastest step, which the rest of the machine disturbed least; the
//! median is beside it.
//!
//! `cargo bench -p ridge-cpu --bench attention -- [threads] [part of a case's name]`

use std::sync::Arc;
use std::time::Instant;

use ridge_cpu::{Cpu, CpuOptions};
use ridge_graph::ops::PagedAttention;
use ridge_graph::sample::Rng;
use ridge_graph::{Bindings, Builder, DType, Shape, Sym, Type};
use ridge_runtime::Session;

struct Case {
    name: &'static str,
    /// Query heads, kv heads, elements of a head.
    heads: [usize; 3],
    /// Tokens of the step, and those in the cache before them.
    tokens: usize,
    before: usize,
    dtype: DType,
    cache: DType,
}

const fn case(name: &'static str, heads: [usize; 3], tokens: usize, before: usize, dtype: DType, cache: DType) -> Case {
    Case { name, heads, tokens, before, dtype, cache }
}

fn cases() -> Vec<Case> {
    let (f32, bf16, f16) = (DType::F32, DType::BF16, DType::F16);
    let (llama, stories) = ([32, 8, 64], [8, 4, 8]);
    vec![
        case("stories260K token at 100", stories, 1, 100, f32, f32),
        case("stories260K token at 400", stories, 1, 400, f32, f32),
        case("llama-1b token at 4096", llama, 1, 4096, bf16, bf16),
        case("llama-1b token at 4096 f16", llama, 1, 4096, bf16, f16),
        case("llama-1b token at 4096 f32", llama, 1, 4096, f32, f32),
        case("llama-1b token at 4096 int8", llama, 1, 4096, bf16, DType::I8),
        case("one kv head, token at 16384", [4, 1, 64], 1, 16384, bf16, bf16),
        case("llama-1b prompt 256", llama, 256, 0, bf16, bf16),
        case("llama-1b prompt 512 at 2048", llama, 512, 2048, bf16, bf16),
        case("llama-1b prompt 512 at 2048 int8", llama, 512, 2048, bf16, DType::I8),
        case("llama-1b prompt 4096", llama, 4096, 0, bf16, bf16),
        case("llama-1b prompt 512 at 2048 f32", llama, 512, 2048, f32, f32),
        case("llama-8b prompt 512 at 2048", [32, 8, 128], 512, 2048, bf16, bf16),
    ]
}

/// Least and median seconds of a step.
fn seconds(case: &Case, threads: usize) -> [f64; 2] {
    const BLOCK: usize = 16;
    let ([heads, kv_heads, dim], tokens) = (case.heads, case.tokens);
    let blocks = (case.before + tokens).div_ceil(BLOCK);
    let cpu = Cpu::new(CpuOptions { threads: Some(threads), ..CpuOptions::default() }).expect("threads start");
    let mut session = Session::new(Arc::new(cpu));
    let mut g = Builder::new();
    let q = g.step_input("q", Type::tensor(case.dtype, [tokens, heads, dim])).expect("a fresh name");
    let state = Type { state: true, ..Type::tensor(case.cache, [blocks, 2, kv_heads, BLOCK, dim]) };
    let kv = g.state("kv", state.clone()).expect("a fresh name");
    let of_codes = case.cache == DType::I8;
    let scales = state.shape.0[..4].to_vec();
    let scales = of_codes.then(|| g.state("scales", Type::state(DType::F32, Shape(scales))).expect("a fresh name"));
    let mut integers = |name: &str, shape: &[usize]| {
        g.step_input(name, Type::tensor(DType::I32, Shape::new(shape.to_vec()))).expect("a fresh name")
    };
    let (table, ids, positions) =
        (integers("table", &[1, blocks]), integers("ids", &[tokens]), integers("positions", &[tokens]));
    let op = PagedAttention::new(1.0 / (dim as f64).sqrt(), Sym::new("pairs"), Sym::new("cached"));
    let y = match scales {
        Some(scales) => g.attention_with([q, kv, table, ids, positions], &[scales], op),
        None => g.attention(q, kv, table, ids, positions, op),
    };
    let y = y.expect("shapes fit");
    let graph = g.finish(vec![("y".into(), y)]).expect("the value is main's");
    session.allocate_states(&graph, &Bindings::new()).expect("there is memory");
    let mut rng = Rng::new(1);
    let line: Vec<f64> = (0..4099).map(|_| rng.gauss()).collect();
    let random = |dtype: DType, count: usize| dtype.encode(line.iter().copied().cycle().take(count));
    let buffer = session.state("kv").expect("just allocated");
    let elements = blocks * 2 * kv_heads * BLOCK * dim;
    if of_codes {
        let codes: Vec<u8> = line.iter().map(|x| (x * 40.0) as i8 as u8).cycle().take(elements).collect();
        session.backend().write(&buffer, &codes).expect("fits");
        let buffer = session.state("scales").expect("just allocated");
        session.backend().write(&buffer, &DType::F32.encode(vec![1.0 / 40.0; elements / dim])).expect("fits");
    } else {
        session.backend().write(&buffer, &random(case.cache, elements)).expect("fits");
    }
    let compiled = session.compile(&graph, &["y"]).expect("compiles");
    let mut bucket = compiled.bucket(&Bindings::new()).expect("binds");
    bucket.input(0).copy_from_slice(&random(case.dtype, tokens * heads * dim));
    let mut fill = |input: usize, values: &mut dyn Iterator<Item = i32>| {
        let bytes: Vec<u8> = values.flat_map(i32::to_le_bytes).collect();
        bucket.input(input).copy_from_slice(&bytes);
    };
    fill(1, &mut (0..blocks as i32));
    fill(2, &mut std::iter::repeat_n(0, tokens));
    fill(3, &mut (case.before as i32..(case.before + tokens) as i32));
    let work = tokens * (case.before + tokens) * heads * dim;
    let mut times: Vec<f64> = (0..(20_000_000_000 / work.max(1)).clamp(5, 2000))
        .map(|_| {
            let start = Instant::now();
            bucket.submit().expect("runs");
            bucket.wait().expect("runs");
            start.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    [times[0], times[times.len() / 2]]
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let threads = args.first().and_then(|a| a.parse().ok()).unwrap_or(1);
    let part = args.get(1).map_or("", String::as_str);
    println!("{threads} threads");
    println!("{:34}{:>12}{:>12}{:>10}{:>8}", "", "us", "median", "GFLOP/s", "GB/s");
    for case in cases().iter().filter(|c| c.name.contains(part)) {
        let [seconds, median] = seconds(case, threads);
        let [heads, kv_heads, dim] = case.heads;
        let pairs = case.tokens * case.before + case.tokens * (case.tokens + 1) / 2;
        let bytes = (case.before + case.tokens) * 2 * kv_heads * dim * case.cache.size_bytes();
        println!(
            "{:34}{:12.2}{:12.2}{:10.1}{:8.1}",
            case.name,
            seconds * 1e6,
            median * 1e6,
            (4 * pairs * heads * dim) as f64 / seconds / 1e9,
            bytes as f64 / seconds / 1e9
        );
    }
}

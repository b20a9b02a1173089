//! What compilation takes for graphs of large models: building, lowering for the CPU's kernels, planning one bucket's
//! memory, and binding it to addresses. A model may take 200 ms in all.
//!
//!     cargo bench -p ridge-models --bench compile
//!
//! Building, lowering and planning need no weights, so they run at the published sizes. Binding makes kernels for
//! weights that exist, so it runs at the same number of layers with small ones.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ridge_cpu::{Cpu, CpuOptions};
use ridge_graph::{Bindings, DType, Graph};
use ridge_models::{BuildOptions, LlamaConfig, Model, WeightSource, llama, symbols};
use ridge_runtime::{Backend, Session, lower, plan};

const RUNS: usize = 11;
/// Of building, lowering, planning and binding together.
const TARGET: Duration = Duration::from_millis(200);

fn config(name: &str) -> serde_json::Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/data/configs/Meta-Llama-3.1-{name}.json"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).expect("JSON")
}

/// The same layers with matrices of some kilobytes.
fn narrowed(mut config: serde_json::Value) -> serde_json::Value {
    let sizes = [("hidden_size", 64), ("intermediate_size", 128), ("num_attention_heads", 8), ("vocab_size", 512)];
    for (key, value) in sizes.into_iter().chain([("num_key_value_heads", 2)]) {
        config[key] = value.into();
    }
    for key in ["bos_token_id", "eos_token_id", "head_dim"] {
        config.as_object_mut().expect("an object").remove(key);
    }
    config
}

fn build(config: &serde_json::Value) -> Model {
    let config = LlamaConfig::from_json("config.json", &config.to_string()).expect("is supported");
    let mut model = llama(&config, &BuildOptions::default()).expect("builds");
    model.graph = WeightSource::Random(DType::BF16).retype(&model.graph, None).expect("retypes");
    model
}

fn bindings() -> Bindings {
    Bindings::new()
        .with(symbols::TOKENS, 64)
        .with(symbols::SEQS, 4)
        .with(symbols::TABLE, 16)
        .with(symbols::BLOCKS, 64)
        .with(symbols::PAIRS, 0)
        .with(symbols::CACHED, 0)
}

/// The median time of `run`, and its last result.
fn median<T>(mut run: impl FnMut() -> T) -> (Duration, T) {
    let mut times = Vec::with_capacity(RUNS);
    let mut last = None;
    for _ in 0..RUNS {
        let start = Instant::now();
        let result = std::hint::black_box(run());
        times.push(start.elapsed());
        last = Some(result);
    }
    times.sort_unstable();
    (times[RUNS / 2], last.expect("ran"))
}

fn bind(model: &Model, cpu: &Arc<Cpu>) -> Duration {
    let mut session = Session::new(Arc::clone(cpu) as Arc<dyn Backend>);
    WeightSource::Random(DType::BF16).load(&mut session, &model.graph, |_| ()).expect("loads");
    session.allocate_states(&model.graph, &bindings()).expect("fits");
    let compiled = session.compile(&model.graph, &["next"]).unwrap_or_else(|e| panic!("{e}"));
    median(|| compiled.bucket(&bindings()).unwrap_or_else(|e| panic!("{e}"))).0
}

fn main() {
    let cpu = Arc::new(Cpu::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }).expect("starts"));
    println!("medians of {RUNS} runs; the target is {TARGET:?} for all four");
    for name in ["8B", "70B", "405B"] {
        let config = config(name);
        let (built, model) = median(|| build(&config));
        let (lowered, graph): (_, Graph) =
            median(|| lower(&model.graph, &["next"], cpu.kernels()).unwrap_or_else(|e| panic!("{e}")));
        let (planned, launches) = median(|| plan(&graph, &bindings()).expect("plans").launches.len());
        let bound = bind(&build(&narrowed(config)), &cpu);
        let total = built + lowered + planned + bound;
        println!(
            "{name:>5} ({:>3} layers): build {built:>9.2?}  lower {lowered:>9.2?}  plan {planned:>9.2?}  bind {bound:>9.2?} \
             (narrow)  total {total:>9.2?}{}  {launches} launches",
            model.state_groups[0].states.len(),
            if total > TARGET { "  OVER" } else { "" },
        );
    }
}

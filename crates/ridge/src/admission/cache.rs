//! The memory of what an engine keeps between steps.

use ridge_engine::EngineOptions;
use ridge_engine::scoring::ScorerOptions;
use ridge_hw::units::Bytes;
use ridge_models::Model;

/// How large a cache is.
#[derive(Clone, Copy, Debug)]
pub enum CacheSize {
    /// As an engine makes it: groups with a window have pools of their own.
    Engine(EngineOptions),
    /// As a scorer makes it.
    Scorer(ScorerOptions),
}

/// Bytes of a cache: keys and values of all layers with their scales, the history of tokens, and in an engine the states of a
/// fixed size.
pub fn cache_bytes(model: &Model, size: CacheSize) -> Bytes {
    let tokens = |window: Option<usize>| match (size, window) {
        (CacheSize::Scorer(options), _) => options.blocks(model.block_size) * model.block_size,
        (CacheSize::Engine(options), None) => options.cache_blocks(model.block_size) * model.block_size,
        (CacheSize::Engine(options), Some(window)) => {
            options.window_blocks(window, model.block_size) * model.block_size
        }
    };
    let lines = match size {
        CacheSize::Scorer(options) => options.state_lines(),
        CacheSize::Engine(options) => options.state_lines(),
    };
    let groups = model.state_groups.iter().chain([&model.history]);
    let of_group = |g: &ridge_models::StateGroup| {
        Bytes(g.bytes_per_token as u64) * tokens(g.window) as u64 + Bytes(g.bytes_per_sequence as u64) * lines as u64
    };
    groups.map(of_group).fold(Bytes(0), |a, b| a + b)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ridge_cpu::{Cpu, CpuOptions};
    use ridge_engine::Engine;
    use ridge_graph::DType;
    use ridge_models::{BuildOptions, ModelConfig, WeightSource};
    use ridge_runtime::{Backend, MemoryOwner, Session};

    use super::*;

    /// Bytes that an engine of a family's fixture allocates for what outlives a step but its rows, which each dtype of the cache
    /// has alike, and what is counted.
    fn allocated_and_counted(family: &str, cache: DType) -> (usize, u64) {
        let config = format!("{}/../../fixtures/families/{family}/config.json", env!("CARGO_MANIFEST_DIR"));
        let config = ModelConfig::from_json("config.json", &std::fs::read_to_string(config).unwrap()).unwrap();
        let built = BuildOptions { context: Some(64), cache, ..BuildOptions::default() };
        let model = config.build(&built).unwrap();
        let cpu: Arc<dyn Backend> =
            Arc::new(Cpu::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }).unwrap());
        let mut session = Session::new(Arc::clone(&cpu));
        WeightSource::Random(DType::F32).load(&mut session, &model.graph, |_| ()).unwrap();
        // Blocks enough that no state is padded.
        let options = EngineOptions { context: 64, sequences: 16, chunk: 16, blocks: Some(256) };
        let engine = Engine::new(session, &model, options).unwrap();
        let states = cpu.memory().live.get(MemoryOwner::States);
        drop(engine);
        (states, cache_bytes(&model, CacheSize::Engine(options)).0)
    }

    #[test]
    fn counted_caches_are_those_that_engines_allocate() {
        for family in ["qwen3", "gemma3", "deepseek_v3", "mamba"] {
            let (allocated, counted) = allocated_and_counted(family, DType::F32);
            let rows = allocated as u64 - counted;
            for cache in [DType::F32, DType::BF16, DType::I8, DType::F8E4M3] {
                let (allocated, counted) = allocated_and_counted(family, cache);
                assert_eq!(allocated as u64, counted + rows, "{family}, {cache}");
            }
            // Rows of 16 sequences with their tables, less than any state that might be left out.
            assert!(rows < 1 << 18 && counted > rows, "{family}: {rows} bytes besides caches of {counted}");
        }
    }
}

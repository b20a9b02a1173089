//! The memory that a model allocates on its device, checked before anything large is allocated.

mod cache;
mod steps;

use ridge_graph::Bindings;
use ridge_hw::units::Bytes;
use ridge_models::{DRAFTS, Model, RowTables, row_changes, symbols, with_scores};
use ridge_runtime::Backend;

use crate::error::{Error, Result, Smaller};
pub use cache::{CacheSize, cache_bytes};
pub use steps::StepExtents;
use steps::{StepBytes, StepProgram, bucket_extents};

/// The programs that an engine runs: by what its steps return.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EnginePrograms {
    /// Steps that fill the cache, and steps that sample without adjustments.
    Plain,
    /// Also steps that adjust logits before they sample, or return log-probabilities.
    Sampling,
    /// Also steps that score the tokens of prompts: all that an engine can run.
    All,
}

impl EnginePrograms {
    /// Outputs of each program.
    fn outputs(self) -> &'static [&'static [&'static str]] {
        const ALL: [&[&str]; 6] = [
            &[],
            &["next"],
            &["next_adjusted"],
            &["next", "logprob", "top_ids", "top_logprobs"],
            &["next_adjusted", "adjusted_logprob", "top_ids", "top_logprobs"],
            &["next_adjusted", "adjusted_logprob", "top_ids", "top_logprobs", "scores"],
        ];
        match self {
            Self::Plain => &ALL[..2],
            Self::Sampling => &ALL[..5],
            Self::All => &ALL,
        }
    }
}

/// Bytes on the device that the steps of an engine need beside weights and cache: the workspace, which is as large as the
/// step that needs most has it, and inputs, outputs and constants of all buckets that an engine keeps. A step of few
/// tokens may need more than one of many, where attention over a long context is divided among blocks of threads, so all
/// extents are compared. Where tokens are drafted, steps count that verify as many drafts of all sequences as there may be.
///
/// # Errors
/// When the backend has no kernel for an op of the model.
pub fn engine_bytes(
    model: &Model,
    backend: &dyn Backend,
    programs: EnginePrograms,
    largest: StepExtents,
) -> Result<Bytes> {
    Ok(engine_memory(model, backend, programs, largest)?.sum())
}

fn engine_memory(
    model: &Model,
    backend: &dyn Backend,
    programs: EnginePrograms,
    largest: StepExtents,
) -> Result<StepBytes> {
    let blocks = largest.context.div_ceil(model.block_size);
    let limit = Some(ridge_engine::MAX_STAGING_BYTES);
    let mut total = StepBytes::new(ridge_engine::MAX_BUCKETS, limit);
    let drafts = ridge_engine::drafts_of(model).max(largest.candidates);
    let lines = largest.sequences * (1 + drafts);
    for outputs in programs.outputs() {
        for graph in std::iter::once(&model.graph).chain(&model.answers) {
            let served = ridge_engine::served(graph, outputs, blocks)?;
            let program = StepProgram::new(&served, outputs, backend)?;
            total.add_program(&program.largest(model, largest, bucket_extents(largest.tokens))?);
            if drafts > 0 && !outputs.is_empty() {
                let verifying = ridge_engine::verifying(graph, outputs, blocks)?;
                let program = StepProgram::new(&verifying, outputs, backend)?.with_lines(1 + drafts);
                total.add_program(&program.largest(model, largest, bucket_extents(largest.tokens.max(lines)))?);
            }
        }
    }
    if let Some(graph) = ridge_engine::drafting(model, blocks)? {
        let program = StepProgram::new(&graph, &[DRAFTS], backend)?;
        total.add_program(&program.largest(model, largest, bucket_extents(largest.sequences))?);
    }
    let changes = row_changes(&RowTables::of(&model.graph, ridge_engine::row_widths(blocks)))?;
    let changes = StepProgram::new(&changes, &[], backend)?;
    let extents = Bindings::new().with(symbols::ROWS, largest.sequences).with(symbols::CHANGES, ridge_engine::CHANGES);
    total.add_program(&changes.program.memory(&extents)?);
    Ok(total)
}

/// Bytes on the device that the steps of a scorer need beside weights and cache, as [`engine_bytes`].
///
/// # Errors
/// When the backend has no kernel for an op of the model.
pub fn scorer_bytes(model: &Model, backend: &dyn Backend, largest: StepExtents) -> Result<Bytes> {
    Ok(scorer_memory(model, backend, largest)?.sum())
}

fn scorer_memory(model: &Model, backend: &dyn Backend, largest: StepExtents) -> Result<StepBytes> {
    let graph = with_scores(&model.graph)?;
    let mut total = StepBytes::new(ridge_engine::scoring::MAX_BUCKETS, None);
    for outputs in [&[][..], &["scores"]] {
        let program = StepProgram::new(&graph, outputs, backend)?;
        // A scorer's steps have as many tokens as it happens to have. Extents of buckets stand for those between them.
        let extents = bucket_extents(largest.tokens).map(|tokens| tokens.min(largest.tokens));
        total.add_program(&program.largest(model, largest, extents)?);
    }
    Ok(total)
}

/// Compares what the model will allocate with what this process may allocate, so that the message comes from here rather than from the
/// system. All weights count: those that kernels read in the mapped file are few, and known only once they are loaded.
///
/// # Errors
/// Says what does not fit, and what makes it smaller.
pub(crate) fn check_memory(
    model: &Model,
    cached: CacheSize,
    workspace: impl FnOnce() -> Result<Bytes>,
    available: Bytes,
) -> Result<()> {
    compare(Bytes(model.weight_bytes()), cache_bytes(model, cached), workspace, available)
}

/// As [`check_memory`], of these sizes.
pub(crate) fn compare(
    weights: Bytes,
    cache: Bytes,
    workspace: impl FnOnce() -> Result<Bytes>,
    available: Bytes,
) -> Result<()> {
    let refused = |what, needed, smaller| Err(Error::Memory { what, needed, available, smaller, or_on_host: false });
    if weights > available {
        return refused("the weights", weights, Smaller::Model);
    }
    if weights + cache > available {
        return refused("the weights and the cache", weights + cache, Smaller::Cache);
    }
    let needed = weights + cache + workspace()?;
    if needed > available {
        return refused("the workspace of a step, the weights and the cache", needed, Smaller::Chunk);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use ridge_cpu::{Cpu, CpuOptions};
    use ridge_engine::scoring::{Question, Scorer, ScorerOptions};
    use ridge_engine::{Engine, EngineOptions, Row, Sampling, SequenceId};
    use ridge_graph::passes::Kernel;
    use ridge_graph::{Graph, Type};
    use ridge_models::{BuildOptions, ModelConfig, ModelFiles, WeightSource};
    use ridge_runtime::{Buffer, MemoryBytes, MemoryOwner, MemoryUse, Program, Run, RuntimeError, Session, WeightData};

    use super::*;
    use crate::placement::{Device, OpenDevice, Placement};

    #[test]
    fn what_does_not_fit_is_named_with_what_needs_less() {
        let files = ModelFiles::open(None).unwrap();
        let model = files.config().unwrap().build(&BuildOptions::default()).unwrap();
        let cpu = Cpu::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }).unwrap();
        let weights = Bytes(model.weight_bytes());
        let cache = cache_bytes(&model, CacheSize::Scorer(ScorerOptions { context: 512, step: 1, questions: 1 }));
        let workspace = |tokens| {
            engine_bytes(
                &model,
                &cpu,
                EnginePrograms::Sampling,
                StepExtents { tokens, sequences: 1, context: 512, candidates: 0 },
            )
        };
        let check = |chunk, available| {
            check_memory(
                &model,
                CacheSize::Scorer(ScorerOptions { context: 512, step: 1, questions: 1 }),
                || workspace(chunk),
                available,
            )
        };
        let said = |chunk, available| check(chunk, available).unwrap_err().to_string();
        assert!(said(500, Bytes(weights.0 - 1)).starts_with("the weights need "));
        assert!(said(500, weights).contains("shorten the context"));
        assert!(said(500, weights + cache).starts_with("the workspace of a step, the weights and the cache need "));
        assert!(said(500, weights + cache).contains("fewer prompt tokens"));
        // Smaller steps need less, and that is enough.
        let little = weights + cache + workspace(10).unwrap();
        assert!(check(10, little).is_ok());
        assert!(said(500, little).contains("fewer prompt tokens"));
    }

    /// A device that records the largest workspace, inputs and outputs included, that any bucket was bound with.
    struct RecordingBackend {
        inner: Arc<dyn Backend>,
        bound: Arc<AtomicUsize>,
    }

    struct RecordingProgram {
        inner: Box<dyn Program>,
        bound: Arc<AtomicUsize>,
    }

    type RuntimeResult<T> = Result<T, RuntimeError>;

    impl Backend for RecordingBackend {
        fn name(&self) -> &'static str {
            self.inner.name()
        }

        fn kernels(&self) -> &[Kernel] {
            self.inner.kernels()
        }

        fn upload(&self, ty: &Type, parts: Vec<WeightData>) -> RuntimeResult<Buffer> {
            self.inner.upload(ty, parts)
        }

        fn set_layout(&self, buffer: &Buffer, ty: &Type, layout: &str) -> RuntimeResult<()> {
            self.inner.set_layout(buffer, ty, layout)
        }

        fn allocate(&self, bytes: usize) -> RuntimeResult<Buffer> {
            self.inner.allocate(bytes)
        }

        fn read(&self, buffer: &Buffer) -> RuntimeResult<Vec<u8>> {
            self.inner.read(buffer)
        }

        fn write(&self, buffer: &Buffer, bytes: &[u8]) -> RuntimeResult<()> {
            self.inner.write(buffer, bytes)
        }

        fn memory(&self) -> MemoryUse {
            self.inner.memory()
        }

        fn padded_bytes(&self, bytes: usize) -> usize {
            self.inner.padded_bytes(bytes)
        }

        fn compile(&self, lowered: Arc<Graph>) -> RuntimeResult<Box<dyn Program>> {
            Ok(Box::new(RecordingProgram { inner: self.inner.compile(lowered)?, bound: Arc::clone(&self.bound) }))
        }
    }

    impl Program for RecordingProgram {
        fn bind(&self, bindings: &Bindings, weights: &[Buffer], states: &[Buffer]) -> RuntimeResult<Box<dyn Run>> {
            self.bound.fetch_max(self.workspace_bytes(bindings)?, Ordering::Relaxed);
            self.inner.bind(bindings, weights, states)
        }

        fn memory(&self, bindings: &Bindings) -> RuntimeResult<MemoryBytes> {
            self.inner.memory(bindings)
        }
    }

    /// What programs were bound with and what was admitted for them.
    struct Admission {
        programs: EnginePrograms,
        /// The most that one bucket was bound with.
        bound: usize,
        /// All that the ledger counts beside weights and states, with all buckets that are kept.
        allocated: usize,
        /// One bucket of each program.
        one_each: usize,
        admitted: u64,
    }

    /// Bytes on the device beside weights, states and the working memory of threads and of tuning.
    fn step_memory(backend: &dyn Backend) -> usize {
        use MemoryOwner::{States, Threads, Tuning, Weights};
        let live = backend.memory().live;
        let others: usize = [Weights, States, Threads, Tuning].into_iter().map(|owner| live.get(owner)).sum();
        live.on_device() - others
    }

    /// The embedded model on a device after prompts, answers and scores in steps of all sizes, by the programs that ran.
    fn bound_and_admitted(device: OpenDevice) -> Vec<Admission> {
        const CHUNK: usize = 53;
        const SEQUENCES: usize = 7;
        const CONTEXT: usize = 300;
        let files = ModelFiles::open(None).unwrap();
        let config = files.config().unwrap();
        let options = BuildOptions { context: Some(CONTEXT), ..BuildOptions::default() };
        let source = WeightSource::Checkpoint(Arc::new(config.arrange(files.checkpoint().unwrap()).unwrap()));
        let adjusted = Sampling {
            repetition_penalty: 1.1,
            dry_multiplier: 0.5,
            logit_bias: vec![(5, 1.0), (6, -1.0)],
            logprobs: Some(20),
            ..Sampling::GREEDY
        };
        let logprobs = Sampling { logprobs: Some(3), ..Sampling::GREEDY };
        let cases = [
            (EnginePrograms::Plain, vec![Sampling::GREEDY]),
            (EnginePrograms::Sampling, vec![Sampling::GREEDY, logprobs.clone(), adjusted.clone()]),
            (EnginePrograms::All, vec![Sampling::GREEDY, logprobs, adjusted]),
        ];
        let run = |(programs, samplings): (EnginePrograms, Vec<Sampling>)| {
            let mut model = config.build(&options).unwrap();
            if device.is_cpu() {
                model.take_activations(ridge_graph::passes::Activations::Exact, ridge_graph::passes::Activations::Int8);
            }
            let bound = Arc::new(AtomicUsize::new(0));
            let backend = RecordingBackend { inner: Arc::clone(&device.backend), bound: Arc::clone(&bound) };
            let largest = StepExtents { tokens: CHUNK, sequences: SEQUENCES, context: CONTEXT, candidates: 0 };
            let memory = engine_memory(&model, &backend, programs, largest).unwrap();
            let mut session = Session::new(Arc::new(backend));
            source.load(&mut session, &model.graph, |_| ()).unwrap();
            let options = EngineOptions { context: CONTEXT, sequences: SEQUENCES, chunk: CHUNK, blocks: None };
            let mut engine = Engine::new(session, &model, options).unwrap();
            let text: Vec<u32> = (0..CONTEXT as u32).map(|i| i % 500).collect();
            for sampling in samplings {
                for (rows, tokens) in [(1, 1), (1, 2), (1, 33), (1, CHUNK), (2, 26), (SEQUENCES, 1), (SEQUENCES, 7)] {
                    let start = |_| engine.start(sampling.clone(), tokens * 4).unwrap();
                    let ids: Vec<SequenceId> = (0..rows).map(start).collect();
                    for (step, sample) in [false, true, true, true, true].into_iter().enumerate() {
                        // The last step is one of answers.
                        let tokens = if step == 4 { 1 } else { tokens };
                        let targets =
                            if programs == EnginePrograms::All && step < 4 { &text[1..=tokens] } else { &[][..] };
                        let row = |id: &SequenceId| Row { sample, targets, ..Row::of(*id, &text[..tokens]) };
                        engine.submit(&ids.iter().map(row).collect::<Vec<_>>()).unwrap();
                        engine.complete(&mut Vec::new()).unwrap();
                    }
                    ids.into_iter().for_each(|id| engine.end(id));
                }
            }
            let (one_each, admitted) = (memory.one_each.on_device(), memory.sum().0);
            let allocated = step_memory(&*device.backend);
            Admission { programs, bound: bound.load(Ordering::Relaxed), allocated, one_each, admitted }
        };
        cases.into_iter().map(run).collect()
    }

    #[test]
    fn admitted_workspace_covers_what_a_scorer_binds() {
        let files = ModelFiles::open(None).unwrap();
        let config = files.config().unwrap();
        let model = config.build(&BuildOptions { context: Some(120), ..BuildOptions::default() }).unwrap();
        let device = OpenDevice::open(&Placement { threads: Some(2), ..Placement::default() }).unwrap();
        let bound = Arc::new(AtomicUsize::new(0));
        let backend = RecordingBackend { inner: device.backend, bound: Arc::clone(&bound) };
        let extents = StepExtents { tokens: 53, sequences: 7, context: 120, candidates: 0 };
        let memory = scorer_memory(&model, &backend, extents).unwrap();
        let device = Arc::clone(&backend.inner);
        let mut session = Session::new(Arc::new(backend));
        let source = WeightSource::Checkpoint(Arc::new(config.arrange(files.checkpoint().unwrap()).unwrap()));
        source.load(&mut session, &model.graph, |_| ()).unwrap();
        let mut scorer = Scorer::new(session, &model, ScorerOptions { context: 120, step: 53, questions: 7 }).unwrap();
        let text: Vec<u32> = (1..121).collect();
        for (context, answer) in [(1, 1), (3, 20), (60, 60), (100, 2), (20, 51)] {
            let question =
                || Question { context: &text[..context], continuations: vec![&text[context..context + answer]] };
            for questions in [1, 2, 7] {
                scorer.score(&(0..questions).map(|_| question()).collect::<Vec<_>>(), |_| ()).unwrap();
            }
        }
        let (bound, one_each) = (bound.load(Ordering::Relaxed), memory.one_each.on_device());
        assert!(bound > 0 && bound <= one_each && one_each < 3 * bound, "{bound} bytes bound, {one_each} for one each");
        let (allocated, admitted) = (step_memory(&*device), memory.sum().0);
        assert!(allocated as u64 <= admitted, "{allocated} bytes allocated, {admitted} admitted");
    }

    #[test]
    fn admitted_workspace_covers_steps_that_verify_drafts() {
        admitted_covers_verifying(DRAFTS, 0);
    }

    #[test]
    fn admitted_workspace_covers_steps_that_verify_tokens_found_earlier() {
        admitted_covers_verifying(0, DRAFTS);
    }

    const DRAFTS: usize = 3;

    /// A step that verifies drafts, of the model's module or those that a caller has, has several lines of logits a sequence.
    #[track_caller]
    fn admitted_covers_verifying(drafts: usize, candidates: usize) {
        const SEQUENCES: usize = 4;
        // No more tokens than one verifying step has, so that no prompt takes more.
        const CHUNK: usize = SEQUENCES * (1 + DRAFTS);
        // With a large vocabulary, so that logits take most.
        let fixture = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/prediction/glm4_moe");
        let text = std::fs::read_to_string(fixture.join("config.json")).unwrap();
        let text = text.replace("\"vocab_size\": 48", "\"vocab_size\": 20000");
        let config = ModelConfig::from_json("config.json", &text).unwrap();
        let built = BuildOptions { context: Some(64), drafts, ..BuildOptions::default() };
        let mut model = config.build(&built).unwrap();
        let source = WeightSource::Random(ridge_graph::DType::F32);
        model.store(&source, None).unwrap();
        let device = OpenDevice::open(&Placement { threads: Some(2), ..Placement::default() }).unwrap();
        let bound = Arc::new(AtomicUsize::new(0));
        let backend = RecordingBackend { inner: device.backend, bound: Arc::clone(&bound) };
        let device = Arc::clone(&backend.inner);
        let extents = StepExtents { tokens: CHUNK, sequences: SEQUENCES, context: 64, candidates };
        let memory = engine_memory(&model, &backend, EnginePrograms::Plain, extents).unwrap();
        let mut session = Session::new(Arc::new(backend));
        source.load(&mut session, &model.graph, |_| ()).unwrap();
        let options = EngineOptions { context: 64, sequences: SEQUENCES, chunk: CHUNK, blocks: None };
        let mut engine = Engine::new(session, &model, options).unwrap();
        let ids: Vec<SequenceId> = (0..SEQUENCES).map(|_| engine.start(Sampling::GREEDY, 4).unwrap()).collect();
        for proposed in [&[][..], &[7, 8, 9]] {
            let tokens: &[u32] = if proposed.is_empty() { &[3, 4, 5, 6] } else { &[3] };
            let row = |id: &SequenceId| Row { sample: true, candidates: proposed, ..Row::of(*id, tokens) };
            engine.submit(&ids.iter().map(row).collect::<Vec<_>>()).unwrap();
            engine.complete(&mut Vec::new()).unwrap();
        }
        let (bound, one_each) = (bound.load(Ordering::Relaxed), memory.one_each.on_device());
        assert!(bound > 0 && bound <= one_each && one_each < 3 * bound, "{bound} bytes bound, {one_each} for one each");
        let (allocated, admitted) = (step_memory(&*device), memory.sum().0);
        assert!(allocated as u64 <= admitted, "{allocated} bytes allocated, {admitted} admitted");
    }

    #[track_caller]
    fn admitted_covers_bound(device: OpenDevice) {
        for Admission { programs, bound, allocated, one_each, admitted } in bound_and_admitted(device) {
            assert!(bound > 0 && bound <= one_each, "{programs:?}: {bound} bytes bound, {one_each} for one each");
            // Less than it takes to refuse what fits.
            assert!(one_each < 3 * bound, "{programs:?}: {bound} bytes bound, {one_each} for one each");
            assert!(
                allocated > bound && allocated as u64 <= admitted,
                "{programs:?}: {allocated} bytes allocated, {admitted} admitted"
            );
        }
    }

    #[test]
    fn admitted_workspace_covers_what_steps_bind_on_the_cpu() {
        admitted_covers_bound(OpenDevice::open(&Placement { threads: Some(2), ..Placement::default() }).unwrap());
    }

    #[test]
    fn admitted_workspace_covers_what_steps_bind_on_a_gpu() {
        match OpenDevice::open(&Device::Cuda(0).into()) {
            Ok(device) => admitted_covers_bound(device),
            Err(why) => ridge_testing::skip!("{why}"),
        }
    }
}

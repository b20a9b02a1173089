//! The memory of the steps of an engine, from their programs.

use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{iter, thread};

use ridge_graph::{Bindings, Graph};
use ridge_hw::units::Bytes;
use ridge_models::{Model, symbols, with_blocks};
use ridge_runtime::{Backend, MemoryBytes, Program};

use crate::error::Result;

/// Extents of the largest step that an engine runs.
#[derive(Clone, Copy, Debug)]
pub struct StepExtents {
    /// Tokens of all sequences together.
    pub tokens: usize,
    /// Sequences of which it has tokens.
    pub sequences: usize,
    /// Maximum number of tokens of a sequence, prompt and answer together.
    pub context: usize,
    /// Draft tokens of a sequence that steps verify at most, besides those of the model's own prediction module.
    pub candidates: usize,
}

/// Entries of a row's lists of DRY's breakers and of most likely tokens that workspace is counted for. Rows with more are
/// rare, and a word of each entry adds little to a step.
const LIST_ENTRIES: usize = 64;

/// The extents of the buckets for 1 to `largest` tokens: those to which an engine rounds the tokens of its steps.
pub(super) fn bucket_extents(largest: usize) -> impl Iterator<Item = usize> {
    let rounded = |n: usize| n.next_multiple_of((n.next_power_of_two() / 8).max(1));
    iter::successors(Some(1), move |n| (*n < largest).then(|| rounded(n + 1)))
}

/// What steps take of the device's memory.
#[derive(Clone, Copy, Default)]
pub(super) struct StepBytes {
    /// One bucket of each program, the largest.
    pub(super) one_each: MemoryBytes,
    /// Inputs, outputs and constants of the largest bucket of all.
    largest_staging: usize,
    /// Buckets of a program that are kept.
    buckets: usize,
    /// What inputs, outputs and constants of all of them may take together, before the last was added.
    limit: Option<usize>,
}

impl StepBytes {
    /// Of programs of which so many buckets are kept, within `limit` bytes.
    pub(super) fn new(buckets: usize, limit: Option<usize>) -> Self {
        Self { buckets, limit, ..Self::default() }
    }

    pub(super) fn add_program(&mut self, largest: &MemoryBytes) {
        self.one_each = self.one_each.and_bucket(largest);
        self.largest_staging = self.largest_staging.max(largest.staging_on_device());
    }

    /// Bytes of the inputs, outputs and constants of all buckets that are kept: as many as there may be of each program,
    /// within what all may have together.
    fn kept_staging(self) -> usize {
        let all = self.one_each.staging_on_device() * self.buckets;
        let kept = (ridge_engine::MIN_BUCKETS - 1) * self.largest_staging;
        self.limit.map_or(all, |limit| all.min(limit.max(kept) + self.largest_staging))
    }

    pub(super) fn sum(self) -> Bytes {
        let shared = self.one_each.on_device() - self.one_each.staging_on_device();
        Bytes((shared + self.kept_staging()) as u64)
    }
}

/// Threads that plan steps at most, each of which holds a plan.
const PLANNERS: usize = 8;

/// A program that is compiled, but not bound to weights.
pub(super) struct StepProgram {
    pub(super) program: Box<dyn Program>,
    /// Lines of logits of a sequence.
    lines: usize,
}

impl StepProgram {
    pub(super) fn new(graph: &Graph, outputs: &[&str], backend: &dyn Backend) -> Result<Self> {
        let lowered = Arc::new(ridge_runtime::lower(graph, outputs, backend.kernels())?);
        Ok(Self { program: backend.compile(lowered)?, lines: 1 })
    }

    /// With so many lines of logits of a sequence.
    pub(super) fn with_lines(self, lines: usize) -> Self {
        Self { lines, ..self }
    }

    /// The most that steps of these numbers of tokens need. Each is planned by itself, so threads share them.
    pub(super) fn largest(
        &self,
        model: &Model,
        largest: StepExtents,
        extents: impl Iterator<Item = usize>,
    ) -> Result<MemoryBytes> {
        let extents: Vec<usize> = extents.collect();
        let next = AtomicUsize::new(0);
        let more = |most: MemoryBytes, bytes: Result<MemoryBytes>| Ok(most.max(&bytes?));
        // The largest first, which take longest.
        let of_thread = || {
            iter::from_fn(|| extents.iter().rev().nth(next.fetch_add(1, Ordering::Relaxed)))
                .map(|tokens| self.bytes(model, StepExtents { tokens: *tokens, ..largest }))
                .try_fold(MemoryBytes::default(), more)
        };
        let threads = thread::available_parallelism().map_or(1, usize::from).min(extents.len()).min(PLANNERS);
        thread::scope(|scope| {
            let others: Vec<_> = (1..threads).map(|_| scope.spawn(of_thread)).collect();
            let joined = others.into_iter().map(|other| other.join().unwrap_or_else(|panic| resume_unwind(panic)));
            iter::once(of_thread()).chain(joined).try_fold(MemoryBytes::default(), more)
        })
    }

    fn bytes(&self, model: &Model, step: StepExtents) -> Result<MemoryBytes> {
        let table = step.context.div_ceil(model.block_size);
        let seqs = (step.sequences * self.lines).min(step.tokens);
        let seqs = bucket_extents(seqs).last().unwrap_or(seqs);
        let bindings = Bindings::new()
            .with(symbols::ROWS, step.sequences)
            .with(symbols::TOKENS, step.tokens)
            .with(symbols::SEQS, seqs)
            .with(symbols::TABLE, table)
            .with(symbols::BIASES, ridge_engine::MAX_BIASES)
            .with(symbols::BREAKERS, LIST_ENTRIES)
            .with(symbols::TOP, LIST_ENTRIES.min(model.vocab_size))
            .with(symbols::FORBIDDEN, model.vocab_size.div_ceil(32))
            .with(symbols::STATE_LINES, ridge_engine::state_lines(step.sequences));
        let bindings = with_blocks(&model.graph, bindings, table * step.sequences);
        Ok(self.program.memory(&bindings)?)
    }
}

//! Steps over sequences whose tokens are stored in cache blocks.

mod pending;
mod sequence;
mod steps;

use std::collections::VecDeque;
use std::sync::Arc;

use ridge_graph::Graph;
use ridge_models::{Model, has_fixed_state, windows};
use ridge_runtime::{CachedProgram, Session};

use crate::blocks::{BlockId, Blocks, Prefix, computed};
use crate::cache::{WindowPools, WindowTable, window_blocks};
use crate::columns::Columns;
use crate::error::{EngineError, Result};
use crate::extents::{Extents, Wanted};
use crate::lattice::LatticeOptions;
use crate::programs::{Made, Programs};
use crate::rows::Rows;
use crate::sampling::Sampling;
use crate::states::States;
use pending::{PendingStep, learn};
pub(crate) use sequence::recycled;
pub use sequence::{Next, Outcome, Row, SAMPLED, SequenceId, Start};
use sequence::{Sequence, Shared};

/// Steps that may be in flight at a time: one that runs, and one that is queued behind it.
pub const STEPS_IN_FLIGHT: usize = 2;

/// Snapshots of states of a fixed size that are kept for each sequence that may run, for later prompts.
pub const SNAPSHOTS: usize = 4;

/// Lines of states of a fixed size for so many sequences: those that all of them own at most, that of the tokens that are
/// complete and one for each step in flight, and [`SNAPSHOTS`] for each sequence.
pub fn state_lines(sequences: usize) -> usize {
    sequences * (1 + STEPS_IN_FLIGHT + SNAPSHOTS)
}

/// How much an engine can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineOptions {
    /// Tokens of a sequence at most, prompt and answer together.
    pub context: usize,
    /// Sequences at a time.
    pub sequences: usize,
    /// Tokens of a prompt that one step processes at most.
    pub chunk: usize,
    /// Blocks of the cache, in the pool of groups without a window; enough for all sequences at full context if `None`.
    pub blocks: Option<usize>,
}

impl EngineOptions {
    /// Blocks of the cache, of `block_size` tokens each.
    pub fn cache_blocks(&self, block_size: usize) -> usize {
        self.blocks.unwrap_or(self.context.div_ceil(block_size) * self.sequences)
    }

    /// Blocks of the pool of groups with this window: what all sequences hold at most, with a chunk in each step in flight,
    /// and no more than there are [without a window](Self::cache_blocks), since a sequence holds as many there.
    pub fn window_blocks(&self, window: usize, block_size: usize) -> usize {
        let tokens = STEPS_IN_FLIGHT * self.chunk;
        (self.sequences * window_blocks(window, tokens, block_size)).min(self.cache_blocks(block_size))
    }

    /// Lines of states of a fixed size: see [`state_lines`].
    pub fn state_lines(&self) -> usize {
        state_lines(self.sequences)
    }
}

/// Runs one model on one device.
pub struct Engine {
    pub(crate) vocab: usize,
    block_size: usize,
    pub(crate) options: EngineOptions,
    /// The most blocks of a sequence.
    table: usize,
    programs: Programs,
    rows: Rows,
    columns: Columns,
    blocks: Blocks,
    windows: WindowPools,
    /// Lines of states of a fixed size, if the model has such.
    states: Option<States>,
    sequences: Vec<Option<Sequence>>,
    /// Sequences started.
    started: u64,
    /// Steps begun.
    steps: u64,
    /// The steps in flight, the first submitted first.
    flights: VecDeque<PendingStep>,
    /// Steps that are over, to be filled again.
    spare: Vec<PendingStep>,
    /// Of the last step that [`Engine::step`] ran.
    outcomes: Vec<Outcome>,
}

impl Engine {
    /// An engine for `model`, whose weights `session` has. Allocates the cache.
    ///
    /// # Errors
    /// When a setting is out of range, memory runs out, or the device cannot run the model.
    pub fn new(session: Session, model: &Model, options: EngineOptions) -> Result<Self> {
        let blocks = options.cache_blocks(model.block_size);
        for (name, value) in [
            ("context", options.context),
            ("sequences", options.sequences),
            ("chunk", options.chunk),
            ("blocks", blocks),
        ] {
            if value == 0 {
                return Err(EngineError::Setting { name, value: "0".into(), why: "must be at least 1".into() });
            }
        }
        if options.context > model.max_context {
            return Err(EngineError::Setting {
                name: "context",
                value: options.context.to_string(),
                why: format!("the model supports at most {} tokens", model.max_context),
            });
        }
        let table = options.context.div_ceil(model.block_size);
        let pools = windows(&model.graph).into_iter();
        let pools: Vec<(usize, usize)> =
            pools.map(|window| (window, options.window_blocks(window, model.block_size))).collect();
        let lines = if has_fixed_state(&model.graph) { options.state_lines() } else { 0 };
        let extents = [options.sequences, table, blocks, lines];
        let (mut programs, rows, columns) = Programs::new(session, model, extents, &pools)?;
        for answer in [false, true].into_iter().take(1 + usize::from(programs.divide())) {
            for tokens in [false, true] {
                programs.compile(Wanted { tokens, answer, ..Wanted::default() })?;
            }
        }
        Ok(Self {
            vocab: model.vocab_size,
            block_size: model.block_size,
            options,
            table,
            programs,
            rows,
            columns,
            blocks: Blocks::new(blocks),
            windows: WindowPools::new(pools.into_iter(), model.block_size),
            states: (lines > 0).then(|| States::new(lines)),
            sequences: (0..options.sequences).map(|_| None).collect(),
            started: 0,
            steps: 0,
            flights: VecDeque::with_capacity(STEPS_IN_FLIGHT),
            spare: Vec::new(),
            outcomes: Vec::new(),
        })
    }

    /// Makes all buckets ready that serve steps from now on, which are few: nothing is compiled, bound or timed later, as
    /// [`made`](Self::made) tells, save for requests with unusually many log-probabilities or DRY
    /// breakers. Steps are padded to these
    /// buckets, up to half as large again as they are. Rows may have up to `candidates` candidates, and a step has at most
    /// `most_lines`.
    ///
    /// # Errors
    /// When the device cannot run one of them, or memory runs out.
    pub fn make_ready(&mut self, candidates: usize) -> Result<()> {
        let (rows, tokens) = (self.options.sequences, self.most_tokens());
        let common = Extents { rows, table: self.table, blocks: self.blocks.count(), ..Extents::default() };
        let options = LatticeOptions {
            tokens,
            lines: self.most_lines().min(rows * (1 + candidates)),
            divide: self.programs.divide(),
            drafts: self.predicts(),
            candidates: candidates > 0,
            words: self.vocab.div_ceil(32),
            common,
        };
        // Bound before any runs: a workspace that moves has captured steps captured again.
        for (wanted, extents) in self.programs.bind_lattice(&options, self.vocab)? {
            learn(&mut self.programs, wanted, extents)?;
        }
        Ok(())
    }

    /// Tokens of a step at most.
    fn most_tokens(&self) -> usize {
        self.options.chunk.max(self.options.sequences)
    }

    /// Lines of logits of a step at most, one for each row and each candidate: as many as tokens, but one less where attention is
    /// told which tokens are of a prompt, since a bucket with as many lines as tokens serves generated tokens alone there.
    pub(crate) fn most_lines(&self) -> usize {
        self.most_tokens() - usize::from(self.programs.attends_by_prompt())
    }

    /// What has been made for steps so far.
    pub fn made(&self) -> Made {
        self.programs.made()
    }

    /// Cache blocks that no sequence owns.
    pub fn free_blocks(&self) -> usize {
        self.blocks.free()
    }

    /// The cache's blocks.
    pub fn blocks(&self) -> &Blocks {
        &self.blocks
    }

    /// The blocks of the pool of each window, in ascending order of the windows.
    pub fn window_pools(&self) -> impl Iterator<Item = &Blocks> {
        self.windows.blocks()
    }

    /// Positions of the blocks that sequences own in all pools, and how many of these have no token.
    pub fn cache_positions(&self) -> (usize, usize) {
        let pools = self.windows.blocks().chain([&self.blocks]);
        let owned: usize = pools.map(|blocks| blocks.count() - blocks.free()).sum();
        let unwritten = |s: &Sequence| {
            (s.blocks.len() * self.block_size).saturating_sub(s.length) + self.windows.unwritten(&s.windows, s.length)
        };
        (owned * self.block_size, self.sequences.iter().flatten().map(unwritten).sum())
    }

    /// The lines of states of a fixed size as a pool, if the model has such states: named ones are snapshots.
    pub fn state_pool(&self) -> Option<&Blocks> {
        self.states.as_ref().map(States::lines)
    }

    /// May the sequence's row of its next `tokens` tokens have candidates? Not where a state stands behind the last of its
    /// tokens alone, nor behind the prompt's last token where another graph computes tokens of answers.
    pub fn takes_candidates(&self, id: SequenceId, tokens: usize) -> bool {
        let sequence = self.sequences[id.row].as_ref().filter(|s| s.number == id.number);
        let in_answer = |s: &Sequence| !self.programs.divide() || s.length + tokens > s.prompt;
        self.states.is_none() && sequence.is_some_and(in_answer)
    }

    /// Has the model a module that drafts tokens?
    pub fn predicts(&self) -> bool {
        self.module_drafts() > 0
    }

    /// How many tokens the model's module drafts behind each row that samples.
    pub(crate) fn module_drafts(&self) -> usize {
        self.programs.drafts()
    }

    /// Tokens that may follow the one that the last step sampled of a running sequence, by the model's prediction module; none
    /// where the step sampled nothing or was taken back.
    pub fn drafts(&self, id: SequenceId) -> &[u32] {
        self.sequence(id).map_or(&[], |sequence| &sequence.drafts)
    }

    /// Does the model keep a state of a fixed size for each sequence?
    pub fn keeps_fixed_state(&self) -> bool {
        self.states.is_some()
    }

    /// Tokens of a cache block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Starts a sequence that shares no blocks, if there is a free row. Its answer is what comes after its first `prompt`
    /// tokens.
    pub fn start(&mut self, sampling: Sampling, prompt: usize) -> Option<SequenceId> {
        self.start_sharing(Start { sampling: &sampling, prompt, stream: 0, shared: None })
    }

    /// Starts a sequence, if there is a free row. Of the tokens that it shares it has those of the longest prefix of full
    /// blocks that the cache holds, but for the last token: [`length`](Self::length) says how many.
    pub fn start_sharing(&mut self, start: Start<'_>) -> Option<SequenceId> {
        self.follow_weights();
        let row = self.sequences.iter().position(Option::is_none)?;
        let number = self.started;
        self.started += 1;
        let found = start.shared.map(|(root, tokens)| self.found(root, tokens, start.prompt)).unwrap_or_default();
        let (blocks, prefixes): (Vec<BlockId>, Vec<Prefix>) = found.into_iter().unzip();
        let shared = start.shared.map(|(root, _)| Shared {
            prefix: prefixes.last().copied().unwrap_or(root),
            rest: Vec::with_capacity(self.block_size),
        });
        blocks.iter().for_each(|block| self.blocks.share(*block));
        let windows = self.windows.share(&prefixes);
        let state = self.states.as_mut().map(|states| states.start(prefixes.last())).unwrap_or_default();
        let (columns, rows) = (&self.columns, &mut self.rows);
        columns.set_sampling(rows, row, start.sampling);
        columns.set_stream(rows, row, start.stream);
        columns.set_prompt(rows, row, start.prompt);
        columns.set_blocks(rows, row, 0, &blocks);
        windows.iter().enumerate().for_each(|(nth, table)| columns.set_window(rows, row, nth, 0, table));
        self.sequences[row] = Some(Sequence {
            number,
            step: 0,
            length: blocks.len() * self.block_size,
            complete: blocks.len() * self.block_size,
            flying: 0,
            guesses: false,
            last: None,
            drafts: Vec::with_capacity(self.programs.drafts()),
            prompt: start.prompt,
            blocks,
            windows,
            state,
            sampling: start.sampling.clone(),
            stream: start.stream,
            shared,
        });
        Some(SequenceId { row, number })
    }

    /// How many blocks without owners a sequence takes until all its `tokens` tokens, of which the first `prompt` are its
    /// prompt, are in the cache, if it starts with those that it shares.
    pub fn blocks_to_start(&self, (root, shared): (Prefix, &[u32]), prompt: usize, tokens: usize) -> usize {
        let found = self.found(root, shared, prompt);
        let owned = found.iter().filter(|(block, _)| self.blocks.owners(*block) > 0).count();
        tokens.div_ceil(self.block_size) - owned
    }

    /// The blocks that hold the beginning of `tokens`, but for the last token, computed as they are where the answer
    /// begins after the first `prompt`: as many as there are in all pools.
    fn found(&self, root: Prefix, tokens: &[u32], prompt: usize) -> Vec<(BlockId, Prefix)> {
        let whole = &tokens[..tokens.len().saturating_sub(1)];
        // Blocks of older weights are found by nobody.
        let whole = if self.programs.changed() { &[] } else { whole };
        let border = if self.programs.tells_prompts() { prompt } else { usize::MAX };
        let mut held = Vec::with_capacity(self.block_size);
        let found = whole.chunks_exact(self.block_size).enumerate().scan(root, |prefix, (number, tokens)| {
            held.clear();
            held.extend(
                tokens.iter().zip(number * self.block_size..).map(|(token, at)| computed(*token, at >= border)),
            );
            let found = self.blocks.find(*prefix, &held)?;
            *prefix = found.1;
            Some(found)
        });
        let mut found: Vec<(BlockId, Prefix)> = found.collect();
        let prefixes: Vec<Prefix> = found.iter().map(|(_, prefix)| *prefix).collect();
        let mut hit = self.windows.found(&prefixes);
        while let Some(states) = &self.states {
            let kept = states.found(&prefixes[..hit]);
            let next = self.windows.found(&prefixes[..kept]);
            if next == hit {
                break;
            }
            hit = next;
        }
        found.truncate(hit);
        found
    }

    /// Forgets what blocks hold, if it was computed from other weights than those of now: nobody finds it again. Sequences
    /// that run continue with theirs, and share nothing that they add.
    fn follow_weights(&mut self) {
        if self.programs.update() {
            self.blocks.forget_all();
            self.windows.forget_all();
            self.states.iter_mut().for_each(States::forget_all);
            for shared in self.sequences.iter_mut().flatten().filter_map(|sequence| sequence.shared.as_mut()) {
                shared.prefix = self.blocks.unreachable();
            }
        }
    }

    /// Ends a sequence and frees its blocks; nothing where it has ended already. Blocks that others may share keep what
    /// they hold, until they are needed.
    pub fn end(&mut self, id: SequenceId) {
        if let Some(mut sequence) = self.sequences[id.row].take_if(|s| s.number == id.number) {
            self.windows.truncate(&mut sequence.windows, 0);
            self.states.iter_mut().for_each(|states| states.end(&mut sequence.state));
            for block in sequence.blocks.into_iter().rev() {
                self.blocks.give_back(block);
            }
        }
    }

    fn sequence(&self, id: SequenceId) -> Option<&Sequence> {
        self.sequences[id.row].as_ref().filter(|s| s.number == id.number)
    }

    /// Tokens that a running sequence has in the cache, when all steps in flight are complete.
    pub fn length(&self, id: SequenceId) -> Option<usize> {
        self.sequence(id).map(|s| s.length)
    }

    /// The sampling of a running sequence from now on.
    pub(crate) fn set_sampling(&mut self, id: SequenceId, sampling: &Sampling) {
        if let Some(sequence) = self.sequences[id.row].as_mut().filter(|s| s.number == id.number) {
            sequence.sampling = sampling.clone();
            self.columns.set_sampling(&mut self.rows, id.row, sampling);
        }
    }

    /// Says that the answer of a running sequence is what comes after its first `prompt` tokens. What is in the cache
    /// stays as it was computed.
    pub fn set_prompt(&mut self, id: SequenceId, prompt: usize) {
        if let Some(sequence) = self.sequences[id.row].as_mut().filter(|s| s.number == id.number) {
            sequence.prompt = prompt;
            self.columns.set_prompt(&mut self.rows, id.row, prompt);
        }
    }

    /// Takes a running sequence back to its first `length` tokens, so that it can continue otherwise, and frees the blocks
    /// behind them. Nothing where it has no more than these, or has ended. One that shares its blocks goes back to the
    /// end of a full block, if need be of one before, and shares nothing that it adds behind that. Where a window has given
    /// back blocks that it reaches from there, or where the model keeps a state of a fixed size, which is that of the last
    /// complete token alone, it goes back to its start: [`length`](Self::length) says where it is.
    pub fn truncate(&mut self, id: SequenceId, length: usize) {
        let size = self.block_size;
        self.take_back(id);
        let Some(sequence) = self.sequences[id.row].as_mut().filter(|s| s.number == id.number && s.length > length)
        else {
            return;
        };
        let before = std::mem::replace(&mut sequence.length, length);
        if let Some(shared) = &mut sequence.shared {
            let full = sequence.blocks.len().min(length / size);
            shared.rest.truncate(if length / size < before / size { 0 } else { length % size });
            sequence.length = full * size + shared.rest.len();
        }
        if self.states.is_some() || !self.windows.reaches(&sequence.windows, sequence.length) {
            sequence.length = 0;
            self.states.iter_mut().for_each(|states| states.end(&mut sequence.state));
            sequence.shared.iter_mut().for_each(|shared| shared.rest.clear());
        }
        if let Some(shared) = sequence.shared.as_mut().filter(|_| sequence.length / size < before / size) {
            shared.prefix = self.blocks.unreachable();
        }
        self.windows.truncate(&mut sequence.windows, sequence.length);
        sequence.complete = sequence.length;
        for block in sequence.blocks.drain(sequence.length.div_ceil(size)..) {
            self.blocks.give_back(block);
        }
    }

    /// Takes a running sequence out of the steps in flight: what they sample of it and add to it does not count.
    fn take_back(&mut self, id: SequenceId) {
        if let Some(sequence) = self.sequences[id.row].as_mut().filter(|s| s.number == id.number) {
            (sequence.length, sequence.flying, sequence.guesses) = (sequence.complete, 0, false);
            sequence.drafts.clear();
            self.states.iter_mut().for_each(|states| states.take_back(&mut sequence.state));
            self.flights.iter_mut().for_each(|step| step.take_back(id));
        }
    }

    /// Gives a running sequence the blocks that its next `tokens` tokens need, or none: is that possible?
    pub fn grow(&mut self, id: SequenceId, tokens: usize) -> bool {
        let Some(sequence) = self.sequences[id.row].as_mut().filter(|s| s.number == id.number) else { return false };
        let needed = (sequence.length + tokens).div_ceil(self.block_size);
        let more = needed.saturating_sub(sequence.blocks.len());
        // Mostly there is room in the last block.
        if more == 0 && sequence.windows.iter().all(|table| table.end() >= needed) {
            return true;
        }
        let mut windows = Vec::new();
        self.windows.needed(&sequence.windows, sequence.length + tokens, &mut windows);
        if needed > self.table || more > self.blocks.free() || !self.windows.have(&windows) {
            return false;
        }
        let held: Vec<usize> = sequence.windows.iter().map(WindowTable::end).collect();
        self.windows.grow(&mut sequence.windows, sequence.length + tokens);
        for (nth, (table, from)) in sequence.windows.iter().zip(held).enumerate() {
            self.columns.set_window(&mut self.rows, id.row, nth, from, table);
        }
        let owned = sequence.blocks.len();
        sequence.blocks.extend((0..more).filter_map(|_| self.blocks.take()));
        self.columns.set_blocks(&mut self.rows, id.row, owned, &sequence.blocks[owned..]);
        true
    }

    /// The graph as the device runs it for tokens of prompts or of answers, in steps that sample without adjustments, or
    /// that only fill the cache.
    pub fn lowered(&self, sample: bool, answer: bool) -> Option<&Graph> {
        let answer = answer && self.programs.divide();
        self.programs.lowered(Wanted { tokens: sample, answer, ..Wanted::default() })
    }

    /// What was compiled for its steps, in order, and why.
    pub fn compiled(&self) -> Vec<Arc<CachedProgram>> {
        self.programs.compiled()
    }

    /// Bytes that were staged for the device so far, those of weights not included.
    pub fn staged_bytes(&self) -> u64 {
        self.programs.staged() + self.rows.sent
    }
}

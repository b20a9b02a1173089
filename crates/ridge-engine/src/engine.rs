//! Requests to steps to tokens.

use std::collections::HashMap;
use std::ops::ControlFlow;

use ridge_graph::Bindings;
use ridge_models::{Model, symbols};
use ridge_runtime::{Bucket, Compiled, Session};

use crate::blocks::{BlockId, Blocks};
use crate::error::{EngineError, Result};
use crate::sampling::Sampling;

/// Buckets that are kept ready; more are made when needed and the oldest dropped.
const BUCKETS: usize = 16;

/// How much an engine can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineOptions {
    /// Tokens of a sequence at most, prompt and answer together.
    pub context: usize,
    /// Sequences at a time.
    pub sequences: usize,
    /// Tokens of a prompt that one step processes at most.
    pub chunk: usize,
}

/// What is to be generated.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Tokens of the prompt.
    pub prompt: Vec<u32>,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Tokens to generate at most.
    pub max_tokens: usize,
    /// Tokens that end the answer, and are not part of it.
    pub stop_tokens: Vec<u32>,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model ended it with one of the stop tokens.
    Stop,
    /// It has `max_tokens` tokens.
    Length,
    /// The context is full.
    Context,
    /// Whoever receives the tokens wanted no more.
    Cancelled,
}

/// A finished answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generated {
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub finish: Finish,
}

/// A running sequence. That of one that ended is never taken for that of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SequenceId {
    row: usize,
    /// How many were started before it.
    number: u64,
}

struct Sequence {
    number: u64,
    /// The last step that it stood in.
    step: u64,
    /// Tokens in the cache.
    length: usize,
    blocks: Vec<BlockId>,
    sampling: Sampling,
}

/// Runs one model on one device.
pub struct Engine {
    vocab: usize,
    block_size: usize,
    options: EngineOptions,
    table: usize,
    block_count: usize,
    /// Samples a token for every row, and gives the logits that it was chosen from.
    sampling: Programs,
    /// Only fills the cache.
    filling: Programs,
    blocks: Blocks,
    sequences: Vec<Option<Sequence>>,
    /// Sequences started.
    started: u64,
    /// Steps begun.
    steps: u64,
}

impl Engine {
    /// An engine for `model`, whose weights `session` has. Allocates the cache.
    ///
    /// # Errors
    /// When a setting is out of range, memory runs out, or the device cannot run the model.
    pub fn new(mut session: Session, model: &Model, options: EngineOptions) -> Result<Self> {
        for (name, value) in [("context", options.context), ("sequences", options.sequences), ("chunk", options.chunk)]
        {
            if value == 0 {
                return Err(EngineError::Setting { name, value: "0".into(), why: "must be at least 1".into() });
            }
        }
        if options.context > model.max_context {
            return Err(EngineError::Setting {
                name: "context",
                value: options.context.to_string(),
                why: format!("the model was made for at most {} tokens", model.max_context),
            });
        }
        let table = options.context.div_ceil(model.block_size);
        let block_count = table * options.sequences;
        let cache = Bindings::new().with(symbols::BLOCKS, block_count);
        session.allocate_states(&model.graph, &cache)?;
        Ok(Self {
            vocab: model.vocab_size,
            block_size: model.block_size,
            options,
            table,
            block_count,
            sampling: Programs::new(session.compile(&model.graph, &["next", "logits"])?),
            filling: Programs::new(session.compile(&model.graph, &[])?),
            blocks: Blocks::new(block_count),
            sequences: (0..options.sequences).map(|_| None).collect(),
            started: 0,
            steps: 0,
        })
    }

    /// Cache blocks that no sequence owns.
    pub fn free_blocks(&self) -> usize {
        self.blocks.free()
    }

    /// Starts a sequence, if there is a free row.
    pub fn start(&mut self, sampling: Sampling) -> Option<SequenceId> {
        let row = self.sequences.iter().position(Option::is_none)?;
        let number = self.started;
        self.started += 1;
        self.sequences[row] = Some(Sequence { number, step: 0, length: 0, blocks: Vec::new(), sampling });
        Some(SequenceId { row, number })
    }

    /// Ends a sequence and frees its blocks; nothing where it has ended already.
    pub fn end(&mut self, id: SequenceId) {
        if let Some(sequence) = self.sequences[id.row].take_if(|s| s.number == id.number) {
            for block in sequence.blocks {
                self.blocks.give_back(block);
            }
        }
    }

    /// Tokens that a running sequence has in the cache.
    pub fn length(&self, id: SequenceId) -> Option<usize> {
        self.sequences[id.row].as_ref().filter(|s| s.number == id.number).map(|s| s.length)
    }

    /// Takes a running sequence back to its first `length` tokens, so that it can go on otherwise, and frees the blocks
    /// behind them. Nothing where it has no more than these, or has ended.
    pub fn truncate(&mut self, id: SequenceId, length: usize) {
        if let Some(sequence) = self.sequences[id.row].as_mut().filter(|s| s.number == id.number) {
            sequence.length = sequence.length.min(length);
            for block in sequence.blocks.drain(sequence.length.div_ceil(self.block_size)..) {
                self.blocks.give_back(block);
            }
        }
    }

    /// Goes on with a running sequence: `request.prompt` follows what it has in the cache, and the answer follows that.
    /// The last token of the answer is not in the cache yet, unless a stop token came after it.
    ///
    /// # Errors
    /// As for [`generate`](Self::generate), and when the sequence has ended.
    pub fn resume(
        &mut self,
        id: SequenceId,
        request: &Request,
        mut on_token: impl FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Generated> {
        let sequence = self.sequences[id.row].as_mut().filter(|s| s.number == id.number);
        let sequence = sequence.ok_or_else(|| EngineError::Setting {
            name: "sequence",
            value: id.number.to_string(),
            why: "is not running".into(),
        })?;
        sequence.sampling = request.sampling;
        let cached = sequence.length;
        self.check_after(cached, request)?;
        self.run(id, cached, request, &mut on_token)
    }

    /// Runs one step over `(sequence, tokens)` pairs: appends each sequence's tokens to the cache, and gives the token
    /// that follows each if `sample` says so. A sequence stands in it once.
    ///
    /// # Errors
    /// When the work is not valid (a sequence that ended or stands in it twice, no tokens, a token that is not of the
    /// vocabulary) or the cache is full, before anything has changed; when the device fails, or the logits are not
    /// finite.
    pub fn step(&mut self, work: &[(SequenceId, &[u32])], sample: bool, next: &mut Vec<u32>) -> Result<()> {
        next.clear();
        if work.is_empty() {
            return Ok(());
        }
        self.reserve(work)?;
        let tokens: usize = work.iter().map(|(_, t)| t.len()).sum();
        let bindings = || {
            Bindings::new()
                .with(symbols::TOKENS, tokens)
                .with(symbols::SEQS, work.len())
                .with(symbols::TABLE, self.table)
                .with(symbols::BLOCKS, self.block_count)
        };
        let programs = if sample { &mut self.sampling } else { &mut self.filling };
        let ready = programs.bucket((tokens, work.len()), bindings)?;
        let sequences = |id: &SequenceId| self.sequences[id.row].as_ref().expect("reserved above");
        let ids = |(row, (_, tokens)): (usize, &(SequenceId, &[u32]))| std::iter::repeat_n(row as i32, tokens.len());
        ready.fill(Input::TokenIds, work.iter().flat_map(|(_, t)| t.iter().map(|t| (*t as i32).to_le_bytes())));
        ready.fill(Input::SeqIds, work.iter().enumerate().flat_map(ids).map(i32::to_le_bytes));
        let mut start = 0;
        let starts = work.iter().map(|(_, t)| {
            start += t.len() as i32;
            start
        });
        ready.fill(Input::QueryStart, std::iter::once(0).chain(starts).map(i32::to_le_bytes));
        ready.fill(Input::Lengths, work.iter().map(|(id, _)| (sequences(id).length as i32).to_le_bytes()));
        let table = self.table;
        let row = |(id, _): &(SequenceId, &[u32])| {
            let blocks = &sequences(id).blocks;
            (0..table).map(|i| blocks.get(i).map_or(-1, |b| b.0 as i32).to_le_bytes())
        };
        ready.fill(Input::BlockTable, work.iter().flat_map(row));
        let settings = |id: &SequenceId| sequences(id).sampling;
        ready.fill(Input::Temperature, work.iter().map(|(id, _)| settings(id).temperature.to_le_bytes()));
        ready.fill(Input::TopK, work.iter().map(|(id, _)| (settings(id).top_k as i32).to_le_bytes()));
        ready.fill(Input::TopP, work.iter().map(|(id, _)| settings(id).top_p.to_le_bytes()));
        ready.fill(Input::Seed, work.iter().map(|(id, _)| (settings(id).seed as i64).to_le_bytes()));
        // The stream of a sequence that is alone under its seed.
        ready.fill(Input::Sequence, work.iter().map(|_| 0i64.to_le_bytes()));
        ready.bucket.submit()?;
        ready.bucket.wait()?;
        if sample {
            let [ids, logits] = ready.sampled.map(|index| ready.bucket.output(index).as_chunks::<4>().0);
            next.extend(ids.iter().map(|b| i32::from_le_bytes(*b) as u32));
            for (((id, tokens), chosen), row) in work.iter().zip(&*next).zip(logits.chunks(self.vocab)) {
                if let Some(value) = not_finite(row, *chosen) {
                    return Err(EngineError::NotFinite { value, position: sequences(id).length + tokens.len() });
                }
            }
        }
        for (id, tokens) in work {
            if let Some(sequence) = &mut self.sequences[id.row] {
                sequence.length += tokens.len();
            }
        }
        Ok(())
    }

    /// Gives every sequence the blocks that its tokens need, or none to any.
    fn reserve(&mut self, work: &[(SequenceId, &[u32])]) -> Result<()> {
        let wanted = |s: &Sequence, tokens: usize| (s.length + tokens).div_ceil(self.block_size) - s.blocks.len();
        let mut total = 0;
        self.steps += 1;
        for (id, tokens) in work {
            let wrong =
                |why: &str| EngineError::Setting { name: "sequence", value: id.number.to_string(), why: why.into() };
            self.known(tokens)?;
            let sequence = self.sequences[id.row].as_mut().filter(|s| s.number == id.number);
            let sequence = sequence.ok_or_else(|| wrong("is not running"))?;
            if std::mem::replace(&mut sequence.step, self.steps) == self.steps {
                return Err(wrong("stands in one step twice; give all its tokens at once"));
            }
            if tokens.is_empty() {
                return Err(wrong("has no tokens in this step; leave it out"));
            }
            if sequence.length + tokens.len() > self.table * self.block_size {
                return Err(EngineError::CacheFull { tokens: tokens.len() });
            }
            total += wanted(sequence, tokens.len());
        }
        if total > self.blocks.free() {
            return Err(EngineError::CacheFull { tokens: work.iter().map(|(_, t)| t.len()).sum() });
        }
        for (id, tokens) in work {
            if let Some(sequence) = &mut self.sequences[id.row] {
                let count = (sequence.length + tokens.len()).div_ceil(self.block_size) - sequence.blocks.len();
                sequence.blocks.extend((0..count).filter_map(|_| self.blocks.take()));
            }
        }
        Ok(())
    }

    /// Generates one answer. `on_token` is given each token as it comes, and can end the answer after it.
    ///
    /// # Errors
    /// When the request is not valid, all rows are taken, the cache is full, or the device fails.
    pub fn generate(
        &mut self,
        request: &Request,
        mut on_token: impl FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Generated> {
        self.check(request)?;
        let id = self.start(request.sampling).ok_or_else(|| EngineError::Setting {
            name: "sequences",
            value: self.options.sequences.to_string(),
            why: "all of them are running; wait for one to end".into(),
        })?;
        let result = self.run(id, 0, request, &mut on_token);
        self.end(id);
        result
    }

    /// Is `request` one that this engine can run?
    ///
    /// # Errors
    /// Says what is wrong with it.
    pub fn check(&self, request: &Request) -> Result<()> {
        self.check_after(0, request)
    }

    /// Is `request` one that can follow `cached` tokens?
    fn check_after(&self, cached: usize, request: &Request) -> Result<()> {
        request.sampling.check()?;
        if request.prompt.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        self.known(&request.prompt)?;
        let (prompt, context) = (cached + request.prompt.len(), self.options.context);
        if request.max_tokens > 0 && prompt >= context {
            return Err(EngineError::PromptTooLong { prompt, context });
        }
        Ok(())
    }

    fn known(&self, tokens: &[u32]) -> Result<()> {
        let unknown = tokens.iter().find(|t| **t as usize >= self.vocab);
        unknown.map_or(Ok(()), |t| Err(EngineError::UnknownToken { token: *t, vocab: self.vocab }))
    }

    fn run(
        &mut self,
        id: SequenceId,
        cached: usize,
        request: &Request,
        on_token: &mut impl FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Generated> {
        let mut tokens = Vec::with_capacity(request.max_tokens.min(self.options.context));
        if request.max_tokens == 0 {
            return Ok(Generated { tokens, finish: Finish::Length });
        }
        let mut next = Vec::with_capacity(1);
        let mut chunks = request.prompt.chunks(self.options.chunk).peekable();
        while let Some(chunk) = chunks.next() {
            self.step(&[(id, chunk)], chunks.peek().is_none(), &mut next)?;
        }
        let mut length = cached + request.prompt.len();
        loop {
            let token = next[0];
            if request.stop_tokens.contains(&token) {
                return Ok(Generated { tokens, finish: Finish::Stop });
            }
            tokens.push(token);
            length += 1;
            let finish = match on_token(token) {
                ControlFlow::Break(()) => Some(Finish::Cancelled),
                ControlFlow::Continue(()) if tokens.len() == request.max_tokens => Some(Finish::Length),
                ControlFlow::Continue(()) if length == self.options.context => Some(Finish::Context),
                ControlFlow::Continue(()) => None,
            };
            if let Some(finish) = finish {
                return Ok(Generated { tokens, finish });
            }
            self.step(&[(id, &[token])], true, &mut next)?;
        }
    }
}

/// What makes the choice of a token meaningless: a logit that is NaN or infinity, or a chosen one that is impossible.
/// A row is some hundred kilobytes, read once, next to a step that reads every weight.
fn not_finite(row: &[[u8; 4]], chosen: u32) -> Option<f32> {
    let values = || row.iter().map(|b| f32::from_le_bytes(*b));
    let impossible = |v: f32| v.is_nan() | (v == f32::INFINITY);
    // Without a way out in the middle, so that it runs over vectors.
    let broken = values().fold(false, |broken, v| broken | impossible(v));
    let found = if broken { values().find(|v| impossible(*v)) } else { values().nth(chosen as usize) };
    found.filter(|v| !v.is_finite())
}

/// The step inputs, by position in [`Ready::inputs`].
#[derive(Clone, Copy)]
enum Input {
    TokenIds,
    SeqIds,
    QueryStart,
    Lengths,
    BlockTable,
    Temperature,
    TopK,
    TopP,
    Seed,
    Sequence,
}

const INPUT_NAMES: [&str; 10] = [
    "token_ids",
    "seq_ids",
    "query_start",
    "lengths",
    "block_table",
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "sequence",
];

/// A bucket with the positions of its inputs.
struct Ready {
    bucket: Bucket,
    inputs: [Option<usize>; INPUT_NAMES.len()],
    /// Positions of `next` and `logits`, if the program samples.
    sampled: [usize; 2],
}

impl Ready {
    /// Fills an input, if the program reads it.
    fn fill<const N: usize>(&mut self, input: Input, values: impl Iterator<Item = [u8; N]>) {
        if let Some(index) = self.inputs[input as usize] {
            for (to, from) in self.bucket.input(index).as_chunks_mut::<N>().0.iter_mut().zip(values) {
                *to = from;
            }
        }
    }
}

/// A compiled graph and its buckets by (tokens, sequences).
struct Programs {
    compiled: Compiled,
    ready: HashMap<(usize, usize), (u64, Ready)>,
    uses: u64,
}

impl Programs {
    fn new(compiled: Compiled) -> Self {
        Self { compiled, ready: HashMap::with_capacity(BUCKETS + 1), uses: 0 }
    }

    fn bucket(&mut self, key: (usize, usize), bindings: impl Fn() -> Bindings) -> Result<&mut Ready> {
        self.uses += 1;
        if !self.ready.contains_key(&key) {
            if self.ready.len() >= BUCKETS
                && let Some(oldest) = self.ready.iter().min_by_key(|(_, (used, _))| *used).map(|(k, _)| *k)
            {
                self.ready.remove(&oldest);
            }
            let bucket = self.compiled.bucket(&bindings())?;
            let inputs = INPUT_NAMES.map(|name| bucket.input_index(name));
            let sampled = ["next", "logits"].map(|name| bucket.output_index(name).unwrap_or_default());
            self.ready.insert(key, (0, Ready { bucket, inputs, sampled }));
        }
        let (used, ready) = self.ready.get_mut(&key).expect("inserted above");
        *used = self.uses;
        Ok(ready)
    }
}

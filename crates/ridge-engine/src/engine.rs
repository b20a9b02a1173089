//! Requests to steps to tokens.

use std::ops::ControlFlow;

use ridge_graph::{Bindings, Graph};
use ridge_models::{Model, symbols};
use ridge_runtime::{LaunchTime, Session};

use crate::blocks::{BlockId, Blocks};
use crate::error::{EngineError, Result};
use crate::programs::{Extents, Input, Programs, Ready, Wanted};
use crate::sampling::{Logprobs, Sampling};

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
#[derive(Clone, Debug, PartialEq)]
pub struct Generated {
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// The probabilities of each, if they were asked for.
    pub logprobs: Vec<Logprobs>,
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
    /// Tokens before its answer.
    prompt: usize,
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
    programs: Programs,
    blocks: Blocks,
    sequences: Vec<Option<Sequence>>,
    /// Sequences started.
    started: u64,
    /// Steps begun.
    steps: u64,
    /// Of the last step's rows that asked for them.
    logprobs: Vec<Option<Logprobs>>,
    /// What the launches of the step took, while that is asked for.
    watch: Option<Vec<LaunchTime>>,
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
        let mut programs = Programs::new(session, &model.graph);
        for tokens in [false, true] {
            programs.compile(Wanted { tokens, ..Wanted::default() })?;
        }
        Ok(Self {
            vocab: model.vocab_size,
            block_size: model.block_size,
            options,
            table,
            block_count,
            programs,
            blocks: Blocks::new(block_count),
            sequences: (0..options.sequences).map(|_| None).collect(),
            started: 0,
            steps: 0,
            logprobs: Vec::new(),
            watch: None,
        })
    }

    /// Cache blocks that no sequence owns.
    pub fn free_blocks(&self) -> usize {
        self.blocks.free()
    }

    /// Starts a sequence, if there is a free row. Penalties of frequency and presence count what comes after its first
    /// `prompt` tokens.
    pub fn start(&mut self, sampling: Sampling, prompt: usize) -> Option<SequenceId> {
        let row = self.sequences.iter().position(Option::is_none)?;
        let number = self.started;
        self.started += 1;
        self.sequences[row] = Some(Sequence { number, step: 0, length: 0, prompt, blocks: Vec::new(), sampling });
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
        let sequence = self.sequences[id.row].as_ref().filter(|s| s.number == id.number);
        let sequence = sequence.ok_or_else(|| EngineError::Setting {
            name: "sequence",
            value: id.number.to_string(),
            why: "is not running".into(),
        })?;
        let cached = sequence.length;
        self.check_after(cached, request)?;
        if let Some(sequence) = &mut self.sequences[id.row] {
            sequence.sampling = request.sampling.clone();
            sequence.prompt = cached + request.prompt.len();
        }
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
        self.logprobs.clear();
        let (wanted, extents) = self.needs(work, sample);
        let ready = self.programs.ready(wanted, extents)?;
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
        let row = |(id, _): &(SequenceId, &[u32])| {
            let blocks = &sequences(id).blocks;
            (0..extents.table).map(|i| blocks.get(i).map_or(-1, |b| b.0 as i32).to_le_bytes())
        };
        ready.fill(Input::BlockTable, work.iter().flat_map(row));
        if sample {
            fill_sampling(ready, extents, || work.iter().map(|(id, _)| sequences(id)));
        }
        match &mut self.watch {
            Some(times) => *times = ready.bucket.timed()?,
            None => {
                ready.bucket.submit()?;
                ready.bucket.wait()?;
            }
        }
        if sample {
            for ((id, tokens), chosen) in work.iter().zip(ready.output(0)) {
                let chosen = i32::from_le_bytes(*chosen);
                let position = sequences(id).length + tokens.len();
                next.push(u32::try_from(chosen).map_err(|_| EngineError::NotFinite { position })?);
            }
        }
        if wanted.logprobs {
            let top = |row: usize| {
                let row = row * extents.top..(row + 1) * extents.top;
                ready.output(2)[row.clone()].iter().zip(&ready.output(3)[row])
            };
            let token = |(id, logprob): (&[u8; 4], &[u8; 4])| (u32::from_le_bytes(*id), f32::from_le_bytes(*logprob));
            for (row, (id, _)) in work.iter().enumerate() {
                let asked = sequences(id).sampling.logprobs;
                self.logprobs.push(asked.map(|n| Logprobs {
                    chosen: f32::from_le_bytes(ready.output(1)[row]),
                    top: top(row).take(n as usize).map(token).collect(),
                }));
            }
        }
        for (id, tokens) in work {
            if let Some(sequence) = &mut self.sequences[id.row] {
                sequence.length += tokens.len();
            }
        }
        Ok(())
    }

    /// Runs a step as [`Engine::step`] does, and tells what each of its launches took.
    ///
    /// # Errors
    /// As for [`Engine::step`], and where the device does not time launches.
    pub fn step_timed(
        &mut self,
        work: &[(SequenceId, &[u32])],
        sample: bool,
        next: &mut Vec<u32>,
    ) -> Result<Vec<LaunchTime>> {
        self.watch = Some(Vec::new());
        let outcome = self.step(work, sample, next);
        let times = self.watch.take().unwrap_or_default();
        outcome.map(|()| times)
    }

    /// The graph as the device runs it in steps that sample without adjustments, or that only fill the cache.
    pub fn lowered(&self, sample: bool) -> Option<&Graph> {
        self.programs.lowered(Wanted { tokens: sample, ..Wanted::default() })
    }

    /// What row `row` of the last step's work asked to know of its token's probability.
    pub fn logprobs(&self, row: usize) -> Option<&Logprobs> {
        self.logprobs.get(row)?.as_ref()
    }

    /// The program and the bucket that some work needs.
    fn needs(&self, work: &[(SequenceId, &[u32])], sample: bool) -> (Wanted, Extents) {
        let mut wanted = Wanted { tokens: sample, ..Wanted::default() };
        let mut extents = Extents {
            tokens: work.iter().map(|(_, t)| t.len()).sum(),
            seqs: work.len(),
            table: self.table,
            blocks: self.block_count,
            biases: 0,
            breakers: 0,
            top: 0,
        };
        if sample {
            for sampling in work.iter().filter_map(|(id, _)| self.sequences[id.row].as_ref()).map(|s| &s.sampling) {
                wanted.adjusted |= sampling.adjusts();
                wanted.logprobs |= sampling.logprobs.is_some();
                extents.make_room(sampling, self.vocab);
            }
        }
        (wanted, extents)
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
        let id = self.start(request.sampling.clone(), request.prompt.len()).ok_or_else(|| EngineError::Setting {
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
        let mut biased = request.sampling.logit_bias.iter().map(|(id, _)| *id);
        if let Some(token) = biased.find(|id| *id as usize >= self.vocab) {
            return Err(EngineError::Setting {
                name: "logit_bias",
                value: token.to_string(),
                why: format!("is no token of a vocabulary of {}", self.vocab),
            });
        }
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
        let mut logprobs = Vec::new();
        if request.max_tokens == 0 {
            return Ok(Generated { tokens, logprobs, finish: Finish::Length });
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
                return Ok(Generated { tokens, logprobs, finish: Finish::Stop });
            }
            tokens.push(token);
            logprobs.extend(self.logprobs(0).cloned());
            length += 1;
            let finish = match on_token(token) {
                ControlFlow::Break(()) => Some(Finish::Cancelled),
                ControlFlow::Continue(()) if tokens.len() == request.max_tokens => Some(Finish::Length),
                ControlFlow::Continue(()) if length == self.options.context => Some(Finish::Context),
                ControlFlow::Continue(()) => None,
            };
            if let Some(finish) = finish {
                return Ok(Generated { tokens, logprobs, finish });
            }
            self.step(&[(id, &[token])], true, &mut next)?;
        }
    }
}

/// Fills what sampling reads, from the rows of a step.
fn fill_sampling<'a, I: Iterator<Item = &'a Sequence>>(ready: &mut Ready, extents: Extents, rows: impl Fn() -> I) {
    let mut float = |input, of: fn(&Sampling) -> f32| {
        ready.fill(input, rows().map(|s| of(&s.sampling).to_le_bytes()));
    };
    float(Input::Temperature, |s| s.temperature);
    float(Input::TopP, |s| s.top_p);
    float(Input::MinP, |s| s.min_p);
    float(Input::TypicalP, |s| s.typical_p);
    float(Input::Repetition, |s| s.repetition_penalty);
    float(Input::Frequency, |s| s.frequency_penalty);
    float(Input::Presence, |s| s.presence_penalty);
    float(Input::DryMultiplier, |s| s.dry.multiplier);
    float(Input::DryBase, |s| s.dry.base);
    let mut int = |input, of: fn(&Sampling) -> u32| {
        ready.fill(input, rows().map(|s| (of(&s.sampling).min(i32::MAX as u32) as i32).to_le_bytes()));
    };
    int(Input::TopK, |s| s.top_k);
    int(Input::DryAllowed, |s| s.dry.allowed_length);
    int(Input::DryRange, |s| s.dry.range);
    ready.fill(Input::PromptLengths, rows().map(|s| i32::try_from(s.prompt).unwrap_or(i32::MAX).to_le_bytes()));
    ready.fill(Input::Seed, rows().map(|s| (s.sampling.seed as i64).to_le_bytes()));
    // The stream of a sequence that is alone under its seed.
    ready.fill(Input::Sequence, rows().map(|_| 0i64.to_le_bytes()));
    let breaker = |s: &'a Sequence| {
        (0..extents.breakers).map(|i| s.sampling.dry.breakers.get(i).map_or(-1, |id| *id as i32).to_le_bytes())
    };
    ready.fill(Input::DryBreakers, rows().flat_map(breaker));
    let bias = |s: &'a Sequence| (0..extents.biases).map(|i| s.sampling.logit_bias.get(i).copied());
    ready.fill(Input::BiasIds, rows().flat_map(bias).map(|b| b.map_or(-1, |(id, _)| id as i32).to_le_bytes()));
    ready.fill(Input::BiasValues, rows().flat_map(bias).map(|b| b.map_or(0.0, |(_, value)| value).to_le_bytes()));
}

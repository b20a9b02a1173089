//! Scores of given texts: log-probabilities of continuations of a context.
//!
//! Scores are computed on the device, by a variant of the model's graph in which each token has a target; logits are never copied to
//! the host. Questions run together, in steps of a bounded number of tokens. Each context is computed once, and then its
//! continuations, one of every question at a time, each overwriting the previous one. States of a fixed size are kept in two lines
//! of each question: that behind its context, from which every continuation starts, and that of the continuation.

use std::collections::HashMap;

use ridge_graph::Bindings;
use ridge_models::{Model, STATE_LINES, block_table_name, has_fixed_state, symbols, windows, with_blocks, with_scores};
use ridge_runtime::{Bucket, Compiled, Session};

use crate::error::{EngineError, Result};

/// Buckets of a program that are kept ready.
pub const MAX_BUCKETS: usize = 16;

/// How much a scorer runs at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScorerOptions {
    /// Tokens that the model reads for one continuation at most.
    pub context: usize,
    /// Tokens of one step at most.
    pub step: usize,
    /// Questions at a time at most.
    pub questions: usize,
}

impl ScorerOptions {
    /// Blocks of the cache: enough for one question of the longest kind, and for a step's tokens of any questions.
    pub fn blocks(&self, block_size: usize) -> usize {
        self.context.div_ceil(block_size).max(self.step.div_ceil(block_size) + self.questions)
    }

    /// Lines of states of a fixed size, of a model that has such: of each question that behind its context, and that of a
    /// continuation.
    pub fn state_lines(&self) -> usize {
        2 * self.questions
    }
}

/// What is to be scored: each continuation behind the same context.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question<'a> {
    /// At least one token.
    pub context: &'a [u32],
    /// The tokens that may follow.
    pub continuations: Vec<&'a [u32]>,
}

impl Question<'_> {
    /// Tokens that the model reads for its longest continuation: all but the last, which nothing follows.
    pub fn positions(&self) -> usize {
        let longest = self.continuations.iter().map(|c| c.len()).max().unwrap_or(0);
        (self.context.len() + longest).saturating_sub(1)
    }

    /// Tokens that the model computes for it.
    pub fn work(&self) -> usize {
        let continuations: usize = self.continuations.iter().map(|c| c.len()).sum();
        self.context.len().saturating_sub(1) + continuations
    }
}

/// Scores texts by one model on one device.
pub struct Scorer {
    vocab: usize,
    block_size: usize,
    options: ScorerOptions,
    table: usize,
    block_count: usize,
    /// Names of the block tables.
    tables: Vec<String>,
    /// Does the model keep states of a fixed size?
    has_lines: bool,
    /// Only fills the cache.
    filling: Programs,
    /// Gives the score of each token's target.
    scoring: Programs,
}

/// Tokens of one row that are to be computed together, those of one question behind what it has in the cache.
struct Piece<'a> {
    row: usize,
    /// Tokens in the cache before them.
    length: usize,
    tokens: Vec<u32>,
    /// The tokens that should follow each; none while a context is filled in.
    targets: &'a [u32],
    /// Where their scores go: the question and the continuation.
    place: (usize, usize),
}

impl Piece<'_> {
    /// Of states of a fixed size, the line that a step reads which computes its tokens from `start`, and the one that it writes.
    fn lines(&self, start: usize) -> [i32; 2] {
        let behind_context = 2 * self.row as i32;
        let of_continuation = behind_context + 1;
        let writes = if self.targets.is_empty() { behind_context } else { of_continuation };
        let reads = match start {
            0 if self.length == 0 => -1,
            0 => behind_context,
            _ => writes,
        };
        [reads, writes]
    }
}

impl Scorer {
    /// A scorer for `model`, whose weights `session` has. Allocates a cache.
    ///
    /// # Errors
    /// When a setting is out of range, memory runs out, or the device cannot run the model.
    pub fn new(mut session: Session, model: &Model, options: ScorerOptions) -> Result<Self> {
        for (name, value) in [("context", options.context), ("step", options.step), ("questions", options.questions)] {
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
        let block_count = options.blocks(model.block_size);
        let graph = with_scores(&model.graph).map_err(ridge_runtime::RuntimeError::from)?;
        let lines = Bindings::new().with(symbols::STATE_LINES, options.state_lines());
        session.allocate_states(&graph, &with_blocks(&graph, lines, block_count))?;
        // A question's blocks have the same numbers in all pools.
        let tables = [None].into_iter().chain(windows(&graph).into_iter().map(Some)).map(block_table_name).collect();
        Ok(Self {
            vocab: model.vocab_size,
            block_size: model.block_size,
            options,
            table: options.context.div_ceil(model.block_size),
            block_count,
            tables,
            has_lines: has_fixed_state(&graph),
            filling: Programs::new(session.compile(&graph, &[])?),
            scoring: Programs::new(session.compile(&graph, &["scores"])?),
        })
    }

    /// For each question and each of its continuations the natural logarithms of the probabilities of its tokens, each
    /// behind the context and the tokens before it. `progress` is told of computed tokens, those of all
    /// [`work`](Question::work) in the end.
    ///
    /// # Errors
    /// When a question has no context, a token that is not of the vocabulary, or more tokens than the context holds,
    /// before anything is computed; when the device fails, or a score is not finite.
    pub fn score(&mut self, questions: &[Question<'_>], mut progress: impl FnMut(usize)) -> Result<Vec<Vec<Vec<f32>>>> {
        questions.iter().try_for_each(|q| self.check(q))?;
        let mut scores: Vec<Vec<Vec<f32>>> =
            questions.iter().map(|q| q.continuations.iter().map(|c| Vec::with_capacity(c.len())).collect()).collect();
        let mut next = 0;
        while next < questions.len() {
            let (count, tables) = self.batch(&questions[next..]);
            let batch = || questions[next..].iter().take(count).enumerate();
            let fill = batch().map(|(row, q)| Piece {
                row,
                length: 0,
                tokens: q.context[..q.context.len() - 1].to_vec(),
                targets: &[],
                place: (next + row, 0),
            });
            self.run(fill.collect(), &tables, &mut scores, &mut progress)?;
            let most = batch().map(|(_, q)| q.continuations.len()).max().unwrap_or(0);
            for which in 0..most {
                let pieces = batch().filter_map(|(row, q)| {
                    let targets = *q.continuations.get(which).filter(|c| !c.is_empty())?;
                    // What is read is one behind what is predicted.
                    let read = q.context.last().into_iter().chain(&targets[..targets.len() - 1]).copied();
                    let length = q.context.len() - 1;
                    Some(Piece { row, length, tokens: read.collect(), targets, place: (next + row, which) })
                });
                self.run(pieces.collect(), &tables, &mut scores, &mut progress)?;
            }
            next += count;
        }
        Ok(scores)
    }

    fn check(&self, question: &Question<'_>) -> Result<()> {
        if question.context.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        let mut tokens = question.continuations.iter().copied().chain([question.context]).flatten();
        if let Some(token) = tokens.find(|t| **t as usize >= self.vocab) {
            return Err(EngineError::UnknownToken { token: *token, vocab: self.vocab });
        }
        if question.positions() > self.options.context {
            return Err(EngineError::PromptTooLong { prompt: question.positions(), context: self.options.context });
        }
        Ok(())
    }

    /// How many of the first questions fit into the cache together, at least one, and the blocks of each.
    fn batch(&self, questions: &[Question<'_>]) -> (usize, Vec<std::ops::Range<usize>>) {
        let mut used = 0;
        let mut tables = Vec::with_capacity(self.options.questions);
        for question in questions.iter().take(self.options.questions) {
            let end = used + question.positions().div_ceil(self.block_size);
            if end > self.block_count {
                break;
            }
            tables.push(used..end);
            used = end;
        }
        (tables.len(), tables)
    }

    /// Runs pieces, in order, in steps of as many tokens as one may have.
    fn run(
        &mut self,
        mut pieces: Vec<Piece<'_>>,
        tables: &[std::ops::Range<usize>],
        scores: &mut [Vec<Vec<f32>>],
        progress: &mut impl FnMut(usize),
    ) -> Result<()> {
        pieces.retain(|p| !p.tokens.is_empty());
        // Of the first piece, how many tokens were in steps before.
        let (mut first, mut done) = (0, 0);
        while first < pieces.len() {
            let mut room = self.options.step;
            let mut step = Vec::new();
            while first < pieces.len() && room > 0 {
                let end = pieces[first].tokens.len().min(done + room);
                step.push((&pieces[first], done..end));
                room -= end - done;
                (first, done) = if end == pieces[first].tokens.len() { (first + 1, 0) } else { (first, end) };
            }
            self.step(&step, tables, scores)?;
            progress(self.options.step - room);
        }
        Ok(())
    }

    fn step(
        &mut self,
        step: &[(&Piece<'_>, std::ops::Range<usize>)],
        tables: &[std::ops::Range<usize>],
        scores: &mut [Vec<Vec<f32>>],
    ) -> Result<()> {
        let tokens: usize = step.iter().map(|(_, part)| part.len()).sum();
        let scored = step.iter().any(|(piece, _)| !piece.targets.is_empty());
        let bindings = Bindings::new()
            .with(symbols::TOKENS, tokens)
            .with(symbols::SEQS, step.len())
            .with(symbols::TABLE, self.table)
            .with(symbols::STATE_LINES, self.options.state_lines());
        let programs = if scored { &mut self.scoring } else { &mut self.filling };
        let bindings = with_blocks(programs.compiled.graph(), bindings, self.block_count);
        let bucket = programs.bucket((tokens, step.len()), &bindings)?;
        let parts = || step.iter().map(|(piece, part)| &piece.tokens[part.clone()]);
        fill(bucket, "token_ids", parts().flatten().map(|t| *t as i32))?;
        let rows = step.iter().enumerate().flat_map(|(i, (_, part))| part.clone().map(move |_| i as i32));
        fill(bucket, "seq_ids", rows)?;
        let mut end = 0;
        let ends = parts().map(|part| {
            end += part.len() as i32;
            end
        });
        fill(bucket, "query_start", std::iter::once(0).chain(ends))?;
        fill(bucket, "lengths", step.iter().map(|(piece, part)| (piece.length + part.start) as i32))?;
        if self.has_lines {
            let lines = step.iter().flat_map(|(piece, part)| piece.lines(part.start));
            fill(bucket, STATE_LINES, lines)?;
        }
        let table = self.table;
        for name in &self.tables {
            let blocks = step.iter().flat_map(|(piece, _)| {
                let blocks = tables[piece.row].clone();
                (0..table).map(move |i| blocks.clone().nth(i).map_or(-1, |b| b as i32))
            });
            fill(bucket, name, blocks)?;
        }
        if scored {
            let targets = step.iter().flat_map(|(piece, part)| piece.targets[part.clone()].iter().map(|t| *t as i32));
            fill(bucket, "targets", targets)?;
        }
        bucket.submit()?;
        bucket.wait()?;
        if scored {
            let index = bucket.output_index("scores")?;
            let mut values = bucket.output(index).as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b));
            for (piece, part) in step {
                // The positions first: the side that ends must not have taken the next piece's value.
                for (position, value) in (piece.length + part.start + 1..=piece.length + part.end).zip(values.by_ref())
                {
                    if !value.is_finite() {
                        return Err(EngineError::NotFinite { position });
                    }
                    scores[piece.place.0][piece.place.1].push(value);
                }
            }
        }
        Ok(())
    }
}

/// Fills a step input, if the program reads it.
fn fill(bucket: &mut Bucket, name: &str, values: impl Iterator<Item = i32>) -> Result<()> {
    if let Some(index) = bucket.input_index(name)? {
        for (to, from) in bucket.input(index).as_chunks_mut::<4>().0.iter_mut().zip(values) {
            *to = from.to_le_bytes();
        }
    }
    Ok(())
}

/// A compiled graph and its buckets by (tokens, rows).
struct Programs {
    compiled: Compiled,
    ready: HashMap<(usize, usize), Bucket>,
}

impl Programs {
    fn new(compiled: Compiled) -> Self {
        Self { compiled, ready: HashMap::with_capacity(MAX_BUCKETS) }
    }

    /// Texts of one length come one after another, so what is full is emptied.
    fn bucket(&mut self, key: (usize, usize), bindings: &Bindings) -> Result<&mut Bucket> {
        if self.ready.len() >= MAX_BUCKETS && !self.ready.contains_key(&key) {
            self.ready.clear();
        }
        Ok(match self.ready.entry(key) {
            std::collections::hash_map::Entry::Occupied(ready) => ready.into_mut(),
            std::collections::hash_map::Entry::Vacant(free) => free.insert(self.compiled.bucket(bindings)?),
        })
    }
}

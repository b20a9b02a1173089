//! A sequence: its identity, its state, and the effects of a step on it.

use crate::blocks::{BlockId, Blocks, Prefix};
use crate::cache::{WindowPools, WindowTable};
use crate::sampling::{Logprobs, Sampling};
use crate::states::SequenceState;

/// A running sequence. That of one that ended is never taken for that of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SequenceId {
    pub(super) row: usize,
    /// How many were started before it.
    pub(super) number: u64,
}

impl SequenceId {
    /// The row of the tables that the sequence owns while it runs.
    pub(crate) fn row(self) -> usize {
        self.row
    }
}

impl std::fmt::Display for SequenceId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.number.fmt(f)
    }
}

/// What is to become a sequence.
#[derive(Clone, Copy, Debug)]
pub struct Start<'a> {
    /// How its tokens are chosen.
    pub sampling: &'a Sampling,
    /// Tokens before its answer: penalties of frequency and presence count what comes after, and a model with a graph
    /// for tokens of answers computes that by it.
    pub prompt: usize,
    /// Which of the sequences of its seed it is: their random numbers differ.
    pub stream: u64,
    /// What comes before its tokens, and those of them that may be in the cache; none where it shares nothing.
    pub shared: Option<(Prefix, &'a [u32])>,
}

/// A sequence's part of a step.
#[derive(Clone, Copy, Debug)]
pub struct Row<'a> {
    /// The sequence.
    pub id: SequenceId,
    /// Tokens to append to it. [`SAMPLED`] is the one that its step before samples, which nobody knows yet.
    pub tokens: &'a [u32],
    /// Is the token after them wanted?
    pub sample: bool,
    /// What follows each of the first tokens, where it is to be told how probable that was.
    pub targets: &'a [u32],
    /// Tokens that may not be chosen next: bit `i % 32` of word `i / 32` for token `i`; all may where there is no word.
    pub forbidden: &'a [u32],
    /// Tokens that may follow, of which those are accepted that the model itself would have chosen; only where the next
    /// token is wanted and nothing is forbidden or asked to be told of it.
    pub candidates: &'a [u32],
    /// The token that follows `tokens` in the prompt, where they are a part of it and the next token is not wanted: the model's
    /// prediction module, if it has one, takes it along.
    pub follower: Option<u32>,
    /// Is what is forbidden told only when the step is [released](crate::Engine::release)?
    pub late: bool,
}

impl<'a> Row<'a> {
    /// These tokens, with nothing asked for.
    pub fn of(id: SequenceId, tokens: &'a [u32]) -> Self {
        Self { id, tokens, sample: false, targets: &[], forbidden: &[], candidates: &[], follower: None, late: false }
    }
}

/// The room of values that are over, for values of other borrows: memory that is given back and taken again in each step
/// costs more than what is done with it.
pub(crate) fn recycled<A, B>(mut room: Vec<A>) -> Vec<B> {
    room.clear();
    // Collected in place, where both are of one size: there is nothing to map.
    room.into_iter().map(|_| unreachable!("there is nothing")).collect()
}

/// The token that a step in flight samples for the row.
pub const SAMPLED: u32 = u32::MAX;

/// The token after a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// It was not asked for.
    NotAsked,
    /// The token.
    Token(u32),
    /// No token can be chosen: the model's output is not finite after so many tokens.
    NotFinite(usize),
}

/// What a step brought a row.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// The sequence.
    pub id: SequenceId,
    /// How many of its candidates were accepted: the first ones.
    pub accepted: usize,
    /// The token after these.
    pub next: Next,
    /// How probable that is, if the sequence's sampling asks.
    pub logprobs: Option<Logprobs>,
    /// How probable the row's targets were, beside as many of the most likely tokens in their places as the sequence's
    /// sampling asks for.
    pub scores: Vec<Logprobs>,
}

#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) number: u64,
    /// The last step that it stood in.
    pub(super) step: u64,
    /// Tokens in the cache when all steps in flight are complete.
    pub(super) length: usize,
    /// Tokens in the cache now.
    pub(super) complete: usize,
    /// Steps in flight that sample a token of it.
    pub(super) flying: usize,
    /// Does a step in flight have candidates of it? `length` is then the most that it may come to.
    pub(super) guesses: bool,
    /// The token that was sampled last.
    pub(super) last: Option<u32>,
    /// What the model's prediction module expects behind that token, until the next step.
    pub(super) drafts: Vec<u32>,
    /// Tokens before its answer.
    pub(super) prompt: usize,
    pub(super) blocks: Vec<BlockId>,
    /// Its blocks of groups with a window.
    pub(super) windows: Vec<WindowTable>,
    /// Its line of states of a fixed size.
    pub(super) state: SequenceState,
    pub(super) sampling: Sampling,
    pub(super) stream: u64,
    pub(super) shared: Option<Shared>,
}

/// How far a sequence's blocks have names.
#[derive(Debug)]
pub(super) struct Shared {
    /// That of the full blocks.
    pub(super) prefix: Prefix,
    /// The tokens behind them, with how each was [`computed`](crate::blocks::computed).
    pub(super) rest: Vec<u32>,
}

impl Shared {
    /// Takes over tokens that are in the cache now, which has `length` of them, and names the blocks that they fill.
    pub(super) fn take(
        &mut self,
        tokens: impl ExactSizeIterator<Item = u32>,
        (owned, windows): (&[BlockId], &[WindowTable]),
        length: usize,
        size: usize,
        (blocks, pools): (&mut Blocks, &mut WindowPools),
    ) {
        let mut full = (length - tokens.len()) / size;
        for token in tokens {
            self.rest.push(token);
            if self.rest.len() == size {
                self.prefix = blocks.name(owned[full], self.prefix, &self.rest);
                pools.name(windows, full, self.prefix);
                self.rest.clear();
                full += 1;
            }
        }
    }
}

//! One sequence of a request while it is served.

use std::sync::Arc;
use std::time::Duration;

use super::masks::TaskGrammar;
use super::request::{Request, RequestId};
use crate::blocks::Prefix;
use crate::draft::SequenceDraft;
use crate::engine::{Engine, Row, SAMPLED, SequenceId};
use crate::programs::MAX_CANDIDATES;
use crate::sampling::Logprobs;

/// One answer on its way: a sequence that runs, or waits to.
pub(super) struct Task {
    pub(super) id: RequestId,
    /// Which of the request's answers.
    pub(super) choice: usize,
    pub(super) request: Arc<Request>,
    /// Those of the prompt, then of the answer.
    pub(super) tokens: Vec<u32>,
    /// Where its prefixes begin.
    pub(super) root: Prefix,
    /// While it runs.
    pub(super) sequence: Option<SequenceId>,
    /// Tokens that steps in flight sample, which nobody knows yet.
    pub(super) flying: usize,
    pub(super) arrived: Duration,
    /// When it ran first, and how many of its tokens were in the cache then.
    pub(super) started: Option<(Duration, usize)>,
    /// When its last token came.
    pub(super) latest: Option<Duration>,
    /// How probable the prompt's tokens are from the second on, while that is asked for and not told.
    pub(super) scores: Option<Vec<Logprobs>>,
    /// Tokens that may not come next, as [`Row::forbidden`] has them.
    pub(super) forbidden: Vec<u32>,
    /// What the answer must be.
    pub(super) grammar: TaskGrammar,
    /// Where candidates come from, if there are any.
    pub(super) draft: Option<SequenceDraft>,
    /// Those of the step that is composed or in flight.
    pub(super) candidates: Vec<u32>,
}

impl Task {
    /// Tokens of the answer.
    pub(super) fn answered(&self) -> usize {
        self.tokens.len() - self.request.prompt.len()
    }

    /// Tokens that are not in the cache, those that steps in flight sample among them; none while candidates are in flight.
    pub(super) fn missing(&self, engine: &Engine) -> usize {
        (self.tokens.len() + self.flying).saturating_sub(self.sequence.and_then(|id| engine.length(id)).unwrap_or(0))
    }

    /// The tokens whose place in the cache it need not compute: none while it is asked how probable they are.
    pub(super) fn sharable(&self) -> &[u32] {
        if self.scores.is_some() { &[] } else { &self.tokens }
    }

    /// Tokens that the next step can compute: not the last while it is unknown what may follow, nor one that is being
    /// sampled and is the answer's last. `context` is the most tokens of a sequence.
    pub(super) fn runnable(&self, engine: &Engine, context: usize) -> usize {
        let over = self.flying > 0
            && (self.draft.is_some()
                || self.answered() + self.flying >= self.request.max_tokens
                || self.tokens.len() + self.flying >= context
                || matches!(&self.grammar, TaskGrammar::Here(grammar) if grammar.is_costly()));
        self.missing(engine).saturating_sub(usize::from(over || self.grammar.is_away()))
    }

    /// Forbids the tokens that the answer may not end with yet, where no grammar says what may come.
    pub(super) fn forbid_early(&mut self, vocab: usize) {
        if self.is_early(0) {
            self.forbidden = self.early(vec![0; vocab.div_ceil(32)], vocab);
        }
    }

    /// Forbids the tokens that the grammar forbids, and those that the answer may not end with yet.
    pub(super) fn forbid(&mut self, by_grammar: Vec<u32>, vocab: usize) {
        self.forbidden = by_grammar;
        if self.is_early(0) {
            let both = self.early(self.forbidden.clone(), vocab);
            // A grammar that allows only the end has its way.
            let allowed = |word: usize| both[word] != u32::MAX;
            if (0..both.len()).any(allowed) {
                self.forbidden = both;
            }
        }
    }

    /// May the answer not end yet, with `more` tokens behind those that are known?
    fn is_early(&self, more: usize) -> bool {
        self.answered() + more < self.request.min_tokens && !self.request.stop_tokens.is_empty()
    }

    fn early(&self, mut forbidden: Vec<u32>, vocab: usize) -> Vec<u32> {
        for token in self.request.stop_tokens.iter().filter(|t| (**t as usize) < vocab) {
            forbidden[*token as usize / 32] |= 1 << (token % 32);
        }
        forbidden
    }

    /// Of the next `count` tokens those of the next step: where the model keeps states of a fixed size, chunks of a prompt end
    /// at the last boundary of blocks that they reach, where a snapshot is kept.
    pub(super) fn cut(&self, engine: &Engine, count: usize) -> usize {
        let id = self.sequence.filter(|_| engine.keeps_fixed_state());
        let Some(from) = id.and_then(|id| engine.length(id)) else { return count };
        let size = engine.block_size();
        let end = (from + count).min(self.request.prompt.len().saturating_sub(1)) / size * size;
        if end > from { end - from } else { count }
    }

    /// Proposes at most `most` candidates behind its tokens, all of which the next step computes, where `context` is the most
    /// tokens of a sequence and the model's module has drafted `drafted`. Gives how many.
    pub(super) fn propose(&mut self, drafted: &[u32], most: usize, context: usize) -> usize {
        let plain = matches!(self.grammar, TaskGrammar::None) && !self.is_early(0);
        let (answered, length) = (self.answered(), self.tokens.len());
        let Some(draft) = self.draft.as_mut().filter(|_| plain && self.request.sampling.logprobs.is_none()) else {
            return 0;
        };
        // The token behind them needs a place too.
        let left = (self.request.max_tokens - answered).min(context - length).saturating_sub(1);
        draft.propose(&self.tokens, drafted, most.min(MAX_CANDIDATES).min(left), &mut self.candidates);
        self.candidates.len()
    }

    /// Its next `count` tokens in a step, and how many it has in the cache before them.
    pub(super) fn row(&self, engine: &Engine, count: usize) -> Option<(usize, Row<'_>)> {
        let id = self.sequence?;
        let from = engine.length(id)?;
        let (to, prompt) = (from + count, self.request.prompt.len());
        let targets = if self.scores.is_some() && from + 1 < prompt { from + 1..prompt.min(to + 1) } else { 0..0 };
        let sample = to == self.tokens.len() + self.flying;
        let follows = matches!(self.grammar, TaskGrammar::Here(_));
        let row = Row {
            id,
            // Behind what is being sampled there is no other token.
            tokens: if to > self.tokens.len() { &[SAMPLED] } else { &self.tokens[from..to] },
            sample,
            targets: &self.tokens[targets],
            forbidden: if sample && (follows || self.is_early(self.flying)) { &self.forbidden } else { &[] },
            candidates: if sample { &self.candidates } else { &[] },
            follower: self.tokens.get(to).copied(),
            // What a grammar allows follows from the token before.
            late: sample && follows && self.flying > 0,
        };
        Some((from, row))
    }

    /// Takes over the probabilities of the targets of a step whose first token was number `from`.
    pub(super) fn take_scores(&mut self, from: usize, new: Vec<Logprobs>) {
        if let Some(scores) = &mut self.scores
            && let Some(known) = scores.len().checked_sub(from)
        {
            scores.extend(new.into_iter().skip(known));
        }
    }
}

//! One answer on its way.

use std::sync::Arc;
use std::time::Duration;

use super::masks::TaskGrammar;
use super::request::{Request, RequestId};
use crate::blocks::Prefix;
use crate::engine::{Engine, Row, SequenceId};

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
    pub(super) arrived: Duration,
    /// When it ran first, and how many of its tokens were in the cache then.
    pub(super) started: Option<(Duration, usize)>,
    /// When its last token came.
    pub(super) latest: Option<Duration>,
    /// Logarithms of the probabilities of the prompt's tokens from the second on, while they are asked for and not told.
    pub(super) scores: Option<Vec<f32>>,
    /// Tokens that may not come next, as [`Row::forbidden`] has them.
    pub(super) forbidden: Vec<u32>,
    /// What the answer must be.
    pub(super) grammar: TaskGrammar,
}

impl Task {
    /// Tokens of the answer.
    pub(super) fn answered(&self) -> usize {
        self.tokens.len() - self.request.prompt.len()
    }

    /// Tokens that are not in the cache.
    pub(super) fn missing(&self, engine: &Engine) -> usize {
        self.tokens.len() - self.sequence.and_then(|id| engine.length(id)).unwrap_or(0)
    }

    /// The tokens whose place in the cache it need not compute: none while it is asked how probable they are.
    pub(super) fn sharable(&self) -> &[u32] {
        if self.scores.is_some() { &[] } else { &self.tokens }
    }

    /// Tokens that the next step can compute: not the last while it is unknown what may follow.
    pub(super) fn runnable(&self, engine: &Engine) -> usize {
        self.missing(engine) - usize::from(self.grammar.is_away())
    }

    /// Forbids the tokens that may not come next, where no grammar says which these are.
    pub(super) fn forbid_early(&mut self, vocab: usize) {
        match self.is_early() {
            true if self.forbidden.is_empty() => self.forbidden = self.early(vec![0; vocab.div_ceil(32)], vocab),
            true => {}
            false => self.forbidden.clear(),
        }
    }

    /// Forbids the tokens that the grammar forbids, and those that the answer may not end with yet.
    pub(super) fn forbid(&mut self, by_grammar: Vec<u32>, vocab: usize) {
        self.forbidden = by_grammar;
        if self.is_early() {
            let both = self.early(self.forbidden.clone(), vocab);
            // A grammar that allows only the end has its way.
            let allowed = |word: usize| both[word] != u32::MAX;
            if (0..both.len()).any(allowed) {
                self.forbidden = both;
            }
        }
    }

    /// May the answer not end yet?
    fn is_early(&self) -> bool {
        self.answered() < self.request.min_tokens && !self.request.stop_tokens.is_empty()
    }

    fn early(&self, mut forbidden: Vec<u32>, vocab: usize) -> Vec<u32> {
        for token in self.request.stop_tokens.iter().filter(|t| (**t as usize) < vocab) {
            forbidden[*token as usize / 32] |= 1 << (token % 32);
        }
        forbidden
    }

    /// Its next `count` tokens in a step.
    pub(super) fn row(&self, engine: &Engine, count: usize) -> Option<Row<'_>> {
        let id = self.sequence?;
        let from = engine.length(id)?;
        let (to, prompt) = (from + count, self.request.prompt.len());
        let targets = if self.scores.is_some() && from + 1 < prompt { from + 1..prompt.min(to + 1) } else { 0..0 };
        let sample = to == self.tokens.len();
        Some(Row {
            id,
            tokens: &self.tokens[from..to],
            sample,
            targets: &self.tokens[targets],
            forbidden: if sample { &self.forbidden } else { &[] },
        })
    }

    /// Takes over the probabilities of the targets of a step whose first token was number `from`.
    pub(super) fn take_scores(&mut self, from: usize, new: &[f32]) {
        if let Some(scores) = &mut self.scores
            && let Some(new) = scores.len().checked_sub(from).and_then(|known| new.get(known..))
        {
            scores.extend_from_slice(new);
        }
    }
}

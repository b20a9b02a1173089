//! The outputs and extents of a step, which select the bucket and the program that run it.

use ridge_graph::Bindings;
use ridge_models::{DRAFTS, symbols};

/// The outputs with the log-probabilities of targets, and with the most likely tokens in their places and theirs.
pub(crate) const SCORES: [&str; 3] = ["scores", "score_ids", "score_logprobs"];

/// What a step gives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wanted {
    /// The next token of each row.
    pub(crate) tokens: bool,
    /// After biases and penalties.
    pub(crate) adjusted: bool,
    /// And the logarithms of probabilities.
    pub(crate) logprobs: bool,
    /// The logarithms of the probabilities of the targets.
    pub(crate) scores: bool,
    /// By the graph for tokens of an answer; there must be one ([`Programs::divide`]).
    pub(crate) answer: bool,
    /// Rows have candidates, of which some are accepted.
    pub(crate) candidates: bool,
    /// Drafts behind tokens that the step before sampled, and nothing else, by the model's prediction module.
    pub(crate) drafts: bool,
}

impl Wanted {
    /// Names of the outputs, in the order in which they are read.
    pub(crate) fn outputs(self) -> Vec<&'static str> {
        if self.drafts {
            return vec![DRAFTS];
        }
        let (next, logprob) = if self.adjusted { ("next_adjusted", "adjusted_logprob") } else { ("next", "logprob") };
        let mut outputs = match (self.tokens, self.logprobs) {
            (false, _) => Vec::new(),
            (true, false) => vec![next],
            (true, true) => vec![next, logprob, "top_ids", "top_logprobs"],
        };
        outputs.extend(self.scores.then_some(SCORES).into_iter().flatten());
        outputs
    }

    /// Does a program that gives this give all of `other`, of the same tokens?
    pub(crate) fn covers(self, other: Self) -> bool {
        self.answer == other.answer
            && self.drafts == other.drafts
            && self.tokens >= other.tokens
            && self.adjusted >= other.adjusted
            && self.logprobs >= other.logprobs
            && self.scores >= other.scores
            && self.candidates >= other.candidates
    }

    /// How much it gives: more costs more.
    pub(crate) fn rank(self) -> usize {
        [self.adjusted, self.logprobs, self.scores].into_iter().filter(|gives| *gives).count()
    }
}

/// Extents of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Extents {
    /// Rows of the tables on the device.
    pub(crate) rows: usize,
    pub(crate) tokens: usize,
    pub(crate) seqs: usize,
    pub(crate) table: usize,
    pub(crate) blocks: usize,
    /// Logit biases of a row.
    pub(crate) biases: usize,
    /// DRY's breakers of a row.
    pub(crate) breakers: usize,
    /// Tokens of a row whose log-probabilities are given.
    pub(crate) top: usize,
    /// Words of a row that say which tokens are forbidden.
    pub(crate) forbidden: usize,
}

impl Extents {
    pub(crate) fn bindings(self) -> Bindings {
        Bindings::new()
            .with(symbols::ROWS, self.rows)
            .with(symbols::TOKENS, self.tokens)
            .with(symbols::SEQS, self.seqs)
            .with(symbols::TABLE, self.table)
            .with(symbols::BLOCKS, self.blocks)
            .with(symbols::BIASES, self.biases)
            .with(symbols::BREAKERS, self.breakers)
            .with(symbols::TOP, self.top)
            .with(symbols::FORBIDDEN, self.forbidden)
    }

    /// Is there room for all of `other`?
    pub(crate) fn cover(&self, other: Self) -> bool {
        self.rows == other.rows
            && self.blocks == other.blocks
            && self.tokens >= other.tokens
            && self.seqs >= other.seqs
            && self.table >= other.table
            && self.biases >= other.biases
            && self.breakers >= other.breakers
            && self.top >= other.top
            && self.forbidden >= other.forbidden
    }

    /// What a step of these extents costs: masks are sent, and a line has logits.
    pub(crate) fn rank(&self) -> (bool, usize) {
        (self.forbidden > 0, 4 * self.tokens + self.seqs)
    }
}

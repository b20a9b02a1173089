//! Statistics of a service.

use crate::programs::Made;

/// A service's state and what it has done since its start, for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Sequences that run.
    pub running: usize,
    /// Requests that wait, those that were preempted among them.
    pub waiting: usize,
    /// Blocks of the cache.
    pub blocks: usize,
    /// Blocks that running sequences own.
    pub blocks_used: usize,
    /// Blocks that nobody owns and that hold a prefix.
    pub blocks_cached: usize,
    /// Positions of the blocks that running sequences own, in all pools.
    pub positions_owned: usize,
    /// How many of them have no token.
    pub positions_unused: usize,
    /// Steps that ran.
    pub steps: u64,
    /// Steps that failed as a whole.
    pub failed_steps: u64,
    /// Candidates for tokens of answers that steps computed.
    pub candidates: u64,
    /// Those that were accepted.
    pub accepted: u64,
    /// Tokens of prompts that were computed.
    pub prompt_tokens: u64,
    /// Tokens of answers.
    pub generated_tokens: u64,
    /// Tokens of prompts that were looked up in the cache.
    pub prefix_queries: u64,
    /// Tokens of prompts that were found there.
    pub prefix_hits: u64,
    /// Sequences that gave their blocks to others, to be computed again.
    pub preemptions: u64,
    /// What was made for its steps.
    pub made: Made,
}

/// What a block of the cache is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockUse {
    /// Nothing.
    Free,
    /// A prefix that nobody uses now.
    Cached,
    /// This many sequences.
    Used(usize),
}

//! Options of a service.

use std::time::Duration;

use crate::engine::EngineOptions;

/// The deadline of a request without targets, after its arrival.
pub const DEFAULT_DEADLINE: Duration = Duration::from_secs(10);

/// Maximum number of answers to one request.
pub const MAX_ANSWERS: usize = 128;

/// Whose tokens a step runs first when not all fit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Policy {
    /// Those of the request that came first.
    #[default]
    FirstCome,
    /// Those of the smallest [`priority`](crate::service::Request::priority); among equals, first come.
    Priority,
    /// Those whose next token is due first ([`Targets`](crate::service::Targets); Liu and Layland 1973, "Scheduling
    /// Algorithms for Multiprogramming in a Hard-Real-Time Environment", section 7). Requests without a target are due
    /// [`DEFAULT_DEADLINE`] after their arrival, so that they do not starve.
    Deadline,
    /// Those of the tenant that has been served the fewest tokens (Sheng et al. 2024, "Fairness in Serving Large
    /// Language Models", section 4); within a tenant, first come.
    Fair,
}

/// How much a service holds, and what comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceOptions {
    /// Context of a sequence, sequences at a time, and in `chunk` the tokens of a step over all sequences.
    pub engine: EngineOptions,
    /// Requests that wait at most, beyond those that run.
    pub queue: usize,
    /// Whose tokens come first.
    pub policy: Policy,
    /// Keep the blocks of requests that are over, for others that begin alike.
    pub prefix_cache: bool,
}

//! What to send: requests by their sizes, and when.

use std::time::Duration;

/// How large a request is, and when it comes.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestShape {
    /// Tokens of its prompt.
    pub prompt_tokens: usize,
    /// Tokens of its answer.
    pub output_tokens: usize,
    /// Blocks that its prompt begins with.
    pub blocks: Vec<u64>,
    /// Seconds after the start, if it comes at its time.
    pub at: Option<f64>,
}

/// When requests are sent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pace {
    /// So many at a time: the next when one is answered (a closed loop).
    Concurrent(usize),
    /// Each when its time comes, however many are unanswered (an open loop).
    AtTheirTimes,
}

/// What to send.
#[derive(Clone, Debug)]
pub struct LoadWorkload {
    /// The requests, in the order of their times, at least one.
    pub shapes: Vec<RequestShape>,
    /// Requests of a closed loop at most; it begins with the first shape again when it has sent the last.
    pub requests: usize,
    /// When they are sent.
    pub pace: Pace,
    /// No request is sent after this.
    pub duration: Option<Duration>,
    /// What the prompts' numbers begin with, so that those of two runs differ.
    pub first_number: u64,
}

impl LoadWorkload {
    /// The shape of the request of this number.
    pub fn shape(&self, index: usize) -> &RequestShape {
        &self.shapes[index % self.shapes.len()]
    }
}

//! Latencies and throughput of a server at one point: a batch of sequences of one prompt length and one answer length.
//! A point takes microseconds: each op of each kind of layer is one roofline with an efficiency.

mod benchmark;
mod point;
mod simulated;
mod software;
mod speculated;

pub use benchmark::{ClientLatency, ClosedLoop, PromptHold, benchmark};
pub use point::{OperatingPoint, ServeLayout, Speculation, Traffic, decode_step, disaggregated, drafting, prefill};
pub use simulated::simulated;
pub use software::Software;
pub use speculated::{speculated_tokens, speculation_speedup};

/// GPUs that serve `requests_per_second` when a replica of `gpus` serves `of_replica` of them.
pub fn gpus_for(requests_per_second: f64, of_replica: f64, gpus: usize) -> usize {
    ((requests_per_second / of_replica).ceil().max(1.0) as usize).saturating_mul(gpus)
}

/// Dollars for a million tokens at `price` dollars a GPU hour: `gpus` that yield `tokens_per_second`, be it their most or
/// what is asked of them.
pub fn dollars_per_million(price: f64, gpus: usize, tokens_per_second: f64) -> f64 {
    price * gpus as f64 / 3600.0 / tokens_per_second * 1e6
}

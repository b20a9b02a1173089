//! Latencies and throughput of a server at one point: a batch of sequences of one prompt length and one answer length.
//! A point takes microseconds: each op of each kind of layer is one roofline with an efficiency.

mod benchmark;
mod point;
mod simulated;
mod software;

pub use benchmark::{ClientLatency, ClosedLoop, PromptHold, benchmark};
pub use point::{OperatingPoint, ServeLayout, Speculation, Traffic, decode_step, disaggregated, drafting, prefill};
pub use simulated::simulated;
pub use software::Software;

/// GPUs that serve `requests_per_second` when a replica of `gpus` serves `of_replica` of them.
pub fn gpus_for(requests_per_second: f64, of_replica: f64, gpus: usize) -> usize {
    ((requests_per_second / of_replica).ceil().max(1.0) as usize).saturating_mul(gpus)
}

/// Dollars for a million tokens at `price` dollars a GPU hour: `gpus` that yield `tokens_per_second`, be it their most or
/// what is asked of them.
pub fn dollars_per_million(price: f64, gpus: usize, tokens_per_second: f64) -> f64 {
    price * gpus as f64 / 3600.0 / tokens_per_second * 1e6
}

/// StepTokens that a verification yields on average when `drafts` are proposed and each is accepted with `acceptance` given
/// that those before it were (Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding",
/// equation 1).
pub fn speculated_tokens(acceptance: f64, drafts: usize) -> f64 {
    if acceptance >= 1.0 {
        return drafts as f64 + 1.0;
    }
    (1.0 - acceptance.powi(drafts as i32 + 1)) / (1.0 - acceptance)
}

/// How many times quicker speculation makes a memory-bound decode, with a draft that takes `cost` of a step of the model
/// (theorem 3.8 of the same paper).
pub fn speculation_speedup(acceptance: f64, drafts: usize, cost: f64) -> f64 {
    speculated_tokens(acceptance, drafts) / (drafts as f64 * cost + 1.0)
}

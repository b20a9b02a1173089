//! What speculation yields, by its acceptance.

/// Tokens that a verification yields on average when `drafts` are proposed and each is accepted with `acceptance` given
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

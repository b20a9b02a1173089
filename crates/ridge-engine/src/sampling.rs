//! What may be asked of the sampler.

use crate::error::{EngineError, Result};

/// How the next token is chosen from the logits; see `ridge_graph::ops::SampleToken` for the exact meaning.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the most likely token.
    pub temperature: f32,
    /// Keep only this many of the most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep only the most likely tokens that together have this probability; 1 keeps all.
    pub top_p: f32,
    /// Key of the random numbers: the same seed gives the same text.
    pub seed: u64,
}

impl Sampling {
    /// Always the most likely token.
    pub const GREEDY: Self = Self { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0 };

    /// Checks every setting.
    ///
    /// # Errors
    /// Names the first that is out of range, with what it must be.
    pub fn check(&self) -> Result<()> {
        let wrong = |name, value: &dyn std::fmt::Display, why: &str| {
            Err(EngineError::Setting { name, value: value.to_string(), why: why.into() })
        };
        if !self.temperature.is_finite() || self.temperature < 0.0 {
            return wrong("temperature", &self.temperature, "must be 0 (greedy) or a positive number");
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return wrong("top_p", &self.top_p, "must be above 0 and at most 1 (1 keeps all tokens)");
        }
        if i32::try_from(self.top_k).is_err() {
            return wrong("top_k", &self.top_k, "must be at most 2147483647 (0 keeps all tokens)");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_out_of_range_are_named() {
        let bad = [
            (Sampling { temperature: -0.1, ..Sampling::GREEDY }, "temperature = -0.1"),
            (Sampling { temperature: f32::NAN, ..Sampling::GREEDY }, "temperature = NaN"),
            (Sampling { top_p: 0.0, ..Sampling::GREEDY }, "top_p = 0"),
            (Sampling { top_p: 1.5, ..Sampling::GREEDY }, "top_p = 1.5"),
            (Sampling { top_k: u32::MAX, ..Sampling::GREEDY }, "top_k = 4294967295"),
        ];
        for (sampling, start) in bad {
            let said = sampling.check().unwrap_err().to_string();
            assert!(said.starts_with(start), "{said}");
        }
        assert!(Sampling::GREEDY.check().is_ok());
    }
}

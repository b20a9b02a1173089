//! What may be asked of the sampler.

use crate::error::{EngineError, Result};

/// How the next token is chosen from the logits: biases, penalties and those of DRY are applied in that order
/// (`ridge_graph::ops::{LogitBias, Penalties, Dry}`), then temperature, top-k, top-p, min-p and typical-p
/// (`ridge_graph::ops::SampleToken`).
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the most likely token.
    pub temperature: f32,
    /// Keep only this many of the most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep only the most likely tokens that together have this probability; 1 keeps all.
    pub top_p: f32,
    /// Keep only tokens at least this many times as likely as the likeliest; 0 keeps all.
    pub min_p: f32,
    /// Keep only the most typical tokens that together have this probability; 1 keeps all.
    pub typical_p: f32,
    /// Divides the logits above 0 of tokens in the prompt or the answer, and multiplies others; 1 changes none.
    pub repetition_penalty: f32,
    /// Taken from a token's logit for each time that it is in the answer.
    pub frequency_penalty: f32,
    /// Taken from the logit of each token in the answer.
    pub presence_penalty: f32,
    /// Penalises going on with what was said before.
    pub dry: Dry,
    /// Added to the logits of tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// Key of the random numbers: the same seed gives the same text.
    pub seed: u64,
    /// Tell the probability of each token, and of this many of the likeliest instead of it.
    pub logprobs: Option<u32>,
}

/// Penalises going on with what was said before.
#[derive(Clone, Debug, PartialEq)]
pub struct Dry {
    /// What the shortest repetition beyond those allowed costs; 0 penalises none.
    pub multiplier: f32,
    /// How many times more each further token costs.
    pub base: f32,
    /// Repetitions shorter than this are free.
    pub allowed_length: u32,
    /// Look back this many tokens; 0 looks at all.
    pub range: u32,
    /// Tokens that no repetition goes over.
    pub breakers: Vec<u32>,
}

impl Dry {
    /// Off, with the parameters that its authors propose.
    pub const OFF: Self = Self { multiplier: 0.0, base: 1.75, allowed_length: 2, range: 0, breakers: Vec::new() };
}

/// How likely a token was, by the model's own distribution: before biases, penalties and temperature.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    /// Natural logarithm of its probability.
    pub chosen: f32,
    /// The likeliest tokens and theirs, likeliest first.
    pub top: Vec<(u32, f32)>,
}

/// Tokens whose log-probabilities may be asked for beside the chosen one's.
pub const MAX_LOGPROBS: u32 = 1024;

/// Logit biases of a sequence at most.
pub const MAX_BIASES: usize = 1024;

/// Tokens at most that DRY's repetitions do not go over.
pub const MAX_BREAKERS: usize = 1024;

impl Sampling {
    /// Always the most likely token.
    pub const GREEDY: Self = Self {
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        typical_p: 1.0,
        repetition_penalty: 1.0,
        frequency_penalty: 0.0,
        presence_penalty: 0.0,
        dry: Dry::OFF,
        logit_bias: Vec::new(),
        seed: 0,
        logprobs: None,
    };

    /// Does it change logits?
    pub(crate) fn adjusts(&self) -> bool {
        self.repetition_penalty != 1.0
            || self.frequency_penalty != 0.0
            || self.presence_penalty != 0.0
            || self.dry.multiplier > 0.0
            || !self.logit_bias.is_empty()
    }

    /// Checks every setting.
    ///
    /// # Errors
    /// Names the first that is out of range, with what it must be.
    pub fn check(&self) -> Result<()> {
        let check = |name, value: &dyn std::fmt::Display, good: bool, why: &str| match good {
            true => Ok(()),
            false => Err(EngineError::Setting { name, value: value.to_string(), why: why.into() }),
        };
        let positive = |x: f32| x.is_finite() && x >= 0.0;
        let share = |x: f32| x > 0.0 && x <= 1.0;
        check("temperature", &self.temperature, positive(self.temperature), "must be 0 (greedy) or a positive number")?;
        check("top_p", &self.top_p, share(self.top_p), "must be above 0 and at most 1 (1 keeps all tokens)")?;
        let why = "must be from 0 (keeps all tokens) to 1";
        check("min_p", &self.min_p, (0.0..=1.0).contains(&self.min_p), why)?;
        let why = "must be above 0 and at most 1 (1 keeps all tokens)";
        check("typical_p", &self.typical_p, share(self.typical_p), why)?;
        let most = i32::MAX as u32;
        check("top_k", &self.top_k, self.top_k <= most, "must be at most 2147483647 (0 keeps all tokens)")?;
        let repetition = self.repetition_penalty;
        let why = "must be above 0 (1 penalises nothing)";
        check("repetition_penalty", &repetition, repetition.is_finite() && repetition > 0.0, why)?;
        for (name, value) in
            [("frequency_penalty", self.frequency_penalty), ("presence_penalty", self.presence_penalty)]
        {
            check(name, &value, value.is_finite(), "must be a finite number (0 penalises nothing)")?;
        }
        let dry = &self.dry;
        check("dry_multiplier", &dry.multiplier, positive(dry.multiplier), "must be 0 (off) or a positive number")?;
        check("dry_base", &dry.base, dry.base.is_finite() && dry.base >= 1.0, "must be 1 or above")?;
        let why = "must be from 1 to 2147483647";
        check("dry_allowed_length", &dry.allowed_length, (1..=most).contains(&dry.allowed_length), why)?;
        check("dry_range", &dry.range, dry.range <= most, "must be at most 2147483647 (0 looks at all tokens)")?;
        if let Some((id, value)) = self.logit_bias.iter().find(|(_, value)| !value.is_finite()) {
            check("logit_bias", &format!("{id}:{value}"), false, "must be a finite number")?;
        }
        let count = |name, len: usize, most: usize| {
            check(name, &format!("{len} tokens"), len <= most, &format!("must be at most {most}"))
        };
        count("logit_bias", self.logit_bias.len(), MAX_BIASES)?;
        count("dry_breakers", dry.breakers.len(), MAX_BREAKERS)?;
        let logprobs = self.logprobs.unwrap_or(0);
        check("logprobs", &logprobs, logprobs <= MAX_LOGPROBS, &format!("must be at most {MAX_LOGPROBS}"))
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
            (Sampling { min_p: 1.1, ..Sampling::GREEDY }, "min_p = 1.1"),
            (Sampling { min_p: f32::NAN, ..Sampling::GREEDY }, "min_p = NaN"),
            (Sampling { typical_p: 0.0, ..Sampling::GREEDY }, "typical_p = 0"),
            (Sampling { repetition_penalty: 0.0, ..Sampling::GREEDY }, "repetition_penalty = 0"),
            (Sampling { frequency_penalty: f32::INFINITY, ..Sampling::GREEDY }, "frequency_penalty = inf"),
            (Sampling { presence_penalty: f32::NAN, ..Sampling::GREEDY }, "presence_penalty = NaN"),
            (Sampling { dry: Dry { multiplier: -1.0, ..Dry::OFF }, ..Sampling::GREEDY }, "dry_multiplier = -1"),
            (Sampling { dry: Dry { base: 0.5, ..Dry::OFF }, ..Sampling::GREEDY }, "dry_base = 0.5"),
            (Sampling { dry: Dry { allowed_length: 0, ..Dry::OFF }, ..Sampling::GREEDY }, "dry_allowed_length = 0"),
            (Sampling { logit_bias: vec![(7, f32::NAN)], ..Sampling::GREEDY }, "logit_bias = 7:NaN"),
            (Sampling { logit_bias: vec![(7, 1.0); 1025], ..Sampling::GREEDY }, "logit_bias = 1025 tokens"),
            (Sampling { dry: Dry { breakers: vec![7; 1025], ..Dry::OFF }, ..Sampling::GREEDY }, "dry_breakers = 1025"),
            (Sampling { logprobs: Some(5000), ..Sampling::GREEDY }, "logprobs = 5000"),
        ];
        for (sampling, start) in bad {
            let said = sampling.check().unwrap_err().to_string();
            assert!(said.starts_with(start), "{said}");
        }
        assert!(Sampling::GREEDY.check().is_ok());
    }
}

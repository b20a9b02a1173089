//! How tokens are chosen: what can be typed, and what it means.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};

use clap::Args;
use ridge_engine::{Dry, EngineError, Sampling};
use ridge_text::Tokenizer;

use super::numbers::{MAX_COUNT, whole};
use crate::error::Result;

/// The ops hold them as i32.
const MAX_I32: u64 = i32::MAX as u64;

/// How the next token is chosen. The defaults are those of llama.cpp.
#[derive(Debug, Args)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct SamplingArgs {
    /// Always take the most likely token
    #[arg(long, conflicts_with_all = ["temperature", "top_k", "top_p", "min_p", "typical_p"])]
    pub(crate) greedy: bool,

    /// Divide the logits by this; 0 is --greedy
    #[arg(long, value_name = "T", default_value_t = 0.8, value_parser = temperature, allow_negative_numbers = true)]
    pub(crate) temperature: f32,

    /// Choose among this many of the most likely tokens; 0 for all
    #[arg(
        long, value_name = "K", value_parser = whole::<u32, 0, MAX_I32>,
        allow_negative_numbers = true, default_value_t = 40
    )]
    pub(crate) top_k: u32,

    /// Choose among the most likely tokens that together have this probability; 1 for all
    #[arg(long, value_name = "P", default_value_t = 0.95, value_parser = top_p, allow_negative_numbers = true)]
    pub(crate) top_p: f32,

    /// Choose among tokens at least this many times as likely as the likeliest; 0 for all
    #[arg(long, value_name = "P", default_value_t = 0.05, value_parser = min_p, allow_negative_numbers = true)]
    pub(crate) min_p: f32,

    /// Choose among the most typical tokens that together have this probability; 1 for all
    #[arg(long, value_name = "P", default_value_t = 1.0, value_parser = typical_p, allow_negative_numbers = true)]
    pub(crate) typical_p: f32,

    /// Make tokens of the prompt and the answer less likely: divide their logits, if above 0; 1 does nothing
    #[arg(long, value_name = "R", default_value_t = 1.0, value_parser = repetition, allow_negative_numbers = true)]
    pub(crate) repetition_penalty: f32,

    /// Take this from a token's logit for each time that it is in the answer
    #[arg(long, value_name = "F", default_value_t = 0.0, value_parser = frequency, allow_negative_numbers = true)]
    pub(crate) frequency_penalty: f32,

    /// Take this from the logit of each token in the answer
    #[arg(long, value_name = "F", default_value_t = 0.0, value_parser = presence, allow_negative_numbers = true)]
    pub(crate) presence_penalty: f32,

    /// Penalise going on with what was said before (DRY), this much where the repetition gets long; 0 does not
    #[arg(
        long, value_name = "F", default_value_t = 0.0, value_parser = dry_multiplier, allow_negative_numbers = true
    )]
    pub(crate) dry_multiplier: f32,

    /// How many times more each further repeated token costs
    #[arg(long, value_name = "B", default_value_t = 1.75, value_parser = dry_base, allow_negative_numbers = true)]
    pub(crate) dry_base: f32,

    /// Repetitions shorter than this many tokens are free
    #[arg(
        long, value_name = "N", value_parser = whole::<u32, 1, MAX_I32>,
        allow_negative_numbers = true, default_value_t = 2
    )]
    pub(crate) dry_allowed_length: u32,

    /// Look back this many tokens for repetitions; 0 for all
    #[arg(
        long, value_name = "N", value_parser = whole::<u32, 0, MAX_I32>,
        allow_negative_numbers = true, default_value_t = 0
    )]
    pub(crate) dry_range: u32,

    /// Let no repetition go over this text; may be given several times [default: newline, colon, quotation mark, star]
    #[arg(long, value_name = "STRING")]
    pub(crate) dry_breaker: Vec<String>,

    /// Add VALUE to the logit of the token ID; may be given several times
    #[arg(long, value_name = "ID:VALUE", value_parser = bias, allow_hyphen_values = true)]
    pub(crate) logit_bias: Vec<(u32, f32)>,

    /// Key of the random numbers: the same key gives the same text [default: another each time, printed]
    #[arg(long, value_name = "N", value_parser = whole::<u64, 0, MAX_COUNT>, allow_negative_numbers = true)]
    pub(crate) seed: Option<u64>,
}

/// What was chosen, before it is known what tokens the model has.
#[derive(Clone, Debug)]
pub(crate) struct SamplingSettings {
    /// All but DRY's breakers.
    pub(crate) values: Sampling,
    /// Is the seed one that the user cannot know, and the text depends on?
    pub(crate) tell_seed: bool,
    /// Texts that DRY does not go over.
    pub(crate) breakers: Vec<String>,
}

impl SamplingArgs {
    /// The settings; a `random_prompt` depends on the seed too.
    pub(crate) fn resolve(self, random_prompt: bool) -> Result<SamplingSettings> {
        // A short one is easier to type again.
        let seed = self.seed.unwrap_or_else(|| RandomState::new().build_hasher().finish() >> 32);
        let chosen = match self.greedy {
            true => Sampling::GREEDY,
            false => Sampling {
                temperature: self.temperature,
                top_k: self.top_k,
                top_p: self.top_p,
                min_p: self.min_p,
                typical_p: self.typical_p,
                ..Sampling::GREEDY
            },
        };
        let sampling = Sampling {
            repetition_penalty: self.repetition_penalty,
            frequency_penalty: self.frequency_penalty,
            presence_penalty: self.presence_penalty,
            dry: Dry {
                multiplier: self.dry_multiplier,
                base: self.dry_base,
                allowed_length: self.dry_allowed_length,
                range: self.dry_range,
                breakers: Vec::new(),
            },
            logit_bias: self.logit_bias,
            seed,
            ..chosen
        };
        sampling.check()?;
        let tell_seed = self.seed.is_none() && (random_prompt || sampling.temperature > 0.0);
        let usual = || ["\n", ":", "\"", "*"].map(str::to_owned).into();
        let breakers = if self.dry_breaker.is_empty() { usual() } else { self.dry_breaker };
        Ok(SamplingSettings { values: sampling, tell_seed, breakers })
    }
}

impl SamplingSettings {
    /// The settings for a model with this tokenizer. A text that breaks repetitions stands for the last token that it is
    /// written with behind a letter, as in the original of DRY; without a tokenizer there are none.
    pub(crate) fn with(&self, tokenizer: Option<&Tokenizer>) -> Result<Sampling> {
        let mut sampling = self.values.clone();
        if let Some(tokenizer) = tokenizer.filter(|_| sampling.dry.multiplier > 0.0) {
            for text in &self.breakers {
                sampling.dry.breakers.extend(tokenizer.encode(&format!("a{text}"), false)?.last());
            }
        }
        Ok(sampling)
    }
}

/// Declares parsers of numbers that the engine samples with, which refuse what it refuses.
macro_rules! numbers {
    ($($name:ident => |$value:ident| $sampling:expr;)*) => {$(
        fn $name(typed: &str) -> Result<f32, String> {
            number(typed, |$value| $sampling)
        }
    )*};
}

numbers! {
    temperature => |temperature| Sampling { temperature, ..Sampling::GREEDY };
    top_p => |top_p| Sampling { top_p, ..Sampling::GREEDY };
    min_p => |min_p| Sampling { min_p, ..Sampling::GREEDY };
    typical_p => |typical_p| Sampling { typical_p, ..Sampling::GREEDY };
    repetition => |repetition_penalty| Sampling { repetition_penalty, ..Sampling::GREEDY };
    frequency => |frequency_penalty| Sampling { frequency_penalty, ..Sampling::GREEDY };
    presence => |presence_penalty| Sampling { presence_penalty, ..Sampling::GREEDY };
    dry_multiplier => |multiplier| Sampling { dry: Dry { multiplier, ..Dry::OFF }, ..Sampling::GREEDY };
    dry_base => |base| Sampling { dry: Dry { base, ..Dry::OFF }, ..Sampling::GREEDY };
}

/// A number that the engine samples with. Refused here so that the message shows it as it was typed.
fn number(typed: &str, setting: impl Fn(f32) -> Sampling) -> Result<f32, String> {
    let value = typed.parse().map_err(|_| "must be a number".to_owned())?;
    setting(value).check().map(|()| value).map_err(|error| match error {
        EngineError::Setting { why, .. } => why,
        other => other.to_string(),
    })
}

/// `ID:VALUE`.
fn bias(typed: &str) -> Result<(u32, f32), String> {
    let parts = typed.split_once(':').and_then(|(id, value)| Some((id.parse().ok()?, value.parse::<f32>().ok()?)));
    parts.filter(|(_, value)| value.is_finite()).ok_or_else(|| "must be a token's id, a colon and a number".to_owned())
}

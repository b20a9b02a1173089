//! Sampling arguments and the settings that they resolve to.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};

use clap::Args;
use ridge_engine::Sampling;
use ridge_graph::{MAX_SETTING, sampler_settings};
use ridge_text::Tokenizer;
use serde_json::Value;

use super::numbers::{MAX_COUNT, whole};
use crate::error::Result;

/// Declares the flags: one for each scalar setting, and those that are not a single number.
macro_rules! flags {
    (choose { $($chosen:ident: $ct:ident = $cn:expr, $cv:literal $cd:expr, $cok:expr, $cwhy:literal, $chelp:literal;)* }
     adjust { $($adjusted:ident: $at:ident = $an:expr, $av:literal $ad:expr, $aok:expr, $awhy:literal, $ahelp:literal;)* }) => {
        /// How the next token is sampled. The defaults are those of llama.cpp.
        #[derive(Debug, Args)]
        #[command(next_help_heading = "Sampling")]
        pub(crate) struct SamplingArgs {
            /// Always take the most likely token
            #[arg(long, conflicts_with_all = [$(stringify!($chosen)),*])]
            pub(crate) greedy: bool,

            $(
                #[doc = $chelp]
                #[arg(
                    long, value_name = $cv, default_value_t = $cd, allow_negative_numbers = true,
                    value_parser = |typed: &str| $ct::typed(typed, $cok, $cwhy)
                )]
                pub(crate) $chosen: $ct,
            )*

            $(
                #[doc = $ahelp]
                #[arg(
                    long, value_name = $av, default_value_t = $ad, allow_negative_numbers = true,
                    value_parser = |typed: &str| $at::typed(typed, $aok, $awhy)
                )]
                pub(crate) $adjusted: $at,
            )*

            /// Text that resets repetition matching (DRY); may be repeated [default: newline, colon, double quote, asterisk]
            #[arg(long, value_name = "STRING")]
            pub(crate) dry_breaker: Vec<String>,

            /// Add VALUE to the logit of the token ID; may be repeated
            #[arg(long, value_name = "ID:VALUE", value_parser = bias, allow_hyphen_values = true)]
            pub(crate) logit_bias: Vec<(u32, f32)>,

            /// Random seed; the same seed gives the same text [default: random, and printed]
            #[arg(long, value_name = "N", value_parser = whole::<u64, 0, MAX_COUNT>, allow_negative_numbers = true)]
            pub(crate) seed: Option<u64>,
        }

        impl SamplingArgs {
            /// The settings with this seed.
            fn with_seed(&self, seed: u64) -> Sampling {
                Sampling {
                    $($chosen: if self.greedy { Sampling::GREEDY.$chosen } else { self.$chosen },)*
                    $($adjusted: self.$adjusted,)*
                    logit_bias: self.logit_bias.clone(),
                    seed,
                    ..Sampling::GREEDY
                }
            }
        }

        /// Changes the setting of this name, as the flag of that name would.
        ///
        /// # Errors
        /// A message, when there is no such setting or the value is invalid.
        pub(crate) fn change_setting(sampling: &mut Sampling, name: &str, value: &str) -> Result<(), String> {
            match name {
                $(stringify!($chosen) => sampling.$chosen = $ct::typed(value, $cok, $cwhy)?,)*
                $(stringify!($adjusted) => sampling.$adjusted = $at::typed(value, $aok, $awhy)?,)*
                "seed" => sampling.seed = whole::<u64, 0, MAX_COUNT>(value)?,
                _ => {
                    let names = [$(stringify!($chosen),)* $(stringify!($adjusted),)* "seed"];
                    return Err(format!("is not a setting; the settings are {}", names.join(", ")));
                }
            }
            Ok(())
        }

        /// The settings by name, with values as typed.
        pub(crate) fn settings_json(sampling: &Sampling) -> serde_json::Map<String, Value> {
            let mut all = serde_json::Map::new();
            $(all.insert(stringify!($chosen).into(), sampling.$chosen.shown());)*
            $(all.insert(stringify!($adjusted).into(), sampling.$adjusted.shown());)*
            all
        }
    };
}

sampler_settings!(flags);

/// A number that is valid for a setting.
trait SettingNumber: Sized + Copy {
    /// Parses and validates it here, so that the message shows the number as typed.
    fn typed(typed: &str, allowed: fn(Self) -> bool, why: &str) -> Result<Self, String>;

    /// The number as it was typed.
    fn shown(self) -> Value;
}

impl SettingNumber for f32 {
    fn typed(typed: &str, allowed: fn(Self) -> bool, why: &str) -> Result<Self, String> {
        let value = typed.parse().map_err(|_| "must be a number".to_owned())?;
        if allowed(value) { Ok(value) } else { Err(why.to_owned()) }
    }

    fn shown(self) -> Value {
        decimal(self).into()
    }
}

impl SettingNumber for u32 {
    fn typed(typed: &str, allowed: fn(Self) -> bool, why: &str) -> Result<Self, String> {
        let value = whole::<Self, 0, { MAX_SETTING as u64 }>(typed)?;
        if allowed(value) { Ok(value) } else { Err(why.to_owned()) }
    }

    fn shown(self) -> Value {
        self.into()
    }
}

/// The number as it was typed: 0.8, and not the nearest f32 to seventeen digits.
pub(crate) fn decimal(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}

/// The settings before they are resolved against the model's tokenizer.
#[derive(Clone, Debug)]
pub(crate) struct SamplingSettings {
    /// All settings except DRY's sequence breakers.
    pub(crate) values: Sampling,
    /// Whether to print the seed: it was chosen at random and affects the text.
    pub(crate) tell_seed: bool,
    /// DRY's sequence breakers.
    pub(crate) breakers: Vec<String>,
}

impl SamplingArgs {
    /// The settings; a `random_prompt` depends on the seed too.
    pub(crate) fn resolve(self, random_prompt: bool) -> Result<SamplingSettings> {
        // A short one is easier to type again.
        let seed = self.seed.unwrap_or_else(|| RandomState::new().build_hasher().finish() >> 32);
        let sampling = self.with_seed(seed);
        sampling.check()?;
        let tell_seed = self.seed.is_none() && (random_prompt || sampling.temperature > 0.0);
        let usual = || ["\n", ":", "\"", "*"].map(str::to_owned).into();
        let breakers = if self.dry_breaker.is_empty() { usual() } else { self.dry_breaker };
        Ok(SamplingSettings { values: sampling, tell_seed, breakers })
    }
}

impl SamplingSettings {
    /// The settings for a model with this tokenizer. A sequence breaker is the last token of its text when it follows a
    /// letter, as in the original implementation of DRY; without a tokenizer there are none.
    pub(crate) fn with(&self, tokenizer: Option<&Tokenizer>) -> Result<Sampling> {
        let mut sampling = self.values.clone();
        if let Some(tokenizer) = tokenizer.filter(|_| sampling.dry_multiplier > 0.0) {
            sampling.dry_breakers = self.breaker_tokens(tokenizer)?;
        }
        Ok(sampling)
    }

    /// The tokens that are sequence breakers.
    pub(crate) fn breaker_tokens(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
        let mut tokens = Vec::new();
        for text in &self.breakers {
            tokens.extend(tokenizer.encode(&format!("a{text}"), false)?.last());
        }
        Ok(tokens)
    }
}

/// `ID:VALUE`.
fn bias(typed: &str) -> Result<(u32, f32), String> {
    let parts = typed.split_once(':').and_then(|(id, value)| Some((id.parse().ok()?, value.parse::<f32>().ok()?)));
    parts
        .filter(|(_, value)| value.is_finite())
        .ok_or_else(|| "must be a token id, a colon and a number, such as 13:-1.5".to_owned())
}

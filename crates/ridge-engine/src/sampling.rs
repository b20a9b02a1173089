//! Sampling settings.

use std::fmt::Display;

use ridge_graph::sampler_settings;

use crate::error::{EngineError, Result};

/// Declares [`Sampling`] with a field for each setting.
macro_rules! sampling {
    (choose { $($chosen:ident: $ct:ident = $cn:expr, $cv:literal $cd:expr, $cok:expr, $cwhy:literal, $chelp:literal;)* }
     adjust { $($adjusted:ident: $at:ident = $an:expr, $av:literal $ad:expr, $aok:expr, $awhy:literal, $ahelp:literal;)* }) => {
        /// How the next token is sampled from the logits: biases, penalties and those of DRY are applied in that order
        /// (`ridge_graph::ops::{LogitBias, Penalties, Dry}`), then temperature, top-k, top-p, min-p and typical-p
        /// (`ridge_graph::ops::SampleToken`).
        #[derive(Clone, Debug, PartialEq)]
        pub struct Sampling {
            $(#[doc = $chelp] pub $chosen: $ct,)*
            $(#[doc = $ahelp] pub $adjusted: $at,)*
            /// Tokens that no repetition goes over.
            pub dry_breakers: Vec<u32>,
            /// Added to the logits of tokens.
            pub logit_bias: Vec<(u32, f32)>,
            /// Random seed: the same seed gives the same text.
            pub seed: u64,
            /// Return the log-probability of each token and of the N most likely alternatives.
            pub logprobs: Option<u32>,
        }

        impl Sampling {
            /// Always the most likely token.
            pub const GREEDY: Self = Self {
                $($chosen: $cn,)*
                $($adjusted: $an,)*
                dry_breakers: Vec::new(),
                logit_bias: Vec::new(),
                seed: 0,
                logprobs: None,
            };

            /// Does it change logits?
            pub(crate) fn adjusts(&self) -> bool {
                !self.logit_bias.is_empty() $(|| self.$adjusted != Self::GREEDY.$adjusted)*
            }

            /// Checks the scalar settings.
            fn check_settings(&self) -> Result<()> {
                $(setting(stringify!($chosen), self.$chosen, $cok, $cwhy)?;)*
                $(setting(stringify!($adjusted), self.$adjusted, $aok, $awhy)?;)*
                Ok(())
            }
        }

        /// The settings that are columns of rows, with how each follows from what was asked.
        pub(crate) const COLUMNS: &[(&str, ReadSetting)] = &[
            $((stringify!($chosen), |s| s.$chosen.into()),)*
            $((stringify!($adjusted), |s| s.$adjusted.into()),)*
            ("seed", |s| SettingValue::Int(s.seed.cast_signed())),
        ];
    };
}

sampler_settings!(sampling);

/// How a setting follows from what was asked.
pub(crate) type ReadSetting = fn(&Sampling) -> SettingValue;

/// A setting as its column has it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SettingValue {
    Float(f32),
    Int(i64),
}

impl From<f32> for SettingValue {
    fn from(value: f32) -> Self {
        Self::Float(value)
    }
}

impl From<u32> for SettingValue {
    fn from(value: u32) -> Self {
        Self::Int(i64::from(value))
    }
}

/// Checks one setting.
fn setting<T: Copy + Display>(name: &'static str, value: T, allowed: impl Fn(T) -> bool, why: &str) -> Result<()> {
    match allowed(value) {
        true => Ok(()),
        false => Err(EngineError::Setting { name, value: value.to_string(), why: why.into() }),
    }
}

/// Log-probability of a token under the model's own distribution, before biases, penalties and temperature.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    /// Natural logarithm of its probability.
    pub chosen: f32,
    /// The most likely tokens with theirs, in descending order.
    pub top: Vec<(u32, f32)>,
}

/// Tokens whose log-probabilities may be asked for beside the chosen one's.
pub const MAX_LOGPROBS: u32 = 1024;

/// Logit biases of a sequence at most.
pub const MAX_BIASES: usize = 1024;

/// Tokens at most that DRY's repetitions do not go over.
pub const MAX_BREAKERS: usize = 1024;

impl Sampling {
    /// Checks every setting.
    ///
    /// # Errors
    /// Names the first that is out of range, with what it must be.
    pub fn check(&self) -> Result<()> {
        self.check_settings()?;
        if let Some((id, value)) = self.logit_bias.iter().find(|(_, value)| !value.is_finite()) {
            let value = format!("{id}:{value}");
            return Err(EngineError::Setting { name: "logit_bias", value, why: "must be a finite number".into() });
        }
        for (name, count, most) in [
            ("logit_bias", self.logit_bias.len(), MAX_BIASES),
            ("dry_breakers", self.dry_breakers.len(), MAX_BREAKERS),
            ("logprobs", self.logprobs.unwrap_or(0) as usize, MAX_LOGPROBS as usize),
        ] {
            if count > most {
                let value = format!("{count} tokens");
                return Err(EngineError::Setting { name, value, why: format!("must be at most {most}") });
            }
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
            (Sampling { min_p: 1.1, ..Sampling::GREEDY }, "min_p = 1.1"),
            (Sampling { min_p: f32::NAN, ..Sampling::GREEDY }, "min_p = NaN"),
            (Sampling { typical_p: 0.0, ..Sampling::GREEDY }, "typical_p = 0"),
            (Sampling { repetition_penalty: 0.0, ..Sampling::GREEDY }, "repetition_penalty = 0"),
            (Sampling { frequency_penalty: f32::INFINITY, ..Sampling::GREEDY }, "frequency_penalty = inf"),
            (Sampling { presence_penalty: f32::NAN, ..Sampling::GREEDY }, "presence_penalty = NaN"),
            (Sampling { dry_multiplier: -1.0, ..Sampling::GREEDY }, "dry_multiplier = -1"),
            (Sampling { dry_base: 0.5, ..Sampling::GREEDY }, "dry_base = 0.5"),
            (Sampling { dry_allowed_length: 0, ..Sampling::GREEDY }, "dry_allowed_length = 0"),
            (Sampling { logit_bias: vec![(7, f32::NAN)], ..Sampling::GREEDY }, "logit_bias = 7:NaN"),
            (Sampling { logit_bias: vec![(7, 1.0); 1025], ..Sampling::GREEDY }, "logit_bias = 1025 tokens"),
            (Sampling { dry_breakers: vec![7; 1025], ..Sampling::GREEDY }, "dry_breakers = 1025"),
            (Sampling { logprobs: Some(5000), ..Sampling::GREEDY }, "logprobs = 5000 tokens"),
        ];
        for (sampling, start) in bad {
            let said = sampling.check().unwrap_err().to_string();
            assert!(said.starts_with(start), "{said}");
        }
        assert!(Sampling::GREEDY.check().is_ok());
    }
}

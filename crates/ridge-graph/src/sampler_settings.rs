//! The scalar settings of the sampler: one line for each, from which the engine's settings and their checks, the columns of
//! rows on the device, the flags of commands and the fields of requests follow.
//!
//! A new one has a line here, and a step input of its name in the op that reads it, with the op's kernels.

/// Calls the macro `$with!` with `choose` and `adjust`, two lists of settings: those by which a token is chosen from the
/// distribution, which a greedy choice does without, and those that change logits. A line is
///
/// `name: type = neutral, "VALUE" default, allowed, "what it must be", "help";`
///
/// with the type `f32` or `u32` (at most [`MAX_SETTING`](crate::MAX_SETTING)), the value that changes nothing, the name of
/// the value and its default where a user types it, a function that says which values are allowed, how errors say that, and
/// what it does.
#[macro_export]
macro_rules! sampler_settings {
    ($with:ident) => {
        $with! {
            choose {
            temperature: f32 = 0.0, "T" 0.8, |x: f32| x.is_finite() && x >= 0.0,
                "must be 0 (greedy) or a positive number", "Divide the logits by this; 0 is --greedy";
            top_k: u32 = 0, "K" 40, |x: u32| x <= $crate::MAX_SETTING,
                "must be at most 2147483647 (0 keeps all tokens)",
                "Sample from the K most likely tokens; 0 for all";
            top_p: f32 = 1.0, "P" 0.95, |x: f32| x > 0.0 && x <= 1.0,
                "must be above 0 and at most 1 (1 keeps all tokens)",
                "Sample from the most likely tokens that together have this probability; 1 for all";
            min_p: f32 = 0.0, "P" 0.05, |x: f32| (0.0..=1.0).contains(&x),
                "must be from 0 (keeps all tokens) to 1",
                "Sample from tokens at least P times as likely as the most likely one; 0 for all";
            typical_p: f32 = 1.0, "P" 1.0, |x: f32| x > 0.0 && x <= 1.0,
                "must be above 0 and at most 1 (1 keeps all tokens)",
                "Sample from the most typical tokens that together have this probability; 1 for all";
            }
            adjust {
            repetition_penalty: f32 = 1.0, "R" 1.0, |x: f32| x.is_finite() && x > 0.0,
                "must be above 0 (1 penalises nothing)",
                "Divide positive logits of tokens that are in the prompt or answer, and multiply negative ones; 1 is off";
            frequency_penalty: f32 = 0.0, "F" 0.0, |x: f32| x.is_finite(),
                "must be a finite number (0 penalises nothing)",
                "Subtract this from a token's logit for each occurrence in the answer";
            presence_penalty: f32 = 0.0, "F" 0.0, |x: f32| x.is_finite(),
                "must be a finite number (0 penalises nothing)",
                "Subtract this from the logit of each token that occurs in the answer";
            dry_multiplier: f32 = 0.0, "F" 0.0, |x: f32| x.is_finite() && x >= 0.0,
                "must be 0 (off) or a positive number",
                "Penalty multiplier for repeating earlier sequences of tokens (DRY); 0 is off";
            dry_base: f32 = 1.75, "B" 1.75, |x: f32| x.is_finite() && x >= 1.0,
                "must be 1 or above", "Growth of the penalty for each further repeated token (DRY)";
            dry_allowed_length: u32 = 2, "N" 2, |x: u32| (1..=$crate::MAX_SETTING).contains(&x),
                "must be from 1 to 2147483647", "Do not penalise repetitions shorter than this (DRY)";
            dry_range: u32 = 0, "N" 0, |x: u32| x <= $crate::MAX_SETTING,
                "must be at most 2147483647 (0 looks at all tokens)",
                "Look back this many tokens for repetitions (DRY); 0 for all";
            }
        }
    };
}

/// The largest whole number that a setting can be: ops have them as i32.
pub const MAX_SETTING: u32 = i32::MAX as u32;

macro_rules! names {
    (choose { $($chosen:ident: $ct:ident = $cn:expr, $cv:literal $cd:expr, $cok:expr, $cwhy:literal, $chelp:literal;)* }
     adjust { $($adjusted:ident: $at:ident = $an:expr, $av:literal $ad:expr, $aok:expr, $awhy:literal, $ahelp:literal;)* }) => {
        /// The names of all settings.
        pub const SAMPLER_SETTINGS: &[&str] = &[$(stringify!($chosen),)* $(stringify!($adjusted),)*];
    };
}

sampler_settings!(names);

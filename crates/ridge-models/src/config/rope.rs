//! Rotary position embedding as configurations describe it, in the older and the newer spelling.

use super::fields::{Fields, REMEDY};
use crate::error::Result;

/// How queries and keys are rotated.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies; above 0.
    pub theta: f64,
    /// How many elements of each head are rotated, the first ones; even.
    pub rotary_dim: usize,
    /// How the frequencies are stretched, if they are.
    pub scaling: Option<RopeScaling>,
}

/// How the rotary frequencies are stretched for contexts longer than those of pretraining.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Every frequency is divided by `factor` (Chen et al. 2023, "Extending Context Window of Large Language Models
    /// via Position Interpolation").
    Linear {
        /// Above 0; 2 doubles the context.
        factor: f64,
    },
    /// The base grows with the context, beyond the one of pretraining (NTK-aware scaling).
    Dynamic {
        /// At least 1.
        factor: f64,
        /// Positions of the context in pretraining.
        original_max_position_embeddings: usize,
    },
    /// Quick frequencies are kept, slow ones divided by `factor` (Peng et al. 2023, "YaRN", section 3.2).
    Yarn {
        /// Above 0.
        factor: f64,
        /// Positions of the context in pretraining.
        original_max_position_embeddings: usize,
        /// Turns over the original context from which on a frequency is kept; `beta_slow` at least.
        beta_fast: f64,
        /// Turns up to which a frequency is divided.
        beta_slow: f64,
        /// Are the borders between the two rounded to whole pairs?
        truncate: bool,
        /// By which queries and keys are multiplied (section 3.3).
        attention_factor: f64,
    },
    /// Each frequency is divided by a factor of its own (Ding et al. 2024, "LongRoPE").
    LongRope {
        /// For contexts within the original one; one for each pair, above 0.
        short_factor: Vec<f64>,
        /// For longer contexts.
        long_factor: Vec<f64>,
        /// Positions of the context in pretraining.
        original_max_position_embeddings: usize,
        /// By which queries and keys are multiplied.
        attention_factor: f64,
    },
    /// Llama 3.1's: wavelengths below `original_max_position_embeddings / high_freq_factor` keep their frequency,
    /// those above `original_max_position_embeddings / low_freq_factor` are divided by `factor`, those between are
    /// interpolated ("The Llama 3 Herd of Models", section 3.4.2, and the released code).
    Llama3 {
        /// Above 0.
        factor: f64,
        /// Above 0, `high_freq_factor` at most.
        low_freq_factor: f64,
        /// `low_freq_factor` at least; equal to it, nothing is interpolated.
        high_freq_factor: f64,
        /// Positions of the context in pretraining.
        original_max_position_embeddings: usize,
    },
}

/// The largest number of positions that a configuration may have.
pub(crate) const MAX_POSITIONS: usize = 1 << 30;

/// The sizes of a decoder that its rotation depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RopeSizes {
    /// Width of a head.
    pub(crate) head_dim: usize,
    /// Positions of the context, without scaling.
    pub(crate) positions: usize,
}

/// A family's names of the keys, and its defaults.
pub(crate) struct RopeKeys {
    pub(crate) theta: &'static str,
    pub(crate) default_theta: f64,
    /// The share of each head that is rotated; families without the key rotate all of it.
    pub(crate) partial: Option<&'static str>,
    pub(crate) default_partial: f64,
    /// The context of pretraining, if the file has it outside the rotation's own object, where it has priority.
    pub(crate) original: Option<usize>,
    /// May the rotation's object divide pairs among the axes of an image? Positions of a text are the same on all of them.
    pub(crate) axes: bool,
}

/// The names and defaults of most families.
pub(crate) const ROPE_KEYS: RopeKeys = RopeKeys {
    theta: "rope_theta",
    default_theta: 10_000.0,
    partial: None,
    default_partial: 1.0,
    original: None,
    axes: false,
};

/// Reads `rope_theta` with `rope_scaling`, or `rope_parameters` that holds both, or all of them if they agree.
pub(crate) fn read(f: &mut Fields<'_>, sizes: RopeSizes, keys: &RopeKeys) -> Result<RopeConfig> {
    f.must_be("rope_interleaved", false)?;
    let mut found =
        RopeFields { theta: f.optional_positive(keys.theta)?, partial: partial(f, keys.partial)?, scaling: None };
    for key in ["rope_scaling", "rope_parameters"] {
        let Some(mut block) = f.object(key)? else {
            continue;
        };
        let before = found.scaling.take();
        found.read(&mut block, sizes, keys)?;
        block.finish()?;
        if before.is_some_and(|before| Some(before) != found.scaling) {
            let remedy = "remove the one that the model was not trained with";
            return Err(f.wrong(key, "contradicts rope_scaling", remedy));
        }
    }
    found.finish(f, sizes, keys)
}

/// Reads an object that holds all of a rotation, in the newer spelling.
fn read_block(mut block: Fields<'_>, sizes: RopeSizes, keys: &RopeKeys) -> Result<RopeConfig> {
    let mut found = RopeFields { theta: None, partial: None, scaling: None };
    found.read(&mut block, sizes, keys)?;
    let rope = found.finish(&block, sizes, keys)?;
    block.finish()?;
    Ok(rope)
}

/// The rotations of global and local layers: in the newer spelling two objects, in the older one rotation, whose scaling is
/// that of global layers alone; local ones may have a base of their own, under the key of `local`.
pub(crate) fn read_two(
    f: &mut Fields<'_>,
    sizes: RopeSizes,
    global: &RopeKeys,
    local: &RopeKeys,
) -> Result<(RopeConfig, RopeConfig)> {
    if let Some(mut both) = f.object("rope_parameters")?
        && both.has("full_attention")
    {
        let of_all = read_block(both.required_object("full_attention")?, sizes, global)?;
        let of_local = read_block(both.required_object("sliding_attention")?, sizes, local)?;
        both.finish()?;
        return Ok((of_all, of_local));
    }
    let own = if local.theta == global.theta { None } else { f.optional_positive(local.theta)? };
    let of_all = read(f, sizes, global)?;
    let theta = match local.theta == global.theta {
        true => of_all.theta,
        false => own.unwrap_or(local.default_theta),
    };
    let of_local = RopeConfig { theta, scaling: None, ..of_all.clone() };
    Ok((of_all, of_local))
}

/// What has been read so far. The outer option of `scaling` says whether any object was there.
struct RopeFields {
    theta: Option<f64>,
    partial: Option<f64>,
    scaling: Option<Unscaled>,
}

/// A scaling, or that there is none.
type Unscaled = Box<Option<RopeScaling>>;

impl RopeFields {
    fn read(&mut self, block: &mut Fields<'_>, sizes: RopeSizes, keys: &RopeKeys) -> Result<()> {
        if keys.axes {
            block.harmless(&["mrope_section", "mrope_interleaved"]);
        }
        let theta = block.optional_positive("rope_theta")?;
        let share = partial(block, keys.partial.map(|_| "partial_rotary_factor"))?;
        for (key, before, here) in [("rope_theta", self.theta, theta), ("partial_rotary_factor", self.partial, share)] {
            if let (Some(before), Some(here)) = (before, here)
                && before != here
            {
                return Err(block.wrong(
                    key,
                    format!("contradicts another {key} of the file, which is {before}"),
                    "remove the one that the model was not trained with",
                ));
            }
        }
        self.theta = self.theta.or(theta);
        self.partial = self.partial.or(share);
        self.scaling = Some(Box::new(read_scaling(block, sizes, keys.original)?));
        Ok(())
    }

    fn finish(self, f: &Fields<'_>, sizes: RopeSizes, keys: &RopeKeys) -> Result<RopeConfig> {
        let head_dim = sizes.head_dim;
        let share = self.partial.unwrap_or(keys.default_partial);
        // Rounded down, as the published code does.
        let rotary_dim = (head_dim as f64 * share) as usize;
        if !rotary_dim.is_multiple_of(2) || rotary_dim == 0 {
            let problem = match keys.partial {
                None => format!("makes heads {head_dim} wide, which is odd: rotary embedding turns pairs"),
                Some(_) => format!("makes {rotary_dim} elements of each head turn, which are no pairs"),
            };
            return Err(f.wrong(keys.partial.unwrap_or("head_dim"), problem, REMEDY));
        }
        let scaling = self.scaling.and_then(|scaling| *scaling);
        if let Some(RopeScaling::LongRope { short_factor, long_factor, .. }) = &scaling {
            let pairs = rotary_dim / 2;
            if short_factor.len() != pairs || long_factor.len() != pairs {
                let problem = format!("has lists of other lengths than the {pairs} pairs that are rotated");
                return Err(f.wrong("rope_scaling", problem, REMEDY));
            }
        }
        Ok(RopeConfig { theta: self.theta.unwrap_or(keys.default_theta), rotary_dim, scaling })
    }
}

/// The share of each head that is rotated, in `0.0..=1.0`: under `key`, or 1 for families without such a key.
fn partial(f: &mut Fields<'_>, key: Option<&'static str>) -> Result<Option<f64>> {
    let Some(key) = key else {
        f.must_be("partial_rotary_factor", 1)?;
        return Ok(None);
    };
    let share = f.optional_positive(key)?;
    if share.is_some_and(|share| share > 1.0) {
        return Err(f.wrong(key, "is above 1", REMEDY));
    }
    Ok(share)
}

fn read_scaling(
    block: &mut Fields<'_>,
    sizes: RopeSizes,
    outer_original: Option<usize>,
) -> Result<Option<RopeScaling>> {
    let positions = sizes.positions;
    let new: Option<&str> = block.optional("rope_type")?;
    let old: Option<&str> = block.optional("type")?;
    if let (Some(new), Some(old)) = (new, old)
        && new != old
    {
        return Err(block.wrong(
            "rope_type",
            format!("contradicts type, which is {old:?}"),
            "remove the one that the model was not trained with",
        ));
    }
    let key = if new.is_some() { "rope_type" } else { "type" };
    match new.or(old).unwrap_or("default") {
        "default" => Ok(None),
        "linear" => Ok(Some(RopeScaling::Linear { factor: block.positive("factor")? })),
        "dynamic" => {
            let factor = block.positive("factor")?;
            if factor < 1.0 {
                return Err(block.wrong("factor", "is below 1", REMEDY));
            }
            Ok(Some(RopeScaling::Dynamic { factor, original_max_position_embeddings: positions }))
        }
        // Families that state the context of pretraining outside took "yarn" for an early name of LongRoPE.
        "yarn" if outer_original.is_none() => read_yarn(block, positions).map(Some),
        "longrope" | "su" | "yarn" => read_longrope(block, outer_original, positions).map(Some),
        "llama3" => {
            let low_freq_factor = block.positive("low_freq_factor")?;
            let high_freq_factor = block.positive("high_freq_factor")?;
            if high_freq_factor < low_freq_factor {
                return Err(block.wrong(
                    "high_freq_factor",
                    format!("is below low_freq_factor = {low_freq_factor}"),
                    "check that the file is not damaged",
                ));
            }
            Ok(Some(RopeScaling::Llama3 {
                factor: block.positive("factor")?,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings: block.size("original_max_position_embeddings", MAX_POSITIONS)?,
            }))
        }
        _ => Err(block.wrong(
            key,
            "is not supported",
            "Ridge knows \"default\", \"linear\", \"dynamic\", \"yarn\", \"longrope\" and \"llama3\": choose a \
             checkpoint that uses one of these",
        )),
    }
}

fn read_yarn(block: &mut Fields<'_>, positions: usize) -> Result<RopeScaling> {
    let factor = block.positive("factor")?;
    let beta_fast = block.optional_positive("beta_fast")?.unwrap_or(32.0);
    let beta_slow = block.optional_positive("beta_slow")?.unwrap_or(1.0);
    if beta_fast < beta_slow {
        return Err(block.wrong("beta_fast", format!("is below beta_slow = {beta_slow}"), REMEDY));
    }
    // Section 3.3, and as DeepSeek-V2's code generalises it.
    let temper = |mscale: f64| if factor > 1.0 { 0.1 * mscale * factor.ln() + 1.0 } else { 1.0 };
    let mscales = (block.optional_positive("mscale")?, block.optional_positive("mscale_all_dim")?);
    let attention_factor = match (block.optional_positive("attention_factor")?, mscales) {
        (Some(given), _) => given,
        (None, (Some(mscale), Some(all_dim))) => temper(mscale) / temper(all_dim),
        (None, _) => temper(1.0),
    };
    let original = block.optional_size("original_max_position_embeddings", MAX_POSITIONS)?;
    Ok(RopeScaling::Yarn {
        factor,
        original_max_position_embeddings: original.unwrap_or(positions),
        beta_fast,
        beta_slow,
        truncate: block.optional("truncate")?.unwrap_or(true),
        attention_factor,
    })
}

fn read_longrope(block: &mut Fields<'_>, outer_original: Option<usize>, positions: usize) -> Result<RopeScaling> {
    let own = block.optional_size("original_max_position_embeddings", MAX_POSITIONS)?;
    let original = match outer_original.or(own) {
        Some(original) => original,
        None => block.size("original_max_position_embeddings", MAX_POSITIONS)?,
    };
    let growth = block.optional_positive("factor")?.unwrap_or(positions as f64 / original as f64);
    let attention_factor = match block.optional_positive("attention_factor")? {
        Some(given) => given,
        None if growth <= 1.0 => 1.0,
        None if original == 1 => {
            return Err(block.wrong("original_max_position_embeddings", "is too small to be stretched", REMEDY));
        }
        None => (1.0 + growth.ln() / (original as f64).ln()).sqrt(),
    };
    let mut factors = |key: &'static str| {
        let list: Vec<f64> = block.required(key)?;
        let above_0 = list.iter().all(|factor| factor.is_finite() && *factor > 0.0);
        if above_0 { Ok(list) } else { Err(block.wrong(key, "is not above 0 throughout", REMEDY)) }
    };
    Ok(RopeScaling::LongRope {
        short_factor: factors("short_factor")?,
        long_factor: factors("long_factor")?,
        original_max_position_embeddings: original,
        attention_factor,
    })
}

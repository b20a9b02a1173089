//! Rotary position embedding as configurations describe it, in the older and the newer spelling.

use super::fields::Fields;
use crate::error::Result;

/// How the rotary frequencies are stretched for contexts longer than those of pretraining.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// Every frequency is divided by `factor` (Chen et al. 2023, "Extending Context Window of Large Language Models
    /// via Position Interpolation").
    Linear {
        /// Above 0; 2 doubles the context.
        factor: f64,
    },
    /// Llama 3.1's: wavelengths below `original_max_position_embeddings / high_freq_factor` keep their frequency,
    /// those above `original_max_position_embeddings / low_freq_factor` are divided by `factor`, those between are
    /// interpolated ("The Llama 3 Herd of Models", section 3.4.2, and the released code).
    Llama3 {
        /// Above 0.
        factor: f64,
        /// Above 0 and below `high_freq_factor`.
        low_freq_factor: f64,
        /// Above `low_freq_factor`.
        high_freq_factor: f64,
        /// Positions of the context in pretraining.
        original_max_position_embeddings: usize,
    },
}

/// What a configuration says about rotary embedding.
pub(crate) struct Rope {
    pub(crate) theta: Option<f64>,
    pub(crate) scaling: Option<RopeScaling>,
}

/// Reads `rope_theta` with `rope_scaling`, or `rope_parameters` that holds both, or all of them if they agree.
pub(crate) fn read(fields: &mut Fields<'_>, most_positions: usize) -> Result<Rope> {
    fields.must_be("partial_rotary_factor", 1)?;
    fields.must_be("rope_interleaved", false)?;
    let mut theta = fields.optional_positive("rope_theta")?;
    let mut scaling: Option<Option<RopeScaling>> = None;
    for key in ["rope_scaling", "rope_parameters"] {
        let Some(mut block) = fields.object(key)? else {
            continue;
        };
        let here = block.optional_positive("rope_theta")?;
        if let (Some(before), Some(here)) = (theta, here)
            && before != here
        {
            return Err(block.wrong(
                "rope_theta",
                format!("contradicts another rope_theta of the file, which is {before}"),
                "remove the one that the model was not trained with",
            ));
        }
        theta = theta.or(here);
        let here = read_scaling(&mut block, most_positions)?;
        block.finish()?;
        if scaling.is_some_and(|before| before != here) {
            return Err(fields.wrong(
                key,
                "contradicts rope_scaling",
                "remove the one that the model was not trained with",
            ));
        }
        scaling = Some(here);
    }
    Ok(Rope { theta, scaling: scaling.flatten() })
}

fn read_scaling(block: &mut Fields<'_>, most_positions: usize) -> Result<Option<RopeScaling>> {
    block.must_be("partial_rotary_factor", 1)?;
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
        "llama3" => {
            let low_freq_factor = block.positive("low_freq_factor")?;
            let high_freq_factor = block.positive("high_freq_factor")?;
            if high_freq_factor <= low_freq_factor {
                return Err(block.wrong(
                    "high_freq_factor",
                    format!("is not above low_freq_factor = {low_freq_factor}"),
                    "check that the file is not damaged",
                ));
            }
            Ok(Some(RopeScaling::Llama3 {
                factor: block.positive("factor")?,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings: block.size("original_max_position_embeddings", most_positions)?,
            }))
        }
        _ => Err(block.wrong(
            key,
            "is not supported",
            "Ridge knows \"default\", \"linear\" and \"llama3\": choose a checkpoint that uses one of these",
        )),
    }
}

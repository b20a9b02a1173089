//! `preprocessor_config.json`: what is done to an image before a network sees it.

use ridge_files::json;
use ridge_image::{Preprocessing, Resampling};

use super::fields::{Fields, REMEDY};
use crate::error::Result;

/// Pixels of a side at most.
const MAX_SIDE: usize = 1 << 14;

/// Reads the text of a `preprocessor_config.json` of ViT's kind: resized without regard to proportions, rescaled,
/// normalised. `file` names it in errors.
///
/// # Errors
/// As for [`ModelConfig::from_json`](crate::ModelConfig::from_json).
pub fn image_preprocessing(file: &str, text: &str) -> Result<Preprocessing> {
    let map = json::object(file, text.as_bytes())?;
    let mut f = Fields::new(file, &map);
    let kind = ["image_processor_type", "feature_extractor_type"].into_iter().find(|key| f.has(key));
    if let Some(key) = kind
        && !f.required::<&str>(key)?.starts_with("ViT")
    {
        return Err(f.wrong(key, "is not a preprocessing that Ridge does", "choose a checkpoint of ViT's"));
    }
    // The classes of the library, names of the tensors' framework, and what follows from the class.
    f.harmless(&[
        "image_processor_type",
        "feature_extractor_type",
        "processor_class",
        "data_format",
        "default_to_square",
        "device",
        "disable_grouping",
        "do_convert_rgb",
        "input_data_format",
        "return_tensors",
        "crop_size",
        "_valid_processor_keys",
    ]);
    f.must_be("do_center_crop", false)?;
    f.must_be("do_pad", false)?;
    let resize = f.optional("do_resize")?.unwrap_or(true);
    let (sides, resampling) = (size(&mut f)?, resampling(&mut f)?);
    let scale = f.optional_positive("rescale_factor")?.unwrap_or(1.0 / 255.0);
    let rescale = f.optional("do_rescale")?.unwrap_or(true);
    let normalize = f.optional("do_normalize")?.unwrap_or(true);
    let [mean, std] = [channels(&mut f, "image_mean", 0.5)?, channels(&mut f, "image_std", 0.5)?];
    if std.iter().any(|std| *std <= 0.0) {
        return Err(f.wrong("image_std", "is not above 0", REMEDY));
    }
    f.finish()?;
    Ok(Preprocessing {
        size: resize.then_some((sides, resampling)),
        scale: if rescale { scale } else { 1.0 },
        mean: if normalize { mean } else { [0.0; 3] },
        std: if normalize { std } else { [1.0; 3] },
    })
}

/// Height and width: one number for both, as older files have it, or an object.
fn size(f: &mut Fields<'_>) -> Result<[usize; 2]> {
    if f.is_object("size") {
        let mut size = f.required_object("size")?;
        let sides = [size.size("height", MAX_SIDE)?, size.size("width", MAX_SIDE)?];
        size.finish()?;
        return Ok(sides);
    }
    let side = f.optional_size("size", MAX_SIDE)?.unwrap_or(224);
    Ok([side, side])
}

/// Pillow's number of a filter.
fn resampling(f: &mut Fields<'_>) -> Result<Resampling> {
    Ok(match f.count("resample")? {
        Some(0) => Resampling::Nearest,
        Some(1) => Resampling::Lanczos,
        None | Some(2) => Resampling::Bilinear,
        Some(3) => Resampling::Bicubic,
        Some(_) => {
            let remedy = "Ridge resizes with 0 (nearest), 1 (Lanczos), 2 (bilinear) or 3 (bicubic)";
            return Err(f.wrong("resample", "is not a filter that Ridge has", remedy));
        }
    })
}

/// A number for each of three channels.
fn channels(f: &mut Fields<'_>, key: &'static str, absent: f64) -> Result<[f64; 3]> {
    let Some(values) = f.optional::<Vec<f64>>(key)? else { return Ok([absent; 3]) };
    let finite = <[f64; 3]>::try_from(values).ok().filter(|values| values.iter().all(|v| v.is_finite()));
    finite.ok_or_else(|| f.wrong(key, "is not a number for each of three channels", REMEDY))
}

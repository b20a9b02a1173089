//! Weights that are published as 8-bit codes with factors in a tensor beside them: `x.weight` of f8e4m3 with `x.weight_scale_inv`,
//! a factor for each block of 128 rows by 128 columns (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.3), or of
//! f8e4m3 or int8 with `x.weight_scale`, one for each row or one for all (compressed-tensors, strategies `channel` and `tensor`).

use std::sync::Arc;

use ridge_graph::format::{BLOCK, CodeType, ScaleLayout, ScaledFormat};
use ridge_graph::{DType, FormatRef};

use super::rearrange::{How, Rearranged};
use super::tensors::{Checkpoint, StoredTensor};
use crate::error::Result;

/// What the names of a weight's scales have behind that of the weight.
const SCALES: [&str; 2] = ["_scale_inv", "_scale"];
/// What the names of scales of activations have, which are not used: they are found at run time.
const OF_ACTIVATIONS: [&str; 2] = [".input_scale", ".input_zero_point"];

impl Checkpoint {
    /// The checkpoint with each weight of codes and the scales beside it as one tensor, in the format `f8e4m3_b128`,
    /// `f8e4m3_row` or `int8_row`, and without fixed scales of activations.
    ///
    /// # Errors
    ///
    /// [`FilesError::Safetensors`](crate::FilesError::Safetensors) if scales have no codes, or another shape or dtype.
    pub fn scaled(mut self) -> Result<Self> {
        let weight_of = |name: &str| SCALES.iter().find_map(|end| Some(name.strip_suffix(end)?.to_owned()));
        let is_codes = |name: &str| self.tensors.get(name).is_some_and(|codes| code_type(codes.dtype).is_some());
        let mut pairs = Vec::new();
        for name in self.tensors.keys() {
            let Some(weight) = weight_of(name) else { continue };
            if is_codes(&weight) {
                pairs.push((name.clone(), weight));
            } else if name.ends_with(SCALES[0]) {
                return Err(self.wrong(format!("there is no tensor {weight} of f8e4m3 codes for {name}")));
            }
        }
        if !pairs.is_empty() {
            self.tensors.retain(|name, _| !OF_ACTIVATIONS.iter().any(|end| name.ends_with(end)));
        }
        for (name, weight) in pairs {
            let Some(mut scales) = self.tensors.remove(&name) else { continue };
            let Some(codes) = self.tensors.get_mut(&weight) else { continue };
            let Some(of) = code_type(codes.dtype) else { continue };
            match layout(&codes.shape, &mut scales, of, name.ends_with(SCALES[0])) {
                Ok(layout) => {
                    let format = ScaledFormat::new(of, layout);
                    codes.dtype = DType::F32;
                    codes.format = Some(FormatRef::new(format));
                    codes.scales = Some(Box::new(scales));
                }
                Err(why) => return Err(self.wrong(format!("{name} of {weight} {why}"))),
            }
        }
        Ok(self)
    }

    /// The name of a tensor with scales, if there is one.
    pub fn with_scales(&self) -> Option<&str> {
        self.tensors.iter().find(|(_, tensor)| tensor.scales.is_some()).map(|(name, _)| name.as_str())
    }
}

/// What elements of `dtype` are, if they are codes.
fn code_type(dtype: DType) -> Option<CodeType> {
    match dtype {
        DType::F8E4M3 => Some(CodeType::F8E4M3),
        DType::I8 => Some(CodeType::Int8),
        _ => None,
    }
}

/// How `scales` belong to `codes` of `shape`; they become f32 and as many as that has. `in_blocks`, for each block of 128 x 128,
/// which only 8-bit floats have.
fn layout(
    shape: &[usize],
    scales: &mut StoredTensor,
    codes: CodeType,
    in_blocks: bool,
) -> std::result::Result<ScaleLayout, String> {
    let [rows, inner] = *shape else { return Err(format!("is for codes of {shape:?}, which are no matrix")) };
    let blocks = [rows.div_ceil(BLOCK), inner.div_ceil(BLOCK)];
    let (layout, times, given) = match *scales.shape {
        [a, 1] | [a] if a == rows && !in_blocks => (ScaleLayout::Row, 1, vec![rows, 1]),
        [] | [1] | [1, 1] if !in_blocks => (ScaleLayout::Row, rows, vec![rows, 1]),
        [a, b] if [a, b] == blocks && codes == CodeType::F8E4M3 => (ScaleLayout::Block, 1, vec![a, b]),
        _ => {
            let have = &scales.shape;
            let or_blocks = if codes == CodeType::F8E4M3 { "each block of 128 x 128, for " } else { "" };
            return Err(format!(
                "has the shape {have:?}, but {} codes of {shape:?} need a scale for {or_blocks}each row or for all",
                codes.dtype()
            ));
        }
    };
    let dtype = scales.dtype;
    if dtype != DType::F32 || times > 1 {
        if !dtype.is_float() || scales.rearranged.is_some() {
            return Err(format!("is {dtype}, but scales must be floats"));
        }
        scales.rearranged = Some(Arc::new(Rearranged::new(How::Widened { dtype, times })));
        scales.dtype = DType::F32;
    }
    scales.shape = given;
    Ok(layout)
}

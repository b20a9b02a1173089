//! Weights that are published as f8e4m3 codes with a scale for each block of 128 rows by 128 columns (DeepSeek-AI 2024,
//! "DeepSeek-V3 Technical Report", section 3.3): `x.weight` with `x.weight_scale_inv`, the factor of its codes.

use std::sync::Arc;

use ridge_graph::format::{BLOCK, CodeType, ScaleLayout, ScaledFormat};
use ridge_graph::{DType, FormatRef};

use super::rearrange::{How, Rearranged};
use super::tensors::Checkpoint;
use crate::error::Result;

/// What the name of a weight's scales has behind that of the weight.
const SCALES: &str = "_scale_inv";

impl Checkpoint {
    /// The checkpoint with each weight of codes and the scales beside it as one tensor, in the format
    /// `f8e4m3_b128`.
    ///
    /// # Errors
    ///
    /// [`FilesError::Safetensors`](crate::FilesError::Safetensors) if scales have no codes, or another shape or dtype.
    pub fn scaled(mut self) -> Result<Self> {
        let names: Vec<String> = self.tensors.keys().filter(|name| name.ends_with(SCALES)).cloned().collect();
        for name in names {
            let weight = name.strip_suffix(SCALES).unwrap_or_default();
            let Some(mut scales) = self.tensors.remove(&name) else { continue };
            let Some(codes) = self.tensors.get_mut(weight).filter(|codes| codes.dtype == DType::F8E4M3) else {
                return Err(self.wrong(format!("there is no tensor {weight} of f8e4m3 codes for {name}")));
            };
            let blocks: Vec<usize> = codes.shape.iter().map(|n| n.div_ceil(BLOCK)).collect();
            if codes.shape.len() != 2 || scales.shape != blocks {
                let (have, shape) = (scales.shape.clone(), codes.shape.clone());
                return Err(self.wrong(format!(
                    "{name} has the shape {have:?}, but {weight} of {shape:?} needs a scale for each block of 128 x 128"
                )));
            }
            match scales.dtype {
                DType::F32 => {}
                dtype if dtype.is_float() && scales.rearranged.is_none() => {
                    scales.rearranged = Some(Arc::new(Rearranged::new(How::Widened(dtype))));
                    scales.dtype = DType::F32;
                }
                dtype => return Err(self.wrong(format!("{name} is {dtype}, but scales must be floats"))),
            }
            codes.dtype = DType::F32;
            codes.format = Some(format());
            codes.scales = Some(Box::new(scales));
        }
        Ok(self)
    }

    /// The name of a tensor with scales, if there is one.
    pub fn with_scales(&self) -> Option<&str> {
        self.tensors.iter().find(|(_, tensor)| tensor.scales.is_some()).map(|(name, _)| name.as_str())
    }
}

fn format() -> FormatRef {
    FormatRef::new(ScaledFormat::new(CodeType::F8E4M3, ScaleLayout::Block))
}

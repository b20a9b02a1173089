//! Weights that are published in MXFP4 as two tensors of bytes, as gpt-oss is: `x_blocks`, `[.., rows, n, 16]`, 32 codes in
//! each 16 bytes, of which the lower half of a byte is the element before that of the upper half; and `x_scales`,
//! `[.., rows, n]`, their exponents (OCP Microscaling Formats, version 1.0, section 5). The format `mxfp4` has both in blocks of
//! 17 bytes, in which element i shares a byte with element i + 16. Codes and exponents themselves are the same.

use std::sync::Arc;

use ridge_graph::format::{BlockFormat as _, Mxfp4};
use ridge_graph::{DType, FormatRef};

use super::parts::Rows;
use super::rearrange::{How, Rearranged};
use super::repack::{CODE_BYTES, Repacked};
use super::tensors::{Checkpoint, StoredTensor};
use crate::error::Result;

const CODES: &str = "_blocks";
const EXPONENTS: &str = "_scales";

impl Checkpoint {
    /// The checkpoint with each tensor of MXFP4 codes and that of its exponents as one, in the format `mxfp4`. Blocks are
    /// made when they are read.
    ///
    /// # Errors
    ///
    /// [`FilesError::Safetensors`](crate::FilesError::Safetensors) if codes have no exponents, or these no codes or another
    /// shape, or if the weight is there plainly too.
    pub fn in_mxfp4(mut self) -> Result<Self> {
        let of_bytes = |end: &'static str| {
            let bytes = self.tensors.iter().filter(|(_, tensor)| tensor.dtype == DType::U8);
            bytes.filter_map(move |(name, _)| name.strip_suffix(end)).map(str::to_owned)
        };
        let weights: Vec<String> = of_bytes(CODES).collect();
        if let Some(alone) = of_bytes(EXPONENTS).find(|name| !weights.contains(name)) {
            return Err(self.wrong(format!("there is no tensor {alone}{CODES} of codes for {alone}{EXPONENTS}")));
        }
        for weight in weights {
            let [codes, exponents] = [CODES, EXPONENTS].map(|end| self.tensors.remove(&format!("{weight}{end}")));
            let Some((codes, exponents)) = codes.zip(exponents) else {
                return Err(self.wrong(format!("there is no tensor {weight}{EXPONENTS} for {weight}{CODES}")));
            };
            let entry = self.blocks(codes, &exponents).map_err(|why| self.wrong(format!("{weight}{CODES} {why}")))?;
            if self.tensors.insert(weight.clone(), entry).is_some() {
                return Err(self.wrong(format!("{weight} exists both plainly and in MXFP4")));
            }
        }
        Ok(self)
    }

    /// The weight of `codes` and `exponents`.
    fn blocks(&self, codes: StoredTensor, exponents: &StoredTensor) -> Result<StoredTensor, String> {
        let shape = match *codes.shape {
            [ref rows @ .., blocks, CODE_BYTES] if !rows.is_empty() && blocks > 0 => {
                [rows, &[blocks * Mxfp4::ELEMENTS]].concat()
            }
            _ => {
                let have = &codes.shape;
                return Err(format!("has the shape {have:?}, but should have rows of blocks of {CODE_BYTES} bytes"));
            }
        };
        let (published, wanted) = (&exponents.shape, &codes.shape[..codes.shape.len() - 1]);
        if (exponents.dtype, &published[..]) != (DType::U8, wanted) {
            return Err(format!("needs exponents u8{wanted:?}, but has {}{published:?}", exponents.dtype));
        }
        let blocks = shape[shape.len() - 1] / Mxfp4::ELEMENTS;
        let how = Arc::new(Repacked::Mxfp4 { exponents: self.in_file(exponents), blocks });
        let rows = Rows::range(0, shape[..shape.len() - 1].iter().product());
        let rearranged = Some(Arc::new(Rearranged::new(How::Blocks { how, rows })));
        Ok(StoredTensor { dtype: DType::F32, format: Some(FormatRef::new(Mxfp4)), shape, rearranged, ..codes })
    }
}

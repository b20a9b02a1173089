//! Weights that are published as integers of 4 bits in words of 32, with a scale for each group of a row: as compressed-tensors
//! (`pack-quantized`), GPTQ (Frantar et al. 2023) and AWQ (Lin et al. 2024) write them. They become blocks of the format `q4_0`, or
//! `q4_1` where groups have zero points: codes stay as they are, and a group's scale is repeated, in f16, for each 32 elements. A zero point
//! becomes a minimum, `-zero * scale`, which f16 rounds by at most 15 / 2048 of a scale: about what a library loses that computes values in f16.
//!
//! | | codes | scales | zero points |
//! |---|---|---|---|
//! | compressed-tensors | `x.weight_packed` `[out, in / 8]` | `x.weight_scale` `[out, groups]` | `x.weight_zero_point` `[out / 8, groups]` |
//! | GPTQ | `x.qweight` `[in / 8, out]` | `x.scales` `[groups, out]` | `x.qzeros` `[groups, out / 8]` |
//! | AWQ | `x.qweight` `[in, out / 8]`, nibbles in an order of their own | `x.scales` `[groups, out]` | `x.qzeros` `[groups, out / 8]`, likewise |

use std::sync::Arc;

use ridge_graph::format::{BlockFormat as _, Q4_0, Q4_1};
use ridge_graph::{DType, FormatRef};

use super::parts::Rows;
use super::rearrange::{How, Rearranged};
use super::repack::{FileTensor, Int4Layout, PublishedInt4, Repacked};
use super::tensors::{Checkpoint, StoredTensor};
use crate::error::Result;

/// Codes of 4 bits in a word.
const CODES: usize = 8;

/// Names of the tensors of a weight, behind that of its module.
struct Names {
    codes: &'static str,
    scales: &'static str,
    zeros: &'static str,
    /// Which group each column of the input belongs to.
    groups: &'static str,
    /// What else there may be.
    shape: Option<&'static str>,
}

const COMPRESSED: Names = Names {
    codes: ".weight_packed",
    scales: ".weight_scale",
    zeros: ".weight_zero_point",
    groups: ".weight_g_idx",
    shape: Some(".weight_shape"),
};
const GPTQ_OR_AWQ: Names =
    Names { codes: ".qweight", scales: ".scales", zeros: ".qzeros", groups: ".g_idx", shape: None };

/// Where the zero of codes of 4 bits is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZeroPoints {
    /// Is it at 8 for all codes? Zero points that are stored all the same must say so.
    pub symmetric: bool,
    /// Is it one above what is stored, as GPTQ's first format has it?
    pub one_above: bool,
}

impl ZeroPoints {
    /// At 8 for all codes.
    pub const CENTRE: Self = Self { symmetric: true, one_above: false };
    /// Where the stored zero points say.
    pub const STORED: Self = Self { symmetric: false, one_above: false };

    /// What is added to a word of stored zero points. What took one from each took it from words, with borrows.
    fn more(self) -> u32 {
        if self.one_above { 0x1111_1111 } else { 0 }
    }
}

/// The largest scale: a minimum is up to 15 times that, and f16 holds up to 65,504.
const MOST: f64 = 65504.0 / 15.0;

impl Checkpoint {
    /// The checkpoint with each weight of integers of 4 bits as one tensor, in the format `q4_0` if `zeros` are symmetric, and `q4_1` if
    /// not. Blocks are made when they are read.
    ///
    /// # Errors
    ///
    /// [`FilesError::Safetensors`](crate::FilesError::Safetensors) if codes have no scales or no zero points, or of another shape or dtype, if scales are
    /// beyond what f16 holds, if columns are in groups by an order of their own ("act order"), or if the weight is there plainly too.
    pub fn in_int4(mut self, zeros: ZeroPoints) -> Result<Self> {
        for names in [COMPRESSED, GPTQ_OR_AWQ] {
            let modules: Vec<String> = self
                .tensors
                .iter()
                .filter(|(_, tensor)| tensor.dtype == DType::I32)
                .filter_map(|(name, _)| name.strip_suffix(names.codes).map(str::to_owned))
                .collect();
            for module in modules {
                let mut take = |end: &str| self.tensors.remove(&format!("{module}{end}"));
                let (codes, scales) = (take(names.codes), take(names.scales));
                let (points, groups) = (take(names.zeros), take(names.groups));
                names.shape.map(take);
                let Some((codes, scales)) = codes.zip(scales) else {
                    let [codes, scales] = [names.codes, names.scales];
                    return Err(self.wrong(format!("there is no tensor {module}{scales} for {module}{codes}")));
                };
                let wrong = |why| self.wrong(format!("{module}{} {why}", names.codes));
                let entry = self.of_int4(codes, &scales, points, groups.as_ref(), zeros).map_err(wrong)?;
                let weight = format!("{module}.weight");
                if self.tensors.insert(weight.clone(), entry).is_some() {
                    return Err(self.wrong(format!("{weight} exists both plainly and as integers of 4 bits")));
                }
            }
        }
        Ok(self)
    }

    /// The weight of `codes` and what lies beside them.
    fn of_int4(
        &self,
        codes: StoredTensor,
        scales: &StoredTensor,
        points: Option<StoredTensor>,
        group_of: Option<&StoredTensor>,
        zeros: ZeroPoints,
    ) -> Result<StoredTensor, String> {
        let (&[a, b], &[c, d]) = (&codes.shape[..], &scales.shape[..]) else {
            return Err(format!(
                "has the shape {:?} and scales of {:?}: both must have two axes",
                codes.shape, scales.shape
            ));
        };
        if [a, b, c, d].contains(&0) {
            return Err(format!(
                "has the shape {:?} and scales of {:?}, which have no elements",
                codes.shape, scales.shape
            ));
        }
        let (layout, [out, inner], groups, points_shape) = if a == c {
            (Int4Layout::Compressed, [a, b * CODES], d, [a.div_ceil(CODES), d])
        } else if b == d {
            (Int4Layout::Gptq, [b, a * CODES], c, [c, b / CODES])
        } else if b * CODES == d {
            (Int4Layout::Awq, [d, a], c, [c, b])
        } else {
            return Err(format!("has the shape {:?}, which scales of {:?} do not fit", codes.shape, scales.shape));
        };
        if !inner.is_multiple_of(groups) || !(inner / groups).is_multiple_of(Q4_0::ELEMENTS) {
            return Err(format!(
                "is of {out} x {inner} in {groups} groups: a group must have a multiple of 32 columns"
            ));
        }
        if layout == Int4Layout::Gptq && points.is_some() && !out.is_multiple_of(CODES) {
            return Err(format!("is of {out} x {inner}: with zero points, rows must be a multiple of {CODES}"));
        }
        if !scales.dtype.is_float() || scales.rearranged.is_some() {
            return Err(format!("has scales of {}, which must be floats", scales.dtype));
        }
        let all = scales.dtype.decode(self.in_file(scales).bytes());
        if let Some(beyond) = all.into_iter().find(|scale| scale.is_nan() || scale.abs() > MOST) {
            return Err(format!("has a scale of {beyond}, where blocks hold up to {MOST:.0}"));
        }
        if let Some(group_of) = group_of {
            let group = inner / groups;
            let of: Vec<f64> = group_of.dtype.decode(self.in_file(group_of).bytes());
            if of.len() != inner || of.iter().enumerate().any(|(column, of)| *of != (column / group) as f64) {
                let remedy = "choose a checkpoint that was quantised with desc_act (actorder) off";
                return Err(format!("has columns that are in groups by an order of their own: {remedy}"));
            }
        }
        if let Some(points) = &points
            && (points.dtype, &points.shape[..]) != (DType::I32, &points_shape[..])
        {
            return Err(format!("needs zero points i32{points_shape:?}, but has {}{:?}", points.dtype, points.shape));
        }
        let points = match points {
            None if zeros.symmetric => None,
            None => return Err("has no zero points, which the configuration says there are".to_owned()),
            Some(points) if zeros.symmetric => {
                let centre = if zeros.one_above { 0x77 } else { 0x88 };
                if self.in_file(&points).bytes().iter().any(|byte| *byte != centre) {
                    return Err("has zero points, where the configuration says that codes are symmetric".to_owned());
                }
                None
            }
            Some(points) => Some(self.in_file(&points)),
        };
        let format = if points.is_some() { FormatRef::new(Q4_1) } else { FormatRef::new(Q4_0) };
        let how = Repacked::Int4(PublishedInt4 {
            layout,
            out,
            inner,
            groups,
            scales: (scales.dtype, self.in_file(scales)),
            zeros: points.map(|points| (points, zeros.more())),
        });
        let rearranged = Some(Arc::new(Rearranged::new(How::Blocks { how: Arc::new(how), rows: Rows::range(0, out) })));
        Ok(StoredTensor { dtype: DType::F32, format: Some(format), shape: vec![out, inner], rearranged, ..codes })
    }

    /// The bytes of a tensor that is as the file has it.
    pub(super) fn in_file(&self, tensor: &StoredTensor) -> FileTensor {
        FileTensor { file: Arc::clone(&self.shards[tensor.shard].bytes), range: tensor.range.clone() }
    }
}

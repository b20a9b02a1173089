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

/// How weights are published as integers of 4 bits, as a configuration says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Int4Scheme {
    /// How they lie.
    pub layout: Int4Layout,
    /// Is the zero at 8 for all codes? Zero points that are stored all the same must say so.
    pub symmetric: bool,
    /// Is a zero one above what is stored, as GPTQ's first format has it?
    pub one_above: bool,
    /// Columns that share a scale, 0 for all of a row; `None` where it is not said.
    pub group: Option<usize>,
}

impl Int4Scheme {
    /// Groups of any size by zeros that are stored as they are, or at 8 for all codes.
    pub const fn new(layout: Int4Layout, symmetric: bool) -> Self {
        Self { layout, symmetric, one_above: false, group: None }
    }

    /// What is added to a word of stored zero points. What took one from each took it from words, with borrows.
    fn more(self) -> u32 {
        if self.one_above { 0x1111_1111 } else { 0 }
    }

    fn names(self) -> &'static Names {
        if self.layout == Int4Layout::Compressed { &COMPRESSED } else { &GPTQ_OR_AWQ }
    }
}

/// The largest scale: a minimum is up to 15 times that, and f16 holds up to 65,504.
const MOST: f64 = 65504.0 / 15.0;

impl Checkpoint {
    /// The checkpoint with each weight of integers of 4 bits as one tensor, in the format `q4_0` if zeros are symmetric, and `q4_1` if
    /// not. Blocks are made when they are read.
    ///
    /// # Errors
    ///
    /// [`FilesError::Safetensors`](crate::FilesError::Safetensors) if codes have no scales or no zero points, or of another shape or dtype, if these are not as
    /// `scheme` says, if scales are beyond what f16 holds, if columns are in groups by an order of their own ("act order"), or if the weight is
    /// there plainly too.
    pub fn in_int4(mut self, scheme: Int4Scheme) -> Result<Self> {
        let names = scheme.names();
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
            let shape = names.shape.and_then(take);
            let Some((codes, scales)) = codes.zip(scales) else {
                let [codes, scales] = [names.codes, names.scales];
                return Err(self.wrong(format!("there is no tensor {module}{scales} for {module}{codes}")));
            };
            let wrong = |why| self.wrong(format!("{module}{} {why}", names.codes));
            let entry = self.of_int4(codes, &scales, points, groups.as_ref(), scheme).map_err(wrong)?;
            if let Some(shape) = shape {
                let said = shape.dtype.decode(self.in_file(&shape).bytes());
                if said != entry.shape.iter().map(|extent| *extent as f64).collect::<Vec<_>>() {
                    return Err(wrong(format!("is of {:?}, where its shape is said to be {said:?}", entry.shape)));
                }
            }
            let weight = format!("{module}.weight");
            if self.tensors.insert(weight.clone(), entry).is_some() {
                return Err(self.wrong(format!("{weight} exists both plainly and as integers of 4 bits")));
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
        scheme: Int4Scheme,
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
        let layout = scheme.layout;
        let (fits, [out, inner], groups, points_shape) = match layout {
            Int4Layout::Compressed => (a == c, [a, b * CODES], d, [a.div_ceil(CODES), d]),
            Int4Layout::Gptq => (b == d, [b, a * CODES], c, [c, b / CODES]),
            Int4Layout::Awq => (b * CODES == d, [d, a], c, [c, b]),
        };
        if !fits {
            let how = match layout {
                Int4Layout::Compressed => "compressed-tensors",
                Int4Layout::Gptq => "GPTQ",
                Int4Layout::Awq => "AWQ",
            };
            return Err(format!(
                "has the shape {:?}, which scales of {:?} do not fit as {how} packs it",
                codes.shape, scales.shape
            ));
        }
        if !inner.is_multiple_of(groups) || !(inner / groups).is_multiple_of(Q4_0::ELEMENTS) {
            return Err(format!(
                "is of {out} x {inner} in {groups} groups: a group must have a multiple of 32 columns"
            ));
        }
        let group = scheme.group.map(|columns| if columns == 0 { inner } else { columns });
        if group.is_some_and(|columns| columns != inner / groups) {
            let said = group.unwrap_or_default();
            return Err(format!(
                "is of {out} x {inner} in {groups} groups, where {said} columns are said to share a scale"
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
            None if scheme.symmetric => None,
            None => return Err("has no zero points, which the configuration says there are".to_owned()),
            Some(points) if scheme.symmetric => {
                let centre = if scheme.one_above { 0x77 } else { 0x88 };
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
            zeros: points.map(|points| (points, scheme.more())),
        });
        let rearranged = Some(Arc::new(Rearranged::new(How::Blocks { how: Arc::new(how), rows: Rows::range(0, out) })));
        Ok(StoredTensor { dtype: DType::F32, format: Some(format), shape: vec![out, inner], rearranged, ..codes })
    }

    /// The bytes of a tensor that is as the file has it.
    pub(super) fn in_file(&self, tensor: &StoredTensor) -> FileTensor {
        FileTensor { file: Arc::clone(&self.shards[tensor.shard].bytes), range: tensor.range.clone() }
    }
}

//! Formats of codes with scales: 8-bit integers or 8-bit floats, where all elements of a unit (the tensor, a row, a group
//! of a row, or a block of 128 rows by 128 columns) share one f32 scale. They store values that a graph computes as well as
//! weights: [`Quantize`](crate::ops::Quantize) is how a graph makes one.
//!
//! Of a unit whose largest magnitude is `amax`:
//!
//! ```text
//! int8:    scale = amax / 127, code = floor(x * 127/128 / amax * 128 + 1/2) in -127..=127
//! f8e4m3:  scale = amax / 448, code = x / scale clamped to -448..=448, rounded to the nearest E4M3, ties to even
//! f8e5m2:  the same with 57344 and E5M2
//! value = code * scale
//! ```
//!
//! each operation rounded to f32. So an int8 code is the nearest integer, of two the upper one, also in f32 where an element
//! has 16 bits. A unit of nothing but zeros has scale 0 and codes 0. A unit with an infinity or a NaN has values that are all
//! NaN: its scale is infinite or NaN, and its codes are zeros or NaN.

use std::fmt;

use super::decoding::{Decoding, DecodingValue};
use super::layout::{Format, FormatComponent};
use crate::dim::Dim;
use crate::dtype::{DType, f8e4m3_to_f64, f8e5m2_to_f64, f64_to_f8e4m3, f64_to_f8e5m2};
use crate::prim::Binary;
use crate::shape::Shape;
use crate::why::Why;

/// What codes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CodeType {
    /// Integers from -127 to 127.
    Int8,
    /// OCP E4M3, up to 448.
    F8E4M3,
    /// OCP E5M2, up to 57344: the range that gradients want. Only [`ScaleLayout::Tensor`] has it.
    F8E5M2,
}

/// Which elements share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ScaleLayout {
    /// All: scales f32 `[1]`.
    Tensor,
    /// Those of a row, along the last axis: a token of activations, an output channel of a weight. Scales f32 `[.., 1]`.
    Row,
    /// This many of a row (32, 64, 128 or 256), the last group perhaps shorter: scales f32 `[.., groups]`.
    Group(usize),
    /// [`BLOCK`] rows by [`BLOCK`] columns of a matrix, the last perhaps smaller: scales f32 `[.., row blocks, column blocks]`.
    Block,
}

/// Rows and columns of a block of [`ScaleLayout::Block`].
pub const BLOCK: usize = 128;

/// Codes with scales. Components: `codes` (i8, f8e4m3 or f8e5m2, of the logical shape) and `scales` (see [`ScaleLayout`]).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ScaledFormat {
    /// What codes are.
    pub codes: CodeType,
    /// Which elements share a scale.
    pub scales: ScaleLayout,
}

/// The formats with their names.
const NAMED: [(ScaledFormat, &str); 15] = {
    use CodeType::{F8E4M3, F8E5M2, Int8};
    use ScaleLayout::{Block, Group, Row, Tensor};
    const fn of(codes: CodeType, scales: ScaleLayout) -> ScaledFormat {
        ScaledFormat { codes, scales }
    }
    [
        (of(Int8, Tensor), "int8_tensor"),
        (of(Int8, Row), "int8_row"),
        (of(Int8, Group(32)), "int8_g32"),
        (of(Int8, Group(64)), "int8_g64"),
        (of(Int8, Group(128)), "int8_g128"),
        (of(Int8, Group(256)), "int8_g256"),
        (of(Int8, Block), "int8_b128"),
        (of(F8E4M3, Tensor), "f8e4m3_tensor"),
        (of(F8E4M3, Row), "f8e4m3_row"),
        (of(F8E4M3, Group(32)), "f8e4m3_g32"),
        (of(F8E4M3, Group(64)), "f8e4m3_g64"),
        (of(F8E4M3, Group(128)), "f8e4m3_g128"),
        (of(F8E4M3, Group(256)), "f8e4m3_g256"),
        (of(F8E4M3, Block), "f8e4m3_b128"),
        (of(F8E5M2, Tensor), "f8e5m2_tensor"),
    ]
};

impl CodeType {
    /// Dtype of the codes.
    pub const fn dtype(self) -> DType {
        match self {
            Self::Int8 => DType::I8,
            Self::F8E4M3 => DType::F8E4M3,
            Self::F8E5M2 => DType::F8E5M2,
        }
    }

    /// Largest magnitude of a code.
    pub const fn largest(self) -> f32 {
        match self {
            Self::Int8 => 127.0,
            Self::F8E4M3 => 448.0,
            Self::F8E5M2 => 57344.0,
        }
    }

    /// The codes of a unit, as bytes, and its scale.
    ///
    /// # Panics
    /// When `codes` is shorter than `x`.
    pub fn encode(self, x: impl Iterator<Item = f32> + Clone, mut code: impl FnMut(u8)) -> f32 {
        let larger = |a: f32, b: f32| if a.is_nan() || a > b { a } else { b };
        let amax = x.clone().fold(0.0, |amax, x| larger(x.abs(), amax));
        let scale = amax / self.largest();
        match self {
            Self::Int8 => {
                let divisor = if amax == 0.0 { 1.0 } else { amax };
                for x in x {
                    let nearest = (x * (127.0 / 128.0) / divisor * 128.0 + 0.5).floor();
                    // Of NaN the code is 0, as the cast has it.
                    code((nearest.clamp(-127.0, 127.0) as i8).cast_unsigned());
                }
            }
            Self::F8E4M3 | Self::F8E5M2 => {
                let divisor = if scale == 0.0 { 1.0 } else { scale };
                let rounded = if self == Self::F8E4M3 { f64_to_f8e4m3 } else { f64_to_f8e5m2 };
                for x in x {
                    code(rounded(f64::from((x / divisor).clamp(-self.largest(), self.largest()))));
                }
            }
        }
        scale
    }

    /// The number that a code stands for.
    pub fn number(self, code: u8) -> f32 {
        match self {
            Self::Int8 => f32::from(code.cast_signed()),
            Self::F8E4M3 => f8e4m3_to_f64(code) as f32,
            Self::F8E5M2 => f8e5m2_to_f64(code) as f32,
        }
    }
}

impl ScaledFormat {
    /// Codes of int8 with a scale for [`ScaleLayout::Group`] of 256: how the CPU's kernels of 8-bit codes take x.
    pub const INT8_G256: Self = Self { codes: CodeType::Int8, scales: ScaleLayout::Group(256) };

    /// Codes of E4M3 with a scale for each row: how matrices are stored in fp8 while loading, and how GPUs take x of products
    /// by them.
    pub const F8_ROWS: Self = Self { codes: CodeType::F8E4M3, scales: ScaleLayout::Row };

    /// Codes of E4M3 with a scale for each block: how DeepSeek V3 and others are published (DeepSeek-AI 2024, "DeepSeek-V3 Technical
    /// Report", section 3.3).
    pub const F8_BLOCKS: Self = Self { codes: CodeType::F8E4M3, scales: ScaleLayout::Block };
    /// Codes of E4M3 with a scale for each 128 elements of a row: how such models take activations.
    pub const F8_GROUPS: Self = Self { codes: CodeType::F8E4M3, scales: ScaleLayout::Group(BLOCK) };

    /// Codes of int8 with a scale for each row: weights by channel and activations by token, "W8A8".
    pub const INT8_ROWS: Self = Self { codes: CodeType::Int8, scales: ScaleLayout::Row };

    /// Codes of E4M3 with one scale for all, and of E5M2: what fp8 training takes values and cotangents as.
    pub const F8_TENSOR: Self = Self { codes: CodeType::F8E4M3, scales: ScaleLayout::Tensor };
    /// See [`F8_TENSOR`](Self::F8_TENSOR).
    pub const F8_GRADIENT: Self = Self { codes: CodeType::F8E5M2, scales: ScaleLayout::Tensor };

    /// Codes with scales.
    pub const fn new(codes: CodeType, scales: ScaleLayout) -> Self {
        Self { codes, scales }
    }

    /// The format in which tensor cores take x of a product by weights in this one, if they take both as they are.
    pub fn of_activations(self) -> Option<Self> {
        match self {
            Self::F8_ROWS | Self::INT8_ROWS => Some(self),
            Self::F8_BLOCKS => Some(Self::F8_GROUPS),
            _ => None,
        }
    }

    /// Every format of this family.
    pub fn all() -> impl Iterator<Item = Self> {
        NAMED.into_iter().map(|(format, _)| format)
    }

    /// The format called `name`, such as `f8e4m3_row` or `int8_g256`.
    pub fn from_name(name: &str) -> Option<Self> {
        NAMED.into_iter().find(|(_, n)| *n == name).map(|(format, _)| format)
    }

    /// Elements of a row that share a scale, of `K`; `None` where rows share one.
    pub fn group(self, inner: usize) -> Option<usize> {
        match self.scales {
            ScaleLayout::Row => Some(inner),
            ScaleLayout::Group(size) => Some(size),
            ScaleLayout::Tensor | ScaleLayout::Block => None,
        }
    }

    /// The index of the scale of element `column` of row `row`, for matrices of `rows` rows of `inner`.
    fn scale_of(self, row: usize, column: usize, [rows, inner]: [usize; 2]) -> usize {
        match self.scales {
            ScaleLayout::Tensor => 0,
            ScaleLayout::Row => row,
            ScaleLayout::Group(size) => row * inner.div_ceil(size) + column / size,
            ScaleLayout::Block => {
                let block = row / rows * rows.div_ceil(BLOCK) + row % rows / BLOCK;
                block * inner.div_ceil(BLOCK) + column / BLOCK
            }
        }
    }

    /// Shape of the scales of `shape`.
    fn scales(self, shape: &Shape) -> Shape {
        let blocks = |dim: &Dim, size: usize| match dim.as_const() {
            Some(n) => Dim::from(n.div_ceil(size)),
            None => dim.div_exact(size as i64).unwrap_or_else(|| dim.clone()),
        };
        let mut dims = shape.0.clone();
        match self.scales {
            ScaleLayout::Tensor => dims = vec![1.into()],
            ScaleLayout::Row => dims.iter_mut().next_back().into_iter().for_each(|last| *last = 1.into()),
            ScaleLayout::Group(size) => {
                dims.iter_mut().next_back().into_iter().for_each(|last| *last = blocks(last, size));
            }
            ScaleLayout::Block => dims.iter_mut().rev().take(2).for_each(|dim| *dim = blocks(dim, BLOCK)),
        }
        Shape(dims)
    }

    /// Along each of the last axes that scales are shared along: the axis, and the elements that share one.
    pub(crate) fn shared(self, rank: usize) -> Vec<(usize, usize)> {
        match self.scales {
            ScaleLayout::Tensor | ScaleLayout::Row => Vec::new(),
            ScaleLayout::Group(size) => vec![(rank - 1, size)],
            ScaleLayout::Block => (rank.saturating_sub(2)..rank).map(|axis| (axis, BLOCK)).collect(),
        }
    }
}

/// Rows of the matrices of `shape`.
fn rows_of_matrix(shape: &[usize]) -> usize {
    shape.iter().rev().nth(1).copied().unwrap_or(1).max(1)
}

impl fmt::Debug for ScaledFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Format for ScaledFormat {
    fn name(&self) -> &'static str {
        NAMED.iter().find(|(format, _)| format == self).map_or("scaled", |(_, name)| name)
    }

    fn granularity(&self, rank: usize) -> Vec<usize> {
        // A scale of all, or of a row, goes with every share.
        let mut multiples = vec![1; rank];
        for (axis, size) in self.shared(rank) {
            if let Some(multiple) = multiples.get_mut(axis) {
                *multiple = size;
            }
        }
        multiples
    }

    fn check(&self, shape: &Shape) -> Result<(), Why> {
        if !NAMED.iter().any(|(format, _)| format == self) {
            return Err(format!("scales are shared by 32, 64, 128 or 256 elements, not by {:?}", self.scales));
        }
        let matrix = self.scales == ScaleLayout::Block;
        if shape.rank() == 0 || matrix && shape.rank() < 2 {
            return Err(format!("{} stores {}, got {shape}", self.name(), if matrix { "matrices" } else { "[.., K]" }));
        }
        let counted = |(axis, size): (usize, usize)| {
            shape.0[axis].as_const().is_some() || shape.0[axis].div_exact(size as i64).is_some()
        };
        if self.shared(shape.rank()).into_iter().all(counted) {
            Ok(())
        } else {
            Err(format!("{} cuts axes into groups that must be countable, got {shape}", self.name()))
        }
    }

    fn components(&self, shape: &Shape) -> Vec<FormatComponent> {
        vec![
            FormatComponent { name: "codes", dtype: self.codes.dtype(), shape: shape.clone() },
            FormatComponent { name: "scales", dtype: DType::F32, shape: self.scales(shape) },
        ]
    }

    fn decode(&self, decoding: &mut Decoding, shape: &Shape) -> DecodingValue {
        let (mut values, mut scales) = (DecodingValue::Component(0), DecodingValue::Component(1));
        values = decoding.cast(values, DType::F32);
        // Each axis that is cut into groups becomes two, of whole groups.
        let (mut split, mut of_scales, mut whole) = (Vec::new(), Vec::new(), shape.0.clone());
        let shared = self.shared(shape.rank());
        for (axis, dim) in shape.0.iter().enumerate() {
            let Some((_, size)) = shared.iter().find(|(a, _)| *a == axis) else {
                split.push(dim.clone());
                of_scales.push(dim.clone());
                continue;
            };
            let groups = self.scales(shape).0[axis].clone();
            whole[axis] = groups.clone() * *size as i64;
            if let (Some(n), Some(padded)) = (dim.as_const(), whole[axis].as_const())
                && padded > n
            {
                values = decoding.pad(values, axis, padded - n);
            }
            split.extend([groups.clone(), Dim::from(*size)]);
            of_scales.extend([groups, Dim::from(1)]);
        }
        if !shared.is_empty() {
            values = decoding.reshape(values, Shape(split));
            scales = decoding.reshape(scales, Shape(of_scales));
        }
        values = decoding.binary(Binary::Mul, values, scales);
        values = decoding.reshape(values, Shape(whole.clone()));
        for (axis, (dim, whole)) in shape.0.iter().zip(&whole).enumerate() {
            if let Some(n) = dim.as_const().filter(|_| dim != whole) {
                values = decoding.slice(values, axis, 0, n);
            }
        }
        values
    }

    /// `importance` is not used: scales follow from largest magnitudes.
    fn encode(&self, values: &[f32], shape: &[usize], _importance: Option<&[f32]>) -> Vec<Vec<u8>> {
        let inner = shape.last().copied().unwrap_or(1);
        let rows = values.len().checked_div(inner).unwrap_or(0);
        let logical = Shape::new(shape.iter().copied());
        let count = self.scales(&logical).as_const().map_or(0, |dims| dims.iter().product());
        let (mut codes, mut scales) = (vec![0; values.len()], vec![0f32; count]);
        // The rows and columns of a unit.
        let (high, wide) = match self.scales {
            ScaleLayout::Tensor => (rows.max(1), inner.max(1)),
            ScaleLayout::Row => (1, inner.max(1)),
            ScaleLayout::Group(size) => (1, size),
            ScaleLayout::Block => (BLOCK, BLOCK),
        };
        // A block is of one matrix.
        let matrix = if self.scales == ScaleLayout::Block { rows_of_matrix(shape) } else { rows.max(1) };
        for end in (0..rows).step_by(matrix).map(|first| first + matrix) {
            for top in (end - matrix..end).step_by(high) {
                for left in (0..inner).step_by(wide) {
                    let places = (top..(top + high).min(end))
                        .flat_map(|row| (left..(left + wide).min(inner)).map(move |column| row * inner + column));
                    let mut to = places.clone();
                    scales[self.scale_of(top, left, [matrix, inner])] =
                        self.codes.encode(places.map(|at| values[at]), |code| codes[to.next().unwrap_or(0)] = code);
                }
            }
        }
        vec![codes, scales.into_iter().flat_map(f32::to_le_bytes).collect()]
    }

    fn values(&self, components: &[&[u8]], shape: &[usize]) -> Vec<f32> {
        let inner = shape.last().copied().unwrap_or(1).max(1);
        let scales: Vec<f32> = components[1].as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        let of = [rows_of_matrix(shape), inner];
        let value =
            |(at, code): (usize, &u8)| self.codes.number(*code) * scales[self.scale_of(at / inner, at % inner, of)];
        components[0].iter().enumerate().map(value).collect()
    }
}

//! Matrix products of consecutive groups of rows, each with a weight of its own; where groups begin is data on the device
//! (Gale et al. 2022, "MegaBlocks", section 4).

use super::require::{takes, want, want_floats, want_weight};
use crate::cost::Cost;
use crate::dim::{Dim, Sym};
use crate::dtype::DType;
use crate::error::Result;
use crate::format::{self, CodeType, FormatRef, ScaleLayout, ScaledFormat};
use crate::graph::{Builder, Composite, Var};
use crate::poly::Poly;
use crate::sample::{Rng, Sample};
use crate::shape::Shape;
use crate::shard::{Placement, ShardingRule};
use crate::tensor::Tensor;
use crate::types::Type;
use crate::why::Why;
use crate::work::Work;

/// `y[i] = w[e] x[i]` for the rows `offsets[e]..offsets[e + 1]` of each group `e`, summed in f32 and rounded once; rows
/// behind the last group are zeros.
///
/// `x`: `[n, K]` of any float dtype; `w`: `[groups, N, K]` of any float dtype or stored in a format; `offsets`: i32
/// `[groups + 1]`, which begins with 0, does not decrease and ends with `n` at most. If `gathered`, `rows`: i32 `[n]` comes
/// last, and row `i` of x is `x[rows[i]]`, zeros where that is out of range. Gives `[n, N]` of the dtype of `x`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupedLinear {
    /// Is there a fourth input, the rows of x?
    pub gathered: bool,
    /// How many groups have rows, so that their weights are read: for the cost alone.
    pub reached: Sym,
}

impl Composite for GroupedLinear {
    fn name(&self) -> &'static str {
        "grouped_linear"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let (x, w, offsets, rows) = match (inputs, self.gathered) {
            ([x, w, offsets], false) => (x, w, offsets, None),
            ([x, w, offsets, rows], true) => (x, w, offsets, Some(rows)),
            (_, false) => return Err(takes("x, w and offsets", inputs)),
            (_, true) => return Err(takes("x, w, offsets and rows", inputs)),
        };
        want_floats("x", x, 2, "[n, K]")?;
        want_weight("w", w, 3, "[groups, N, K]")?;
        if w.shape.last() != x.shape.last() {
            return Err(format!("w must be [groups, N, {}] to follow x, got {w}", x.shape.last()));
        }
        let Some(groups) = w.shape.0[0].as_const() else {
            return Err(format!("w must have a number of groups, got {w}"));
        };
        want("offsets", offsets, DType::I32, [groups + 1])?;
        let mut n = x.shape.0[0].clone();
        if let Some(rows) = rows {
            if rows.shape.rank() != 1 || rows.dtype != DType::I32 || !rows.is_plain() {
                return Err(format!("rows must be i32[n], got {rows}"));
            }
            n = rows.shape.0[0].clone();
        }
        Ok(vec![x.with_shape(Shape(vec![n, w.shape.0[1].clone()]))])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let (xt, wt) = (g.ty(inputs[0])?.clone(), g.ty(inputs[1])?.clone());
        let (groups, out, inner) = (wt.shape.0[0].clone(), wt.shape.0[1].clone(), wt.shape.last());
        if wt.format.is_some() {
            // By plain weights, for which a machine may have a kernel.
            let w = g.decoded(inputs[1], DType::F32)?;
            return g.composite(self.clone(), &[&[inputs[0], w], &inputs[2..]].concat());
        }
        let mut x = inputs[0];
        if self.gathered {
            x = g.gather(x, inputs[3], 0)?;
        }
        let x = g.cast(x, DType::F32)?;
        let n = g.ty(x)?.shape.0[0].clone();
        // The group of each row is the number of those that end before it.
        let ends = g.slice(inputs[2], 0, 1, groups.clone())?;
        let row = g.iota(Shape(vec![n.clone(), groups]), 0, DType::I32)?;
        let ended = g.le(ends, row)?;
        let ended = g.cast(ended, DType::I32)?;
        let group = g.reduce_sum(ended, 1)?;
        let group = g.reshape(group, Shape(vec![n.clone()]))?;
        let w = g.cast(inputs[1], DType::F32)?;
        let w = g.gather(w, group, 0)?;
        let x = g.reshape(x, Shape(vec![n.clone(), 1.into(), inner]))?;
        let y = g.matmul(x, w, false, true, DType::F32)?;
        let y = g.reshape(y, Shape(vec![n, out]))?;
        Ok(vec![g.cast(y, xt.dtype)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let (x, w) = (&inputs[0], &inputs[1]);
        let of_group = w.with_shape(Shape([&[1.into()], &w.shape.0[1..]].concat())).bytes();
        let reached = Poly::from(&Dim::from(self.reached.clone()));
        let indices = inputs[2..].iter().fold(Poly::zero(), |sum, ty| sum + &ty.bytes());
        Cost {
            matrix_flops: &outputs[0].shape.elements() * &(Poly::from(&x.shape.last()) * 2),
            bytes_read: x.bytes() + &indices + &(&of_group * &reached),
            ..Cost::moving(&[], outputs)
        }
    }

    fn work(&self) -> Work {
        Work::Experts { weight: 1 }
    }

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        let (whole, cut) = (Placement::Replicate, Placement::shard);
        let places = |x, w| [vec![x, w], vec![whole; inputs.len() - 2]].concat();
        vec![
            ShardingRule { inputs: places(whole, cut(1)), outputs: vec![cut(1)] },
            ShardingRule { inputs: places(cut(1), cut(2)), outputs: vec![Placement::Partial] },
        ]
    }
}

impl Builder {
    /// Products of groups of rows, those of `x` or those that `rows` names; see [`GroupedLinear`].
    ///
    /// # Errors
    /// When `x`, `w`, `offsets` and `rows` do not fit each other.
    pub fn grouped_linear(&mut self, x: Var, w: Var, offsets: Var, rows: Option<Var>, reached: &Sym) -> Result<Var> {
        let inputs: Vec<Var> = [x, w, offsets].into_iter().chain(rows).collect();
        let op = GroupedLinear { gathered: rows.is_some(), reached: reached.clone() };
        Ok(self.composite(op, &inputs)?[0])
    }
}

/// Offsets of groups with so many rows.
fn offsets(groups: &[usize]) -> Tensor {
    let mut values = vec![0];
    for rows in groups {
        values.push(values.last().copied().unwrap_or(0) + *rows as i64);
    }
    Tensor::int(DType::I32, &[values.len()], values)
}

/// Rows of x if some of them are gathered, n, rows of each group, N, K.
type Case<'a> = (Option<usize>, usize, &'a [usize], usize, usize);

fn of(gathered: bool) -> Sample {
    Sample::new(GroupedLinear { gathered, reached: Sym::new("reached") })
}

fn of_cases(rng: &mut Rng, dtype: DType, cases: &[Case<'_>]) -> Vec<Sample> {
    let mut samples = Vec::new();
    for &(among, n, groups, columns, inner) in cases {
        let sample = of(among.is_some())
            .input(rng.normal(dtype, &[among.unwrap_or(n), inner]))
            .input(rng.normal(dtype, &[groups.len(), columns, inner]))
            .input(offsets(groups));
        samples.push(match among {
            Some(among) => sample.input(rng.integers(DType::I32, &[n], -1, among as i64 + 1)),
            None => sample,
        });
    }
    samples
}

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    // Empty groups, groups of one row, of a few and of more than a tile, rows behind the last group, and vectors that are not whole.
    let cases: [Case<'_>; 10] = [
        (None, 0, &[0, 0], 5, 8),
        (None, 1, &[1], 1, 1),
        (None, 2, &[0, 0, 1, 0, 1, 0], 40, 64),
        (None, 10, &[3, 0, 5], 17, 33),
        (Some(5), 10, &[4, 0, 6, 0], 16, 40),
        (Some(0), 3, &[1, 1], 4, 8),
        (None, 4, &[2, 2], 9, 0),
        (None, 6, &[2, 3], 0, 8),
        (Some(70), 140, &[90, 1, 49], 70, 96),
        (None, 160, &[9, 70, 0, 17, 60], 40, 130),
    ];
    let mut samples = of_cases(rng, dtype, &cases);
    samples.push(
        of(false)
            .input(rng.normal(DType::F32, &[7, 50]))
            .input(rng.normal(DType::BF16, &[3, 9, 50]))
            .input(offsets(&[2, 5, 0])),
    );
    let scaled = |codes, scales| FormatRef::new(ScaledFormat::new(codes, scales));
    let formats = format::all().into_iter().chain([
        scaled(CodeType::Int8, ScaleLayout::Row),
        scaled(CodeType::Int8, ScaleLayout::Group(128)),
        scaled(CodeType::F8E4M3, ScaleLayout::Tensor),
        scaled(CodeType::F8E4M3, ScaleLayout::Group(64)),
        scaled(CodeType::F8E4M3, ScaleLayout::Block),
    ]);
    for format in formats {
        let inner = format.granularity(3)[2].max(32) * 2;
        // As many rows as are multiplied one by one, and more.
        for groups in [[1, 0, 2], [0, 17, 3]] {
            let n: usize = groups.iter().sum();
            samples.push(
                of(true)
                    .input(rng.normal(dtype, &[4, inner]))
                    .stored(&rng.normal(DType::F32, &[3, 37, inner]), &format)
                    .input(offsets(&groups))
                    .input(rng.integers(DType::I32, &[n], 0, 4)),
            );
        }
    }
    // Many rows of a group, and several tiles of columns.
    let many: [Case<'_>; 4] = [
        (Some(40), 331, &[200, 0, 130], 40, 72),
        (None, 241, &[64, 65, 1, 0, 110], 130, 32),
        (Some(9), 70, &[66, 3], 33, 136),
        (None, 300, &[129, 171], 259, 8),
    ];
    samples.extend(of_cases(&mut Rng::new(61), dtype, &many));
    samples.extend(in_blocks(&mut Rng::new(62), dtype));
    samples.extend(of_codes(&mut Rng::new(63), dtype));
    samples
}

/// Weights of codes with scales: more rows of a group than a tile has, several tiles of columns, and a row that ends within a block.
fn of_codes(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let formats = [
        (CodeType::F8E4M3, ScaleLayout::Block),
        (CodeType::F8E4M3, ScaleLayout::Row),
        (CodeType::Int8, ScaleLayout::Row),
        (CodeType::Int8, ScaleLayout::Group(32)),
    ];
    let mut samples = Vec::new();
    for (codes, scales) in formats {
        for (groups, columns, inner) in [([9, 0, 3, 7], 72, 288), ([70, 0, 1, 9], 70, 192)] {
            let n: usize = groups.iter().sum();
            let w = rng.normal(DType::F32, &[groups.len(), columns, inner]);
            samples.push(
                of(true)
                    .input(rng.normal(dtype, &[19, inner]))
                    .stored(&w, &FormatRef::new(ScaledFormat::new(codes, scales)))
                    .input(offsets(&groups))
                    // With rows of none behind the last group.
                    .input(rng.integers(DType::I32, &[n + 2], -1, 20)),
            );
        }
    }
    samples
}

/// Weights in blocks: more rows of a group than a tile has, several tiles of columns, and an odd number of small blocks in a row.
fn in_blocks(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let formats = format::all().into_iter().filter(|format| format.granularity(3)[2] >= 32);
    let mut samples = Vec::new();
    for format in formats {
        let inner = if format.granularity(3)[2] == 32 { 288 } else { 256 };
        for (groups, columns) in [([65, 0, 0], 65), ([1, 0, 40], 70)] {
            let n: usize = groups.iter().sum();
            let x = rng.normal(dtype, &[9, inner]);
            let w = rng.normal(DType::F32, &[3, columns, inner]);
            let rows = rng.integers(DType::I32, &[n], 0, 9);
            samples.push(of(true).input(x).stored(&w, &format).input(offsets(&groups)).input(rows));
        }
    }
    samples
}

//! Dropout (Srivastava et al. 2014, "Dropout: A Simple Way to Prevent Neural Networks from Overfitting", section 4), with
//! kept elements scaled up in training, so that inference leaves it out.

use super::require::{takes, want, want_float};
use crate::cost::Cost;
use crate::dtype::DType;
use crate::dyn_eq::eq_by_bits;
use crate::error::{GraphError, Result};
use crate::graph::{Builder, Composite, Var};
use crate::sample::{Rng, Sample};
use crate::shape::Shape;
use crate::shard::{Placement, ShardingRule};
use crate::tensor::Tensor;
use crate::types::Type;
use crate::why::Why;

/// Each element of `x` times `1 / (1 - rate)`, or zero with probability `rate`, computed in f32.
///
/// `x`: `[.., n]` of any float dtype; `key`: I64 scalar; `rows`: I64 `[..]` and `columns`: I64 `[n]`, the positions of the
/// elements (the low 32 bits of each count). Gives the type of `x`. The element at row `r` and column `c` is kept where
/// `random(key, 0, r, c)` of stream [`Dropout::STREAM`] is `rate` or more: a function of key and position alone, so that
/// a backward pass that computes it again and a rank that has a share of `x` drop the same elements.
#[derive(Clone, Copy, Debug)]
pub struct Dropout {
    /// The probability that an element is dropped, in `[0, 1)`.
    pub rate: f64,
}

eq_by_bits!(Dropout { rate });

impl Dropout {
    /// The random stream that elements are drawn from.
    pub const STREAM: u32 = 2;
}

impl Composite for Dropout {
    fn name(&self) -> &'static str {
        "dropout"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [x, key, rows, columns] = inputs else { return Err(takes("x, key, rows and columns", inputs)) };
        want_float("x", x)?;
        if x.shape.rank() == 0 {
            return Err("x must have an axis or more, got a scalar; reshape it to [1]".into());
        }
        if !(0.0..1.0).contains(&self.rate) {
            return Err(format!("rate must be at least 0 and below 1, got {}", self.rate));
        }
        want("key", key, DType::I64, Shape::default())?;
        want("rows", rows, DType::I64, leading(&x.shape))?;
        want("columns", columns, DType::I64, [x.shape.last()])?;
        Ok(vec![x.clone()])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let [x, key, rows, columns] = inputs else { unreachable!("infer has counted the inputs") };
        let ty = g.ty(*x)?.clone();
        let number = number(g, &ty.shape, [*key, *rows, *columns], Self::STREAM)?;
        // Numbers are multiples of 2^-24: the bound is the first of them that is kept, which f32 has exactly.
        let steps = 2f64.powi(24);
        let bound = g.constant(DType::F32, (self.rate * steps).ceil() / steps)?;
        let keep = g.ge(number, bound)?;
        let scale = g.constant(DType::F32, 1.0 / (1.0 - self.rate))?;
        let wide = g.cast(*x, DType::F32)?;
        let scaled = g.mul(wide, scale)?;
        let zero = g.constant(DType::F32, 0.0)?;
        let y = g.select(keep, scaled, zero)?;
        Ok(vec![g.cast(y, ty.dtype)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        // A Philox number of some 40 operations, a comparison, a product and a choice.
        let vector_flops = inputs[0].shape.elements() * 43;
        Cost { vector_flops, ..Cost::moving(inputs, outputs) }
    }

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        by_elements(inputs[0].shape.rank())
    }
}

/// Random numbers of the elements of `shape`, f32: by key, rows and columns.
pub(super) fn number(g: &mut Builder, shape: &Shape, [key, rows, columns]: [Var; 3], stream: u32) -> Result<Var> {
    let mut column = leading(shape);
    column.0.push(1.into());
    let rows = g.reshape(rows, column)?;
    let whole = |g: &mut Builder, var: Var| g.broadcast(var, shape.clone());
    let (key, rows, columns) = (whole(g, key)?, whole(g, rows)?, whole(g, columns)?);
    let sequence = g.constant(DType::I64, 0.0)?;
    let sequence = whole(g, sequence)?;
    g.random(key, sequence, rows, columns, stream)
}

/// Rules of an op over x of `rank` axes, a key, rows and columns that divide any axis.
pub(super) fn by_elements(rank: usize) -> Vec<ShardingRule> {
    let cut = |dim: usize| {
        let mut places = vec![Placement::shard(dim), Placement::Replicate, Placement::Replicate, Placement::Replicate];
        if dim + 1 == rank {
            places[3] = Placement::shard(0);
        } else {
            places[2] = Placement::shard(dim);
        }
        ShardingRule { inputs: places, outputs: vec![Placement::shard(dim)] }
    };
    (0..rank).map(cut).collect()
}

/// Rows, counted over all leading axes, and columns of the elements of `x`.
pub(super) fn places(g: &mut Builder, x: Var) -> Result<[Var; 2]> {
    let shape = g.ty(x)?.shape.clone();
    let Some((last, extents)) = shape.0.split_last() else {
        return Err(GraphError::usage(g.scope(), "random numbers for a scalar; reshape it to [1]"));
    };
    let columns = g.iota([last.clone()], 0, DType::I64)?;
    let leading = Shape(extents.to_vec());
    let zero = g.constant(DType::I64, 0.0)?;
    let mut rows = g.broadcast(zero, leading.clone())?;
    for (axis, extent) in extents.iter().enumerate() {
        let extent = g.dim_value(extent)?;
        let before = g.mul(rows, extent)?;
        let here = g.iota(leading.clone(), axis, DType::I64)?;
        rows = g.add(before, here)?;
    }
    Ok([rows, columns])
}

/// All extents but the last.
fn leading(shape: &Shape) -> Shape {
    Shape(shape.0[..shape.rank() - 1].to_vec())
}

impl Builder {
    /// `x` with elements dropped at `rate`, by a key of this place in the model ([`Builder::random_key`]): each call of a
    /// function and each use of dropout within it drops other elements. See [`Dropout`].
    ///
    /// # Errors
    /// When `x` is not a plain float tensor with an axis or more, or `rate` is not in `[0, 1)`.
    pub fn dropout(&mut self, x: Var, rate: f64) -> Result<Var> {
        let key = self.random_key()?;
        let [rows, columns] = places(self, x)?;
        Ok(self.composite(Dropout { rate }, &[x, key, rows, columns])?[0])
    }
}

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let cases: [(&[usize], f64); 7] = [
        (&[0, 8], 0.5),
        (&[1, 1], 0.1),
        (&[7], 0.25),
        (&[5, 64], 0.0),
        (&[2, 3, 33], 0.9),
        (&[17, 1000], 0.1),
        (&[4, 0], 0.5),
    ];
    let sample = |(shape, rate): (&[usize], f64)| {
        let (last, leading) = shape.split_last().expect("of an axis or more");
        Sample::new(Dropout { rate })
            .input(rng.normal(dtype, shape))
            .input(Tensor::int(DType::I64, &[], vec![rng.bits() as i64]))
            .input(rng.integers(DType::I64, leading, 0, 1 << 32))
            .input(rng.integers(DType::I64, &[*last], 0, 1 << 32))
    };
    cases.into_iter().map(sample).collect()
}

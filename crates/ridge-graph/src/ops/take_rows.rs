//! Rows that are wanted of a value, of which whoever reads the graph needs no others.

use super::require::{takes, want};
use crate::cost::Cost;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Builder, Composite, Var};
use crate::prim::Prim;
use crate::sample::{Check, Rng, Sample};
use crate::shape::Shape;
use crate::shard::{Placement, ShardingRule};
use crate::tensor::Tensor;
use crate::types::Type;
use crate::why::Why;

/// The rows of `x` along `axis` that `rows` names. A row of padding takes the place of a negative index: -1 in i32 and i64, as
/// padding's sequence is, and zeros in other dtypes.
///
/// `x`: any plain tensor with that axis; `rows`: i32 `[n]`; gives `x` with `n` rows, zeros where an index is beyond the last.
///
/// Unlike a gather it says that nobody reads what is computed of padding. So
/// [`take_rows_early`](crate::passes::take_rows_early) may take the rows of what `x` is computed from instead, after which padding
/// has the values that ops give for padding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TakeRows {
    /// The axis that rows are counted along.
    pub axis: usize,
}

impl Composite for TakeRows {
    fn name(&self) -> &'static str {
        "take_rows"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [x, rows] = inputs else { return Err(takes("x and rows", inputs)) };
        if !x.is_plain() || x.shape.rank() <= self.axis {
            return Err(format!("x must be a plain tensor with an axis {}, got {x}", self.axis));
        }
        want("rows", rows, DType::I32, [&rows.shape.last()])?;
        let mut shape = x.shape.0.clone();
        shape[self.axis] = rows.shape.last();
        Ok(vec![x.with_shape(Shape(shape))])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let taken = g.gather(inputs[0], inputs[1], self.axis)?;
        let ty = g.ty(taken)?.clone();
        if !matches!(ty.dtype, DType::I32 | DType::I64) {
            return Ok(vec![taken]);
        }
        let zero = g.constant(DType::I32, 0.0)?;
        let is_row = g.ge(inputs[1], zero)?;
        let mut along = vec![1.into(); ty.shape.rank()];
        along[self.axis] = ty.shape.0[self.axis].clone();
        let is_row = g.reshape(is_row, Shape(along))?;
        let is_row = g.broadcast(is_row, ty.shape)?;
        let padding = g.constant(ty.dtype, -1.0)?;
        Ok(vec![g.select(is_row, taken, padding)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        Prim::Gather { axis: self.axis }.cost(inputs, outputs)
    }

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        let whole = Placement::Replicate;
        let rule = |x, rows, output| ShardingRule { inputs: vec![x, rows], outputs: vec![output] };
        let x = &inputs[0];
        let others = (0..x.shape.rank()).filter(|dim| *dim != self.axis).map(Placement::shard);
        let mut rules: Vec<ShardingRule> = others.map(|cut| rule(cut, whole, cut)).collect();
        rules.push(rule(whole, Placement::shard(0), Placement::shard(self.axis)));
        if x.dtype.is_float() {
            rules.push(rule(Placement::Partial, whole, Placement::Partial));
        }
        rules
    }
}

impl Builder {
    /// The rows of `x` along `axis` that the i32 vector `rows` names, negative for padding; see [`TakeRows`].
    ///
    /// # Errors
    /// When `x` has no such axis, is a state or stored in a format, or `rows` is not an i32 vector.
    pub fn take_rows(&mut self, x: Var, rows: Var, axis: usize) -> Result<Var> {
        Ok(self.composite(TakeRows { axis }, &[x, rows])?[0])
    }
}

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    // (shape of x, axis, rows)
    let cases: [(&[usize], usize, &[i64]); 6] = [
        (&[0, 3], 0, &[-1, 0]),
        (&[1, 1], 0, &[0]),
        (&[5, 33], 0, &[4, -1, 0, 4, 5]),
        (&[3, 7, 2], 1, &[6, -1]),
        (&[9], 0, &[-1, 8, 3]),
        (&[17, 64], 0, &[]),
    ];
    let mut samples = Vec::new();
    for (shape, axis, rows) in cases {
        let rows = Tensor::int(DType::I32, &[rows.len()], rows.to_vec());
        for x in [rng.normal(dtype, shape), rng.integers(DType::I32, shape, 0, 100)] {
            samples.push(Sample::new(TakeRows { axis }).input(x).input(rows.clone()).judged(Check::Exact));
        }
    }
    samples
}

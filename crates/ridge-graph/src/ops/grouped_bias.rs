//! Biases of consecutive groups of rows, each of which has one of its own: what follows [`GroupedLinear`](super::GroupedLinear).

use super::require::{takes, want, want_floats};
use crate::cost::Cost;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Builder, Composite, Var};
use crate::sample::{Rng, Sample};
use crate::shape::Shape;
use crate::shard::{Placement, ShardingRule};
use crate::tensor::Tensor;
use crate::types::Type;
use crate::why::Why;

/// `y[i] + bias[e]` for the rows `offsets[e]..offsets[e + 1]` of each group `e`, added in f32 and rounded once; rows behind the
/// last group are those of `y`.
///
/// `y`: `[n, N]` and `bias`: `[groups, N]`, each of any float dtype; `offsets`: i32 `[groups + 1]`, as of
/// [`GroupedLinear`](super::GroupedLinear). Gives the type of `y`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupedBias;

impl Composite for GroupedBias {
    fn name(&self) -> &'static str {
        "grouped_bias"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [y, bias, offsets] = inputs else { return Err(takes("y, bias and offsets", inputs)) };
        want_floats("y", y, 2, "[n, N]")?;
        want_floats("bias", bias, 2, "[groups, N]")?;
        if bias.shape.last() != y.shape.last() {
            return Err(format!("bias must be [groups, {}] to follow y, got {bias}", y.shape.last()));
        }
        let Some(groups) = bias.shape.0[0].as_const() else {
            return Err(format!("bias must have a number of groups, got {bias}"));
        };
        want("offsets", offsets, DType::I32, [groups + 1])?;
        Ok(vec![y.clone()])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let (ty, groups) = (g.ty(inputs[0])?.clone(), g.ty(inputs[1])?.shape.0[0].clone());
        let n = ty.shape.0[0].clone();
        // The group of each row is the number of those that end before it; rows behind the last gather zeros.
        let ends = g.slice(inputs[2], 0, 1, groups.clone())?;
        let row = g.iota(Shape(vec![n.clone(), groups]), 0, DType::I32)?;
        let ended = g.le(ends, row)?;
        let ended = g.cast(ended, DType::I32)?;
        let group = g.reduce_sum(ended, 1)?;
        let group = g.reshape(group, Shape(vec![n]))?;
        let bias = g.gather(inputs[1], group, 0)?;
        let (y, bias) = (g.cast(inputs[0], DType::F32)?, g.cast(bias, DType::F32)?);
        let sum = g.add(y, bias)?;
        Ok(vec![g.cast(sum, ty.dtype)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        Cost { vector_flops: inputs[0].shape.elements(), ..Cost::moving(inputs, outputs) }
    }

    fn shard(&self, _inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        let whole = Placement::Replicate;
        // A bias as a summand, since every rank adds its own.
        [Placement::shard(1), Placement::Partial]
            .map(|y| ShardingRule { inputs: vec![y, y, whole], outputs: vec![y] })
            .into()
    }
}

impl Builder {
    /// Rows of `y` with the biases of their groups; see [`GroupedBias`].
    ///
    /// # Errors
    /// When `y`, `bias` and `offsets` do not fit each other.
    pub fn grouped_bias(&mut self, y: Var, bias: Var, offsets: Var) -> Result<Var> {
        Ok(self.composite(GroupedBias, &[y, bias, offsets])?[0])
    }
}

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    // (n, N, offsets): groups without rows, and rows behind the last group.
    let cases: [(usize, usize, &[i64]); 4] =
        [(0, 5, &[0, 0]), (1, 1, &[0, 1]), (9, 33, &[0, 3, 3, 7]), (40, 64, &[0, 0, 40])];
    let sample = |(n, columns, offsets): (usize, usize, &[i64])| {
        Sample::new(GroupedBias)
            .input(rng.normal(dtype, &[n, columns]))
            .input(rng.normal(dtype, &[offsets.len() - 1, columns]))
            .input(Tensor::int(DType::I32, &[offsets.len()], offsets.to_vec()))
    };
    cases.into_iter().map(sample).collect()
}

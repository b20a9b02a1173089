//! Stochastic rounding (Gupta et al. 2015, "Deep Learning with Limited Numerical Precision", section 3), by which weights of
//! few bits take updates that are smaller than half a step between two of them.

use super::require::{takes, want};
use crate::cost::Cost;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Builder, Composite, Gradient, Var};
use crate::sample::{Check, Rng, Sample};
use crate::shape::Shape;
use crate::shard::ShardingRule;
use crate::tensor::Tensor;
use crate::types::Type;
use crate::why::Why;

/// Each element of `x` rounded to one of the two bf16 numbers beside it, to either with a probability that grows linearly
/// with its nearness, so that the mean is `x`; what bf16 has stays.
///
/// `x`: f32 `[.., n]`; `key`: I64 scalar; `rows`: I64 `[..]` and `columns`: I64 `[n]`, the positions of the elements (the low
/// 32 bits of each count). Gives bf16 of the shape of `x`. The element at row `r` and column `c` is rounded away from zero if
/// `random(key, 0, r, c)` of stream [`StochasticRound::STREAM`] is less than its distance to the number nearer to zero,
/// in steps between the two. Numbers below 2^-100 are rounded to multiples of 2^-107.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StochasticRound;

impl StochasticRound {
    /// The random stream that elements are rounded by.
    pub const STREAM: u32 = 4;
    /// Bits of the fraction of bf16.
    const FRACTION: i32 = 7;
    /// The exponent below which steps stay the same.
    const LEAST: i32 = -100;
}

impl Composite for StochasticRound {
    fn name(&self) -> &'static str {
        "stochastic_round"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [x, key, rows, columns] = inputs else { return Err(takes("x, key, rows and columns", inputs)) };
        want("x", x, DType::F32, x.shape.clone())?;
        let Some((last, leading)) = x.shape.0.split_last() else {
            return Err("x must have an axis or more, got a scalar; reshape it to [1]".into());
        };
        want("key", key, DType::I64, Shape::default())?;
        want("rows", rows, DType::I64, Shape(leading.to_vec()))?;
        want("columns", columns, DType::I64, [last.clone()])?;
        Ok(vec![Type { dtype: DType::BF16, ..x.clone() }])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let [x, key, rows, columns] = inputs else { unreachable!("infer has counted the inputs") };
        let shape = g.ty(*x)?.shape.clone();
        let number = super::dropout::number(g, &shape, [*key, *rows, *columns], Self::STREAM)?;
        let float = |g: &mut Builder, value: f64| g.constant(DType::F32, value);
        let size = g.abs(*x)?;
        let least = float(g, 2f64.powi(Self::LEAST))?;
        let floored = g.max(size, least)?;
        // The power of two at or below: the logarithm may be off by a rounding, and the power is exact in bf16 whatever a
        // device makes of it in f32, so that what is off by one is seen.
        let log = g.log(floored)?;
        let inverse = float(g, std::f64::consts::LOG2_E)?;
        let log = g.mul(log, inverse)?;
        let exponent = g.floor(log)?;
        let two = float(g, 2.0)?;
        let twos = g.broadcast(two, shape.clone())?;
        let power = g.pow(twos, exponent)?;
        let power = g.cast(power, DType::BF16)?;
        let power = g.cast(power, DType::F32)?;
        let half = float(g, 0.5)?;
        let (doubled, halved) = (g.mul(power, two)?, g.mul(power, half)?);
        let is_above = g.ge(floored, doubled)?;
        let is_below = g.lt(floored, power)?;
        let power = g.select(is_above, doubled, power)?;
        let power = g.select(is_below, halved, power)?;

        let fraction = float(g, 2f64.powi(-Self::FRACTION))?;
        let step = g.mul(power, fraction)?;
        // Divided and multiplied by powers of two: nothing is rounded.
        let steps = g.div(size, step)?;
        let below = g.floor(steps)?;
        let rest = g.sub(steps, below)?;
        let is_up = g.lt(number, rest)?;
        let one = float(g, 1.0)?;
        let above = g.add(below, one)?;
        let whole = g.select(is_up, above, below)?;
        let y = g.mul(whole, step)?;
        let zero = float(g, 0.0)?;
        let is_negative = g.lt(*x, zero)?;
        let minus = g.neg(y)?;
        let y = g.select(is_negative, minus, y)?;
        Ok(vec![g.cast(y, DType::BF16)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        // A Philox number of some 40 operations, and 16 that round.
        let elements = inputs[0].shape.elements();
        Cost { vector_flops: elements.clone() * 56, special_flops: elements * 2, ..Cost::moving(inputs, outputs) }
    }

    fn gradient(&self) -> Gradient {
        Gradient::None
    }

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        super::dropout::by_elements(inputs[0].shape.rank())
    }
}

impl Builder {
    /// `x` rounded to bf16 by a key of this place in the model ([`Builder::random_key`]); see [`StochasticRound`].
    ///
    /// # Errors
    /// When `x` is not f32 with an axis or more.
    pub fn stochastic_round(&mut self, x: Var) -> Result<Var> {
        let key = self.random_key()?;
        let [rows, columns] = super::dropout::places(self, x)?;
        Ok(self.composite(StochasticRound, &[x, key, rows, columns])?[0])
    }
}

pub(super) fn samples(rng: &mut Rng, _dtype: DType) -> Vec<Sample> {
    let mut values: Vec<f64> = rng.normal(DType::F32, &[200]).floats().to_vec();
    values.iter_mut().enumerate().for_each(|(i, x)| *x *= 2f64.powi(i as i32 % 90 - 60));
    // What bf16 has, numbers just beside powers of two, and what is too small.
    let edge = |e: i32| [2f64.powi(e), 2f64.powi(e) * (1.0 - 2f64.powi(-24)), -2f64.powi(e) * (1.0 + 2f64.powi(-23))];
    values.extend([-20, -1, 0, 1, 7, 60].into_iter().flat_map(edge));
    values.extend([0.0, 1.5, -0.007_812_5, 2f64.powi(-110), -2f64.powi(-107), 3.0 * 2f64.powi(-108)]);
    values.truncate(values.len() / 8 * 8);
    let mut samples = Vec::new();
    for shape in [vec![values.len()], vec![8, values.len() / 8], vec![2, 4, values.len() / 8], vec![3, 0]] {
        let count = shape.iter().product::<usize>();
        let (last, leading) = shape.split_last().expect("of an axis or more");
        samples.push(
            Sample::new(StochasticRound)
                .input(Tensor::float(DType::F32, &shape, values[..count].to_vec()).rounded())
                .input(Tensor::int(DType::I64, &[], vec![rng.bits() as i64]))
                .input(rng.integers(DType::I64, leading, 0, 1 << 32))
                .input(rng.integers(DType::I64, &[*last], 0, 1 << 32))
                .judged(Check::Exact),
        );
    }
    samples
}

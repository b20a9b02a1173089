//! The Gaussian error linear unit (Hendrycks and Gimpel 2016, "Gaussian Error Linear Units (GELUs)", section 2), exact
//! and by a hyperbolic tangent.

use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI, SQRT_2};

use super::require::{takes, want_float};
use crate::cost::Cost;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Builder, Composite, Var};
use crate::sample::{Rng, Sample};
use crate::shard::{Placement, ShardingRule};
use crate::types::Type;
use crate::why::Why;

/// `x` times the probability that a standard normal number is below `x`, computed in f32. `x` is of any float type,
/// which the result has too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gelu {
    /// `x / 2 * (1 + erf(x / sqrt(2)))`: what `gelu` means in configurations.
    Erf,
    /// `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`: `gelu_new` and `gelu_pytorch_tanh`.
    Tanh,
}

impl Composite for Gelu {
    fn name(&self) -> &'static str {
        "gelu"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [x] = inputs else { return Err(takes("x", inputs)) };
        want_float("x", x)?;
        Ok(vec![x.clone()])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let dtype = g.ty(inputs[0])?.dtype;
        let x = g.cast(inputs[0], DType::F32)?;
        let constant = |g: &mut Builder, value: f64| g.constant(DType::F32, value);
        let curve = match self {
            Self::Erf => {
                let scale = constant(g, FRAC_1_SQRT_2)?;
                let scaled = g.mul(x, scale)?;
                g.erf(scaled)?
            }
            Self::Tanh => {
                let cubic = constant(g, 0.044_715)?;
                let square = g.mul(x, x)?;
                let bend = g.mul(square, cubic)?;
                let one = constant(g, 1.0)?;
                let bend = g.add(bend, one)?;
                let bent = g.mul(x, bend)?;
                let scale = constant(g, FRAC_2_SQRT_PI / SQRT_2)?;
                let scaled = g.mul(bent, scale)?;
                g.tanh(scaled)?
            }
        };
        let one = constant(g, 1.0)?;
        let twice = g.add(curve, one)?;
        let half = constant(g, 0.5)?;
        let halved = g.mul(x, half)?;
        let y = g.mul(halved, twice)?;
        Ok(vec![g.cast(y, dtype)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let elements = inputs[0].shape.elements();
        let flops = match self {
            Self::Erf => 4,
            Self::Tanh => 8,
        };
        Cost { vector_flops: elements.clone() * flops, special_flops: elements, ..Cost::moving(inputs, outputs) }
    }

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        // Elementwise: any axis, the last first, since that is how a tensor-parallel MLP is cut.
        let axes = (0..inputs[0].shape.rank()).rev();
        axes.map(|dim| ShardingRule { inputs: vec![Placement::shard(dim)], outputs: vec![Placement::shard(dim)] })
            .collect()
    }
}

impl Builder {
    /// The Gaussian error linear unit of `x`; see [`Gelu`].
    ///
    /// # Errors
    /// When `x` is not float.
    pub fn gelu(&mut self, x: Var, form: Gelu) -> Result<Var> {
        Ok(self.composite(form, &[x])?[0])
    }
}

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let shapes: [&[usize]; 6] = [&[0, 8], &[1, 1], &[7], &[5, 64], &[2, 3, 33], &[17, 1000]];
    let both = [Gelu::Erf, Gelu::Tanh];
    both.into_iter().flat_map(|op| shapes.map(|shape| Sample::new(op).input(rng.normal(dtype, shape)))).collect()
}

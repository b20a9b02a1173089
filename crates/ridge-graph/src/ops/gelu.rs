//! The Gaussian error linear unit (Hendrycks and Gimpel 2016, "Gaussian Error Linear Units (GELUs)", section 2), exact
//! and by a hyperbolic tangent.

use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI, SQRT_2};

use super::require::{takes, want_float};
use crate::cost::Cost;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Builder, Composite, CompositeRef, Gradient, Saved, Var};
use crate::sample::{Rng, Sample};
use crate::shard::{Placement, ShardingRule};
use crate::tensor::Tensor;
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

/// Gradient of [`Gelu`]: `dy` times the slope at `x`, computed in f32. `x` and `dy` have one float type, which the result has too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GeluBackward(
    /// The form whose slope it is.
    pub Gelu,
);

/// Of the tanh approximation's argument, `sqrt(2 / pi) * (x + CUBIC x^3)`.
const CUBIC: f64 = 0.044_715;

/// Elementwise: any axis, the last first, since that is how a tensor-parallel MLP is cut.
fn elementwise(inputs: &[Type]) -> Vec<ShardingRule> {
    let axes = (0..inputs[0].shape.rank()).rev().map(Placement::shard);
    axes.map(|cut| ShardingRule { inputs: vec![cut; inputs.len()], outputs: vec![cut] }).collect()
}

impl Gelu {
    /// `erf(x / sqrt(2))` or the hyperbolic tangent of `x`, in f32.
    fn curve(self, g: &mut Builder, x: Var) -> Result<Var> {
        let constant = |g: &mut Builder, value: f64| g.constant(DType::F32, value);
        match self {
            Self::Erf => {
                let scale = constant(g, FRAC_1_SQRT_2)?;
                let scaled = g.mul(x, scale)?;
                g.erf(scaled)
            }
            Self::Tanh => {
                let bend = Self::bend(g, x)?;
                let bent = g.mul(x, bend)?;
                let scale = constant(g, FRAC_2_SQRT_PI / SQRT_2)?;
                let scaled = g.mul(bent, scale)?;
                g.tanh(scaled)
            }
        }
    }

    /// `1 + CUBIC x^2`.
    fn bend(g: &mut Builder, x: Var) -> Result<Var> {
        let cubic = g.constant(DType::F32, CUBIC)?;
        let square = g.mul(x, x)?;
        let bend = g.mul(square, cubic)?;
        let one = g.constant(DType::F32, 1.0)?;
        g.add(bend, one)
    }
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
        let curve = self.curve(g, x)?;
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

    fn gradient(&self) -> Gradient {
        Gradient::Explicit {
            forward: CompositeRef::new(*self),
            saved: vec![Saved::Input(0)],
            backward: CompositeRef::new(GeluBackward(*self)),
            wrt: vec![0],
        }
    }

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        elementwise(inputs)
    }
}

impl Composite for GeluBackward {
    fn name(&self) -> &'static str {
        "gelu_backward"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [x, dy] = inputs else { return Err(takes("x and dy", inputs)) };
        want_float("x", x)?;
        if dy != x {
            return Err(format!("dy must have the type of x, {x}, got {dy}"));
        }
        Ok(vec![x.clone()])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let dtype = g.ty(inputs[0])?.dtype;
        let x = g.cast(inputs[0], DType::F32)?;
        let dy = g.cast(inputs[1], DType::F32)?;
        let constant = |g: &mut Builder, value: f64| g.constant(DType::F32, value);
        let curve = self.0.curve(g, x)?;
        let [one, half] = [constant(g, 1.0)?, constant(g, 0.5)?];
        // By the chain rule through `x / 2 * (1 + curve)`.
        let twice = g.add(curve, one)?;
        let halved = g.mul(x, half)?;
        let along = g.mul(dy, twice)?;
        let along = g.mul(along, half)?;
        let of_curve = g.mul(dy, halved)?;
        let dx = match self.0 {
            Gelu::Erf => {
                let scale = constant(g, FRAC_1_SQRT_2)?;
                let scaled = g.mul(x, scale)?;
                let square = g.mul(scaled, scaled)?;
                let minus = g.neg(square)?;
                let bell = g.exp(minus)?;
                let height = constant(g, FRAC_2_SQRT_PI)?;
                let slope = g.mul(bell, height)?;
                let of_scaled = g.mul(of_curve, slope)?;
                let rise = g.mul(of_scaled, scale)?;
                g.add(along, rise)?
            }
            Gelu::Tanh => {
                let square = g.mul(curve, curve)?;
                let slope = g.sub(one, square)?;
                let of_scaled = g.mul(of_curve, slope)?;
                let scale = constant(g, FRAC_2_SQRT_PI / SQRT_2)?;
                let of_bent = g.mul(of_scaled, scale)?;
                let bend = Gelu::bend(g, x)?;
                let straight = g.mul(of_bent, bend)?;
                let of_bend = g.mul(of_bent, x)?;
                let cubic = constant(g, CUBIC)?;
                let of_square = g.mul(of_bend, cubic)?;
                let cubed = g.mul(of_square, x)?;
                let dx = g.add(along, straight)?;
                let dx = g.add(dx, cubed)?;
                g.add(dx, cubed)?
            }
        };
        Ok(vec![g.cast(dx, dtype)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let elements = inputs[0].shape.elements();
        let (flops, special) = match self.0 {
            Gelu::Erf => (9, 2),
            Gelu::Tanh => (16, 1),
        };
        Cost {
            vector_flops: elements.clone() * flops,
            special_flops: elements * special,
            ..Cost::moving(inputs, outputs)
        }
    }

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        elementwise(inputs)
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

const SHAPES: [&[usize]; 6] = [&[0, 8], &[1, 1], &[7], &[5, 64], &[2, 3, 33], &[17, 1000]];
const FORMS: [Gelu; 2] = [Gelu::Erf, Gelu::Tanh];

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    FORMS.into_iter().flat_map(|op| SHAPES.map(|shape| Sample::new(op).input(rng.normal(dtype, shape)))).collect()
}

pub(super) fn samples_backward(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let mut sample = |op, shape| {
        let sample = Sample::new(GeluBackward(op)).input(rng.normal(dtype, shape));
        sample.input(rng.normal(dtype, shape))
    };
    let mut samples: Vec<Sample> = FORMS.into_iter().flat_map(|op| SHAPES.map(|shape| sample(op, shape))).collect();
    // Where the curve is flat.
    for (op, x) in FORMS.into_iter().flat_map(|op| [-200.0, 200.0].map(|x| (op, x))) {
        let [x, dy] = [x, 1.5].map(|value| Tensor::float(dtype, &[1, 1], vec![value]).rounded());
        samples.push(Sample::new(GeluBackward(op)).input(x).input(dy));
    }
    samples
}

//! Quantisation by the largest magnitude of earlier steps (delayed scaling: NVIDIA, "Transformer Engine", recipe
//! `DelayedScaling`; Micikevicius et al. 2022, "FP8 Formats for Deep Learning", section 3.1): nothing waits for a pass over x.

use super::quantize::{float8, largest_magnitude};
use super::require::{takes, want, want_float};
use crate::cost::Cost;
use crate::dtype::DType;
use crate::error::Result;
use crate::format::{CodeType, Format, FormatRef, ScaleLayout, ScaledFormat};
use crate::graph::{Builder, Composite, CompositeRef, Gradient, Saved, Var};
use crate::prim::Prim;
use crate::sample::{Check, Rng, Sample};
use crate::tensor::Tensor;
use crate::types::Type;
use crate::why::Why;

/// `x` as codes with one scale, which is what [`Quantize`](super::Quantize) would take if the largest magnitude were `amax`,
/// or 1 if `amax` is 0; and the largest magnitude of x.
///
/// `x`: of any float dtype, taken as f32; `amax`: f32 `[1]`. Gives x stored in `format`, and f32 `[1]`. What is larger than
/// `amax` becomes the largest code.
///
/// The cotangent of `amax` is not a derivative but the largest magnitude of x, so that whoever collects gradients collects
/// it too; x has the cotangent of its quantised value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuantizeDelayed {
    /// Codes of 8-bit floats, with [`ScaleLayout::Tensor`].
    pub format: ScaledFormat,
}

/// The gradient of [`QuantizeDelayed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuantizeDelayedBackward;

impl Composite for QuantizeDelayed {
    fn name(&self) -> &'static str {
        "quantize_delayed"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [x, amax] = inputs else { return Err(takes("x and amax", inputs)) };
        want_float("x", x)?;
        want("amax", amax, DType::F32, [1usize])?;
        self.format.check(&x.shape)?;
        if self.format.scales != ScaleLayout::Tensor || self.format.codes == CodeType::Int8 {
            return Err(format!("the format must be 8-bit floats with one scale, not {:?}", self.format));
        }
        Ok(vec![x.clone().stored_as(FormatRef::new(self.format)), amax.clone()])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let ty = g.ty(inputs[0])?.clone();
        let x = g.cast(inputs[0], DType::F32)?;
        let now = largest_magnitude(g, x, 0..ty.shape.rank())?;
        let now = g.reshape(now, [1usize])?;
        let [zero, one] = [0.0, 1.0].map(|value| g.constant(DType::F32, value));
        let largest = g.constant(DType::F32, f64::from(self.format.codes.largest()))?;
        let scale = g.div(inputs[1], largest)?;
        let known = g.gt(inputs[1], zero?)?;
        let scale = g.select(known, scale, one?)?;
        let codes = float8(g, x, scale, self.format.codes)?;
        let prim = Prim::Assemble { format: FormatRef::new(self.format), dtype: ty.dtype, shape: ty.shape };
        Ok(vec![g.prim(prim, &[codes, scale])?[0], now])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        Cost { vector_flops: inputs[0].shape.elements() * 4, ..Cost::moving(inputs, outputs) }
    }

    fn gradient(&self) -> Gradient {
        Gradient::Explicit {
            forward: CompositeRef::new(*self),
            saved: vec![Saved::Output(1)],
            backward: CompositeRef::new(QuantizeDelayedBackward),
            wrt: vec![0, 1],
        }
    }
}

impl Composite for QuantizeDelayedBackward {
    fn name(&self) -> &'static str {
        "quantize_delayed_backward"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [amax, dx, of_amax] = inputs else { return Err(takes("amax and two cotangents", inputs)) };
        want_float("the cotangent of x", dx)?;
        want("amax", amax, DType::F32, [1usize])?;
        want("the cotangent of amax", of_amax, DType::F32, [1usize])?;
        Ok(vec![dx.clone(), amax.clone()])
    }

    fn decompose(&self, _g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        Ok(vec![inputs[1], inputs[0]])
    }

    fn is_shorthand(&self) -> bool {
        true
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        Cost::moving(inputs, outputs)
    }
}

impl Builder {
    /// `x` as codes with a scale for values up to `amax`, and the largest magnitude of `x`; see [`QuantizeDelayed`].
    ///
    /// # Errors
    /// When `x` is not a plain float tensor, `amax` not f32 `[1]`, or `format` not one of 8-bit floats with one scale.
    pub fn quantize_delayed(&mut self, x: Var, amax: Var, format: ScaledFormat) -> Result<[Var; 2]> {
        let made = self.composite(QuantizeDelayed { format }, &[x, amax])?;
        Ok([made[0], made[1]])
    }
}

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let mut samples = Vec::new();
    for format in [ScaledFormat::F8_TENSOR, ScaledFormat::F8_GRADIENT] {
        for (shape, amax) in [(&[0, 64][..], 1.0), (&[7], 0.0), (&[5, 300], 4.0), (&[2, 3, 64], 0.5), (&[9, 512], 1e3)]
        {
            let sample = Sample::new(QuantizeDelayed { format }).input(rng.normal(dtype, shape));
            samples.push(sample.input(Tensor::float(DType::F32, &[1], vec![amax])).judged(Check::Codes));
        }
    }
    samples
}

pub(super) fn samples_backward(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let of = Sample::new(QuantizeDelayedBackward).input(rng.normal(DType::F32, &[1]));
    vec![of.input(rng.normal(dtype, &[3, 40])).input(rng.normal(DType::F32, &[1]))]
}

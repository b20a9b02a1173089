//! Linears of training whose products take 8-bit floats: x and weights are quantised ahead of them, and the cotangents of
//! their outputs in the gradient.

use super::linear::{Linear, LinearGroup};
use super::linear_gradient::{LinearWeightGradient, SumRows};
use super::require::{flat, takes, want};
use crate::cost::Cost;
use crate::dtype::DType;
use crate::error::{GraphError, Result};
use crate::format::{CodeType, FormatRef, ScaleLayout, ScaledFormat};
use crate::graph::{Builder, Composite, CompositeRef, Gradient, Saved, Var};
use crate::poly::Poly;
use crate::prim::Prim;
use crate::sample::{Rng, Sample};
use crate::shape::Shape;
use crate::types::Type;
use crate::why::Why;
use crate::work::Work;

/// Which values of a linear share a scale, and where it is from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fp8Scaling {
    /// All of x, of a weight, of a cotangent, by the largest magnitude (torchao, recipe `tensorwise`).
    Tensor,
    /// The same, by the largest magnitude of earlier steps (Transformer Engine, recipe `DelayedScaling`).
    Delayed,
    /// 128 elements of a row of x and of cotangents, and 128 x 128 of a weight, all E4M3 (DeepSeek-AI 2024, "DeepSeek-V3",
    /// section 3.3.2). The gradients of weights are products of the plain values.
    Blocks,
}

impl Fp8Scaling {
    /// The formats of x and of weights.
    pub fn formats(self) -> [ScaledFormat; 2] {
        match self {
            Self::Tensor | Self::Delayed => [ScaledFormat::F8_TENSOR; 2],
            Self::Blocks => {
                [ScaleLayout::Group(128), ScaleLayout::Block].map(|s| ScaledFormat::new(CodeType::F8E4M3, s))
            }
        }
    }
}

/// `x w^T + bias` of one x and `count` weights. Each product is summed in f32 at least and rounded to the dtype of x, and its
/// bias added to that.
///
/// x: `[.., K]` in the first of [`formats`](Fp8Scaling::formats); with [`Fp8Scaling::Blocks`] then the plain x, for the
/// gradient; then `count` weights `[N, K]` in the second; if `biases` as many biases `[N]`, plain; with
/// [`Fp8Scaling::Delayed`] then f32 `[count]`, the largest magnitudes that cotangents are scaled for, whose cotangents are
/// those that cotangents have ([`QuantizeDelayed`](super::QuantizeDelayed)). Gives `count` plain `[.., N]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fp8Linears {
    /// Number of linears.
    pub count: usize,
    /// Has each a bias?
    pub biases: bool,
    /// How values are scaled.
    pub scaling: Fp8Scaling,
    /// The codes of cotangents; E4M3 with blocks.
    pub gradients: CodeType,
}

/// The gradient of [`Fp8Linears`]: its saved inputs (x in its format, or plain with blocks), then cotangents, to cotangents of
/// x, weights, biases and largest magnitudes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fp8LinearsBackward(pub Fp8Linears);

impl Fp8Linears {
    fn group(self) -> LinearGroup {
        LinearGroup { count: self.count, biases: self.biases }
    }

    /// Inputs ahead of the weights.
    fn first(self) -> usize {
        if self.scaling == Fp8Scaling::Blocks { 2 } else { 1 }
    }

    fn parameters(self) -> usize {
        self.count * if self.biases { 2 } else { 1 }
    }

    fn is_delayed(self) -> bool {
        self.scaling == Fp8Scaling::Delayed
    }

    /// The format of cotangents.
    fn gradient_format(self) -> ScaledFormat {
        match self.scaling {
            Fp8Scaling::Blocks => self.scaling.formats()[0],
            Fp8Scaling::Tensor | Fp8Scaling::Delayed => ScaledFormat::new(self.gradients, ScaleLayout::Tensor),
        }
    }

    /// Requires these types of x, weights and biases, given `[x, w.., bias..]`.
    fn check(self, operands: &[Type]) -> Result<Vec<Type>, Why> {
        let formats = self.scaling.formats();
        for (i, ty) in operands[..=self.count].iter().enumerate() {
            let wanted = formats[usize::from(i > 0)];
            if ty.format.as_ref().and_then(|f| f.downcast::<ScaledFormat>()) != Some(&wanted) {
                let of = if i == 0 { "x".to_owned() } else { format!("w{i}") };
                return Err(format!("{of} must be stored as {wanted:?}, got {ty}"));
            }
        }
        self.group().infer(operands)
    }
}

impl Composite for Fp8Linears {
    fn name(&self) -> &'static str {
        "fp8_linears"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let wanted = self.first() + self.parameters() + usize::from(self.is_delayed());
        if self.count == 0 || inputs.len() != wanted {
            return Err(takes(&format!("{wanted} inputs for {} linears", self.count), inputs));
        }
        if self.gradients == CodeType::Int8 || self.scaling == Fp8Scaling::Blocks && self.gradients != CodeType::F8E4M3
        {
            return Err(format!("cotangents cannot be {:?} with {:?}", self.gradients, self.scaling));
        }
        if self.first() == 2 {
            want("plain x", &inputs[1], inputs[0].dtype, inputs[0].shape.clone())?;
        }
        if self.is_delayed() {
            want("amax", &inputs[wanted - 1], DType::F32, [self.count])?;
        }
        let parameters = &inputs[self.first()..self.first() + self.parameters()];
        self.check(&[&inputs[..1], parameters].concat())
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let (weights, others) = inputs[self.first()..].split_at(self.count);
        (0..self.count)
            .map(|i| {
                let y = g.composite(Linear { bias: false }, &[inputs[0], weights[i]])?[0];
                if !self.biases {
                    return Ok(y);
                }
                let bias = g.cast(others[i], g.ty(y)?.dtype)?;
                g.add(y, bias)
            })
            .collect()
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let operands = [&inputs[..1], &inputs[self.first()..self.first() + self.parameters()]].concat();
        self.group().cost(&operands, outputs)
    }

    fn work(&self) -> Work {
        Work::Product { weight: self.first() }
    }

    fn gradient(&self) -> Gradient {
        let all = self.first() + self.parameters() + usize::from(self.is_delayed());
        // The x that gradients of weights multiply: the last ahead of the weights.
        let saved = (self.first() - 1..all).map(Saved::Input).collect();
        let wrt = (0..all).filter(|i| *i == 0 || *i >= self.first()).collect();
        Gradient::Explicit {
            forward: CompositeRef::new(*self),
            saved,
            backward: CompositeRef::new(Fp8LinearsBackward(*self)),
            wrt,
        }
    }
}

/// A matrix, or rows of any number of axes, of codes with scales, with its two axes exchanged.
fn turned(g: &mut Builder, x: Var) -> Result<Var> {
    let ty = g.ty(x)?.clone();
    let (leading, last) = (&ty.shape.0[..ty.shape.rank() - 1], ty.shape.last());
    let rows = flat(leading).map_err(|why| GraphError::usage(g.scope(), why))?;
    let [codes, scales] = [0, 1].map(|i| g.prim(Prim::Component(i), &[x]));
    let codes = g.reshape(codes?[0], Shape(vec![rows.clone(), last.clone()]))?;
    let codes = g.transpose(codes, &[1, 0])?;
    let mut scales = scales?[0];
    if g.ty(scales)?.shape.rank() == 2 {
        scales = g.transpose(scales, &[1, 0])?;
    }
    let format = ty.format.clone().ok_or_else(|| GraphError::usage(g.scope(), "a value without a format"))?;
    let prim = Prim::Assemble { format, dtype: ty.dtype, shape: Shape(vec![last, rows]) };
    Ok(g.prim(prim, &[codes, scales])?[0])
}

impl Composite for Fp8LinearsBackward {
    fn name(&self) -> &'static str {
        "fp8_linears_backward"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let of = self.0;
        let (n, saved) = (of.count, 1 + of.parameters() + usize::from(of.is_delayed()));
        if inputs.len() != saved + n {
            return Err(takes(&format!("{saved} saved values and {n} cotangents"), inputs));
        }
        let mut operands = inputs[..=of.parameters()].to_vec();
        operands[0].format = Some(FormatRef::new(of.scaling.formats()[0]));
        for (i, (dy, y)) in inputs[saved..].iter().zip(of.check(&operands)?).enumerate() {
            want(&format!("dy{}", i + 1), dy, y.dtype, y.shape)?;
        }
        Ok(inputs[..saved].iter().map(Type::plain).collect())
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let of = self.0;
        let (n, format) = (of.count, of.gradient_format());
        let (saved, cotangents) = inputs.split_at(inputs.len() - n);
        let (x, weights) = (saved[0], &saved[1..=n]);
        let (mut quantised, mut magnitudes) = (Vec::with_capacity(n), Vec::new());
        for (i, dy) in cotangents.iter().enumerate() {
            quantised.push(if of.is_delayed() {
                let amax = g.slice(saved[saved.len() - 1], 0, i, 1usize)?;
                let [codes, now] = g.quantize_delayed(*dy, amax, format)?;
                magnitudes.push(now);
                codes
            } else {
                g.quantize(*dy, format)?
            });
        }
        let mut dx = None;
        for (dy, w) in quantised.iter().zip(weights) {
            let w = turned(g, *w)?;
            let part = g.linear(*dy, w)?;
            dx = Some(match dx {
                Some(sum) => g.add(sum, part)?,
                None => part,
            });
        }
        let mut all: Vec<Var> = dx.into_iter().collect();
        let x_by_depth = if of.scaling == Fp8Scaling::Blocks { None } else { Some(turned(g, x)?) };
        for ((codes, dy), w) in quantised.iter().zip(cotangents).zip(weights) {
            let dtype = g.ty(*w)?.dtype;
            all.push(if let Some(x) = x_by_depth {
                let dy = turned(g, *codes)?;
                let dw = g.linear(dy, x)?;
                g.cast(dw, dtype)?
            } else {
                g.composite(LinearWeightGradient { dtype }, &[*dy, x])?[0]
            });
        }
        if of.biases {
            for (bias, dy) in saved[1 + n..].iter().zip(cotangents) {
                let dtype = g.ty(*bias)?.dtype;
                all.extend(g.composite(SumRows { dtype }, &[*dy])?);
            }
        }
        if of.is_delayed() {
            all.push(if n == 1 { magnitudes[0] } else { g.concat(&magnitudes, 0)? });
        }
        Ok(all)
    }

    fn is_shorthand(&self) -> bool {
        true
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let mut cost = Cost::moving(inputs, outputs);
        for w in &inputs[1..=self.0.count] {
            cost.matrix_flops += &(&(inputs[0].shape.elements() * 4) * &Poly::from(&w.shape.0[0]));
        }
        cost
    }

    fn work(&self) -> Work {
        Work::Product { weight: 1 }
    }
}

/// An instance: N of each linear in `outs`.
struct Case {
    scaling: Fp8Scaling,
    gradients: CodeType,
    leading: &'static [usize],
    k: usize,
    outs: &'static [usize],
    biases: bool,
}

const CASES: [Case; 6] = {
    use CodeType::{F8E4M3, F8E5M2};
    use Fp8Scaling::{Blocks, Delayed, Tensor};
    const fn of(
        (scaling, gradients): (Fp8Scaling, CodeType),
        leading: &'static [usize],
        k: usize,
        outs: &'static [usize],
        biases: bool,
    ) -> Case {
        Case { scaling, gradients, leading, k, outs, biases }
    }
    [
        of((Tensor, F8E5M2), &[16], 32, &[16, 48], false),
        of((Tensor, F8E4M3), &[2, 9], 48, &[16], true),
        of((Delayed, F8E5M2), &[19], 16, &[32, 16, 16], true),
        of((Delayed, F8E4M3), &[1], 32, &[16], false),
        of((Blocks, F8E4M3), &[7], 144, &[160, 32], true),
        of((Blocks, F8E4M3), &[3, 5], 16, &[48], false),
    ]
};

fn rows(leading: &[usize], last: usize) -> Vec<usize> {
    [leading, &[last]].concat()
}

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let sample = |Case { scaling, gradients, leading, k, outs, biases }: Case| {
        let op = Fp8Linears { count: outs.len(), biases, scaling, gradients };
        let x = rng.normal(dtype, &rows(leading, k));
        let formats = scaling.formats().map(FormatRef::new);
        let mut sample = Sample::new(op).stored(&x, &formats[0]);
        if scaling == Fp8Scaling::Blocks {
            sample = sample.input(x);
        }
        sample = outs.iter().fold(sample, |sample, n| sample.stored(&rng.normal(dtype, &[*n, k]), &formats[1]));
        sample = outs.iter().filter(|_| biases).fold(sample, |sample, n| sample.input(rng.normal(dtype, &[*n])));
        if scaling == Fp8Scaling::Delayed { sample.input(rng.normal(DType::F32, &[outs.len()])) } else { sample }
    };
    CASES.into_iter().map(sample).collect()
}

pub(super) fn samples_backward(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let sample = |Case { scaling, gradients, leading, k, outs, biases }: Case| {
        let of = Fp8Linears { count: outs.len(), biases, scaling, gradients };
        let x = rng.normal(dtype, &rows(leading, k));
        let formats = scaling.formats().map(FormatRef::new);
        let sample = Sample::new(Fp8LinearsBackward(of));
        let mut sample = if scaling == Fp8Scaling::Blocks { sample.input(x) } else { sample.stored(&x, &formats[0]) };
        sample = outs.iter().fold(sample, |sample, n| sample.stored(&rng.normal(dtype, &[*n, k]), &formats[1]));
        sample = outs.iter().filter(|_| biases).fold(sample, |sample, n| sample.input(rng.normal(DType::F32, &[*n])));
        if scaling == Fp8Scaling::Delayed {
            sample = sample.input(rng.normal(DType::F32, &[outs.len()]));
        }
        outs.iter().fold(sample, |sample, n| sample.input(rng.normal(dtype, &rows(leading, *n))))
    };
    CASES.into_iter().map(sample).collect()
}

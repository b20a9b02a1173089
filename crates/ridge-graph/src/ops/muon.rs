//! One step of Muon (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"), as `torch.optim.Muon`
//! has it, in f32 throughout.

use super::optimizer::{sample_rate, sum_of_squares, want_alike, want_decays, want_scalars, with_decay};
use super::require::takes;
use crate::cost::Cost;
use crate::dtype::DType;
use crate::dyn_eq::eq_by_bits;
use crate::error::Result;
use crate::graph::{Builder, Composite, Gradient, Var};
use crate::sample::{Rng, Sample};
use crate::shape::Shape;
use crate::shard::ShardingRule;
use crate::types::Type;
use crate::why::Why;

/// The next parameter and momentum of a matrix `[r, c]`:
///
/// ```text
/// m' = momentum m + (1 - momentum) grad
/// u = (1 - momentum) grad + momentum m' by Nesterov, or m'
/// x = u / max(norm(u), 1e-7), then five times x = a x + (b y + c y y) x with y = x x^T, on the shorter side
/// param' = param (1 - lr weight_decay) - lr scale x
/// ```
///
/// with `(a, b, c) = (3.4445, -4.775, 2.0315)`. `scale` is `0.2 sqrt(max(r, c))`, which gives updates the root mean square of
/// AdamW's (Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.2), so that both take one learning rate.
///
/// `param`, `grad`, `m`: f32 `[r, c]`; `lr`: f32 scalar; gives `(param', m')`.
#[derive(Clone, Copy, Debug)]
pub struct Muon {
    /// Decay of the momentum.
    pub momentum: f64,
    /// Whether the step looks ahead by the momentum.
    pub nesterov: bool,
    /// Decay of the parameter, times the learning rate.
    pub weight_decay: f64,
}

eq_by_bits!(Muon { momentum, weight_decay; nesterov });

/// Coefficients of the quintic iteration.
const COEFFICIENTS: [f64; 3] = [3.4445, -4.775, 2.0315];
const ITERATIONS: usize = 5;
const EPS: f64 = 1e-7;

impl Muon {
    fn scale(shape: &Shape) -> f64 {
        let longest = shape.0.iter().filter_map(crate::dim::Dim::as_const).max().unwrap_or(0);
        0.2 * (longest as f64).sqrt()
    }

    /// A matrix with the singular vectors of `x` and singular values near 1.
    fn orthogonal(g: &mut Builder, x: Var) -> Result<Var> {
        let shape = g.ty(x)?.shape.clone();
        let is_tall = shape.0[0].as_const() > shape.0[1].as_const();
        let mut x = if is_tall { g.transpose(x, &[1, 0])? } else { x };
        let norm = sum_of_squares(g, x)?;
        let norm = g.sqrt(norm)?;
        let eps = g.constant(DType::F32, EPS)?;
        let norm = g.max(norm, eps)?;
        x = g.div(x, norm)?;
        let mut coefficients = [x; 3];
        for (var, value) in coefficients.iter_mut().zip(COEFFICIENTS) {
            *var = g.constant(DType::F32, value)?;
        }
        let [a, b, c] = coefficients;
        for _ in 0..ITERATIONS {
            let y = g.matmul(x, x, false, true, DType::F32)?;
            let square = g.matmul(y, y, false, false, DType::F32)?;
            let (first, second) = (g.mul(y, b)?, g.mul(square, c)?);
            let both = g.add(first, second)?;
            let turned = g.matmul(both, x, false, false, DType::F32)?;
            let kept = g.mul(x, a)?;
            x = g.add(kept, turned)?;
        }
        if is_tall { g.transpose(x, &[1, 0]) } else { Ok(x) }
    }
}

impl Composite for Muon {
    fn name(&self) -> &'static str {
        "muon"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [param, _, m, _] = inputs else { return Err(takes("param, grad, m and lr", inputs)) };
        if param.shape.as_const().is_none_or(|shape| shape.len() != 2) {
            return Err(format!("param must be a matrix of constant extents, got {param}"));
        }
        want_alike(&["param", "grad", "m"], inputs)?;
        want_scalars(&["lr"], &inputs[3..])?;
        want_decays(&[("momentum", self.momentum)])?;
        Ok(vec![param.clone(), m.clone()])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let [param, grad, m, lr] = inputs else { unreachable!("infer has counted the inputs") };
        let m = super::optimizer::decayed(g, self.momentum, *m, *grad)?;
        let mut update = m;
        if self.nesterov {
            update = super::optimizer::decayed(g, self.momentum, m, *grad)?;
        }
        let update = Self::orthogonal(g, update)?;
        let scale = g.constant(DType::F32, Self::scale(&g.ty(*param)?.shape.clone()))?;
        let rate = g.mul(*lr, scale)?;
        let change = g.mul(update, rate)?;
        let kept = with_decay(g, *param, *lr, self.weight_decay)?;
        Ok(vec![g.sub(kept, change)?, m])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let [r, c] = [0, 1].map(|axis| inputs[0].shape.0[axis].as_const().unwrap_or(0) as i128);
        let (short, long) = (r.min(c), r.max(c));
        // Of an iteration: x x^T and its product with x, and the square of the former.
        let matrix = ITERATIONS as i128 * 2 * short * short * (2 * long + short);
        let vector = inputs[0].shape.elements() * (8 + 3 * ITERATIONS as i128);
        Cost { matrix_flops: matrix.into(), vector_flops: vector, ..Cost::moving(inputs, outputs) }
    }

    fn gradient(&self) -> Gradient {
        Gradient::None
    }

    fn shard(&self, _inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        // Every element of the update depends on the whole matrix.
        Vec::new()
    }
}

pub(super) fn samples(rng: &mut Rng, _dtype: DType) -> Vec<Sample> {
    let usual = Muon { momentum: 0.95, nesterov: true, weight_decay: 0.1 };
    let plain = Muon { momentum: 0.9, nesterov: false, weight_decay: 0.0 };
    let cases: [(Muon, [usize; 2]); 5] =
        [(usual, [1, 1]), (plain, [7, 3]), (usual, [16, 48]), (usual, [33, 20]), (plain, [32, 32])];
    let mut sample = |(op, shape): (Muon, [usize; 2])| {
        let tensors = [0; 3].map(|_| rng.normal(DType::F32, &shape));
        tensors.into_iter().fold(Sample::new(op), Sample::input).input(sample_rate())
    };
    cases.into_iter().map(&mut sample).collect()
}

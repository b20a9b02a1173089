//! What layers are made of: projections, norms, the halves of a layer, MLPs and rotations.

use ridge_graph::ops::{Gelu, Rope, Yarn, linear_scaling, llama3_scaling, ntk_theta, rope_frequencies, yarn_scaling};
use ridge_graph::{Builder, DType, Result as GraphResult, Shape, Type, Var};

use crate::config::{RopeConfig, RopeScaling};

/// The weight `name` within the scope, as plain f32.
pub(super) fn weight<const N: usize>(g: &mut Builder, name: &str, shape: [usize; N]) -> GraphResult<Var> {
    g.weight(name, Type::tensor(DType::F32, Shape::new(shape)))
}

/// Elements of the last axis of `x`, which is a number wherever a weight meets it.
fn width(g: &Builder, x: Var) -> GraphResult<usize> {
    Ok(g.ty(x)?.shape.last().as_const().unwrap_or_default())
}

/// `x w^T`, and a bias if there is one, with the weights of scope `name`; gives `[.., to]`.
pub(super) fn linear(g: &mut Builder, name: &str, x: Var, to: usize, bias: bool) -> GraphResult<Var> {
    let from = width(g, x)?;
    g.scoped(name, |g| {
        let w = weight(g, "weight", [to, from])?;
        let b = if bias { Some(weight(g, "bias", [to])?) } else { None };
        g.linear_bias(x, w, b)
    })
}

/// A norm over the last axis, with its epsilon.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum NormKind {
    /// By the root mean square, times the weight.
    Rms(f64),
    /// By the root mean square, times one more than the weight, as Gemma has it.
    RmsPlusOne(f64),
    /// By mean and variance, with a bias.
    Layer(f64),
    /// By mean and variance, without a bias.
    LayerUnbiased(f64),
}

impl NormKind {
    /// The norm of `x` with the weights of scope `name`.
    pub(super) fn apply(self, g: &mut Builder, name: &str, x: Var) -> GraphResult<Var> {
        let hidden = width(g, x)?;
        g.scoped(name, |g| {
            let w = weight(g, "weight", [hidden])?;
            match self {
                Self::Rms(eps) => g.rms_norm(x, w, eps),
                Self::RmsPlusOne(eps) => {
                    let w = g.cast(w, DType::F32)?;
                    let one = g.constant(DType::F32, 1.0)?;
                    let w = g.add(w, one)?;
                    g.rms_norm(x, w, eps)
                }
                Self::Layer(eps) => {
                    let bias = weight(g, "bias", [hidden])?;
                    g.layer_norm(x, w, bias, eps)
                }
                Self::LayerUnbiased(eps) => {
                    let zero = g.constant(DType::F32, 0.0)?;
                    let bias = g.broadcast(zero, Shape::new([hidden]))?;
                    g.layer_norm(x, w, bias, eps)
                }
            }
        })
    }
}

/// `x` divided by the root mean square of its last axis.
pub(super) fn unit_rms(g: &mut Builder, x: Var, eps: f64) -> GraphResult<Var> {
    let width = width(g, x)?;
    let one = g.constant(DType::F32, 1.0)?;
    let ones = g.broadcast(one, Shape::new([width]))?;
    g.rms_norm(x, ones, eps)
}

/// Layer norms of the heads of `x`, `[tokens, heads, dim]`, each with the weights of its own head: `[heads, dim]` in scope
/// `name`, without biases.
pub(super) fn norm_per_head(g: &mut Builder, name: &str, x: Var, eps: f64) -> GraphResult<Var> {
    let [heads, dim] = [1, 2].map(|axis| g.ty(x).map(|ty| ty.shape.0[axis].as_const().unwrap_or_default()));
    let (heads, dim) = (heads?, dim?);
    g.scoped(name, |g| {
        let w = weight(g, "weight", [heads, dim])?;
        let dtype = g.ty(x)?.dtype;
        let (one, zero) = (g.constant(DType::F32, 1.0)?, g.constant(DType::F32, 0.0)?);
        let (one, zero) = (g.broadcast(one, Shape::new([dim]))?, g.broadcast(zero, Shape::new([dim]))?);
        let x = g.cast(x, DType::F32)?;
        let y = g.layer_norm(x, one, zero, eps)?;
        let w = g.cast(w, DType::F32)?;
        let w = g.reshape(w, Shape::new([1, heads, dim]))?;
        let y = g.mul(y, w)?;
        g.cast(y, dtype)
    })
}

/// What the score of a key is less by for each position that it is back, f32 `[heads]` (Press et al. 2022, "Train Short, Test
/// Long", section 3): powers of two that end with `-most` where the number of heads is one, and of the next series those in
/// between where it is not.
pub(super) fn slopes(g: &mut Builder, heads: usize, most: f64) -> GraphResult<Var> {
    let whole = if heads.is_power_of_two() { heads } else { heads.next_power_of_two() / 2 };
    let slope = |nth: usize| match nth.checked_sub(whole) {
        None => (nth + 1) as f64 / whole as f64,
        Some(extra) => (2 * extra + 1) as f64 / (2 * whole) as f64,
    };
    let slopes: Vec<f64> = (0..heads).map(|nth| (-most * slope(nth)).exp2()).collect();
    g.table(DType::F32, &slopes)
}

/// `x` within `-limit..=limit`, if there is one.
pub(super) fn clipped(g: &mut Builder, x: Var, limit: Option<f64>) -> GraphResult<Var> {
    let Some(limit) = limit else { return Ok(x) };
    let (least, most) = (g.constant_like(x, -limit)?, g.constant_like(x, limit)?);
    let x = g.max(x, least)?;
    g.min(x, most)
}

/// `x` times a number.
pub(super) fn scaled(g: &mut Builder, x: Var, factor: f64) -> GraphResult<Var> {
    if factor == 1.0 {
        return Ok(x);
    }
    let factor = g.constant_like(x, factor)?;
    g.mul(x, factor)
}

/// Half a layer: `x + half(x)`, with a norm of scope `before` on the way in and one of scope `after` on the way out,
/// where they are named.
pub(super) struct ResidualHalf<'a> {
    pub(super) norm: NormKind,
    pub(super) before: Option<&'a str>,
    pub(super) after: Option<&'a str>,
}

impl<'a> ResidualHalf<'a> {
    /// With a norm on the way in.
    pub(super) fn before(norm: NormKind, before: &'a str) -> Self {
        Self { norm, before: Some(before), after: None }
    }

    /// `x + half(x)`, `half` being built in scope `name`.
    pub(super) fn add(
        &self,
        g: &mut Builder,
        x: Var,
        name: &str,
        half: impl FnOnce(&mut Builder, Var) -> GraphResult<Var>,
    ) -> GraphResult<Var> {
        let mut h = x;
        if let Some(before) = self.before {
            h = self.norm.apply(g, before, h)?;
        }
        h = g.scoped(name, |g| half(g, h))?;
        if let Some(after) = self.after {
            h = self.norm.apply(g, after, h)?;
        }
        g.add(x, h)
    }
}

/// What the gate of an MLP goes through.
#[derive(Clone, Copy, Debug)]
pub(super) enum MlpGate {
    Silu,
    Gelu(Gelu),
}

/// `down(gate(x) * up(x))`, with the names of Llama.
pub(super) fn gated_mlp(g: &mut Builder, x: Var, inner: usize, gate: MlpGate, bias: bool) -> GraphResult<Var> {
    let hidden = width(g, x)?;
    let opened = linear(g, "gate_proj", x, inner, bias)?;
    let up = linear(g, "up_proj", x, inner, bias)?;
    let h = open(g, opened, up, gate)?;
    linear(g, "down_proj", h, hidden, bias)
}

/// `gate(opened) * up`.
pub(super) fn open(g: &mut Builder, opened: Var, up: Var, gate: MlpGate) -> GraphResult<Var> {
    match gate {
        MlpGate::Silu => g.swiglu(opened, up),
        MlpGate::Gelu(form) => {
            let opened = g.gelu(opened, form)?;
            g.mul(opened, up)
        }
    }
}

/// `relu(x)^2`.
pub(super) fn squared(g: &mut Builder, x: Var) -> GraphResult<Var> {
    let zero = g.constant_like(x, 0.0)?;
    let open = g.max(x, zero)?;
    g.mul(open, open)
}

/// `down(relu(up(x))^2)`.
pub(super) fn squared_mlp(g: &mut Builder, x: Var, inner: usize) -> GraphResult<Var> {
    let hidden = width(g, x)?;
    let h = linear(g, "up_proj", x, inner, false)?;
    let h = squared(g, h)?;
    linear(g, "down_proj", h, hidden, false)
}

/// `out(gelu(in(x)))`, with weights of these names.
pub(super) fn mlp(
    g: &mut Builder,
    x: Var,
    [into, out]: [&str; 2],
    inner: usize,
    form: Gelu,
    bias: bool,
) -> GraphResult<Var> {
    let hidden = width(g, x)?;
    let h = linear(g, into, x, inner, bias)?;
    let h = g.gelu(h, form)?;
    linear(g, out, h, hidden, bias)
}

/// `cap * tanh(x / cap)`: `x` where it is small, and never beyond `cap`.
pub(super) fn soft_cap(g: &mut Builder, x: Var, cap: f64) -> GraphResult<Var> {
    let inverse = g.constant_like(x, 1.0 / cap)?;
    let scaled = g.mul(x, inverse)?;
    let bent = g.tanh(scaled)?;
    let cap = g.constant_like(x, cap)?;
    g.mul(bent, cap)
}

/// `x`, `[tokens, heads, dim]`, with the first `rotated` elements of each head in another order: even ones, then odd ones. So
/// a rotation that turns neighbours becomes one that turns halves. Scores are as they were, since queries and keys are
/// reordered alike.
pub(super) fn deinterleaved(g: &mut Builder, x: Var, rotated: usize) -> GraphResult<Var> {
    let shape = g.ty(x)?.shape.clone();
    let (tokens, heads) = (shape.0[0].clone(), shape.0[1].clone());
    let dim = shape.last().as_const().unwrap_or_default();
    let part = g.slice(x, 2, 0, rotated)?;
    let pairs = g.reshape(part, Shape(vec![tokens.clone(), heads.clone(), (rotated / 2).into(), 2.into()]))?;
    let sides = g.transpose(pairs, &[0, 1, 3, 2])?;
    let turned = g.reshape(sides, Shape(vec![tokens, heads, rotated.into()]))?;
    if rotated == dim {
        return Ok(turned);
    }
    let rest = g.slice(x, 2, rotated, dim - rotated)?;
    g.concat(&[turned, rest], 2)
}

/// The rotation that `config` says, for contexts of at most `context` tokens.
///
/// Two scalings depend on how long the context is. Published code looks at the longest position of a step, so there a
/// token's keys depend on what came later in the same step. Here they depend on the longest context that the model is
/// built for, whatever a step holds: equal to the published code on a whole sequence of that length, and for LongRoPE
/// on any sequence on the same side of the original context.
pub(super) fn rope(config: &RopeConfig, context: usize) -> Rope {
    let (theta, dim) = (config.theta, config.rotary_dim);
    let plain = rope_frequencies(theta, dim);
    let positions = |n: usize| n as f64;
    let (inv_freq, scale) = match &config.scaling {
        None => (plain, 1.0),
        Some(RopeScaling::Linear { factor }) => (linear_scaling(&plain, *factor), 1.0),
        Some(RopeScaling::Dynamic { factor, original_max_position_embeddings: original }) => {
            let theta = ntk_theta(theta, dim, *factor, positions(context), positions(*original));
            (rope_frequencies(theta, dim), 1.0)
        }
        Some(RopeScaling::Yarn {
            factor,
            original_max_position_embeddings,
            beta_fast,
            beta_slow,
            truncate,
            attention_factor,
        }) => {
            let yarn = Yarn {
                factor: *factor,
                original_max_position: positions(*original_max_position_embeddings),
                beta_fast: *beta_fast,
                beta_slow: *beta_slow,
                truncate: *truncate,
            };
            (yarn_scaling(theta, dim, &yarn), *attention_factor)
        }
        Some(RopeScaling::LongRope {
            short_factor,
            long_factor,
            original_max_position_embeddings,
            attention_factor,
        }) => {
            let factors = if context > *original_max_position_embeddings { long_factor } else { short_factor };
            (plain.iter().zip(factors).map(|(freq, factor)| freq / factor).collect(), *attention_factor)
        }
        Some(RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings }) => {
            let original = positions(*original_max_position_embeddings);
            (llama3_scaling(&plain, *factor, *low_freq_factor, *high_freq_factor, original), 1.0)
        }
    };
    Rope { inv_freq: inv_freq.into(), scale }
}

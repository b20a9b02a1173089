//! Layers that keep a state of a fixed size: the mixers of state-space models and
//! gated linear attention, made of a short convolution, a linear recurrence and a gated norm.

use ridge_graph::{Builder, DType, Dim, Result as GraphResult, Shape, Type, Var};

use super::blocks::{linear, scaled, weight};
use super::decoder::DecoderLayer;
use super::layer_states::{CONV_STATE, LayerStates, RECURRENT_STATE};
use crate::fixed::fixed_lines;
use crate::model::{BuildOptions, symbols};

/// `x`, `[tokens, width]`, as `[tokens, heads, width / heads]`.
pub(super) fn heads_of(g: &mut Builder, x: Var, heads: usize) -> GraphResult<Var> {
    let width = g.ty(x)?.shape.last().as_const().unwrap_or_default();
    g.reshape(x, [Dim::sym(symbols::TOKENS), heads.into(), (width / heads).into()])
}

/// `x`, `[tokens, ..]`, as `[tokens, width]`.
pub(super) fn flat(g: &mut Builder, x: Var) -> GraphResult<Var> {
    let width: usize = g.ty(x)?.shape.0[1..].iter().filter_map(Dim::as_const).product();
    g.reshape(x, [Dim::sym(symbols::TOKENS), width.into()])
}

/// Neighbouring parts of these widths of the columns of `x`, `[tokens, width]`.
pub(super) fn columns<const N: usize>(g: &mut Builder, x: Var, widths: [usize; N]) -> GraphResult<[Var; N]> {
    let mut parts = [x; N];
    let mut from = 0;
    for (part, width) in parts.iter_mut().zip(widths) {
        *part = g.slice(x, 1, from, width)?;
        from += width;
    }
    Ok(parts)
}

/// `x * sigmoid(x)`.
pub(super) fn silu(g: &mut Builder, x: Var) -> GraphResult<Var> {
    let open = g.sigmoid(x)?;
    g.mul(x, open)
}

/// The f32 value of the weight `name`.
pub(super) fn f32_weight<const N: usize>(g: &mut Builder, name: &str, shape: [usize; N]) -> GraphResult<Var> {
    let w = weight(g, name, shape)?;
    g.cast(w, DType::F32)
}

/// Rows of a step: `seq_ids` and `query_start`.
fn rows(g: &mut Builder) -> GraphResult<[Var; 2]> {
    let ids = g.step_input("seq_ids", Type::tensor(DType::I32, [Dim::sym(symbols::TOKENS)]))?;
    let starts = g.step_input("query_start", Type::tensor(DType::I32, [Dim::sym(symbols::SEQS) + 1]))?;
    Ok([ids, starts])
}

/// What follows a short convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConvActivation {
    None,
    Silu,
}

/// The causal convolution of `x`, `[tokens, channels]`, with the weights of scope `name` and what follows it: f32.
pub(super) fn short_conv(
    g: &mut Builder,
    at: &DecoderLayer<'_>,
    name: &str,
    x: Var,
    taps: usize,
    bias: bool,
    activation: ConvActivation,
) -> GraphResult<Var> {
    let channels = g.ty(x)?.shape.last().as_const().unwrap_or_default();
    let (w, bias) = g.scoped(name, |g| -> GraphResult<_> {
        let w = weight(g, "weight", [channels, 1, taps])?;
        let bias = if bias { Some(weight(g, "bias", [channels])?) } else { None };
        Ok((g.reshape(w, Shape::new([channels, taps]))?, bias))
    })?;
    convolved(g, at, x, w, bias, activation)
}

/// `x`, `[tokens, channels]`, of the token before; zeros where a sequence begins. Its state is in scope `name`.
pub(super) fn previous(g: &mut Builder, at: &DecoderLayer<'_>, name: &str, x: Var) -> GraphResult<Var> {
    let ty = g.ty(x)?.clone();
    let channels = ty.shape.last().as_const().unwrap_or_default();
    let taps = g.table(ty.dtype, &[1.0, 0.0])?;
    let taps = g.reshape(taps, Shape::new([1, 2]))?;
    let taps = g.broadcast(taps, Shape::new([channels, 2]))?;
    let y = g.scoped(name, |g| convolved(g, at, x, taps, None, ConvActivation::None))?;
    g.cast(y, ty.dtype)
}

/// The causal convolution of `x`, `[tokens, channels]`, with `w`, `[channels, taps]`, and what follows it: f32. What it keeps is a
/// state of the scope.
fn convolved(
    g: &mut Builder,
    at: &DecoderLayer<'_>,
    x: Var,
    w: Var,
    bias: Option<Var>,
    activation: ConvActivation,
) -> GraphResult<Var> {
    if !at.keeps_states() {
        let mut y = g.ragged_conv1d(x, w, at.positions())?;
        if let Some(bias) = bias {
            let bias = g.cast(bias, DType::F32)?;
            y = g.add(y, bias)?;
        }
        return match activation {
            ConvActivation::None => Ok(y),
            ConvActivation::Silu => silu(g, y),
        };
    }
    let dtype = g.ty(x)?.dtype;
    let [channels, taps] = [0, 1].map(|axis| g.ty(w).map(|ty| ty.shape.0[axis].as_const().unwrap_or_default()));
    let [table, lines] = fixed_lines(g, CONV_STATE, dtype, channels? * (taps? - 1))?;
    let [ids, starts] = rows(g)?;
    let silu = activation == ConvActivation::Silu;
    let [y, _] = g.stateful_conv1d([x, w, table, lines], [ids, starts], bias, silu)?;
    Ok(y)
}

/// The recurrence of f32 `q`, `k`, `v` and `log_decay` with the layer's state; see [`ridge_graph::Prim::LinearRecurrence`].
pub(super) fn recurrence(
    g: &mut Builder,
    at: &DecoderLayer<'_>,
    [q, k, v, log_decay]: [Var; 4],
    low_rank: Option<[Var; 2]>,
) -> GraphResult<Var> {
    if !at.keeps_states() {
        return whole_recurrence(g, at.positions(), [q, k, v, log_decay], low_rank);
    }
    let [table, lines] = state_lines(g, k, v)?;
    let [_, starts] = rows(g)?;
    let [y, _] = g.stateful_recurrence([q, k, v, log_decay, table, lines, starts], low_rank)?;
    Ok(y)
}

/// The recurrence of `q`, `k` and `v` in the dtype of activations, whose keys decay alike, with the layer's state: `y` in that dtype; see
/// [`ridge_graph::ops::GatedRecurrence`].
pub(super) fn gated_recurrence(
    g: &mut Builder,
    at: &DecoderLayer<'_>,
    [q, k, v, weight, log_decay]: [Var; 5],
    delta: bool,
) -> GraphResult<Var> {
    if !at.keeps_states() {
        let dtype = g.ty(v)?.dtype;
        let (operands, low_rank) = g.gated_operands([q, k, v, weight, log_decay], delta)?;
        let y = whole_recurrence(g, at.positions(), operands, low_rank)?;
        return g.cast(y, dtype);
    }
    let [table, lines] = state_lines(g, k, v)?;
    let [_, starts] = rows(g)?;
    let [y, _] = g.gated_recurrence([q, k, v, weight, log_decay, table, lines, starts], delta)?;
    Ok(y)
}

/// The table of the layer's states, for keys `k` and values `v`, and the lines that rows read and write.
fn state_lines(g: &mut Builder, k: Var, v: Var) -> GraphResult<[Var; 2]> {
    let extent = |g: &Builder, x: Var, axis: usize| g.ty(x).map(|ty| ty.shape.0[axis].as_const().unwrap_or_default());
    let (heads, key, value) = (extent(g, v, 1)?, extent(g, k, 2)?, extent(g, v, 2)?);
    fixed_lines(g, RECURRENT_STATE, DType::F32, heads * key * value)
}

/// The recurrence over whole sequences, packed one behind another, as one whose state is lost where a sequence begins.
fn whole_recurrence(
    g: &mut Builder,
    positions: Var,
    [q, k, v, log_decay]: [Var; 4],
    low_rank: Option<[Var; 2]>,
) -> GraphResult<Var> {
    let tokens = Dim::sym(symbols::TOKENS);
    let first = g.reshape(positions, [tokens.clone(), 1.into(), 1.into()])?;
    let zero = g.constant(DType::I32, 0.0)?;
    let first = g.eq(first, zero)?;
    let lost = g.constant(DType::F32, LOST)?;
    let nothing = g.constant(DType::F32, 0.0)?;
    let log_decay = g.select(first, lost, log_decay)?;
    let low_rank = match low_rank {
        Some([erase, write]) => Some([g.select(first, nothing, erase)?, write]),
        None => None,
    };
    let shape = |g: &Builder, x: Var| g.ty(x).map(|ty| ty.shape.0.clone());
    let (of_v, of_k) = (shape(g, v)?, shape(g, k)?);
    let state = Shape(vec![1.into(), of_v[1].clone(), of_k[2].clone(), of_v[2].clone()]);
    let state = g.broadcast(nothing, state)?;
    let end = g.dim_value(&tokens)?;
    let end = g.cast(end, DType::I32)?;
    let starts = [zero, end].map(|bound| g.reshape(bound, Shape::new([1])));
    let [begin, end] = starts;
    let starts = g.concat(&[begin?, end?], 0)?;
    g.linear_recurrence([q, k, v, log_decay, state, starts], low_rank).map(|[y, _]| y)
}

/// The logarithm of a decay that leaves nothing of a state: its exponential is 0 in f32 and f64.
const LOST: f64 = -1e4;

/// How the output of a recurrence is opened by a gate, `silu(gate)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum GatedNorm {
    /// Opened, without a norm.
    None,
    /// Normalised by the root mean square of each group, then opened.
    Before { groups: usize, eps: f64 },
    /// Opened, then normalised by the root mean square of each group.
    After { groups: usize, eps: f64 },
}

impl GatedNorm {
    /// The f32 `y`, `[tokens, width]`, opened by `gate`, with a norm's weight of scope `norm`.
    pub(super) fn apply(self, g: &mut Builder, y: Var, gate: Var) -> GraphResult<Var> {
        let gate = g.cast(gate, DType::F32)?;
        match self {
            Self::None => g.swiglu(gate, y),
            Self::Before { groups, eps } => {
                let y = grouped_norm(g, y, groups, eps)?;
                g.swiglu(gate, y)
            }
            Self::After { groups, eps } => {
                let y = g.swiglu(gate, y)?;
                grouped_norm(g, y, groups, eps)
            }
        }
    }
}

/// Root mean square norm of each of `groups` parts of the last axis, with a weight for all of it.
fn grouped_norm(g: &mut Builder, x: Var, groups: usize, eps: f64) -> GraphResult<Var> {
    let width = g.ty(x)?.shape.last().as_const().unwrap_or_default();
    g.scoped("norm", |g| {
        let w = f32_weight(g, "weight", [width])?;
        if groups == 1 {
            return g.rms_norm(x, w, eps);
        }
        let one = g.constant(DType::F32, 1.0)?;
        let ones = g.broadcast(one, Shape::new([width / groups]))?;
        let x = heads_of(g, x, groups)?;
        let x = g.rms_norm(x, ones, eps)?;
        let x = flat(g, x)?;
        g.mul(x, w)
    })
}

/// Norms of the heads of f32 `y`, `[tokens, heads, width]`, by mean and variance, with weights and biases of scope `name` for all
/// of `[tokens, heads * width]`.
pub(super) fn grouped_layer_norm(g: &mut Builder, name: &str, y: Var, eps: f64) -> GraphResult<Var> {
    let [heads, width] = [1, 2].map(|axis| g.ty(y).map(|ty| ty.shape.0[axis].as_const().unwrap_or_default()));
    let (heads, width) = (heads?, width?);
    let fill = |g: &mut Builder, value: f64| {
        let value = g.constant(DType::F32, value)?;
        g.broadcast(value, Shape::new([width]))
    };
    let (ones, zeros) = (fill(g, 1.0)?, fill(g, 0.0)?);
    let y = g.layer_norm(y, ones, zeros, eps)?;
    let y = flat(g, y)?;
    g.scoped(name, |g| {
        let w = f32_weight(g, "weight", [heads * width])?;
        let b = f32_weight(g, "bias", [heads * width])?;
        let y = g.mul(y, w)?;
        g.add(y, b)
    })
}

/// The sizes of a Mamba-2 mixer (Dao and Gu 2024, "Transformers are SSMs", section 7).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mamba2Mixer {
    /// Heads.
    pub heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Groups of heads that share their input and output vectors.
    pub groups: usize,
    /// Elements of the state of a channel.
    pub state: usize,
    /// Tokens that the convolution sees.
    pub kernel: usize,
    /// Time steps are this long at least.
    pub least_step: f64,
    /// Has the convolution a bias?
    pub conv_bias: bool,
    /// Have the projections in and out?
    pub proj_bias: bool,
    /// Factors of what is projected: the gate, the input, its vectors in and out of the state, and the time steps.
    pub factors: [f64; 5],
}

impl Mamba2Mixer {
    /// Channels of the output.
    pub(super) fn inner(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Channels of the convolution.
    pub(super) fn channels(&self) -> usize {
        self.inner() + 2 * self.groups * self.state
    }

    /// What is projected, times its factors.
    fn weighed(&self, g: &mut Builder, all: Var) -> GraphResult<Var> {
        if self.factors == [1.0; 5] {
            return Ok(all);
        }
        let (dtype, of_groups) = (g.ty(all)?.dtype, self.groups * self.state);
        let widths = [self.inner(), self.inner(), of_groups, of_groups, self.heads];
        let mut parts = Vec::with_capacity(widths.len());
        for (factor, width) in self.factors.into_iter().zip(widths) {
            let factor = g.constant(dtype, factor)?;
            parts.push(g.broadcast(factor, Shape::new([width]))?);
        }
        let factors = g.concat(&parts, 0)?;
        g.mul(all, factors)
    }

    /// What a layer with the mixer in scope `scope` keeps.
    pub(super) fn states(&self, scope: &str, options: &BuildOptions) -> LayerStates {
        let states = LayerStates::none().with_conv(scope, self.channels(), self.kernel, options);
        states.with_recurrence(scope, [self.heads, self.state, self.head_dim])
    }

    /// The mixer's output of `x`, `[tokens, hidden]`, with the weights of the scope.
    pub(super) fn apply(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>, norm: GatedNorm) -> GraphResult<Var> {
        let ty = g.ty(x)?.clone();
        let hidden = ty.shape.last().as_const().unwrap_or_default();
        let widths = [self.inner(), self.channels(), self.heads];
        let all = linear(g, "in_proj", x, widths.iter().sum(), self.proj_bias)?;
        let all = self.weighed(g, all)?;
        let [gate, xbc, dt] = columns(g, all, widths)?;
        let xbc = short_conv(g, at, "conv1d", xbc, self.kernel, self.conv_bias, ConvActivation::Silu)?;
        // Rounded as the published kernels round the convolution's output.
        let xbc = g.cast(xbc, ty.dtype)?;
        let of_groups = self.groups * self.state;
        let [x, b, c] = columns(g, xbc, [self.inner(), of_groups, of_groups])?;
        let x = heads_of(g, x, self.heads)?;
        let (b, c) = (heads_of(g, b, self.groups)?, heads_of(g, c, self.groups)?);

        let bias = f32_weight(g, "dt_bias", [self.heads])?;
        let dt = g.cast(dt, DType::F32)?;
        let dt = g.add(dt, bias)?;
        let mut dt = g.softplus(dt)?;
        if self.least_step > 0.0 {
            let least = g.constant(DType::F32, self.least_step)?;
            dt = g.max(dt, least)?;
        }
        let decay = decay(g, dt, [self.heads])?;
        let (dt, decay) = (heads_of(g, dt, self.heads)?, heads_of(g, decay, self.heads)?);
        let y = gated_recurrence(g, at, [c, b, x, dt, decay], false)?;
        let skip = f32_weight(g, "D", [self.heads])?;
        let skip = g.reshape(skip, Shape::new([self.heads, 1]))?;
        let (x, y) = (g.cast(x, DType::F32)?, g.cast(y, DType::F32)?);
        let skip = g.mul(x, skip)?;
        let y = g.add(y, skip)?;
        let y = flat(g, y)?;
        let y = norm.apply(g, y, gate)?;
        let y = g.cast(y, ty.dtype)?;
        linear(g, "out_proj", y, hidden, self.proj_bias)
    }
}

/// The logarithm of a decay: `-exp(A_log) * step`, of the f32 time steps.
pub(super) fn decay<const N: usize>(g: &mut Builder, step: Var, shape: [usize; N]) -> GraphResult<Var> {
    let a = f32_weight(g, "A_log", shape)?;
    let a = g.exp(a)?;
    let a = scaled(g, a, -1.0)?;
    g.mul(step, a)
}

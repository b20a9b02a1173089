//! RWKV-4 (Peng et al. 2023, "RWKV: Reinventing RNNs for the Transformer Era", section 3). Each layer's mixer of tokens is an average
//! of values whose weights decay at a rate of each channel, opened by a gate; see [`ridge_graph::ops::Wkv`].

use ridge_graph::{Builder, DType, Dim, Result as GraphResult, Shape, Type, Var};

use super::blocks::{clipped, linear, scaled, squared};
use super::decoder::{DecoderLayer, LayerInputs, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::layer_states::{LayerStates, RECURRENT_STATE};
use super::recurrent::{f32_weight, previous, recurrence};
use super::rwkv::{Rwkv, RwkvNames, SHIFT, TOKENS, change, share};
use super::tensors::{Cut, LLAMA_TENSORS, TensorName, TensorTable};
use crate::config::{DECODER_KEYS, DecoderConfig, DecoderKeys, Fields, MAX_HIDDEN, MAX_LAYERS};
use crate::error::Result;
use crate::fixed::{read_fixed, write_fixed};
use crate::model::{BuildOptions, symbols};

/// Every size of an RWKV-4 model.
#[derive(Clone, Debug, PartialEq)]
pub struct Rwkv4Config {
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// Channels of the average.
    pub inner: usize,
    /// The residual stream is halved behind every so manieth layer, and what layers add to it is as small: halves are exact, and
    /// 16-bit floats do not overflow.
    pub rescale_every: Option<usize>,
}

/// The values by which a layer knows the factors of what it adds, and of what it leaves.
const ADDED: &str = "added_scale";
const LEFT: &str = "left_scale";
/// Sums that a channel keeps of a sequence.
const SUMS: usize = 4;

const NAMES: RwkvNames = RwkvNames {
    layers: "rwkv.blocks",
    mixers: ["attention", "feed_forward"],
    norms: ["ln1", "ln2"],
    first_norm: "pre_ln",
};

impl Rwkv4Config {
    fn read(f: &mut Fields<'_>) -> Result<Self> {
        const KEYS: DecoderKeys = DecoderKeys {
            intermediate_factor: Some(4),
            num_attention_heads: "",
            num_key_value_heads: "",
            max_position_embeddings: "context_length",
            positions: Some(1024),
            norm_eps: "layer_norm_epsilon",
            default_eps: Some(1e-5),
            ..DECODER_KEYS
        };
        let decoder = DecoderConfig::read(f, &KEYS)?;
        let rescale_every = match f.count("rescale_every")? {
            Some(0) => None,
            Some(every) => Some(usize::try_from(every).unwrap_or(MAX_LAYERS)),
            None => Some(6),
        };
        let inner = f.optional_size("attention_hidden_size", MAX_HIDDEN)?.unwrap_or(decoder.hidden_size);
        Ok(Self { decoder, inner, rescale_every })
    }
}

/// A share of `x`, and the rest of the token before, which is `x + delta`; `name` is the weight of the share of `x`.
fn mixed(g: &mut Builder, name: &str, x: Var, delta: Var) -> GraphResult<Var> {
    let share = share(g, name, x, 3)?;
    let one = g.constant_like(share, 1.0)?;
    let rest = g.sub(one, share)?;
    let rest = g.mul(delta, rest)?;
    g.add(x, rest)
}

deref_to_decoder!(Rwkv4Config);

/// How it is registered.
pub(super) static RWKV4: FamilyDefinition = FamilyDefinition {
    name: "rwkv4",
    model_type: "rwkv",
    class: Some("RwkvForCausalLM"),
    harmless: &[],
    read: ReadConfig::Decoder(|f| Ok(Box::new(Rwkv4Config::read(f)?))),
    tensors: TensorTable {
        embedding: TensorName { scope: "rwkv.embeddings", cut: None, gguf: None },
        layers: NAMES.layers,
        attention: TOKENS,
        norm: TensorName { scope: "rwkv.ln_out", cut: None, gguf: None },
        head: TensorName::planned("head", Cut::Vocabulary),
        layer: &[],
        ..LLAMA_TENSORS
    },
    gguf: None,
};

impl Rwkv for Rwkv4Config {
    fn names(&self) -> &'static RwkvNames {
        &NAMES
    }

    fn norms(&self) -> [bool; 2] {
        [true, true]
    }

    fn mixer_states(&self, _options: &BuildOptions) -> LayerStates {
        LayerStates::none().with_recurrence(TOKENS, [1, SUMS, self.inner])
    }

    fn set_values(&self, g: &mut Builder, index: usize, inputs: &mut LayerInputs) -> GraphResult<()> {
        let Some(every) = self.rescale_every else { return Ok(()) };
        let added = 0.5f64.powi((index / every) as i32);
        let left = if (index + 1).is_multiple_of(every) { 0.5 } else { 1.0 };
        for (name, factor) in [(ADDED, added), (LEFT, left)] {
            let factor = g.constant(DType::F32, factor)?;
            inputs.set(name, factor);
        }
        Ok(())
    }

    fn mix_tokens(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let (hidden, inner, dtype) = (self.hidden_size, self.inner, g.ty(x)?.dtype);
        let delta = change(g, x, at)?;
        let mut projected = [x; 3];
        for (name, y) in ["key", "value", "receptance"].into_iter().zip(&mut projected) {
            let mixed = mixed(g, &format!("time_mix_{name}"), x, delta)?;
            *y = linear(g, name, mixed, inner, false)?;
        }
        let [k, v, open] = projected;
        let open = g.sigmoid(open)?;
        let (k, v) = (g.cast(k, DType::F32)?, g.cast(v, DType::F32)?);
        let rate = f32_weight(g, "time_decay", [inner])?;
        let rate = g.exp(rate)?;
        let decay = scaled(g, rate, -1.0)?;
        let bonus = f32_weight(g, "time_first", [inner])?;
        let y = average(g, at, [k, v, decay, bonus])?;
        let y = g.cast(y, dtype)?;
        let y = g.mul(open, y)?;
        let y = linear(g, "output", y, hidden, false)?;
        self.times(g, y, at, ADDED)
    }

    fn mix_channels(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let delta = change(g, x, at)?;
        let k = mixed(g, "time_mix_key", x, delta)?;
        let open = mixed(g, "time_mix_receptance", x, delta)?;
        let h = linear(g, "key", k, self.intermediate_size, false)?;
        let h = squared(g, h)?;
        let h = linear(g, "value", h, self.hidden_size, false)?;
        let open = linear(g, "receptance", open, self.hidden_size, false)?;
        let open = g.sigmoid(open)?;
        let y = g.mul(open, h)?;
        self.times(g, y, at, ADDED)
    }

    fn mixer_tensors(&self) -> [&'static [&'static str]; 2] {
        [
            &[
                "time_decay",
                "time_first",
                "time_mix_key",
                "time_mix_value",
                "time_mix_receptance",
                "key.weight",
                "value.weight",
                "receptance.weight",
                "output.weight",
            ],
            &["time_mix_key", "time_mix_receptance", "key.weight", "value.weight", "receptance.weight"],
        ]
    }

    fn leave_layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        self.times(g, x, at, LEFT)
    }
}

impl Rwkv4Config {
    /// `x` times the value `name`, if the stream is rescaled.
    fn times(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>, name: &'static str) -> GraphResult<Var> {
        if self.rescale_every.is_none() {
            return Ok(x);
        }
        let dtype = g.ty(x)?.dtype;
        let factor = at.value(g, name)?;
        let factor = g.cast(factor, dtype)?;
        g.mul(x, factor)
    }
}

/// The average of f32 `k`, `v`, `w` and `u` with the layer's state; see [`ridge_graph::ops::Wkv`].
fn average(g: &mut Builder, at: &DecoderLayer<'_>, [k, v, w, u]: [Var; 4]) -> GraphResult<Var> {
    if !at.keeps_states() {
        return whole_average(g, at, [k, v, w, u]);
    }
    let (seqs, channels) = (Dim::sym(symbols::SEQS), g.ty(k)?.shape.last());
    let width = SUMS * channels.as_const().unwrap_or_default();
    let ids = g.step_input("seq_ids", Type::tensor(DType::I32, [Dim::sym(symbols::TOKENS)]))?;
    let starts = g.step_input("query_start", Type::tensor(DType::I32, [seqs.clone() + 1]))?;
    let fixed = read_fixed(g, RECURRENT_STATE, DType::F32, width)?;
    let before = g.reshape(fixed.before, Shape(vec![seqs.clone(), SUMS.into(), channels]))?;
    let [y, after] = g.wkv([k, v, w, u, before], [ids, starts])?;
    let after = g.reshape(after, Shape(vec![seqs, width.into()]))?;
    write_fixed(g, &fixed, after)?;
    Ok(y)
}

/// The share of exponents by whose sum [`whole_average`] estimates the largest: small enough that exponentials of large keys fit f32,
/// and large enough that the sum of all tokens is not far above the largest.
const SHARE: f64 = 0.25;

/// Such a share of a key is taken for this at most. With it keys may be from -320 to 320 in texts of a few thousand tokens: the sum of
/// e^80 over more than some 6000 of them is beyond f32. Larger keys are averaged too where few of them are large and values are small.
const MOST: f64 = 80.0;

/// The least sum of exponentials of which a logarithm is taken.
const LEAST: f64 = 1e-36;

/// As [`average`], over whole sequences: a linear recurrence whose numerator and denominator are divided by `e^m`, with `m` near the
/// logarithm of the largest term. They are divided by the same and decay by the difference of `m` from token to token, so the
/// average does not depend on `m`, which is a whole number without a gradient.
fn whole_average(g: &mut Builder, at: &DecoderLayer<'_>, [k, v, w, u]: [Var; 4]) -> GraphResult<Var> {
    let (tokens, channels) = (Dim::sym(symbols::TOKENS), g.ty(k)?.shape.last());
    let of_heads = |g: &mut Builder, x| g.reshape(x, [tokens.clone(), channels.clone(), 1.into()]);
    let one = g.constant(DType::F32, 1.0)?;
    let ones = g.broadcast(one, [tokens.clone(), channels.clone(), 1.into()])?;

    // The logarithm of the sum of all terms to the power of SHARE, by that: at least the largest exponent.
    let (small_k, small_w) = (scaled(g, k, SHARE)?, scaled(g, w, SHARE)?);
    let small_w = g.broadcast(small_w, [tokens.clone(), channels.clone()])?;
    let small_k = clipped(g, small_k, Some(MOST))?;
    let terms = g.exp(small_k)?;
    let [terms, small_w] = [of_heads(g, terms)?, of_heads(g, small_w)?];
    let sum = recurrence(g, at, [ones, terms, ones, small_w], None)?;
    let sum = g.reshape(sum, [tokens.clone(), channels.clone()])?;
    let least = g.constant(DType::F32, LEAST)?;
    let sum = g.max(sum, least)?;
    let logarithm = g.log(sum)?;
    let logarithm = scaled(g, logarithm, 1.0 / SHARE)?;
    let m = whole_number(g, logarithm)?;
    let m_before = previous(g, at, SHIFT, m)?;

    let decay = g.sub(m_before, m)?;
    let decay = g.add(decay, w)?;
    let term = g.sub(k, m)?;
    let term = g.exp(term)?;
    let [term, decay, v_of_heads] = [of_heads(g, term)?, of_heads(g, decay)?, of_heads(g, v)?];
    let both = g.concat(&[v_of_heads, ones], 2)?;
    let sums = recurrence(g, at, [ones, term, both, decay], None)?;
    let mut before = [sums; 2];
    for (nth, sum) in before.iter_mut().enumerate() {
        let of_token = g.slice(sums, 2, nth, 1)?;
        let of_token = g.reshape(of_token, [tokens.clone(), channels.clone()])?;
        *sum = previous(g, at, SHIFT, of_token)?;
    }

    // A sequence's first token stands alone.
    let own = g.add(k, u)?;
    let zero = g.constant(DType::I32, 0.0)?;
    let first = g.eq(at.positions(), zero)?;
    let first = g.reshape(first, [tokens, 1.into()])?;
    let largest = g.max(m_before, own)?;
    let largest = g.select(first, own, largest)?;
    let largest = whole_number(g, largest)?;
    let m_before = g.select(first, largest, m_before)?;
    let kept = g.sub(m_before, largest)?;
    let kept = g.exp(kept)?;
    let own = g.sub(own, largest)?;
    let own = g.exp(own)?;
    let own_with = g.mul(own, v)?;
    let mut sums = [own_with, own];
    for (sum, before) in sums.iter_mut().zip(before) {
        let before = g.mul(before, kept)?;
        *sum = g.add(before, *sum)?;
    }
    g.div(sums[0], sums[1])
}

/// f32 `x` without its fraction, and without a gradient.
fn whole_number(g: &mut Builder, x: Var) -> GraphResult<Var> {
    let whole = g.cast(x, DType::I32)?;
    g.cast(whole, DType::F32)
}

//! RWKV-6 (Peng et al. 2024, "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence", section 4), in the form that the
//! flash-linear-attention library publishes. Each layer has a mixer of tokens, a linear recurrence that decays by channel, and
//! one of channels; both see the token before.

use ridge_graph::{Builder, DType, Dim, Result as GraphResult, Shape, Var};
use serde_json::Value as Json;

use super::blocks::{linear, squared, weight};
use super::decoder::{DecoderLayer, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::experts::MAX_SIZE;
use super::layer_states::LayerStates;
use super::linear_attention::{LINEAR_HARMLESS, head_width};
use super::recurrent::{columns, grouped_layer_norm, heads_of, previous, recurrence, silu};
use super::rwkv::{FLA_TENSORS, Rwkv, TOKENS, change};
use crate::config::{DECODER_KEYS, DecoderConfig, DecoderKeys, Fields};
use crate::error::Result;
use crate::model::{BuildOptions, symbols};

/// Every size and switch of an RWKV-6 model.
#[derive(Clone, Debug, PartialEq)]
pub struct Rwkv6Config {
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// Width of a receptance or key of a head.
    pub key: usize,
    /// Width of a value of a head.
    pub value: usize,
    /// Rank of each projection that says how much of the token before is mixed in.
    pub mix_rank: usize,
    /// Rank of the projection of decays.
    pub decay_rank: usize,
    /// Is there a norm behind the embedding?
    pub norm_first: bool,
    /// Do norms outside the mixers have biases?
    pub norm_bias: bool,
}

/// Scope of the state of what enters the recurrence late.
const DELAY: &str = "delay";

/// What the recurrence takes of a token: receptance, decay, key, value and gate.
const MIXED: usize = 5;

impl Rwkv6Config {
    fn read(f: &mut Fields<'_>) -> Result<Self> {
        const KEYS: DecoderKeys = DecoderKeys {
            // The library computes it from a ratio where the file has none.
            intermediate_factor: Some(4),
            num_attention_heads: "num_heads",
            num_key_value_heads: "",
            positions: Some(2048),
            norm_eps: "norm_eps",
            default_eps: Some(1e-5),
            ..DECODER_KEYS
        };
        f.must_be("attn", Json::Null)?;
        f.must_be("hidden_act", "sqrelu")?;
        f.harmless(&["fuse_norm"]);
        let given = f.raw("intermediate_size").is_some();
        let mut decoder = DecoderConfig::read(f, &KEYS)?;
        let ratio = f.optional_positive("hidden_ratio")?.unwrap_or(3.5);
        if !given {
            decoder.intermediate_size = ((decoder.hidden_size as f64 * ratio) as usize).next_multiple_of(32);
        }
        Ok(Self {
            key: head_width(f, &decoder, "expand_k", 0.5)?,
            value: head_width(f, &decoder, "expand_v", 1.0)?,
            mix_rank: f.optional_size("proj_low_rank_dim", MAX_SIZE)?.unwrap_or(32),
            decay_rank: f.optional_size("gate_low_rank_dim", MAX_SIZE)?.unwrap_or(64),
            norm_first: f.optional("norm_first")?.unwrap_or(true),
            norm_bias: f.optional("norm_bias")?.unwrap_or(true),
            decoder,
        })
    }

    /// Widths of keys, values and decays of all heads.
    fn widths(&self) -> [usize; 3] {
        [self.key, self.value, self.key].map(|width| self.num_attention_heads * width)
    }

    /// `x` with a share of the token before, which is `x + delta`, in each channel: one for each of what the recurrence takes.
    fn shares(&self, g: &mut Builder, x: Var, delta: Var) -> GraphResult<[Var; MIXED]> {
        let (rank, hidden, dtype) = (self.mix_rank, self.hidden_size, g.ty(x)?.dtype);
        let tokens = Dim::sym(symbols::TOKENS);
        let low = shifted_linear(g, "x_proj.0", x, delta, MIXED * rank)?;
        let low = g.tanh(low)?;
        // The five projections are the columns of one matrix: each row has its own columns and zeros elsewhere.
        let own: Vec<f64> = (0..MIXED * MIXED * rank)
            .map(|i| f64::from(u8::from(i / (MIXED * rank) == i % (MIXED * rank) / rank)))
            .collect();
        let own = g.table(dtype, &own)?;
        let own = g.reshape(own, Shape::new([1, MIXED, MIXED * rank]))?;
        let low = g.reshape(low, Shape(vec![tokens.clone(), 1.into(), (MIXED * rank).into()]))?;
        let low = g.mul(low, own)?;
        let shares = linear(g, "x_proj.2", low, hidden, false)?;
        let bias = weight(g, "x_bias", [MIXED, hidden])?;
        let bias = g.cast(bias, dtype)?;
        let bias = g.reshape(bias, Shape::new([1, MIXED, hidden]))?;
        let shares = g.add(shares, bias)?;
        let mut mixed = [x; MIXED];
        for (nth, y) in mixed.iter_mut().enumerate() {
            let share = g.slice(shares, 1, nth, 1usize)?;
            let share = g.reshape(share, Shape(vec![tokens.clone(), hidden.into()]))?;
            let share = g.mul(delta, share)?;
            *y = g.add(x, share)?;
        }
        Ok(mixed)
    }
}

/// The projection of scope `name` of `x` with a learned share of the token before.
fn shifted_linear(g: &mut Builder, name: &str, x: Var, delta: Var, to: usize) -> GraphResult<Var> {
    let ty = g.ty(x)?.clone();
    g.scoped(name, |g| {
        let share = weight(g, "mu", [ty.shape.last().as_const().unwrap_or_default()])?;
        let share = g.cast(share, ty.dtype)?;
        let share = g.mul(delta, share)?;
        let x = g.add(x, share)?;
        linear(g, "linear", x, to, false)
    })
}

deref_to_decoder!(Rwkv6Config);

/// How it is registered.
pub(super) static RWKV6: FamilyDefinition = FamilyDefinition {
    name: "rwkv6",
    model_type: "rwkv6",
    class: Some("RWKV6ForCausalLM"),
    harmless: &[LINEAR_HARMLESS],
    read: ReadConfig::Decoder(|f| Ok(Box::new(Rwkv6Config::read(f)?))),
    tensors: FLA_TENSORS,
    gguf: None,
};

impl Rwkv for Rwkv6Config {
    fn norms(&self) -> [bool; 2] {
        [self.norm_first, self.norm_bias]
    }

    fn mixer_states(&self, options: &BuildOptions) -> LayerStates {
        LayerStates::none()
            .with_conv(&format!("{TOKENS}.{DELAY}"), self.widths().iter().sum(), 2, options)
            .with_recurrence(TOKENS, [self.num_attention_heads, self.key, self.value])
    }

    fn mix_tokens(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let (heads, hidden, dtype) = (self.num_attention_heads, self.hidden_size, g.ty(x)?.dtype);
        let delta = change(g, x, at)?;
        let [r, w, k, v, gate] = self.shares(g, x, delta)?;
        let [keys, values, decays] = self.widths();
        let r = linear(g, "r_proj.linear", r, keys, false)?;
        let w = linear(g, "w_proj.linear.lora.0", w, self.decay_rank, false)?;
        let w = g.tanh(w)?;
        let w = linear(g, "w_proj.linear.lora.2", w, decays, true)?;
        let k = linear(g, "k_proj.linear", k, keys, false)?;
        let v = linear(g, "v_proj.linear", v, values, false)?;
        let gate = linear(g, "g_proj.linear", gate, values, false)?;

        // A token sees the state that the one before left, so keys, values and decays enter the recurrence one token late.
        let entering = g.concat(&[k, v, w], 1)?;
        let entering = previous(g, at, DELAY, entering)?;
        let entering = columns(g, entering, self.widths())?;
        let wide = |g: &mut Builder, x: Var| {
            let x = g.cast(x, DType::F32)?;
            heads_of(g, x, heads)
        };
        let [late_k, late_v, late_w] = entering.map(|x| wide(g, x));
        let (r, k, v) = (wide(g, r)?, wide(g, k)?, wide(g, v)?);
        let rate = g.exp(late_w?)?;
        let decay = g.neg(rate)?;
        let y = recurrence(g, at, [r, late_k?, late_v?, decay], None)?;
        // And its own key and value with a factor for each channel.
        let bonus = weight(g, "bonus", [heads, self.key])?;
        let bonus = g.cast(bonus, DType::F32)?;
        let bonus = g.reshape(bonus, Shape::new([1, heads, self.key]))?;
        let own = g.mul(k, bonus)?;
        let own = g.mul(own, r)?;
        let own = g.reduce_sum(own, 2)?;
        let own = g.mul(v, own)?;
        let y = g.add(y, own)?;

        let y = grouped_layer_norm(g, "g_norm", y, self.norm_eps)?;
        let gate = g.cast(gate, DType::F32)?;
        let open = silu(g, gate)?;
        let y = g.mul(y, open)?;
        let y = g.cast(y, dtype)?;
        linear(g, "o_proj", y, hidden, false)
    }

    fn mix_channels(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let delta = change(g, x, at)?;
        let h = shifted_linear(g, "key", x, delta, self.intermediate_size)?;
        let h = squared(g, h)?;
        let h = linear(g, "value", h, self.hidden_size, false)?;
        let open = shifted_linear(g, "receptance", x, delta, self.hidden_size)?;
        let open = g.sigmoid(open)?;
        g.mul(open, h)
    }

    fn mixer_tensors(&self) -> [&'static [&'static str]; 2] {
        [
            &[
                "x_proj.0.mu",
                "x_proj.0.linear.weight",
                "x_proj.2.weight",
                "x_bias",
                "r_proj.linear.weight",
                "w_proj.linear.lora.0.weight",
                "w_proj.linear.lora.2.weight",
                "w_proj.linear.lora.2.bias",
                "k_proj.linear.weight",
                "v_proj.linear.weight",
                "g_proj.linear.weight",
                "bonus",
                "g_norm.weight",
                "g_norm.bias",
                "o_proj.weight",
            ],
            &["key.mu", "key.linear.weight", "value.weight", "receptance.mu", "receptance.linear.weight"],
        ]
    }
}

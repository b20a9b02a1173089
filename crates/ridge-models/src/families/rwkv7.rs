//! RWKV-7 (Peng et al. 2025, "RWKV-7 Goose with Expressive Dynamic State Evolution", section 4), in the form that the
//! flash-linear-attention library publishes. Each layer has a mixer of tokens, a generalised delta rule whose values are
//! mixed with those of the first layer, and one of channels; both see the token before.

use ridge_graph::{Builder, DType, Result as GraphResult, Var};
use serde_json::Value as Json;

use super::blocks::{linear, scaled, squared};
use super::decoder::{DecoderLayer, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::experts::MAX_SIZE;
use super::gguf_mapping::{GgufLayout, GgufMapping, GgufTensorName, LAYER_NORM_EPSILON};
use super::layer_states::LayerStates;
use super::linear_attention::LINEAR_HARMLESS;
use super::recurrent::{f32_weight, flat, grouped_layer_norm, heads_of, recurrence};
use super::rwkv::{FLA_TENSORS, Rwkv, TOKENS, change, shifted};
use super::tensors::{TensorName, TensorTable};
use crate::config::{DECODER_KEYS, DecoderConfig, DecoderKeys, Fields, MAX_HEADS, REMEDY};
use crate::error::Result;
use crate::model::BuildOptions;

/// Every size and switch of an RWKV-7 model.
#[derive(Clone, Debug, PartialEq)]
pub struct Rwkv7Config {
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// Rank of the projection of decays.
    pub decay_rank: usize,
    /// Rank of that of gates.
    pub gate_rank: usize,
    /// Rank of that of learning rates.
    pub rate_rank: usize,
    /// Rank of that of the first layer's share of values.
    pub value_rank: usize,
    /// Is there a norm behind the embedding?
    pub norm_first: bool,
    /// Do norms outside the mixers have biases?
    pub norm_bias: bool,
    /// Are squares of keys' lengths 1e-6 longer, as the library's fused norm has them?
    pub fused_norm: bool,
}

/// The value by which layers know the first one's values.
const FIRST_VALUES: &str = "first_values";
/// The kind of the first layer.
const FIRST: &str = "first";
/// The largest rate of a decay: the root of 1 / e.
const LARGEST_RATE: f64 = 0.606_530_659_712_633_4;

impl Rwkv7Config {
    fn read(f: &mut Fields<'_>) -> Result<Self> {
        const KEYS: DecoderKeys = DecoderKeys {
            // The library computes it from a ratio where the file has none.
            intermediate_factor: Some(4),
            num_attention_heads: "",
            num_key_value_heads: "",
            positions: Some(2048),
            norm_eps: "norm_eps",
            default_eps: Some(1e-5),
            ..DECODER_KEYS
        };
        f.needs(&["decay_low_rank_dim", "gate_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim"])?;
        f.must_be("attn", Json::Null)?;
        f.must_be("hidden_act", "sqrelu")?;
        let given = f.raw("intermediate_size").is_some();
        let mut decoder = DecoderConfig::read(f, &KEYS)?;
        let hidden = decoder.hidden_size;
        let ratio = f.optional_positive("hidden_ratio")?.unwrap_or(4.0);
        if !given {
            decoder.intermediate_size = ((hidden as f64 * ratio) as usize).next_multiple_of(32);
        }
        let (heads, dim) = (f.optional_size("num_heads", MAX_HEADS)?, f.optional_size("head_dim", hidden)?);
        let heads = heads.or(dim.map(|dim| hidden / dim)).unwrap_or(hidden / 64);
        if heads == 0 || !hidden.is_multiple_of(heads) || dim.is_some_and(|dim| dim * heads != hidden) {
            return Err(f.wrong(
                "head_dim",
                format!("does not divide hidden_size = {hidden} into {heads} heads"),
                REMEDY,
            ));
        }
        (decoder.num_attention_heads, decoder.num_key_value_heads) = (heads, heads);
        decoder.head_dim = hidden / heads;
        let wide = match f.is_list("value_dim") {
            true => f.required::<Vec<u64>>("value_dim")?.iter().any(|width| *width != hidden as u64),
            false => f.count("value_dim")?.is_some_and(|width| width != hidden as u64),
        };
        if wide {
            let remedy = "Ridge runs models whose values are as wide as the residual stream";
            return Err(f.wrong("value_dim", format!("is not hidden_size = {hidden}"), remedy));
        }
        Ok(Self {
            decay_rank: f.size("decay_low_rank_dim", MAX_SIZE)?,
            gate_rank: f.size("gate_low_rank_dim", MAX_SIZE)?,
            rate_rank: f.size("a_low_rank_dim", MAX_SIZE)?,
            value_rank: f.size("v_low_rank_dim", MAX_SIZE)?,
            norm_first: f.optional("norm_first")?.unwrap_or(true),
            norm_bias: f.optional("norm_bias")?.unwrap_or(true),
            fused_norm: f.optional("fuse_norm")?.unwrap_or(true),
            decoder,
        })
    }
}

/// The heads of f32 `x`, `[tokens, heads, dim]`, divided by their lengths; the `fused` norm adds 1e-6 to the lengths' squares,
/// the other has lengths of 1e-12 at least.
fn direction(g: &mut Builder, x: Var, fused: bool) -> GraphResult<Var> {
    let square = g.mul(x, x)?;
    let sum = g.reduce_sum(square, 2)?;
    let least = g.constant(DType::F32, if fused { 1e-6 } else { 1e-24 })?;
    let sum = if fused { g.add(sum, least)? } else { g.max(sum, least)? };
    let factor = g.rsqrt(sum)?;
    g.mul(x, factor)
}

/// The projection of low rank of scope `name`, through `bend` between its halves, to `[rank, width]`.
fn low_rank(
    g: &mut Builder,
    name: &str,
    x: Var,
    [rank, width]: [usize; 2],
    bend: impl FnOnce(&mut Builder, Var) -> GraphResult<Var>,
    bias: bool,
) -> GraphResult<Var> {
    g.scoped(&format!("{name}.lora"), |g| {
        let low = linear(g, "0", x, rank, false)?;
        let low = bend(g, low)?;
        linear(g, "2", low, width, bias)
    })
}

deref_to_decoder!(Rwkv7Config);

/// Norms and projections.
const TENSORS: &[TensorName] = &[
    TensorName::whole("attn_norm", "attn_norm"),
    TensorName::whole("ffn_norm", "attn_norm_2"),
    TensorName::whole("time_mixer.r_proj", "time_mix_receptance"),
    TensorName::whole("time_mixer.k_proj", "time_mix_key"),
    TensorName::whole("time_mixer.v_proj", "time_mix_value"),
    TensorName::whole("time_mixer.o_proj", "time_mix_output"),
    TensorName::whole("time_mixer.g_norm", "time_mix_ln"),
    TensorName::whole("channel_mixer.key", "channel_mix_key"),
    TensorName::whole("channel_mixer.value", "channel_mix_value"),
];

/// In GGUF a bias of a projection of low rank is a weight too, and the first layer repeats its learning rates' projection
/// where others have that of values.
const GGUF_TENSORS: &[GgufTensorName] = &{
    use GgufLayout::{Flat, Same, Stacked, Unused};
    const fn tensor(file: &'static str, weights: &'static [&'static str], layout: GgufLayout) -> GgufTensorName {
        GgufTensorName::new(file, weights, layout)
    }
    [
        tensor("token_embd_norm.weight", &["model.layers.0.pre_norm.weight"], Same),
        tensor("token_embd_norm.bias", &["model.layers.0.pre_norm.bias"], Same),
        tensor(
            "blk.*.time_mix_lerp_fused.weight",
            &[
                "model.layers.*.time_mixer.x_r",
                "model.layers.*.time_mixer.x_w",
                "model.layers.*.time_mixer.x_k",
                "model.layers.*.time_mixer.x_v",
                "model.layers.*.time_mixer.x_a",
                "model.layers.*.time_mixer.x_g",
            ],
            Stacked,
        ),
        tensor("blk.0.time_mix_v0.weight", &[], Unused),
        tensor("blk.0.time_mix_v1.weight", &[], Unused),
        tensor("blk.0.time_mix_v2.weight", &[], Unused),
        tensor("blk.*.time_mix_w0.weight", &["model.layers.*.time_mixer.w_lora.lora.2.bias"], Same),
        tensor("blk.*.time_mix_w1.weight", &["model.layers.*.time_mixer.w_lora.lora.0.weight"], Same),
        tensor("blk.*.time_mix_w2.weight", &["model.layers.*.time_mixer.w_lora.lora.2.weight"], Same),
        tensor("blk.*.time_mix_a0.weight", &["model.layers.*.time_mixer.a_lora.lora.2.bias"], Same),
        tensor("blk.*.time_mix_a1.weight", &["model.layers.*.time_mixer.a_lora.lora.0.weight"], Same),
        tensor("blk.*.time_mix_a2.weight", &["model.layers.*.time_mixer.a_lora.lora.2.weight"], Same),
        tensor("blk.*.time_mix_v0.weight", &["model.layers.*.time_mixer.v_lora.lora.2.bias"], Same),
        tensor("blk.*.time_mix_v1.weight", &["model.layers.*.time_mixer.v_lora.lora.0.weight"], Same),
        tensor("blk.*.time_mix_v2.weight", &["model.layers.*.time_mixer.v_lora.lora.2.weight"], Same),
        tensor("blk.*.time_mix_g1.weight", &["model.layers.*.time_mixer.g_lora.lora.0.weight"], Same),
        tensor("blk.*.time_mix_g2.weight", &["model.layers.*.time_mixer.g_lora.lora.2.weight"], Same),
        tensor("blk.*.time_mix_k_k.weight", &["model.layers.*.time_mixer.k_k"], Same),
        tensor("blk.*.time_mix_k_a.weight", &["model.layers.*.time_mixer.k_a"], Same),
        tensor("blk.*.time_mix_r_k.weight", &["model.layers.*.time_mixer.r_k"], Flat(0)),
        tensor("blk.*.channel_mix_lerp_k.weight", &["model.layers.*.channel_mixer.x_k"], Same),
    ]
};

const GGUF: GgufMapping = GgufMapping {
    keys: &[
        // It is 0 and means nothing: heads follow from their width.
        ("attention.head_count", None),
        ("attention.head_count_kv", None),
        ("attention.key_length", None),
        (LAYER_NORM_EPSILON, Some("norm_eps")),
        ("attention.layer_norm_rms_epsilon", None),
        ("wkv.head_size", Some("head_dim")),
        ("attention.decay_lora_rank", Some("decay_low_rank_dim")),
        ("attention.iclr_lora_rank", Some("a_low_rank_dim")),
        ("attention.value_residual_mix_lora_rank", Some("v_low_rank_dim")),
        ("attention.gate_lora_rank", Some("gate_low_rank_dim")),
    ],
    rope_theta: None,
    tensors: GGUF_TENSORS,
    read: |file, to| {
        to.insert("hidden_act".into(), "sqrelu".into());
        to.insert("norm_first".into(), file.has("token_embd_norm.weight").into());
        to.insert("norm_bias".into(), file.has("output_norm.bias").into());
        // llama.cpp bounds the lengths of keys from below.
        to.insert("fuse_norm".into(), false.into());
        Ok(())
    },
    ..GgufMapping::new("rwkv7")
};

/// How it is registered.
pub(super) static RWKV7: FamilyDefinition = FamilyDefinition {
    name: "rwkv7",
    model_type: "rwkv7",
    class: Some("RWKV7ForCausalLM"),
    harmless: &[LINEAR_HARMLESS],
    read: ReadConfig::Decoder(|f| Ok(Box::new(Rwkv7Config::read(f)?))),
    tensors: TensorTable { layer: &[TENSORS], ..FLA_TENSORS },
    gguf: Some(GGUF),
};

impl Rwkv for Rwkv7Config {
    fn norms(&self) -> [bool; 2] {
        [self.norm_first, self.norm_bias]
    }

    fn layer_kind(&self, index: usize) -> &'static str {
        if index == 0 { FIRST } else { "" }
    }

    fn mixer_states(&self, _options: &BuildOptions) -> LayerStates {
        LayerStates::none().with_recurrence(TOKENS, [self.num_attention_heads, self.head_dim, self.head_dim])
    }

    fn mix_tokens(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let (heads, hidden, dtype) = (self.num_attention_heads, self.hidden_size, g.ty(x)?.dtype);
        let delta = change(g, x, at)?;
        let mut mixed = [x; 6];
        for (name, y) in ["x_r", "x_w", "x_k", "x_v", "x_a", "x_g"].into_iter().zip(&mut mixed) {
            *y = shifted(g, name, x, delta, 3)?;
        }
        let [r, w, k, mut v, rate, gate] = mixed;
        let r = linear(g, "r_proj", r, hidden, false)?;
        let k = linear(g, "k_proj", k, hidden, false)?;
        let own = linear(g, "v_proj", v, hidden, false)?;
        v = match at.kind {
            FIRST => {
                at.leave(FIRST_VALUES, own);
                own
            }
            _ => {
                let first = at.value(g, FIRST_VALUES)?;
                let share = low_rank(g, "v_lora", v, [self.value_rank, hidden], |_, x| Ok(x), true)?;
                let share = g.sigmoid(share)?;
                let beyond = g.sub(first, own)?;
                let beyond = g.mul(beyond, share)?;
                g.add(own, beyond)?
            }
        };
        let w = low_rank(g, "w_lora", w, [self.decay_rank, hidden], Builder::tanh, true)?;
        let rate = low_rank(g, "a_lora", rate, [self.rate_rank, hidden], |_, x| Ok(x), true)?;
        let gate = low_rank(g, "g_lora", gate, [self.gate_rank, hidden], Builder::sigmoid, false)?;

        let wide = |g: &mut Builder, x: Var| g.cast(x, DType::F32);
        let (w, rate, k) = (wide(g, w)?, wide(g, rate)?, wide(g, k)?);
        let (w, rate) = (g.sigmoid(w)?, g.sigmoid(rate)?);
        let decay = scaled(g, w, -LARGEST_RATE)?;
        let removed = f32_weight(g, "k_k", [hidden])?;
        let removed = g.mul(k, removed)?;
        // k * (1 + (rate - 1) * k_a)
        let replaced = f32_weight(g, "k_a", [hidden])?;
        let one = g.constant(DType::F32, 1.0)?;
        let less = g.sub(rate, one)?;
        let less = g.mul(less, replaced)?;
        let less = g.mul(less, k)?;
        let k = g.add(k, less)?;

        let (r, v) = (wide(g, r)?, wide(g, v)?);
        let mut by_head = [r, k, v, decay, removed, rate];
        for x in &mut by_head {
            *x = heads_of(g, *x, heads)?;
        }
        let [r, k, v, decay, removed, rate] = by_head;
        let removed = direction(g, removed, self.fused_norm)?;
        let (erase, write) = (g.neg(removed)?, g.mul(removed, rate)?);
        let y = recurrence(g, at, [r, k, v, decay], Some([erase, write]))?;
        let y = grouped_layer_norm(g, "g_norm", y, self.head_dim as f64 * self.norm_eps)?;

        // And a token's own key and value with a factor for each channel.
        let bonus = f32_weight(g, "r_k", [heads, self.head_dim])?;
        let own = g.mul(r, k)?;
        let own = g.mul(own, bonus)?;
        let own = g.reduce_sum(own, 2)?;
        let own = g.mul(own, v)?;
        let own = flat(g, own)?;
        let y = g.add(y, own)?;
        let gate = wide(g, gate)?;
        let y = g.mul(y, gate)?;
        let y = g.cast(y, dtype)?;
        linear(g, "o_proj", y, hidden, false)
    }

    fn mix_channels(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let delta = change(g, x, at)?;
        let h = shifted(g, "x_k", x, delta, 1)?;
        let h = linear(g, "key", h, self.intermediate_size, false)?;
        let h = squared(g, h)?;
        linear(g, "value", h, self.hidden_size, false)
    }

    fn mixer_tensors(&self) -> [&'static [&'static str]; 2] {
        [
            &[
                "x_r",
                "x_w",
                "x_k",
                "x_v",
                "x_a",
                "x_g",
                "k_k",
                "k_a",
                "r_k",
                "r_proj.weight",
                "k_proj.weight",
                "v_proj.weight",
                "o_proj.weight",
                "g_norm.weight",
                "g_norm.bias",
                "w_lora.lora.0.weight",
                "w_lora.lora.2.weight",
                "w_lora.lora.2.bias",
                "v_lora.lora.0.weight",
                "v_lora.lora.2.weight",
                "v_lora.lora.2.bias",
                "a_lora.lora.0.weight",
                "a_lora.lora.2.weight",
                "a_lora.lora.2.bias",
                "g_lora.lora.0.weight",
                "g_lora.lora.2.weight",
            ],
            &["x_k", "key.weight", "value.weight"],
        ]
    }
}

#[cfg(test)]
mod tests {
    use ridge_graph::{Bindings, Builder, DType, Precision, Shape, Tensor, Type, Value, evaluate};

    use super::direction;

    /// `x * rsqrt(sum(x^2) + 1e-6)` is flash-linear-attention's `l2_norm`, which the library takes where `fuse_norm` is
    /// set; elsewhere it is torch's `normalize`, `x / max(sqrt(sum(x^2)), 1e-12)`.
    #[test]
    fn both_norms_of_keys_follow_their_formulas() {
        // Two heads of three: one of length 13, and one whose square is a quarter of 1e-6. And one of no length.
        let heads = [[3.0, -4.0, 12.0], [3e-4, 0.0, -4e-4], [0.0; 3]];
        for fused in [true, false] {
            let mut g = Builder::new();
            let x = g.step_input("x", Type::tensor(DType::F32, Shape::new([1, 3, 3]))).unwrap();
            let y = direction(&mut g, x, fused).unwrap();
            let graph = g.finish(vec![("y".to_owned(), y)]).unwrap();
            let x = Tensor::float(DType::F32, &[1, 3, 3], heads.concat());
            let all = evaluate(&graph, &|_| Some(Value::Plain(x.clone())), &Bindings::default(), Precision::Exact);
            let all = all.unwrap();
            let got = all[0].1.tensor().floats();
            let want = heads.iter().flat_map(|head| {
                let sum: f64 = head.iter().map(|x| x * x).sum();
                let length = if fused { (sum + 1e-6).sqrt() } else { sum.sqrt().max(1e-12) };
                head.map(|x| x / length)
            });
            for (got, want) in got.iter().zip(want) {
                assert!((got - want).abs() < 1e-12, "{fused}: {got} for {want}");
            }
        }
    }
}

//! Falcon-H1 (Zuo et al. 2025, "Falcon-H1: A Family of Hybrid-Head Language Models", section 2): in every layer a Mamba-2 mixer and
//! attention read the same input and are added, with factors that take the place of learning rates.

use ridge_graph::{Builder, Result as GraphResult, Var};

use super::bamba::{FEED_FORWARD, FINAL_NORM, HYBRID_HARMLESS};
use super::blocks::{NormKind, ResidualHalf, linear, scaled};
use super::decoder::{DecoderFamily, DecoderLayer, LayerInputs, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::experts::MAX_SIZE;
use super::layer_states::LayerStates;
use super::mamba2::{MAMBA_HARMLESS, check_groups, no_time_step_limit};
use super::recurrent::{GatedNorm, Mamba2Mixer};
use super::tensors::{ATTENTION, LLAMA_TENSORS, QKV, TensorTable};
use crate::config::{DECODER_KEYS, DecoderConfig, Fields, REMEDY, ROPE_KEYS, read_rope};
use crate::error::Result;
use crate::model::BuildOptions;

/// Factors of a Falcon-H1 model besides those within its mixers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FalconH1Factors {
    /// Of the embedding.
    pub embedding: f64,
    /// Of the logits.
    pub logits: f64,
    /// Of the mixer's input and output.
    pub mixer: [f64; 2],
    /// Of attention's input and output.
    pub attention: [f64; 2],
    /// Of keys.
    pub keys: f64,
    /// Of the MLP's gate and its output.
    pub mlp: [f64; 2],
}

/// Every size and switch of a Falcon-H1 model.
#[derive(Clone, Debug, PartialEq)]
pub struct FalconH1Config {
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// Do the four projections of attention have biases?
    pub attention_bias: bool,
    /// Do those of the MLP?
    pub mlp_bias: bool,
    /// Its factors.
    pub factors: FalconH1Factors,
    /// The mixer of every layer.
    pub mixer: Mamba2Mixer,
    /// Has the mixer a norm?
    pub mixer_norm: bool,
    /// Is it before the gate?
    pub norm_before_gate: bool,
}

/// `N` factors, ones if the file has none.
fn factors<const N: usize>(f: &mut Fields<'_>, key: &'static str) -> Result<[f64; N]> {
    let Some(listed) = f.optional::<Vec<f64>>(key)? else { return Ok([1.0; N]) };
    match <[f64; N]>::try_from(listed) {
        Ok(listed) if listed.iter().all(|factor| factor.is_finite()) => Ok(listed),
        _ => Err(f.wrong(key, format!("is not a list of {N} numbers"), REMEDY)),
    }
}

impl FalconH1Config {
    fn read(f: &mut Fields<'_>) -> Result<Self> {
        f.must_be("hidden_act", "silu")?;
        f.harmless(&["layers_block_type", "layer_types", "mamba_use_mlp", "mlp_expansion_factor"]);
        f.must_be("attn_layer_indices", serde_json::Value::Null)?;
        f.must_be("sliding_window", serde_json::Value::Null)?;
        no_time_step_limit(f)?;
        let mut decoder = DecoderConfig::read(f, &DECODER_KEYS)?;
        decoder.rope = Some(read_rope(f, decoder.rope_sizes(), &ROPE_KEYS)?);
        let mut factor = |key| f.optional_positive(key).map(|factor| factor.unwrap_or(1.0));
        let [embedding, logits, keys] =
            [factor("embedding_multiplier"), factor("lm_head_multiplier"), factor("key_multiplier")];
        let mixer_in_out = [factor("ssm_in_multiplier"), factor("ssm_out_multiplier")];
        let attention_in_out = [factor("attention_in_multiplier"), factor("attention_out_multiplier")];
        let ([mixer_in, mixer_out], [attention_in, attention_out]) = (mixer_in_out, attention_in_out);
        let of_model = FalconH1Factors {
            embedding: embedding?,
            logits: logits?,
            keys: keys?,
            mixer: [mixer_in?, mixer_out?],
            attention: [attention_in?, attention_out?],
            mlp: factors(f, "mlp_multipliers")?,
        };
        let heads = f.size("mamba_n_heads", MAX_SIZE)?;
        let expanded = f.optional_size("mamba_expand", MAX_SIZE)?.unwrap_or(2) * decoder.hidden_size;
        let inner = f.optional_size("mamba_d_ssm", MAX_SIZE)?.unwrap_or(expanded);
        let head_dim = match f.is_text("mamba_d_head") {
            true => {
                f.must_be("mamba_d_head", "auto")?;
                inner / heads
            }
            false => f.optional_size("mamba_d_head", MAX_SIZE)?.unwrap_or(inner / heads),
        };
        if heads * head_dim != inner {
            return Err(f.wrong("mamba_n_heads", format!("heads of {head_dim} are not {inner} channels"), REMEDY));
        }
        // Both projections have a bias of one key's choice in, and of another's out.
        let proj_bias = f.optional("mamba_proj_bias")?.unwrap_or(false);
        f.must_be("projectors_bias", proj_bias)?;
        let mixer = Mamba2Mixer {
            heads,
            head_dim,
            groups: f.size("mamba_n_groups", MAX_SIZE)?,
            state: f.size("mamba_d_state", MAX_SIZE)?,
            kernel: f.size("mamba_d_conv", MAX_SIZE)?,
            least_step: 0.0,
            conv_bias: f.optional("mamba_conv_bias")?.unwrap_or(true),
            proj_bias,
            factors: factors(f, "ssm_multipliers")?,
        };
        check_groups(f, &mixer, "mamba_n_groups")?;
        Ok(Self {
            attention_bias: f.optional("attention_bias")?.unwrap_or(false),
            mlp_bias: f.optional("mlp_bias")?.unwrap_or(false),
            factors: of_model,
            mixer,
            mixer_norm: f.optional("mamba_rms_norm")?.unwrap_or(false),
            norm_before_gate: f.optional("mamba_norm_before_gate")?.unwrap_or(true),
            decoder,
        })
    }

    fn mixer_norm(&self) -> GatedNorm {
        let (groups, eps) = (self.mixer.groups, self.norm_eps);
        match (self.mixer_norm, self.norm_before_gate) {
            (false, _) => GatedNorm::None,
            (true, true) => GatedNorm::Before { groups, eps },
            (true, false) => GatedNorm::After { groups, eps },
        }
    }

    /// The mixer and attention of `x`, `[tokens, hidden]`, in the scope of the layer.
    fn mix(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let ([mixer_in, mixer_out], [attention_in, attention_out]) = (self.factors.mixer, self.factors.attention);
        let y = g.scoped("mamba", |g| {
            let x = scaled(g, x, mixer_in)?;
            let y = self.mixer.apply(g, x, at, self.mixer_norm())?;
            scaled(g, y, mixer_out)
        })?;
        let a = g.scoped("self_attn", |g| {
            let x = scaled(g, x, attention_in)?;
            let [q, k, v] = at.project(g, x, QKV, self.attention_bias)?;
            let k = scaled(g, k, self.factors.keys)?;
            let a = at.attend(g, [q, k, v], &at.scores())?;
            let a = linear(g, "o_proj", a, self.hidden_size, self.attention_bias)?;
            scaled(g, a, attention_out)
        })?;
        g.add(y, a)
    }
}

deref_to_decoder!(FalconH1Config);

/// How it is registered.
pub(super) static FALCON_H1: FamilyDefinition = FamilyDefinition {
    name: "falcon_h1",
    model_type: "falcon_h1",
    class: Some("FalconH1ForCausalLM"),
    harmless: &[MAMBA_HARMLESS, HYBRID_HARMLESS],
    read: ReadConfig::Decoder(|f| Ok(Box::new(FalconH1Config::read(f)?))),
    tensors: TensorTable { norm: FINAL_NORM, layer: &[ATTENTION, FEED_FORWARD], ..LLAMA_TENSORS },
    gguf: None,
};

impl DecoderFamily for FalconH1Config {
    fn states(&self, _index: usize, options: &BuildOptions) -> LayerStates {
        LayerStates { paged: true, ..self.mixer.states("mamba", options) }
    }

    fn embed(&self, g: &mut Builder, x: Var, _inputs: &mut LayerInputs) -> GraphResult<Var> {
        scaled(g, x, self.factors.embedding)
    }

    fn norm(&self) -> NormKind {
        NormKind::Rms(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        // Both are within the layer's own scope.
        let normed = self.norm().apply(g, "input_layernorm", x)?;
        let mixed = self.mix(g, normed, at)?;
        let x = g.add(x, mixed)?;
        ResidualHalf::before(self.norm(), "pre_ff_layernorm").add(g, x, "feed_forward", |g, x| {
            let [of_gate, of_output] = self.factors.mlp;
            let gate = linear(g, "gate_proj", x, self.intermediate_size, self.mlp_bias)?;
            let gate = scaled(g, gate, of_gate)?;
            let up = linear(g, "up_proj", x, self.intermediate_size, self.mlp_bias)?;
            let h = g.swiglu(gate, up)?;
            let y = linear(g, "down_proj", h, self.hidden_size, self.mlp_bias)?;
            scaled(g, y, of_output)
        })
    }

    fn logit_scale(&self) -> f64 {
        self.factors.logits
    }
}

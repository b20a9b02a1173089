//! Mamba-2 (Dao and Gu 2024, "Transformers are SSMs"): layers of one mixer each, without attention and without an MLP.

use ridge_graph::{Builder, Result as GraphResult, Var};

use super::blocks::{NormKind, ResidualHalf};
use super::decoder::{DecoderFamily, DecoderLayer, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::experts::MAX_SIZE;
use super::layer_states::LayerStates;
use super::recurrent::{GatedNorm, Mamba2Mixer};
use super::tensors::{Cut, LLAMA_TENSORS, TensorName, TensorTable};
use crate::config::{DECODER_KEYS, DecoderConfig, DecoderKeys, Fields, REMEDY};
use crate::error::Result;
use crate::model::BuildOptions;

/// Training, initial values, and how others compute the recurrence.
pub(super) const MAMBA_HARMLESS: &[&str] = &[
    "chunk_size",
    "mamba_chunk_size",
    "rescale_prenorm_residual",
    "residual_in_fp32",
    "time_step_floor",
    "time_step_init_scheme",
    "time_step_max",
    "time_step_min",
    "time_step_scale",
    "use_associative_scan",
    "use_mambapy",
];

/// The keys of a decoder without attention and positions. A recurrence has no longest context; this one bounds the
/// tables of a server.
pub(super) const RECURRENT_KEYS: DecoderKeys = DecoderKeys {
    intermediate_size: "",
    intermediate_factor: Some(2),
    num_attention_heads: "",
    num_key_value_heads: "",
    max_position_embeddings: "",
    positions: Some(1 << 17),
    norm_eps: "layer_norm_epsilon",
    attention_dropout: "",
    ..DECODER_KEYS
};

/// The tensors of Mamba models.
pub(super) const MAMBA_TENSORS: TensorTable = TensorTable {
    embedding: TensorName { scope: "backbone.embeddings", cut: None, gguf: None },
    layers: "backbone.layers",
    attention: "mixer",
    norm: TensorName { scope: "backbone.norm_f", cut: None, gguf: None },
    head: TensorName::planned("lm_head", Cut::Vocabulary),
    layer: &[],
    ..LLAMA_TENSORS
};

/// Refuses a limit of the time steps, which are not limited.
pub(super) fn no_time_step_limit(f: &mut Fields<'_>) -> Result<()> {
    let unlimited = [serde_json::json!([0.0, "Infinity"]), serde_json::json!([0.0, {"__float__": "Infinity"}])];
    match f.raw("time_step_limit") {
        Some(limit) if !unlimited.contains(limit) => {
            Err(f.wrong("time_step_limit", "is not supported", "Ridge runs models with time steps without limits only"))
        }
        _ => Ok(()),
    }
}

/// Checks that the groups divide the heads.
pub(super) fn check_groups(f: &Fields<'_>, mixer: &Mamba2Mixer, key: &'static str) -> Result<()> {
    if mixer.kernel < 2 {
        return Err(f.wrong(key, format!("goes with a convolution of {} taps; 2 are the least", mixer.kernel), REMEDY));
    }
    match mixer.heads.is_multiple_of(mixer.groups) {
        true => Ok(()),
        false => Err(f.wrong(key, format!("does not divide {} heads", mixer.heads), REMEDY)),
    }
}

/// Every size and switch of a Mamba-2 model.
#[derive(Clone, Debug, PartialEq)]
pub struct Mamba2Config {
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// Its mixers.
    pub mixer: Mamba2Mixer,
}

impl Mamba2Config {
    fn read(f: &mut Fields<'_>) -> Result<Self> {
        f.must_be("hidden_act", "silu")?;
        // The released code takes the size of the heads and gates before the norm whatever the file says.
        f.harmless(&["time_step_rank", "intermediate_size", "norm_before_gate"]);
        f.must_be("rms_norm", true)?;
        no_time_step_limit(f)?;
        let decoder = DecoderConfig::read(f, &RECURRENT_KEYS)?;
        let mixer = Mamba2Mixer {
            heads: f.size("num_heads", MAX_SIZE)?,
            head_dim: f.size("head_dim", MAX_SIZE)?,
            groups: f.size("n_groups", MAX_SIZE)?,
            state: f.size("state_size", MAX_SIZE)?,
            kernel: f.size("conv_kernel", MAX_SIZE)?,
            least_step: 0.0,
            conv_bias: f.optional("use_conv_bias")?.unwrap_or(true),
            proj_bias: f.optional("use_bias")?.unwrap_or(false),
            factors: [1.0; 5],
        };
        check_groups(f, &mixer, "n_groups")?;
        let expand = f.optional_size("expand", MAX_SIZE)?.unwrap_or(2);
        if expand * decoder.hidden_size != mixer.inner() {
            let problem = format!("times hidden_size is not num_heads * head_dim = {}", mixer.inner());
            return Err(f.wrong("expand", problem, REMEDY));
        }
        Ok(Self { decoder, mixer })
    }
}

deref_to_decoder!(Mamba2Config);

/// How it is registered.
pub(super) static MAMBA2: FamilyDefinition = FamilyDefinition {
    name: "mamba2",
    model_type: "mamba2",
    class: Some("Mamba2ForCausalLM"),
    harmless: &[MAMBA_HARMLESS],
    read: ReadConfig::Decoder(|f| Ok(Box::new(Mamba2Config::read(f)?))),
    tensors: MAMBA_TENSORS,
    gguf: None,
};

impl DecoderFamily for Mamba2Config {
    fn states(&self, _index: usize, options: &BuildOptions) -> LayerStates {
        self.mixer.states("mixer", options)
    }

    fn norm(&self) -> NormKind {
        NormKind::Rms(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let norm = GatedNorm::After { groups: self.mixer.groups, eps: self.norm_eps };
        ResidualHalf::before(self.norm(), "norm").add(g, x, "mixer", |g, x| self.mixer.apply(g, x, at, norm))
    }
}

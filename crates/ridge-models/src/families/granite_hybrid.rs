//! Granite 4 (IBM 2025, "Granite 4.0"): Granite's layers, in most of which a Mamba-2 mixer takes the place of attention, with
//! experts beside an MLP for all tokens, or with that alone.

use ridge_files::checkpoint::Part;
use ridge_graph::{Builder, Result as GraphResult, Var};

use super::blocks::{MlpGate, NormKind, ResidualHalf, gated_mlp, scaled};
use super::decoder::{DecoderFamily, DecoderLayer, LayerInputs, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::experts::{
    EXPERTS, ExpertsConfig, MAX_SIZE, ROUTER_TRAINING, SHARED_EXPERT, check_experts, experts_and_shared,
};
use super::granite::GraniteFactors;
use super::granite_moe;
use super::layer_states::LayerStates;
use super::llama;
use super::mamba2::{MAMBA_HARMLESS, check_groups, no_time_step_limit};
use super::recurrent::{GatedNorm, Mamba2Mixer};
use super::tensors::{ATTENTION, INPUT_NORM, LLAMA_TENSORS, MLP_NORM, TensorTable};
use crate::config::{DECODER_KEYS, DecoderConfig, Fields, REMEDY, ROPE_KEYS, read_rope};
use crate::error::Result;
use crate::model::BuildOptions;

/// Every size and switch of a Granite 4 model.
#[derive(Clone, Debug, PartialEq)]
pub struct GraniteHybridConfig {
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// Do the four projections of attention have biases?
    pub attention_bias: bool,
    /// Its factors.
    pub factors: GraniteFactors,
    /// Its experts, none of them if there is only the MLP for all tokens.
    pub experts: ExpertsConfig,
    /// The mixers of layers that do not attend.
    pub mixer: Mamba2Mixer,
    /// Which layers attend.
    pub attends: Vec<bool>,
}

/// The mixer of a configuration that names its keys as Granite 4 and Bamba do.
pub(super) fn read_mixer(f: &mut Fields<'_>, hidden_size: usize) -> Result<Mamba2Mixer> {
    no_time_step_limit(f)?;
    let heads = f.size("mamba_n_heads", MAX_SIZE)?;
    let inner = f.optional_size("mamba_expand", MAX_SIZE)?.unwrap_or(2) * hidden_size;
    let head_dim = match f.is_text("mamba_d_head") {
        true => {
            f.must_be("mamba_d_head", "auto")?;
            inner / heads
        }
        false => f.optional_size("mamba_d_head", MAX_SIZE)?.unwrap_or(inner / heads),
    };
    if heads * head_dim != inner {
        return Err(f.wrong(
            "mamba_n_heads",
            format!("heads of {head_dim} are not mamba_expand * hidden_size"),
            REMEDY,
        ));
    }
    let mixer = Mamba2Mixer {
        heads,
        head_dim,
        groups: f.size("mamba_n_groups", MAX_SIZE)?,
        state: f.size("mamba_d_state", MAX_SIZE)?,
        kernel: f.size("mamba_d_conv", MAX_SIZE)?,
        least_step: 0.0,
        conv_bias: f.optional("mamba_conv_bias")?.unwrap_or(true),
        proj_bias: f.optional("mamba_proj_bias")?.unwrap_or(false),
        factors: [1.0; 5],
    };
    check_groups(f, &mixer, "mamba_n_groups")?;
    Ok(mixer)
}

impl GraniteHybridConfig {
    fn read(f: &mut Fields<'_>) -> Result<Self> {
        f.must_be("hidden_act", "silu")?;
        f.must_be("normalization_function", "rmsnorm")?;
        f.harmless(&["init_method", "layers_block_type"]);
        let mut decoder = DecoderConfig::read(f, &DECODER_KEYS)?;
        match f.optional("position_embedding_type")?.unwrap_or("nope") {
            "rope" => decoder.rope = Some(read_rope(f, decoder.rope_sizes(), &ROPE_KEYS)?),
            "nope" => f.harmless(&["rope_theta", "rope_scaling", "rope_parameters"]),
            _ => {
                return Err(f.wrong(
                    "position_embedding_type",
                    "is not supported",
                    "Ridge knows \"rope\" and \"nope\"",
                ));
            }
        }
        let layers = decoder.num_hidden_layers;
        let types: Vec<&str> = f.required("layer_types")?;
        if types.len() != layers {
            return Err(f.wrong("layer_types", format!("names {} layers of {layers}", types.len()), REMEDY));
        }
        const ATTENTION: [&str; 2] = ["attention", "full_attention"];
        const MIXER: [&str; 2] = ["mamba", "linear_attention"];
        if let Some(kind) = types.iter().find(|kind| !ATTENTION.contains(*kind) && !MIXER.contains(*kind)) {
            return Err(f.wrong("layer_types", format!("has {kind:?}, which is not supported"), REMEDY));
        }
        let attends = types.iter().map(|kind| ATTENTION.contains(kind)).collect();
        let [count, top_k] = ["num_local_experts", "num_experts_per_tok"].map(|key| f.count(key));
        let (count, top_k) = (count?.unwrap_or(0).min(1 << 22) as usize, top_k?.unwrap_or(0).min(1 << 22) as usize);
        let experts = ExpertsConfig {
            shared_size: f.size("shared_intermediate_size", MAX_SIZE)?,
            ..ExpertsConfig::softmax(count, top_k, decoder.intermediate_size)
        };
        if count > 0 {
            check_experts(f, &experts)?;
        }
        Ok(Self {
            attention_bias: f.optional("attention_bias")?.unwrap_or(false),
            factors: GraniteFactors::read(f)?,
            experts,
            mixer: read_mixer(f, decoder.hidden_size)?,
            attends,
            decoder,
        })
    }
}

deref_to_decoder!(GraniteHybridConfig);

/// How it is registered.
pub(super) static GRANITE_HYBRID: FamilyDefinition = FamilyDefinition {
    name: "granitemoehybrid",
    model_type: "granitemoehybrid",
    class: Some("GraniteMoeHybridForCausalLM"),
    harmless: &[ROUTER_TRAINING, MAMBA_HARMLESS],
    read: ReadConfig::Decoder(|f| Ok(Box::new(GraniteHybridConfig::read(f)?))),
    tensors: TensorTable { layer: &[ATTENTION, EXPERTS, SHARED_EXPERT, &[INPUT_NORM, MLP_NORM]], ..LLAMA_TENSORS },
    gguf: None,
};

/// The layers that attend.
const ATTENDS: &str = "attention";

impl DecoderFamily for GraniteHybridConfig {
    fn kind(&self, index: usize) -> &'static str {
        if self.attends.get(index) == Some(&true) { ATTENDS } else { "mamba" }
    }

    fn states(&self, index: usize, options: &BuildOptions) -> LayerStates {
        match self.kind(index) {
            ATTENDS => LayerStates::paged(),
            _ => self.mixer.states("mamba", options),
        }
    }

    fn embed(&self, g: &mut Builder, x: Var, _inputs: &mut LayerInputs) -> GraphResult<Var> {
        scaled(g, x, self.factors.embedding)
    }

    fn norm(&self) -> NormKind {
        NormKind::Rms(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let factors = &self.factors;
        let before = ResidualHalf::before(self.norm(), "input_layernorm");
        let x = match at.kind {
            ATTENDS => before.add(g, x, "self_attn", |g, x| {
                let a = llama::self_attention(self, g, x, at, [self.attention_bias; 2], &factors.scores(at))?;
                scaled(g, a, factors.residual)
            })?,
            _ => before.add(g, x, "mamba", |g, x| {
                let norm = GatedNorm::After { groups: self.mixer.groups, eps: self.norm_eps };
                let y = self.mixer.apply(g, x, at, norm)?;
                scaled(g, y, factors.residual)
            })?,
        };
        ResidualHalf::before(self.norm(), "post_attention_layernorm").add(g, x, "mlp", |g, x| {
            let m = match self.experts.experts {
                0 => {
                    let width = self.experts.shared_size;
                    g.scoped("shared_expert", |g| gated_mlp(g, x, width, MlpGate::Silu, false))?
                }
                _ => experts_and_shared(g, x, &self.experts, "shared_expert")?,
            };
            scaled(g, m, factors.residual)
        })
    }

    fn logit_scale(&self) -> f64 {
        1.0 / self.factors.logits
    }

    fn parts(&self) -> Vec<Part> {
        granite_moe::parts(&self.experts)
    }
}

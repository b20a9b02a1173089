//! Nemotron-H (2025, "Nemotron-H: A Family of Accurate and Efficient Hybrid Mamba-Transformer Models") and Nemotron 3: layers
//! that are a Mamba-2 mixer, attention without positions, a squared MLP or experts each.

use ridge_files::checkpoint::Stack;
use ridge_graph::{Builder, Result as GraphResult, Var};
use serde_json::Value;

use super::blocks::{NormKind, ResidualHalf, squared_mlp};
use super::decoder::{DecoderFamily, DecoderLayer, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::experts::{ExpertsConfig, MAX_SIZE, ROUTER_TRAINING, check_experts, experts};
use super::layer_states::LayerStates;
use super::llama;
use super::mamba2::{MAMBA_HARMLESS, MAMBA_TENSORS, check_groups, no_time_step_limit};
use super::recurrent::{GatedNorm, Mamba2Mixer};
use super::tensors::{Cut, TensorName, TensorTable};
use crate::config::{DECODER_KEYS, DecoderConfig, DecoderKeys, Fields, REMEDY};
use crate::error::Result;
use crate::model::BuildOptions;

/// Training, initial values, and the rotation that the published code does not apply.
const HARMLESS: &[&str] = &[
    "expand",
    "hidden_dropout",
    "mamba_ssm_cache_dtype",
    "moe_shared_expert_overlap",
    "mtp_hybrid_override_pattern",
    "mtp_layers_block_type",
    "norm_eps",
    "num_logits_to_keep",
    "partial_rotary_factor",
    "rms_norm_eps",
    "rope_theta",
    "time_step_rank",
    "use_mamba_kernels",
];

/// Projections of attention, of an MLP and of experts.
const MIXERS: &[TensorName] = &[
    TensorName::planned("mixer.q_proj", Cut::Heads),
    TensorName::planned("mixer.k_proj", Cut::Heads),
    TensorName::planned("mixer.v_proj", Cut::Heads),
    TensorName::planned("mixer.o_proj", Cut::HeadTerms),
    TensorName::planned("mixer.up_proj", Cut::Columns),
    TensorName::planned("mixer.down_proj", Cut::Terms),
    TensorName::planned("mixer.experts.up_proj", Cut::Columns),
    TensorName::planned("mixer.experts.down_proj", Cut::Terms),
    TensorName::planned("mixer.shared_experts.up_proj", Cut::Columns),
    TensorName::planned("mixer.shared_experts.down_proj", Cut::Terms),
];

/// How it is registered.
pub(super) static NEMOTRON_H: FamilyDefinition = FamilyDefinition {
    name: "nemotron_h",
    model_type: "nemotron_h",
    class: Some("NemotronHForCausalLM"),
    harmless: &[ROUTER_TRAINING, MAMBA_HARMLESS, HARMLESS],
    read: ReadConfig::Decoder(|f| Ok(Box::new(NemotronHConfig::read(f)?))),
    tensors: TensorTable { layer: &[MIXERS], computed: &["mtp.*"], ..MAMBA_TENSORS },
    gguf: None,
};

/// Kinds of layers.
const MAMBA: &str = "mamba";
const ATTENTION: &str = "attention";
const MLP: &str = "mlp";
const EXPERTS: &str = "experts";

/// Every size and switch of a Nemotron-H model.
#[derive(Clone, Debug, PartialEq)]
pub struct NemotronHConfig {
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// The layers' kinds.
    pub layers: Vec<&'static str>,
    /// The mixers of layers with one.
    pub mixer: Mamba2Mixer,
    /// The experts of layers with some.
    pub experts: Option<ExpertsConfig>,
}

impl NemotronHConfig {
    fn read(f: &mut Fields<'_>) -> Result<Self> {
        f.must_be("mlp_hidden_act", "relu2")?;
        f.must_be("mamba_hidden_act", "silu")?;
        for key in ["attention_bias", "mlp_bias"] {
            f.must_be(key, false)?;
        }
        for key in ["sliding_window", "moe_latent_size"] {
            f.must_be(key, Value::Null)?;
        }
        // In published code this bias is that of `use_bias`.
        f.must_be("mamba_proj_bias", false)?;
        f.must_be("num_nextn_predict_layers", 0)?;
        no_time_step_limit(f)?;
        let layers = layer_kinds(f)?;
        let keys = DecoderKeys { norm_eps: "layer_norm_epsilon", num_hidden_layers: "", ..DECODER_KEYS };
        let mut decoder = DecoderConfig::read(f, &keys)?;
        if let Some(dim) = f.optional_size("attention_head_dim", MAX_SIZE)? {
            decoder.head_dim = dim;
        }
        decoder.num_hidden_layers = layers.len();
        if f.optional_size("num_hidden_layers", MAX_SIZE)?.is_some_and(|count| count != layers.len()) {
            let problem = format!("is not the number of layers that the file describes, {}", layers.len());
            return Err(f.wrong("num_hidden_layers", problem, REMEDY));
        }
        let experts = match f.optional_size("n_routed_experts", MAX_SIZE)? {
            None => None,
            Some(experts) => Some(ExpertsConfig {
                shared_size: f.optional_size("moe_shared_expert_intermediate_size", MAX_SIZE)?.unwrap_or(0)
                    * f.optional_size("n_shared_experts", MAX_SIZE)?.unwrap_or(1),
                gated: false,
                sigmoid: true,
                normalise: f.optional("norm_topk_prob")?.unwrap_or(true),
                scale: f.optional_positive("routed_scaling_factor")?.unwrap_or(1.0),
                groups: Some((f.size("n_group", MAX_SIZE)?, f.size("topk_group", MAX_SIZE)?)),
                ..ExpertsConfig::softmax(
                    experts,
                    f.size("num_experts_per_tok", MAX_SIZE)?,
                    f.size("moe_intermediate_size", MAX_SIZE)?,
                )
            }),
        };
        match &experts {
            Some(experts) => check_experts(f, experts)?,
            None if layers.contains(&EXPERTS) => {
                return Err(f.wrong("n_routed_experts", "is missing, and there are layers of experts", REMEDY));
            }
            None => {}
        }
        let mixer = Mamba2Mixer {
            heads: f.size("mamba_num_heads", MAX_SIZE)?,
            head_dim: f.size("mamba_head_dim", MAX_SIZE)?,
            groups: f.size("n_groups", MAX_SIZE)?,
            state: f.size("ssm_state_size", MAX_SIZE)?,
            kernel: f.size("conv_kernel", MAX_SIZE)?,
            least_step: 0.0,
            conv_bias: f.optional("use_conv_bias")?.unwrap_or(true),
            proj_bias: f.optional("use_bias")?.unwrap_or(false),
            factors: [1.0; 5],
        };
        check_groups(f, &mixer, "n_groups")?;
        Ok(Self { decoder, layers, mixer, experts })
    }
}

/// The kinds of the layers, of a list in newer files and of a pattern in older ones.
fn layer_kinds(f: &mut Fields<'_>) -> Result<Vec<&'static str>> {
    const LISTED: [(&str, &str); 4] =
        [("linear_attention", MAMBA), ("full_attention", ATTENTION), ("mlp", MLP), ("moe", EXPERTS)];
    if let Some(types) = f.optional::<Vec<&str>>("layers_block_type")? {
        let kind = |name: &&str| LISTED.iter().find(|(known, _)| known == name).map(|(_, kind)| *kind);
        let kinds: Option<Vec<&'static str>> = types.iter().map(kind).collect();
        let known = LISTED.map(|(name, _)| name).join(", ");
        return kinds.ok_or_else(|| f.wrong("layers_block_type", format!("has others than {known}"), REMEDY));
    }
    let pattern: &str = f.required("hybrid_override_pattern")?;
    let kind = |letter| match letter {
        'M' => Some(MAMBA),
        '*' => Some(ATTENTION),
        '-' => Some(MLP),
        'E' => Some(EXPERTS),
        _ => None,
    };
    let kinds: Option<Vec<&'static str>> = pattern.chars().map(kind).collect();
    kinds.ok_or_else(|| f.wrong("hybrid_override_pattern", "has letters other than M, *, - and E", REMEDY))
}

deref_to_decoder!(NemotronHConfig);

impl DecoderFamily for NemotronHConfig {
    fn kind(&self, index: usize) -> &'static str {
        self.layers.get(index).copied().unwrap_or(MLP)
    }

    fn states(&self, index: usize, options: &BuildOptions) -> LayerStates {
        match self.kind(index) {
            MAMBA => self.mixer.states("mixer", options),
            ATTENTION => LayerStates::paged(),
            _ => LayerStates::none(),
        }
    }

    fn norm(&self) -> NormKind {
        NormKind::Rms(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        ResidualHalf::before(self.norm(), "norm").add(g, x, "mixer", |g, x| match (at.kind, &self.experts) {
            (MAMBA, _) => {
                let norm = GatedNorm::After { groups: self.mixer.groups, eps: self.norm_eps };
                self.mixer.apply(g, x, at, norm)
            }
            (ATTENTION, _) => llama::self_attention(self, g, x, at, [false; 2], &at.scores()),
            (EXPERTS, Some(e)) => {
                let y = experts(g, x, e)?;
                if e.shared_size == 0 {
                    return Ok(y);
                }
                let all = g.scoped("shared_experts", |g| squared_mlp(g, x, e.shared_size))?;
                g.add(y, all)
            }
            _ => squared_mlp(g, x, self.intermediate_size),
        })
    }

    fn stacks(&self) -> Vec<Stack> {
        let Some(e) = &self.experts else { return Vec::new() };
        let stack = |name| Stack {
            of: format!("backbone.layers.*.mixer.experts.*.{name}.weight"),
            name: format!("backbone.layers.*.mixer.experts.{name}.weight"),
            count: e.experts,
        };
        ["up_proj", "down_proj"].map(stack).into()
    }
}

//! DeepSeek V2 (DeepSeek-AI 2024, "DeepSeek-V2", section 2), V3 and R1 (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report",
//! section 2.1), and Kimi K2 (Kimi Team 2025, "Kimi K2", section 2.3): latent attention, and a few experts of many beside some
//! that all tokens take. V3 scores experts by sigmoids with a bias for the choice, and chooses groups of them first. Families
//! whose attention is sparse (`deepseek_v32.rs`, `glm_moe_dsa.rs`) have the same layers with an indexer.

use ridge_files::checkpoint::Stack;
use ridge_graph::{Builder, Result as GraphResult, Var};

use super::blocks::{MlpGate, NormKind, ResidualHalf, gated_mlp};
use super::decoder::{DecoderFamily, DecoderLayer, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::experts::{
    EXPERTS, ExpertsConfig, MAX_SIZE, ROUTER_TRAINING, SHARED_EXPERTS, check_experts, experts_and_shared, stacks,
};
use super::latent_attention::{LATENT_ATTENTION, LatentAttentionConfig};
use super::layer_states::LayerStates;
use super::prediction::{PredictionScopes, unused_tensors};
use super::tensors::{GATED_MLP, LLAMA_TENSORS, TensorTable};
use crate::config::{DecoderConfig, Fields, REMEDY};
use crate::error::Result;
use crate::model::BuildOptions;

/// Every size and switch of a DeepSeek model.
#[derive(Clone, Debug, PartialEq)]
pub struct DeepseekConfig {
    /// What every decoder has. The one head of keys and values, and the width of a head, are those of the cache.
    pub decoder: DecoderConfig,
    /// Attention of every layer.
    pub latent: LatentAttentionConfig,
    /// The experts of a layer that has some.
    pub experts: ExpertsConfig,
    /// So many layers in front have an MLP.
    pub dense_layers: usize,
    /// Modules behind the last layer that predict further tokens, of which the first can draft.
    pub prediction_layers: usize,
}

impl DeepseekConfig {
    /// `router` has the weights of experts and what is chosen by.
    fn read(
        f: &mut Fields<'_>,
        router: impl FnOnce(&mut Fields<'_>, &mut ExpertsConfig) -> Result<()>,
    ) -> Result<Self> {
        f.must_be("hidden_act", "silu")?;
        f.must_be("mlp_bias", false)?;
        f.must_be("moe_layer_freq", 1)?;
        let (latent, decoder) = LatentAttentionConfig::read(f)?;
        let width = f.size("moe_intermediate_size", MAX_SIZE)?;
        let count = match f.optional_size("n_routed_experts", MAX_SIZE)? {
            Some(count) => count,
            None => f.size("num_local_experts", MAX_SIZE)?,
        };
        let top_k = f.size("num_experts_per_tok", MAX_SIZE)?;
        let mut experts = ExpertsConfig {
            shared_size: width * f.optional_size("n_shared_experts", MAX_SIZE)?.unwrap_or(0),
            scale: f.optional_positive("routed_scaling_factor")?.unwrap_or(1.0),
            ..ExpertsConfig::softmax(count, top_k, width)
        };
        router(f, &mut experts)?;
        check_experts(f, &experts)?;
        let dense_layers = f.count("first_k_dense_replace")?.unwrap_or(0) as usize;
        check_layer_kinds(f, decoder.num_hidden_layers, dense_layers)?;
        Ok(Self { decoder, latent, experts, dense_layers, prediction_layers: read_prediction_layers(f)? })
    }

    fn read_v2(f: &mut Fields<'_>) -> Result<Self> {
        Self::read(f, |f, experts| {
            f.must_be("scoring_func", "softmax")?;
            match f.optional("topk_method")?.unwrap_or("greedy") {
                "greedy" => f.harmless(GROUPS),
                "group_limited_greedy" => {
                    experts.groups = Some((f.size("n_group", MAX_SIZE)?, f.size("topk_group", MAX_SIZE)?));
                }
                _ => {
                    let known = "Ridge knows \"greedy\" and \"group_limited_greedy\"";
                    return Err(f.wrong("topk_method", "is not supported", known));
                }
            }
            f.must_be("norm_topk_prob", false)?;
            experts.normalise = false;
            Ok(())
        })
    }

    /// V3 and its like.
    pub(super) fn read_v3(f: &mut Fields<'_>) -> Result<Self> {
        Self::read(f, |f, experts| {
            f.must_be("scoring_func", "sigmoid")?;
            f.must_be("topk_method", "noaux_tc")?;
            experts.sigmoid = true;
            experts.normalise = f.optional("norm_topk_prob")?.unwrap_or(true);
            experts.groups = Some((f.size("n_group", MAX_SIZE)?, f.size("topk_group", MAX_SIZE)?));
            Ok(())
        })
    }
}

/// Checks that a list of the layers' kinds, where there is one, says what `first_k_dense_replace` says.
fn check_layer_kinds(f: &mut Fields<'_>, layers: usize, dense: usize) -> Result<()> {
    let kind = |layer: usize| if layer < dense { "dense" } else { "sparse" };
    match f.optional::<Vec<&str>>("mlp_layer_types")? {
        Some(kinds) if !kinds.iter().copied().eq((0..layers).map(kind)) => Err(f.wrong(
            "mlp_layer_types",
            format!(
                "is not `dense` for first_k_dense_replace = {dense} of {layers} layers and `sparse` for the others"
            ),
            REMEDY,
        )),
        _ => Ok(()),
    }
}

deref_to_decoder!(DeepseekConfig);

/// A sum of other keys, and training.
const HARMLESS: &[&str] = &["aux_loss_alpha", "pretraining_tp", "qk_head_dim", "seq_aux"];
/// Groups of experts, which the choice from all of them does not look at.
const GROUPS: &[&str] = &["n_group", "topk_group"];

/// Of all families with latent attention.
pub(super) const TENSORS: TensorTable =
    TensorTable { layer: &[LATENT_ATTENTION, GATED_MLP, EXPERTS, SHARED_EXPERTS], ..LLAMA_TENSORS };

/// How V2 is registered.
pub(super) static DEEPSEEK_V2: FamilyDefinition = FamilyDefinition {
    name: "deepseek_v2",
    model_type: "deepseek_v2",
    class: Some("DeepseekV2ForCausalLM"),
    harmless: &[ROUTER_TRAINING, HARMLESS],
    read: ReadConfig::Decoder(|f| Ok(Box::new(DeepseekConfig::read_v2(f)?))),
    tensors: TENSORS,
    gguf: None,
};

/// How V3 and R1 are registered.
pub(super) static DEEPSEEK_V3: FamilyDefinition = FamilyDefinition {
    name: "deepseek_v3",
    model_type: "deepseek_v3",
    class: Some("DeepseekV3ForCausalLM"),
    harmless: &[ROUTER_TRAINING, HARMLESS],
    read: ReadConfig::Decoder(|f| Ok(Box::new(DeepseekConfig::read_v3(f)?))),
    tensors: TENSORS,
    gguf: None,
};

/// How Kimi K2 is registered: it is a DeepSeek V3 of other sizes.
pub(super) static KIMI_K2: FamilyDefinition = FamilyDefinition {
    name: "kimi_k2",
    model_type: "kimi_k2",
    class: DEEPSEEK_V3.class,
    harmless: DEEPSEEK_V3.harmless,
    read: DEEPSEEK_V3.read,
    tensors: TENSORS,
    gguf: None,
};

/// Kinds of layers: what that of a layer with experts ends with, and that of one with the selection of another begins with.
const SPARSE: &str = "experts";
const SHARING: &str = "sharing";
const SHARING_SPARSE: &str = "sharing_experts";

impl DeepseekConfig {
    /// Does layer `index` attend to the selection of one before it?
    pub(super) fn shares(&self, index: usize) -> bool {
        self.latent.indexer.as_ref().is_some_and(|indexer| indexer.shares(index))
    }
}

impl DecoderFamily for DeepseekConfig {
    fn kind(&self, index: usize) -> &'static str {
        match (index < self.dense_layers, self.shares(index)) {
            (true, false) => "",
            (true, true) => SHARING,
            (false, false) => SPARSE,
            (false, true) => SHARING_SPARSE,
        }
    }

    fn states(&self, index: usize, _options: &BuildOptions) -> LayerStates {
        match &self.latent.indexer {
            Some(indexer) if !indexer.shares(index) => indexer.with_keys(LayerStates::paged()),
            _ => LayerStates::paged(),
        }
    }

    fn norm(&self) -> NormKind {
        NormKind::Rms(self.norm_eps)
    }

    fn cache_shape(&self, _index: usize) -> [usize; 3] {
        [1, self.num_key_value_heads, self.head_dim]
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let x = ResidualHalf::before(self.norm(), "input_layernorm").add(g, x, "self_attn", |g, x| {
            self.latent.build(g, x, self.num_attention_heads, at, at.kind.starts_with(SHARING))
        })?;
        ResidualHalf::before(self.norm(), "post_attention_layernorm").add(g, x, "mlp", |g, x| {
            match at.kind.ends_with(SPARSE) {
                true => experts_and_shared(g, x, &self.experts, "shared_experts"),
                false => gated_mlp(g, x, self.intermediate_size, MlpGate::Silu, false),
            }
        })
    }

    fn stacks(&self) -> Vec<Stack> {
        stacks("mlp.experts", ["gate_proj", "up_proj", "down_proj"], self.experts.experts)
    }

    fn prediction(&self) -> Option<PredictionScopes> {
        (self.prediction_layers > 0).then(|| PredictionScopes::behind(self.num_hidden_layers))
    }

    fn unused(&self, drafts: bool) -> Vec<String> {
        unused_tensors(self.num_hidden_layers, self.prediction_layers, drafts)
    }
}

/// How many layers predict further tokens, in the published spelling or that of transformers.
pub(super) fn read_prediction_layers(f: &mut Fields<'_>) -> Result<usize> {
    let published = f.count("num_nextn_predict_layers")?;
    Ok(f.count("num_mtp_layers")?.or(published).unwrap_or(0) as usize)
}

//! Bamba (IBM and others 2024, "Bamba: Inference-Efficient Hybrid Mamba2 Model"): layers of a Mamba-2 mixer, or in a few of them of
//! attention that rotates half of each head, each before a gated MLP.

use ridge_graph::{Builder, Result as GraphResult, Var};

use super::blocks::{MlpGate, NormKind, ResidualHalf, gated_mlp};
use super::decoder::{DecoderFamily, DecoderLayer, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::granite_hybrid::read_mixer;
use super::layer_states::LayerStates;
use super::llama;
use super::mamba2::MAMBA_HARMLESS;
use super::recurrent::{GatedNorm, Mamba2Mixer};
use super::tensors::{ATTENTION, Cut, LLAMA_TENSORS, TensorName, TensorTable};
use crate::config::{DECODER_KEYS, DecoderConfig, Fields, REMEDY, ROPE_KEYS, RopeKeys, read_rope};
use crate::error::Result;
use crate::model::BuildOptions;

/// The MLP of hybrid models, in the scope that they have in common.
pub(super) const FEED_FORWARD: &[TensorName] = &[
    TensorName::planned("feed_forward.gate_proj", Cut::Columns),
    TensorName::planned("feed_forward.up_proj", Cut::Columns),
    TensorName::planned("feed_forward.down_proj", Cut::Terms),
];

/// The norm behind the layers of hybrid models.
pub(super) const FINAL_NORM: TensorName = TensorName { scope: "model.final_layernorm", cut: None, gguf: None };

/// Training, and how many logits others compute.
pub(super) const HYBRID_HARMLESS: &[&str] =
    &["num_logits_to_keep", "output_router_logits", "use_mamba_kernels", "z_loss_coefficient"];

/// Every size and switch of a Bamba model.
#[derive(Clone, Debug, PartialEq)]
pub struct BambaConfig {
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// Do the four projections of attention have biases?
    pub attention_bias: bool,
    /// The mixers of layers that do not attend.
    pub mixer: Mamba2Mixer,
    /// Which layers attend.
    pub attends: Vec<bool>,
}

impl BambaConfig {
    fn read(f: &mut Fields<'_>) -> Result<Self> {
        f.must_be("hidden_act", "silu")?;
        f.must_be("mlp_bias", false)?;
        f.must_be("sliding_window", serde_json::Value::Null)?;
        let mut decoder = DecoderConfig::read(f, &DECODER_KEYS)?;
        let keys = RopeKeys { partial: Some("partial_rotary_factor"), default_partial: 0.5, ..ROPE_KEYS };
        decoder.rope = Some(read_rope(f, decoder.rope_sizes(), &keys)?);
        // The released code rotates half of a head whatever the file says here.
        let turned = decoder.rope.as_ref().map_or(0, |rope| rope.rotary_dim);
        if 2 * turned != decoder.head_dim {
            return Err(f.wrong("partial_rotary_factor", "is not 0.5, as the family has it", REMEDY));
        }
        if f.optional_size("attn_rotary_emb", decoder.head_dim)?.is_some_and(|dim| dim != turned) {
            return Err(f.wrong("attn_rotary_emb", format!("is not half of a head, {turned}"), REMEDY));
        }
        let layers = decoder.num_hidden_layers;
        let listed: Vec<u64> = f.optional("attn_layer_indices")?.unwrap_or_default();
        if listed.iter().any(|layer| *layer >= layers as u64) {
            return Err(f.wrong("attn_layer_indices", format!("names a layer of {layers} that there is not"), REMEDY));
        }
        f.harmless(&["layers_block_type", "layer_types"]);
        Ok(Self {
            attention_bias: f.optional("attention_bias")?.unwrap_or(false),
            mixer: read_mixer(f, decoder.hidden_size)?,
            attends: (0..layers).map(|layer| listed.contains(&(layer as u64))).collect(),
            decoder,
        })
    }
}

deref_to_decoder!(BambaConfig);

/// How it is registered.
pub(super) static BAMBA: FamilyDefinition = FamilyDefinition {
    name: "bamba",
    model_type: "bamba",
    class: Some("BambaForCausalLM"),
    harmless: &[MAMBA_HARMLESS, HYBRID_HARMLESS],
    read: ReadConfig::Decoder(|f| Ok(Box::new(BambaConfig::read(f)?))),
    tensors: TensorTable { norm: FINAL_NORM, layer: &[ATTENTION, FEED_FORWARD], ..LLAMA_TENSORS },
    gguf: None,
};

/// The layers that attend.
const ATTENDS: &str = "attention";

impl DecoderFamily for BambaConfig {
    fn kind(&self, index: usize) -> &'static str {
        if self.attends.get(index) == Some(&true) { ATTENDS } else { "mamba" }
    }

    fn states(&self, index: usize, options: &BuildOptions) -> LayerStates {
        match self.kind(index) {
            ATTENDS => LayerStates::paged(),
            _ => self.mixer.states("mamba", options),
        }
    }

    fn norm(&self) -> NormKind {
        NormKind::Rms(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let before = ResidualHalf::before(self.norm(), "input_layernorm");
        let x = match at.kind {
            ATTENDS => before.add(g, x, "self_attn", |g, x| {
                llama::self_attention(self, g, x, at, [self.attention_bias; 2], &at.scores())
            })?,
            _ => before.add(g, x, "mamba", |g, x| {
                let norm = GatedNorm::After { groups: self.mixer.groups, eps: self.norm_eps };
                self.mixer.apply(g, x, at, norm)
            })?,
        };
        ResidualHalf::before(self.norm(), "pre_ff_layernorm")
            .add(g, x, "feed_forward", |g, x| gated_mlp(g, x, self.intermediate_size, MlpGate::Silu, false))
    }
}

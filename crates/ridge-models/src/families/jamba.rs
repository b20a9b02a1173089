//! Jamba (Lieber et al. 2024, "Jamba: A Hybrid Transformer-Mamba Language Model", section 2): layers of a Mamba mixer, or in one of
//! several of attention without positions, each before a gated MLP or experts.

use ridge_files::checkpoint::{Part, Stack};
use ridge_graph::{Builder, Result as GraphResult, Var};

use super::bamba::{FEED_FORWARD, FINAL_NORM, HYBRID_HARMLESS};
use super::blocks::{MlpGate, NormKind, ResidualHalf, gated_mlp};
use super::decoder::{DecoderFamily, DecoderLayer, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::experts::{EXPERTS, ExpertsConfig, MAX_SIZE, ROUTER_TRAINING, check_experts, experts, stacks};
use super::layer_states::LayerStates;
use super::llama;
use super::mamba::{MambaMixer, SelectionNorms, read_rank};
use super::mamba2::MAMBA_HARMLESS;
use super::tensors::{ATTENTION, LLAMA_TENSORS, TensorTable};
use crate::config::{DECODER_KEYS, DecoderConfig, DecoderKeys, Fields, REMEDY};
use crate::error::Result;
use crate::model::BuildOptions;

/// Every size and switch of a Jamba model.
#[derive(Clone, Debug, PartialEq)]
pub struct JambaConfig {
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// The mixers of layers that do not attend.
    pub mixer: MambaMixer,
    /// Which layers attend.
    pub attends: Vec<bool>,
    /// The experts of a layer that has some.
    pub experts: ExpertsConfig,
    /// Which layers have experts; the others have an MLP.
    pub sparse: Vec<bool>,
}

/// One layer of every so many, from an offset that is below that number.
fn periodic(f: &mut Fields<'_>, keys: [&'static str; 2], usual: [usize; 2], layers: usize) -> Result<Vec<bool>> {
    let period = f.optional_size(keys[0], MAX_SIZE)?.unwrap_or(usual[0]);
    let offset = f.count(keys[1])?.map_or(usual[1], |offset| offset.min(MAX_SIZE as u64) as usize);
    if offset >= period {
        return Err(f.wrong(keys[1], format!("is not below {} = {period}", keys[0]), REMEDY));
    }
    Ok((0..layers).map(|layer| layer % period == offset).collect())
}

impl JambaConfig {
    fn read(f: &mut Fields<'_>) -> Result<Self> {
        f.needs(&["num_key_value_heads"])?;
        f.must_be("hidden_act", "silu")?;
        f.must_be("sliding_window", serde_json::Value::Null)?;
        f.must_be("mamba_inner_layernorms", true)?;
        f.harmless(&[
            "layers_block_type",
            "layer_types",
            "layers_num_experts",
            "calc_logits_for_entire_prompt",
            "n_ctx",
        ]);
        let decoder = DecoderConfig::read(f, &DecoderKeys { positions: Some(1 << 18), ..DECODER_KEYS })?;
        let (hidden, layers) = (decoder.hidden_size, decoder.num_hidden_layers);
        let count = match f.optional_size("num_experts", MAX_SIZE)? {
            Some(count) => count,
            None => f.optional_size("num_local_experts", MAX_SIZE)?.unwrap_or(16),
        };
        let top_k = f.optional_size("num_experts_per_tok", MAX_SIZE)?.unwrap_or(2);
        let experts =
            ExpertsConfig { normalise: false, ..ExpertsConfig::softmax(count, top_k, decoder.intermediate_size) };
        let mut sparse = periodic(f, ["expert_layer_period", "expert_layer_offset"], [2, 1], layers)?;
        match count {
            1 => sparse.fill(false),
            _ => check_experts(f, &experts)?,
        }
        let mixer = MambaMixer {
            inner: f.optional_size("mamba_expand", MAX_SIZE)?.unwrap_or(2) * hidden,
            state: f.optional_size("mamba_d_state", MAX_SIZE)?.unwrap_or(16),
            kernel: f.optional_size("mamba_d_conv", MAX_SIZE)?.unwrap_or(4),
            rank: read_rank(f, "mamba_dt_rank", hidden)?,
            conv_bias: f.optional("mamba_conv_bias")?.unwrap_or(true),
            proj_bias: f.optional("mamba_proj_bias")?.unwrap_or(false),
            norms: SelectionNorms::Weighted { eps: decoder.norm_eps },
        };
        if mixer.kernel < 2 {
            return Err(f.wrong("mamba_d_conv", "is below 2", REMEDY));
        }
        f.must_be("mamba_inner_layernorms", true)?;
        let attends = periodic(f, ["attn_layer_period", "attn_layer_offset"], [8, 4], layers)?;
        Ok(Self { decoder, mixer, attends, experts, sparse })
    }
}

deref_to_decoder!(JambaConfig);

/// How it is registered.
pub(super) static JAMBA: FamilyDefinition = FamilyDefinition {
    name: "jamba",
    model_type: "jamba",
    class: Some("JambaForCausalLM"),
    harmless: &[ROUTER_TRAINING, MAMBA_HARMLESS, HYBRID_HARMLESS],
    read: ReadConfig::Decoder(|f| Ok(Box::new(JambaConfig::read(f)?))),
    tensors: TensorTable { norm: FINAL_NORM, layer: &[ATTENTION, FEED_FORWARD, EXPERTS], ..LLAMA_TENSORS },
    gguf: None,
};

impl DecoderFamily for JambaConfig {
    fn kind(&self, index: usize) -> &'static str {
        match (self.attends.get(index) == Some(&true), self.sparse.get(index) == Some(&true)) {
            (true, true) => "attention_experts",
            (true, false) => "attention",
            (false, true) => "mamba_experts",
            (false, false) => "mamba",
        }
    }

    fn states(&self, index: usize, options: &BuildOptions) -> LayerStates {
        match self.kind(index).starts_with("attention") {
            true => LayerStates::paged(),
            false => self.mixer.states("mamba", options),
        }
    }

    fn norm(&self) -> NormKind {
        NormKind::Rms(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let before = ResidualHalf::before(self.norm(), "input_layernorm");
        let x = match at.kind.starts_with("attention") {
            true => {
                before.add(g, x, "self_attn", |g, x| llama::self_attention(self, g, x, at, [false; 2], &at.scores()))?
            }
            false => before.add(g, x, "mamba", |g, x| self.mixer.apply(g, x, at))?,
        };
        let before = ResidualHalf::before(self.norm(), "pre_ff_layernorm");
        match at.kind.ends_with("experts") {
            true => before.add(g, x, "mlp", |g, x| experts(g, x, &self.experts)),
            false => {
                before.add(g, x, "feed_forward", |g, x| gated_mlp(g, x, self.intermediate_size, MlpGate::Silu, false))
            }
        }
    }

    fn parts(&self) -> Vec<Part> {
        vec![Part {
            of: "model.layers.*.feed_forward.router.weight".into(),
            name: "model.layers.*.mlp.gate.weight".into(),
            transposed: false,
            rows: None,
        }]
    }

    fn stacks(&self) -> Vec<Stack> {
        stacks("feed_forward.experts", ["gate_proj", "up_proj", "down_proj"], self.experts.experts)
    }
}

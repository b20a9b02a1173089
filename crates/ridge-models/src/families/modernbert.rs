//! ModernBERT (Warner et al. 2024, "Smarter, Better, Faster, Longer", section 2.1): rotated queries and keys, norms in front of
//! each half of a layer, gated MLPs, and two layers of three that see a window on both sides of a token.

use ridge_files::Checkpoint;
use ridge_files::checkpoint::{Part, Rows};
use ridge_graph::ops::{Gelu, Rope};
use ridge_graph::{Builder, Result as GraphResult, Var};

use super::blocks::{MlpGate, NormKind, ResidualHalf, gated_mlp, linear, rope};
use super::definition::{FamilyDefinition, ReadConfig};
use super::encoder::{EmbeddedTokens, EncoderConfig, EncoderFamily, EncoderLayer};
use super::tensors::{QKV, TensorName, TensorTable};
use super::text_classifier::{ClassifierHead, InnerLayer, ModernHead, TextClassifier};
use crate::config::{
    DECODER_KEYS, DecoderConfig, DecoderKeys, Fields, MAX_LAYERS, MAX_POSITIONS, ROPE_KEYS, RopeKeys, layer_windows,
    read_two_ropes,
};
use crate::error::Result;

const EMBEDDING: &str = "model.embeddings.tok_embeddings";
const EMBEDDING_NORM: &str = "model.embeddings.norm";

/// Heads that the encoder was trained with.
const BESIDE: &[&str] = &["head.*", "decoder.*", "classifier.*"];

/// What training and other implementations read.
const HARMLESS: &[&str] = &[
    "cls_token_id",
    "sep_token_id",
    "decoder_bias",
    "deterministic_flash_attn",
    "embedding_dropout",
    "mlp_dropout",
    "classifier_dropout",
    "gradient_checkpointing",
    "initializer_cutoff_factor",
    // A copy of norm_eps, and a word for learned positions, in files of models that have none.
    "layer_norm_eps",
    "position_embedding_type",
    "reference_compile",
    "repad_logits_with_grad",
    "sparse_pred_ignore_index",
    "sparse_prediction",
];

/// How it is registered.
pub(super) static MODERNBERT: FamilyDefinition = FamilyDefinition {
    name: "modernbert",
    model_type: "modernbert",
    class: None,
    harmless: &[HARMLESS],
    read: ReadConfig::Encoder(read),
    tensors: TensorTable {
        embedding: TensorName { scope: EMBEDDING, ..TensorName::NONE },
        layers: "model.layers",
        attention: "attn",
        norm: TensorName { scope: EMBEDDING_NORM, ..TensorName::NONE },
        head: TensorName::NONE,
        others: &[],
        layer: &[],
        computed: &[],
    },
    gguf: None,
};

/// ModernBERT's embeddings and layers.
#[derive(Debug)]
struct ModernBertLayers {
    norm: NormKind,
    activation: Gelu,
    attention_bias: bool,
    mlp_bias: bool,
    /// Of each layer, how many tokens a token sees to each side, itself included.
    windows: Vec<Option<usize>>,
    /// The rotations of layers that see everything, and of the others.
    global: Rope,
    local: Rope,
}

fn read(f: &mut Fields<'_>) -> Result<EncoderConfig> {
    const KEYS: DecoderKeys = DecoderKeys { norm_eps: "norm_eps", default_eps: Some(1e-5), ..DECODER_KEYS };
    const GLOBAL: RopeKeys = RopeKeys { theta: "global_rope_theta", default_theta: 160_000.0, ..ROPE_KEYS };
    const LOCAL: RopeKeys = RopeKeys { theta: "local_rope_theta", ..ROPE_KEYS };
    let activation = f.gelu("hidden_activation", Gelu::Erf)?;
    let sizes = DecoderConfig::read(f, &KEYS)?;
    let (global, local) = read_two_ropes(f, sizes.rope_sizes(), &GLOBAL, &LOCAL)?;
    // The file counts the tokens on both sides together.
    let window = f.optional_size("local_attention", MAX_POSITIONS)?.unwrap_or(128) / 2 + 1;
    let every = f.optional_size("global_attn_every_n_layers", MAX_LAYERS)?.unwrap_or(3);
    let windows = layer_windows(f, sizes.num_hidden_layers, Some(window), |layer| !layer.is_multiple_of(every))?;
    let norm = match f.optional("norm_bias")?.unwrap_or(false) {
        true => NormKind::Layer(sizes.norm_eps),
        false => NormKind::LayerUnbiased(sizes.norm_eps),
    };
    let head = ModernHead {
        mean: match f.optional("classifier_pooling")?.unwrap_or("cls") {
            "mean" => true,
            "cls" => false,
            _ => return Err(f.wrong("classifier_pooling", "is not supported", "Ridge knows \"cls\" and \"mean\"")),
        },
        bias: f.optional("classifier_bias")?.unwrap_or(false),
        activation: f.gelu("classifier_activation", Gelu::Erf)?,
        norm,
    };
    let layers = ModernBertLayers {
        norm,
        activation,
        attention_bias: f.optional("attention_bias")?.unwrap_or(false),
        mlp_bias: f.optional("mlp_bias")?.unwrap_or(false),
        windows,
        global: rope(&global, sizes.max_context()),
        local: rope(&local, sizes.max_context()),
    };
    let classifier = TextClassifier::read(f, ClassifierHead::Layered(InnerLayer::ModernBert(head)))?;
    Ok(EncoderConfig { classifier, ..EncoderConfig::new(MODERNBERT.model_type, &sizes, layers) })
}

/// The first layer, whose input has been normed.
const FIRST: &str = "first";

impl EncoderFamily for ModernBertLayers {
    fn scope(&self) -> &'static str {
        MODERNBERT.tensors.layers
    }

    fn window(&self, index: usize) -> Option<usize> {
        self.windows.get(index).copied().flatten()
    }

    fn kind(&self, index: usize) -> &'static str {
        if index == 0 { FIRST } else { "" }
    }

    fn reads_positions(&self) -> bool {
        true
    }

    fn embed(&self, g: &mut Builder, c: &EncoderConfig, at: &EmbeddedTokens<'_>) -> GraphResult<Var> {
        let x = at.look_up(g, EMBEDDING, [c.vocab_size, c.hidden_size], at.ids)?;
        self.norm.apply(g, EMBEDDING_NORM, x)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &EncoderLayer<'_>) -> GraphResult<Var> {
        let c = at.config;
        let rope = if at.window.is_some() { &self.local } else { &self.global };
        let before = (at.kind != FIRST).then_some("attn_norm");
        let x = ResidualHalf { norm: self.norm, before, after: None }.add(g, x, "attn", |g, x| {
            let a = at.attend(g, x, QKV, self.attention_bias, Some(rope))?;
            linear(g, "Wo", a, c.hidden_size, self.attention_bias)
        })?;
        ResidualHalf::before(self.norm, "mlp_norm").add(g, x, "mlp", |g, x| {
            gated_mlp(g, x, c.intermediate_size, MlpGate::Gelu(self.activation), self.mlp_bias)
        })
    }

    fn finish(&self, g: &mut Builder, x: Var) -> GraphResult<Var> {
        self.norm.apply(g, "model.final_norm", x)
    }

    fn parts(&self, c: &EncoderConfig) -> Vec<Part> {
        let mut parts = Vec::new();
        let mut add = |of: &str, name: &str, kind: &str, rows: Option<Rows>| {
            let [of, name] = [of, name].map(|scope| format!("{}.*.{scope}.{kind}", self.scope()));
            parts.push(Part { of, name, transposed: false, rows });
        };
        let kinds = |bias: bool| if bias { &["weight", "bias"][..] } else { &["weight"] };
        let nth =
            |i: usize, len: usize, count: usize| Some(Rows { first: i * len, len, stride: count * len, blocks: 1 });
        for kind in kinds(self.attention_bias) {
            for (i, name) in QKV.iter().enumerate() {
                add("attn.Wqkv", &format!("attn.{name}"), kind, nth(i, c.hidden_size, 3));
            }
        }
        for kind in kinds(self.mlp_bias) {
            for (i, name) in ["gate_proj", "up_proj"].iter().enumerate() {
                add("mlp.Wi", &format!("mlp.{name}"), kind, nth(i, c.intermediate_size, 2));
            }
            add("mlp.Wo", "mlp.down_proj", kind, None);
        }
        parts
    }

    fn arrange(&self, c: &EncoderConfig, checkpoint: Checkpoint) -> Result<Checkpoint> {
        Ok(c.without_heads(checkpoint.prefixed("model.", &format!("{EMBEDDING}.weight")), BESIDE))
    }
}

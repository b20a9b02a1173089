//! BERT (Devlin et al. 2019): learned positions, segments, and norms after each half of a layer; RoBERTa (Liu et al. 2019) and
//! XLM-R (Conneau et al. 2020), whose positions begin behind that of padding; and DistilBERT (Sanh et al. 2019), without
//! segments. All have BERT's names.

use ridge_files::Checkpoint;
use ridge_graph::ops::Gelu;
use ridge_graph::{Builder, DType, Result as GraphResult, Var};
use serde_json::{Map, Value as Json};

use super::block_sparse;
use super::blocks::{NormKind, linear, mlp, scaled};
use super::definition::{FamilyDefinition, ReadConfig};
use super::encoder::{EmbeddedTokens, EncoderConfig, EncoderFamily, EncoderLayer, QUERY_KEY_VALUE};
use super::gguf_mapping::{GgufEntry, GgufMapping, GgufMetadata, LAYER_NORM_EPSILON};
use super::global_token;
use super::tensors::{TensorName, TensorTable};
use super::text_classifier::{ClassifierHead, InnerLayer, TextClassifier};
use crate::config::{DECODER_KEYS, DecoderConfig, DecoderKeys, Fields, REMEDY};
use crate::error::Result;

const WORDS: &str = "bert.embeddings.word_embeddings";

/// What checkpoints hold besides: heads that the encoder was trained with, and its positions in a list.
const BESIDE: &[&str] = &[
    "bert.pooler.*",
    "cls.*",
    "bert.cls.*",
    "classifier.*",
    "lm_head.*",
    "pre_classifier.*",
    "qa_outputs.*",
    "vocab_layer_norm.*",
    "vocab_projector.*",
    "vocab_transform.*",
    "*.position_ids",
];

/// BERT's tensors.
pub(super) const TENSORS: TensorTable = TensorTable {
    embedding: TensorName::whole("bert.embeddings.word_embeddings", "token_embd"),
    layers: "bert.encoder.layer",
    attention: "attention",
    norm: TensorName::whole("bert.embeddings.LayerNorm", "token_embd_norm"),
    head: TensorName::NONE,
    others: &[
        TensorName::whole("bert.embeddings.token_type_embeddings", "token_types"),
        TensorName::whole("bert.embeddings.position_embeddings", "position_embd"),
        TensorName { scope: "bert.pooler.dense", ..TensorName::NONE },
        TensorName { scope: "classifier", ..TensorName::NONE },
    ],
    layer: &[&[
        TensorName::whole("attention.self.query", "attn_q"),
        TensorName::whole("attention.self.key", "attn_k"),
        TensorName::whole("attention.self.value", "attn_v"),
        TensorName::whole("attention.output.dense", "attn_output"),
        TensorName::whole("attention.output.LayerNorm", "attn_output_norm"),
        TensorName::whole("intermediate.dense", "ffn_up"),
        TensorName::whole("output.dense", "ffn_down"),
        TensorName::whole("output.LayerNorm", "layer_output_norm"),
    ]],
    computed: &[],
};

/// What heads for other tasks the checkpoint has makes no difference to the encoder.
pub(super) const HARMLESS: &[&str] = &["classifier_dropout", "hidden_dropout_prob"];

/// How BERT is registered.
pub(super) static BERT: FamilyDefinition = FamilyDefinition {
    name: "bert",
    model_type: "bert",
    class: None,
    harmless: &[HARMLESS],
    read: ReadConfig::Encoder(|f| read(f, BERT.model_type, InnerLayer::Bert)),
    tensors: TENSORS,
    gguf: Some(GgufMapping {
        keys: &[
            ("attention.head_count_kv", None),
            ("attention.key_length", None),
            (LAYER_NORM_EPSILON, Some("layer_norm_eps")),
        ],
        rope_theta: None,
        read: read_segments,
        ..GgufMapping::new("bert")
    }),
};

/// How RoBERTa is registered.
pub(super) static ROBERTA: FamilyDefinition = FamilyDefinition {
    name: "roberta",
    model_type: "roberta",
    class: None,
    harmless: &[HARMLESS],
    read: ReadConfig::Encoder(|f| read(f, ROBERTA.model_type, InnerLayer::Roberta)),
    tensors: TENSORS,
    gguf: None,
};

/// How XLM-R is registered.
pub(super) static XLM_ROBERTA: FamilyDefinition = FamilyDefinition {
    name: "xlm-roberta",
    model_type: "xlm-roberta",
    class: None,
    harmless: &[HARMLESS, &["output_past"]],
    read: ReadConfig::Encoder(|f| read(f, XLM_ROBERTA.model_type, InnerLayer::Roberta)),
    tensors: TENSORS,
    gguf: None,
};

/// How DistilBERT is registered.
pub(super) static DISTILBERT: FamilyDefinition = FamilyDefinition {
    name: "distilbert",
    model_type: "distilbert",
    class: None,
    harmless: &[HARMLESS, &["dropout", "qa_dropout", "seq_classif_dropout", "tie_weights_"]],
    read: ReadConfig::Encoder(read_distilled),
    tensors: TENSORS,
    gguf: None,
};

/// The row of padding among learned positions, where the file does not say.
const PADDING: u64 = 1;

/// `head` tells the build of a classifier. In RoBERTa's, positions begin behind that of padding.
fn read(f: &mut Fields<'_>, family: &'static str, head: InnerLayer) -> Result<EncoderConfig> {
    read_variant(f, family, head, |_, _, _| Ok(BertVariant::BERT))
}

/// As [`read`], of another family of BERT's build, of which `variant` tells the rest: of the sizes and whether it classifies.
pub(super) fn read_variant(
    f: &mut Fields<'_>,
    family: &'static str,
    head: InnerLayer,
    variant: impl FnOnce(&mut Fields<'_>, &DecoderConfig, bool) -> Result<BertVariant>,
) -> Result<EncoderConfig> {
    const KEYS: DecoderKeys =
        DecoderKeys { norm_eps: "layer_norm_eps", attention_dropout: "attention_probs_dropout_prob", ..DECODER_KEYS };
    f.must_be("position_embedding_type", "absolute")?;
    // A decoder of this build masks what comes later.
    f.must_be("is_decoder", false)?;
    let type_vocab_size = f.size("type_vocab_size", 1 << 16)?;
    let activation = f.gelu("hidden_act", Gelu::Erf)?;
    let first = if head == InnerLayer::Roberta { f.count("pad_token_id")?.unwrap_or(PADDING) + 1 } else { 0 };
    let of_decoders = DecoderConfig::read(f, &KEYS)?;
    if first >= of_decoders.max_position_embeddings as u64 {
        return Err(f.wrong("pad_token_id", "leaves no position for a token", REMEDY));
    }
    let head = match head {
        InnerLayer::BigBird(_) => InnerLayer::BigBird(activation),
        other => other,
    };
    let classifier = TextClassifier::read(f, ClassifierHead::Layered(head))?;
    let variant = variant(f, &of_decoders, classifier.is_some())?;
    Ok(config(family, &of_decoders, [first as usize, type_vocab_size], (activation, variant), classifier))
}

/// The configuration of DistilBERT, with keys of its own.
fn read_distilled(f: &mut Fields<'_>) -> Result<EncoderConfig> {
    const KEYS: DecoderKeys = DecoderKeys {
        hidden_size: "dim",
        intermediate_size: "hidden_dim",
        num_hidden_layers: "n_layers",
        num_attention_heads: "n_heads",
        norm_eps: "layer_norm_eps",
        // That of the released code.
        default_eps: Some(1e-12),
        ..DECODER_KEYS
    };
    f.must_be("is_decoder", false)?;
    // Published tables hold them, computed or learned.
    f.harmless(&["sinusoidal_pos_embds"]);
    let activation = f.gelu("activation", Gelu::Erf)?;
    let of_decoders = DecoderConfig::read(f, &KEYS)?;
    let classifier = TextClassifier::read(f, ClassifierHead::Layered(InnerLayer::Distilbert))?;
    Ok(config(DISTILBERT.model_type, &of_decoders, [0, 0], (activation, BertVariant::BERT), classifier))
}

/// BERT's embeddings and layers.
#[derive(Debug)]
pub(super) struct BertLayers {
    /// The row of a text's first position among those that are learned.
    first_position: usize,
    /// Segments that are learned; none if 0.
    types: usize,
    activation: Gelu,
    norm: NormKind,
    /// What other families have besides.
    pub(super) variant: BertVariant,
}

/// What distinguishes families of BERT's build.
#[derive(Clone, Debug)]
pub(super) struct BertVariant {
    /// Factor of the embedded words.
    pub(super) word_scale: f64,
    /// Have queries, keys and values biases?
    pub(super) qkv_bias: bool,
    /// Of each layer, how many tokens a token sees to each side, itself included; empty if all see everything.
    pub(super) windows: Vec<usize>,
    /// Does a text's first token see all others, and they it, whatever the window?
    pub(super) first_sees_all: bool,
    /// Tokens of a block and how often the first one counts besides, where long texts are computed by blocks.
    pub(super) blocks: Option<[usize; 2]>,
}

impl BertVariant {
    /// BERT itself.
    pub(super) const BERT: Self =
        Self { word_scale: 1.0, qkv_bias: true, windows: Vec::new(), first_sees_all: false, blocks: None };
}

pub(super) fn config(
    family: &'static str,
    of_decoders: &DecoderConfig,
    [first_position, types]: [usize; 2],
    (activation, variant): (Gelu, BertVariant),
    classifier: Option<TextClassifier>,
) -> EncoderConfig {
    let norm = NormKind::Layer(of_decoders.norm_eps);
    let layers = BertLayers { first_position, types, activation, norm, variant };
    EncoderConfig {
        type_vocab_size: types,
        max_context: of_decoders.max_position_embeddings.saturating_sub(first_position),
        classifier,
        ..EncoderConfig::new(family, of_decoders, layers)
    }
}

impl EncoderFamily for BertLayers {
    fn scope(&self) -> &'static str {
        TENSORS.layers
    }

    fn window(&self, index: usize) -> Option<usize> {
        self.variant.windows.get(index).copied()
    }

    fn reads_positions(&self) -> bool {
        self.variant.first_sees_all || self.variant.blocks.is_some()
    }

    fn embed(&self, g: &mut Builder, c: &EncoderConfig, at: &EmbeddedTokens<'_>) -> GraphResult<Var> {
        let mut positions = at.positions;
        if self.first_position > 0 {
            let first = g.constant(DType::I32, self.first_position as f64)?;
            positions = g.add(positions, first)?;
        }
        let x = at.look_up(g, WORDS, [c.vocab_size, c.hidden_size], at.ids)?;
        let mut x = scaled(g, x, self.variant.word_scale)?;
        for (scope, rows, ids) in [
            ("bert.embeddings.token_type_embeddings", self.types, at.types),
            ("bert.embeddings.position_embeddings", c.max_position_embeddings, positions),
        ]
        .into_iter()
        .filter(|(_, rows, _)| *rows > 0)
        {
            let more = at.look_up(g, scope, [rows, c.hidden_size], ids)?;
            x = g.add(x, more)?;
        }
        self.norm.apply(g, "bert.embeddings.LayerNorm", x)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &EncoderLayer<'_>) -> GraphResult<Var> {
        let c = at.config;
        let BertVariant { first_sees_all, blocks, qkv_bias, .. } = self.variant;
        let a = g.scoped("attention.self", |g| match (first_sees_all, blocks) {
            (true, _) => global_token::attend(g, x, at),
            (false, Some(blocks)) => block_sparse::attend(g, x, at, qkv_bias, blocks),
            (false, None) => at.attend(g, x, QUERY_KEY_VALUE, qkv_bias, None),
        })?;
        let a = linear(g, "attention.output.dense", a, c.hidden_size, true)?;
        let x = g.add(a, x)?;
        let x = self.norm.apply(g, "attention.output.LayerNorm", x)?;
        let h = mlp(g, x, ["intermediate.dense", "output.dense"], c.intermediate_size, self.activation, true)?;
        let x = g.add(h, x)?;
        self.norm.apply(g, "output.LayerNorm", x)
    }

    /// The names that the graph's weights have are BERT's: some checkpoints leave out the first part,
    /// other families have their own names, and those converted from TensorFlow call the parameters of norms `gamma` and
    /// `beta`.
    fn arrange(&self, c: &EncoderConfig, checkpoint: Checkpoint) -> Result<Checkpoint> {
        let renamed = checkpoint.renamed(|name| {
            let (scope, kind) = name.rsplit_once('.')?;
            let kind = [("gamma", "weight"), ("beta", "bias")].iter().find(|(old, _)| *old == kind)?.1;
            scope.ends_with("LayerNorm").then(|| format!("{scope}.{kind}"))
        })?;
        let distils = c.family == "distilbert";
        let of_others =
            |name: &str| ["roberta.", "longformer."].iter().find_map(|of| name.strip_prefix(of).map(str::to_owned));
        let renamed = renamed.renamed(|name| match of_others(name) {
            Some(rest) => Some(format!("bert.{rest}")),
            None if distils => distilled(name),
            None => None,
        })?;
        let whole = renamed.prefixed("bert.", &format!("{WORDS}.weight"));
        let whole = if self.variant.first_sees_all { whole } else { whole.without(&[global_token::TENSORS]) };
        Ok(c.without_heads(whole, BESIDE))
    }

    fn gguf_metadata(&self) -> Result<Vec<(&'static str, GgufEntry)>, &'static str> {
        match self.activation {
            Gelu::Erf => Ok(Vec::new()),
            Gelu::Tanh => Err("its activation is not that of its family"),
        }
    }
}

/// BERT's name of a tensor that DistilBERT calls `name`; none where they agree.
fn distilled(name: &str) -> Option<String> {
    let within = name.strip_prefix("distilbert.").unwrap_or(name);
    if within.starts_with("embeddings.") {
        return Some(format!("bert.{within}"));
    }
    let (layer, within) = within.strip_prefix("transformer.layer.")?.split_once('.')?;
    let (scope, kind) = within.rsplit_once('.')?;
    const NAMES: [(&str, &str); 8] = [
        ("attention.q_lin", "attention.self.query"),
        ("attention.k_lin", "attention.self.key"),
        ("attention.v_lin", "attention.self.value"),
        ("attention.out_lin", "attention.output.dense"),
        ("sa_layer_norm", "attention.output.LayerNorm"),
        ("ffn.lin1", "intermediate.dense"),
        ("ffn.lin2", "output.dense"),
        ("output_layer_norm", "output.LayerNorm"),
    ];
    let (_, theirs) = NAMES.iter().find(|(distilled, _)| *distilled == scope)?;
    Some(format!("bert.encoder.layer.{layer}.{theirs}.{kind}"))
}

/// Adds the number of segments.
pub(super) fn read_segments(file: &dyn GgufMetadata, to: &mut Map<String, Json>) -> Result<()> {
    if file.flag("attention.causal")? == Some(true) {
        return Err(file.wrong("attention.causal", "= true asks for what no encoder does"));
    }
    let said = file.token_types()?;
    let types = file.rows("token_types.weight").map(|rows| rows as u64).or(said);
    to.insert("type_vocab_size".into(), types.unwrap_or(1).into());
    Ok(())
}

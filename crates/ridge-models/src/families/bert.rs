//! BERT (Devlin et al. 2019): learned positions, segments, and norms after each half of a layer; RoBERTa (Liu et al. 2019) and
//! XLM-R (Conneau et al. 2020), whose positions begin behind that of padding; and DistilBERT (Sanh et al. 2019), without
//! segments. Their graph is in `encoder.rs`, with BERT's names.

use ridge_graph::ops::Gelu;
use serde_json::{Map, Value as Json};

use super::definition::{FamilyDefinition, ReadConfig};
use super::encoder::BertConfig;
use super::gguf_mapping::{GgufMapping, GgufMetadata, LAYER_NORM_EPSILON};
use super::tensors::{TensorName, TensorTable};
use super::text_classifier::{InnerLayer, TextClassifier};
use crate::config::{DECODER_KEYS, DecoderConfig, DecoderKeys, Fields, REMEDY};
use crate::error::Result;

/// BERT's tensors.
const TENSORS: TensorTable = TensorTable {
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
const HARMLESS: &[&str] = &["classifier_dropout", "hidden_dropout_prob"];

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
        read: read_gguf,
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
fn read(f: &mut Fields<'_>, family: &'static str, head: InnerLayer) -> Result<BertConfig> {
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
    let classifier = TextClassifier::read(f, head)?;
    Ok(config(family, &of_decoders, [first as usize, type_vocab_size], activation, classifier))
}

/// The configuration of DistilBERT, with keys of its own.
fn read_distilled(f: &mut Fields<'_>) -> Result<BertConfig> {
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
    let classifier = TextClassifier::read(f, InnerLayer::Distilbert)?;
    Ok(config(DISTILBERT.model_type, &of_decoders, [0, 0], activation, classifier))
}

fn config(
    family: &'static str,
    of_decoders: &DecoderConfig,
    [first_position, type_vocab_size]: [usize; 2],
    activation: Gelu,
    classifier: Option<TextClassifier>,
) -> BertConfig {
    BertConfig {
        family,
        first_position,
        hidden_size: of_decoders.hidden_size,
        intermediate_size: of_decoders.intermediate_size,
        num_hidden_layers: of_decoders.num_hidden_layers,
        num_attention_heads: of_decoders.num_attention_heads,
        vocab_size: of_decoders.vocab_size,
        max_position_embeddings: of_decoders.max_position_embeddings,
        type_vocab_size,
        norm_eps: of_decoders.norm_eps,
        activation,
        classifier,
        torch_dtype: of_decoders.torch_dtype,
    }
}

fn read_gguf(file: &dyn GgufMetadata, to: &mut Map<String, Json>) -> Result<()> {
    if file.flag("attention.causal")? == Some(true) {
        return Err(file.wrong("attention.causal", "= true asks for what no encoder does"));
    }
    let said = file.token_types()?;
    let types = file.rows("token_types.weight").map(|rows| rows as u64).or(said);
    to.insert("type_vocab_size".into(), types.unwrap_or(1).into());
    Ok(())
}

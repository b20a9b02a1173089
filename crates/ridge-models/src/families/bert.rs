//! BERT (Devlin et al. 2019): learned positions, segments, and norms after each half of a layer. Its graph is in
//! `encoder.rs`.

use ridge_graph::ops::Gelu;
use serde_json::{Map, Value as Json};

use super::definition::{FamilyDefinition, ReadConfig};
use super::encoder::BertConfig;
use super::gguf_mapping::{GgufMapping, GgufMetadata, LAYER_NORM_EPSILON};
use super::tensors::{TensorName, TensorTable};
use crate::config::{DECODER_KEYS, DecoderConfig, DecoderKeys, Fields};
use crate::error::Result;

/// How it is registered.
pub(super) static BERT: FamilyDefinition = FamilyDefinition {
    name: "bert",
    model_type: "bert",
    class: None,
    // What heads for other tasks the checkpoint has makes no difference to the encoder.
    harmless: &[&["architectures", "classifier_dropout", "hidden_dropout_prob"]],
    read: ReadConfig::Encoder(read),
    tensors: TensorTable {
        embedding: TensorName::whole("bert.embeddings.word_embeddings", "token_embd"),
        layers: "bert.encoder.layer",
        attention: "attention",
        norm: TensorName::whole("bert.embeddings.LayerNorm", "token_embd_norm"),
        head: TensorName::NONE,
        others: &[
            TensorName::whole("bert.embeddings.token_type_embeddings", "token_types"),
            TensorName::whole("bert.embeddings.position_embeddings", "position_embd"),
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
    },
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

fn read(f: &mut Fields<'_>) -> Result<BertConfig> {
    const KEYS: DecoderKeys =
        DecoderKeys { norm_eps: "layer_norm_eps", attention_dropout: "attention_probs_dropout_prob", ..DECODER_KEYS };
    f.must_be("position_embedding_type", "absolute")?;
    // A decoder of this build masks what comes later.
    f.must_be("is_decoder", false)?;
    let type_vocab_size = f.size("type_vocab_size", 1 << 16)?;
    let activation = f.gelu("hidden_act", Gelu::Erf)?;
    let of_decoders = DecoderConfig::read(f, &KEYS)?;
    Ok(BertConfig {
        family: BERT.model_type,
        hidden_size: of_decoders.hidden_size,
        intermediate_size: of_decoders.intermediate_size,
        num_hidden_layers: of_decoders.num_hidden_layers,
        num_attention_heads: of_decoders.num_attention_heads,
        vocab_size: of_decoders.vocab_size,
        max_position_embeddings: of_decoders.max_position_embeddings,
        type_vocab_size,
        norm_eps: of_decoders.norm_eps,
        activation,
        torch_dtype: of_decoders.torch_dtype,
    })
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

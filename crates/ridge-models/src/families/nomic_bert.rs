//! nomic-bert (Nussbaum et al. 2024, "Nomic Embed: Training a Reproducible Long Context Text Embedder", section 3.2): BERT with
//! rotated queries and keys, gated MLPs and no biases beside those of norms.

use ridge_files::Checkpoint;
use ridge_files::checkpoint::{Part, Rows};
use ridge_graph::ops::Rope;
use ridge_graph::{Builder, Result as GraphResult, Var};
use serde_json::Value as Json;

use super::bert::read_segments;
use super::blocks::{MlpGate, NormKind, gated_mlp, linear, rope};
use super::definition::{FamilyDefinition, ReadConfig};
use super::encoder::{EmbeddedTokens, EncoderConfig, EncoderFamily, EncoderLayer};
use super::gguf_mapping::{GgufEntry, GgufMapping, LAYER_NORM_EPSILON};
use super::tensors::{Cut, GATED_MLP, QKV, TensorName, TensorTable};
use crate::config::{DECODER_KEYS, DecoderConfig, DecoderKeys, Fields, ROPE_KEYS, RopeConfig, RopeKeys, read_rope};
use crate::error::Result;

const WORDS: &str = "embeddings.word_embeddings";
const SEGMENTS: &str = "embeddings.token_type_embeddings";
const EMBEDDING_NORM: &str = "emb_ln";

/// What training and other implementations read, in both spellings.
const HARMLESS: &[&str] = &[
    "classifier_dropout",
    "hidden_dropout_prob",
    "dense_seq_output",
    "embd_pdrop",
    "fused_bias_fc",
    "fused_dropout_add_ln",
    "max_trained_positions",
    "pad_vocab_size_multiple",
    "parallel_block_tied_norm",
    "reorder_and_upcast_attn",
    "resid_pdrop",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "use_flash_attn",
    "use_xentropy",
];

/// How it is registered.
pub(super) static NOMIC_BERT: FamilyDefinition = FamilyDefinition {
    name: "nomic-bert",
    model_type: "nomic_bert",
    class: Some("NomicBertModel"),
    harmless: &[HARMLESS],
    read: ReadConfig::Encoder(read),
    tensors: TensorTable {
        embedding: TensorName::whole(WORDS, "token_embd"),
        layers: "encoder.layers",
        attention: "attn",
        norm: TensorName::whole(EMBEDDING_NORM, "token_embd_norm"),
        head: TensorName::NONE,
        others: &[TensorName::whole(SEGMENTS, "token_types")],
        layer: &[
            &[
                TensorName::cut("attn.q_proj", Cut::Heads, "attn_qkv"),
                TensorName::cut("attn.k_proj", Cut::Heads, "attn_qkv"),
                TensorName::cut("attn.v_proj", Cut::Heads, "attn_qkv"),
                TensorName::cut("attn.out_proj", Cut::HeadTerms, "attn_output"),
            ],
            GATED_MLP,
            &[TensorName::whole("norm1", "attn_output_norm"), TensorName::whole("norm2", "layer_output_norm")],
        ],
        computed: &[],
    },
    gguf: Some(GgufMapping {
        keys: &[
            ("attention.head_count_kv", None),
            ("attention.key_length", None),
            (LAYER_NORM_EPSILON, Some("layer_norm_eps")),
        ],
        read: read_segments,
        ..GgufMapping::new("nomic-bert")
    }),
};

/// nomic-bert's embeddings and layers.
#[derive(Debug)]
struct NomicBertLayers {
    norm: NormKind,
    rotation: RopeConfig,
    rope: Rope,
}

fn read(f: &mut Fields<'_>) -> Result<EncoderConfig> {
    const KEYS: DecoderKeys =
        DecoderKeys { norm_eps: "layer_norm_eps", attention_dropout: "attention_probs_dropout_prob", ..DECODER_KEYS };
    // The keys of the code that was published with the models, which are GPT-2's.
    const OLDER: DecoderKeys = DecoderKeys {
        hidden_size: "n_embd",
        intermediate_size: "n_inner",
        num_hidden_layers: "n_layer",
        num_attention_heads: "n_head",
        max_position_embeddings: "n_positions",
        norm_eps: "layer_norm_epsilon",
        attention_dropout: "attn_pdrop",
        ..DECODER_KEYS
    };
    let older = f.has(OLDER.hidden_size);
    for key in ["prenorm", "parallel_block", "causal", "use_rms_norm", "scale_attn_by_inverse_layer_idx"] {
        f.must_be(key, false)?;
    }
    for key in ["qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "rotary_emb_interleaved"] {
        f.must_be(key, false)?;
    }
    for key in ["rotary_emb_scale_base", "rotary_scaling_factor"] {
        f.must_be(key, Json::Null)?;
    }
    f.must_be("scale_attn_weights", true)?;
    f.must_be("rotary_emb_fraction", 1)?;
    f.must_be("num_experts", 0)?;
    f.must_be("activation_function", "swiglu")?;
    f.must_be("hidden_act", "silu")?;
    let sizes = DecoderConfig::read(f, if older { &OLDER } else { &KEYS })?;
    let theta = if older { "rotary_emb_base" } else { ROPE_KEYS.theta };
    let rotation = read_rope(f, sizes.rope_sizes(), &RopeKeys { theta, default_theta: 1000.0, ..ROPE_KEYS })?;
    if sizes.head_dim * sizes.num_attention_heads != sizes.hidden_size {
        return Err(f.wrong("head_dim", "is not hidden_size / num_attention_heads", "choose another checkpoint"));
    }
    let layers =
        NomicBertLayers { norm: NormKind::Layer(sizes.norm_eps), rope: rope(&rotation, sizes.max_context()), rotation };
    let type_vocab_size = f.size("type_vocab_size", 1 << 16)?;
    Ok(EncoderConfig { type_vocab_size, ..EncoderConfig::new(NOMIC_BERT.model_type, &sizes, layers) })
}

impl EncoderFamily for NomicBertLayers {
    fn scope(&self) -> &'static str {
        NOMIC_BERT.tensors.layers
    }

    fn reads_positions(&self) -> bool {
        true
    }

    fn embed(&self, g: &mut Builder, c: &EncoderConfig, at: &EmbeddedTokens<'_>) -> GraphResult<Var> {
        let x = at.look_up(g, WORDS, [c.vocab_size, c.hidden_size], at.ids)?;
        let segments = at.look_up(g, SEGMENTS, [c.type_vocab_size, c.hidden_size], at.types)?;
        let x = g.add(x, segments)?;
        self.norm.apply(g, EMBEDDING_NORM, x)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &EncoderLayer<'_>) -> GraphResult<Var> {
        let c = at.config;
        let a = g.scoped("attn", |g| {
            let a = at.attend(g, x, QKV, false, Some(&self.rope))?;
            linear(g, "out_proj", a, c.hidden_size, false)
        })?;
        let x = g.add(x, a)?;
        let x = self.norm.apply(g, "norm1", x)?;
        let h = g.scoped("mlp", |g| gated_mlp(g, x, c.intermediate_size, MlpGate::Silu, false))?;
        let x = g.add(x, h)?;
        self.norm.apply(g, "norm2", x)
    }

    fn parts(&self, c: &EncoderConfig) -> Vec<Part> {
        let part = |of: &str, name: &str, rows| {
            let [of, name] = [of, name].map(|scope| format!("{}.*.{scope}.weight", self.scope()));
            Part { of, name, transposed: false, rows }
        };
        let len = c.hidden_size;
        let nth = |i| Some(Rows { first: i * len, len, stride: 3 * len, blocks: 1 });
        let mut parts: Vec<Part> =
            QKV.iter().enumerate().map(|(i, name)| part("attn.Wqkv", &format!("attn.{name}"), nth(i))).collect();
        for (of, name) in [("fc11", "up_proj"), ("fc12", "gate_proj"), ("fc2", "down_proj")] {
            parts.push(part(&format!("mlp.{of}"), &format!("mlp.{name}"), None));
        }
        parts
    }

    fn arrange(&self, _c: &EncoderConfig, checkpoint: Checkpoint) -> Result<Checkpoint> {
        // Saved with the head that it was trained with, an encoder has a prefix.
        let checkpoint = checkpoint.renamed(|name| name.strip_prefix("bert.").map(str::to_owned))?;
        Ok(checkpoint.without(&["pooler.*", "cls.*", "classifier.*"]))
    }

    fn gguf_metadata(&self) -> Result<Vec<(&'static str, GgufEntry)>, &'static str> {
        match self.rotation.scaling {
            Some(_) => Err("its frequencies are scaled"),
            None => Ok(vec![("rope.freq_base", GgufEntry::F32(self.rotation.theta as f32))]),
        }
    }
}

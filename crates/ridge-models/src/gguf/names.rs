//! The tensors of a file, and the weights of a graph that each of them holds.
//!
//! A file has queries, keys and values as one tensor where the model was published so, one after another. The rows of
//! Llama's queries and keys are in another order, since there the two numbers that a rotation turns lie side by side;
//! Gemma's norms have one added.

use ridge_files::checkpoint::{Change, Gathered};
use ridge_files::gguf::{GgufTensor, TensorStorage};
use ridge_files::{Checkpoint, Gguf};

use super::config::{config_json, model_type};
use crate::config::{BertConfig, DecoderConfig, ModelConfig};
use crate::error::Result;

/// One tensor of a file.
#[derive(Clone, Debug)]
pub(super) struct Rule {
    /// Its name, such as `blk.0.attn_q.weight`.
    pub(super) file: String,
    /// The weights whose rows it has, and how many rows each; all of its rows if 0.
    pub(super) weights: Vec<(String, usize)>,
    /// How the weight follows from what the file has.
    pub(super) change: Change,
}

/// How the graph of a family calls what every decoder has: embedding, layers, last norm, output projection.
fn outer(family: &str) -> [&'static str; 4] {
    match family {
        "gpt2" => ["transformer.wte", "transformer.h", "transformer.ln_f", "lm_head"],
        "gpt_neox" => ["gpt_neox.embed_in", "gpt_neox.layers", "gpt_neox.final_layer_norm", "embed_out"],
        "falcon" => ["transformer.word_embeddings", "transformer.h", "transformer.ln_f", "lm_head"],
        // Its first norm is that of the embeddings, and it has no head.
        "bert" => ["bert.embeddings.word_embeddings", "bert.encoder.layer", "bert.embeddings.LayerNorm", ""],
        _ => ["model.embed_tokens", "model.layers", "model.norm", "lm_head"],
    }
}

/// Names within a layer: in the file, and in the graph.
fn inner(family: &str) -> Vec<(&'static str, &'static [&'static str])> {
    const SPLIT: [(&str, &[&str]); 4] = [
        ("attn_q", &["self_attn.q_proj"]),
        ("attn_k", &["self_attn.k_proj"]),
        ("attn_v", &["self_attn.v_proj"]),
        ("attn_output", &["self_attn.o_proj"]),
    ];
    const GATED: [(&str, &[&str]); 3] =
        [("ffn_gate", &["mlp.gate_proj"]), ("ffn_up", &["mlp.up_proj"]), ("ffn_down", &["mlp.down_proj"])];
    const HEAD_NORMS: [(&str, &[&str]); 2] =
        [("attn_q_norm", &["self_attn.q_norm"]), ("attn_k_norm", &["self_attn.k_norm"])];
    const AFTER: [(&str, &[&str]); 2] =
        [("post_attention_norm", &["post_attention_layernorm"]), ("post_ffw_norm", &["post_feedforward_layernorm"])];
    const BEFORE: (&str, &[&str]) = ("attn_norm", &["input_layernorm"]);
    match family {
        "gemma2" | "gemma3_text" => {
            let own = [BEFORE, ("ffn_norm", &["pre_feedforward_layernorm"] as &[&str])];
            [&SPLIT[..], &GATED, &HEAD_NORMS, &AFTER, &own].concat()
        }
        "olmo2" => [&SPLIT[..], &GATED, &HEAD_NORMS, &AFTER].concat(),
        "phi3" => vec![
            BEFORE,
            ("attn_qkv", &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
            SPLIT[3],
            ("ffn_norm", &["post_attention_layernorm"]),
            ("ffn_up", &["mlp.gate_proj", "mlp.up_proj"]),
            GATED[2],
        ],
        "gpt2" => vec![
            ("attn_norm", &["ln_1"]),
            ("attn_qkv", &["attn.q_proj", "attn.k_proj", "attn.v_proj"]),
            ("attn_output", &["attn.c_proj"]),
            ("ffn_norm", &["ln_2"]),
            ("ffn_up", &["mlp.c_fc"]),
            ("ffn_down", &["mlp.c_proj"]),
        ],
        "gpt_neox" => vec![
            BEFORE,
            ("attn_qkv", &["attention.q_proj", "attention.k_proj", "attention.v_proj"]),
            ("attn_output", &["attention.dense"]),
            ("ffn_norm", &["post_attention_layernorm"]),
            ("ffn_up", &["mlp.dense_h_to_4h"]),
            ("ffn_down", &["mlp.dense_4h_to_h"]),
        ],
        "bert" => vec![
            ("attn_q", &["attention.self.query"]),
            ("attn_k", &["attention.self.key"]),
            ("attn_v", &["attention.self.value"]),
            ("attn_output", &["attention.output.dense"]),
            ("attn_output_norm", &["attention.output.LayerNorm"]),
            ("ffn_up", &["intermediate.dense"]),
            ("ffn_down", &["output.dense"]),
            ("layer_output_norm", &["output.LayerNorm"]),
        ],
        "falcon" => vec![
            BEFORE,
            ("attn_qkv", &["self_attention.q_proj", "self_attention.k_proj", "self_attention.v_proj"]),
            ("attn_output", &["self_attention.dense"]),
            ("ffn_up", &["mlp.dense_h_to_4h"]),
            ("ffn_down", &["mlp.dense_4h_to_h"]),
        ],
        _ => {
            let own = [BEFORE, ("ffn_norm", &["post_attention_layernorm"] as &[&str])];
            [&SPLIT[..], &GATED, &HEAD_NORMS, &own].concat()
        }
    }
}

/// What decides how many rows tensors have, and which.
pub(super) struct Sizes {
    pub(super) layers: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    head_dim: usize,
    intermediate: usize,
}

impl From<&DecoderConfig> for Sizes {
    fn from(config: &DecoderConfig) -> Self {
        Self {
            layers: config.num_hidden_layers,
            heads: config.num_attention_heads,
            kv_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            intermediate: config.intermediate_size,
        }
    }
}

impl From<&BertConfig> for Sizes {
    fn from(config: &BertConfig) -> Self {
        let heads = config.num_attention_heads;
        Self {
            layers: config.num_hidden_layers,
            heads,
            kv_heads: heads,
            head_dim: config.hidden_size / heads,
            intermediate: config.intermediate_size,
        }
    }
}

/// The tensors that a model of `family` may have; not all of them have biases, or an output of their own.
pub(super) fn rules(family: &str, sizes: &Sizes, two_norms: bool) -> Vec<Rule> {
    let [embedding, layers, norm, head] = outer(family);
    let (q, kv) = (sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim);
    let llama = matches!(family, "llama" | "mistral");
    let gemma = family.starts_with("gemma");
    let mut rules = Vec::new();
    let mut add = |file: String, weights: Vec<(String, usize)>, change: Change| {
        for kind in ["weight", "bias"] {
            let weights = weights.iter().map(|(name, rows)| (format!("{name}.{kind}"), *rows)).collect();
            rules.push(Rule { file: format!("{file}.{kind}"), weights, change });
        }
    };
    let of_norm = |name: &str| if gemma && name.ends_with("norm") { Change::MinusOne } else { Change::None };
    add("token_embd".into(), vec![(embedding.into(), 0)], Change::None);
    if family == "bert" {
        add("token_embd_norm".into(), vec![(norm.into(), 0)], Change::None);
        add("token_types".into(), vec![("bert.embeddings.token_type_embeddings".into(), 0)], Change::None);
        add("position_embd".into(), vec![("bert.embeddings.position_embeddings".into(), 0)], Change::None);
    } else {
        add("output_norm".into(), vec![(norm.into(), 0)], of_norm("norm"));
        add("output".into(), vec![(head.into(), 0)], Change::None);
    }
    if family == "gpt2" {
        add("position_embd".into(), vec![("transformer.wpe".into(), 0)], Change::None);
    }
    let mut within = inner(family);
    if family == "falcon" && two_norms {
        within[0] = ("attn_norm", &["ln_mlp"]);
        within.push(("attn_norm_2", &["ln_attn"]));
    }
    for layer in 0..sizes.layers {
        for (file, names) in &within {
            let rows = |i: usize| match (names.len(), i) {
                (1, _) => 0,
                (2, _) => sizes.intermediate,
                (_, 0) => q,
                _ => kv,
            };
            let weights = names.iter().enumerate().map(|(i, name)| (format!("{layers}.{layer}.{name}"), rows(i)));
            let change = match *file {
                "attn_q" if llama => Change::Interleaved { heads: sizes.heads },
                "attn_k" if llama => Change::Interleaved { heads: sizes.kv_heads },
                file => of_norm(file),
            };
            add(format!("blk.{layer}.{file}"), weights.collect(), change);
        }
    }
    rules
}

/// Tensors that hold no weights: what they say is in the configuration.
const TABLES: [&str; 3] = ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"];

/// The weights of `gguf` under the names that the family's graph has.
///
/// # Errors
///
/// [`ModelError::Files`](crate::ModelError::Files) if the architecture is not one that Ridge runs, or a tensor has a wrong
/// shape.
pub fn checkpoint(gguf: &Gguf) -> Result<Checkpoint> {
    let text = config_json(gguf)?;
    let sizes = match BertConfig::is_one(gguf.file(), &text)? {
        true => Sizes::from(&BertConfig::from_json(gguf.file(), &text)?),
        false => Sizes::from(&*ModelConfig::from_json(gguf.file(), &text)?),
    };
    let family = model_type(gguf.text("general.architecture")?.unwrap_or_default());
    let named: std::collections::BTreeMap<&str, &GgufTensor> =
        gguf.tensors().iter().map(|t| (t.name.as_str(), t)).collect();
    let rules = rules(family, &sizes, named.contains_key("blk.0.attn_norm_2.weight"));
    let mut left = named.clone();
    TABLES.iter().for_each(|table| {
        left.remove(table);
    });
    let mut tensors = Vec::new();
    for rule in &rules {
        let Some(tensor) = left.remove(rule.file.as_str()) else { continue };
        let rows = tensor.shape.first().copied().unwrap_or(1);
        let wanted: usize = rule.weights.iter().map(|(_, rows)| rows).sum();
        if wanted != 0 && wanted != rows {
            let problem = format!("the tensor {} has {rows} rows, and the metadata asks for {wanted}", rule.file);
            return Err(gguf.fail(problem, "download the file again, or convert the model anew").into());
        }
        // A vector's rows are its elements, of which a block is none.
        let row = match tensor.shape.len() {
            1 if tensor.storage.format.is_some() => 0,
            _ => tensor.range.len() / rows.max(1),
        };
        let mut from = tensor.range.start;
        for (name, part) in &rule.weights {
            let (mut shape, mut bytes) = (tensor.shape.clone(), tensor.range.len());
            if rule.weights.len() > 1 {
                shape[0] = *part;
                bytes = part * row;
            }
            let range = from..from + bytes;
            from = range.end;
            tensors.push(gathered(name.clone(), tensor, shape, range, rule.change));
        }
    }
    // What has no rule keeps its name, so that the list of what is not in the model has it.
    for (name, tensor) in left {
        tensors.push(gathered(name.to_owned(), tensor, tensor.shape.clone(), tensor.range.clone(), Change::None));
    }
    Ok(Checkpoint::from_gguf(gguf, tensors)?)
}

fn gathered(
    name: String,
    tensor: &GgufTensor,
    shape: Vec<usize>,
    range: std::ops::Range<usize>,
    change: Change,
) -> Gathered {
    let TensorStorage { dtype, format } = tensor.storage.clone();
    Gathered { name, dtype, format, shape, part: tensor.part, range, change }
}

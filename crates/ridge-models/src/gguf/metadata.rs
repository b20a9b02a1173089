//! A configuration as metadata: the inverse of `config.rs`.

use ridge_files::FilesError;
use ridge_files::gguf::GgufWriter;
use ridge_graph::ops::{llama3_scaling, rope_frequencies};

use super::config::{POOLINGS, yarn_temper};
use crate::config::RopeScaling;
use crate::error::{ModelError, Result};
use crate::families::{EncoderConfig, GgufEntry, ModelConfig};
use crate::source::ModelFiles;

/// Adds what `config` says to what is to be written.
pub(super) fn write(files: &ModelFiles, config: &ModelConfig, to: &mut GgufWriter) -> Result<()> {
    let Some(mapping) = &config.family().gguf else {
        return Err(no_words(files, "the format has no name for its family"));
    };
    if !mapping.tensors.is_empty() {
        return Err(no_words(files, "files of its family are only read"));
    }
    let architecture = mapping.architecture;
    let refuse = |problem: &str| Err(no_words(files, problem));
    let key = |name: &str| format!("{architecture}.{name}");
    to.text("general.architecture", architecture);
    name(files, to);
    for (name, value) in [
        ("vocab_size", config.vocab_size),
        ("context_length", config.max_position_embeddings),
        ("embedding_length", config.hidden_size),
        ("feed_forward_length", config.intermediate_size),
        ("block_count", config.num_hidden_layers),
        ("attention.head_count", config.num_attention_heads),
        ("attention.head_count_kv", config.num_key_value_heads),
        ("attention.key_length", config.head_dim),
        ("attention.value_length", config.head_dim),
    ] {
        to.u32(&key(name), value as u32);
    }
    to.f32(&key(mapping.epsilon_key()), config.norm_eps as f32);
    if let Some(rope) = &config.rope {
        to.u32(&key("rope.dimension_count"), rope.rotary_dim as u32);
        to.f32(&key("rope.freq_base"), rope.theta as f32);
        match &rope.scaling {
            // Llama 3's factors are a tensor.
            None | Some(RopeScaling::Llama3 { .. }) => {}
            Some(RopeScaling::Linear { factor }) => {
                to.text(&key("rope.scaling.type"), "linear");
                to.f32(&key("rope.scaling.factor"), *factor as f32);
            }
            Some(RopeScaling::Yarn {
                factor,
                original_max_position_embeddings,
                beta_fast,
                beta_slow,
                truncate,
                attention_factor,
            }) => {
                if !truncate {
                    return refuse("its YaRN scaling is not truncated");
                }
                to.text(&key("rope.scaling.type"), "yarn");
                to.f32(&key("rope.scaling.factor"), *factor as f32);
                to.u32(&key("rope.scaling.original_context_length"), *original_max_position_embeddings as u32);
                to.f32(&key("rope.scaling.yarn_beta_fast"), *beta_fast as f32);
                to.f32(&key("rope.scaling.yarn_beta_slow"), *beta_slow as f32);
                // As a part of what the factor alone would give.
                let usual = yarn_temper(*factor);
                if (attention_factor - usual).abs() > 1e-9 {
                    to.f32(&key("rope.scaling.attn_factor"), (attention_factor / usual) as f32);
                }
            }
            Some(RopeScaling::LongRope { original_max_position_embeddings, attention_factor, .. }) => {
                to.u32(&key("rope.scaling.original_context_length"), *original_max_position_embeddings as u32);
                to.f32(&key("rope.scaling.attn_factor"), *attention_factor as f32);
            }
            Some(RopeScaling::Dynamic { .. }) => return refuse("its frequencies are scaled dynamically"),
        }
    }
    let entries = config.gguf_metadata().map_err(|problem| no_words(files, problem))?;
    write_entries(key, entries, to);
    Ok(())
}

/// Adds what a family has alone.
fn write_entries(key: impl Fn(&str) -> String, entries: Vec<(&'static str, GgufEntry)>, to: &mut GgufWriter) {
    for (name, entry) in entries {
        let key = key(name);
        match entry {
            GgufEntry::U32(value) => to.u32(&key, value),
            GgufEntry::F32(value) => to.f32(&key, value),
            GgufEntry::Bool(value) => to.bool(&key, value),
            GgufEntry::Text(value) => to.text(&key, value),
        }
    }
}

/// Adds what an encoder's `config` says to what is to be written.
pub(super) fn write_encoder(files: &ModelFiles, config: &EncoderConfig, to: &mut GgufWriter) -> Result<()> {
    let Some(mapping) = config.family().and_then(|family| family.gguf.as_ref()) else {
        return Err(no_words(files, "the format has no name for its family"));
    };
    let architecture = mapping.architecture;
    let key = |name: &str| format!("{architecture}.{name}");
    to.text("general.architecture", architecture);
    name(files, to);
    for (name, value) in [
        ("vocab_size", config.vocab_size),
        ("context_length", config.max_position_embeddings),
        ("embedding_length", config.hidden_size),
        ("feed_forward_length", config.intermediate_size),
        ("block_count", config.num_hidden_layers),
        ("attention.head_count", config.num_attention_heads),
    ] {
        to.u32(&key(name), value as u32);
    }
    to.u32("tokenizer.ggml.token_type_count", config.type_vocab_size as u32);
    to.f32(&key(mapping.epsilon_key()), config.norm_eps as f32);
    to.bool(&key("attention.causal"), false);
    let entries = config.gguf_metadata().map_err(|problem| no_words(files, problem))?;
    write_entries(key, entries, to);
    if let Some(said) = files.sentence_config()? {
        let number = POOLINGS.iter().find(|(_, pooling)| *pooling == said.pooling);
        let (number, _) = number.ok_or_else(|| no_words(files, &format!("it pools by {}", said.pooling)))?;
        to.u32(&key("pooling_type"), *number);
        if !said.dense.is_empty() {
            return Err(no_words(files, "its vectors go through Dense modules"));
        }
        if said.prompt.is_some() {
            return Err(no_words(files, "its texts begin with a default prompt"));
        }
    }
    Ok(())
}

fn name(files: &ModelFiles, to: &mut GgufWriter) {
    let name = files.to_string();
    to.text("general.name", std::path::Path::new(&name).file_name().and_then(|n| n.to_str()).unwrap_or(&name));
}

fn no_words(files: &ModelFiles, problem: &str) -> ModelError {
    ModelError::Files(FilesError::Path {
        path: files.to_string().into(),
        problem: format!("it cannot be written as GGUF: {problem}"),
        remedy: "run the model from its folder".to_owned(),
    })
}

/// Tensors of factors of the frequencies.
pub(super) fn tables(config: &ModelConfig) -> Vec<(&'static str, Vec<f32>)> {
    let Some(rope) = &config.rope else { return Vec::new() };
    let narrow = |factors: &[f64]| factors.iter().map(|f| *f as f32).collect::<Vec<f32>>();
    match &rope.scaling {
        Some(RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings }) => {
            let plain = rope_frequencies(rope.theta, rope.rotary_dim);
            let original = *original_max_position_embeddings as f64;
            let scaled = llama3_scaling(&plain, *factor, *low_freq_factor, *high_freq_factor, original);
            let factors: Vec<f64> = plain.iter().zip(&scaled).map(|(plain, scaled)| plain / scaled).collect();
            vec![("rope_freqs.weight", narrow(&factors))]
        }
        Some(RopeScaling::LongRope { short_factor, long_factor, .. }) => {
            vec![("rope_factors_long.weight", narrow(long_factor)), ("rope_factors_short.weight", narrow(short_factor))]
        }
        _ => Vec::new(),
    }
}

//! A configuration as metadata: the inverse of `config.rs`.

use ridge_files::FilesError;
use ridge_files::gguf::GgufWriter;
use ridge_graph::ops::{Gelu, llama3_scaling, rope_frequencies};

use super::config::{ARCHITECTURES, POOLINGS, yarn_temper};
use crate::config::{BertConfig, ModelConfig, RopeScaling};
use crate::error::{ModelError, Result};
use crate::source::ModelFiles;

/// The family of a configuration, as `model_type` spells it.
pub(super) fn family(config: &ModelConfig) -> &'static str {
    match config {
        ModelConfig::Llama(_) => "llama",
        ModelConfig::Mistral(_) => "mistral",
        ModelConfig::Qwen(c) if c.qk_norm => "qwen3",
        ModelConfig::Qwen(_) => "qwen2",
        ModelConfig::Gemma(c) if c.qk_norm => "gemma3_text",
        ModelConfig::Gemma(_) => "gemma2",
        ModelConfig::Phi3(_) => "phi3",
        ModelConfig::Olmo2(_) => "olmo2",
        ModelConfig::Gpt2(_) => "gpt2",
        ModelConfig::GptNeox(_) => "gpt_neox",
        ModelConfig::Falcon(_) => "falcon",
    }
}

/// Adds what `config` says to what is to be written.
pub(super) fn write(files: &ModelFiles, config: &ModelConfig, to: &mut GgufWriter) -> Result<()> {
    let family = family(config);
    let known = ARCHITECTURES.iter().find(|(_, ours)| *ours == family);
    // Mistral's layers are Llama's.
    let architecture = known.map_or("llama", |(theirs, _)| theirs);
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
    let layer_norm = matches!(family, "gpt2" | "gpt_neox" | "falcon");
    let epsilon = if layer_norm { "attention.layer_norm_epsilon" } else { "attention.layer_norm_rms_epsilon" };
    to.f32(&key(epsilon), config.norm_eps as f32);
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
    let window = |to: &mut GgufWriter, window: Option<usize>| {
        if let Some(window) = window {
            to.u32(&key("attention.sliding_window"), window as u32);
        }
    };
    match config {
        ModelConfig::Mistral(c) => window(to, c.sliding_window),
        ModelConfig::Phi3(c) => window(to, c.sliding_window),
        ModelConfig::Qwen(c) if c.windows.iter().any(Option::is_some) => {
            return refuse("some of its layers see a window only");
        }
        ModelConfig::Gemma(c) => {
            window(to, c.windows.iter().copied().flatten().next());
            to.f32(&key("attention.query_pre_attn_scalar"), c.query_pre_attn_scalar as f32);
            for (name, cap) in [
                ("attn_logit_softcapping", c.attn_logit_softcapping),
                ("final_logit_softcapping", c.final_logit_softcapping),
            ] {
                if let Some(cap) = cap {
                    to.f32(&key(name), cap as f32);
                }
            }
            let every = c.windows.iter().position(Option::is_none).map_or(0, |first| first + 1);
            let usual = if c.qk_norm { 6 } else { 2 };
            let fits =
                |period: usize| c.windows.iter().enumerate().all(|(i, w)| w.is_none() == ((i + 1) % period == 0));
            if every != 0 && !fits(usual) {
                if !c.qk_norm || !fits(every) {
                    return refuse("its layers with windows are not where those of its family are");
                }
                to.u32(&key("attention.sliding_window_pattern"), every as u32);
            }
            if c.qk_norm {
                if c.local_rope.scaling.is_some() {
                    return refuse("its local layers have scaled frequencies");
                }
                to.f32(&key("rope.freq_base_swa"), c.local_rope.theta as f32);
            }
        }
        ModelConfig::GptNeox(c) => {
            to.bool(&key("use_parallel_residual"), c.use_parallel_residual);
            if c.activation != Gelu::Erf {
                return refuse("its activation is not that of its family");
            }
        }
        ModelConfig::Gpt2(c) if c.activation != Gelu::Tanh => {
            return refuse("its activation is not that of its family");
        }
        ModelConfig::Falcon(c) if c.activation != Gelu::Erf => {
            return refuse("its activation is not that of its family");
        }
        // Queries, keys and values lie one after another, not by groups of heads.
        ModelConfig::Falcon(_) => to.text(&key("tensor_data_layout"), "jploski"),
        _ => {}
    }
    Ok(())
}

/// Adds what an encoder's `config` says to what is to be written.
pub(super) fn write_encoder(files: &ModelFiles, config: &BertConfig, to: &mut GgufWriter) -> Result<()> {
    to.text("general.architecture", "bert");
    name(files, to);
    for (key, value) in [
        ("bert.vocab_size", config.vocab_size),
        ("bert.context_length", config.max_position_embeddings),
        ("bert.embedding_length", config.hidden_size),
        ("bert.feed_forward_length", config.intermediate_size),
        ("bert.block_count", config.num_hidden_layers),
        ("bert.attention.head_count", config.num_attention_heads),
        ("tokenizer.ggml.token_type_count", config.type_vocab_size),
    ] {
        to.u32(key, value as u32);
    }
    to.f32("bert.attention.layer_norm_epsilon", config.norm_eps as f32);
    to.bool("bert.attention.causal", false);
    if config.activation != Gelu::Erf {
        return Err(no_words(files, "its activation is not that of its family"));
    }
    if let Some(said) = files.sentence_config()? {
        let number = POOLINGS.iter().find(|(_, pooling)| *pooling == said.pooling);
        let (number, _) = number.ok_or_else(|| no_words(files, &format!("it pools by {}", said.pooling)))?;
        to.u32("bert.pooling_type", *number);
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
        problem: problem.to_owned(),
        remedy: "GGUF has no words for it: run the model from its folder".to_owned(),
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

//! The Llama family as a graph: pre-norm decoder layers with grouped-query attention and a gated MLP (Touvron et al.
//! 2023, "Llama 2"; "The Llama 3 Herd of Models", 2024). Weights have their published names.

use ridge_graph::ops::{PagedAttention, Rope, linear_scaling, llama3_scaling, rope_frequencies};
use ridge_graph::{Builder, DType, Dim, Result as GraphResult, Type, Var};

use crate::config::{LlamaConfig, RopeScaling};
use crate::model::{BuildOptions, Model, StateGroup, StepInputs, attention_symbols, finish_decoder, paged_kv};

/// Builds the graph of `config`, with every weight as plain f32; `weights.rs` gives them the storage that a
/// checkpoint has.
///
/// # Errors
/// A mistake of ours: `config` has been checked.
pub fn llama(config: &LlamaConfig, options: &BuildOptions) -> GraphResult<Model> {
    let mut g = Builder::new();
    let step = StepInputs::ask(&mut g)?;
    let (positions, slots) =
        g.token_layout(step.seq_ids, step.query_start, step.lengths, step.block_table, options.block_size)?;
    let table = |g: &mut Builder| weight(g, "model.embed_tokens.weight", &[config.vocab_size, config.hidden_size]);
    let embedding = table(&mut g)?;
    let mut x = g.embedding(embedding, step.token_ids, options.activations)?;

    let layer = g.function("decoder_layer", |g| decoder_layer(g, config, options))?;
    for index in 0..config.num_hidden_layers {
        x = g.scoped(&format!("model.layers.{index}"), |g| g.call(layer, &[x, positions, slots]))?[0];
    }

    let x = g.scoped("model.norm", |g| norm(g, x, config))?;
    let graph = finish_decoder(g, x, &step, positions, |g, x| {
        if config.tie_word_embeddings {
            let embedding = table(g)?;
            return g.scoped("lm_head", |g| g.linear(x, embedding));
        }
        linear(g, "lm_head", x, config.hidden_size, config.vocab_size, false)
    })?;
    let kv_elements = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers;
    Ok(Model {
        family: "llama",
        graph,
        state_groups: vec![StateGroup {
            states: (0..config.num_hidden_layers).map(|i| format!("model.layers.{i}.self_attn.kv")).collect(),
            bytes_per_token: kv_elements * options.cache.size_bytes(),
            window: None,
        }],
        block_size: options.block_size,
        max_context: config.max_position_embeddings,
        vocab_size: config.vocab_size,
        eos_token_ids: config.eos_token_ids.clone(),
    })
}

/// `x`: `[tokens, hidden]`, `positions` and `slots`: i32 `[tokens]`; gives the next `[tokens, hidden]`.
fn decoder_layer(g: &mut Builder, config: &LlamaConfig, options: &BuildOptions) -> GraphResult<Vec<Var>> {
    let tokens = Dim::sym(crate::model::symbols::TOKENS);
    let x = g.arg("x", Type::tensor(options.activations, [tokens.clone(), config.hidden_size.into()]));
    let positions = g.arg("positions", Type::tensor(DType::I32, [&tokens]));
    let slots = g.arg("slots", Type::tensor(DType::I32, [&tokens]));
    let h = g.scoped("input_layernorm", |g| norm(g, x, config))?;
    let a = g.scoped("self_attn", |g| attention(g, h, positions, slots, config, options))?;
    let x = g.add(x, a)?;
    let h = g.scoped("post_attention_layernorm", |g| norm(g, x, config))?;
    let m = g.scoped("mlp", |g| mlp(g, h, config))?;
    Ok(vec![g.add(x, m)?])
}

fn attention(
    g: &mut Builder,
    x: Var,
    positions: Var,
    slots: Var,
    config: &LlamaConfig,
    options: &BuildOptions,
) -> GraphResult<Var> {
    let tokens = Dim::sym(crate::model::symbols::TOKENS);
    let (heads, kv_heads, dim) = (config.num_attention_heads, config.num_key_value_heads, config.head_dim);
    let (hidden, bias) = (config.hidden_size, config.attention_bias);
    let step = StepInputs::ask(g)?;
    let project = |g: &mut Builder, name: &str, heads: usize| {
        let y = linear(g, name, x, hidden, heads * dim, bias)?;
        g.reshape(y, [tokens.clone(), heads.into(), dim.into()])
    };
    let q = project(g, "q_proj", heads)?;
    let k = project(g, "k_proj", kv_heads)?;
    let v = project(g, "v_proj", kv_heads)?;
    let rope = Rope { inv_freq: frequencies(config).into(), scale: 1.0 };
    let q = g.rope(q, positions, &rope)?;
    let k = g.rope(k, positions, &rope)?;
    let kv = g.state("kv", paged_kv(kv_heads, dim, options))?;
    let kv = g.kv_write(kv, k, v, slots)?;
    let (pairs, cached) = attention_symbols();
    let op = PagedAttention::new(1.0 / (dim as f64).sqrt(), pairs, cached);
    let a = g.attention(q, kv, step.block_table, step.seq_ids, positions, op)?;
    let a = g.reshape(a, [tokens, (heads * dim).into()])?;
    linear(g, "o_proj", a, heads * dim, hidden, bias)
}

fn mlp(g: &mut Builder, x: Var, config: &LlamaConfig) -> GraphResult<Var> {
    let (hidden, inner, bias) = (config.hidden_size, config.intermediate_size, config.mlp_bias);
    let gate = linear(g, "gate_proj", x, hidden, inner, bias)?;
    let up = linear(g, "up_proj", x, hidden, inner, bias)?;
    let h = g.swiglu(gate, up)?;
    linear(g, "down_proj", h, inner, hidden, bias)
}

fn norm(g: &mut Builder, x: Var, config: &LlamaConfig) -> GraphResult<Var> {
    let w = weight(g, "weight", &[config.hidden_size])?;
    g.rms_norm(x, w, config.rms_norm_eps)
}

fn linear(g: &mut Builder, name: &str, x: Var, from: usize, to: usize, bias: bool) -> GraphResult<Var> {
    g.scoped(name, |g| {
        let w = weight(g, "weight", &[to, from])?;
        let b = if bias { Some(weight(g, "bias", &[to])?) } else { None };
        g.linear_bias(x, w, b)
    })
}

fn weight(g: &mut Builder, name: &str, shape: &[usize]) -> GraphResult<Var> {
    g.weight(name, Type::tensor(DType::F32, ridge_graph::Shape::new(shape.iter().copied())))
}

fn frequencies(config: &LlamaConfig) -> Vec<f64> {
    let plain = rope_frequencies(config.rope_theta, config.head_dim);
    match config.rope_scaling {
        None => plain,
        Some(RopeScaling::Linear { factor }) => linear_scaling(&plain, factor),
        Some(RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings }) => {
            let original = original_max_position_embeddings as f64;
            llama3_scaling(&plain, factor, low_freq_factor, high_freq_factor, original)
        }
    }
}

//! How the families' weights and states are cut over the ranks of a mesh axis, told by name: one table a family. A
//! model's own file knows nothing of this, and `ridge_graph::shard` derives everything else from it.

use ridge_graph::shard::{MeshAxis, Placement};
use ridge_graph::{Arg, GraphError, Result as GraphResult, Role};

use crate::config::LlamaConfig;

/// How an argument is cut.
#[derive(Clone, Copy)]
enum Cut {
    /// Between the columns of a product, which are the rows of its weight: `x w^T` comes out cut.
    Columns,
    /// Between columns, those of a head together.
    Heads,
    /// Between the terms of a product's sums: `x w^T` comes out as summands.
    Terms,
    /// Between terms, those of a head together.
    HeadTerms,
    /// A summand on every rank: added once, to a sum that is not finished yet.
    Summand,
    /// A cache, between its key and value heads.
    Cache,
}

/// Llama's tensor parallelism (Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models
/// Using Model Parallelism", section 3): attention is cut by heads and the MLP by columns, each ends in one sum over
/// the ranks, and what is not listed is whole on every rank. `*` stands for the layer.
const LLAMA: &[(&str, Cut)] = &[
    ("model.layers.*.self_attn.q_proj.weight", Cut::Heads),
    ("model.layers.*.self_attn.q_proj.bias", Cut::Heads),
    ("model.layers.*.self_attn.k_proj.weight", Cut::Heads),
    ("model.layers.*.self_attn.k_proj.bias", Cut::Heads),
    ("model.layers.*.self_attn.v_proj.weight", Cut::Heads),
    ("model.layers.*.self_attn.v_proj.bias", Cut::Heads),
    ("model.layers.*.self_attn.kv", Cut::Cache),
    ("model.layers.*.self_attn.o_proj.weight", Cut::HeadTerms),
    ("model.layers.*.self_attn.o_proj.bias", Cut::Summand),
    ("model.layers.*.mlp.gate_proj.weight", Cut::Columns),
    ("model.layers.*.mlp.gate_proj.bias", Cut::Columns),
    ("model.layers.*.mlp.up_proj.weight", Cut::Columns),
    ("model.layers.*.mlp.up_proj.bias", Cut::Columns),
    ("model.layers.*.mlp.down_proj.weight", Cut::Terms),
    ("model.layers.*.mlp.down_proj.bias", Cut::Summand),
];

/// The output projection, cut by columns where the vocabulary divides: it is large, and only the logits that are
/// sampled from need gathering. A tied one is the embedding, which is whole.
const LLAMA_HEAD: &str = "lm_head.weight";

/// Where the weights and caches of a Llama of this configuration are on each rank of `axis`, for
/// `ridge_graph::shard::shard`. A state of the optimiser whose name ends in that of a weight is where the weight is.
///
/// # Errors
/// When heads or MLP do not divide over the ranks, naming the key of the configuration.
pub fn llama_tensor_parallel(config: &LlamaConfig, axis: &MeshAxis) -> GraphResult<impl Fn(&Arg) -> Placement + use<>> {
    let (ranks, head_dim) = (axis.ranks, config.head_dim);
    let divided = [
        ("num_key_value_heads", config.num_key_value_heads),
        ("num_attention_heads", config.num_attention_heads),
        ("intermediate_size", config.intermediate_size),
    ];
    if let Some((key, value)) = divided.into_iter().find(|(_, value)| !value.is_multiple_of(ranks)) {
        let most = (1..ranks).rev().find(|n| divided.iter().all(|(_, value)| value.is_multiple_of(*n))).unwrap_or(1);
        let ranks = format!("{ranks} ranks of `{}`", axis.name);
        let why =
            format!("{key} = {value} does not divide over {ranks}; the next number of ranks that works is {most}");
        return Err(GraphError::Use { at: "tensor parallelism".into(), why });
    }
    let cut_head = config.vocab_size.is_multiple_of(ranks);
    Ok(move |arg: &Arg| {
        let name = unprefixed(&arg.name);
        let found = LLAMA.iter().find(|(pattern, _)| matches(pattern, name)).map(|(_, cut)| *cut);
        match found {
            Some(Cut::Columns) => Placement::shard(0),
            Some(Cut::Heads) => Placement::Shard { dim: 0, multiple: head_dim },
            Some(Cut::Terms) => Placement::shard(1),
            Some(Cut::HeadTerms) => Placement::Shard { dim: 1, multiple: head_dim },
            // An optimiser's state is no summand: it has no sum to be finished.
            Some(Cut::Summand) if arg.role == Role::Weight => Placement::Partial,
            Some(Cut::Cache) => Placement::shard(2),
            None if name == LLAMA_HEAD && cut_head => Placement::shard(0),
            Some(Cut::Summand) | None => Placement::Replicate,
        }
    })
}

/// The weight that an optimiser's state belongs to: states are named `adamw.m.<weight>`.
fn unprefixed(name: &str) -> &str {
    ["model.", "lm_head."].iter().filter_map(|start| name.find(start)).min().map_or(name, |at| &name[at..])
}

/// Does `name` have the parts of `pattern`, of which `*` is any one?
fn matches(pattern: &str, name: &str) -> bool {
    let (mut pattern, mut name) = (pattern.split('.'), name.split('.'));
    loop {
        match (pattern.next(), name.next()) {
            (None, None) => return true,
            (Some(p), Some(n)) if p == "*" || p == n => {}
            _ => return false,
        }
    }
}

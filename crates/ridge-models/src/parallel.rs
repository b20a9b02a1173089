//! How the families' weights and states are cut over the ranks of a mesh axis, told by name. A model's own file knows
//! nothing of this, and `ridge_graph::shard` derives everything else from it.

use ridge_graph::shard::{MeshAxis, Placement};
use ridge_graph::{Arg, GraphError, Result as GraphResult, Role};

use crate::config::DecoderConfig;

/// How an argument is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
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

/// Tensor parallelism (Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
/// Parallelism", section 3): attention is cut by heads and the MLP by columns, each ends in one sum over the ranks, and
/// what is not listed is whole on every rank. The last parts of a name tell, with `*` for `weight` and `bias`.
const CUTS: &[(&str, Cut)] = &[
    ("q_proj.*", Cut::Heads),
    ("k_proj.*", Cut::Heads),
    ("v_proj.*", Cut::Heads),
    ("kv", Cut::Cache),
    ("kv_scales", Cut::Cache),
    // Attention's output: Llama's and most families', GPT-2's, GPT-NeoX' and Falcon's.
    ("o_proj.weight", Cut::HeadTerms),
    ("o_proj.bias", Cut::Summand),
    ("attn.c_proj.weight", Cut::HeadTerms),
    ("attn.c_proj.bias", Cut::Summand),
    ("dense.weight", Cut::HeadTerms),
    ("dense.bias", Cut::Summand),
    // The MLP's, likewise.
    ("gate_proj.*", Cut::Columns),
    ("up_proj.*", Cut::Columns),
    ("down_proj.weight", Cut::Terms),
    ("down_proj.bias", Cut::Summand),
    ("c_fc.*", Cut::Columns),
    ("mlp.c_proj.weight", Cut::Terms),
    ("mlp.c_proj.bias", Cut::Summand),
    ("dense_h_to_4h.*", Cut::Columns),
    ("dense_4h_to_h.weight", Cut::Terms),
    ("dense_4h_to_h.bias", Cut::Summand),
    // What is planned and not run yet: latent attention and scans.
    ("q_b_proj.*", Cut::Heads),
    ("kv_b_proj.*", Cut::Heads),
    ("in_proj.*", Cut::Columns),
    ("out_proj.weight", Cut::Terms),
];

/// How tensor parallelism cuts the argument called `name`; `None` if it is whole on every rank.
pub fn cut(name: &str) -> Option<Cut> {
    CUTS.iter().find(|(pattern, _)| ends(name, pattern)).map(|(_, cut)| *cut)
}

/// Output projections, cut by columns where the vocabulary divides: they are large, and only the logits that are
/// sampled from need gathering. A tied one is the embedding, which is whole.
const HEADS: &[&str] = &["lm_head.weight", "embed_out.weight"];

/// Where the weights and caches of a decoder of this configuration are on each rank of `axis`, for
/// `ridge_graph::shard::shard`. A state of the optimiser whose name ends in that of a weight is where the weight is.
///
/// # Errors
/// When heads or MLP do not divide over the ranks, naming the key of the configuration.
pub fn tensor_parallel(config: &DecoderConfig, axis: &MeshAxis) -> GraphResult<impl Fn(&Arg) -> Placement + use<>> {
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
        match cut(&arg.name) {
            Some(Cut::Columns) => Placement::shard(0),
            Some(Cut::Heads) => Placement::Shard { dim: 0, multiple: head_dim },
            Some(Cut::Terms) => Placement::shard(1),
            Some(Cut::HeadTerms) => Placement::Shard { dim: 1, multiple: head_dim },
            // An optimiser's state is no summand: it has no sum to be finished.
            Some(Cut::Summand) if arg.role == Role::Weight => Placement::Partial,
            Some(Cut::Cache) => Placement::shard(2),
            None if cut_head && HEADS.iter().any(|head| ends(&arg.name, head)) => Placement::shard(0),
            Some(Cut::Summand) | None => Placement::Replicate,
        }
    })
}

/// Are the last parts of `name` those of `pattern`, of which `*` is any one? The name of an optimiser's state ends in that
/// of its weight.
fn ends(name: &str, pattern: &str) -> bool {
    let mut name = name.rsplit('.');
    pattern.rsplit('.').all(|p| name.next().is_some_and(|n| p == "*" || p == n))
}

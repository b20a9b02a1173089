//! How the weights and states of models are cut over the ranks of a mesh axis, by name. A family's table of tensors says how
//! each is cut, and `ridge_graph::shard` derives everything else from it.

use ridge_graph::shard::{MeshAxis, Placement};
use ridge_graph::{Arg, GraphError, Result as GraphResult, Role};

pub use crate::families::Cut;

use crate::config::DecoderConfig;
use crate::families::{FamilyDefinition, families};

/// The caches of attention.
const CACHES: [&str; 2] = ["kv", "kv_scales"];

/// How tensor parallelism cuts the argument called `name`, which is of a family that Ridge knows; `None` if it is whole on every
/// rank (Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism",
/// section 3): attention is cut by heads and the MLP by columns, and each ends in one sum over the ranks. The name of a
/// state of the optimiser ends in that of its weight.
pub fn cut(name: &str) -> Option<Cut> {
    let (scope, last) = name.rsplit_once('.').unwrap_or(("", name));
    if CACHES.contains(&last) {
        return Some(Cut::Cache);
    }
    families().find_map(|family| of_family(family, scope, last))
}

/// Is `name` the weight of an output projection of its own, which no layer has?
pub fn is_output_projection(name: &str) -> bool {
    cut(name) == Some(Cut::Vocabulary)
}

/// How the parameter `kind` of `scope` is cut, by its family's table.
fn of_family(family: &'static FamilyDefinition, scope: &str, kind: &str) -> Option<Cut> {
    family.tensors.all().filter(|tensor| ends(scope, tensor.scope)).find_map(|tensor| tensor.cut_of(kind))
}

/// Where the weights and caches of a decoder of this configuration are on each rank of `axis`, for
/// `ridge_graph::shard::shard`. A state of the optimiser whose name ends in that of a weight is where the weight is.
///
/// # Errors
/// When heads or MLP do not divide over the ranks, naming the key of the configuration, and for latent attention.
pub fn tensor_parallel(config: &DecoderConfig, axis: &MeshAxis) -> GraphResult<impl Fn(&Arg) -> Placement + use<>> {
    // Ranks that divide the heads cut between them whatever divides their widths.
    let [other_kv_heads, other_dim] = config.other_heads.unwrap_or([config.num_key_value_heads, config.head_dim]);
    let (ranks, head_dim) = (axis.ranks, gcd(config.head_dim, other_dim));
    let refused = |why: String| Err(GraphError::Use { at: "tensor parallelism".into(), why });
    if config.latent_attention && ranks > 1 {
        let heads = config.num_attention_heads;
        return refused(format!(
            "latent attention caches one latent for all of its {heads} heads, which are not divided over ranks, so {ranks} ranks \
             of `{}` are not supported; use one rank, on which experts that do not fit may stay in host memory",
            axis.name
        ));
    }
    let divided = [
        ("num_key_value_heads", config.num_key_value_heads),
        ("num_global_key_value_heads", other_kv_heads),
        ("num_attention_heads", config.num_attention_heads),
        ("intermediate_size", config.intermediate_size),
    ];
    if let Some((key, value)) = divided.into_iter().find(|(_, value)| !value.is_multiple_of(ranks)) {
        let largest = (1..ranks).rev().find(|n| divided.iter().all(|(_, value)| value.is_multiple_of(*n))).unwrap_or(1);
        let ranks = format!("{ranks} ranks of `{}`", axis.name);
        let why =
            format!("{key} = {value} does not divide over {ranks}; the next number of ranks that works is {largest}");
        return refused(why);
    }
    let cut_head = config.vocab_size.is_multiple_of(ranks);
    Ok(move |arg: &Arg| place(arg, head_dim, cut_head))
}

/// Where [`tensor_parallel`] has an argument of a model of any family that Ridge knows, over any number of ranks that divides
/// the model; for `ridge_graph::shard::placements`. The cache of a single head of keys and values is whole on each.
pub fn placement(arg: &Arg) -> Placement {
    match place(arg, 1, true) {
        Placement::Shard { dim, .. } if cut(&arg.name) == Some(Cut::Cache) && arg.ty.shape.0[dim].is_one() => {
            Placement::Replicate
        }
        place => place,
    }
}

fn place(arg: &Arg, head_dim: usize, cut_head: bool) -> Placement {
    // Experts have an axis before the matrix or the bias.
    let own = if arg.name.ends_with(".bias") { 1 } else { 2 };
    let before = arg.ty.shape.rank().saturating_sub(own);
    match cut(&arg.name) {
        Some(Cut::Columns) => Placement::shard(before),
        Some(Cut::Heads) => Placement::Shard { dim: 0, multiple: head_dim },
        Some(Cut::Terms) => Placement::shard(before + 1),
        Some(Cut::HeadTerms) => Placement::Shard { dim: 1, multiple: head_dim },
        // An optimiser's state is no summand: it has no sum to be finished.
        Some(Cut::Summand) if arg.role == Role::Weight => Placement::Partial,
        Some(Cut::Cache) => Placement::shard(2),
        Some(Cut::Vocabulary) if cut_head => Placement::shard(0),
        Some(Cut::Summand | Cut::Vocabulary) | None => Placement::Replicate,
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Are the last parts of `name` those of `scope`?
fn ends(name: &str, scope: &str) -> bool {
    name.strip_suffix(scope).is_some_and(|before| !scope.is_empty() && (before.is_empty() || before.ends_with('.')))
}

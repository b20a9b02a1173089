//! Attention by blocks of long texts (Zaheer et al. 2020, "Big Bird: Transformers for Longer Sequences", section 2).

use ridge_graph::ops::BlockSparseAttention;
use ridge_graph::{Builder, GraphError, Result as GraphResult, Var};

use super::encoder::{EncoderLayer, QUERY_KEY_VALUE, project};
use crate::model::attention_symbols;

/// Attention of `x`, `[tokens, hidden]`, by blocks of `size` tokens with `random` random ones.
pub(super) fn attend(
    g: &mut Builder,
    x: Var,
    at: &EncoderLayer<'_>,
    bias: bool,
    [size, random]: [usize; 2],
) -> GraphResult<Var> {
    let heads = at.config.num_attention_heads;
    let qkv = project(g, x, QUERY_KEY_VALUE, heads, bias)?;
    let shape = g.ty(qkv[0])?.shape.clone();
    let dim = shape.last().as_const().unwrap_or_default();
    // As many pairs as a window of five blocks has.
    let (pairs, _) = attention_symbols(Some((5 * size).div_ceil(2)));
    let op = BlockSparseAttention { scale: 1.0 / (dim as f64).sqrt(), block: size, repeats: random, pairs };
    let without = || GraphError::Use { at: "positions".into(), why: "the layer does not have them".into() };
    let positions = at.positions.ok_or_else(without)?;
    let a = g.block_sparse_attention(qkv, [at.seq_ids, positions], op)?;
    g.reshape(a, [shape.0[0].clone(), (heads * dim).into()])
}

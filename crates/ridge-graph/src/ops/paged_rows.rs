//! What the ops that attend to a paged cache have in common: the rows of a sequence, and the shares of a softmax over them.

use super::require::flat;
use crate::dim::Dim;
use crate::dtype::DType;
use crate::error::{GraphError, Result};
use crate::graph::{Builder, Var};
use crate::shape::Shape;
use crate::types::Type;
use crate::why::Why;

/// Below every score, and finite, so that a row without any key has no infinite differences.
pub(super) const MASKED: f64 = -3.0e38;

/// `(query heads of each kv head, kv heads)` of `q`, `[tokens, heads, dim]`, over the cache `kv`.
pub(super) fn query_groups(q: &Type, kv: &Type) -> Result<(usize, usize), Why> {
    let (heads, kv_heads) = (&q.shape.0[1], &kv.shape.0[2]);
    let group = match (heads.as_const(), kv_heads.as_const()) {
        (Some(0), Some(0)) => Some((1, 0)),
        (Some(h), Some(k)) if k > 0 && h % k == 0 => Some((h / k, k)),
        _ => None,
    };
    group.ok_or_else(|| format!("q has {heads} heads, which must be a multiple of the {kv_heads} of kv"))
}

/// The rows of each token's own sequence.
pub(super) struct SequenceRows {
    /// Keys and values, or keys that are values too: f32 `[tokens, kv_heads, keys, dim]` each.
    pub(super) sides: Vec<Var>,
    /// Positions that the block table has room for.
    pub(super) keys: Dim,
}

impl SequenceRows {
    /// Gathers the blocks of the sequences `ids`, i32 `[tokens]`, by their rows of `table`, i32 `[sequences, blocks]`, from
    /// the cache `kv`, `[blocks, sides, kv_heads, block_size, dim]`; `scales` has those of a cache of codes. A block that is not
    /// there is of zeros.
    pub(super) fn read(g: &mut Builder, kv: Var, scales: &[Var], table: Var, ids: Var) -> Result<Self> {
        let kt = g.ty(kv)?.clone();
        let (heads, block_size, dim) = (&kt.shape.0[2], &kt.shape.0[3], &kt.shape.0[4]);
        let (tokens, blocks) = (g.ty(ids)?.shape.0[0].clone(), g.ty(table)?.shape.last());
        let keys = flat(&[blocks.clone(), block_size.clone()]).map_err(|why| GraphError::usage(g.scope(), why))?;
        // [tokens, blocks, sides, kv_heads, block_size, dim].
        let row = g.gather(table, ids, 0)?;
        let cache = g.state_read(kv)?;
        let cache = g.gather(cache, row, 0)?;
        // Of codes their scales: [tokens, blocks, sides, kv_heads, block_size].
        let scales = match scales.first() {
            Some(scales) => {
                let scales = g.state_read(*scales)?;
                Some(g.gather(scales, row, 0)?)
            }
            None => None,
        };
        let mut sides = Vec::new();
        for side in 0..super::kv_write::sides(&kt) {
            let x = g.slice(cache, 2, side, 1)?;
            let x = g.reshape(x, Shape::new([&tokens, &blocks, heads, block_size, dim]))?;
            let x = g.transpose(x, &[0, 2, 1, 3, 4])?;
            let x = g.reshape(x, Shape::new([&tokens, heads, &keys, dim]))?;
            let mut x = g.cast(x, DType::F32)?;
            if let Some(scales) = scales {
                let scales = g.slice(scales, 2, side, 1)?;
                let scales = g.reshape(scales, Shape::new([&tokens, &blocks, heads, block_size]))?;
                let scales = g.transpose(scales, &[0, 2, 1, 3])?;
                let scales = g.reshape(scales, Shape::new([&tokens, heads, &keys, &1.into()]))?;
                x = g.mul(x, scales)?;
            }
            sides.push(x);
        }
        Ok(Self { sides, keys })
    }
}

/// The softmax of `scores`, f32 `[tokens, kv_heads, group, keys]`, over the keys that are `seen`, and over one more score
/// whose share is not given, `sinks`, where there is one: f32 `[1, kv_heads, group, 1]`. Zeros where no key is seen.
pub(super) fn attention_shares(g: &mut Builder, scores: Var, seen: Var, sinks: Option<Var>) -> Result<Var> {
    let masked = g.constant(DType::F32, MASKED)?;
    let scores = g.select(seen, scores, masked)?;
    let mut largest = g.reduce_max(scores, 3)?;
    if let Some(sinks) = sinks {
        largest = g.max(largest, sinks)?;
    }
    let shifted = g.sub(scores, largest)?;
    let weight = g.exp(shifted)?;
    let nothing = g.constant(DType::F32, 0.0)?;
    let weight = g.select(seen, weight, nothing)?;
    let mut total = g.reduce_sum(weight, 3)?;
    if let Some(sinks) = sinks {
        let sunk = g.sub(sinks, largest)?;
        let sunk = g.exp(sunk)?;
        total = g.add(total, sunk)?;
    }
    // Where no key is seen there is nothing to divide.
    let none = g.eq(total, nothing)?;
    let unit = g.constant(DType::F32, 1.0)?;
    let total = g.select(none, unit, total)?;
    g.div(weight, total)
}

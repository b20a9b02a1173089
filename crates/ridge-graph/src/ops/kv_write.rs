//! Writes keys and values of a step's tokens into a paged cache (Kwon et al. 2023, "Efficient Memory Management for
//! Large Language Model Serving with PagedAttention", section 4).

use crate::builder::Builder;
use crate::cost::Cost;
use crate::dim::Dim;
use crate::dtype::DType;
use crate::error::{GraphError, Result, Why};
use crate::graph::Var;
use crate::op::Composite;
use crate::sample::{Rng, Sample};
use crate::shard::{Placement, Rule};
use crate::types::{Shape, Type};

/// The next version of the cache, with the keys and values of token `t` at `slots[t]`.
///
/// `kv`: state `[blocks, 2, kv_heads, block_size, dim]` of any float dtype (keys, then values), `k`, `v`:
/// `[tokens, kv_heads, dim]` of one float dtype, `slots`: i32 `[tokens]`; gives the state. A slot is
/// `block * block_size + offset`; slots out of range, such as the -1 of padding, are dropped, and of equal slots the
/// last token's stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvWrite;

/// Requires a paged cache and gives its extents `[blocks, 2, kv_heads, block_size, dim]`.
pub(super) fn want_cache(kv: &Type) -> Result<&[Dim], Why> {
    let float = kv.state && kv.dtype.is_float() && kv.format.is_none();
    let [_, two, _, block_size, _] = &kv.shape.0[..] else {
        return Err(format!("kv must be a state [blocks, 2, kv_heads, block_size, dim], got {kv}"));
    };
    if !float || *two != Dim::from(2) || block_size.as_const().is_none_or(|n| n == 0) {
        return Err(format!(
            "kv must be a float state [blocks, 2, kv_heads, block_size, dim] of a constant block_size, got {kv}"
        ));
    }
    Ok(&kv.shape.0)
}

impl Composite for KvWrite {
    fn name(&self) -> &'static str {
        "kv_write"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [kv, k, v, slots] = inputs else { return Err(super::takes("kv, k, v and slots", inputs)) };
        let [_, _, heads, _, dim] = want_cache(kv)? else { unreachable!("a cache has five axes") };
        super::want_floats("k", k, 3, "[tokens, kv_heads, dim]")?;
        let tokens = &k.shape.0[0];
        super::want("k", k, k.dtype, [tokens, heads, dim])?;
        super::want("v", v, k.dtype, [tokens, heads, dim])?;
        super::want("slots", slots, DType::I32, [tokens])?;
        Ok(vec![kv.clone()])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let kv = g.ty(inputs[0])?.clone();
        let [blocks, two, heads, block_size, dim] = &kv.shape.0[..] else { unreachable!("a cache has five axes") };
        let tokens = g.ty(inputs[3])?.shape.0[0].clone();
        let slots =
            super::flat(&[blocks.clone(), block_size.clone()]).map_err(|why| GraphError::usage(g.scope(), why))?;
        // One row a slot: [blocks * block_size, 2, kv_heads, dim].
        let cache = g.state_read(inputs[0])?;
        let cache = g.transpose(cache, &[0, 3, 1, 2, 4])?;
        let cache = g.reshape(cache, Shape::new([&slots, two, heads, dim]))?;
        let one = Shape::new([&tokens, &1.into(), heads, dim]);
        let mut rows = Vec::with_capacity(2);
        for new in &inputs[1..3] {
            let new = g.cast(*new, kv.dtype)?;
            rows.push(g.reshape(new, one.clone())?);
        }
        let rows = g.concat(&rows, 1)?;
        let cache = g.scatter(cache, inputs[3], rows, 0)?;
        let cache = g.reshape(cache, Shape::new([blocks, block_size, two, heads, dim]))?;
        let cache = g.transpose(cache, &[0, 2, 3, 1, 4])?;
        Ok(vec![g.state_write(inputs[0], cache)?])
    }

    fn cost(&self, inputs: &[Type], _outputs: &[Type]) -> Cost {
        // Only the rows of the step's tokens are written.
        let written = inputs[1].shape.elements() * (2 * inputs[0].dtype.size_bytes() as i128);
        Cost { bytes_written: written, ..Cost::moving(&inputs[1..], &[]) }
    }

    fn shard(&self, _inputs: &[Type], _outputs: &[Type]) -> Vec<Rule> {
        // By heads.
        let places = vec![Placement::shard(2), Placement::shard(1), Placement::shard(1), Placement::Replicate];
        vec![Rule { inputs: places, outputs: vec![Placement::shard(2)] }]
    }
}

impl Builder {
    /// The cache with the keys and values of a step's tokens; see [`KvWrite`].
    ///
    /// # Errors
    /// When `kv` is not a paged cache, or `k`, `v` and `slots` do not fit it.
    pub fn kv_write(&mut self, kv: Var, k: Var, v: Var, slots: Var) -> Result<Var> {
        Ok(self.composite(KvWrite, &[kv, k, v, slots])?[0])
    }
}

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    // (blocks, kv_heads, block_size, dim, tokens, dtype of the cache)
    let cases = [
        (3, 2, 4, 8, 0, dtype),
        (1, 1, 1, 1, 1, dtype),
        (2, 0, 4, 8, 3, dtype),
        (5, 3, 16, 33, 17, dtype),
        (9, 2, 8, 64, 40, dtype),
        (7, 1, 16, 128, 65, DType::BF16),
        (4, 4, 3, 5, 6, DType::F32),
        (4, 2, 16, 32, 20, DType::F8E4M3),
    ];
    let mut samples = Vec::new();
    for (blocks, heads, block_size, dim, tokens, stored) in cases {
        // Distinct slots, shuffled, some of them dropped: below, and just beyond the last.
        let mut slots = super::paging::shuffled(rng, blocks * block_size);
        slots.resize(tokens, -1);
        if tokens > 2 {
            slots[tokens / 2] = -1;
            slots[tokens - 1] = (blocks * block_size) as i64;
        }
        samples.push(
            Sample::new(KvWrite)
                .state(rng.normal(stored, &[blocks, 2, heads, block_size, dim]))
                .input(rng.normal(dtype, &[tokens, heads, dim]))
                .input(rng.normal(dtype, &[tokens, heads, dim]))
                .input(crate::Tensor::int(DType::I32, &[tokens], slots)),
        );
    }
    samples
}

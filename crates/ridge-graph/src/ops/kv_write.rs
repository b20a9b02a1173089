//! Writes keys and values of a step's tokens into a paged cache (Kwon et al. 2023, "Efficient Memory Management for
//! Large Language Model Serving with PagedAttention", section 4).

use super::quantize::{float8, largest_magnitude};
use super::require::{flat, takes, want, want_floats};
use crate::cost::Cost;
use crate::dim::Dim;
use crate::dtype::DType;
use crate::error::{GraphError, Result};
use crate::format::CodeType;
use crate::graph::{Builder, Composite, Var};
use crate::poly::Poly;
use crate::sample::{Rng, Sample};
use crate::shape::Shape;
use crate::shard::{Placement, ShardingRule};
use crate::types::Type;
use crate::why::Why;

/// The next version of the cache, with the keys and values of token `t` at `slots[t]`.
///
/// `kv`: state `[blocks, 2, kv_heads, block_size, dim]` of any float dtype (keys, then values), `k`, `v`:
/// `[tokens, kv_heads, dim]` of one float dtype, `slots`: i32 `[tokens]`; gives the state. A slot is
/// `block * block_size + offset`; slots out of range, such as the -1 of padding, are dropped, and of equal slots the
/// last token's stays. A cache with one side, `[blocks, 1, kv_heads, block_size, dim]`, has keys that are values too, and there
/// is no `v`.
///
/// A cache of i8 has scales behind the other inputs, a state f32 `[blocks, sides, kv_heads, block_size]`, and gives both: each
/// key and value of each head is its codes, -127 to 127, times its scale, which is its largest magnitude over 127. Codes
/// are the nearest, ties upwards. A cache of f8e4m3 may have scales too, the largest magnitude over 448; its codes are
/// the nearest, ties to even.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvWrite;

/// Sides of a paged cache: keys and values, or one for both.
pub(super) fn sides(kv: &Type) -> usize {
    kv.shape.0.get(1).and_then(Dim::as_const).unwrap_or(2)
}

/// The rows of a write, keys and, in a cache with two sides, values; then the slots, then scales.
fn split<'a, T>(kv: &Type, inputs: &'a [T]) -> Option<(&'a [T], &'a T, &'a [T])> {
    let (rows, rest) = inputs.get(1..)?.split_at_checked(sides(kv))?;
    let (slots, scales) = rest.split_first()?;
    Some((rows, slots, scales))
}

/// Requires a paged cache and gives its extents `[blocks, sides, kv_heads, block_size, dim]`.
pub(super) fn want_cache(kv: &Type) -> Result<&[Dim], Why> {
    let float = kv.state && (kv.dtype.is_float() || kv.dtype == DType::I8) && kv.format.is_none();
    let [_, sides, _, block_size, _] = &kv.shape.0[..] else {
        return Err(format!("kv must be a state [blocks, 2, kv_heads, block_size, dim], got {kv}"));
    };
    if !float || !sides.as_const().is_some_and(|n| matches!(n, 1 | 2)) || block_size.as_const().is_none_or(|n| n == 0) {
        return Err(format!(
            "kv must be a float or i8 state [blocks, 1 or 2, kv_heads, block_size, dim] of a constant block_size, got {kv}"
        ));
    }
    Ok(&kv.shape.0)
}

/// Requires scales where the cache `kv` has some, and none where it has none.
pub(super) fn want_scales(kv: &Type, scales: &[Type]) -> Result<(), Why> {
    match (kv.dtype, scales) {
        (DType::I8, []) => Err(format!("kv of i8 needs its scales, {}", scales_of(kv))),
        (_, []) => Ok(()),
        (DType::I8 | DType::F8E4M3, [scales]) if *scales == scales_of(kv) => Ok(()),
        (DType::I8 | DType::F8E4M3, [scales]) => {
            Err(format!("the scales of kv must be {}, got {scales}", scales_of(kv)))
        }
        (DType::I8 | DType::F8E4M3, _) => Err(format!("kv has one state of scales, got {}", scales.len())),
        _ => Err(format!("only kv of i8 or f8e4m3 has scales, got {kv}")),
    }
}

/// The scales of a cache of codes.
fn scales_of(kv: &Type) -> Type {
    Type::state(DType::F32, Shape(kv.shape.0[..4].to_vec()))
}

/// F32 `[tokens, kv_heads, dim]` as codes of `dtype`, i8 or f8e4m3, and their scales, f32 `[tokens, kv_heads]`.
fn to_codes(g: &mut Builder, x: Var, dtype: DType) -> Result<(Var, Var)> {
    let shape = g.ty(x)?.shape.clone();
    let of_scales = Shape(shape.0[..2].to_vec());
    if dtype == DType::F8E4M3 {
        let largest = largest_magnitude(g, x, std::iter::once(2))?;
        let most = g.constant(DType::F32, f64::from(CodeType::F8E4M3.largest()))?;
        let scale = g.div(largest, most)?;
        return Ok((float8(g, x, scale, CodeType::F8E4M3)?, g.reshape(scale, of_scales)?));
    }
    let magnitudes = g.abs(x)?;
    let largest = g.reduce_max(magnitudes, 2)?;
    let number = |g: &mut Builder, value| g.constant(DType::F32, value);
    let [zero, one, half, most, least] =
        [number(g, 0.0)?, number(g, 1.0)?, number(g, 0.5)?, number(g, 127.0)?, number(g, -127.0)?];
    // The largest of nothing is minus infinity.
    let largest = g.max(largest, zero)?;
    let scale = g.div(largest, most)?;
    let none = g.eq(scale, zero)?;
    let divisor = g.select(none, one, scale)?;
    let scaled = g.div(x, divisor)?;
    let above = g.add(scaled, half)?;
    let code = g.floor(above)?;
    // Of the smallest numbers the scale is rounded far.
    let code = g.min(code, most)?;
    let code = g.max(code, least)?;
    Ok((g.cast(code, DType::I8)?, g.reshape(scale, of_scales)?))
}

impl Composite for KvWrite {
    fn name(&self) -> &'static str {
        "kv_write"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let Some(kv) = inputs.first() else { return Err(takes("kv, k, v and slots", inputs)) };
        let [_, _, heads, _, dim] = want_cache(kv)? else { unreachable!("a cache has five axes") };
        let Some((rows, slots, scales)) = split(kv, inputs) else { return Err(takes("kv, k, v and slots", inputs)) };
        let k = &rows[0];
        want_floats("k", k, 3, "[tokens, kv_heads, dim]")?;
        let tokens = &k.shape.0[0];
        for (name, row) in ["k", "v"].into_iter().zip(rows) {
            want(name, row, k.dtype, [tokens, heads, dim])?;
        }
        want("slots", slots, DType::I32, [tokens])?;
        want_scales(kv, scales)?;
        Ok([kv].into_iter().chain(scales).cloned().collect())
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let kv = g.ty(inputs[0])?.clone();
        let [blocks, sides, heads, block_size, dim] = &kv.shape.0[..] else { unreachable!("a cache has five axes") };
        let Some((new_rows, to, of_codes)) = split(&kv, inputs) else { unreachable!("infer has counted the inputs") };
        let tokens = g.ty(*to)?.shape.0[0].clone();
        let slots = flat(&[blocks.clone(), block_size.clone()]).map_err(|why| GraphError::usage(g.scope(), why))?;
        // One row a slot: [blocks * block_size, sides, kv_heads, dim].
        let cache = g.state_read(inputs[0])?;
        let cache = g.transpose(cache, &[0, 3, 1, 2, 4])?;
        let cache = g.reshape(cache, Shape::new([&slots, sides, heads, dim]))?;
        let one = Shape::new([&tokens, &1.into(), heads, dim]);
        let (mut rows, mut scales) = (Vec::with_capacity(new_rows.len()), Vec::new());
        for new in new_rows {
            let mut new = *new;
            if !of_codes.is_empty() {
                let scale;
                let x = g.cast(new, DType::F32)?;
                (new, scale) = to_codes(g, x, kv.dtype)?;
                scales.push(g.reshape(scale, Shape::new([&tokens, &1.into(), heads]))?);
            }
            let new = g.cast(new, kv.dtype)?;
            rows.push(g.reshape(new, one.clone())?);
        }
        let rows = g.concat(&rows, 1)?;
        let cache = g.scatter(cache, *to, rows, 0)?;
        let cache = g.reshape(cache, Shape::new([blocks, block_size, sides, heads, dim]))?;
        let cache = g.transpose(cache, &[0, 2, 3, 1, 4])?;
        let mut written = vec![g.state_write(inputs[0], cache)?];
        if let Some(state) = of_codes.first() {
            let rows = g.concat(&scales, 1)?;
            let all = g.state_read(*state)?;
            let all = g.transpose(all, &[0, 3, 1, 2])?;
            let all = g.reshape(all, Shape::new([&slots, sides, heads]))?;
            let all = g.scatter(all, *to, rows, 0)?;
            let all = g.reshape(all, Shape::new([blocks, block_size, sides, heads]))?;
            let all = g.transpose(all, &[0, 2, 3, 1])?;
            written.push(g.state_write(*state, all)?);
        }
        Ok(written)
    }

    fn cost(&self, inputs: &[Type], _outputs: &[Type]) -> Cost {
        // Only the rows of the step's tokens are written.
        let sides = sides(&inputs[0]);
        let mut written = inputs[1].shape.elements() * ((sides * inputs[0].dtype.size_bytes()) as i128);
        if inputs.len() > 2 + sides {
            written += &(Poly::product(&inputs[1].shape.0[..2]) * ((sides * DType::F32.size_bytes()) as i128));
        }
        Cost { bytes_written: written, ..Cost::moving(&inputs[1..2 + sides], &[]) }
    }

    fn shard(&self, inputs: &[Type], outputs: &[Type]) -> Vec<ShardingRule> {
        // By heads.
        let mut places = vec![Placement::shard(2)];
        places.resize(1 + sides(&inputs[0]), Placement::shard(1));
        places.push(Placement::Replicate);
        places.resize(inputs.len(), Placement::shard(2));
        vec![ShardingRule { inputs: places, outputs: vec![Placement::shard(2); outputs.len()] }]
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

    /// As [`Builder::kv_write`], with the rows of each side that the cache has, and for a cache of codes its scales: the next
    /// versions of `cache`.
    ///
    /// # Errors
    /// As there, and when `cache` is not a paged cache or one with its scales.
    pub fn kv_write_sides(&mut self, cache: &[Var], rows: &[Var], slots: Var) -> Result<Vec<Var>> {
        let (kv, scales) = cache.split_at(cache.len().min(1));
        self.composite(KvWrite, &[kv, rows, &[slots], scales].concat())
    }
}

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    // (blocks, kv_heads, block_size, dim, tokens, dtype of the cache), with two sides and then with one.
    let two_sided = [
        (3, 2, 4, 8, 0, dtype),
        (1, 1, 1, 1, 1, dtype),
        (2, 0, 4, 8, 3, dtype),
        (5, 3, 16, 33, 17, dtype),
        (9, 2, 8, 64, 40, dtype),
        (7, 1, 16, 128, 65, DType::BF16),
        (4, 4, 3, 5, 6, DType::F32),
        (4, 2, 16, 32, 20, DType::F8E4M3),
        (3, 2, 4, 8, 0, DType::I8),
        (2, 1, 4, 0, 2, DType::I8),
        (4, 2, 16, 33, 20, DType::I8),
        (5, 3, 16, 64, 17, DType::I8),
    ];
    let one_sided = [(5, 1, 16, 36, 17, dtype), (3, 2, 4, 64, 9, DType::BF16), (4, 1, 8, 20, 11, DType::I8)];
    // With scales where codes may have none, of random numbers of their own, so that those of the others stay.
    let scaled = [
        ((4, 2, 16, 64, 20, DType::F8E4M3), 2),
        ((3, 3, 4, 33, 9, DType::F8E4M3), 2),
        ((9, 8, 16, 128, 70, DType::F8E4M3), 2),
        ((9, 8, 16, 128, 70, DType::I8), 2),
        ((4, 1, 8, 20, 11, DType::F8E4M3), 1),
    ];
    let cases = two_sided.into_iter().map(|case| (case, 2)).chain(one_sided.into_iter().map(|case| (case, 1)));
    let cases: Vec<_> = cases.collect();
    let before = cases.len();
    let mut of_scaled = Rng::new(29);
    let mut samples = Vec::new();
    for (nth, ((blocks, heads, block_size, dim, tokens, stored), sides)) in cases.into_iter().chain(scaled).enumerate()
    {
        let rng = if nth < before { &mut *rng } else { &mut of_scaled };
        // Distinct slots, shuffled, some of them dropped: below, and just beyond the last.
        let mut slots = super::paging::shuffled(rng, blocks * block_size);
        slots.resize(tokens, -1);
        if tokens > 2 {
            slots[tokens / 2] = -1;
            slots[tokens - 1] = (blocks * block_size) as i64;
        }
        let cache = [blocks, sides, heads, block_size, dim];
        let mut sample = Sample::new(KvWrite).state(super::paging::cache(rng, stored, &cache));
        for _ in 0..sides {
            sample = sample.input(rng.normal(dtype, &[tokens, heads, dim]));
        }
        let sample = sample.input(crate::Tensor::int(DType::I32, &[tokens], slots));
        samples.push(match stored {
            DType::F8E4M3 if nth < before => sample,
            DType::I8 | DType::F8E4M3 => sample.state(rng.normal(DType::F32, &cache[..4])),
            _ => sample,
        });
    }
    samples
}

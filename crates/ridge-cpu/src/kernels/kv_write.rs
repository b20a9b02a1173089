//! Writes a step's keys and values into the cache, in place; keys are rotated on the way where the graph does that, and
//! all are rounded to codes where the cache has scales.
//!
//! Floor: keys and values read once and written once.

use std::ops::Range;

use ridge_graph::{DType, Function, ops};

use super::rope;
use crate::io::KernelIo;
use crate::kernel::{CpuKernel, KernelEntry, KernelSpec};
use crate::scratch::Scratch;
use crate::simd::{self, vectorised};

pub(super) fn entries() -> [KernelEntry; 8] {
    let two_sided = |body: &Function| sides(body) == 2;
    let one_sided = |body: &Function| sides(body) == 1;
    [
        KernelEntry::new("kv_write", "kv_write(kv, k, v, slots)", two_sided, make),
        KernelEntry::new("rope_kv_write", "kv_write(kv, rope(k, positions), v, slots)", two_sided, make),
        KernelEntry::new("kv_write_codes", "kv_write(kv, k, v, slots, scales)", |_| true, make),
        KernelEntry::new("rope_kv_write_codes", "kv_write(kv, rope(k, positions), v, slots, scales)", |_| true, make),
        KernelEntry::new("key_write", "kv_write(kv, k, slots)", |_| true, make),
        KernelEntry::new("rope_key_write", "kv_write(kv, rope(k, positions), slots)", |_| true, make),
        KernelEntry::new("key_write_codes", "kv_write(kv, k, slots, scales)", one_sided, make),
        KernelEntry::new("rope_key_write_codes", "kv_write(kv, rope(k, positions), slots, scales)", one_sided, make),
    ]
}

/// Sides of the cache, the first argument.
fn sides(body: &Function) -> usize {
    body.args[0].ty.shape.0[1].as_const().unwrap_or_default()
}

struct KvWrite {
    /// Rotates keys by the positions of input 2.
    rope: Option<ops::Rope>,
    blocks: usize,
    /// Keys and values, or keys that are values too.
    sides: usize,
    heads: usize,
    block_size: usize,
    dim: usize,
    cache: DType,
    /// Has the cache scales of its rows?
    scaled: bool,
    tokens: usize,
    dtype: DType,
}

fn make(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    let [blocks, sides, heads, block_size, dim] = spec.inputs[0].shape[..] else {
        return Err(format!("a cache of shape {:?}", spec.inputs[0].shape));
    };
    Ok(Box::new(KvWrite {
        rope: spec.composite::<ops::Rope>().cloned(),
        blocks,
        sides,
        heads,
        block_size,
        dim,
        cache: spec.inputs[0].dtype,
        scaled: spec.outputs.len() > 1,
        tokens: spec.inputs[1].shape[0],
        dtype: spec.inputs[1].dtype,
    }))
}

impl CpuKernel for KvWrite {
    fn pieces(&self) -> usize {
        self.tokens
    }

    fn nanos_per_piece(&self) -> f64 {
        self.rope.as_ref().map_or(10.0, rope::nanos) + (self.heads * self.dim) as f64 * 0.4
    }

    fn run(&self, io: &KernelIo<'_>, tokens: Range<usize>, scratch: &mut Scratch) {
        let (n, pairs) = (self.heads * self.dim, self.rope.as_ref().map_or(0, |r| r.inv_freq.len()));
        let [cos, sin, room] = scratch.slices::<f32, 3>([pairs, pairs, n]);
        let values = if self.rope.is_some() { 3 } else { 2 };
        let slots = io.input::<i32>(values + self.sides - 1);
        for token in tokens {
            let slot = match usize::try_from(slots[token]) {
                Ok(slot) if slot < self.blocks * self.block_size => slot,
                _ => continue,
            };
            // Of equal slots the last token's stays, and no two pieces may write one.
            if slots[token + 1..].contains(&slots[token]) {
                continue;
            }
            simd::load(io, 1, self.dtype, token * n, room);
            if let Some(op) = &self.rope {
                rope::angles(op, io.input::<i32>(2)[token], cos, sin);
                rope::rotate(room, self.dim.max(1), cos, sin);
            }
            self.write(io, slot, 0, room);
            if self.sides > 1 {
                self.write(io, slot, 1, simd::view(io, values, self.dtype, token * n, &mut *room));
            }
        }
    }
}

impl KvWrite {
    /// Keys (side 0) or values (side 1) of all heads, at `slot`.
    fn write(&self, io: &KernelIo<'_>, slot: usize, side: usize, from: &[f32]) {
        let (block, offset) = (slot / self.block_size, slot % self.block_size);
        for head in 0..self.heads {
            let row = &from[head * self.dim..][..self.dim];
            let at = ((block * self.sides + side) * self.heads + head) * self.block_size + offset;
            // SAFETY: only the last token of this slot writes there, and it is among our pieces.
            unsafe {
                let elements = at * self.dim..(at + 1) * self.dim;
                if self.scaled {
                    let scale = &mut io.output::<f32>(1).part(at..at + 1)[0];
                    *scale = match self.cache {
                        DType::I8 => to_codes(row, io.output::<i8>(0).part(elements)),
                        _ => to_f8(row, io.output::<simd::E4M3>(0).part(elements)),
                    };
                } else {
                    simd::store(io, 0, self.cache, at * self.dim, row);
                }
            }
        }
    }
}

vectorised! {
    /// Rounds `x` to E4M3 and gives their scale, which is NaN if an element is.
    fn to_f8(x: &[f32], codes: &mut [simd::E4M3]) -> f32 {
        const LARGEST: f32 = 448.0;
        let larger = |most, x: f32| if x > most || x.is_nan() { x } else { most };
        let largest = x.iter().fold(0f32, |most, x| larger(most, x.abs()));
        let scale = largest / LARGEST;
        let divisor = if scale == 0.0 { 1.0 } else { scale };
        for (code, x) in codes.iter_mut().zip(x) {
            // Of the smallest numbers the scale is rounded far.
            *code = simd::Element::narrow((x / divisor).clamp(-LARGEST, LARGEST));
        }
        scale
    }
}

vectorised! {
    /// Rounds `x` to codes and gives their scale, which is NaN if an element is.
    fn to_codes(x: &[f32], codes: &mut [i8]) -> f32 {
        let larger = |most, x: f32| if x > most || x.is_nan() { x } else { most };
        let largest = x.iter().fold(0f32, |most, x| larger(most, x.abs()));
        let scale = largest / 127.0;
        let divisor = if scale == 0.0 { 1.0 } else { scale };
        for (code, x) in codes.iter_mut().zip(x) {
            *code = simd::Element::narrow(x / divisor);
        }
        scale
    }
}

//! Scores of heads of a few elements, which would leave most lanes empty: 16 keys go side by side instead.

use super::kernel::SPAN;
use crate::kernels::linear::source::Lanes;
use crate::simd::{Element, LANES, fma};

/// Are heads of `dim` elements narrow?
pub(super) fn is_narrow(dim: usize) -> bool {
    matches!(dim, 4 | 8)
}

/// Scores of `rows` queries, in the first lanes of `q`, for `count` keys of `dim` elements that lie together from the
/// beginning of `keys`; rows of scores are [`SPAN`] apart.
pub(super) fn scores<T: Element>(keys: &[T], dim: usize, count: usize, q: &[Lanes], rows: usize, out: &mut [f32]) {
    match dim {
        4 => of_dim::<T, 4>(keys, count, &q[..rows], out),
        8 => of_dim::<T, 8>(keys, count, &q[..rows], out),
        _ => unreachable!("heads of {dim} elements are not narrow"),
    }
}

/// No loop for AVX-512, where other code takes heads of so few elements (`packed.rs`).
fn of_dim<T: Element, const DIM: usize>(keys: &[T], count: usize, q: &[Lanes], out: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if crate::simd::isa() >= crate::simd::Isa::Avx2 {
        // SAFETY: `isa` found the features on this machine.
        return unsafe { avx2::<T, DIM>(keys, count, q, out) };
    }
    generic::<T, DIM, { cfg!(target_arch = "aarch64") }>(keys, count, q, out);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn avx2<T: Element, const DIM: usize>(keys: &[T], count: usize, q: &[Lanes], out: &mut [f32]) {
    generic::<T, DIM, true>(keys, count, q, out);
}

#[inline(always)]
#[allow(clippy::inline_always)] // must compile with its caller's instruction set
fn generic<T: Element, const DIM: usize, const FMA: bool>(keys: &[T], count: usize, q: &[Lanes], out: &mut [f32]) {
    let (keys, _) = keys.as_chunks::<DIM>();
    for from in (0..count).step_by(LANES) {
        let mut columns = [[0f32; LANES]; DIM];
        match keys[from..].first_chunk::<LANES>() {
            // Those beyond `count` are of the next block: nobody reads their scores.
            Some(keys) => {
                for d in 0..DIM {
                    for (i, key) in keys.iter().enumerate() {
                        columns[d][i] = key[d].widen();
                    }
                }
            }
            None => {
                for (i, key) in keys[from..].iter().enumerate() {
                    for d in 0..DIM {
                        columns[d][i] = key[d].widen();
                    }
                }
            }
        }
        for (row, q) in q.iter().enumerate() {
            let mut sums = [0f32; LANES];
            for d in 0..DIM {
                for i in 0..LANES {
                    sums[i] = fma::<FMA>(q[d], columns[d][i], sums[i]);
                }
            }
            let out = &mut out[row * SPAN + from..];
            match out.first_chunk_mut::<LANES>() {
                Some(out) if from + LANES <= count => *out = sums,
                _ => out[..count - from].copy_from_slice(&sums[..count - from]),
            }
        }
    }
}

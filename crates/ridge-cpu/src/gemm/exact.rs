//! Products of packed panels of f32 that are summed in f64 and rounded once, for sums whose differences cancel.
#![allow(clippy::inline_always)] // must compile with the instruction set of the caller
#![allow(clippy::needless_range_loop)] // several arrays of registers go by one index

use crate::simd::vectorised;

vectorised! {
    /// `c`, rows of `stride` elements, is `factor` times the product of a panel of A of `rows` lines and one of B of `columns`
    /// lines (8, 12, 16 or 32), of `steps` steps.
    pub(super) fn multiply(steps: usize, a: &[u32], rows: usize, b: &[u32], columns: usize, c: &mut [f32], stride: usize, factor: f32) {
        // Rows that share a widened vector of B: as many as registers hold the sums of.
        match columns {
            32 if WIDE => tile::<32, 6, FMA>(steps, a, rows, b, c, stride, factor),
            16 => tile::<16, 2, FMA>(steps, a, rows, b, c, stride, factor),
            12 => tile::<12, 2, FMA>(steps, a, rows, b, c, stride, factor),
            8 => tile::<8, 2, FMA>(steps, a, rows, b, c, stride, factor),
            _ => unreachable!("panels of B have 8, 12, 16 or 32 columns"),
        }
    }
}

#[inline(always)]
fn tile<const W: usize, const R: usize, const FMA: bool>(
    steps: usize,
    a: &[u32],
    rows: usize,
    b: &[u32],
    c: &mut [f32],
    stride: usize,
    factor: f32,
) {
    let wide = |word: u32| f64::from(f32::from_bits(word));
    let b = &b.as_chunks::<W>().0[..steps];
    for first in (0..rows).step_by(R) {
        let mut sums = [[0f64; W]; R];
        for (a, b) in a.chunks_exact(rows).zip(b) {
            for r in 0..R {
                let a = wide(a[first + r]);
                for i in 0..W {
                    // The product is exact, so only the sum is rounded, with one instruction or with two.
                    let b = wide(b[i]);
                    sums[r][i] = if FMA { a.mul_add(b, sums[r][i]) } else { a * b + sums[r][i] };
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            let to = &mut c[(first + r) * stride..][..W];
            for (to, sum) in to.iter_mut().zip(sums) {
                *to = (sum * f64::from(factor)) as f32;
            }
        }
    }
}

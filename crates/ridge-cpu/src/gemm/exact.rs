//! Products of packed panels of f32 that are summed in f64 and rounded once, for sums whose differences cancel.
#![allow(clippy::inline_always)] // must compile with the instruction set of the caller
#![allow(clippy::needless_range_loop)] // several arrays of registers go by one index

#[cfg(target_arch = "x86_64")]
use crate::simd;
use crate::simd::vectorised;

/// Rows of A that share a widened vector of B.
const ABREAST: usize = 2;

/// `c`, rows of `stride` elements, is `factor` times the product of a panel of A of `rows` lines and one of B of `columns` lines
/// (8, 12, 16 or 32), of `steps` steps.
///
/// # Panics
/// When a panel or `c` is too short.
pub(super) fn multiply(
    steps: usize,
    [a, b]: [&[u32]; 2],
    [rows, columns]: [usize; 2],
    c: &mut [f32],
    stride: usize,
    factor: f32,
) {
    assert!(a.len() >= steps * rows && b.len() >= steps * columns && c.len() >= (rows - 1) * stride + columns);
    #[cfg(target_arch = "x86_64")]
    if simd::isa() >= simd::Isa::Avx512 && (rows, columns) == (x86::ROWS, x86::COLUMNS) {
        // SAFETY: there is AVX-512, and the panels and `c` are as long as asserted.
        return unsafe { x86::multiply(steps, [a, b].map(|of| of.as_ptr().cast()), c.as_mut_ptr(), stride, factor) };
    }
    multiply_lanes(steps, a, rows, b, columns, c, stride, factor);
}

vectorised! {
    fn multiply_lanes(steps: usize, a: &[u32], rows: usize, b: &[u32], columns: usize, c: &mut [f32], stride: usize, factor: f32) {
        match columns {
            32 => tile::<32, FMA>(steps, a, rows, b, c, stride, factor),
            16 => tile::<16, FMA>(steps, a, rows, b, c, stride, factor),
            12 => tile::<12, FMA>(steps, a, rows, b, c, stride, factor),
            8 => tile::<8, FMA>(steps, a, rows, b, c, stride, factor),
            _ => unreachable!("panels of B have 8, 12, 16 or 32 columns"),
        }
    }
}

#[inline(always)]
fn tile<const W: usize, const FMA: bool>(
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
    for first in (0..rows).step_by(ABREAST) {
        let mut sums = [[0f64; W]; ABREAST];
        for (a, b) in a.chunks_exact(rows).zip(b) {
            for r in 0..ABREAST {
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

/// The same sums in registers of AVX-512, which the compiler does not find.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        _mm256_loadu_ps, _mm256_storeu_ps, _mm512_cvtpd_ps, _mm512_cvtps_pd, _mm512_fmadd_pd, _mm512_mul_pd,
        _mm512_set1_pd, _mm512_setzero_pd,
    };

    /// Lines of the panels of A and of B.
    pub(super) const ROWS: usize = 12;
    pub(super) const COLUMNS: usize = 8 * VECTORS;

    /// Rows that share widened vectors of B: 24 sums, four vectors and a broadcast fit 32 registers.
    const ABREAST: usize = 6;
    const VECTORS: usize = 4;

    /// # Safety
    /// `a` has `steps` rows of 12 elements, `b` of 32, and `c` 12 rows of 32, `stride` apart.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")]
    pub(super) unsafe fn multiply(steps: usize, [a, b]: [*const f32; 2], c: *mut f32, stride: usize, factor: f32) {
        let factor = _mm512_set1_pd(f64::from(factor));
        for first in [0, ABREAST] {
            let mut sums = [[_mm512_setzero_pd(); VECTORS]; ABREAST];
            // SAFETY: all reads and writes are inside of what the caller promises.
            unsafe {
                let (mut a, mut b) = (a.add(first), b);
                for _ in 0..steps {
                    let mut columns = [_mm512_setzero_pd(); VECTORS];
                    for (v, columns) in columns.iter_mut().enumerate() {
                        *columns = _mm512_cvtps_pd(_mm256_loadu_ps(b.add(8 * v)));
                    }
                    for (r, sums) in sums.iter_mut().enumerate() {
                        let row = _mm512_set1_pd(f64::from(*a.add(r)));
                        for (sum, columns) in sums.iter_mut().zip(columns) {
                            *sum = _mm512_fmadd_pd(row, columns, *sum);
                        }
                    }
                    a = a.add(ROWS);
                    b = b.add(COLUMNS);
                }
                for (r, sums) in sums.iter().enumerate() {
                    for (v, sum) in sums.iter().enumerate() {
                        let to = c.add((first + r) * stride + 8 * v);
                        _mm256_storeu_ps(to, _mm512_cvtpd_ps(_mm512_mul_pd(*sum, factor)));
                    }
                }
            }
        }
    }
}

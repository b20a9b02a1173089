//! Rows of x by a packed group of columns, with AVX2 and FMA: compilers turn the loop over lanes into single elements where
//! sums are two vectors each.
//!
//! Floor: two multiplications of eight elements a cycle. Three rows by two columns are 12 sums, which with their operands fill
//! the 16 registers, and ask for 10 loads to 12 multiplications.
#![allow(clippy::needless_range_loop)] // several arrays of registers go by one index

use std::arch::x86_64::{__m256, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_setzero_ps, _mm256_storeu_ps};

use crate::simd::{self, Isa, LANES};

type Lanes = [f32; LANES];

/// Columns whose vectors lie side by side.
const GROUP: usize = 4;

/// Rows and columns whose sums are in registers.
const ROWS: usize = 3;
const COLUMNS: usize = 2;

/// Vectors of the halves of [`Lanes`].
const HALVES: usize = 2;

/// Rows of x, `stride` vectors each, of which those from `from` on are multiplied.
pub(super) struct RowsOfX<'a> {
    pub(super) data: &'a [Lanes],
    pub(super) stride: usize,
    pub(super) rows: usize,
    pub(super) from: usize,
}

/// Adds the products of all rows of x with a packed group to the first four of every `width` sums.
///
/// # Panics
/// Where the machine has no AVX2, or a slice is too short.
pub(super) fn multiply(x: &RowsOfX<'_>, block: &[[Lanes; GROUP]], sums: &mut [Lanes], width: usize) {
    assert!(simd::isa() >= Isa::Avx2);
    if x.rows == 0 {
        return;
    }
    assert!(x.data.len() >= (x.rows - 1) * x.stride + x.from + block.len());
    assert!(sums.len() >= (x.rows - 1) * width + GROUP);
    let mut row = 0;
    while row < x.rows {
        let of_row = x.data[row * x.stride + x.from..].as_ptr();
        let to = sums[row * width..].as_mut_ptr();
        for skip in (0..GROUP).step_by(COLUMNS) {
            // SAFETY: there is AVX2, and so many rows of x and of sums are there.
            unsafe {
                if row + ROWS <= x.rows {
                    block_of::<ROWS>(of_row, x.stride, block, skip, to.add(skip), width);
                } else {
                    block_of::<1>(of_row, x.stride, block, skip, to.add(skip), width);
                }
            }
        }
        row += if row + ROWS <= x.rows { ROWS } else { 1 };
    }
}

/// # Safety
/// There is AVX2; from `x` on there are `R` rows, `stride` vectors apart, of as many vectors as the block has, and from `sums`
/// on two of every `width` sums.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn block_of<const R: usize>(
    x: *const Lanes,
    stride: usize,
    block: &[[Lanes; GROUP]],
    skip: usize,
    sums: *mut Lanes,
    width: usize,
) {
    // SAFETY: by the caller's promise for all that is read and written.
    unsafe {
        let mut acc = [[[_mm256_setzero_ps(); HALVES]; COLUMNS]; R];
        for r in 0..R {
            for c in 0..COLUMNS {
                for half in 0..HALVES {
                    acc[r][c][half] = load(sums.add(r * width + c), half);
                }
            }
        }
        for at in 0..block.len() {
            let weights = block.as_ptr().add(at).cast::<Lanes>().add(skip);
            for half in 0..HALVES {
                let w = [load(weights, half), load(weights.add(1), half)];
                for r in 0..R {
                    let x = load(x.add(r * stride + at), half);
                    for c in 0..COLUMNS {
                        acc[r][c][half] = _mm256_fmadd_ps(x, w[c], acc[r][c][half]);
                    }
                }
            }
        }
        for r in 0..R {
            for c in 0..COLUMNS {
                for half in 0..HALVES {
                    let to = sums.add(r * width + c).cast::<f32>().add(half * LANES / HALVES);
                    _mm256_storeu_ps(to, acc[r][c][half]);
                }
            }
        }
    }
}

/// # Safety
/// The vector is there.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn load(vector: *const Lanes, half: usize) -> __m256 {
    // SAFETY: by the caller's promise.
    unsafe { _mm256_loadu_ps(vector.cast::<f32>().add(half * LANES / HALVES)) }
}

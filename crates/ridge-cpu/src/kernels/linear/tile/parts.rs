//! Rows of x by a packed group of columns, with vectors of AVX2 or of NEON: compilers turn the loop over lanes into single
//! elements where sums are several vectors each.
//!
//! Floor: on AVX2 two multiplications of eight elements a cycle. Three rows by four columns of a half of the lanes are 12 sums,
//! which with three vectors of x and one of a column fill the 16 registers, and ask for 7 loads to 12 multiplications. The other
//! half comes after. NEON has registers for two quarters at a time.
#![allow(clippy::needless_range_loop)] // several arrays of registers go by one index

#[cfg(target_arch = "aarch64")]
use std::arch::aarch64::{float32x4_t as Part, vdupq_n_f32, vfmaq_f32, vld1q_f32, vst1q_f32};
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__m256 as Part, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_setzero_ps, _mm256_storeu_ps};

use crate::simd::LANES;

type Lanes = [f32; LANES];

/// Columns whose vectors lie side by side.
const GROUP: usize = 4;

/// Rows whose sums are in registers, of all columns of a group.
const ROWS: usize = 3;

/// Vectors of [`Lanes`], and their elements.
const PARTS: usize = LANES / ELEMENTS;
const ELEMENTS: usize = size_of::<Part>() / size_of::<f32>();

/// Parts whose sums are in registers at a time.
const TOGETHER: usize = if cfg!(target_arch = "aarch64") { 2 } else { 1 };

/// Rows of x, `stride` vectors each, of which those from `from` on are multiplied.
pub(super) struct RowsOfX<'a> {
    pub(super) data: &'a [Lanes],
    pub(super) stride: usize,
    pub(super) rows: usize,
    pub(super) from: usize,
}

/// Adds the products of all rows of x with a packed group to the first four of every `width` sums.
///
/// # Safety
/// On x86-64 there is AVX2.
///
/// # Panics
/// When a slice is too short.
pub(super) unsafe fn multiply(x: &RowsOfX<'_>, block: &[[Lanes; GROUP]], sums: &mut [Lanes], width: usize) {
    if x.rows == 0 {
        return;
    }
    assert!(x.data.len() >= (x.rows - 1) * x.stride + x.from + block.len());
    assert!(sums.len() >= (x.rows - 1) * width + GROUP);
    let mut row = 0;
    while row < x.rows {
        let of_row = x.data[row * x.stride + x.from..].as_ptr();
        let to = sums[row * width..].as_mut_ptr();
        for first in (0..PARTS).step_by(TOGETHER) {
            // SAFETY: there are the instructions by the caller's promise, and so many rows of x and of sums are there.
            unsafe {
                if row + ROWS <= x.rows {
                    block_of::<ROWS>(of_row, x.stride, block, first, to, width);
                } else {
                    block_of::<1>(of_row, x.stride, block, first, to, width);
                }
            }
        }
        row += if row + ROWS <= x.rows { ROWS } else { 1 };
    }
}

/// Parts `first..first + TOGETHER` of the sums.
///
/// # Safety
/// There are the instructions and the parts; from `x` on there are `R` rows, `stride` vectors apart, of as many vectors as the
/// block has, and from `sums` on four of every `width` sums.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
unsafe fn block_of<const R: usize>(
    x: *const Lanes,
    stride: usize,
    block: &[[Lanes; GROUP]],
    first: usize,
    sums: *mut Lanes,
    width: usize,
) {
    // SAFETY: by the caller's promise for all that is read and written.
    unsafe {
        let mut acc = [[[zero(); TOGETHER]; GROUP]; R];
        for r in 0..R {
            for c in 0..GROUP {
                for part in 0..TOGETHER {
                    acc[r][c][part] = load(sums.add(r * width + c), first + part);
                }
            }
        }
        for at in 0..block.len() {
            let weights = block.as_ptr().add(at).cast::<Lanes>();
            for part in 0..TOGETHER {
                let mut of_x = [zero(); R];
                for r in 0..R {
                    of_x[r] = load(x.add(r * stride + at), first + part);
                }
                for c in 0..GROUP {
                    let w = load(weights.add(c), first + part);
                    for r in 0..R {
                        acc[r][c][part] = multiply_add(of_x[r], w, acc[r][c][part]);
                    }
                }
            }
        }
        for r in 0..R {
            for c in 0..GROUP {
                for part in 0..TOGETHER {
                    store(sums.add(r * width + c), first + part, acc[r][c][part]);
                }
            }
        }
    }
}

/// Part `part` of a vector.
///
/// # Safety
/// There are the instructions, and the vector is there.
#[inline]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
unsafe fn load(vector: *const Lanes, part: usize) -> Part {
    // SAFETY: by the caller's promise.
    unsafe {
        let at = vector.cast::<f32>().add(part * ELEMENTS);
        #[cfg(target_arch = "x86_64")]
        return _mm256_loadu_ps(at);
        #[cfg(target_arch = "aarch64")]
        return vld1q_f32(at);
    }
}

/// # Safety
/// As for [`load`].
#[inline]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
unsafe fn store(vector: *mut Lanes, part: usize, elements: Part) {
    // SAFETY: by the caller's promise.
    unsafe {
        let at = vector.cast::<f32>().add(part * ELEMENTS);
        #[cfg(target_arch = "x86_64")]
        _mm256_storeu_ps(at, elements);
        #[cfg(target_arch = "aarch64")]
        vst1q_f32(at, elements);
    }
}

/// # Safety
/// There are the instructions.
#[inline]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
unsafe fn zero() -> Part {
    #[cfg(target_arch = "x86_64")]
    return _mm256_setzero_ps();
    #[cfg(target_arch = "aarch64")]
    // SAFETY: every processor of AArch64 has NEON.
    return unsafe { vdupq_n_f32(0.0) };
}

/// `x * w + sum`, rounded once.
///
/// # Safety
/// There are the instructions.
#[inline]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
unsafe fn multiply_add(x: Part, w: Part, sum: Part) -> Part {
    #[cfg(target_arch = "x86_64")]
    return _mm256_fmadd_ps(x, w, sum);
    #[cfg(target_arch = "aarch64")]
    // SAFETY: every processor of AArch64 has NEON.
    return unsafe { vfmaq_f32(sum, x, w) };
}

//! The innermost product: a few rows of A by a few vectors of columns of B, over one block of the inner extent.
//!
//! Both operands are packed in panels of words of 32 bits, one after another along the inner extent: an f32, or a pair of
//! neighbouring bf16. Floor: a fused multiply-add (or a product of pairs) of a whole vector each cycle.
#![allow(clippy::inline_always)] // must compile with the instruction set of the caller

use super::words::Words;
use crate::simd::{self, Isa};

/// How the innermost product is computed on this machine: extents of its tile, and what a word is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Micro {
    /// Rows of A in a panel.
    pub(super) rows: usize,
    /// Columns of B in a panel.
    pub(super) columns: usize,
    pub(super) words: Words,
    isa: Isa,
}

impl Micro {
    /// The best for words of this kind, which are pairs only where [`pairs_available`] says so.
    pub(super) fn new(words: Words) -> Self {
        let isa = simd::isa();
        let (rows, columns) = match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx512Vnni | Isa::Avx512Bf16 | Isa::Amx => (12, 32),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::AvxVnni => (6, 16),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon | Isa::NeonDotprod | Isa::NeonI8mm | Isa::NeonBf16 => (neon::ROWS, neon::COLUMNS),
            Isa::Portable => (4, 8),
        };
        Self { rows, columns, words, isa }
    }

    /// `c`, rows of `stride` elements, from or with the product added of a panel of A and one of B of `steps` words.
    ///
    /// # Panics
    /// When a panel or `c` is too short.
    pub(super) fn multiply(self, steps: usize, [a, b]: [&[u32]; 2], c: &mut [f32], stride: usize, add: bool) {
        assert!(a.len() >= steps * self.rows && b.len() >= steps * self.columns);
        assert!(c.len() >= (self.rows - 1) * stride + self.columns);
        match self.isa {
            // SAFETY: the machine has the instructions, and the panels and `c` are as long as asserted.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx512Vnni | Isa::Avx512Bf16 | Isa::Amx => unsafe {
                match self.words {
                    Words::F32 => x86::wide(steps, a.as_ptr().cast(), b.as_ptr().cast(), c.as_mut_ptr(), stride, add),
                    Words::Pairs => x86::pairs(steps, a.as_ptr(), b.as_ptr(), c.as_mut_ptr(), stride, add),
                }
            },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::AvxVnni => unsafe {
                x86::narrow(steps, a.as_ptr().cast(), b.as_ptr().cast(), c.as_mut_ptr(), stride, add);
            },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: as above.
            Isa::Neon | Isa::NeonDotprod | Isa::NeonI8mm | Isa::NeonBf16 => unsafe {
                match self.words {
                    Words::F32 => neon::floats(steps, a.as_ptr(), b.as_ptr(), c.as_mut_ptr(), stride, add),
                    Words::Pairs => neon::pairs(steps, a.as_ptr(), b.as_ptr(), c.as_mut_ptr(), stride, add),
                }
            },
            Isa::Portable => portable(steps, [a, b], c, stride, add),
        }
    }
}

/// Can products of pairs of bf16 be computed?
pub(super) fn pairs_available() -> bool {
    #[cfg(target_arch = "x86_64")]
    return match simd::isa() {
        Isa::Avx512Bf16 => true,
        Isa::Amx => is_x86_feature_detected!("avx512bf16"),
        _ => false,
    };
    #[cfg(target_arch = "aarch64")]
    return simd::isa() == Isa::NeonBf16;
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    false
}

fn portable(steps: usize, [a, b]: [&[u32]; 2], c: &mut [f32], stride: usize, add: bool) {
    const FMA: bool = cfg!(target_arch = "aarch64");
    let mut sums = [[0f32; 8]; 4];
    if add {
        for (r, sums) in sums.iter_mut().enumerate() {
            sums.copy_from_slice(&c[r * stride..][..8]);
        }
    }
    let (a, b) = (a.as_chunks::<4>().0, b.as_chunks::<8>().0);
    for (a, b) in a.iter().zip(b).take(steps) {
        for (sums, a) in sums.iter_mut().zip(a) {
            for (sum, b) in sums.iter_mut().zip(b) {
                *sum = simd::fma::<FMA>(f32::from_bits(*a), f32::from_bits(*b), *sum);
            }
        }
    }
    for (r, sums) in sums.iter().enumerate() {
        c[r * stride..][..8].copy_from_slice(sums);
    }
}

#[cfg(target_arch = "aarch64")]
mod neon;

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m256, __m512, __m512bh, __m512i, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_set1_ps, _mm256_setzero_ps,
        _mm256_storeu_ps, _mm512_dpbf16_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_set1_epi32,
        _mm512_set1_ps, _mm512_setzero_ps, _mm512_storeu_ps,
    };

    /// Rows and vectors of 16 columns: 24 sums, 2 vectors of B and a broadcast fit 32 registers.
    const ROWS: usize = 12;
    const VECTORS: usize = 2;

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load_sums(c: *const f32, stride: usize, add: bool) -> [[__m512; VECTORS]; ROWS] {
        let mut sums = [[_mm512_setzero_ps(); VECTORS]; ROWS];
        if add {
            for (r, sums) in sums.iter_mut().enumerate() {
                for (v, sum) in sums.iter_mut().enumerate() {
                    // SAFETY: inside the tile by the caller's promise.
                    *sum = unsafe { _mm512_loadu_ps(c.add(r * stride + v * 16)) };
                }
            }
        }
        sums
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn store_sums(sums: &[[__m512; VECTORS]; ROWS], c: *mut f32, stride: usize) {
        for (r, sums) in sums.iter().enumerate() {
            for (v, sum) in sums.iter().enumerate() {
                // SAFETY: inside the tile by the caller's promise.
                unsafe { _mm512_storeu_ps(c.add(r * stride + v * 16), *sum) };
            }
        }
    }

    /// # Safety
    /// `a` has `steps * ROWS` words, `b` `steps * 32`, and `c` rows of 32 elements, `stride` apart.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")]
    pub(super) unsafe fn wide(steps: usize, a: *const f32, b: *const f32, c: *mut f32, stride: usize, add: bool) {
        // SAFETY: all reads and writes are inside what the caller promises.
        unsafe {
            let mut sums = load_sums(c, stride, add);
            let (mut a, mut b) = (a, b);
            for _ in 0..steps {
                let columns = [_mm512_loadu_ps(b), _mm512_loadu_ps(b.add(16))];
                for (r, sums) in sums.iter_mut().enumerate() {
                    let row = _mm512_set1_ps(*a.add(r));
                    for (sum, columns) in sums.iter_mut().zip(columns) {
                        *sum = _mm512_fmadd_ps(row, columns, *sum);
                    }
                }
                a = a.add(ROWS);
                b = b.add(32);
            }
            store_sums(&sums, c, stride);
        }
    }

    /// # Safety
    /// As [`wide`], with AVX512_BF16.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,avx512bf16")]
    pub(super) unsafe fn pairs(steps: usize, a: *const u32, b: *const u32, c: *mut f32, stride: usize, add: bool) {
        // SAFETY: all reads and writes are inside what the caller promises, and bits of any vector are pairs.
        unsafe {
            let bf16 = |x: __m512i| std::mem::transmute::<__m512i, __m512bh>(x);
            let mut sums = load_sums(c, stride, add);
            let (mut a, mut b) = (a, b);
            for _ in 0..steps {
                let columns = [bf16(_mm512_loadu_si512(b.cast())), bf16(_mm512_loadu_si512(b.add(16).cast()))];
                for (r, sums) in sums.iter_mut().enumerate() {
                    let row = bf16(_mm512_set1_epi32(*a.add(r) as i32));
                    for (sum, columns) in sums.iter_mut().zip(columns) {
                        *sum = _mm512_dpbf16_ps(*sum, row, columns);
                    }
                }
                a = a.add(ROWS);
                b = b.add(32);
            }
            store_sums(&sums, c, stride);
        }
    }

    /// # Safety
    /// `a` has `steps * 6` words, `b` `steps * 16`, and `c` 6 rows of 16 elements, `stride` apart.
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn narrow(steps: usize, a: *const f32, b: *const f32, c: *mut f32, stride: usize, add: bool) {
        const ROWS: usize = 6;
        // SAFETY: all reads and writes are inside what the caller promises.
        unsafe {
            let mut sums = [[_mm256_setzero_ps(); 2]; ROWS];
            if add {
                for (r, sums) in sums.iter_mut().enumerate() {
                    for (v, sum) in sums.iter_mut().enumerate() {
                        *sum = _mm256_loadu_ps(c.add(r * stride + v * 8));
                    }
                }
            }
            let (mut a, mut b) = (a, b);
            for _ in 0..steps {
                let columns: [__m256; 2] = [_mm256_loadu_ps(b), _mm256_loadu_ps(b.add(8))];
                for (r, sums) in sums.iter_mut().enumerate() {
                    let row = _mm256_set1_ps(*a.add(r));
                    for (sum, columns) in sums.iter_mut().zip(columns) {
                        *sum = _mm256_fmadd_ps(row, columns, *sum);
                    }
                }
                a = a.add(ROWS);
                b = b.add(16);
            }
            for (r, sums) in sums.iter().enumerate() {
                for (v, sum) in sums.iter().enumerate() {
                    _mm256_storeu_ps(c.add(r * stride + v * 8), *sum);
                }
            }
        }
    }
}

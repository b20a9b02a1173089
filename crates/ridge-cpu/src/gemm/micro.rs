//! The innermost product: a few rows of A by a few vectors of columns of B, over one block of the inner extent.
//!
//! Both operands are packed in panels of words of 32 bits, one after another along the inner extent: an f32, or a pair of
//! neighbouring bf16. Floor: a fused multiply-add (or a product of pairs) of a whole vector each cycle; on matrix tiles
//! (`micro/tiles.rs`) 16 cycles for 16 rows by 16 columns by 16 pairs.
#![allow(clippy::inline_always)] // must compile with the instruction set of the caller

#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "x86_64")]
mod tiles;

use super::words::{PanelOfB, Words};
use crate::simd::{self, Isa};

/// How the innermost product is computed on this machine: extents of its tile, and what a word is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Micro {
    /// Rows of A in a panel.
    pub(super) rows: usize,
    /// Columns of B in a panel.
    pub(super) columns: usize,
    /// Columns that are side by side in a panel of B, which has one part after another of so many.
    pub(super) lanes: usize,
    /// Words of a line of A that lie together; panels are filled up to a multiple of them.
    pub(super) together: usize,
    pub(super) words: Words,
    by: Multiplier,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Multiplier {
    Vectors(Isa),
    #[cfg(target_arch = "x86_64")]
    Tiles(tiles::TileMultiplier),
}

/// What must be held while products are computed: the configuration of matrix tiles, where they are used.
pub(super) struct MicroSession {
    #[cfg(target_arch = "x86_64")]
    _tiles: Option<crate::amx::TileSession>,
}

/// What is brought to L2 while a product is computed: `per_step` bytes further with each word of the inner extent.
#[derive(Clone, Copy)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(super) struct Ahead {
    pub(super) at: *const u8,
    pub(super) per_step: usize,
}

impl Ahead {
    /// The same line again and again, wherever it is.
    pub(super) const NOTHING: Self = Self { at: std::ptr::null(), per_step: 0 };
}

/// Tiles that are added to the sums in the end, one after another: `apart` elements before the one that the sums begin with, as
/// far before that, and so on. The last of them is where the sums go.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct Merge {
    pub(super) count: usize,
    pub(super) apart: usize,
}

#[cfg(target_arch = "x86_64")]
impl Merge {
    pub(super) const NOTHING: Self = Self { count: 0, apart: 0 };
}

impl Micro {
    /// The best for words of this kind, which are pairs only where [`Micro::multiplies_pairs`] says so.
    pub(super) fn new(words: Words) -> Self {
        #[cfg(target_arch = "x86_64")]
        if words == Words::Pairs && simd::isa() == Isa::Amx {
            return Self::on_tiles(tiles::TileMultiplier::Amx);
        }
        Self::in_vectors(words)
    }

    /// The best by vector instructions, which multiply pairs where [`vectors_of_pairs`] says so.
    pub(super) fn in_vectors(words: Words) -> Self {
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
        Self { rows, columns, lanes: columns, together: 1, words, by: Multiplier::Vectors(isa) }
    }

    #[cfg(target_arch = "x86_64")]
    fn on_tiles(by: tiles::TileMultiplier) -> Self {
        let (rows, columns, lanes) = (tiles::ROWS, tiles::COLUMNS, tiles::SIDE);
        Self { rows, columns, lanes, together: tiles::SIDE, words: Words::Pairs, by: Multiplier::Tiles(by) }
    }

    /// Tiles whose instruction is computed in software, so that everything around it is tested on any machine.
    #[cfg(all(test, target_arch = "x86_64"))]
    pub(super) fn on_emulated_tiles() -> Self {
        Self::on_tiles(tiles::TileMultiplier::Emulated)
    }

    /// Can products of pairs of bf16 be computed?
    pub(super) fn multiplies_pairs() -> bool {
        #[cfg(target_arch = "x86_64")]
        if simd::isa() == Isa::Amx {
            return true;
        }
        vectors_of_pairs()
    }

    /// Words that a line takes in a panel.
    pub(super) fn words_of(self, inner: usize) -> usize {
        self.words.count(inner).next_multiple_of(self.together)
    }

    /// Nanoseconds of a product of two words, roughly.
    pub(super) fn nanos(self) -> f64 {
        match self.by {
            Multiplier::Vectors(_) => 0.02,
            #[cfg(target_arch = "x86_64")]
            Multiplier::Tiles(_) => 0.003,
        }
    }

    #[cfg_attr(not(target_arch = "x86_64"), expect(clippy::unused_self, reason = "only tiles have a session"))]
    pub(super) fn begin(self) -> MicroSession {
        MicroSession {
            #[cfg(target_arch = "x86_64")]
            _tiles: (self.by == Multiplier::Tiles(tiles::TileMultiplier::Amx)).then(crate::amx::TileSession::begin),
        }
    }

    /// `c`, rows of `stride` elements, from or with the product added of a panel of A and one of B of `steps` words. Where
    /// products are of AVX-512, `ahead` is brought to cache meanwhile.
    ///
    /// # Panics
    /// When a panel is too short.
    ///
    /// # Safety
    /// `c` points to [`Micro::rows`] rows of [`Micro::columns`] elements, `stride` apart, which nobody else uses.
    pub(super) unsafe fn multiply(
        self,
        _session: &MicroSession,
        steps: usize,
        a: &[u32],
        b: PanelOfB<'_>,
        c: *mut f32,
        stride: usize,
        add: bool,
        ahead: Ahead,
    ) {
        let parts = self.columns / self.lanes;
        assert!(a.len() >= steps * self.rows && b.words.len() >= (parts - 1) * b.apart + steps * self.lanes);
        match self.by {
            Multiplier::Vectors(isa) => {
                // SAFETY: the panels are as long as asserted, and `c` is what the caller promises.
                unsafe { self.multiply_vectors(isa, steps, [a, b.words], c, stride, add, ahead) };
            }
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above, and the session has configured the tiles.
            Multiplier::Tiles(by) => unsafe { by.multiply(steps, a, b, c, stride, add) },
        }
    }

    /// # Safety
    /// As [`Micro::multiply`], with panels that are long enough.
    unsafe fn multiply_vectors(
        self,
        isa: Isa,
        steps: usize,
        [a, b]: [&[u32]; 2],
        c: *mut f32,
        stride: usize,
        add: bool,
        ahead: Ahead,
    ) {
        #[cfg(not(target_arch = "x86_64"))]
        let _ = ahead;
        match isa {
            // SAFETY: the machine has the instructions; the rest is the caller's promise.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx512Vnni | Isa::Avx512Bf16 | Isa::Amx => unsafe {
                match self.words {
                    Words::F32 => {
                        let panels = [a.as_ptr(), b.as_ptr()].map(<*const u32>::cast);
                        x86::wide(steps, panels, c, stride, add, ahead, Merge::NOTHING);
                    }
                    Words::Pairs => x86::pairs(steps, [a.as_ptr(), b.as_ptr()], c, stride, add, ahead),
                }
            },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::AvxVnni => unsafe {
                let panels = [a.as_ptr(), b.as_ptr()].map(<*const u32>::cast);
                x86::narrow(steps, panels, c, stride, add, Merge::NOTHING);
            },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: as above.
            Isa::Neon | Isa::NeonDotprod | Isa::NeonI8mm | Isa::NeonBf16 => unsafe {
                match self.words {
                    Words::F32 => neon::floats(steps, a.as_ptr(), b.as_ptr(), c, stride, add),
                    Words::Pairs => neon::pairs(steps, a.as_ptr(), b.as_ptr(), c, stride, add),
                }
            },
            // SAFETY: as above.
            Isa::Portable => unsafe { portable(steps, [a, b], c, stride, add) },
        }
    }
}

/// Are there vector instructions for products of pairs of bf16?
pub(super) fn vectors_of_pairs() -> bool {
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

/// # Safety
/// As [`Micro::multiply`], for 4 rows by 8 columns.
unsafe fn portable(steps: usize, [a, b]: [&[u32]; 2], c: *mut f32, stride: usize, add: bool) {
    const FMA: bool = cfg!(target_arch = "aarch64");
    // SAFETY: by the caller's promise.
    let row = |r: usize| unsafe { &mut *c.add(r * stride).cast::<[f32; 8]>() };
    let mut sums = [[0f32; 8]; 4];
    if add {
        for (r, sums) in sums.iter_mut().enumerate() {
            *sums = *row(r);
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
        *row(r) = *sums;
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) mod x86 {
    use std::arch::x86_64::{
        __m256, __m512, __m512bh, __m512i, _MM_HINT_T1, _mm_prefetch, _mm256_add_ps, _mm256_fmadd_ps, _mm256_loadu_ps,
        _mm256_set1_ps, _mm256_setzero_ps, _mm256_storeu_ps, _mm512_add_ps, _mm512_dpbf16_ps, _mm512_fmadd_ps,
        _mm512_loadu_ps, _mm512_loadu_si512, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps, _mm512_storeu_ps,
    };

    use super::{Ahead, Merge};

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
    /// `a` has `steps * ROWS` words, `b` `steps * 32`, and `c` rows of 32 elements, `stride` apart, as have the tiles of `merge`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")]
    pub(in crate::gemm) unsafe fn wide(
        steps: usize,
        [a, b]: [*const f32; 2],
        mut c: *mut f32,
        stride: usize,
        add: bool,
        ahead: Ahead,
        merge: Merge,
    ) {
        // SAFETY: all reads and writes are inside what the caller promises.
        unsafe {
            let mut sums = load_sums(c, stride, add);
            let (mut a, mut b, mut fetched) = (a, b, ahead.at);
            for _ in 0..steps {
                _mm_prefetch::<_MM_HINT_T1>(fetched.cast());
                fetched = fetched.wrapping_add(ahead.per_step);
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
            for _ in 0..merge.count {
                c = c.sub(merge.apart);
                for (r, sums) in sums.iter_mut().enumerate() {
                    for (v, sum) in sums.iter_mut().enumerate() {
                        *sum = _mm512_add_ps(_mm512_loadu_ps(c.add(r * stride + v * 16)), *sum);
                    }
                }
            }
            store_sums(&sums, c, stride);
        }
    }

    /// # Safety
    /// As [`wide`], with AVX512_BF16.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,avx512bf16")]
    pub(super) unsafe fn pairs(
        steps: usize,
        [a, b]: [*const u32; 2],
        c: *mut f32,
        stride: usize,
        add: bool,
        ahead: Ahead,
    ) {
        // SAFETY: all reads and writes are inside what the caller promises, and bits of any vector are pairs.
        unsafe {
            let bf16 = |x: __m512i| std::mem::transmute::<__m512i, __m512bh>(x);
            let mut sums = load_sums(c, stride, add);
            let (mut a, mut b, mut fetched) = (a, b, ahead.at);
            for _ in 0..steps {
                _mm_prefetch::<_MM_HINT_T1>(fetched.cast());
                fetched = fetched.wrapping_add(ahead.per_step);
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
    /// `a` has `steps * 6` words, `b` `steps * 16`, and `c` 6 rows of 16 elements, `stride` apart, as have the tiles of `merge`.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(in crate::gemm) unsafe fn narrow(
        steps: usize,
        [a, b]: [*const f32; 2],
        mut c: *mut f32,
        stride: usize,
        add: bool,
        merge: Merge,
    ) {
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
            for _ in 0..merge.count {
                c = c.sub(merge.apart);
                for (r, sums) in sums.iter_mut().enumerate() {
                    for (v, sum) in sums.iter_mut().enumerate() {
                        *sum = _mm256_add_ps(_mm256_loadu_ps(c.add(r * stride + v * 8)), *sum);
                    }
                }
            }
            for (r, sums) in sums.iter().enumerate() {
                for (v, sum) in sums.iter().enumerate() {
                    _mm256_storeu_ps(c.add(r * stride + v * 8), *sum);
                }
            }
        }
    }
}

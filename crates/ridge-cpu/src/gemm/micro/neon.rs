//! The innermost product with NEON: words of B are loaded, words of A taken from the lanes of what was loaded.
#![allow(clippy::needless_range_loop)] // several arrays of registers go by one index

use std::arch::aarch64::{float32x4_t, vdupq_n_f32, vfmaq_laneq_f32, vld1q_f32, vld1q_u32, vst1q_f32};
use std::arch::aarch64::{uint32x4_t, vreinterpretq_f32_u32};

use crate::simd::bfdot_lane;

/// Rows of A and columns of B: 24 sums, five vectors of operands.
pub(super) const ROWS: usize = 8;
pub(super) const COLUMNS: usize = 4 * VECTORS;

const VECTORS: usize = 3;

/// Defines the product by the instruction that adds the products of a vector of words of B and one word of A.
macro_rules! product {
    ($(#[$meta:meta])* $name:ident, $features:literal, |$sum:ident, $b:ident, $a:ident, $lane:ident| $add:expr) => {
        $(#[$meta])*
        ///
        /// # Safety
        /// The instructions are there; `a` has `steps * ROWS` words, `b` `steps * COLUMNS`, and `c` [`ROWS`] rows of [`COLUMNS`]
        /// elements, `stride` apart.
        #[target_feature(enable = $features)]
        pub(super) unsafe fn $name(steps: usize, a: *const u32, b: *const u32, c: *mut f32, stride: usize, add: bool) {
            #[inline]
            #[target_feature(enable = $features)]
            fn add_lane<const $lane: i32>($sum: float32x4_t, $b: uint32x4_t, $a: uint32x4_t) -> float32x4_t {
                $add
            }
            // SAFETY: all reads and writes are inside of what the caller promises.
            unsafe {
                let mut sums = [[vdupq_n_f32(0.0); VECTORS]; ROWS];
                if add {
                    for r in 0..ROWS {
                        for v in 0..VECTORS {
                            sums[r][v] = vld1q_f32(c.add(r * stride + 4 * v));
                        }
                    }
                }
                for step in 0..steps {
                    let (a, b) = (a.add(step * ROWS), b.add(step * COLUMNS));
                    let a = [vld1q_u32(a), vld1q_u32(a.add(4))];
                    for v in 0..VECTORS {
                        let b = vld1q_u32(b.add(4 * v));
                        for half in 0..2 {
                            sums[4 * half][v] = add_lane::<0>(sums[4 * half][v], b, a[half]);
                            sums[4 * half + 1][v] = add_lane::<1>(sums[4 * half + 1][v], b, a[half]);
                            sums[4 * half + 2][v] = add_lane::<2>(sums[4 * half + 2][v], b, a[half]);
                            sums[4 * half + 3][v] = add_lane::<3>(sums[4 * half + 3][v], b, a[half]);
                        }
                    }
                }
                for r in 0..ROWS {
                    for v in 0..VECTORS {
                        vst1q_f32(c.add(r * stride + 4 * v), sums[r][v]);
                    }
                }
            }
        }
    };
}

product! {
    /// Of words that are f32.
    floats, "neon", |sum, b, a, LANE| vfmaq_laneq_f32::<LANE>(sum, vreinterpretq_f32_u32(b), vreinterpretq_f32_u32(a))
}

product! {
    /// Of words that are pairs of bf16.
    pairs, "neon,bf16", |sum, b, a, LANE| bfdot_lane::<LANE>(sum, b, a)
}

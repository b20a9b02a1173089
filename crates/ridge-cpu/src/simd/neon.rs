//! Instructions of AArch64 whose intrinsics are not stable: products of 8-bit integers and of bf16, and f16.

use std::arch::aarch64::{
    float32x4_t, int8x16_t, int32x4_t, uint8x16_t, uint32x4_t, vcvtq_f32_s32, vget_low_s8, vget_low_s16, vget_low_u16,
    vld1q_f32, vld1q_s8, vld1q_u8, vld1q_u16, vmovl_high_s8, vmovl_high_s16, vmovl_s8, vmovl_s16,
    vreinterpretq_f32_u32, vshll_high_n_u16, vshll_n_u16, vst1q_u8,
};
use std::arch::asm;

use half::{bf16, f16};

use super::{LANES, Vector};

/// Defines functions of one instruction that adds to its first operand.
macro_rules! accumulating {
    ($($(#[$meta:meta])* $features:literal, $name:ident, $instruction:literal, $sum:ty, $operand:ty;)*) => {
        $(
            $(#[$meta])*
            #[inline]
            #[target_feature(enable = $features)]
            pub(crate) fn $name(mut sum: $sum, a: $operand, b: $operand) -> $sum {
                // SAFETY: an instruction on registers, which the features have.
                unsafe {
                    asm!($instruction, inout(vreg) sum, in(vreg) a, in(vreg) b, options(pure, nomem, nostack, preserves_flags));
                }
                sum
            }
        )*
    };
}

accumulating! {
    /// `sum + A B^T`, of matrices `[2, 2]`, `[2, 8]` and `[2, 8]`, row by row.
    "neon,i8mm", smmla, "smmla {0:v}.4s, {1:v}.16b, {2:v}.16b", int32x4_t, int8x16_t;
    /// `sum + A B^T`, of matrices `[2, 2]`, `[2, 4]` and `[2, 4]` of bf16, row by row: pairs of products are rounded to odd, added
    /// up and added to the sum in the order of K.
    "neon,bf16", bfmmla, "bfmmla {0:v}.4s, {1:v}.8h, {2:v}.8h", float32x4_t, uint32x4_t;
}

/// `sum[i]` and the products of the four bytes of word `i` of `a` with those of word `LANE` of `b`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
pub(crate) fn sdot_lane<const LANE: i32>(mut sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: an instruction on registers, which the features have.
    unsafe {
        asm!(
            "sdot {0:v}.4s, {1:v}.16b, {2:v}.4b[{3}]",
            inout(vreg) sum, in(vreg) a, in(vreg) b, const LANE,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

/// `sum[i]` and the products of the pair of bf16 that is word `i` of `a` with that of word `LANE` of `b`.
#[inline]
#[target_feature(enable = "neon,bf16")]
pub(crate) fn bfdot_lane<const LANE: i32>(mut sum: float32x4_t, a: uint32x4_t, b: uint32x4_t) -> float32x4_t {
    // SAFETY: an instruction on registers, which the features have.
    unsafe {
        asm!(
            "bfdot {0:v}.4s, {1:v}.8h, {2:v}.2h[{3}]",
            inout(vreg) sum, in(vreg) a, in(vreg) b, const LANE,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

/// The values of f16 in the lower and in the upper half of a vector.
#[inline]
pub(crate) fn halves_to_floats(halves: uint8x16_t) -> [float32x4_t; 2] {
    let (low, high): (float32x4_t, float32x4_t);
    // SAFETY: instructions on registers that every processor of AArch64 has.
    unsafe {
        asm!("fcvtl {0:v}.4s, {1:v}.4h", out(vreg) low, in(vreg) halves, options(pure, nomem, nostack, preserves_flags));
        asm!("fcvtl2 {0:v}.4s, {1:v}.8h", out(vreg) high, in(vreg) halves, options(pure, nomem, nostack, preserves_flags));
    }
    [low, high]
}

/// The nearest f16 of eight floats, ties to even.
#[inline]
fn floats_to_halves([low, high]: [float32x4_t; 2]) -> uint8x16_t {
    let mut halves: uint8x16_t;
    // SAFETY: instructions on registers that every processor of AArch64 has.
    unsafe {
        asm!("fcvtn {0:v}.4h, {1:v}.4s", out(vreg) halves, in(vreg) low, options(pure, nomem, nostack, preserves_flags));
        asm!("fcvtn2 {0:v}.8h, {1:v}.4s", inout(vreg) halves, in(vreg) high, options(pure, nomem, nostack, preserves_flags));
    }
    halves
}

/// The values of f16.
#[inline(always)]
pub(super) fn widen_f16(from: &[f16; LANES]) -> Vector {
    let at: *const u8 = from.as_ptr().cast();
    // SAFETY: 8 elements each; every processor of AArch64 has NEON.
    let ([a, b], [c, d]) = unsafe { (halves_to_floats(vld1q_u8(at)), halves_to_floats(vld1q_u8(at.add(16)))) };
    [a, b, c, d]
}

/// The values of bf16.
#[inline(always)]
pub(super) fn widen_bf16(from: &[bf16; LANES]) -> Vector {
    let at: *const u16 = from.as_ptr().cast();
    // SAFETY: 8 elements each; every processor of AArch64 has NEON.
    unsafe {
        let (low, high) = (vld1q_u16(at), vld1q_u16(at.add(8)));
        let float = |bits| vreinterpretq_f32_u32(bits);
        [
            float(vshll_n_u16::<16>(vget_low_u16(low))),
            float(vshll_high_n_u16::<16>(low)),
            float(vshll_n_u16::<16>(vget_low_u16(high))),
            float(vshll_high_n_u16::<16>(high)),
        ]
    }
}

/// The values of 8-bit integers.
#[inline(always)]
pub(super) fn widen_i8(from: &[i8; LANES]) -> Vector {
    // SAFETY: 16 elements; every processor of AArch64 has NEON.
    unsafe {
        let all = vld1q_s8(from.as_ptr());
        let (low, high) = (vmovl_s8(vget_low_s8(all)), vmovl_high_s8(all));
        [
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
            vcvtq_f32_s32(vmovl_high_s16(low)),
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
            vcvtq_f32_s32(vmovl_high_s16(high)),
        ]
    }
}

/// The nearest f16.
#[inline(always)]
pub(super) fn narrow_f16(from: &[f32; LANES], to: &mut [f16; LANES]) {
    for (from, to) in from.as_chunks::<8>().0.iter().zip(to.as_chunks_mut::<8>().0) {
        // SAFETY: 8 elements each; every processor of AArch64 has NEON.
        unsafe {
            let floats = [vld1q_f32(from.as_ptr()), vld1q_f32(from.as_ptr().add(4))];
            vst1q_u8(to.as_mut_ptr().cast(), floats_to_halves(floats));
        }
    }
}

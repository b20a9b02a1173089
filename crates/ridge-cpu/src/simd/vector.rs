//! [`LANES`] floats as loops keep them in registers.
//!
//! On AArch64 they are vectors of NEON, since compilers turn sums that are several vectors each into single elements; elsewhere
//! arrays of floats, which they turn into vectors.

use super::LANES;
#[cfg(not(target_arch = "aarch64"))]
use super::fma;

#[cfg(target_arch = "aarch64")]
pub(crate) type Vector = [std::arch::aarch64::float32x4_t; LANES / 4];
#[cfg(not(target_arch = "aarch64"))]
pub(crate) type Vector = [f32; LANES];

#[inline(always)]
pub(crate) fn vector_of(from: &[f32; LANES]) -> Vector {
    #[cfg(target_arch = "aarch64")]
    // SAFETY: four floats each; every processor of AArch64 has NEON.
    return unsafe {
        use std::arch::aarch64::vld1q_f32;
        let at = from.as_ptr();
        [vld1q_f32(at), vld1q_f32(at.add(4)), vld1q_f32(at.add(8)), vld1q_f32(at.add(12))]
    };
    #[cfg(not(target_arch = "aarch64"))]
    *from
}

#[inline(always)]
pub(crate) fn lanes_of(vector: Vector) -> [f32; LANES] {
    #[cfg(target_arch = "aarch64")]
    {
        let mut to = [0f32; LANES];
        for (to, part) in to.as_chunks_mut::<4>().0.iter_mut().zip(vector) {
            // SAFETY: four floats; every processor of AArch64 has NEON.
            unsafe { std::arch::aarch64::vst1q_f32(to.as_mut_ptr(), part) };
        }
        to
    }
    #[cfg(not(target_arch = "aarch64"))]
    vector
}

/// `sum += x * w`: in one rounding where the machine does that.
#[inline(always)]
pub(crate) fn multiply_add<const FMA: bool>(sum: &mut Vector, x: &[f32; LANES], w: &Vector) {
    #[cfg(target_arch = "aarch64")]
    for ((sum, x), w) in sum.iter_mut().zip(vector_of(x)).zip(w) {
        // SAFETY: every processor of AArch64 has NEON.
        *sum = unsafe { std::arch::aarch64::vfmaq_f32(*sum, x, *w) };
    }
    #[cfg(not(target_arch = "aarch64"))]
    for i in 0..LANES {
        sum[i] = fma::<FMA>(x[i], w[i], sum[i]);
    }
}

/// `sum += weight * w`: in one rounding where the machine does that.
#[inline(always)]
pub(crate) fn add_weighed<const FMA: bool>(sum: &mut Vector, weight: f32, w: &Vector) {
    #[cfg(target_arch = "aarch64")]
    for (sum, w) in sum.iter_mut().zip(w) {
        // SAFETY: every processor of AArch64 has NEON.
        *sum = unsafe { std::arch::aarch64::vfmaq_n_f32(*sum, *w, weight) };
    }
    #[cfg(not(target_arch = "aarch64"))]
    for i in 0..LANES {
        sum[i] = fma::<FMA>(weight, w[i], sum[i]);
    }
}

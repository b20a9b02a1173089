//! Vectors of eight 32-bit lanes, a row of a weight each: one of AVX2, or two of NEON. Functions of the same names compute the
//! same, so that blocks are taken apart by one text (`interleaved.rs`).

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "aarch64")]
mod neon;

#[cfg(target_arch = "x86_64")]
pub(super) use avx2::*;
#[cfg(target_arch = "aarch64")]
pub(super) use neon::*;

//! Vector loops, compiled for each instruction set and chosen at run time.
//!
//! `simd/isa.rs` finds the instruction set and compiles loops for each; `simd/lanes.rs` has lanes, sums and simple loops;
//! `simd/convert.rs` conversions between storage and f32; `simd/exp.rs` the exponential, `simd/power.rs` powers of 2 on
//! AVX-512, `simd/angle.rs` sines and cosines, `simd/vector.rs` lanes in registers, and `simd/neon.rs` instructions of AArch64 that have no stable intrinsics.
//!
//! Loops are written over fixed-size arrays of lanes that the compiler turns into vector registers. Sums keep one
//! partial sum a lane and add the lanes up in a fixed tree, so a sum's bits depend on its length alone.
#![allow(clippy::inline_always)] // what a vector loop calls must compile with the loop's instruction set

#[cfg(target_arch = "x86_64")]
mod amx;
mod angle;
mod convert;
mod exp;
mod isa;
mod lanes;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "x86_64")]
mod power;
mod vector;

pub(crate) use angle::angles;
#[cfg(target_arch = "x86_64")]
pub(crate) use convert::stream_rows;
pub(crate) use convert::{
    E4M3, E5M2, Element, add_rows, load, narrow, place, put, round, store, store_rows, view, widen, widen_lanes,
    with_element,
};
pub(crate) use exp::{exp, exp_scaled, exp_sum, sum_exp, swiglu};
pub(crate) use isa::{Isa, available, check_isa, isa, vectorised};
#[cfg(target_arch = "x86_64")]
pub(crate) use lanes::fetch;
pub(crate) use lanes::{LANES, add, dot, fma, max, multiply, scale, sum_each, sum_lanes};
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) use lanes::{fetch_far, fetch_share};
#[cfg(target_arch = "aarch64")]
pub(crate) use neon::{bfdot_lane, bfmmla, halves_to_floats, sdot_lane, smmla};
#[cfg(target_arch = "x86_64")]
pub(crate) use power::power;
pub(crate) use vector::{Vector, add_weighed, lanes_of, multiply_add, vector_of};

//! Between storage and f32, in bit operations that the compiler vectorises.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m512, _mm_loadu_si128, _mm256_loadu_si256, _mm512_cvtepi8_epi32, _mm512_cvtepi32_ps, _mm512_cvtph_ps,
    _mm512_loadu_ps,
};

use half::{bf16, f16};
use ridge_graph::DType;

use super::{LANES, Vector, vector_of, vectorised};
use crate::bytes::Pod;
use crate::io::{KernelIo, KernelOutput};

/// A float as it lies in memory.
pub(crate) trait Element: Pod {
    /// Its value.
    fn widen(self) -> f32;
    /// The nearest, ties to even.
    fn narrow(x: f32) -> Self;
    /// The values of a vector's worth of elements.
    #[inline(always)]
    fn widen_lanes(from: &[Self; LANES]) -> [f32; LANES] {
        let mut to = [0.0; LANES];
        for i in 0..LANES {
            to[i] = from[i].widen();
        }
        to
    }
    /// As [`Element::widen_lanes`], into registers.
    #[inline(always)]
    fn widen_to_vector(from: &[Self; LANES]) -> Vector {
        vector_of(&Self::widen_lanes(from))
    }
    /// The nearest elements of a vector's worth of values.
    #[inline(always)]
    fn narrow_lanes(from: &[f32; LANES], to: &mut [Self; LANES]) {
        for i in 0..LANES {
            to[i] = Self::narrow(from[i]);
        }
    }
    /// A vector's worth of values.
    ///
    /// # Safety
    /// There is AVX-512.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn widen_vector(from: &[Self; LANES]) -> __m512 {
        // SAFETY: 64 bytes.
        unsafe { _mm512_loadu_ps(widen_lanes(from).as_ptr()) }
    }
    /// `of` as what it is, if it is of bf16.
    fn as_bf16(_of: &[Self]) -> Option<&[half::bf16]> {
        None
    }
    #[cfg(target_arch = "x86_64")]
    /// `of` as what it is, if it is of codes.
    fn as_codes(_of: &[Self]) -> Option<&[i8]> {
        None
    }
}

/// An 8-bit float of 4 exponent and 3 mantissa bits; see [`ridge_graph::f8e4m3_to_f64`].
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct E4M3(u8);

/// An 8-bit float of 5 exponent and 2 mantissa bits; see [`ridge_graph::f8e5m2_to_f64`].
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct E5M2(u8);

// SAFETY: a byte, of which every value is a float.
unsafe impl Pod for E4M3 {}
// SAFETY: as above.
unsafe impl Pod for E5M2 {}

/// Exponent field of f32 that stands for 1.
const BIAS: u32 = 127;

/// Value of a small float of `M` mantissa bits whose exponent has bias `B`; codes of magnitude `special` and above are
/// infinite or NaN.
#[inline(always)]
fn widen_small<const M: u32, const B: u32>(code: u32, sign: u32, special: u32) -> f32 {
    let magnitude = code << (23 - M);
    let normal = magnitude + ((BIAS - B) << 23);
    // A subnormal code as the fraction of the smallest normal number, which is then taken away: exact.
    let unit = (BIAS - B + 1) << 23;
    let subnormal = (f32::from_bits(magnitude + unit) - f32::from_bits(unit)).to_bits();
    let bits = if code < (1 << M) { subnormal } else { normal };
    let bits = if code >= special { magnitude | 0x7f80_0000 } else { bits };
    f32::from_bits(bits | (sign << 31))
}

/// The code, without sign, of the small float nearest to `x`; above `largest` it is `overflow`.
#[inline(always)]
fn narrow_small<const M: u32, const B: u32>(x: f32, largest: u32, overflow: u32, nan: u32) -> u32 {
    let bits = x.to_bits() & 0x7fff_ffff;
    // Round to M bits of mantissa in integers: half less than a unit, and one more if the unit is odd.
    let drop = 23 - M;
    let rounded = bits.wrapping_add((1 << (drop - 1)) - 1 + ((bits >> drop) & 1));
    let normal = (rounded >> drop).wrapping_sub((BIAS - B) << M);
    // Where the result is subnormal: adding a number whose last bit is the quantum rounds as the adder does.
    let unit = (BIAS - B + 1 + drop) << 23;
    let subnormal = (f32::from_bits(bits) + f32::from_bits(unit)).to_bits().wrapping_sub(unit);
    let code = if bits < (BIAS - B + 1) << 23 { subnormal } else { normal };
    let code = if code > largest { overflow } else { code };
    if bits > 0x7f80_0000 { nan } else { code }
}

impl Element for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
    #[inline(always)]
    fn narrow(x: f32) -> Self {
        x
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    #[inline(always)]
    fn narrow(x: f32) -> Self {
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
        let quiet = bits | 0x0040_0000;
        let nan = bits & 0x7fff_ffff > 0x7f80_0000;
        Self::from_bits((if nan { quiet } else { rounded } >> 16) as u16)
    }
    #[cfg(target_arch = "aarch64")]
    #[inline(always)]
    fn widen_to_vector(from: &[Self; LANES]) -> Vector {
        super::neon::widen_bf16(from)
    }
    fn as_bf16(of: &[Self]) -> Option<&[Self]> {
        Some(of)
    }
}

impl Element for f16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        let bits = u32::from(self.to_bits());
        widen_small::<10, 15>(bits & 0x7fff, bits >> 15, 0x7c00)
    }
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn widen_vector(from: &[Self; LANES]) -> __m512 {
        // SAFETY: 32 bytes, and there is AVX-512 by the caller's promise.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())) }
    }
    #[inline(always)]
    fn narrow(x: f32) -> Self {
        let code = narrow_small::<10, 15>(x, 0x7bff, 0x7c00, 0x7e00);
        Self::from_bits((code | ((x.to_bits() >> 16) & 0x8000)) as u16)
    }
    /// By instructions, which every processor of AArch64 has.
    #[cfg(target_arch = "aarch64")]
    #[inline(always)]
    fn widen_lanes(from: &[Self; LANES]) -> [f32; LANES] {
        super::lanes_of(super::neon::widen_f16(from))
    }
    #[cfg(target_arch = "aarch64")]
    #[inline(always)]
    fn widen_to_vector(from: &[Self; LANES]) -> Vector {
        super::neon::widen_f16(from)
    }
    #[cfg(target_arch = "aarch64")]
    #[inline(always)]
    fn narrow_lanes(from: &[f32; LANES], to: &mut [Self; LANES]) {
        super::neon::narrow_f16(from, to);
    }
}

impl Element for E4M3 {
    /// By a multiplication, which takes fewer instructions than [`widen_small`]: products by weights do little else. Subnormal
    /// numbers, which some processors multiply slowly, are few in quantised values.
    #[inline(always)]
    fn widen(self) -> f32 {
        const UNIT: f32 = f32::from_bits((2 * BIAS - 7) << 23);
        let bits = u32::from(self.0);
        let magnitude = (f32::from_bits((bits & 0x7f) << 20) * UNIT).to_bits();
        let nan = if bits & 0x7f == 0x7f { 0x7fc0_0000 } else { 0 };
        f32::from_bits(magnitude | nan | (bits & 0x80) << 24)
    }
    #[inline(always)]
    fn narrow(x: f32) -> Self {
        Self((narrow_small::<3, 7>(x, 0x7e, 0x7f, 0x7f) | ((x.to_bits() >> 24) & 0x80)) as u8)
    }
}

impl Element for E5M2 {
    #[inline(always)]
    fn widen(self) -> f32 {
        let bits = u32::from(self.0);
        widen_small::<2, 15>(bits & 0x7f, bits >> 7, 0x7c)
    }
    #[inline(always)]
    fn narrow(x: f32) -> Self {
        Self((narrow_small::<2, 15>(x, 0x7b, 0x7c, 0x7e) | ((x.to_bits() >> 24) & 0x80)) as u8)
    }
}

/// A code, to be multiplied by a scale; rounded ties upwards.
impl Element for i8 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from(self)
    }
    #[cfg(target_arch = "aarch64")]
    #[inline(always)]
    fn widen_to_vector(from: &[Self; LANES]) -> Vector {
        super::neon::widen_i8(from)
    }
    #[cfg(target_arch = "x86_64")]
    fn as_codes(of: &[Self]) -> Option<&[i8]> {
        Some(of)
    }
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn widen_vector(from: &[Self; LANES]) -> __m512 {
        // SAFETY: 16 bytes; there is AVX-512, by the caller's promise.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.as_ptr().cast()))) }
    }
    #[inline(always)]
    fn narrow(x: f32) -> Self {
        (x + 0.5).floor().clamp(-127.0, 127.0) as Self
    }
}

/// Runs `$body` with `$t` as the element type of float dtype `$dtype`.
macro_rules! with_element {
    ($dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            ridge_graph::DType::F32 => {
                type $t = f32;
                $body
            }
            ridge_graph::DType::BF16 => {
                type $t = half::bf16;
                $body
            }
            ridge_graph::DType::F16 => {
                type $t = half::f16;
                $body
            }
            ridge_graph::DType::F8E4M3 => {
                type $t = $crate::simd::E4M3;
                $body
            }
            ridge_graph::DType::F8E5M2 => {
                type $t = $crate::simd::E5M2;
                $body
            }
            other => unreachable!("{other} is not float: kernels support float dtypes here"),
        }
    };
}
pub(crate) use with_element;

/// The values of a vector's worth of elements.
#[inline(always)]
pub(crate) fn widen_lanes<T: Element>(from: &[T; LANES]) -> [f32; LANES] {
    T::widen_lanes(from)
}

vectorised! {
    /// The values of `from`.
    pub(crate) fn widen<T: Element>(from: &[T], to: &mut [f32]) {
        let whole = in_lanes(from.len().min(to.len()));
        let (lanes, rest) = (from[..whole].as_chunks::<LANES>().0, &from[whole..]);
        let (to, to_rest) = to.split_at_mut(whole);
        for (to, from) in to.as_chunks_mut::<LANES>().0.iter_mut().zip(lanes) {
            *to = T::widen_lanes(from);
        }
        for (t, x) in to_rest.iter_mut().zip(rest) {
            *t = x.widen();
        }
    }
}

/// How many of `count` elements are converted a vector at a time: where there are instructions for that. Elsewhere the compiler
/// makes vectors of a loop over elements, but of one over arrays of them it gathers one element of each.
#[inline(always)]
fn in_lanes(count: usize) -> usize {
    if cfg!(target_arch = "aarch64") { count / LANES * LANES } else { 0 }
}

vectorised! {
    /// `from`, rounded.
    pub(crate) fn narrow<T: Element>(from: &[f32], to: &mut [T]) {
        narrow_all(from, to);
    }
}

#[inline(always)]
fn narrow_all<T: Element>(from: &[f32], to: &mut [T]) {
    let whole = in_lanes(from.len().min(to.len()));
    let (lanes, rest) = (from[..whole].as_chunks::<LANES>().0, &from[whole..]);
    let (to, to_rest) = to.split_at_mut(whole);
    for (to, from) in to.as_chunks_mut::<LANES>().0.iter_mut().zip(lanes) {
        T::narrow_lanes(from, to);
    }
    for (t, x) in to_rest.iter_mut().zip(rest) {
        *t = T::narrow(*x);
    }
}

/// Reads elements `at..at + out.len()` of input `index`, of float dtype `dtype`, as f32.
pub(crate) fn load(io: &KernelIo<'_>, index: usize, dtype: DType, at: usize, out: &mut [f32]) {
    let end = at + out.len();
    if dtype == DType::F32 {
        out.copy_from_slice(&io.input::<f32>(index)[at..end]);
    } else {
        with_element!(dtype, T => widen(&io.input::<T>(index)[at..end], out));
    }
}

/// Elements `at..at + room.len()` of input `index` as f32: where they lie if they are f32, otherwise read into `room`.
pub(crate) fn view<'a>(io: &KernelIo<'a>, index: usize, dtype: DType, at: usize, room: &'a mut [f32]) -> &'a [f32] {
    if dtype == DType::F32 {
        return &io.input::<f32>(index)[at..at + room.len()];
    }
    load(io, index, dtype, at, room);
    room
}

/// Writes `values`, rounded to `dtype`, to output `index` from element `at` on.
///
/// # Safety
/// These elements belong to the pieces that the caller was given.
pub(crate) unsafe fn store(io: &KernelIo<'_>, index: usize, dtype: DType, at: usize, values: &[f32]) {
    let range = at..at + values.len();
    // SAFETY: passed on to the caller.
    unsafe {
        if dtype == DType::F32 {
            io.output::<f32>(index).part(range).copy_from_slice(values);
        } else {
            with_element!(dtype, T => narrow(values, io.output::<T>(index).part(range)));
        }
    }
}

/// Where to compute elements `at..at + room.len()` of output `index`, to be handed to [`put`] when they are: the output
/// itself if it is f32, otherwise `room`.
///
/// # Safety
/// These elements belong to the pieces that the caller was given, and no other slice of them is alive.
pub(crate) unsafe fn place<'a>(
    io: &KernelIo<'a>,
    index: usize,
    dtype: DType,
    at: usize,
    room: &'a mut [f32],
) -> &'a mut [f32] {
    if dtype == DType::F32 {
        // SAFETY: passed on to the caller.
        return unsafe { io.output::<f32>(index).part(at..at + room.len()) };
    }
    room
}

/// Writes what was computed at a [`place`] to the output, unless it is there already.
///
/// # Safety
/// As for [`place`], which gave `values` for the same elements.
pub(crate) unsafe fn put(io: &KernelIo<'_>, index: usize, dtype: DType, at: usize, values: &[f32]) {
    if dtype != DType::F32 {
        // SAFETY: passed on to the caller.
        unsafe { store(io, index, dtype, at, values) };
    }
}

vectorised! {
    /// Adds rows of `y`, `stride` apart, to rows of `width`.
    pub(crate) fn add_rows<T: Element>(x: &mut [f32], width: usize, y: &[T], stride: usize) {
        for (x, y) in x.chunks_exact_mut(width).zip(y.chunks(stride)) {
            for (x, y) in x.iter_mut().zip(y) {
                *x += y.widen();
            }
        }
    }
}

/// Writes rows as [`store_rows`] does, whole cache lines past the caches: where there is more than they hold.
///
/// # Safety
/// As for [`store_rows`], and there is AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
pub(crate) unsafe fn stream_rows<T: Element>(
    values: &[f32],
    width: usize,
    out: KernelOutput<'_, T>,
    at: usize,
    stride: usize,
) {
    use std::arch::x86_64::{__m512i, _mm_sfence, _mm512_loadu_si512, _mm512_stream_si512};
    let per_line = size_of::<__m512i>() / size_of::<T>();
    let mut line = [T::narrow(0.0); size_of::<__m512i>()];
    for (i, values) in values.chunks_exact(width).enumerate() {
        let at = at + i * stride;
        // SAFETY: passed on to the caller.
        let out = unsafe { out.part(at..at + width) };
        let on_lines = (out.as_ptr() as usize).is_multiple_of(size_of::<__m512i>());
        for (out, values) in out.chunks_mut(per_line).zip(values.chunks(per_line)) {
            if on_lines && out.len() == per_line {
                for (to, x) in line[..per_line].iter_mut().zip(values) {
                    *to = T::narrow(*x);
                }
                // SAFETY: both have a line of 64 bytes, and the output's begins where a line does.
                unsafe { _mm512_stream_si512(out.as_mut_ptr().cast(), _mm512_loadu_si512(line.as_ptr().cast())) };
            } else {
                for (to, x) in out.iter_mut().zip(values) {
                    *to = T::narrow(*x);
                }
            }
        }
    }
    // Such stores are in no order with those that tell others of the end of this piece, but for a fence.
    _mm_sfence();
}

vectorised! {
    fn narrow_rows<T: Element>(values: &[f32], width: usize, out: KernelOutput<'_, T>, at: usize, stride: usize) {
        for (i, values) in values.chunks_exact(width).enumerate() {
            let at = at + i * stride;
            // SAFETY: passed on to the caller.
            let out = unsafe { out.part(at..at + width) };
            narrow_all(values, out);
        }
    }
}

/// Writes rows of `width` values, rounded, from element `at` of `out` on, `stride` apart.
///
/// # Safety
/// These elements belong to the pieces that the caller was given.
pub(crate) unsafe fn store_rows<T: Element>(
    values: &[f32],
    width: usize,
    out: KernelOutput<'_, T>,
    at: usize,
    stride: usize,
) {
    narrow_rows(values, width, out, at, stride);
}

/// Rounds to what `dtype` can hold.
pub(crate) fn round(dtype: DType, values: &mut [f32]) {
    if dtype != DType::F32 {
        with_element!(dtype, T => round_to::<T>(values));
    }
}

vectorised! {
    fn round_to<T: Element>(values: &mut [f32]) {
        for x in values {
            *x = T::narrow(*x).widen();
        }
    }
}

#[cfg(test)]
mod tests;

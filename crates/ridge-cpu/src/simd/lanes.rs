//! Fixed-size lanes of f32: sums in fixed trees, loops over slices, and prefetches.
#![allow(clippy::inline_always)] // what a vector loop calls must compile with the loop's instruction set

use super::vectorised;

/// Lanes of partial sums: one AVX-512 register, two of AVX2, four of NEON.
pub(crate) const LANES: usize = 16;

/// `a * b + c`: in one rounding where the machine does that, the same everywhere on one machine.
#[inline(always)]
pub(crate) fn fma<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// Adds up lanes in a fixed tree: halves, then halves of those.
#[inline(always)]
pub(crate) fn sum_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// [`sum_lanes`] of each of `sums`, of which there are at most 32 and as many as `out` has elements.
#[inline(always)]
pub(crate) fn sum_each(sums: &[[f32; LANES]], out: &mut [f32]) {
    let mut quarters = [[0f32; 4]; 32];
    for (sums, quarter) in sums.iter().zip(&mut quarters) {
        // Hidden from the compiler, which would otherwise make lanes of the sums and gather them one by one.
        let sums = std::hint::black_box(sums);
        let mut half = [0f32; 8];
        for i in 0..8 {
            half[i] = sums[i] + sums[i + 8];
        }
        for i in 0..4 {
            quarter[i] = half[i] + half[i + 4];
        }
    }
    for (o, q) in out.iter_mut().zip(&quarters) {
        *o = (q[0] + q[2]) + (q[1] + q[3]);
    }
}

/// Brings `bytes` bytes from `at` on, wherever that is, to cache.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) fn fetch(at: *const u8, bytes: usize) {
    for line in (0..bytes).step_by(64) {
        let line = at.wrapping_add(line);
        // SAFETY: fetching ahead touches nothing, whatever the address.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(line.cast());
            #[cfg(target_arch = "aarch64")]
            std::arch::asm!("prfm pldl1keep, [{}]", in(reg) line, options(nostack, preserves_flags, readonly));
        }
    }
}

/// Brings `bytes` bytes from `at` on to second-level cache: what a thread reads of memory far ahead. Fetched to first-level
/// cache, lines hold the few buffers of its misses for as long as memory takes, and loads that only miss that cache wait for
/// them: on Zen 4, two threads then read 21 GB/s where they read 43 so.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) fn fetch_far(at: *const u8, bytes: usize) {
    for line in (0..bytes).step_by(64) {
        let line = at.wrapping_add(line);
        // SAFETY: fetching ahead touches nothing, whatever the address.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(line.cast());
            #[cfg(target_arch = "aarch64")]
            std::arch::asm!("prfm pldl2keep, [{}]", in(reg) line, options(nostack, preserves_flags, readonly));
        }
    }
}

/// Brings part `nth` of `parts` of the `bytes` bytes from `at` on, wherever that is, to cache: lines of every page at
/// once, since what the machine fetches ahead by itself follows one line after another in each page, and in several pages
/// at a time more of it.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) fn fetch_share(at: *const u8, bytes: usize, nth: usize, parts: usize) {
    const PAGE: usize = 4096;
    const LINE: usize = 64;
    let lines = PAGE / LINE;
    let before = at.addr() % PAGE;
    for line in nth * lines / parts..(nth + 1) * lines / parts {
        for of_page in (line * LINE..before + bytes).step_by(PAGE) {
            fetch(at.wrapping_sub(before).wrapping_add(of_page), LINE);
        }
    }
}

vectorised! {
    /// Inner product.
    pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
        let mut lanes = [0f32; LANES];
        let (a_chunks, a_rest) = a.as_chunks::<LANES>();
        let (b_chunks, b_rest) = b.as_chunks::<LANES>();
        for (x, y) in a_chunks.iter().zip(b_chunks) {
            for i in 0..LANES {
                lanes[i] = fma::<FMA>(x[i], y[i], lanes[i]);
            }
        }
        for (i, (x, y)) in a_rest.iter().zip(b_rest).enumerate() {
            lanes[i] = fma::<FMA>(*x, *y, lanes[i]);
        }
        sum_lanes(lanes)
    }
}

vectorised! {
    /// `x += y`.
    pub(crate) fn add(x: &mut [f32], y: &[f32]) {
        for (x, y) in x.iter_mut().zip(y) {
            *x += y;
        }
    }
}

vectorised! {
    /// `x *= y`.
    pub(crate) fn multiply(x: &mut [f32], y: &[f32]) {
        for (x, y) in x.iter_mut().zip(y) {
            *x *= y;
        }
    }
}

vectorised! {
    /// `x = x * factor`.
    pub(crate) fn scale(x: &mut [f32], factor: f32) {
        for x in x {
            *x *= factor;
        }
    }
}

vectorised! {
    /// The largest element; NaN are passed over, and of none it is minus infinity.
    pub(crate) fn max(x: &[f32]) -> f32 {
        let mut lanes = [f32::NEG_INFINITY; LANES];
        let (chunks, rest) = x.as_chunks::<LANES>();
        for chunk in chunks {
            for i in 0..LANES {
                lanes[i] = if chunk[i] > lanes[i] { chunk[i] } else { lanes[i] };
            }
        }
        rest.iter().chain(&lanes).fold(f32::NEG_INFINITY, |m, x| if *x > m { *x } else { m })
    }
}

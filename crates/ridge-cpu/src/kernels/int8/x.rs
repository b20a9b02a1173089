//! Rows of x as codes, with their scales and sums.

#![allow(clippy::needless_range_loop)] // several arrays of registers go by one index

use super::scale::{GROUP, SIDE, SUMMED};
use crate::bytes::{cast, view};
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use crate::simd;
use crate::simd::vectorised;

#[cfg(target_arch = "x86_64")]
mod vectors;

/// Bytes of codes of x that are multiplied together: they stay in L2.
const RESIDENT: usize = 1 << 20;

/// Of so few rows of x, few rows of the weight are taken apart at a time.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) const FEW: usize = 8;

/// What multiplies codes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum CodeMultiplier {
    /// Vectors of bytes, as blocks pass by.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    Stream,
    /// Loops that compilers turn into vectors.
    Lanes,
}

/// What multiplies codes on this machine.
pub(crate) fn by() -> CodeMultiplier {
    #[cfg(target_arch = "x86_64")]
    if simd::isa() >= simd::Isa::Avx2 {
        return CodeMultiplier::Stream;
    }
    #[cfg(target_arch = "aarch64")]
    if simd::isa() >= simd::Isa::Neon {
        return CodeMultiplier::Stream;
    }
    CodeMultiplier::Lanes
}

/// Of `rows` rows of x of `inner` elements, those that are multiplied together: whole sixteens, all blocks alike.
pub(crate) fn rows_together(rows: usize, inner: usize) -> usize {
    let most = (RESIDENT / inner.max(1)).clamp(SIDE, 512) / SIDE * SIDE;
    rows.div_ceil(rows.div_ceil(most).max(1)).next_multiple_of(SIDE).max(SIDE)
}

/// How the codes of x lie: those of each row, then its scales and sums.
#[derive(Clone, Copy)]
pub(crate) struct CodeLayout {
    pub(crate) rows: usize,
    pub(crate) inner: usize,
    /// What multiplies them.
    pub(crate) by: CodeMultiplier,
}

/// The codes of some rows.
#[derive(Clone, Copy)]
pub(crate) struct ActivationCodes<'a> {
    pub(crate) layout: CodeLayout,
    bytes: &'a [u8],
    /// [`CodeLayout::parts`].
    parts: [usize; 3],
}

impl CodeLayout {
    /// Of `rows` rows of `inner` elements.
    pub(crate) fn new(rows: usize, inner: usize) -> Self {
        Self { rows, inner, by: by() }
    }

    pub(crate) fn groups(&self) -> usize {
        self.inner.div_ceil(GROUP)
    }

    /// Bytes of a row's codes, which are whole lines, and of its scales and sums.
    fn parts(&self) -> [usize; 3] {
        let floats = |n: usize| (n * size_of::<f32>()).next_multiple_of(64);
        [self.inner.next_multiple_of(64), floats(self.groups()), floats(self.inner.div_ceil(SUMMED))]
    }

    /// Bytes of a row.
    pub(crate) fn row_bytes(&self) -> usize {
        self.parts().iter().sum()
    }

    /// Bytes of all rows.
    pub(crate) fn bytes(&self) -> usize {
        self.rows * self.row_bytes()
    }

    /// As this, for some of its rows.
    pub(crate) fn of_rows(&self, rows: usize) -> Self {
        Self { rows, ..*self }
    }

    /// A row's codes, scales and sums.
    fn split<'b>(&self, row: &'b mut [u8]) -> (&'b mut [i8], &'b mut [f32], &'b mut [f32]) {
        let [codes, scales, _] = self.parts();
        let (codes, rest) = row.split_at_mut(codes);
        let (scales, sums) = rest.split_at_mut(scales);
        (cast(codes), cast(scales), cast(sums))
    }

    /// Writes the codes of the row `x`.
    pub(crate) fn put(&self, x: &[f32], to: &mut [u8]) {
        let (to_codes, to_scales, to_sums) = self.split(to);
        for (group, x) in x[..self.inner].chunks(GROUP).enumerate() {
            let units = x.len().div_ceil(SUMMED);
            let mut sums = [0f32; GROUP / SUMMED];
            let to = &mut to_codes[group * GROUP..][..x.len()];
            to_scales[group] = encode_fast(x, to, &mut sums);
            to_sums[group * (GROUP / SUMMED)..][..units].copy_from_slice(&sums[..units]);
        }
    }

    /// As [`CodeLayout::put`], of a row that is codes already, with the scale of each group.
    pub(crate) fn put_codes(&self, x: &[i8], scales: &[f32], to: &mut [u8]) {
        let (to_codes, to_scales, to_sums) = self.split(to);
        let x = &x[..self.inner];
        to_codes[..x.len()].copy_from_slice(x);
        to_scales[..scales.len()].copy_from_slice(scales);
        for (to, unit) in to_sums.iter_mut().zip(x.chunks(SUMMED)) {
            *to = unit.iter().map(|code| i32::from(*code)).sum::<i32>() as f32;
        }
    }
}

impl<'a> ActivationCodes<'a> {
    /// `bytes` are those of [`CodeLayout::put`] for all rows.
    pub(crate) fn new(layout: CodeLayout, bytes: &'a [u8]) -> Self {
        assert!(bytes.len() >= layout.bytes() && (bytes.as_ptr() as usize).is_multiple_of(64));
        Self { layout, bytes, parts: layout.parts() }
    }

    #[inline]
    fn part(&self, row: usize, nth: usize) -> &'a [u8] {
        let parts = self.parts;
        let before = [0, parts[0], parts[0] + parts[1]][nth];
        &self.bytes[row * (parts[0] + parts[1] + parts[2]) + before..][..parts[nth]]
    }

    /// Codes of a row: bytes.
    pub(crate) fn codes(&self, row: usize) -> &'a [i8] {
        view(self.part(row, 0))
    }

    /// Codes of a row as they lie.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn code_bytes(&self, row: usize) -> &'a [u8] {
        self.part(row, 0)
    }

    /// Scales of a row's groups.
    pub(crate) fn scales(&self, row: usize) -> &'a [f32] {
        view(self.part(row, 1))
    }

    /// Sums of 16 codes each of a row.
    pub(crate) fn sums(&self, row: usize) -> &'a [f32] {
        view(self.part(row, 2))
    }
}

/// [`encode`], by vectors where the machine has them and the group is whole.
fn encode_fast(x: &[f32], codes: &mut [i8], sums: &mut [f32; GROUP / SUMMED]) -> f32 {
    #[cfg(target_arch = "x86_64")]
    if simd::isa() >= simd::Isa::Avx512Vnni
        && let (Some(x), Some(codes)) = (x.first_chunk(), codes.first_chunk_mut())
    {
        // SAFETY: the instructions are there.
        return unsafe { vectors::encode(x, codes, sums) };
    }
    encode(x, codes, sums)
}

vectorised! {
    /// The codes of a group of at most 256 elements, whole sixteens, the sums of each 16 of them, and their scale: NaN if
    /// not all elements are finite.
    pub(crate) fn encode(x: &[f32], codes: &mut [i8], sums: &mut [f32; GROUP / SUMMED]) -> f32 {
        let x = x.as_chunks::<SUMMED>().0;
        let codes = codes.as_chunks_mut::<SUMMED>().0;
        let (mut magnitudes, mut odd) = ([0f32; SUMMED], [0f32; SUMMED]);
        for x in x {
            for i in 0..SUMMED {
                let magnitude = x[i].abs();
                magnitudes[i] = if magnitude > magnitudes[i] { magnitude } else { magnitudes[i] };
                // Zero but for infinities and NaN.
                odd[i] += x[i] * 0.0;
            }
        }
        let (mut largest, mut all) = (0f32, 0f32);
        for i in 0..SUMMED {
            largest = if magnitudes[i] > largest { magnitudes[i] } else { largest };
            all += odd[i];
        }
        if all != 0.0 || all.is_nan() {
            return f32::NAN;
        }
        let scale = largest / 127.0;
        const UNIT: f32 = 12_582_912.0; // 1.5 * 2^23
        let divisor = if largest == 0.0 { 1.0 } else { largest };
        for nth in 0..x.len().min(codes.len()).min(sums.len()) {
            let (x, codes) = (&x[nth], &mut codes[nth]);
            let mut integers = [0i32; SUMMED];
            for i in 0..SUMMED {
                // As the meaning has it: where an element lies just between two codes every operation counts.
                let nearest = (x[i] * (127.0 / 128.0) / divisor * 128.0 + 0.5).floor();
                let nearest = if nearest > 127.0 { 127.0 } else { nearest };
                let nearest = if nearest < -127.0 { -127.0 } else { nearest };
                // A whole number, which the sum with this one has in its lowest bits.
                integers[i] = (nearest + UNIT).to_bits() as i32 - UNIT.to_bits() as i32;
            }
            let mut sum = 0;
            for i in 0..SUMMED {
                codes[i] = integers[i] as i8;
                sum += integers[i];
            }
            sums[nth] = sum as f32;
        }
        scale
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn vectors_encode_as_the_loop_does() {
        if simd::isa() < simd::Isa::Avx512Vnni {
            ridge_testing::skip!("this machine has no AVX-512 VNNI, or RIDGE_CPU_ISA leaves it out");
        }
        let mut rng = ridge_graph::sample::Rng::new(3);
        for turn in 0..400 {
            let scale = 2f64.powi(turn % 250 - 130);
            let mut x: [f32; GROUP] = std::array::from_fn(|_| (rng.gauss() * scale) as f32);
            match turn % 8 {
                0 => x.iter_mut().enumerate().for_each(|(i, x)| *x = (f64::from(i as i32 - 127) * scale / 2.0) as f32),
                1 => x[turn as usize % GROUP] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][turn as usize / 8 % 3],
                2 => x.fill(0.0),
                _ => {}
            }
            let (mut codes, mut sums) = ([0i8; GROUP], [0f32; GROUP / SUMMED]);
            let (mut codes_of_loop, mut sums_of_loop) = (codes, sums);
            let of_loop = encode(&x, &mut codes_of_loop, &mut sums_of_loop);
            // SAFETY: the instructions are there.
            let scale = unsafe { vectors::encode(&x, &mut codes, &mut sums) };
            assert_eq!(scale.to_bits(), of_loop.to_bits());
            assert!(codes == codes_of_loop && sums == sums_of_loop || scale.is_nan(), "{x:?}");
        }
    }

    #[test]
    fn half_of_the_largest_takes_the_upper_code() {
        for power in [-100, 0, 120] {
            for significand in 128u8..=255 {
                let largest = f32::from(significand) * 2f32.powi(power);
                let mut x = [0f32; SUMMED];
                x[..5].copy_from_slice(&[largest, largest / 2.0, -largest / 2.0, -largest, largest / 127.0]);
                let (mut codes, mut sums) = ([0; SUMMED], [0.0; GROUP / SUMMED]);
                encode(&x, &mut codes, &mut sums);
                assert_eq!((codes[..6].to_vec(), sums[0]), (vec![127, 64, -63, -127, 1, 0], 2.0), "{largest}");
            }
        }
    }
}

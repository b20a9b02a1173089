//! Codes of 4 bits that stand for the entries of a table: IQ4_NL and IQ4_XS, whose entries are denser near 0, and MXFP4,
//! 4-bit floats with a power of two (OCP Microscaling Formats, version 1.0, section 5).
#![allow(clippy::inline_always)] // a loop over blocks must compile with its caller's instruction set

use super::block::{BlockBytes, BlockFormat, BlockValue, half_at, put_half};
use super::{fit, four};

/// The IQ4_NL format: f16 scale, 16 bytes of 32 codes. Value = scale * entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Iq4Nl;

/// The IQ4_XS format: f16 scale and 8 groups of 32 codes with 6 bits of scale each, of which the upper 2 are 16 bits
/// behind the scale and the lower 4 the next 4 bytes. Value = scale * (group scale - 32) * entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Iq4Xs;

/// The MXFP4 format: an 8-bit exponent and 16 bytes of 32 codes. Value = 2^(exponent - 128) * entry, entries being E2M1
/// floats doubled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mxfp4;

/// Entries of the IQ4 formats.
pub const UNEVEN: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Entries of MXFP4.
pub const E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Between neighbours of the entries of [`E2M1`] that are not negative.
const E2M1_MIDDLES: [f32; 7] = [0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0];

/// `2^(exponent - 128)`.
#[inline(always)]
fn power(exponent: u8) -> f32 {
    let exponent = u32::from(exponent);
    f32::from_bits(if exponent < 2 { 0x0020_0000 << exponent } else { (exponent - 1) << 23 })
}

/// 32 entries from 16 bytes.
#[inline(always)]
fn look_up(bytes: &[u8], table: &[i8; 16], codes: &mut [i8]) {
    let (low, high) = codes[..32].split_at_mut(16);
    for ((byte, low), high) in bytes[..16].iter().zip(low).zip(high) {
        *low = table[usize::from(byte & 15)];
        *high = table[usize::from(byte >> 4)];
    }
}

/// An entry of [`UNEVEN`].
fn uneven(code: u8) -> f32 {
    f32::from(UNEVEN[usize::from(code)])
}

fn floats(table: &[i8; 16]) -> [f32; 16] {
    table.map(f32::from)
}

/// The index of the entry of [`UNEVEN`] nearest to `x`.
fn nearest(x: f32) -> u8 {
    let above = UNEVEN.partition_point(|entry| f32::from(*entry) < x);
    match above {
        0 => 0,
        16 => 15,
        i => {
            if x - uneven(i as u8 - 1) < uneven(i as u8) - x {
                i as u8 - 1
            } else {
                i as u8
            }
        }
    }
}

/// The scale that suits 32 values best. `mean` is the mean square of all values of the block.
fn uneven_scale(values: &[f32], importance: Option<&[f32]>, mean: f32) -> f32 {
    let weights = match importance {
        None => fit::squares(values),
        Some(importance) => values.iter().zip(importance).map(|(v, w)| w * (mean + v * v).sqrt()).collect(),
    };
    let entry = |x: f32| uneven(nearest(x));
    // The table's lowest entry is its farthest; steps of one are too fine for it.
    let fine = fit::by_candidates(values, &weights, 127.0, entry);
    let error = |scale: f32| -> f32 {
        let inverse = fit::inverse(scale);
        values.iter().zip(&weights).map(|(v, w)| w * (scale * entry(v * inverse) - v).powi(2)).sum()
    };
    let largest = fit::largest(values);
    let mut best = (error(fine), fine);
    for step in -7i8..=7 {
        let scale = largest / (f32::from(step) * 2.0 - 127.0);
        for scale in [scale, -scale] {
            let now = error(scale);
            if now < best.0 {
                best = (now, scale);
            }
        }
    }
    best.1
}

impl BlockFormat for Iq4Nl {
    const NAME: &'static str = "iq4_nl";
    const ELEMENTS: usize = 32;
    const BYTES: usize = 18;
    const GROUP: usize = 32;

    fn meaning(block: &mut BlockBytes<'_>) -> BlockValue {
        let (scale, codes) = (block.f16(0), block.at(2, 16));
        let codes = block.fields(codes, 16, &[0, 4], 4);
        let entries = block.lookup(&floats(&UNEVEN), codes);
        block.scaled(scale, entries)
    }

    #[inline(always)]
    fn codes(block: &[u8], codes: &mut [i8], scales: &mut [f32], _minima: &mut [f32]) {
        scales[0] = half_at(block, 0);
        look_up(&block[2..], &UNEVEN, codes);
    }

    fn write(values: &[f32], importance: Option<&[f32]>, block: &mut [u8]) {
        let scale = uneven_scale(values, importance, fit::mean_square(values));
        let inverse = fit::inverse(put_half(block, 0, scale));
        four::pack(|i| nearest(values[i] * inverse), &mut block[2..]);
    }
}

impl BlockFormat for Iq4Xs {
    const NAME: &'static str = "iq4_xs";
    const ELEMENTS: usize = 256;
    const BYTES: usize = 136;
    const GROUP: usize = 32;

    fn meaning(block: &mut BlockBytes<'_>) -> BlockValue {
        let scale = block.f16(0);
        let (high, low, codes) = (block.at(2, 2), block.at(4, 4), block.at(8, 128));
        let high = block.fields(high, 1, &[0, 2, 4, 6], 2);
        let low = block.fields(low, 1, &[0, 4], 4);
        let groups = block.with_high(low, high, 4);
        let groups = block.centred(groups, 32);
        let scales = block.scaled(scale, groups);
        let scales = block.split(scales, &[8, 1]);
        let codes = block.fields(codes, 16, &[0, 4], 4);
        let entries = block.lookup(&floats(&UNEVEN), codes);
        let entries = block.split(entries, &[8, 32]);
        block.scaled(scales, entries)
    }

    #[inline(always)]
    fn codes(block: &[u8], codes: &mut [i8], scales: &mut [f32], _minima: &mut [f32]) {
        let scale = half_at(block, 0);
        let high = u16::from_le_bytes([block[2], block[3]]);
        for (group, codes) in codes[..256].chunks_exact_mut(32).enumerate() {
            let low = block[4 + group / 2] >> (4 * (group % 2)) & 15;
            let of_group = i32::from(low) + i32::from(high >> (2 * group) & 3) * 16 - 32;
            scales[group] = scale * of_group as f32;
            look_up(&block[8 + 16 * group..], &UNEVEN, codes);
        }
    }

    fn write(values: &[f32], importance: Option<&[f32]>, block: &mut [u8]) {
        let mean = fit::mean_square(values);
        let scales: [f32; 8] = std::array::from_fn(|group| {
            let range = 32 * group..32 * group + 32;
            uneven_scale(&values[range.clone()], importance.map(|w| &w[range]), mean)
        });
        let scale = put_half(block, 0, fit::largest(&scales) / -32.0);
        let inverse = fit::inverse(scale);
        let (mut high, mut low) = (0u16, [0u8; 4]);
        for (group, of_group) in scales.iter().enumerate() {
            let rounded = fit::code(of_group * inverse, 32, 31);
            let stored = (rounded + 32) as u8;
            high |= u16::from(stored >> 4) << (2 * group);
            low[group / 2] |= (stored & 15) << (4 * (group % 2));
            let inverse = fit::inverse(scale * rounded as f32);
            let values = &values[32 * group..];
            four::pack(|i| nearest(values[i] * inverse), &mut block[8 + 16 * group..][..16]);
        }
        block[2..4].copy_from_slice(&high.to_le_bytes());
        block[4..8].copy_from_slice(&low);
    }
}

impl BlockFormat for Mxfp4 {
    const NAME: &'static str = "mxfp4";
    const ELEMENTS: usize = 32;
    const BYTES: usize = 17;
    const GROUP: usize = 32;

    fn meaning(block: &mut BlockBytes<'_>) -> BlockValue {
        let (exponent, codes) = (block.at(0, 1), block.at(1, 16));
        let powers: [f32; 256] = std::array::from_fn(|e| power(e as u8));
        let scale = block.lookup(&powers, exponent);
        let codes = block.fields(codes, 16, &[0, 4], 4);
        let entries = block.lookup(&floats(&E2M1), codes);
        block.scaled(scale, entries)
    }

    #[inline(always)]
    fn codes(block: &[u8], codes: &mut [i8], scales: &mut [f32], _minima: &mut [f32]) {
        scales[0] = power(block[0]);
        look_up(&block[1..], &E2M1, codes);
    }

    /// The exponent brings the largest magnitude between 4 and 8, as the specification's section 6.3 does; nothing is
    /// left to weigh.
    fn write(values: &[f32], _importance: Option<&[f32]>, block: &mut [u8]) {
        let largest = fit::largest(values).abs();
        let exponent = match largest {
            0.0 => 0,
            f32::INFINITY => u8::MAX,
            // The exponent of the float, without its bias of 127, and then 125.
            _ => (largest.to_bits() >> 23).saturating_sub(2) as u8,
        };
        block[0] = exponent;
        let scale = power(exponent);
        let code = |i: usize| {
            let magnitude = (values[i] / scale).abs();
            // An element between two entries takes the one nearer to 0.
            let code = E2M1_MIDDLES.iter().map(|middle| u8::from(magnitude > *middle)).sum::<u8>();
            code | if values[i] < 0.0 && code > 0 { 8 } else { 0 }
        };
        four::pack(code, &mut block[1..]);
    }
}

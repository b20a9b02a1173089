//! Q5_0 and Q5_1: as [`Q4_0`](super::Q4_0) and [`Q4_1`](super::Q4_1) with a fifth bit of each code, which lie together
//! as a little-endian 32-bit number.
#![allow(clippy::inline_always)] // a loop over blocks must compile with its caller's instruction set

use super::block::{BlockBytes, BlockFormat, BlockValue, half_at, put_half};
use super::{fit, four};

/// The Q5_0 format: f16 scale, 32 high bits, 16 bytes of low codes. Value = scale * (code - 16).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Q5_0;

/// The Q5_1 format: f16 scale, f16 minimum, 32 high bits, 16 bytes of low codes. Value = scale * code + minimum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Q5_1;

/// The codes whose high bits begin at byte `at`.
fn codes(block: &mut BlockBytes<'_>, at: usize) -> BlockValue {
    let (high, low) = (block.at(at, 4), block.at(at + 4, 16));
    let low = block.fields(low, 16, &[0, 4], 4);
    let high = block.fields(high, 1, &[0, 1, 2, 3, 4, 5, 6, 7], 1);
    block.with_high(low, high, 4)
}

/// The codes that begin at byte `at`, each less `offset`.
#[inline(always)]
fn unpack(block: &[u8], at: usize, offset: i8, codes: &mut [i8]) {
    let bits = u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]]);
    let (first, second) = codes[..32].split_at_mut(16);
    for (i, ((byte, first), second)) in block[at + 4..at + 20].iter().zip(first).zip(second).enumerate() {
        *first = (byte & 15) as i8 + ((bits >> i) & 1) as i8 * 16 - offset;
        *second = (byte >> 4) as i8 + ((bits >> (i + 16)) & 1) as i8 * 16 - offset;
    }
}

fn write(block: &mut [u8], at: usize, code: impl Fn(usize) -> u8) {
    let bits = (0..32).fold(0u32, |bits, i| bits | u32::from(code(i) >> 4) << i);
    block[at..at + 4].copy_from_slice(&bits.to_le_bytes());
    four::pack(code, &mut block[at + 4..]);
}

impl BlockFormat for Q5_0 {
    const NAME: &'static str = "q5_0";
    const ELEMENTS: usize = 32;
    const BYTES: usize = 22;
    const GROUP: usize = 32;

    fn meaning(block: &mut BlockBytes<'_>) -> BlockValue {
        let (scale, codes) = (block.f16(0), codes(block, 2));
        let codes = block.centred(codes, 16);
        block.scaled(scale, codes)
    }

    #[inline(always)]
    fn codes(block: &[u8], codes: &mut [i8], scales: &mut [f32], _minima: &mut [f32]) {
        scales[0] = half_at(block, 0);
        unpack(block, 2, 16, codes);
    }

    fn write(values: &[f32], importance: Option<&[f32]>, block: &mut [u8]) {
        let scale = match importance {
            None => fit::largest(values) / -16.0,
            Some(importance) => fit::symmetric(values, &fit::beside(values, importance), 16, 15),
        };
        let inverse = fit::inverse(scale);
        put_half(block, 0, scale);
        write(block, 2, |i| ((values[i] * inverse + 16.5) as u8).min(31));
    }
}

impl BlockFormat for Q5_1 {
    const NAME: &'static str = "q5_1";
    const ELEMENTS: usize = 32;
    const BYTES: usize = 24;
    const GROUP: usize = 32;
    const MINIMA: bool = true;

    fn meaning(block: &mut BlockBytes<'_>) -> BlockValue {
        let (scale, minimum, codes) = (block.f16(0), block.f16(2), codes(block, 4));
        let codes = block.float(codes);
        block.above(scale, codes, minimum)
    }

    #[inline(always)]
    fn codes(block: &[u8], codes: &mut [i8], scales: &mut [f32], minima: &mut [f32]) {
        scales[0] = half_at(block, 0);
        minima[0] = -half_at(block, 2);
        unpack(block, 4, 0, codes);
    }

    fn write(values: &[f32], importance: Option<&[f32]>, block: &mut [u8]) {
        let (scale, minimum) = match importance {
            None => fit::range(values, 31),
            Some(importance) => fit::affine(values, &fit::beside(values, importance), 31, false),
        };
        let inverse = fit::inverse(scale);
        put_half(block, 0, scale);
        put_half(block, 2, minimum);
        write(block, 4, |i| (((values[i] - minimum) * inverse + 0.5) as u8).min(31));
    }
}

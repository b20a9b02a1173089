//! Q4_0 and Q4_1: 32 codes of 4 bits; the low nibbles of 16 bytes are the first half of the block. Q4_0 has an f16
//! scale and codes around 8, Q4_1 a scale and a minimum.
#![allow(clippy::inline_always)] // a loop over blocks must compile with its caller's instruction set

use super::block::{BlockBytes, BlockFormat, BlockValue, half_at, put_half};
use super::fit;

/// The Q4_0 format: f16 scale, 16 bytes of codes. Value = scale * (code - 8).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Q4_0;

/// The Q4_1 format: f16 scale, f16 minimum, 16 bytes of codes. Value = scale * code + minimum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Q4_1;

/// The codes of 4 bits in 16 bytes, each less `offset`.
#[inline(always)]
pub(super) fn unpack(bytes: &[u8], offset: i8, codes: &mut [i8]) {
    let (low, high) = codes[..32].split_at_mut(16);
    for ((byte, low), high) in bytes[..16].iter().zip(low).zip(high) {
        *low = (byte & 15) as i8 - offset;
        *high = (byte >> 4) as i8 - offset;
    }
}

/// Packs 32 codes of 4 bits, the second half of them into the high nibbles.
pub(super) fn pack(codes: impl Fn(usize) -> u8, to: &mut [u8]) {
    for (i, byte) in to.iter_mut().enumerate() {
        *byte = codes(i) & 15 | codes(i + 16) << 4;
    }
}

impl BlockFormat for Q4_0 {
    const NAME: &'static str = "q4_0";
    const ELEMENTS: usize = 32;
    const BYTES: usize = 18;
    const GROUP: usize = 32;

    fn meaning(block: &mut BlockBytes<'_>) -> BlockValue {
        let (scale, codes) = (block.f16(0), block.at(2, 16));
        let codes = block.fields(codes, 16, &[0, 4], 4);
        let codes = block.centred(codes, 8);
        block.scaled(scale, codes)
    }

    #[inline(always)]
    fn codes(block: &[u8], codes: &mut [i8], scales: &mut [f32], _minima: &mut [f32]) {
        scales[0] = half_at(block, 0);
        unpack(&block[2..18], 8, codes);
    }

    fn write(values: &[f32], importance: Option<&[f32]>, block: &mut [u8]) {
        let scale = match importance {
            None => fit::largest(values) / -8.0,
            Some(importance) => fit::symmetric(values, &fit::beside(values, importance), 8, 7),
        };
        let inverse = fit::inverse(scale);
        put_half(block, 0, scale);
        pack(|i| ((values[i] * inverse + 8.5) as u8).min(15), &mut block[2..]);
    }
}

impl BlockFormat for Q4_1 {
    const NAME: &'static str = "q4_1";
    const ELEMENTS: usize = 32;
    const BYTES: usize = 20;
    const GROUP: usize = 32;
    const MINIMA: bool = true;

    fn meaning(block: &mut BlockBytes<'_>) -> BlockValue {
        let (scale, minimum, codes) = (block.f16(0), block.f16(2), block.at(4, 16));
        let codes = block.fields(codes, 16, &[0, 4], 4);
        let codes = block.float(codes);
        block.above(scale, codes, minimum)
    }

    #[inline(always)]
    fn codes(block: &[u8], codes: &mut [i8], scales: &mut [f32], minima: &mut [f32]) {
        scales[0] = half_at(block, 0);
        minima[0] = -half_at(block, 2);
        unpack(&block[4..20], 0, codes);
    }

    fn write(values: &[f32], importance: Option<&[f32]>, block: &mut [u8]) {
        let (scale, minimum) = match importance {
            None => fit::range(values, 15),
            Some(importance) => fit::affine(values, &fit::beside(values, importance), 15, false),
        };
        let inverse = fit::inverse(scale);
        put_half(block, 0, scale);
        put_half(block, 2, minimum);
        pack(|i| (((values[i] - minimum) * inverse + 0.5) as u8).min(15), &mut block[4..]);
    }
}

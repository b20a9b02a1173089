//! Q8_0: 32 signed bytes and their f16 scale. Value = scale * code; scale = largest magnitude / 127.
#![allow(clippy::inline_always)] // a loop over blocks must compile with its caller's instruction set

use super::block::{BlockBytes, BlockFormat, BlockValue, half_at, put_half};

/// The Q8_0 format: f16 scale, 32 codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Q8_0;

impl BlockFormat for Q8_0 {
    const NAME: &'static str = "q8_0";
    const ELEMENTS: usize = 32;
    const BYTES: usize = 34;
    const GROUP: usize = 32;

    fn meaning(block: &mut BlockBytes<'_>) -> BlockValue {
        let (scale, codes) = (block.f16(0), block.signed(2, 32));
        let codes = block.float(codes);
        block.scaled(scale, codes)
    }

    #[inline(always)]
    fn codes(block: &[u8], codes: &mut [i8], scales: &mut [f32], _minima: &mut [f32]) {
        scales[0] = half_at(block, 0);
        for (code, byte) in codes[..32].iter_mut().zip(&block[2..34]) {
            *code = *byte as i8;
        }
    }

    fn write(values: &[f32], _importance: Option<&[f32]>, block: &mut [u8]) {
        let scale = values.iter().fold(0f32, |m, v| m.max(v.abs())) / 127.0;
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        put_half(block, 0, scale);
        for (code, v) in block[2..].iter_mut().zip(values) {
            *code = (v * inverse).round() as i8 as u8;
        }
    }
}

/// Bytes without a scale: how kernels of block formats see rows of int8 codes whose scale is stored elsewhere
/// ([`ScaledFormat::INT8_ROWS`](super::ScaledFormat::INT8_ROWS)). No file and no parameter has this format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SignedBytes;

impl BlockFormat for SignedBytes {
    const NAME: &'static str = "signed_bytes";
    const ELEMENTS: usize = 32;
    const BYTES: usize = 32;
    const GROUP: usize = 32;

    fn meaning(block: &mut BlockBytes<'_>) -> BlockValue {
        let codes = block.signed(0, 32);
        block.float(codes)
    }

    #[inline(always)]
    fn codes(block: &[u8], codes: &mut [i8], scales: &mut [f32], _minima: &mut [f32]) {
        scales[0] = 1.0;
        for (code, byte) in codes[..32].iter_mut().zip(&block[..32]) {
            *code = *byte as i8;
        }
    }

    fn write(values: &[f32], _importance: Option<&[f32]>, block: &mut [u8]) {
        for (code, v) in block.iter_mut().zip(values) {
            *code = v.round().clamp(-127.0, 127.0) as i8 as u8;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Format;

    #[test]
    fn the_largest_value_of_a_block_takes_code_127() {
        let mut values = vec![0.5f32; 32];
        values[7] = -2.0;
        let block = Q8_0.encode(&values, &[32], None).remove(0);
        assert_eq!(block[2 + 7] as i8, -127);
        assert_eq!(block[2] as i8, 32);
        assert_eq!(half_at(&block, 0), half::f16::from_f32(2.0 / 127.0).to_f32());
    }
}

//! The K formats: blocks of 256 in groups of 16 or 32, whose scales (and minima) are small integers times an f16 of the
//! block. Fields lie apart so that a byte operation takes one field of a run of codes.
#![allow(clippy::inline_always)] // a loop over blocks must compile with its caller's instruction set

use super::block::{BlockBytes, BlockFormat, BlockValue, half_at, put_half};
use super::fit;

/// The Q2_K format: 16 groups of 16 codes of 2 bits, with 4 bits of scale and 4 of minimum each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Q2K;

/// The Q3_K format: 16 groups of 16 codes of 3 bits around 4, with 6 bits of scale each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Q3K;

/// The Q4_K format: 8 groups of 32 codes of 4 bits, with 6 bits of scale and 6 of minimum each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Q4K;

/// The Q5_K format: as [`Q4K`] with a fifth bit of each code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Q5K;

/// The Q6_K format: 16 groups of 16 codes of 6 bits around 32, with 8 bits of scale each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Q6K;

const BITS: [u32; 8] = [0, 1, 2, 3, 4, 5, 6, 7];

/// Weights of the errors of a group whose codes have an offset.
fn weights(values: &[f32], importance: Option<&[f32]>, from: usize, len: usize) -> Vec<f32> {
    let of_group = &values[from..from + len];
    match importance {
        None => fit::magnitudes(of_group),
        Some(importance) => fit::beside(of_group, &importance[from..from + len]),
    }
}

/// Weights of the errors of a group whose codes have none.
fn weights_about_zero(values: &[f32], importance: Option<&[f32]>, from: usize, len: usize) -> Vec<f32> {
    match importance {
        None => fit::squares(&values[from..from + len]),
        Some(_) => weights(values, importance, from, len),
    }
}

/// `N` groups of codes `0..=most` with an offset: the f16 scale and minimum of the block go to bytes `at` and `at + 2`;
/// returned are scales and minima of the groups as integers up to `levels`, and all codes.
fn affine<const N: usize>(
    values: &[f32],
    importance: Option<&[f32]>,
    (most, levels): (u8, u8),
    at: usize,
    block: &mut [u8],
) -> ([u8; N], [u8; N], [u8; 256]) {
    let len = 256 / N;
    let weights: [Vec<f32>; N] = std::array::from_fn(|group| weights(values, importance, group * len, len));
    let of_group = |group: usize| &values[group * len..][..len];
    let fits: [(f32, f32); N] = std::array::from_fn(|group| fit::affine(of_group(group), &weights[group], most, true));
    let top = f32::from(levels);
    let scale = put_half(block, at, fits.iter().fold(0f32, |m, f| m.max(f.0)) / top);
    let minimum = put_half(block, at + 2, fits.iter().fold(0f32, |m, f| m.max(-f.1)) / top);
    let rounded = |x: f32, unit: f32| (x * fit::inverse(unit)).round().clamp(0.0, top) as u8;
    let code = |value: f32, scale: f32, minimum: f32| {
        ((value + minimum) * fit::inverse(scale)).round().clamp(0.0, f32::from(most))
    };
    // The nearest integers are not always those that leave least error together.
    let chosen: [(u8, u8); N] = std::array::from_fn(|group| {
        let error = |&(s, m): &(u8, u8)| {
            let (scale, minimum) = (scale * f32::from(s), minimum * f32::from(m));
            let each = |(v, w): (&f32, &f32)| w * (scale * code(*v, scale, minimum) - minimum - v).powi(2);
            of_group(group).iter().zip(&weights[group]).map(each).sum::<f32>()
        };
        let nearest = (rounded(fits[group].0, scale), rounded(-fits[group].1, minimum));
        let around = |x: u8| x.saturating_sub(1)..=(x + 1).min(levels);
        let all = around(nearest.0).flat_map(|s| around(nearest.1).map(move |m| (s, m)));
        fit::least(nearest, all, error)
    });
    let codes = std::array::from_fn(|i| {
        let (s, m) = chosen[i / len];
        code(values[i], scale * f32::from(s), minimum * f32::from(m)) as u8
    });
    (chosen.map(|c| c.0), chosen.map(|c| c.1), codes)
}

/// 16 groups of codes around `half`: the f16 scale of the block goes to bytes `at`; returned are the groups' scales as
/// integers from `-levels` to `levels - 1`, and all codes from 0.
fn symmetric(
    values: &[f32],
    importance: Option<&[f32]>,
    (half, levels): (i32, i32),
    at: usize,
    block: &mut [u8],
) -> ([i8; 16], [u8; 256]) {
    let weights: [Vec<f32>; 16] = std::array::from_fn(|group| weights_about_zero(values, importance, group * 16, 16));
    let of_group = |group: usize| &values[group * 16..][..16];
    let fits: [f32; 16] = std::array::from_fn(|group| fit::symmetric(of_group(group), &weights[group], half, half - 1));
    let scale = put_half(block, at, fit::largest(&fits) / -(levels as f32));
    let inverse = fit::inverse(scale);
    let code = |value: f32, s: i8| fit::code(value * fit::inverse(scale * f32::from(s)), half, half - 1);
    let scales: [i8; 16] = std::array::from_fn(|group| {
        let error = |s: &i8| {
            let each = |(v, w): (&f32, &f32)| w * (scale * f32::from(*s) * code(*v, *s) as f32 - v).powi(2);
            of_group(group).iter().zip(&weights[group]).map(each).sum::<f32>()
        };
        let nearest = fit::code(fits[group] * inverse, levels, levels - 1);
        let around = (nearest - 1).max(-levels)..=(nearest + 1).min(levels - 1);
        fit::least(nearest as i8, around.map(|s| s as i8), error)
    });
    let codes = std::array::from_fn(|i| (code(values[i], scales[i / 16]) + half) as u8);
    (scales, codes)
}

/// Packs fields of `codes` into `to`: byte `i` of run `r` has the field of code `r * run * per + s * run + i` at
/// bit `shifts[s]`.
fn pack(codes: &[u8; 256], to: &mut [u8], run: usize, shifts: &[u32], field: impl Fn(u8) -> u8) {
    for (i, byte) in to.iter_mut().enumerate() {
        let first = i / run * run * shifts.len() + i % run;
        *byte = shifts.iter().enumerate().fold(0, |b, (s, shift)| b | field(codes[first + s * run]) << shift);
    }
}

impl BlockFormat for Q2K {
    const NAME: &'static str = "q2_k";
    const ELEMENTS: usize = 256;
    const BYTES: usize = 84;
    const GROUP: usize = 16;
    const MINIMA: bool = true;

    fn meaning(block: &mut BlockBytes<'_>) -> BlockValue {
        let (groups, codes) = (block.at(0, 16), block.at(16, 64));
        let (scale, minimum) = (block.f16(80), block.f16(82));
        let (scales, minima) = (block.field(groups, 0, 4), block.field(groups, 4, 4));
        let codes = block.fields(codes, 32, &[0, 2, 4, 6], 2);
        offset(block, [scale, minimum, scales, minima, codes], [16, 16])
    }

    #[inline(always)]
    fn codes(block: &[u8], codes: &mut [i8], scales: &mut [f32], minima: &mut [f32]) {
        let (scale, minimum) = (half_at(block, 80), half_at(block, 82));
        for (group, codes) in codes[..256].chunks_exact_mut(16).enumerate() {
            scales[group] = scale * f32::from(block[group] & 15);
            minima[group] = minimum * f32::from(block[group] >> 4);
            // Two groups share a shift of 32 bytes.
            let (from, shift) = (16 + group / 8 * 32 + group % 2 * 16, group % 8 / 2 * 2);
            for (code, byte) in codes.iter_mut().zip(&block[from..from + 16]) {
                *code = (byte >> shift & 3) as i8;
            }
        }
    }

    fn write(values: &[f32], importance: Option<&[f32]>, block: &mut [u8]) {
        let (scales, minima, codes) = affine::<16>(values, importance, (3, 15), 80, block);
        for group in 0..16 {
            block[group] = scales[group] | minima[group] << 4;
        }
        pack(&codes, &mut block[16..80], 32, &[0, 2, 4, 6], |c| c);
    }
}

/// `scale * scales * codes - minimum * minima` of `groups` groups of `len`.
fn offset(block: &mut BlockBytes<'_>, parts: [BlockValue; 5], [groups, len]: [usize; 2]) -> BlockValue {
    let [scale, minimum, scales, minima, codes] = parts;
    let (scales, minima, codes) = (block.float(scales), block.float(minima), block.float(codes));
    let (scales, minima) = (block.scaled(scale, scales), block.scaled(minimum, minima));
    let (scales, minima) = (block.split(scales, &[groups, 1]), block.split(minima, &[groups, 1]));
    let codes = block.split(codes, &[groups, len]);
    block.below(scales, codes, minima)
}

impl BlockFormat for Q3K {
    const NAME: &'static str = "q3_k";
    const ELEMENTS: usize = 256;
    const BYTES: usize = 110;
    const GROUP: usize = 16;

    fn meaning(block: &mut BlockBytes<'_>) -> BlockValue {
        let (high, low) = (block.at(0, 32), block.at(32, 64));
        let low = block.fields(low, 32, &[0, 2, 4, 6], 2);
        let high = block.fields(high, 32, &BITS, 1);
        let codes = block.with_high(low, high, 2);
        let codes = block.centred(codes, 4);
        let (low, high) = (block.at(96, 8), block.at(104, 4));
        let low = block.fields(low, 8, &[0, 4], 4);
        let high = block.fields(high, 4, &[0, 2, 4, 6], 2);
        let scales = block.with_high(low, high, 4);
        let scales = block.centred(scales, 32);
        about_zero(block, 108, scales, codes)
    }

    #[inline(always)]
    fn codes(block: &[u8], codes: &mut [i8], scales: &mut [f32], _minima: &mut [f32]) {
        let scale = half_at(block, 108);
        for (group, codes) in codes[..256].chunks_exact_mut(16).enumerate() {
            let low = block[96 + group % 8] >> (group / 8 * 4) & 15;
            let high = block[104 + group % 4] >> (group / 4 * 2) & 3;
            scales[group] = scale * (i32::from(low | high << 4) - 32) as f32;
            let (half, shift, bit) = (group % 2 * 16, group % 8 / 2 * 2, group / 2);
            let low = &block[32 + group / 8 * 32 + half..][..16];
            for ((code, low), high) in codes.iter_mut().zip(low).zip(&block[half..half + 16]) {
                *code = (low >> shift & 3) as i8 + (high >> bit & 1) as i8 * 4 - 4;
            }
        }
    }

    fn write(values: &[f32], importance: Option<&[f32]>, block: &mut [u8]) {
        let (scales, codes) = symmetric(values, importance, (4, 32), 108, block);
        block[96..108].fill(0);
        for (group, scale) in scales.iter().enumerate() {
            let scale = (scale + 32) as u8;
            block[96 + group % 8] |= (scale & 15) << (group / 8 * 4);
            block[104 + group % 4] |= (scale >> 4) << (group / 4 * 2);
        }
        pack(&codes, &mut block[..32], 32, &BITS, |c| c >> 2);
        pack(&codes, &mut block[32..96], 32, &[0, 2, 4, 6], |c| c & 3);
    }
}

/// `scale * scales * codes` of 16 groups of 16, `scale` being the f16 at byte `at`.
fn about_zero(block: &mut BlockBytes<'_>, at: usize, scales: BlockValue, codes: BlockValue) -> BlockValue {
    let scale = block.f16(at);
    let scales = block.scaled(scale, scales);
    let scales = block.split(scales, &[16, 1]);
    let codes = block.split(codes, &[16, 16]);
    block.scaled(scales, codes)
}

/// Scales and minima of 8 groups, 6 bits each in the 12 bytes from byte 4 on: the lower 6 bits of 4 bytes each are those
/// of the first four groups, their upper 2 the upper ones of the others, whose lower 4 are the nibbles of the last 4 bytes.
fn packed_scales(block: &mut BlockBytes<'_>) -> (BlockValue, BlockValue) {
    let (scales, minima, rest) = (block.at(4, 4), block.at(8, 4), block.at(12, 4));
    let mut whole = |packed: BlockValue, shift: u32| {
        let (first, high) = (block.field(packed, 0, 6), block.field(packed, 6, 2));
        let low = block.field(rest, shift, 4);
        let last = block.with_high(low, high, 4);
        block.join(first, last)
    };
    (whole(scales, 0), whole(minima, 4))
}

/// Scale and minimum of `group`, packed so.
#[inline(always)]
fn packed_scale(packed: &[u8], group: usize) -> (u8, u8) {
    if group < 4 {
        return (packed[group] & 63, packed[group + 4] & 63);
    }
    let low = packed[group + 4];
    (low & 15 | packed[group - 4] >> 6 << 4, low >> 4 | packed[group] >> 6 << 4)
}

fn pack_scales(scales: &[u8; 8], minima: &[u8; 8], to: &mut [u8]) {
    for i in 0..4 {
        to[i] = scales[i] | scales[i + 4] >> 4 << 6;
        to[i + 4] = minima[i] | minima[i + 4] >> 4 << 6;
        to[i + 8] = scales[i + 4] & 15 | minima[i + 4] << 4;
    }
}

impl BlockFormat for Q4K {
    const NAME: &'static str = "q4_k";
    const ELEMENTS: usize = 256;
    const BYTES: usize = 144;
    const GROUP: usize = 32;
    const MINIMA: bool = true;

    fn meaning(block: &mut BlockBytes<'_>) -> BlockValue {
        let (scale, minimum, codes) = (block.f16(0), block.f16(2), block.at(16, 128));
        let (scales, minima) = packed_scales(block);
        let codes = block.fields(codes, 32, &[0, 4], 4);
        offset(block, [scale, minimum, scales, minima, codes], [8, 32])
    }

    #[inline(always)]
    fn codes(block: &[u8], codes: &mut [i8], scales: &mut [f32], minima: &mut [f32]) {
        let (scale, minimum) = (half_at(block, 0), half_at(block, 2));
        for (group, codes) in codes[..256].chunks_exact_mut(32).enumerate() {
            let (d, m) = packed_scale(&block[4..16], group);
            (scales[group], minima[group]) = (scale * f32::from(d), minimum * f32::from(m));
            let shift = group % 2 * 4;
            for (code, byte) in codes.iter_mut().zip(&block[16 + group / 2 * 32..][..32]) {
                *code = (byte >> shift & 15) as i8;
            }
        }
    }

    fn write(values: &[f32], importance: Option<&[f32]>, block: &mut [u8]) {
        let (scales, minima, codes) = affine::<8>(values, importance, (15, 63), 0, block);
        pack_scales(&scales, &minima, &mut block[4..16]);
        pack(&codes, &mut block[16..], 32, &[0, 4], |c| c);
    }
}

impl BlockFormat for Q5K {
    const NAME: &'static str = "q5_k";
    const ELEMENTS: usize = 256;
    const BYTES: usize = 176;
    const GROUP: usize = 32;
    const MINIMA: bool = true;

    fn meaning(block: &mut BlockBytes<'_>) -> BlockValue {
        let (scale, minimum) = (block.f16(0), block.f16(2));
        let (scales, minima) = packed_scales(block);
        let (high, low) = (block.at(16, 32), block.at(48, 128));
        let low = block.fields(low, 32, &[0, 4], 4);
        let high = block.fields(high, 32, &BITS, 1);
        let codes = block.with_high(low, high, 4);
        offset(block, [scale, minimum, scales, minima, codes], [8, 32])
    }

    #[inline(always)]
    fn codes(block: &[u8], codes: &mut [i8], scales: &mut [f32], minima: &mut [f32]) {
        let (scale, minimum) = (half_at(block, 0), half_at(block, 2));
        for (group, codes) in codes[..256].chunks_exact_mut(32).enumerate() {
            let (d, m) = packed_scale(&block[4..16], group);
            (scales[group], minima[group]) = (scale * f32::from(d), minimum * f32::from(m));
            let (low, shift) = (&block[48 + group / 2 * 32..][..32], group % 2 * 4);
            for ((code, low), high) in codes.iter_mut().zip(low).zip(&block[16..48]) {
                *code = (low >> shift & 15 | (high >> group & 1) << 4) as i8;
            }
        }
    }

    fn write(values: &[f32], importance: Option<&[f32]>, block: &mut [u8]) {
        let (scales, minima, codes) = affine::<8>(values, importance, (31, 63), 0, block);
        pack_scales(&scales, &minima, &mut block[4..16]);
        pack(&codes, &mut block[16..48], 32, &BITS, |c| c >> 4);
        pack(&codes, &mut block[48..], 32, &[0, 4], |c| c & 15);
    }
}

impl BlockFormat for Q6K {
    const NAME: &'static str = "q6_k";
    const ELEMENTS: usize = 256;
    const BYTES: usize = 210;
    const GROUP: usize = 16;

    fn meaning(block: &mut BlockBytes<'_>) -> BlockValue {
        let (low, high) = (block.at(0, 128), block.at(128, 64));
        let low = block.fields(low, 64, &[0, 4], 4);
        let high = block.fields(high, 32, &[0, 2, 4, 6], 2);
        let codes = block.with_high(low, high, 4);
        let codes = block.centred(codes, 32);
        let scales = block.signed(192, 16);
        let scales = block.float(scales);
        about_zero(block, 208, scales, codes)
    }

    #[inline(always)]
    fn codes(block: &[u8], codes: &mut [i8], scales: &mut [f32], _minima: &mut [f32]) {
        let scale = half_at(block, 208);
        for (group, codes) in codes[..256].chunks_exact_mut(16).enumerate() {
            scales[group] = scale * f32::from(block[192 + group] as i8);
            // Halves of 128: a nibble of 64 bytes, and 2 bits of 32 bytes.
            let (half, within) = (group / 8, group % 8);
            let low = &block[64 * half + within % 4 * 16..][..16];
            let high = &block[128 + 32 * half + within % 2 * 16..][..16];
            let (nibble, pair) = (within / 4 * 4, within / 2 * 2);
            for ((code, low), high) in codes.iter_mut().zip(low).zip(high) {
                *code = (low >> nibble & 15 | (high >> pair & 3) << 4) as i8 - 32;
            }
        }
    }

    fn write(values: &[f32], importance: Option<&[f32]>, block: &mut [u8]) {
        let (scales, codes) = symmetric(values, importance, (32, 128), 208, block);
        pack(&codes, &mut block[..128], 64, &[0, 4], |c| c & 15);
        pack(&codes, &mut block[128..192], 32, &[0, 2, 4, 6], |c| c >> 4);
        for (to, scale) in block[192..208].iter_mut().zip(scales) {
            *to = scale as u8;
        }
    }
}

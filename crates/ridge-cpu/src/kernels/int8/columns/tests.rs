//! Products beside plain loops over [`BlockFormat::codes`], by all instructions that the machine has.

use ridge_graph::format::BlockFormat;
use ridge_graph::sample::Rng;
use ridge_graph::{DType, FormatRef, format, with_block_format};

use super::*;
use crate::interleave::{Interleaving, Line};
#[cfg(target_arch = "x86_64")]
use crate::kernels::int8::avx2::{Fours, Pairs};
#[cfg(target_arch = "x86_64")]
use crate::kernels::int8::avx512::{self, Wide};
#[cfg(target_arch = "aarch64")]
use crate::kernels::int8::neon::{Fours, Matrices, Pairs};
use crate::kernels::int8::{CodeLayout, CodeMultiplier, codes, unit};

#[cfg(target_arch = "aarch64")]
use super::Interleaved as Wide;

/// The product of one row of the weight, `blocks`, with one of x: exact sums of codes, floats in the order of K.
fn product<B: Wide>(blocks: &[u8], x: &ActivationCodes<'_>, row: usize) -> f32 {
    let (of_x, sums, mut total) = (x.codes(row), x.sums(row), 0f32);
    for (group, blocks) in blocks.chunks(GROUP / B::ELEMENTS * B::BYTES).enumerate() {
        let mut sum = 0f32;
        for (nth, block) in blocks.chunks_exact(B::BYTES).enumerate() {
            let (mut codes, mut scales, mut minima) = ([0; GROUP], [0.0; GROUP / 16], [0.0; GROUP / 16]);
            B::codes(block, &mut codes[..B::ELEMENTS], &mut scales, &mut minima);
            for (part, codes) in codes[..B::ELEMENTS].chunks_exact(B::GROUP).enumerate() {
                let from = group * GROUP + nth * B::ELEMENTS + part * B::GROUP;
                let products = codes.iter().zip(&of_x[from..]).map(|(w, x)| i32::from(*w) * i32::from(*x));
                sum = (products.sum::<i32>() as f32).mul_add(scales[part] / unit::<B>(), sum);
                if B::MINIMA {
                    let of_x: f32 = sums[from / SUMMED..][..B::GROUP / SUMMED].iter().sum();
                    sum = (-minima[part]).mul_add(of_x, sum);
                }
            }
        }
        total = sum.mul_add(x.scales(row)[group], total);
    }
    total
}

fn as_bytes(lines: &[Line]) -> &[u8] {
    // SAFETY: words are bytes, as many as the slice has.
    unsafe { std::slice::from_raw_parts(lines.as_ptr().cast(), size_of_val(lines)) }
}

fn same(is: &[f32], should: &[f32]) -> bool {
    is.iter().zip(should).all(|(a, b)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan())
}

type Products = unsafe fn(&CodeWeight<'_>, Range<usize>, &ActivationCodes<'_>, &mut [u8], &mut [f32]);

/// The instructions that multiply codes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Instructions {
    Pairs,
    Fours,
    #[cfg(target_arch = "x86_64")]
    LanesOfAvx512,
    #[cfg(target_arch = "aarch64")]
    Matrices,
}

/// Checks products by `by` of a weight of `columns` rows with `rows` of x.
fn check<B: Wide>(
    (by, interleaved): (Instructions, bool),
    format: &FormatRef,
    data: &[u8],
    inner: usize,
    columns: usize,
    rows: usize,
) {
    let layout = CodeLayout { rows, inner, by: CodeMultiplier::Stream };
    let mut rng = Rng::new((inner + rows) as u64);
    let mut x: Vec<f32> = rng.normal(DType::F32, &[rows, inner]).floats().iter().map(|x| *x as f32).collect();
    x[..inner.min(40)].fill(3.0);
    // Largest codes of both signs beside each other, of weights and of x.
    if rows > 2 {
        x[inner..2 * inner].fill(-1.0);
        x[2 * inner..3 * inner].iter_mut().enumerate().for_each(|(i, x)| *x = if i % 3 == 0 { -1.0 } else { 1.0 });
    }
    let mut lines = vec![[0u8; 64]; layout.bytes().div_ceil(64) + 1];
    let bytes = lines.as_flattened_mut();
    let aligned = bytes.as_ptr().align_offset(64);
    let bytes = &mut bytes[aligned..][..layout.bytes()];
    for (row, x) in x.chunks_exact(inner).enumerate() {
        layout.put(x, &mut bytes[row * layout.row_bytes()..][..layout.row_bytes()]);
    }
    let x = ActivationCodes::new(layout, bytes);
    let rows_of_weight = data;
    let stride = data.len() / columns;
    let of_format = codes(format).expect("has blocks");
    let interleaving = Interleaving::new(inner, of_format.block);
    let mut lines = vec![[0; 16]; if interleaved { interleaving.bytes(columns) / 64 } else { 0 }];
    interleaving.pack(rows_of_weight, 0, &mut lines);
    let data = if interleaved { as_bytes(&lines) } else { data };
    let interleaved = interleaved.then_some(interleaving);
    let weight = CodeWeight { data, codes: of_format, inner, interleaved };
    #[cfg(target_arch = "x86_64")]
    let of_avx512 = avx512::room(&layout);
    #[cfg(target_arch = "aarch64")]
    let of_avx512 = 0;
    let mut room = vec![0u8; 64 + room().max(of_avx512)];
    let aligned = room.as_ptr().align_offset(64);
    let of_room = room.len() - 64;
    let room = &mut room[aligned..][..of_room];
    // Some rows of the weight, and all.
    let aligned = if interleaved.is_some() { columns / 32 * 16 } else { columns / 3 };
    for some in [aligned..columns - 1, 0..columns] {
        let row = |column: usize| &rows_of_weight[column * stride..][..stride];
        let all = (0..rows).flat_map(|r| some.clone().map(move |c| (r, c)));
        let should: Vec<f32> = all.map(|(r, c)| product::<B>(row(c), &x, r)).collect();
        let by_instructions: Products = match by {
            Instructions::Pairs => multiply::<B, Pairs>,
            Instructions::Fours => multiply::<B, Fours>,
            #[cfg(target_arch = "x86_64")]
            Instructions::LanesOfAvx512 => avx512::multiply::<B>,
            #[cfg(target_arch = "aarch64")]
            Instructions::Matrices => multiply::<B, Matrices>,
        };
        let mut got = vec![7.5; rows * some.len()];
        // SAFETY: the caller has found the instructions.
        unsafe { by_instructions(&weight, some.clone(), &x, &mut *room, &mut got) };
        let at = || format!("{} by {by:?}, {inner} by {some:?}, {rows} rows", B::NAME);
        assert!(same(&got, &should), "{}: {got:?} and not {should:?}", at());
    }
}

/// Random bytes, in some blocks all of one bit pattern: the largest codes of both signs, and scales that are infinite, NaN,
/// subnormal and negative.
fn products_are_those_of_the_codes_of_each_block(by: Instructions, interleaved: bool) {
    for format in format::all() {
        with_block_format!(format.name(), B => {
            for blocks in [1, 3, 8, 11].map(|blocks| if B::ELEMENTS == GROUP { blocks.min(3) } else { blocks }) {
                for (columns, rows) in [(2, 1), (9, 1), (16, 3), (32, 4), (31, 9), (32, 14)] {
                    let seed = (blocks * 1000 + columns * 10 + rows) as u64;
                    let mut data = Rng::new(seed).integers(DType::U8, &[columns * blocks * B::BYTES], 0, 256).to_bytes();
                    for (i, block) in data.chunks_exact_mut(B::BYTES).enumerate() {
                        // Scales that are numbers, and sums that are.
                        let one = 0x3c00u16.to_le_bytes();
                        let halves = [0x0000u16, 0xffff, 0x7c00, 0xfc00, 0x7e01, 0x0001, 0x8003, 0x8080];
                        let half = halves[i / 9 % 8].to_le_bytes();
                        match i % 9 {
                            0 => block.fill(0),
                            1 => block.fill(0x80),
                            2 => block.fill(0xff),
                            3 => block.fill(0x7f),
                            4 => block[..2].copy_from_slice(&half),
                            5 => block[B::BYTES - 2..].copy_from_slice(&half),
                            _ => {}
                        }
                        if i % 9 != 4 && i % 9 != 5 {
                            for at in [0, 2, 80, 82, B::BYTES - 2] {
                                if at + 2 <= B::BYTES {
                                    block[at..at + 2].copy_from_slice(&one);
                                }
                            }
                        }
                    }
                    check::<B>((by, interleaved), &format, &data, blocks * B::ELEMENTS, columns, rows);
                }
            }
        }, _ => panic!("{} has no blocks", format.name()));
    }
}

#[test]
#[cfg(target_arch = "x86_64")]
fn products_by_pairs_are_those_of_the_codes() {
    if simd::isa() < simd::Isa::Avx2 {
        ridge_testing::skip!("this machine has no AVX2");
    }
    products_are_those_of_the_codes_of_each_block(Instructions::Pairs, false);
    products_are_those_of_the_codes_of_each_block(Instructions::Pairs, true);
}

#[test]
#[cfg(target_arch = "x86_64")]
fn products_by_fours_are_those_of_the_codes() {
    if simd::isa() < simd::Isa::Avx2 || !is_x86_feature_detected!("avxvnni") {
        ridge_testing::skip!("this machine has no AVX-VNNI");
    }
    products_are_those_of_the_codes_of_each_block(Instructions::Fours, false);
}

#[test]
#[cfg(target_arch = "x86_64")]
fn products_by_lanes_of_avx512_are_those_of_the_codes() {
    if simd::isa() < simd::Isa::Avx512Vnni {
        ridge_testing::skip!("this machine has no AVX-512 VNNI");
    }
    products_are_those_of_the_codes_of_each_block(Instructions::LanesOfAvx512, false);
}

#[test]
#[cfg(target_arch = "x86_64")]
fn products_by_lanes_of_avx512_of_interleaved_rows_are_those_of_the_codes() {
    if simd::isa() < simd::Isa::Avx512Vnni {
        ridge_testing::skip!("this machine has no AVX-512 VNNI");
    }
    products_are_those_of_the_codes_of_each_block(Instructions::LanesOfAvx512, true);
}

#[test]
#[cfg(target_arch = "aarch64")]
fn products_by_pairs_of_neon_are_those_of_the_codes() {
    if simd::isa() < simd::Isa::Neon {
        ridge_testing::skip!("this machine has no level of NEON: RIDGE_CPU_ISA leaves it out");
    }
    products_are_those_of_the_codes_of_each_block(Instructions::Pairs, false);
    products_are_those_of_the_codes_of_each_block(Instructions::Pairs, true);
}

#[test]
#[cfg(target_arch = "aarch64")]
fn products_by_fours_of_neon_are_those_of_the_codes() {
    if simd::isa() < simd::Isa::NeonDotprod {
        ridge_testing::skip!("this machine has no sdot, or RIDGE_CPU_ISA leaves it out");
    }
    products_are_those_of_the_codes_of_each_block(Instructions::Fours, false);
    products_are_those_of_the_codes_of_each_block(Instructions::Fours, true);
}

#[test]
#[cfg(target_arch = "aarch64")]
fn products_by_matrices_of_neon_are_those_of_the_codes() {
    if simd::isa() < simd::Isa::NeonI8mm {
        ridge_testing::skip!("this machine has no smmla, or RIDGE_CPU_ISA leaves it out");
    }
    products_are_those_of_the_codes_of_each_block(Instructions::Matrices, false);
    products_are_those_of_the_codes_of_each_block(Instructions::Matrices, true);
}

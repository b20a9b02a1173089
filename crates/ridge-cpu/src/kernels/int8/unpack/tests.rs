//! Every format beside [`BlockFormat::codes`].

use ridge_graph::sample::Rng;
use ridge_graph::{DType, format, with_block_format};

use super::*;
use crate::kernels::int8::unit;

/// Bits that no block says.
const UNSAID: Unpacked = Unpacked { codes: [[77; GROUP]; SIDE], scales: Scales { scales: LINES, minima: LINES } };
const LINES: [[f32; SIDE]; GROUP / 16] = [[7.5; SIDE]; GROUP / 16];

fn same(is: f32, should: f32) -> bool {
    is.to_bits() == should.to_bits() || is.is_nan() && should.is_nan()
}

/// Holds what is unpacked of `data`, rows of `blocks` blocks `stride` bytes apart, to the codes of each block.
fn holds<B: Vectors>(data: &[u8], stride: usize, rows: usize, blocks: usize) {
    let mut got = UNSAID;
    unpack::<B>(&OfRows { data, stride, blocks, rows }, &mut got);
    let groups = B::ELEMENTS / B::GROUP;
    for row in 0..rows {
        for nth in 0..blocks {
            let block = &data[row * stride + nth * B::BYTES..][..B::BYTES];
            let (mut codes, mut scales, mut minima) = ([0; GROUP], [0.0; GROUP / 16], [0.0; GROUP / 16]);
            B::codes(block, &mut codes[..B::ELEMENTS], &mut scales, &mut minima);
            let at = format!("{}, row {row} of {rows}, block {nth} of {blocks}: {block:?}", B::NAME);
            assert_eq!(got.codes[row][nth * B::ELEMENTS..][..B::ELEMENTS], codes[..B::ELEMENTS], "{at}");
            for group in 0..groups {
                let (scale, minimum) =
                    (got.scales.scales[nth * groups + group][row], got.scales.minima[nth * groups + group][row]);
                assert!(same(scale * unit::<B>(), scales[group]), "scale {scale} and not {}: {at}", scales[group]);
                let fits = !B::MINIMA || same(minimum, minima[group]);
                assert!(fits, "minimum {minimum} and not {}: {at}", minima[group]);
            }
        }
    }
    assert!(got.codes[rows..].as_flattened().iter().all(|c| *c == 77), "{}: rows behind", B::NAME);
}

/// Random bytes, in some blocks all of one bit pattern: codes of -128, and scales that are infinite, NaN, subnormal and
/// negative.
#[test]
fn what_is_unpacked_is_the_codes_of_each_block() {
    if crate::simd::isa() < crate::simd::Isa::Avx512 {
        ridge_testing::skip!("this machine has no AVX-512");
    }
    for format in format::all() {
        with_block_format!(format.name(), B => {
            let whole = GROUP / B::ELEMENTS;
            for (blocks, rows) in (1..=whole).flat_map(|blocks| [1, 2, 7, 15, 16].map(|rows| (blocks, rows))) {
                // A group of a longer row, of which nothing follows the last.
                for stride in [blocks * B::BYTES, (blocks + 3) * B::BYTES] {
                    let bytes = (rows - 1) * stride + blocks * B::BYTES;
                    let seed = (blocks * 100 + rows) as u64;
                    let mut data = Rng::new(seed).integers(DType::U8, &[bytes], 0, 256).to_bytes();
                    for (i, block) in data.chunks_exact_mut(B::BYTES).enumerate() {
                        // Each half of f16, wherever the format has it.
                        let halves = [0x8080u16, 0xffff, 0x7c00, 0xfc00, 0x7e01, 0x0001, 0x8003, 0x0000];
                        let half = halves[i % 8].to_le_bytes();
                        match i % 24 {
                            0..8 => block.as_chunks_mut::<2>().0.fill(half),
                            8..16 => block[..2].copy_from_slice(&half),
                            16..20 => block[B::BYTES - 2..].copy_from_slice(&half),
                            _ => {}
                        }
                    }
                    holds::<B>(&data, stride, rows, blocks);
                }
            }
        }, _ => panic!("{} has no blocks", format.name()));
    }
}

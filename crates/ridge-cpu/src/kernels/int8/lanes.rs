//! Products of codes by whatever a compiler makes of multiplying integers, where no loop is written for the machine. A sum
//! over weights that share a scale is kept in eight integers, as many floats take them up, and are added up in a fixed tree
//! for each 256 elements.
//!
//! Floor: every block read once (decode), or two multiplications of 16 pairs and their conversion for 32 elements.
#![allow(clippy::needless_range_loop)] // several arrays of registers go by one index

use std::ops::Range;

use super::scale::{GROUP, SUMMED};
use super::weight::CodeWeight;
use super::x::ActivationCodes;
use crate::simd::fma;

/// Partial sums.
const LANES: usize = 8;

/// The products of `rows` of the weight with the rows of `x`, one row of x after another.
pub(in crate::kernels) fn multiply(
    weight: &CodeWeight<'_>,
    rows: Range<usize>,
    x: &ActivationCodes<'_>,
    out: &mut [f32],
) {
    let (stride, width) = (weight.stride(), rows.len());
    let out = &mut out[..x.layout.rows * width];
    out.fill(0.0);
    let (mut codes, mut scales, mut minima) = ([0i8; GROUP], [0f32; GROUP / 16], [0f32; GROUP / 16]);
    for (nth, row) in rows.enumerate() {
        for group in 0..x.layout.groups() {
            let elements = weight.elements(group);
            let from = row * stride + weight.codes.bytes(elements.start);
            let blocks = &weight.data[from..][..weight.codes.bytes(elements.len())];
            (weight.codes.read)(blocks, &mut codes[..elements.len()], &mut scales, &mut minima);
            let w = Taken {
                group,
                codes: &codes[..elements.len()],
                of_scale: weight.codes.group / 16,
                scales: &scales,
                minima: weight.codes.minima.then_some(&minima),
            };
            add(&w, x, &mut out[nth..], width);
        }
    }
}

/// One group of K of a row of the weight, taken apart.
struct Taken<'a> {
    group: usize,
    codes: &'a [i8],
    /// Sixteens of elements that share a scale: 1 or 2.
    of_scale: usize,
    scales: &'a [f32; GROUP / 16],
    minima: Option<&'a [f32; GROUP / 16]>,
}

/// Adds the products of `w` to every `stride`th of `out`.
fn add(w: &Taken<'_>, x: &ActivationCodes<'_>, out: &mut [f32], stride: usize) {
    /// Do machines without a way of their own multiply and add in one instruction?
    const FMA: bool = cfg!(target_arch = "aarch64");
    let mut wide = [0i16; GROUP];
    for (wide, code) in wide.iter_mut().zip(w.codes) {
        *wide = i16::from(*code);
    }
    // Zeros behind the last group.
    let pieces = wide.as_chunks::<16>().0;
    let Taken { group, of_scale, .. } = *w;
    for (row, out) in out.iter_mut().step_by(stride).enumerate() {
        let of_x = &x.codes(row)[group * GROUP..][..w.codes.len()];
        let mut sums = [0f32; LANES];
        for ((x, w), scale) in of_x.chunks_exact(16 * of_scale).zip(pieces.chunks_exact(of_scale)).zip(w.scales) {
            let mut integers = [0i32; LANES];
            for (x, w) in x.as_chunks::<16>().0.iter().zip(w) {
                for i in 0..LANES {
                    integers[i] +=
                        i32::from(x[2 * i]) * i32::from(w[2 * i]) + i32::from(x[2 * i + 1]) * i32::from(w[2 * i + 1]);
                }
            }
            for i in 0..LANES {
                sums[i] = fma::<FMA>(integers[i] as f32, *scale, sums[i]);
            }
        }
        if let Some(minima) = w.minima {
            let of_x = &x.sums(row)[group * (GROUP / SUMMED)..][..w.codes.len() / SUMMED];
            for (nth, of_x) in of_x.iter().enumerate() {
                let lane = &mut sums[nth % LANES];
                *lane = fma::<FMA>(-minima[nth / of_scale], *of_x, *lane);
            }
        }
        let [a, b, c, d, e, f, g, h] = sums;
        let sum = ((a + e) + (c + g)) + ((b + f) + (d + h));
        *out = fma::<FMA>(sum, x.scales(row)[group], *out);
    }
}

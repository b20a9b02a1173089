//! Values weighed by the exponentials of their scores.
#![allow(clippy::inline_always)] // must compile with the instruction set of the loop
#![allow(clippy::needless_range_loop)] // several arrays of registers go by one index

use super::kernel::SPAN;
use crate::kernels::linear::source::{Lanes, start};
use crate::simd::{Element, LANES, Vector, add_weighed, lanes_of, vector_of, vectorised};

/// Sums that a row keeps of each vector, key `i` of a span going to sum `i % chains`: narrow heads would otherwise wait
/// for one addition after another.
pub(super) fn chains(vectors: usize) -> usize {
    match vectors {
        0 | 1 => 4,
        2 | 3 => 2,
        _ => 1,
    }
}

/// A run of keys that lie together.
pub(super) struct KeyRun<'a, T> {
    /// From the first of the values on.
    pub(super) values: &'a [T],
    pub(super) dim: usize,
    /// Index in the span of the first.
    pub(super) first: usize,
    pub(super) keys: usize,
}

vectorised! {
    /// Adds the values of `run`, weighed by each row of `weights`, to the sums of that row: `[chains][vectors]`. Rows of
    /// weights are [`SPAN`] apart, and begin with that of the run's first key.
    pub(super) fn weigh<T: Element>(run: &KeyRun<'_, T>, weights: &[f32], rows: usize, sums: &mut [Lanes]) {
        if run.keys == 0 {
            return;
        }
        let vectors = run.dim.div_ceil(LANES);
        // Whole vectors may hold elements of the next value: those lanes are not used. After the last value of the cache
        // there is none.
        let whole = (run.keys - 1) * run.dim + vectors * LANES <= run.values.len();
        let mut row = 0;
        while row < rows {
            // Registers hold 16 sums, or 4.
            let four = WIDE && whole && rows - row >= 4;
            let two = WIDE && whole && rows - row >= 2;
            row += match (chains(vectors), whole) {
                (4, true) if two => block::<T, 2, 1, 4, true, FMA>(run, weights, row, 0, sums),
                (4, true) => block::<T, 1, 1, 4, true, FMA>(run, weights, row, 0, sums),
                (4, false) => block::<T, 1, 1, 4, false, FMA>(run, weights, row, 0, sums),
                (2, true) if four => each::<T, 4, 1, 2, true, FMA>(run, weights, row, 0..vectors, sums),
                (2, true) => each::<T, 1, 1, 2, true, FMA>(run, weights, row, 0..vectors, sums),
                (2, false) => each::<T, 1, 1, 2, false, FMA>(run, weights, row, 0..vectors, sums),
                (_, true) if four => {
                    each::<T, 4, 4, 1, true, FMA>(run, weights, row, 0..vectors / 4 * 4, sums);
                    each::<T, 4, 1, 1, true, FMA>(run, weights, row, vectors / 4 * 4..vectors, sums)
                }
                (_, true) => {
                    each::<T, 1, 4, 1, true, FMA>(run, weights, row, 0..vectors / 4 * 4, sums);
                    each::<T, 1, 1, 1, true, FMA>(run, weights, row, vectors / 4 * 4..vectors, sums)
                }
                (_, false) => each::<T, 1, 1, 1, false, FMA>(run, weights, row, 0..vectors, sums),
            };
        }
    }
}

/// [`block`] for vectors `vectors`, `V` at a time.
#[inline(always)]
fn each<T: Element, const R: usize, const V: usize, const C: usize, const WHOLE: bool, const FMA: bool>(
    run: &KeyRun<'_, T>,
    weights: &[f32],
    row: usize,
    vectors: std::ops::Range<usize>,
    sums: &mut [Lanes],
) -> usize {
    for vector in vectors.step_by(V) {
        block::<T, R, V, C, WHOLE, FMA>(run, weights, row, vector, sums);
    }
    R
}

/// `R` rows, `V` vectors of each value, `C` chains.
#[inline(always)]
fn block<T: Element, const R: usize, const V: usize, const C: usize, const WHOLE: bool, const FMA: bool>(
    run: &KeyRun<'_, T>,
    weights: &[f32],
    row: usize,
    vector: usize,
    sums: &mut [Lanes],
) -> usize {
    let vectors = run.dim.div_ceil(LANES);
    let weights: [&[f32]; R] = std::array::from_fn(|r| &weights[(row + r) * SPAN..][..run.keys]);
    // Chain `c` here is that of the keys which are `c` after the first.
    let place = |r: usize, c: usize| ((row + r) * C + (run.first + c) % C) * vectors + vector;
    let mut acc: [[[Vector; V]; C]; R] = [[[vector_of(&[0.0; LANES]); V]; C]; R];
    for r in 0..R {
        for c in 0..C {
            for (acc, sum) in acc[r][c].iter_mut().zip(&sums[place(r, c)..][..V]) {
                *acc = vector_of(sum);
            }
        }
    }
    for from in (0..run.keys).step_by(C) {
        for c in 0..C {
            let key = from + c;
            if key >= run.keys {
                break;
            }
            for v in 0..V {
                let at = &run.values[key * run.dim + (vector + v) * LANES..];
                let lanes = match WHOLE {
                    true => T::widen_to_vector(at.first_chunk().expect("the run is whole")),
                    false => vector_of(&start(at)),
                };
                for r in 0..R {
                    add_weighed::<FMA>(&mut acc[r][c][v], weights[r][key], &lanes);
                }
            }
        }
    }
    for r in 0..R {
        for c in 0..C {
            for (sum, acc) in sums[place(r, c)..][..V].iter_mut().zip(acc[r][c]) {
                *sum = lanes_of(acc);
            }
        }
    }
    R
}

/// Adds up the chains of a row into the first, in a fixed order.
pub(super) fn add_chains(row: &mut [Lanes], vectors: usize) {
    let mut chains = chains(vectors);
    while chains > 1 {
        chains /= 2;
        let (low, high) = row.split_at_mut(chains * vectors);
        for (a, b) in low.iter_mut().zip(high) {
            for i in 0..LANES {
                a[i] += b[i];
            }
        }
    }
}

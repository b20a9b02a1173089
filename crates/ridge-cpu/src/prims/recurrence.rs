//! Linear recurrences whose state is a matrix, token by token.
//!
//! Floor: three operations on each element of the state for each token, five with a part of low rank. The state of a piece
//! (a few heads of a sequence, or some values of one head) stays in the first-level cache while the tokens pass, so memory
//! is read and written once. Tokens are taken one after another, whatever the step, so that prompts in any chunks and single
//! tokens have the same bits.
#![allow(clippy::inline_always)] // what a vector loop calls must compile with the loop's instruction set

use std::ops::Range;

use crate::io::{KernelIo, KernelOutput};
use crate::kernel::{CpuKernel, KernelSpec};
use crate::scratch::Scratch;
use crate::simd::{LANES, exp, fma, sum_lanes, vectorised};

/// Elements of the state that a piece keeps at most, where one head's keys leave a choice.
const ELEMENTS: usize = 4096;
/// Values of a head below which the keys are the lanes.
const FEW_VALUES: usize = 8;
/// Values of a piece at most.
const MAX_VALUES: usize = 4 * LANES;

/// The kernel of [`ridge_graph::Prim::LinearRecurrence`].
pub(super) fn recurrence(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    let [q, _, v, decay, state, ..] = &spec.inputs[..] else { return Err("takes six inputs or eight".into()) };
    let (key, value) = (q.shape[2], v.shape[2]);
    let by_keys = value < FEW_VALUES;
    let padded_key = key.next_multiple_of(LANES);
    let columns = match by_keys {
        true => value.max(1),
        false => (ELEMENTS / key.max(1) / LANES * LANES).clamp(LANES, MAX_VALUES).min(value.next_multiple_of(LANES)),
    };
    let kept = if by_keys { padded_key * columns } else { key * columns };
    Ok(Box::new(Recurrence {
        tokens: q.shape[0],
        rows: state.shape[0],
        groups: q.shape[1],
        heads: v.shape[1],
        key,
        value,
        decays: decay.shape[2],
        low_rank: spec.inputs.len() == 8,
        by_keys,
        padded_key,
        columns,
        heads_together: (ELEMENTS / kept.max(1)).clamp(1, v.shape[1].max(1)),
    }))
}

struct Recurrence {
    tokens: usize,
    rows: usize,
    groups: usize,
    heads: usize,
    key: usize,
    value: usize,
    /// Decays of a head: one, or one of each key.
    decays: usize,
    low_rank: bool,
    /// Are the keys the lanes, rather than the values?
    by_keys: bool,
    padded_key: usize,
    /// Values of a piece.
    columns: usize,
    /// Heads of a piece.
    heads_together: usize,
}

/// The part of the state that a piece computes.
struct Part {
    row: usize,
    heads: Range<usize>,
    columns: Range<usize>,
}

/// A piece's memory: its state, a head's vectors of keys, padded, and one of values.
struct Work<'a> {
    state: &'a mut [f32],
    keys: [&'a mut [f32]; 5],
    values: &'a mut [f32],
}

impl Recurrence {
    fn part(&self, piece: usize) -> Part {
        let blocks = [self.heads.div_ceil(self.heads_together), self.value.div_ceil(self.columns)];
        let (row, block) = (piece / (blocks[0] * blocks[1]), piece % (blocks[0] * blocks[1]));
        let (head, column) = (block / blocks[1] * self.heads_together, block % blocks[1] * self.columns);
        Part {
            row,
            heads: head..(head + self.heads_together).min(self.heads),
            columns: column..(column + self.columns).min(self.value),
        }
    }

    /// Pieces of all rows.
    fn of_rows(&self) -> usize {
        self.rows * self.heads.div_ceil(self.heads_together) * self.value.div_ceil(self.columns)
    }

    /// Elements of a head's state as a piece keeps it: `[keys, columns]`, or `[columns, keys]` where keys are lanes.
    fn kept(&self) -> usize {
        if self.by_keys { self.padded_key * self.columns } else { self.key * self.columns }
    }

    /// Where element (`i`, `column`) of a head's state is among those that the piece keeps.
    fn place(&self, i: usize, column: usize) -> usize {
        if self.by_keys { column * self.padded_key + i } else { i * self.columns + column }
    }

    /// Where row `i` of a head's state begins in memory.
    fn at(&self, part: &Part, head: usize, i: usize) -> usize {
        ((part.row * self.heads + head) * self.key + i) * self.value + part.columns.start
    }

    fn load(&self, io: &KernelIo<'_>, part: &Part, state: &mut [f32]) {
        let from = io.input::<f32>(4);
        state.fill(0.0);
        for (head, kept) in part.heads.clone().zip(state.chunks_exact_mut(self.kept().max(1))) {
            for i in 0..self.key {
                let row = &from[self.at(part, head, i)..][..part.columns.len()];
                row.iter().enumerate().for_each(|(column, x)| kept[self.place(i, column)] = *x);
            }
        }
    }

    fn store(&self, io: &KernelIo<'_>, part: &Part, state: &[f32]) {
        let to = io.output::<f32>(1);
        for (head, kept) in part.heads.clone().zip(state.chunks_exact(self.kept().max(1))) {
            for i in 0..self.key {
                let at = self.at(part, head, i);
                // SAFETY: these heads and columns of the row are this piece's alone.
                let row = unsafe { to.part(at..at + part.columns.len()) };
                row.iter_mut().enumerate().for_each(|(column, x)| *x = kept[self.place(i, column)]);
            }
        }
    }
}

/// Bounds of a row's tokens.
fn tokens_of(starts: &[i32], row: usize, tokens: usize) -> Range<usize> {
    let bound = |i: usize| usize::try_from(starts[i]).unwrap_or(0);
    bound(row)..bound(row + 1).min(tokens)
}

vectorised! {
    /// The tokens `tokens` of a piece.
    fn pass(op: &Recurrence, io: &KernelIo<'_>, part: &Part, tokens: Range<usize>, work: &mut Work<'_>) {
        let y = io.output::<f32>(0);
        let inputs = [0, 1, 2, 3].map(|i| io.input::<f32>(i));
        let low_rank = op.low_rank.then(|| [6, 7].map(|i| io.input::<f32>(i)));
        for token in tokens {
            for (nth, head) in part.heads.clone().enumerate() {
                head_step::<FMA>(op, [token, nth, head], part, inputs, low_rank, y, work);
            }
        }
    }
}

/// One token of one head.
#[inline(always)]
fn head_step<const FMA: bool>(
    op: &Recurrence,
    [token, nth, head]: [usize; 3],
    part: &Part,
    [q, k, v, decay]: [&[f32]; 4],
    low_rank: Option<[&[f32]; 2]>,
    y: KernelOutput<'_, f32>,
    work: &mut Work<'_>,
) {
    let (key, at) = (op.key, token * op.heads + head);
    let of_group = (token * op.groups + head * op.groups / op.heads) * key;
    let Work { state, keys: [wide_q, wide_k, kept, erase, write], values } = work;
    wide_q[..key].copy_from_slice(&q[of_group..][..key]);
    wide_k[..key].copy_from_slice(&k[of_group..][..key]);
    match op.decays {
        1 => kept.fill(exp::<FMA>(decay[at])),
        // What is behind the last key meets zeros, and must be finite.
        _ => {
            kept[key..].fill(0.0);
            kept[..key].copy_from_slice(&decay[at * key..][..key]);
            for lanes in kept.as_chunks_mut::<LANES>().0 {
                for x in lanes {
                    *x = exp::<FMA>(*x);
                }
            }
        }
    }
    if let Some([from, to]) = low_rank {
        erase[..key].copy_from_slice(&from[at * key..][..key]);
        write[..key].copy_from_slice(&to[at * key..][..key]);
    }
    let count = part.columns.len();
    let size = op.kept();
    let state = &mut state[nth * size..][..size];
    let given = &v[at * op.value + part.columns.start..][..count];
    let to = at * op.value + part.columns.start;
    // SAFETY: these columns of this head are this piece's alone.
    let y = unsafe { y.part(to..to + count) };
    let keys = [&**wide_q, &**wide_k, &**kept, &**erase, &**write];
    if op.by_keys {
        for (column, (y, v)) in y.iter_mut().zip(given).enumerate() {
            *y = key_lanes::<FMA>(&mut state[column * op.padded_key..][..op.padded_key], keys, *v, op.low_rank);
        }
        return;
    }
    values[..count].copy_from_slice(given);
    match op.columns / LANES {
        1 => value_lanes::<FMA, 1>(state, keys, values, key, op.low_rank),
        2 => value_lanes::<FMA, 2>(state, keys, values, key, op.low_rank),
        3 => value_lanes::<FMA, 3>(state, keys, values, key, op.low_rank),
        _ => value_lanes::<FMA, 4>(state, keys, values, key, op.low_rank),
    }
    y.copy_from_slice(&values[..count]);
}

/// One column of the state, whose keys are lanes. Gives its `y`.
#[inline(always)]
fn key_lanes<const FMA: bool>(state: &mut [f32], keys: [&[f32]; 5], v: f32, low_rank: bool) -> f32 {
    let [q, k, kept, erase, write] = keys.map(|x| x.as_chunks::<LANES>().0);
    let state = state.as_chunks_mut::<LANES>().0;
    let mut erased = 0.0;
    if low_rank {
        let mut sums = [0f32; LANES];
        for (s, erase) in state.iter().zip(erase) {
            for l in 0..LANES {
                sums[l] = fma::<FMA>(erase[l], s[l], sums[l]);
            }
        }
        erased = sum_lanes(sums);
    }
    let mut sums = [0f32; LANES];
    for (i, s) in state.iter_mut().enumerate() {
        for l in 0..LANES {
            let mut x = s[l] * kept[i][l];
            if low_rank {
                x = fma::<FMA>(write[i][l], erased, x);
            }
            x = fma::<FMA>(k[i][l], v, x);
            s[l] = x;
            sums[l] = fma::<FMA>(q[i][l], x, sums[l]);
        }
    }
    sum_lanes(sums)
}

/// `N` vectors of columns of the state, whose values are lanes; `values` are those of the token, and then its `y`.
#[inline(always)]
fn value_lanes<const FMA: bool, const N: usize>(
    state: &mut [f32],
    [q, k, kept, erase, write]: [&[f32]; 5],
    values: &mut [f32],
    key: usize,
    low_rank: bool,
) {
    let mut v = [[0f32; LANES]; N];
    for (v, given) in v.iter_mut().zip(values.as_chunks::<LANES>().0) {
        *v = *given;
    }
    let rows = state.as_chunks_mut::<LANES>().0.as_chunks_mut::<N>().0;
    let mut erased = [[0f32; LANES]; N];
    if low_rank {
        for (row, erase) in rows.iter().zip(&erase[..key]) {
            for n in 0..N {
                for l in 0..LANES {
                    erased[n][l] = fma::<FMA>(*erase, row[n][l], erased[n][l]);
                }
            }
        }
    }
    let mut sums = [[0f32; LANES]; N];
    for (i, row) in rows.iter_mut().enumerate() {
        let (q, k, kept, write) = (q[i], k[i], kept[i], write[i]);
        for n in 0..N {
            for l in 0..LANES {
                let mut x = row[n][l] * kept;
                if low_rank {
                    x = fma::<FMA>(write, erased[n][l], x);
                }
                x = fma::<FMA>(k, v[n][l], x);
                row[n][l] = x;
                sums[n][l] = fma::<FMA>(q, x, sums[n][l]);
            }
        }
    }
    for (to, sums) in values.as_chunks_mut::<LANES>().0.iter_mut().zip(&sums) {
        *to = *sums;
    }
}

impl CpuKernel for Recurrence {
    /// And one for tokens of no sequence.
    fn pieces(&self) -> usize {
        if self.heads * self.value == 0 { 0 } else { self.of_rows() + 1 }
    }

    fn nanos_per_piece(&self) -> f64 {
        let elements = self.heads_together * self.key * self.columns;
        let tokens = self.tokens as f64 / self.rows.max(1) as f64;
        50.0 + elements as f64 * (1.0 + tokens * if self.low_rank { 0.15 } else { 0.1 })
    }

    fn run(&self, io: &KernelIo<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        let (elements, keys) = (self.kept() * self.heads_together, self.padded_key);
        let [state, q, k, kept, erase, write, values] =
            scratch.slices::<f32, 7>([elements, keys, keys, keys, keys, keys, MAX_VALUES]);
        let starts = io.input::<i32>(5);
        for piece in pieces {
            if piece == self.of_rows() {
                let width = self.heads * self.value;
                let end = usize::try_from(starts[self.rows]).unwrap_or(0).min(self.tokens);
                // SAFETY: the tokens behind those of all sequences are this piece's alone.
                unsafe { io.output::<f32>(0).part(end * width..self.tokens * width) }.fill(0.0);
                continue;
            }
            for buffer in [&mut *q, &mut *k, &mut *kept, &mut *erase, &mut *write, &mut *values] {
                buffer.fill(0.0);
            }
            let part = self.part(piece);
            self.load(io, &part, state);
            let keys = [&mut *q, &mut *k, &mut *kept, &mut *erase, &mut *write];
            let mut work = Work { state: &mut *state, keys, values: &mut *values };
            pass(self, io, &part, tokens_of(starts, part.row, self.tokens), &mut work);
            self.store(io, &part, state);
        }
    }
}

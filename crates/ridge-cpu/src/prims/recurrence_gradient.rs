//! Gradients of linear recurrences whose state is a matrix.
//!
//! A piece is a head of a sequence. States are computed again, never stored for all tokens: a first pass keeps every n-th of n * n
//! tokens, and the states of each stretch between two of them are computed when the sweep from the last token comes to it.
//! The columns of a state depend on each other in nothing but the sums over them, so a piece takes some columns at a time, which
//! stay in the second-level cache, and adds what they give. Keys are the lanes. Sums are in f64: cotangents are differences of large
//! terms, and pass through as many decays as there are tokens. Floor: 12 operations on each element of the
//! state for each token, 26 with a part of low rank.
#![allow(clippy::inline_always)] // what a vector loop calls must compile with the loop's instruction set

use std::ops::Range;

use crate::io::KernelIo;
use crate::kernel::{CpuKernel, KernelSpec};
use crate::scratch::Scratch;
use crate::simd::vectorised;

/// Elements of the state that a piece takes at a time.
const ELEMENTS: usize = 2048;
/// Elements of a vector.
const LANES: usize = 8;

/// The kernel of [`ridge_graph::Prim::LinearRecurrenceGradient`].
pub(super) fn recurrence_gradient(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    let [q, _, v, decay, state, ..] = &spec.inputs[..] else { return Err("takes eight inputs or ten".into()) };
    let padded_key = q.shape[2].next_multiple_of(LANES);
    Ok(Box::new(RecurrenceGradient {
        tokens: q.shape[0],
        rows: state.shape[0],
        groups: q.shape[1],
        heads: v.shape[1],
        key: q.shape[2],
        value: v.shape[2],
        decays: decay.shape[2],
        low_rank: spec.inputs.len() == 10,
        padded_key,
        columns: (ELEMENTS / padded_key.max(1)).clamp(1, v.shape[2].max(1)),
        stretch: (1..).find(|n| n * n >= q.shape[0]).unwrap_or(1).max(1),
    }))
}

struct RecurrenceGradient {
    tokens: usize,
    rows: usize,
    groups: usize,
    heads: usize,
    key: usize,
    value: usize,
    /// Decays of a head: one, or one of each key.
    decays: usize,
    low_rank: bool,
    padded_key: usize,
    /// Columns that are taken at a time.
    columns: usize,
    /// Tokens between two states that the first pass keeps.
    stretch: usize,
}

/// Vectors of keys of a head of a token, padded with zeros: its operands, or what comes to them.
struct Keys<'a> {
    q: &'a mut [f64],
    k: &'a mut [f64],
    /// What stays of each row of the state; what comes to its logarithm.
    kept: &'a mut [f64],
    erase: &'a mut [f64],
    write: &'a mut [f64],
}

/// A piece's memory. A state is `[columns, padded keys]`.
struct Work<'a> {
    keys: Keys<'a>,
    /// Sums over the columns, of a token.
    sums: Keys<'a>,
    /// States that the first pass keeps: before the first token of each stretch.
    firsts: &'a mut [f64],
    /// States before each token of a stretch, and behind its last.
    states: &'a mut [f64],
    /// The cotangent of the state.
    cotangent: &'a mut [f64],
}

/// Some columns of a head of a row.
struct Part {
    row: usize,
    head: usize,
    columns: Range<usize>,
}

impl RecurrenceGradient {
    /// Elements of a state as it is kept.
    fn size(&self) -> usize {
        self.columns * self.padded_key
    }

    /// Five vectors of keys in `room`.
    fn vectors<'a>(&self, room: &'a mut [f64]) -> Keys<'a> {
        let width = self.padded_key;
        let (q, room) = room.split_at_mut(width);
        let (k, room) = room.split_at_mut(width);
        let (kept, room) = room.split_at_mut(width);
        let (erase, write) = room.split_at_mut(width);
        Keys { q, k, kept, erase, write }
    }

    /// Where a vector of keys of a head begins.
    fn at(&self, token: usize, head: usize) -> usize {
        (token * self.heads + head) * self.key
    }

    fn load(&self, io: &KernelIo<'_>, input: usize, part: &Part, state: &mut [f64]) {
        let from = io.input::<f32>(input);
        state.fill(0.0);
        for i in 0..self.key {
            let at = ((part.row * self.heads + part.head) * self.key + i) * self.value;
            let row = &from[at..][part.columns.clone()];
            row.iter().enumerate().for_each(|(column, x)| state[column * self.padded_key + i] = f64::from(*x));
        }
    }

    fn store(&self, io: &KernelIo<'_>, part: &Part, state: &[f64]) {
        for i in 0..self.key {
            let at = ((part.row * self.heads + part.head) * self.key + i) * self.value;
            // SAFETY: this head of the row is this piece's alone.
            let row = unsafe { io.output::<f32>(4).part(at + part.columns.start..at + part.columns.end) };
            row.iter_mut().enumerate().for_each(|(column, x)| *x = state[column * self.padded_key + i] as f32);
        }
    }

    /// Cotangents of tokens in `tokens` of `head` are zeros, but those of `v`.
    fn clear(&self, io: &KernelIo<'_>, tokens: &Range<usize>, head: usize) {
        let outputs: &[(usize, usize)] = match self.low_rank {
            true => &[(0, self.key), (1, self.key), (3, self.decays), (5, self.key), (6, self.key)],
            false => &[(0, self.key), (1, self.key), (3, self.decays)],
        };
        for token in tokens.clone() {
            for (output, width) in outputs {
                let at = (token * self.heads + head) * width;
                // SAFETY: these tokens of this head are this piece's alone.
                unsafe { io.output::<f32>(*output).part(at..at + width) }.fill(0.0);
            }
        }
    }

    /// Adds the sums over some columns to the outputs of a token.
    fn add_sums(&self, io: &KernelIo<'_>, token: usize, head: usize, sums: &Keys<'_>) {
        let add = |output: usize, sums: &[f64]| {
            let at = self.at(token, head);
            // SAFETY: this token of this head is this piece's alone.
            let to = unsafe { io.output::<f32>(output).part(at..at + self.key) };
            to.iter_mut().zip(sums).for_each(|(to, x)| *to += *x as f32);
        };
        add(0, sums.q);
        add(1, sums.k);
        if self.low_rank {
            add(5, sums.erase);
            add(6, sums.write);
        }
        if self.decays == 1 {
            let at = token * self.heads + head;
            // SAFETY: as above.
            let to = unsafe { io.output::<f32>(3).part(at..at + 1) };
            to[0] += sums.kept.iter().sum::<f64>() as f32;
        } else {
            add(3, sums.kept);
        }
    }
}

/// Bounds of a row's tokens.
fn tokens_of(starts: &[i32], row: usize, tokens: usize) -> Range<usize> {
    let bound = |i: usize| usize::try_from(starts[i]).unwrap_or(0);
    bound(row)..bound(row + 1).min(tokens)
}

vectorised! {
    /// Some columns of a piece.
    fn pass(op: &RecurrenceGradient, io: &KernelIo<'_>, part: &Part, tokens: Range<usize>, work: &mut Work<'_>) {
        let size = op.size();
        let Work { keys, sums, firsts, states, cotangent } = work;
        op.load(io, 4, part, &mut states[..size]);
        for token in tokens.clone() {
            let nth = token - tokens.start;
            if nth.is_multiple_of(op.stretch) {
                firsts[nth / op.stretch * size..][..size].copy_from_slice(&states[..size]);
            }
            load_keys(op, io, token, part.head, keys);
            advance::<FMA>(op, io, token, part, keys, &mut states[..size]);
        }
        op.load(io, io_cotangent(op), part, cotangent);
        let stretches = tokens.len().div_ceil(op.stretch);
        for stretch in (0..stretches).rev() {
            let from = tokens.start + stretch * op.stretch;
            let of_stretch = from..(from + op.stretch).min(tokens.end);
            states[..size].copy_from_slice(&firsts[stretch * size..][..size]);
            for token in of_stretch.clone() {
                let at = (token - from) * size;
                states.copy_within(at..at + size, at + size);
                load_keys(op, io, token, part.head, keys);
                advance::<FMA>(op, io, token, part, keys, &mut states[at + size..][..size]);
            }
            for token in of_stretch.rev() {
                load_keys(op, io, token, part.head, keys);
                let (before, after) = states[(token - from) * size..][..2 * size].split_at(size);
                go_back::<FMA>(op, io, token, part, keys, [before, after], cotangent, sums);
                op.add_sums(io, token, part.head, sums);
            }
        }
        op.store(io, part, cotangent);
    }
}

/// The input that is the cotangent of the state behind the step.
#[inline(always)]
fn io_cotangent(op: &RecurrenceGradient) -> usize {
    if op.low_rank { 9 } else { 7 }
}

#[inline(always)]
fn load_keys(op: &RecurrenceGradient, io: &KernelIo<'_>, token: usize, head: usize, keys: &mut Keys<'_>) {
    let (key, at) = (op.key, op.at(token, head));
    let of_group = (token * op.groups + head * op.groups / op.heads) * key;
    let widen = |to: &mut [f64], from: &[f32]| to.iter_mut().zip(from).for_each(|(to, x)| *to = f64::from(*x));
    widen(keys.q, &io.input::<f32>(0)[of_group..][..key]);
    widen(keys.k, &io.input::<f32>(1)[of_group..][..key]);
    let rates = io.input::<f32>(3);
    if op.decays == 1 {
        keys.kept.fill(f64::from(rates[token * op.heads + head]).exp());
    } else {
        // What is behind the last key is 0, and meets zeros.
        keys.kept.iter_mut().zip(&rates[at..][..key]).for_each(|(kept, rate)| *kept = f64::from(*rate).exp());
    }
    if op.low_rank {
        widen(keys.erase, &io.input::<f32>(6)[at..][..key]);
        widen(keys.write, &io.input::<f32>(7)[at..][..key]);
    }
}

/// `a b + c`.
#[inline(always)]
fn fma<const FMA: bool>(a: f64, b: f64, c: f64) -> f64 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// `x^T y` of vectors of keys.
#[inline(always)]
fn dot<const FMA: bool>(x: &[[f64; LANES]], y: &[[f64; LANES]]) -> f64 {
    let mut sums = [0f64; LANES];
    for (x, y) in x.iter().zip(y) {
        for l in 0..LANES {
            sums[l] = fma::<FMA>(x[l], y[l], sums[l]);
        }
    }
    sums.iter().sum()
}

#[inline(always)]
fn lanes(x: &[f64]) -> &[[f64; LANES]] {
    x.as_chunks::<LANES>().0
}

#[inline(always)]
fn lanes_mut(x: &mut [f64]) -> &mut [[f64; LANES]] {
    x.as_chunks_mut::<LANES>().0
}

/// The state behind a token, from that before it.
#[inline(always)]
fn advance<const FMA: bool>(
    op: &RecurrenceGradient,
    io: &KernelIo<'_>,
    token: usize,
    part: &Part,
    keys: &Keys<'_>,
    state: &mut [f64],
) {
    let v = &io.input::<f32>(2)[(token * op.heads + part.head) * op.value..][part.columns.clone()];
    let (k, kept, erase, write) = (lanes(keys.k), lanes(keys.kept), lanes(keys.erase), lanes(keys.write));
    for (s, v) in state.chunks_exact_mut(op.padded_key.max(1)).zip(v) {
        let s = lanes_mut(s);
        let erased = if op.low_rank { dot::<FMA>(erase, s) } else { 0.0 };
        for (i, s) in s.iter_mut().enumerate() {
            for l in 0..LANES {
                let mut x = s[l] * kept[i][l];
                if op.low_rank {
                    x = fma::<FMA>(write[i][l], erased, x);
                }
                s[l] = fma::<FMA>(k[i][l], f64::from(*v), x);
            }
        }
    }
}

/// The cotangents of a token's operands, those of keys summed over the columns, and that of the state before it.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn go_back<const FMA: bool>(
    op: &RecurrenceGradient,
    io: &KernelIo<'_>,
    token: usize,
    part: &Part,
    keys: &Keys<'_>,
    [before, after]: [&[f64]; 2],
    cotangent: &mut [f64],
    sums: &mut Keys<'_>,
) {
    let of_values = (token * op.heads + part.head) * op.value;
    let v = &io.input::<f32>(2)[of_values..][part.columns.clone()];
    let dy = &io.input::<f32>(io_cotangent(op) - 1)[of_values..][part.columns.clone()];
    // SAFETY: these columns of this head are this piece's alone.
    let dv = unsafe { io.output::<f32>(2).part(of_values + part.columns.start..of_values + part.columns.end) };
    let [q, k, kept] = [&*keys.q, &*keys.k, &*keys.kept].map(lanes);
    let [erase, write] = [&*keys.erase, &*keys.write].map(lanes);
    for sum in [&mut *sums.q, &mut *sums.k, &mut *sums.kept, &mut *sums.erase, &mut *sums.write] {
        sum.fill(0.0);
    }
    let (sum_q, sum_k, sum_decay) = (lanes_mut(sums.q), lanes_mut(sums.k), lanes_mut(sums.kept));
    let (sum_erase, sum_write) = (lanes_mut(sums.erase), lanes_mut(sums.write));
    let width = op.padded_key;
    for (column, ((v, dy), dv)) in v.iter().zip(dy).zip(dv).enumerate() {
        let (v, dy) = (f64::from(*v), f64::from(*dy));
        let g = lanes_mut(&mut cotangent[column * width..][..width]);
        let [before, after] = [before, after].map(|state| lanes(&state[column * width..][..width]));
        for (g, q) in g.iter_mut().zip(q) {
            for l in 0..LANES {
                g[l] = fma::<FMA>(q[l], dy, g[l]);
            }
        }
        *dv = dot::<FMA>(g, k) as f32;
        let (erased, back) = if op.low_rank { (dot::<FMA>(erase, before), dot::<FMA>(write, g)) } else { (0.0, 0.0) };
        for i in 0..g.len() {
            for l in 0..LANES {
                let x = g[i][l];
                sum_q[i][l] = fma::<FMA>(after[i][l], dy, sum_q[i][l]);
                sum_k[i][l] = fma::<FMA>(x, v, sum_k[i][l]);
                sum_decay[i][l] = fma::<FMA>(x, before[i][l], sum_decay[i][l]);
                let mut next = x * kept[i][l];
                if op.low_rank {
                    sum_erase[i][l] = fma::<FMA>(before[i][l], back, sum_erase[i][l]);
                    sum_write[i][l] = fma::<FMA>(x, erased, sum_write[i][l]);
                    next = fma::<FMA>(erase[i][l], back, next);
                }
                g[i][l] = next;
            }
        }
    }
    for (sum, kept) in sum_decay.iter_mut().zip(kept) {
        for l in 0..LANES {
            sum[l] *= kept[l];
        }
    }
}

impl CpuKernel for RecurrenceGradient {
    /// And one for tokens of no sequence.
    fn pieces(&self) -> usize {
        if self.heads == 0 { 0 } else { self.rows * self.heads + 1 }
    }

    fn nanos_per_piece(&self) -> f64 {
        let tokens = self.tokens as f64 / self.rows.max(1) as f64;
        let each = if self.low_rank { 0.8 } else { 0.4 };
        50.0 + tokens * (30.0 + (self.padded_key * self.value) as f64 * each)
    }

    fn run(&self, io: &KernelIo<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        let (size, keys) = (self.size(), self.padded_key);
        let (firsts, states) = (self.stretch * size, (self.stretch + 1) * size);
        let [vectors, firsts, states, cotangent] = scratch.slices::<f64, 4>([10 * keys, firsts, states, size]);
        let starts = io.input::<i32>(5);
        for piece in pieces {
            if piece == self.rows * self.heads {
                let end = usize::try_from(starts[self.rows]).unwrap_or(0).min(self.tokens);
                let behind = end..self.tokens;
                (0..self.heads).for_each(|head| self.clear(io, &behind, head));
                let width = self.heads * self.value;
                // SAFETY: the tokens behind those of all sequences are this piece's alone.
                unsafe { io.output::<f32>(2).part(end * width..self.tokens * width) }.fill(0.0);
                continue;
            }
            let (row, head) = (piece / self.heads, piece % self.heads);
            let tokens = tokens_of(starts, row, self.tokens);
            self.clear(io, &tokens, head);
            for first in (0..self.value).step_by(self.columns) {
                let part = Part { row, head, columns: first..(first + self.columns).min(self.value) };
                let (keys, sums) = vectors.split_at_mut(5 * self.padded_key);
                keys.fill(0.0);
                let mut work = Work {
                    keys: self.vectors(keys),
                    sums: self.vectors(sums),
                    firsts: &mut *firsts,
                    states: &mut *states,
                    cotangent: &mut *cotangent,
                };
                pass(self, io, &part, tokens.clone(), &mut work);
            }
        }
    }
}

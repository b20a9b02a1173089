//! The forward pass: for a block of queries, span by span of keys with a running maximum.

use std::ops::Range;

use super::call::{Attention, PIECE, SPAN};
use super::dropping::Dropping;
use super::spans::{SequenceRun, keys_of, mask, runs, seen, spans};
use crate::io::KernelIo;
use crate::kernel::CpuKernel;
use crate::scratch::Scratch;
use crate::simd;

pub(super) struct Forward {
    pub(super) attention: Attention,
    /// Gives logarithms of sums too.
    pub(super) saving: bool,
}

/// Memory of a thread.
struct Room<'a> {
    /// Packed queries, shares, keys and values.
    q: &'a mut [u32],
    shares: &'a mut [u32],
    keys: &'a mut [u32],
    values: &'a mut [u32],
    scores: &'a mut [f32],
    out: &'a mut [f32],
    /// Largest score and sum of each query.
    largest: &'a mut [f32],
    total: &'a mut [f32],
}

impl CpuKernel for Forward {
    fn pieces(&self) -> usize {
        self.attention.pieces()
    }

    fn nanos_per_piece(&self) -> f64 {
        self.attention.nanos(2.0)
    }

    fn run(&self, io: &KernelIo<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        let a = &self.attention;
        let (rows, width, span) = (a.tile.rows(PIECE), a.tile.columns(a.dim), a.tile.columns(SPAN));
        let sizes = [rows * a.dim, rows * SPAN, span * a.dim, width * SPAN, rows * span, rows * width, rows, rows];
        let [q, shares, keys, values, scores, out, largest, total] = scratch.slices::<u32, 8>(sizes);
        let [scores, out, largest, total] = [scores, out, largest, total].map(as_floats);
        let mut room = Room { q, shares, keys, values, scores, out, largest, total };
        let ids = &io.input::<i32>(3)[..a.tokens];
        let dropping = Dropping::new(io, a.dropout, 4);
        for piece in pieces {
            let (head, block) = (piece / a.blocks(), piece % a.blocks());
            let tokens = block * PIECE..((block + 1) * PIECE).min(a.tokens);
            for head in head * a.group()..(head + 1) * a.group() {
                self.pad(io, ids, head, tokens.clone(), room.out);
                for run in runs(ids, tokens.clone()) {
                    simd::with_element!(a.dtype, T => self.attend::<T>(io, (ids, dropping), head, &run, &mut room));
                }
            }
        }
    }
}

/// Words as f32.
pub(super) fn as_floats(words: &mut [u32]) -> &mut [f32] {
    // SAFETY: of one size and alignment, and any bits are an f32.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), words.len()) }
}

impl Forward {
    /// Zeros for padding.
    fn pad(&self, io: &KernelIo<'_>, ids: &[i32], head: usize, tokens: Range<usize>, zeros: &mut [f32]) {
        let a = &self.attention;
        for token in tokens.filter(|token| ids[*token] < 0) {
            zeros[..a.dim].fill(0.0);
            self.finish(io, token, head, &zeros[..a.dim], 0.0);
        }
    }

    fn finish(&self, io: &KernelIo<'_>, token: usize, head: usize, y: &[f32], lse: f32) {
        let a = &self.attention;
        let at = token * a.heads + head;
        // SAFETY: this head of this token is this piece's alone.
        unsafe {
            simd::store(io, 0, a.dtype, at * a.dim, y);
            if self.saving {
                io.output::<f32>(1).part(at..at + 1)[0] = lse;
            }
        }
    }

    fn attend<T: simd::Element>(
        &self,
        io: &KernelIo<'_>,
        (ids, dropping): (&[i32], Option<Dropping<'_>>),
        head: usize,
        run: &SequenceRun,
        room: &mut Room<'_>,
    ) {
        let a = &self.attention;
        let (kv_head, count, id) = (head / a.group(), run.tokens.len(), ids[run.tokens.start]);
        let (width, stride) = (a.tile.columns(a.dim), a.tile.columns(SPAN));
        let first = a.at(a.heads, run.tokens.start, head);
        a.tile.pack_a(&io.input::<T>(0)[first..], a.by_token(a.heads, count), a.dim, room.q);
        room.out[..a.tile.rows(count) * width].fill(0.0);
        room.largest[..count].fill(f32::NEG_INFINITY);
        room.total[..count].fill(0.0);
        for span in spans(&run.sequence, &keys_of(&a.op, run)) {
            let (keys, at) = (span.len(), a.at(a.kv_heads, span.start, kv_head));
            a.tile.pack_b(&io.input::<T>(1)[at..], a.by_token(a.kv_heads, keys), a.dim, room.keys);
            a.tile.pack_b(&io.input::<T>(2)[at..], a.by_element(a.kv_heads), keys, room.values);
            let rows = a.rows_seeing(&run.tokens, &span);
            a.tile.multiply(a.dim, [&*room.q, &*room.keys], (rows.clone(), keys), room.scores, stride, false);
            for row in rows.clone() {
                let query = run.tokens.start + row;
                let scores = &mut room.scores[row * stride..][..keys];
                a.scale(scores);
                mask(scores, &ids[span.clone()], id, &seen(&a.op, query, &span), f32::NEG_INFINITY);
                let (before, here) = (room.largest[row], simd::max(scores));
                let largest = if here > before { here } else { before };
                if largest == f32::NEG_INFINITY {
                    scores.fill(0.0);
                    continue;
                }
                room.largest[row] = largest;
                let kept = if before == f32::NEG_INFINITY { 0.0 } else { (before - largest).exp() };
                let sum = simd::exp_sum(scores, largest);
                room.total[row] = room.total[row] * kept + sum;
                if let Some(dropping) = &dropping {
                    dropping.row(head, query, span.clone(), scores);
                }
                if kept != 1.0 {
                    simd::scale(&mut room.out[row * width..][..a.dim], kept);
                }
            }
            a.tile.pack_computed(&room.scores[rows.start * stride..], rows.len(), stride, keys, room.shares);
            let out = &mut room.out[rows.start * width..];
            a.tile.multiply(keys, [&*room.shares, &*room.values], (0..rows.len(), a.dim), out, width, true);
        }
        for (row, token) in run.tokens.clone().enumerate() {
            let (y, total) = (&mut room.out[row * width..][..a.dim], room.total[row]);
            let empty = total == 0.0;
            // One rounding, where a product with the inverse would have two.
            y.iter_mut().for_each(|y| *y = if empty { 0.0 } else { *y / total });
            self.finish(io, token, head, y, if empty { 0.0 } else { total.ln() + room.largest[row] });
        }
    }
}

impl Attention {
    /// From products to scores.
    fn scale(&self, scores: &mut [f32]) {
        simd::scale(scores, self.op.scale as f32);
        if let Some(cap) = self.op.softcap {
            let cap = cap as f32;
            scores.iter_mut().for_each(|x| *x = cap * (*x / cap).tanh());
        }
    }
}

//! The gradient: for a block of tokens, first the cotangents of its queries over spans of keys, then those of its keys and
//! values over spans of queries.

use std::ops::Range;

use ridge_graph::DType;

use super::call::{Attention, PIECE, SPAN};
use super::dropping::Dropping;
use super::forward::as_floats;
use super::spans::{SequenceRun, keys_of, mask, queries_of, runs, seeing, seen, spans};
use crate::io::KernelIo;
use crate::kernel::CpuKernel;
use crate::scratch::Scratch;
use crate::simd::{self, LANES, vectorised};

pub(super) struct Backward(pub(super) Attention);

/// Inputs.
const Q: usize = 0;
const K: usize = 1;
const V: usize = 2;
const Y: usize = 4;
const LSE: usize = 5;

impl Attention {
    /// The input that is the cotangent of the output; key and heads of dropout are before it.
    fn dy(&self) -> usize {
        if self.has_key { LSE + 3 } else { LSE + 1 }
    }
}

/// Memory of a thread. The block's own tokens are rows of A; the span's are columns of B, by token for products of
/// scores, and by element for what is summed over the span.
struct Room<'a> {
    own: [&'a mut [u32]; 2],
    by_token: [&'a mut [u32]; 2],
    by_element: [&'a mut [u32]; 2],
    packed: &'a mut [u32],
    scores: &'a mut [f32],
    dshares: &'a mut [f32],
    sums: [&'a mut [f32]; 2],
    /// `sum(dy * y)` and logarithms of sums, of a query each.
    along: &'a mut [f32],
    lse: &'a mut [f32],
    line: [&'a mut [f32]; 2],
}

impl CpuKernel for Backward {
    fn pieces(&self) -> usize {
        self.0.pieces()
    }

    fn nanos_per_piece(&self) -> f64 {
        self.0.nanos(7.0)
    }

    fn run(&self, io: &KernelIo<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        let a = &self.0;
        let (rows, width, span) = (a.tile.rows(PIECE), a.tile.columns(a.dim), a.tile.columns(SPAN));
        let [own, by_token, by_element, tile] = [rows * a.dim, span * a.dim, width * SPAN, rows * span];
        let sizes = [
            own,
            own,
            by_token,
            by_token,
            by_element,
            by_element,
            rows * SPAN,
            tile,
            tile,
            rows * width,
            rows * width,
            rows,
            rows,
            a.dim,
            a.dim,
        ];
        let [o0, o1, t0, t1, e0, e1, packed, rest @ ..] = scratch.slices::<u32, 15>(sizes);
        let [scores, dshares, s0, s1, along, lse, l0, l1] = rest.map(as_floats);
        let mut room = Room {
            own: [o0, o1],
            by_token: [t0, t1],
            by_element: [e0, e1],
            packed,
            scores,
            dshares,
            sums: [s0, s1],
            along,
            lse,
            line: [l0, l1],
        };
        let ids = &io.input::<i32>(3)[..a.tokens];
        let dropping = Dropping::new(io, a.dropout, LSE + 1);
        for piece in pieces {
            let (head, block) = (piece / a.blocks(), piece % a.blocks());
            let tokens = block * PIECE..((block + 1) * PIECE).min(a.tokens);
            self.pad(io, ids, head, tokens.clone(), room.line[0]);
            for run in runs(ids, tokens) {
                simd::with_element!(a.dtype, T => {
                    for head in head * a.group()..(head + 1) * a.group() {
                        self.queries::<T>(io, (ids, dropping), head, &run, &mut room);
                    }
                    self.keys::<T>(io, (ids, dropping), head, &run, &mut room);
                });
            }
        }
    }
}

vectorised! {
    /// `scores`, from logarithms to shares: `e^(score - lse)`; and `dshares` to the cotangents of products,
    /// `share (dshare - along) scale`.
    fn row_gradient(scores: &mut [f32], dshares: &mut [f32], lse: f32, along: f32, scale: f32) {
        for (score, dshare) in scores.iter_mut().zip(dshares) {
            *score = simd::exp::<FMA>(*score - lse);
            *dshare = *score * (*dshare - along) * scale;
        }
    }
}

vectorised! {
    /// The same for a column of tokens, each with its own logarithm.
    fn column_gradient(scores: &mut [f32], dshares: &mut [f32], lse: &[f32], along: &[f32], scale: f32) {
        for (((score, dshare), lse), along) in scores.iter_mut().zip(dshares).zip(lse).zip(along) {
            *score = simd::exp::<FMA>(*score - lse);
            *dshare = *score * (*dshare - along) * scale;
        }
    }
}

vectorised! {
    /// The inner product, summed in f64.
    fn dot_in_f64(x: &[f32], y: &[f32]) -> f64 {
        let mut lanes = [0f64; LANES];
        let ((x, rest), (y, rest_of_y)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
        for (x, y) in x.iter().zip(y) {
            for i in 0..LANES {
                lanes[i] += f64::from(x[i]) * f64::from(y[i]);
            }
        }
        let rest: f64 = rest.iter().zip(rest_of_y).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum();
        lanes.iter().sum::<f64>() + rest
    }
}

/// `dshares` times the slopes of a cap.
fn bend(dshares: &mut [f32], slopes: &[f32]) {
    for (dshare, slope) in dshares.iter_mut().zip(slopes) {
        *dshare *= slope;
    }
}

impl Backward {
    /// Zeros for padding.
    fn pad(&self, io: &KernelIo<'_>, ids: &[i32], kv_head: usize, tokens: Range<usize>, zeros: &mut [f32]) {
        let a = &self.0;
        zeros.fill(0.0);
        for token in tokens.filter(|token| ids[*token] < 0) {
            // SAFETY: these heads of this token are this piece's alone.
            unsafe {
                for head in kv_head * a.group()..(kv_head + 1) * a.group() {
                    simd::store(io, 0, a.dtype, a.at(a.heads, token, head), zeros);
                }
                for output in [1, 2] {
                    simd::store(io, output, a.dtype, a.at(a.kv_heads, token, kv_head), zeros);
                }
            }
        }
    }

    /// `sum(dy * y)` and logarithms of sums of the tokens of one head.
    fn statistics(&self, io: &KernelIo<'_>, head: usize, tokens: Range<usize>, room: &mut Room<'_>) {
        let a = &self.0;
        let lse = io.input::<f32>(LSE);
        for (row, token) in tokens.enumerate() {
            let at = a.at(a.heads, token, head);
            let [y, dy] = &mut room.line;
            let (y, dy) = (simd::view(io, Y, a.dtype, at, y), simd::view(io, a.dy(), a.dtype, at, dy));
            // Rounded once, as a share's cotangent in f32: what they have in common cancels.
            room.along[row] = dot_in_f64(y, dy) as f32;
            room.lse[row] = lse[token * a.heads + head];
        }
    }

    /// Caps `scores`, if there is a cap. Gives its slope at each: near the cap that is a small difference, so it is computed
    /// in f64.
    fn cap(&self, scores: &mut [f32]) -> Option<Vec<f32>> {
        let cap = self.0.op.softcap?;
        let capped = |score: &mut f32| {
            let bent = (f64::from(*score) / cap).tanh();
            *score = (cap * bent) as f32;
            (1.0 - bent * bent) as f32
        };
        Some(scores.iter_mut().map(capped).collect())
    }

    fn queries<T: simd::Element>(
        &self,
        io: &KernelIo<'_>,
        (ids, dropping): (&[i32], Option<Dropping<'_>>),
        head: usize,
        run: &SequenceRun,
        room: &mut Room<'_>,
    ) {
        let a = &self.0;
        let (kv_head, count, id) = (head / a.group(), run.tokens.len(), ids[run.tokens.start]);
        let (width, stride, scale) = (a.tile.columns(a.dim), a.tile.columns(SPAN), a.op.scale as f32);
        self.statistics(io, head, run.tokens.clone(), room);
        let first = a.at(a.heads, run.tokens.start, head);
        for (input, to) in [Q, a.dy()].into_iter().zip(&mut room.own) {
            a.tile.pack_a(&io.input::<T>(input)[first..], a.by_token(a.heads, count), a.dim, to);
        }
        room.sums[0][..a.tile.rows(count) * width].fill(0.0);
        for span in spans(&run.sequence, &keys_of(&a.op, run)) {
            let (keys, at) = (span.len(), a.at(a.kv_heads, span.start, kv_head));
            for (input, to) in [K, V].into_iter().zip(&mut room.by_token) {
                a.tile.pack_b(&io.input::<T>(input)[at..], a.by_token(a.kv_heads, keys), a.dim, to);
            }
            a.tile.pack_b(&io.input::<T>(K)[at..], a.by_element(a.kv_heads), keys, room.by_element[0]);
            let rows = a.rows_seeing(&run.tokens, &span);
            self.score(rows.clone(), keys, room);
            for row in rows.clone() {
                let query = run.tokens.start + row;
                let scores = &mut room.scores[row * stride..][..keys];
                let dshares = &mut room.dshares[row * stride..][..keys];
                let slopes = self.cap(scores);
                mask(scores, &ids[span.clone()], id, &seen(&a.op, query, &span), f32::NEG_INFINITY);
                if let Some(dropping) = &dropping {
                    dropping.row(head, query, span.clone(), dshares);
                }
                row_gradient(scores, dshares, room.lse[row], room.along[row], scale);
                if let Some(slopes) = slopes {
                    bend(dshares, &slopes);
                }
            }
            a.tile.pack_computed(&room.dshares[rows.start * stride..], rows.len(), stride, keys, room.packed);
            let (of, sums) = ([&*room.packed, &*room.by_element[0]], &mut room.sums[0][rows.start * width..]);
            a.tile.multiply(keys, of, (0..rows.len(), a.dim), sums, width, true);
        }
        for (row, token) in run.tokens.clone().enumerate() {
            // SAFETY: this head of this token is this piece's alone.
            unsafe { simd::store(io, 0, a.dtype, a.at(a.heads, token, head), &room.sums[0][row * width..][..a.dim]) };
        }
    }

    /// Products of the block's tokens with the span's: of scores, and of cotangents with values. Both meet what is nearly
    /// as large, so where f32 is all that is asked for they are summed in f64.
    fn score(&self, rows: Range<usize>, others: usize, room: &mut Room<'_>) {
        let a = &self.0;
        let (stride, scale) = (a.tile.columns(SPAN), a.op.scale as f32);
        let [own, other] = [&room.own, &room.by_token];
        let of = |nth: usize| [&*own[nth], &*other[nth]];
        if a.dtype == DType::F32 {
            a.tile.multiply_exactly(a.dim, of(0), (rows.clone(), others), room.scores, stride, scale);
            a.tile.multiply_exactly(a.dim, of(1), (rows, others), room.dshares, stride, 1.0);
        } else {
            a.tile.multiply(a.dim, of(0), (rows.clone(), others), room.scores, stride, false);
            a.tile.multiply(a.dim, of(1), (rows.clone(), others), room.dshares, stride, false);
            for row in room.scores.chunks_exact_mut(stride).take(rows.end).skip(rows.start) {
                simd::scale(&mut row[..others], scale);
            }
        }
    }

    fn keys<T: simd::Element>(
        &self,
        io: &KernelIo<'_>,
        (ids, dropping): (&[i32], Option<Dropping<'_>>),
        kv_head: usize,
        run: &SequenceRun,
        room: &mut Room<'_>,
    ) {
        let a = &self.0;
        let (count, id) = (run.tokens.len(), ids[run.tokens.start]);
        let (width, stride, scale) = (a.tile.columns(a.dim), a.tile.columns(SPAN), a.op.scale as f32);
        let first = a.at(a.kv_heads, run.tokens.start, kv_head);
        for (input, to) in [K, V].into_iter().zip(&mut room.own) {
            a.tile.pack_a(&io.input::<T>(input)[first..], a.by_token(a.kv_heads, count), a.dim, to);
        }
        room.sums.iter_mut().for_each(|sums| sums[..a.tile.rows(count) * width].fill(0.0));
        for head in kv_head * a.group()..(kv_head + 1) * a.group() {
            for span in spans(&run.sequence, &queries_of(&a.op, run)) {
                let (queries, at) = (span.len(), a.at(a.heads, span.start, head));
                self.statistics(io, head, span.clone(), room);
                for (i, input) in [Q, a.dy()].into_iter().enumerate() {
                    let from = &io.input::<T>(input)[at..];
                    a.tile.pack_b(from, a.by_token(a.heads, queries), a.dim, room.by_token[i]);
                    a.tile.pack_b(from, a.by_element(a.heads), queries, room.by_element[i]);
                }
                let rows = a.rows_seen(&run.tokens, &span);
                self.score(rows.clone(), queries, room);
                for (row, key) in rows.clone().zip(run.tokens.clone()) {
                    let scores = &mut room.scores[row * stride..][..queries];
                    let dshares = &mut room.dshares[row * stride..][..queries];
                    let slopes = self.cap(scores);
                    mask(scores, &ids[span.clone()], id, &seeing(&a.op, key, &span), f32::NEG_INFINITY);
                    if let Some(dropping) = &dropping {
                        dropping.column(head, key, span.clone(), dshares);
                    }
                    column_gradient(scores, dshares, room.lse, room.along, scale);
                    if let Some(dropping) = &dropping {
                        dropping.column(head, key, span.clone(), scores);
                    }
                    if let Some(slopes) = slopes {
                        bend(dshares, &slopes);
                    }
                }
                for (i, from) in [&room.dshares, &room.scores].into_iter().enumerate() {
                    a.tile.pack_computed(from, rows.len(), stride, queries, room.packed);
                    let (of, sums) = ([&*room.packed, &*room.by_element[i]], &mut room.sums[i]);
                    a.tile.multiply(queries, of, (rows.clone(), a.dim), sums, width, true);
                }
            }
        }
        for (row, token) in run.tokens.clone().enumerate() {
            for (output, sums) in [1, 2].into_iter().zip(&room.sums) {
                let at = a.at(a.kv_heads, token, kv_head);
                // SAFETY: this head of this token is this piece's alone.
                unsafe { simd::store(io, output, a.dtype, at, &sums[row * width..][..a.dim]) };
            }
        }
    }
}

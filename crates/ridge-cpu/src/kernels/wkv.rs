//! The weighted average of RWKV-4, token by token.
//!
//! Floor: keys and values read and the output written once; four exponentials for each of them. A piece has some channels of a
//! sequence, whose sums stay in registers or the first-level cache while the tokens pass. The largest exponent is kept as the key
//! that it comes from and how many tokens ago, so that it is rounded once, and prompts in any chunks have the same bits.
#![allow(clippy::inline_always)] // what a vector loop calls must compile with the loop's instruction set

use std::ops::Range;

use crate::io::KernelIo;
use crate::kernel::{CpuKernel, KernelEntry, KernelSpec};
use crate::scratch::Scratch;
use crate::simd::{LANES, exp, fma, vectorised};

pub(super) fn entries() -> [KernelEntry; 1] {
    [KernelEntry::new("wkv", "wkv(k, v, w, u, state, seq_ids, query_start)", |_| true, make)]
}

/// Channels of a piece.
const CHANNELS: usize = 4 * LANES;
/// The largest exponent where there was no token, as the op has it.
const LOWEST: f32 = -1e30;

struct Wkv {
    tokens: usize,
    rows: usize,
    channels: usize,
}

/// What a piece keeps of its channels. Lanes behind the last channel hold zeros.
struct Sums {
    with: [f32; CHANNELS],
    without: [f32; CHANNELS],
    /// The key of the largest exponent, and the tokens since.
    key: [f32; CHANNELS],
    age: [f32; CHANNELS],
}

fn make(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    let [k, _, _, _, state, ..] = &spec.inputs[..] else { return Err("takes seven inputs".into()) };
    Ok(Box::new(Wkv { tokens: k.shape[0], rows: state.shape[0], channels: k.shape[1] }))
}

/// Some channels from `at` on, in lanes.
fn lanes(from: &[f32], at: usize, count: usize) -> [f32; CHANNELS] {
    let mut lanes = [0.0; CHANNELS];
    lanes[..count].copy_from_slice(&from[at..][..count]);
    lanes
}

vectorised! {
    /// The tokens `tokens` of a piece, whose channels begin with `first`.
    fn pass(op: &Wkv, io: &KernelIo<'_>, tokens: Range<usize>, channels: Range<usize>, sums: &mut Sums) {
        let (first, count) = (channels.start, channels.len());
        let [w, u] = [2, 3].map(|input| lanes(io.input::<f32>(input), first, count));
        let [k, v] = [0, 1].map(|input| io.input::<f32>(input));
        for token in tokens {
            let at = token * op.channels + first;
            let y = step::<FMA>(sums, [&lanes(k, at, count), &lanes(v, at, count), &w, &u]);
            // SAFETY: these channels of this row's tokens are this piece's alone.
            unsafe { io.output::<f32>(0).part(at..at + count) }.copy_from_slice(&y[..count]);
        }
    }
}

/// One token: gives its `y`.
#[inline(always)]
fn step<const FMA: bool>(sums: &mut Sums, [k, v, w, u]: [&[f32; CHANNELS]; 4]) -> [f32; CHANNELS] {
    let mut y = [0.0; CHANNELS];
    for i in 0..CHANNELS {
        let (with, without) = (sums.with[i], sums.without[i]);
        let largest = fma::<FMA>(sums.age[i], w[i], sums.key[i]);
        let own = k[i] + u[i];
        let most = if largest > own { largest } else { own };
        let (before, now) = (exp::<FMA>(largest - most), exp::<FMA>(own - most));
        y[i] = fma::<FMA>(before, with, now * v[i]) / fma::<FMA>(before, without, now);

        let age = sums.age[i] + 1.0;
        let decayed = fma::<FMA>(age, w[i], sums.key[i]);
        let stays = decayed > k[i];
        // Of the two, the larger has the exponent of the sums.
        let apart = exp::<FMA>(if stays { k[i] - decayed } else { decayed - k[i] });
        let (before, now) = if stays { (1.0, apart) } else { (apart, 1.0) };
        sums.with[i] = fma::<FMA>(before, with, now * v[i]);
        sums.without[i] = fma::<FMA>(before, without, now);
        sums.key[i] = if stays { sums.key[i] } else { k[i] };
        sums.age[i] = if stays { age } else { 0.0 };
    }
    y
}

impl Wkv {
    fn blocks(&self) -> usize {
        self.channels.div_ceil(CHANNELS)
    }

    /// The tokens of a row for channels from `first` on, of which there are `count`.
    fn run_row(&self, io: &KernelIo<'_>, row: usize, first: usize, count: usize) {
        let place = |part: usize| (row * 4 + part) * self.channels + first;
        let [with, without, mut key, age] = [0, 1, 2, 3].map(|part| lanes(io.input::<f32>(4), place(part), count));
        for (key, without) in key.iter_mut().zip(&without) {
            if *without == 0.0 {
                *key = LOWEST;
            }
        }
        let mut sums = Sums { with, without, key, age };
        let starts = io.input::<i32>(6);
        let bound = |i: usize| usize::try_from(starts[i]).unwrap_or(0).min(self.tokens);
        pass(self, io, bound(row)..bound(row + 1), first..first + count, &mut sums);
        for (part, sums) in [&sums.with, &sums.without, &sums.key, &sums.age].into_iter().enumerate() {
            // SAFETY: these channels of this row's state are this piece's alone.
            unsafe { io.output::<f32>(1).part(place(part)..place(part) + count) }.copy_from_slice(&sums[..count]);
        }
    }
}

impl CpuKernel for Wkv {
    /// And one for tokens of no sequence.
    fn pieces(&self) -> usize {
        if self.channels == 0 { 0 } else { self.rows * self.blocks() + 1 }
    }

    fn nanos_per_piece(&self) -> f64 {
        let tokens = self.tokens as f64 / self.rows.max(1) as f64;
        100.0 + tokens * CHANNELS as f64 * 1.5
    }

    fn run(&self, io: &KernelIo<'_>, pieces: Range<usize>, _scratch: &mut Scratch) {
        for piece in pieces {
            let (row, first) = (piece / self.blocks(), piece % self.blocks() * CHANNELS);
            if row == self.rows {
                let end = usize::try_from(io.input::<i32>(6)[self.rows]).unwrap_or(0).min(self.tokens);
                // SAFETY: the tokens behind those of all sequences are this piece's alone.
                unsafe { io.output::<f32>(0).part(end * self.channels..self.tokens * self.channels) }.fill(0.0);
                continue;
            }
            self.run_row(io, row, first, CHANNELS.min(self.channels - first));
        }
    }
}

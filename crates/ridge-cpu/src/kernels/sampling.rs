//! The next token of each sequence.
//!
//! Floor: the logits read once (greedy), with an exponential each (otherwise). Nothing is sorted but the tokens whose
//! order matters: a histogram over the distance from the largest logit says in which bin the sums of the definition
//! cross their bounds, and only that bin's tokens are put in order.

use std::ops::Range;

use ridge_graph::{DType, ops::SampleToken, uniform};

use crate::io::KernelIo;
use crate::kernel::{CpuKernel, KernelEntry, KernelSpec};
use crate::scratch::Scratch;
use crate::simd::{self, exp, vectorised};

pub(super) fn entries() -> [KernelEntry; 1] {
    [KernelEntry::new(
        "sample_token",
        "sample_token(logits, temperature, top_k, top_p, min_p, typical_p, seed, sequence, position)",
        |_| true,
        make,
    )]
}

/// Bins, of which each is `1 / BINS_A_UNIT` of exponent wide; the last has all that is further away.
const BINS: usize = 1024;
const BINS_A_UNIT: f32 = 32.0;

/// Tokens whose exponents are computed at a time.
const CHUNK: usize = 256;

struct Sampling {
    rows: usize,
    vocab: usize,
    dtype: DType,
}

fn make(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    let x = &spec.inputs[0];
    Ok(Box::new(Sampling { rows: x.shape[0], vocab: x.shape[1], dtype: x.dtype }))
}

impl CpuKernel for Sampling {
    fn pieces(&self) -> usize {
        self.rows
    }

    fn nanos_per_piece(&self) -> f64 {
        50.0 + self.vocab as f64
    }

    fn run(&self, io: &KernelIo<'_>, rows: Range<usize>, scratch: &mut Scratch) {
        let [ranked, logits] = scratch.slices::<u64, 2>([self.vocab, self.vocab.div_ceil(2)]);
        // SAFETY: as many bytes, aligned more strictly, of which any are an f32; `logits` is not used but through it.
        let logits = unsafe { std::slice::from_raw_parts_mut(logits.as_mut_ptr().cast::<f32>(), self.vocab) };
        let (temperature, top_k) = (io.input::<f32>(1), io.input::<i32>(2));
        let [top_p, min_p, typical_p] = [3, 4, 5].map(|i| io.input::<f32>(i));
        let [seed, sequence, position] = [6, 7, 8].map(|i| io.input::<i64>(i));
        for row in rows {
            let logits = simd::view(io, 0, self.dtype, row * self.vocab, &mut *logits);
            let largest = simd::max(logits);
            let token = if largest == f32::NEG_INFINITY || !all_possible(logits) {
                -1
            } else if temperature[row] > 0.0 {
                let u = uniform(seed[row], SampleToken::STREAM, sequence[row], position[row], 0);
                let limits = Limits {
                    top_k: usize::try_from(top_k[row]).unwrap_or(0),
                    top_p: f64::from(top_p[row]),
                    min_p: min_p[row],
                    typical_p: f64::from(typical_p[row]),
                };
                Choice::new(logits, largest, temperature[row], ranked).token(&limits, f64::from(u)) as i32
            } else {
                logits.iter().position(|x| *x == largest).unwrap_or(0) as i32
            };
            // SAFETY: this row is ours alone.
            unsafe { io.output::<i32>(0).part(row..row + 1)[0] = token };
        }
    }
}

vectorised! {
    /// Is none of them NaN or infinity?
    fn all_possible(x: &[f32]) -> bool {
        // Without a way out in the middle, so that it runs over vectors.
        x.iter().fold(true, |possible, x| possible & (*x <= f32::MAX))
    }
}

/// What tokens are kept.
struct Limits {
    top_k: usize,
    top_p: f64,
    min_p: f32,
    typical_p: f64,
}

/// A row's tokens by bin.
struct Choice<'a> {
    logits: &'a [f32],
    largest: f32,
    temperature: f32,
    counts: [u32; BINS],
    /// Weights of the bin's tokens.
    sums: [f64; BINS],
    /// Tokens of the bin that was put in order last: the order of the logit above the id.
    ranked: &'a mut [u64],
}

vectorised! {
    /// `out = (x - largest) / temperature`, what a weight is the exponential of.
    fn exponents(x: &[f32], largest: f32, temperature: f32, out: &mut [f32]) {
        for (o, x) in out.iter_mut().zip(x) {
            *o = (*x - largest) / temperature;
        }
    }
}

vectorised! {
    /// `weights = e^x`.
    fn exponentials(x: &[f32], weights: &mut [f32]) {
        for (w, x) in weights.iter_mut().zip(x) {
            *w = exp::<FMA>(*x);
        }
    }
}

/// The bin of an exponent; the further below 0, the higher.
fn bin(exponent: f32) -> usize {
    // Not a number, which a logit is not, is taken as 0 by the cast.
    ((-exponent * BINS_A_UNIT) as usize).min(BINS - 1)
}

/// Sorts as logits do from the largest, and equals (the two zeros too) by id.
fn rank(logit: f32, id: usize) -> u64 {
    let bits = (logit + 0.0).to_bits();
    let ascending = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    u64::from(!ascending) << 32 | id as u64
}

fn id(ranked: u64) -> usize {
    ranked as u32 as usize
}

impl<'a> Choice<'a> {
    fn new(logits: &'a [f32], largest: f32, temperature: f32, ranked: &'a mut [u64]) -> Self {
        let mut choice = Self { logits, largest, temperature, counts: [0; BINS], sums: [0.0; BINS], ranked };
        let (mut exponent, mut weight) = ([0f32; CHUNK], [0f32; CHUNK]);
        for chunk in logits.chunks(CHUNK) {
            exponents(chunk, largest, temperature, &mut exponent);
            exponentials(&exponent, &mut weight);
            for (exponent, weight) in exponent.iter().zip(&weight).take(chunk.len()) {
                let bin = bin(*exponent);
                choice.counts[bin] += 1;
                choice.sums[bin] += f64::from(*weight);
            }
        }
        choice
    }

    /// The token that the definition gives within `limits` for the random number `u`.
    fn token(&mut self, limits: &Limits, u: f64) -> usize {
        let mut total = self.sums.iter().sum();
        let mut kept = self.logits.len();
        if limits.top_k > 0 && limits.top_k < kept {
            kept = limits.top_k;
            total = self.walk(|_, _, rank| rank < kept).before;
        }
        if limits.top_p < 1.0 {
            let bound = limits.top_p * total;
            let end = self.walk(|before, _, rank| rank == 0 || rank < kept && before < bound);
            (total, kept) = (end.before, end.rank);
        }
        if limits.min_p > 0.0 {
            let likely = self.count_likely(limits.min_p).max(1);
            if likely < kept {
                kept = likely;
                total = self.walk(|_, _, rank| rank < kept).before;
            }
        }
        if limits.typical_p < 1.0 {
            return self.typical_token(kept, limits.typical_p, u);
        }
        let target = u * total;
        // The first token that takes the sum above the target; the last kept one if rounding denies it.
        self.walk(|_, after, rank| rank + 1 < kept && after <= target).token
    }

    /// How many tokens weigh `least` or more: they are the first.
    fn count_likely(&self, least: f32) -> usize {
        let (mut exponent, mut weight) = ([0f32; CHUNK], [0f32; CHUNK]);
        let mut count = 0;
        for chunk in self.logits.chunks(CHUNK) {
            exponents(chunk, self.largest, self.temperature, &mut exponent);
            exponentials(&exponent, &mut weight);
            count += weight[..chunk.len()].iter().filter(|weight| **weight >= least).count();
        }
        count
    }

    /// The token that `u` gives among the typical ones of the first `kept`. Sorts all tokens, since what is typical is
    /// not known before.
    fn typical_token(&mut self, kept: usize, typical_p: f64, u: f64) -> usize {
        let Self { logits, largest, temperature, ranked, .. } = self;
        let exponent = |token: usize| (logits[token] - *largest) / *temperature;
        let weight = |token: usize| {
            let mut weight = [0.0];
            exponentials(&[exponent(token)], &mut weight);
            f64::from(weight[0])
        };
        let tokens = &mut ranked[..logits.len()];
        for (i, (ranked, logit)) in tokens.iter_mut().zip(*logits).enumerate() {
            *ranked = rank(*logit, i);
        }
        tokens.sort_unstable();
        let tokens = &mut tokens[..kept];
        let total: f64 = tokens.iter().map(|r| weight(id(*r))).sum();
        let surprise = |token: usize| total.ln() - f64::from(exponent(token));
        let entropy: f64 = tokens
            .iter()
            .map(|r| (weight(id(*r)) / total, id(*r)))
            .filter(|(p, _)| *p > 0.0)
            .map(|(p, token)| p * surprise(token))
            .sum();
        let distance = |token: usize| (surprise(token) - entropy).abs() as f32;
        // By distance, which is not negative, so that its bits are in its order.
        tokens.sort_unstable_by_key(|r| u64::from(distance(id(*r)).to_bits()) << 32 | u64::from(*r as u32));
        let mut sum = 0.0;
        let short = |r: &&u64| {
            sum += weight(id(**r)) / total;
            sum < typical_p
        };
        let last = tokens.iter().take_while(short).count().min(kept - 1);
        let bound = distance(id(tokens[last]));
        let end = tokens.iter().take_while(|r| distance(id(**r)) <= bound).count();
        let tokens = &mut tokens[..end];
        for ranked in tokens.iter_mut() {
            *ranked = rank(logits[id(*ranked)], id(*ranked));
        }
        tokens.sort_unstable();
        let target = u * tokens.iter().map(|r| weight(id(*r))).sum::<f64>();
        let mut sum = 0.0;
        let passed = |r: &&u64| {
            sum += weight(id(**r));
            sum <= target
        };
        let chosen = tokens.iter().take_while(passed).count().min(tokens.len() - 1);
        id(tokens[chosen])
    }

    /// Goes through the tokens in order while `on` holds of the sum of weights before the token, the sum with it, and
    /// its rank; gives where it stopped. `on` must hold for all tokens of a bin if it does so for its last.
    fn walk(&mut self, on: impl Fn(f64, f64, usize) -> bool) -> Stop {
        let (mut before, mut rank) = (0.0, 0);
        for bin in 0..BINS {
            let (count, sum) = (self.counts[bin] as usize, self.sums[bin]);
            if count == 0 {
                continue;
            }
            // What holds of the bin's end as if it were one token holds of each token in it.
            if on(before + sum, before + sum, rank + count - 1) {
                before += sum;
                rank += count;
                continue;
            }
            if let Some(stop) = self.walk_bin(bin, before, rank, &on) {
                return stop;
            }
            before += sum;
            rank += count;
        }
        Stop { before, rank, token: self.ranked.first().map_or(0, |r| id(*r)) }
    }

    /// [`Choice::walk`] within one bin; `None` if it continues.
    fn walk_bin(
        &mut self,
        wanted: usize,
        mut before: f64,
        mut nth: usize,
        on: &impl Fn(f64, f64, usize) -> bool,
    ) -> Option<Stop> {
        let mut count = 0;
        let mut exponent = [0f32; CHUNK];
        for (of, chunk) in self.logits.chunks(CHUNK).enumerate() {
            exponents(chunk, self.largest, self.temperature, &mut exponent);
            for (i, (exponent, logit)) in exponent.iter().zip(chunk).enumerate() {
                if bin(*exponent) == wanted {
                    self.ranked[count] = rank(*logit, of * CHUNK + i);
                    count += 1;
                }
            }
        }
        self.ranked[..count].sort_unstable();
        for i in 0..count {
            let token = id(self.ranked[i]);
            let mut weight = [0.0];
            exponentials(&[(self.logits[token] - self.largest) / self.temperature], &mut weight);
            let after = before + f64::from(weight[0]);
            if !on(before, after, nth) {
                return Some(Stop { before, rank: nth, token });
            }
            before = after;
            nth += 1;
        }
        None
    }
}

/// Where a walk stopped.
struct Stop {
    /// Sum of the weights before.
    before: f64,
    /// Tokens before.
    rank: usize,
    token: usize,
}

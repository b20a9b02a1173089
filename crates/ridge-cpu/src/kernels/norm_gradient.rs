//! The gradients of the normalisations: to the input row by row, to the weight over all rows.
//!
//! Floor: input and cotangent read once, and the cotangent of the input written once.

use std::ops::Range;

use ridge_graph::DType;
use ridge_graph::ops::{NormInputGradient, NormWeightGradient};

use crate::io::KernelIo;
use crate::kernel::{CpuKernel, KernelEntry, KernelSpec, Preparation};
use crate::scratch::Scratch;
use crate::simd::{self, LANES, fma, sum_lanes, vectorised};

pub(super) fn entries() -> [KernelEntry; 4] {
    let input = |name: &'static str, pattern| KernelEntry::new(name, pattern, |_| true, input_gradient);
    let weight = |name: &'static str, pattern| KernelEntry::new(name, pattern, |_| true, weight_gradient);
    [
        input("rms_norm_input_gradient", "rms_norm_input_gradient(x, w, dy)"),
        input("layer_norm_input_gradient", "layer_norm_input_gradient(x, w, dy)"),
        weight("rms_norm_weight_gradient", "rms_norm_weight_gradient(x, dy)"),
        weight("layer_norm_weight_gradient", "layer_norm_weight_gradient(x, dy)"),
    ]
}

/// Rows that are normalised.
struct Rows {
    rows: usize,
    hidden: usize,
    dtype: DType,
    eps: f64,
    centred: bool,
}

impl Rows {
    fn new(spec: &KernelSpec<'_>, eps: f64, centred: bool) -> Self {
        let x = &spec.inputs[0];
        Self { rows: x.rows(), hidden: x.last(), dtype: x.dtype, eps, centred }
    }

    /// Mean and scale of a row; a mean of 0 where it is not taken away.
    fn statistics(&self, x: &[f32]) -> [f32; 2] {
        let count = x.len() as f64;
        let mean = if self.centred { (f64::from(sum(x)) / count) as f32 } else { 0.0 };
        let variance = f64::from(square_sum(x, mean)) / count;
        [mean, (1.0 / (variance + self.eps).sqrt()) as f32]
    }
}

vectorised! {
    fn sum(x: &[f32]) -> f32 {
        let mut lanes = [0f32; LANES];
        let (chunks, rest) = x.as_chunks::<LANES>();
        for chunk in chunks {
            for i in 0..LANES {
                lanes[i] += chunk[i];
            }
        }
        for (lane, x) in lanes.iter_mut().zip(rest) {
            *lane += x;
        }
        sum_lanes(lanes)
    }
}

vectorised! {
    /// The sum of `(x - mean)^2`.
    fn square_sum(x: &[f32], mean: f32) -> f32 {
        let mut lanes = [0f32; LANES];
        let (chunks, rest) = x.as_chunks::<LANES>();
        for chunk in chunks {
            for i in 0..LANES {
                lanes[i] = fma::<FMA>(chunk[i] - mean, chunk[i] - mean, lanes[i]);
            }
        }
        for (lane, x) in lanes.iter_mut().zip(rest) {
            *lane = fma::<FMA>(*x - mean, *x - mean, *lane);
        }
        sum_lanes(lanes)
    }
}

vectorised! {
    /// The sums of `dy w` and of `dy w (x - mean)`.
    fn coming(x: &[f32], mean: f32, w: &[f32], dy: &[f32]) -> [f32; 2] {
        let mut lanes = [[0f32; LANES]; 2];
        let whole = x.len() / LANES * LANES;
        for at in (0..whole).step_by(LANES) {
            let (x, w, dy) = (&x[at..at + LANES], &w[at..at + LANES], &dy[at..at + LANES]);
            for i in 0..LANES {
                let g = dy[i] * w[i];
                lanes[0][i] += g;
                lanes[1][i] = fma::<FMA>(g, x[i] - mean, lanes[1][i]);
            }
        }
        for (i, at) in (whole..x.len()).enumerate() {
            let g = dy[at] * w[at];
            lanes[0][i] += g;
            lanes[1][i] = fma::<FMA>(g, x[at] - mean, lanes[1][i]);
        }
        lanes.map(sum_lanes)
    }
}

vectorised! {
    /// `scale (dy w - mean_g - (x - mean) along)`.
    fn through(x: &[f32], of: [f32; 2], w: &[f32], dy: &[f32], coming: [f32; 2], dx: &mut [f32]) {
        let ([mean, scale], [mean_g, along]) = (of, coming);
        for (((dx, x), w), dy) in dx.iter_mut().zip(x).zip(w).zip(dy) {
            *dx = scale * fma::<FMA>(-along, *x - mean, fma::<FMA>(*dy, *w, -mean_g));
        }
    }
}

struct InputGradient {
    rows: Rows,
    weight: DType,
}

fn input_gradient(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    let op = spec.composite::<NormInputGradient>().ok_or("no gradient in the group")?;
    Ok(Box::new(InputGradient { rows: Rows::new(spec, op.eps, op.centred), weight: spec.inputs[1].dtype }))
}

impl CpuKernel for InputGradient {
    fn pieces(&self) -> usize {
        self.rows.rows
    }

    fn nanos_per_piece(&self) -> f64 {
        40.0 + self.rows.hidden as f64 * 0.4
    }

    fn run(&self, io: &KernelIo<'_>, rows: Range<usize>, scratch: &mut Scratch) {
        let Rows { hidden, dtype, centred, .. } = self.rows;
        let [weight, x, dy, dx] = scratch.slices::<f32, 4>([hidden; 4]);
        let weight = simd::view(io, 1, self.weight, 0, weight);
        for row in rows {
            let at = row * hidden;
            let (x, dy) = (simd::view(io, 0, dtype, at, &mut *x), simd::view(io, 2, dtype, at, &mut *dy));
            // SAFETY: this row is ours alone.
            let dx = unsafe { simd::place(io, 0, dtype, at, &mut *dx) };
            let [mean, scale] = self.rows.statistics(x);
            let [sum, product] = coming(x, mean, weight, dy);
            let count = hidden as f64;
            let mean_g = if centred { (f64::from(sum) / count) as f32 } else { 0.0 };
            // Of the normalised row, `(x - mean) scale`, once more scaled.
            let along = (f64::from(product) / count * f64::from(scale) * f64::from(scale)) as f32;
            through(x, [mean, scale], weight, dy, [mean_g, along], dx);
            // SAFETY: as above.
            unsafe { simd::put(io, 0, dtype, at, dx) };
        }
    }
}

/// Columns of a piece: whole cache lines of every dtype.
const COLUMNS: usize = 128;

/// Rows that are summed before they join the others, so that the error of a sum grows with their length alone.
const CHAIN: usize = 64;

struct WeightGradient {
    rows: Rows,
    out: DType,
}

fn weight_gradient(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    let op = spec.composite::<NormWeightGradient>().ok_or("no gradient in the group")?;
    Ok(Box::new(WeightGradient { rows: Rows::new(spec, op.eps, op.centred), out: spec.outputs[0].dtype }))
}

vectorised! {
    /// `sums += dy (x - mean) scale`.
    fn gather(x: &[f32], of: [f32; 2], dy: &[f32], sums: &mut [f32]) {
        let [mean, scale] = of;
        for ((sum, x), dy) in sums.iter_mut().zip(x).zip(dy) {
            *sum = fma::<FMA>(*dy, (*x - mean) * scale, *sum);
        }
    }
}

impl CpuKernel for WeightGradient {
    fn pieces(&self) -> usize {
        self.rows.hidden.div_ceil(COLUMNS)
    }

    fn nanos_per_piece(&self) -> f64 {
        20.0 + self.rows.rows as f64 * 20.0
    }

    fn preparation(&self) -> Option<Preparation> {
        Some(Preparation {
            bytes: self.rows.rows * size_of::<[f32; 2]>(),
            pieces: self.rows.rows,
            nanos_per_piece: 20.0 + self.rows.hidden as f64 * 0.1,
        })
    }

    fn prepare(&self, io: &KernelIo<'_>, rows: Range<usize>, scratch: &mut Scratch) {
        let Rows { hidden, dtype, .. } = self.rows;
        let [x] = scratch.slices::<f32, 1>([hidden]);
        for row in rows {
            let found = self.rows.statistics(simd::view(io, 0, dtype, row * hidden, &mut *x));
            // SAFETY: this row's statistics are ours alone.
            unsafe { io.room::<f32>().part(2 * row..2 * row + 2) }.copy_from_slice(&found);
        }
    }

    fn run(&self, io: &KernelIo<'_>, pieces: Range<usize>, _scratch: &mut Scratch) {
        let Rows { rows, hidden, dtype, .. } = self.rows;
        let statistics = io.prepared::<f32>().as_chunks::<2>().0;
        for piece in pieces {
            let first = piece * COLUMNS;
            let count = COLUMNS.min(hidden - first);
            let (mut sums, mut chain, mut room) = ([0f32; COLUMNS], [0f32; COLUMNS], [[0f32; COLUMNS]; 2]);
            let [x, dy] = &mut room;
            for begin in (0..rows).step_by(CHAIN) {
                chain[..count].fill(0.0);
                let end = (begin + CHAIN).min(rows);
                for (row, of_row) in (begin..end).zip(&statistics[begin..end]) {
                    let at = row * hidden + first;
                    let x = simd::view(io, 0, dtype, at, &mut x[..count]);
                    let dy = simd::view(io, 1, dtype, at, &mut dy[..count]);
                    gather(x, *of_row, dy, &mut chain[..count]);
                }
                simd::add(&mut sums[..count], &chain[..count]);
            }
            // SAFETY: these columns are this piece's alone.
            unsafe { simd::store(io, 0, self.out, first, &sums[..count]) };
        }
    }
}

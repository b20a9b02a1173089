//! The short causal convolution whose states are lines of a table, read and written in place.
//!
//! Floor: inputs and states read once, the output and states written once. A piece has some channels of a row, whose last inputs stay in
//! the first-level cache while the tokens pass; it alone reads and writes them in the row's lines. A token's sum has one order, so
//! prompts in any chunks have the same bits.

use std::ops::Range;

use ridge_graph::{DType, Function, Op, Prim, ops};

use crate::io::KernelIo;
use crate::kernel::{CpuKernel, KernelEntry, KernelSpec};
use crate::scratch::Scratch;
use crate::simd::{self, Element, vectorised, with_element};

pub(super) fn entries() -> [KernelEntry; 1] {
    let pattern = "stateful_conv1d(slice(x)?, w, table, lines, ids, starts, ...)";
    [KernelEntry::new("stateful_conv1d", pattern, supports, make)]
}

/// Channels of a piece.
const CHANNELS: usize = 64;

struct StatefulConvolution {
    /// The dtype of x and the states, and those of the weight and the bias.
    dtype: DType,
    of_weight: DType,
    bias: Option<DType>,
    silu: bool,
    tokens: usize,
    rows: usize,
    channels: usize,
    taps: usize,
    /// Lines of the table.
    lines: usize,
    /// Elements from one token of x to the next, and those of a token before the first channel.
    stride: usize,
    first: usize,
}

/// The axis of x of which a part is taken and where the part begins, if it is one of a wider value.
fn slice(body: &Function) -> Option<(usize, Option<usize>)> {
    body.nodes.iter().find_map(|node| match &node.op {
        Op::Prim(Prim::Slice { axis, start, .. }) => Some((*axis, start.as_const())),
        _ => None,
    })
}

/// Plain weights, and columns of x.
fn supports(body: &Function) -> bool {
    body.args.iter().all(|arg| arg.ty.format.is_none()) && slice(body).is_none_or(|of| matches!(of, (1, Some(_))))
}

fn make(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    let op = spec.composite::<ops::StatefulConv1d>().ok_or("no stateful_conv1d in the group")?;
    let [x, w, table, lines, _, _, bias @ ..] = &spec.inputs[..] else {
        return Err("takes six inputs or seven".into());
    };
    Ok(Box::new(StatefulConvolution {
        dtype: x.dtype,
        of_weight: w.dtype,
        bias: bias.first().map(|bias| bias.dtype),
        silu: op.silu,
        tokens: x.shape[0],
        rows: lines.shape[0],
        channels: w.shape[0],
        taps: w.shape[1],
        lines: table.shape[0],
        stride: x.shape[1],
        first: slice(spec.body).and_then(|(_, start)| start).unwrap_or(0),
    }))
}

vectorised! {
    /// `sums += taps * x`.
    fn accumulate(sums: &mut [f32], taps: &[f32], x: &[f32]) {
        for ((sum, tap), x) in sums.iter_mut().zip(taps).zip(x) {
            *sum = simd::fma::<FMA>(*tap, *x, *sum);
        }
    }
}

vectorised! {
    /// `x * sigmoid(x)` of each.
    fn silu(x: &mut [f32]) {
        for x in x {
            *x /= 1.0 + simd::exp::<FMA>(-*x);
        }
    }
}

/// What a piece has of its channels: taps by their place, the last inputs, one for each tap, and a row of sums.
struct Held<'a> {
    taps: &'a mut [f32],
    inputs: &'a mut [f32],
    sums: &'a mut [f32],
}

impl StatefulConvolution {
    fn blocks(&self) -> usize {
        self.channels.div_ceil(CHANNELS)
    }

    /// The bias of `sums.len()` channels from `channel` on, or zeros.
    fn begin(&self, io: &KernelIo<'_>, channel: usize, sums: &mut [f32]) {
        match self.bias {
            Some(dtype) => simd::load(io, 6, dtype, channel, sums),
            None => sums.fill(0.0),
        }
    }

    /// Line `which` of a row, if it is one of the table.
    fn line(&self, io: &KernelIo<'_>, row: usize, which: usize) -> Option<usize> {
        usize::try_from(io.input::<i32>(3)[2 * row + which]).ok().filter(|line| *line < self.lines)
    }

    /// All tokens of `row`, for `count` channels from `channel` on.
    fn run_row<T: Element>(&self, io: &KernelIo<'_>, row: usize, (channel, count): (usize, usize), held: Held<'_>) {
        let Held { taps, inputs, sums } = held;
        let kept = self.taps - 1;
        // The sums' room first has the weights in their own order.
        for nth in 0..count {
            simd::load(io, 1, self.of_weight, (channel + nth) * self.taps, &mut sums[..self.taps]);
            for (tap, value) in sums[..self.taps].iter().enumerate() {
                taps[tap * CHANNELS + nth] = *value;
            }
        }
        let table = io.output::<T>(1);
        let place = |line: usize, nth: usize| (line * kept + nth) * self.channels + channel;
        let from = self.line(io, row, 0);
        for (nth, inputs) in inputs.chunks_mut(CHANNELS).take(kept).enumerate() {
            match from {
                // SAFETY: no other piece has these channels of a line that this row reads.
                Some(line) => simd::widen(unsafe { table.part(place(line, nth)..place(line, nth) + count) }, inputs),
                None => inputs.fill(0.0),
            }
        }
        let starts = io.input::<i32>(5);
        let bound = |i: usize| usize::try_from(starts[i]).unwrap_or(0).min(self.tokens);
        // Where the oldest input is, in whose place the next token's comes once it is not needed any more.
        let mut next = kept;
        for token in bound(row)..bound(row + 1) {
            let at = token * self.stride + self.first + channel;
            simd::load(io, 0, self.dtype, at, &mut inputs[next * CHANNELS..][..count]);
            let sums = &mut sums[..count];
            sums.fill(0.0);
            for back in 0..self.taps {
                let of = (next + self.taps - back) % self.taps * CHANNELS;
                accumulate(sums, &taps[(kept - back) * CHANNELS..][..count], &inputs[of..][..count]);
            }
            self.finish(io, token, channel, sums);
            next = (next + 1) % self.taps;
        }
        let Some(line) = self.line(io, row, 1) else { return };
        for nth in 0..kept {
            let of = (next + 1 + nth) % self.taps * CHANNELS;
            // SAFETY: as above, of the line that this row writes.
            let to = unsafe { table.part(place(line, nth)..place(line, nth) + count) };
            simd::narrow(&inputs[of..][..count], to);
        }
    }

    /// Writes the results of `sums` for a token's channels from `channel` on.
    fn finish(&self, io: &KernelIo<'_>, token: usize, channel: usize, sums: &mut [f32]) {
        let at = token * self.channels + channel;
        // SAFETY: these channels of this token are this piece's alone.
        let y = unsafe { io.output::<f32>(0).part(at..at + sums.len()) };
        self.begin(io, channel, y);
        for (y, sum) in y.iter_mut().zip(sums) {
            *y += *sum;
        }
        if self.silu {
            silu(y);
        }
    }
}

impl CpuKernel for StatefulConvolution {
    /// And one for tokens of no sequence.
    fn pieces(&self) -> usize {
        if self.channels == 0 { 0 } else { self.rows * self.blocks() + 1 }
    }

    fn nanos_per_piece(&self) -> f64 {
        let tokens = self.tokens as f64 / self.rows.max(1) as f64;
        150.0 + tokens * CHANNELS as f64 * (0.6 + 0.1 * self.taps as f64)
    }

    fn run(&self, io: &KernelIo<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        let room = self.taps * CHANNELS;
        let [taps, inputs, sums] = scratch.slices::<f32, 3>([room, room, CHANNELS.max(self.taps)]);
        for piece in pieces {
            let (row, channel) = (piece / self.blocks(), piece % self.blocks() * CHANNELS);
            if row == self.rows {
                let end = usize::try_from(io.input::<i32>(5)[self.rows]).unwrap_or(0).min(self.tokens);
                sums.fill(0.0);
                for token in end..self.tokens {
                    for channel in (0..self.channels).step_by(CHANNELS) {
                        self.finish(io, token, channel, &mut sums[..CHANNELS.min(self.channels - channel)]);
                    }
                }
                continue;
            }
            let channels = (channel, CHANNELS.min(self.channels - channel));
            let held = Held { taps: &mut *taps, inputs: &mut *inputs, sums: &mut *sums };
            with_element!(self.dtype, T => self.run_row::<T>(io, row, channels, held));
        }
    }
}

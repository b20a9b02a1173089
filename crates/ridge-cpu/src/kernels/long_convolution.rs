//! The long convolution of inputs in a paged cache.
//!
//! Floor: `2 channels` operations for each token and position before it; of a single token the inputs of its sequence and as many
//! rows of the filter, read once.
//!
//! A piece is [`TOGETHER`] tokens and [`CHANNELS`] channels. An input is widened once for all tokens of the piece that are of its
//! sequence. Sums go over positions in ascending order, so that a token's bits depend on its own sequence alone.

use std::ops::Range;

use ridge_graph::{DType, Function};

use crate::io::KernelIo;
use crate::kernel::{CpuKernel, KernelEntry, KernelSpec};
use crate::scratch::Scratch;
use crate::simd::{self, vectorised};

pub(super) fn entries() -> [KernelEntry; 1] {
    let pattern = "long_convolution(cache, block_table, seq_ids, positions, filter)";
    [KernelEntry::new("long_convolution", pattern, of_floats, make)]
}

/// Is the cache one of floats that are not codes?
fn of_floats(body: &Function) -> bool {
    let cache = body.args.iter().find(|arg| arg.ty.shape.rank() == 5);
    cache.is_some_and(|cache| matches!(cache.ty.dtype, DType::F32 | DType::BF16 | DType::F16))
}

/// Tokens of a piece.
const TOGETHER: usize = 16;
/// Channels of a piece.
const CHANNELS: usize = 64;

struct LongConvolutionKernel {
    tokens: usize,
    channels: usize,
    /// Rows of the filter.
    length: usize,
    dtype: DType,
    blocks: usize,
    block_size: usize,
    sequences: usize,
    /// Columns of the block table.
    table: usize,
}

fn make(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    let [cache, table, ids, _, filter] = &spec.inputs[..] else {
        return Err("a long convolution takes five inputs".into());
    };
    Ok(Box::new(LongConvolutionKernel {
        tokens: ids.shape[0],
        channels: filter.shape[1],
        length: filter.shape[0],
        dtype: cache.dtype,
        blocks: cache.shape[0],
        block_size: cache.shape[3],
        sequences: table.shape[0],
        table: table.shape[1],
    }))
}

impl CpuKernel for LongConvolutionKernel {
    fn pieces(&self) -> usize {
        self.tokens.div_ceil(TOGETHER) * self.channels.div_ceil(CHANNELS)
    }

    fn nanos_per_piece(&self) -> f64 {
        let positions = self.length.min(self.table * self.block_size);
        let terms = TOGETHER.min(self.tokens) * positions * CHANNELS.min(self.channels);
        100.0 + terms as f64 * 0.05
    }

    fn run(&self, io: &KernelIo<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        let [x, sums] = scratch.slices::<f32, 2>([CHANNELS, TOGETHER * CHANNELS]);
        let (ids, positions) = (io.input::<i32>(2), io.input::<i32>(3));
        let parts = self.channels.div_ceil(CHANNELS);
        let out = io.output::<f32>(0);
        for piece in pieces {
            let (first, channel) = (piece / parts * TOGETHER, piece % parts * CHANNELS);
            let end = (first + TOGETHER).min(self.tokens);
            let width = CHANNELS.min(self.channels - channel);
            sums.fill(0.0);
            let mut from = first;
            while from < end {
                let of_one = (from..end).take_while(|token| ids[*token] == ids[from]).count();
                if (0..self.sequences as i32).contains(&ids[from]) {
                    let tokens = &positions[from..from + of_one];
                    let sums = &mut sums[(from - first) * CHANNELS..][..of_one * CHANNELS];
                    self.convolve(io, ids[from] as usize, tokens, (channel, width), x, sums);
                }
                from += of_one;
            }
            for token in first..end {
                let sums = &sums[(token - first) * CHANNELS..][..width];
                let at = token * self.channels + channel;
                // SAFETY: these channels of this token are this piece's alone.
                unsafe { out.part(at..at + width) }.copy_from_slice(sums);
            }
        }
    }
}

impl LongConvolutionKernel {
    /// Adds to the `sums` of tokens at these positions of `sequence`, [`CHANNELS`] each, what its inputs give for `width` channels
    /// from `channel` on.
    fn convolve(
        &self,
        io: &KernelIo<'_>,
        sequence: usize,
        positions: &[i32],
        (channel, width): (usize, usize),
        x: &mut [f32],
        sums: &mut [f32],
    ) {
        let table = &io.input::<i32>(1)[sequence * self.table..][..self.table];
        let filter = io.input::<f32>(4);
        let last = positions.iter().copied().max().unwrap_or(-1);
        let reach = self.table * self.block_size;
        let (last, first) = (last.max(-1) as isize, positions.iter().copied().min().unwrap_or(0).max(0) as usize);
        let oldest = (first + 1).saturating_sub(self.length);
        for at in oldest..((last + 1) as usize).min(reach) {
            let block = table[at / self.block_size];
            if !(0..self.blocks as i32).contains(&block) {
                continue;
            }
            let row = (block as usize * self.block_size + at % self.block_size) * self.channels + channel;
            simd::load(io, 0, self.dtype, row, &mut x[..width]);
            for (position, sums) in positions.iter().zip(sums.chunks_mut(CHANNELS)) {
                let Some(back) = usize::try_from(*position).ok().and_then(|position| position.checked_sub(at)) else {
                    continue;
                };
                if back < self.length {
                    let taps = &filter[back * self.channels + channel..][..width];
                    accumulate(&mut sums[..width], taps, &x[..width]);
                }
            }
        }
    }
}

vectorised! {
    /// `sums += taps * x`.
    fn accumulate(sums: &mut [f32], taps: &[f32], x: &[f32]) {
        for ((sum, tap), x) in sums.iter_mut().zip(taps).zip(x) {
            *sum = simd::fma::<FMA>(*tap, *x, *sum);
        }
    }
}

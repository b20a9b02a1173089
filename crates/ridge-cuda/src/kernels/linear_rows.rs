//! Linears of few rows whose weights are streamed, in floats or codes: `kernels/linear_rows.cu`.

use ridge_graph::format::{BLOCK, ScaleLayout, ScaledFormat};

use super::linear_call::{LinearCall, LinearEpilogue};
use super::{cache_epilogue, norm};
use crate::kernel::{CudaKernel, CudaSource, DeviceAction, KernelText, LaunchArg, SlotOffset, flag, grid, name};

pub(super) const ROWS: KernelText<'_> = KernelText::new(concat!(
    include_str!("../../kernels/norm.cuh"),
    include_str!("../../kernels/scaled.cuh"),
    include_str!("../../kernels/angles.cuh"),
    include_str!("../../kernels/linear_rows.cu")
))
.with_tiles()
.early_launch()
.persistent(1);

/// Rows that a block makes at most.
pub(super) const MAX_ROWS: usize = 16;
/// Bytes of a column that a warp reads in its turn, and columns of a tile.
const PIECE_BYTES: usize = 64;
const COLUMNS: usize = 16;
/// Stages of a ring at most.
const MOST_STAGES: usize = 16;
/// Shared memory that a block takes besides what depends on its work.
const OTHER_BYTES: usize = 1 << 10;

/// How x is given.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum StreamedX {
    /// Elements, as those of the weights.
    Plain,
    /// Codes, for weights in this format.
    Codes(ScaledFormat),
    /// Elements, which become codes on the way, in every block: see [`StreamedX::quantises`].
    Quantised(ScaledFormat),
}

/// Elements of x, and of the one row of it, up to which every block makes the codes anew while weights are on their way; for more a launch
/// of its own is faster.
const QUANTISED: usize = 8 << 10;
const QUANTISED_ROW: usize = 24 << 10;

impl StreamedX {
    /// Does x, of so many rows of `depth`, become codes on the way? It fits into shared memory then, on every GPU.
    pub(super) fn quantises(rows: usize, depth: usize) -> bool {
        if rows == 1 { depth <= QUANTISED_ROW } else { rows * depth <= QUANTISED && rows <= MAX_ROWS / 2 }
    }

    fn format(self) -> Option<ScaledFormat> {
        match self {
            Self::Plain => None,
            Self::Codes(w) | Self::Quantised(w) => Some(w),
        }
    }

    /// `SCALED` of the text: of rows, or of blocks of a weight.
    fn scaled(self) -> &'static str {
        match self.format() {
            None => "0",
            Some(w) if w.scales == ScaleLayout::Block => "2",
            Some(_) => "1",
        }
    }

    /// `CODE` of the text.
    fn code(self) -> &'static str {
        self.format().map_or("F8E4M3", |w| name(w.codes.dtype()))
    }

    /// Bytes of scales in a block's shared memory, for `sides` weights and so many rows there of `depth`: of two tiles, and of x.
    fn scale_bytes(self, sides: usize, rows: usize, depth: usize) -> usize {
        let across = match self.format() {
            None => return 0,
            Some(w) if w.scales == ScaleLayout::Block => depth.div_ceil(BLOCK),
            Some(_) => 1,
        };
        ((2 * sides + rows) * across * 4).next_multiple_of(16)
    }
}

/// What a GPU has for a block, of which a multiprocessor has one.
#[derive(Clone, Copy)]
struct Room {
    shared: usize,
    /// Warps of a block where rows are long enough for so many.
    warps: usize,
}

/// Hopper, and every GPU.
const HOPPER: Room = Room { shared: 227 << 10, warps: 16 };
const EVERY: Room = Room { shared: 99 << 10, warps: LEAST_WARPS };
/// Warps of a block at least, which are a team that prepares rows.
const LEAST_WARPS: usize = 8;
/// Vectors that a thread of a team holds at most.
const MOST_VECTORS: usize = 16;
/// Bytes of the ring that keep a multiprocessor of Hopper busy.
const ENOUGH_BYTES: usize = 96 << 10;
/// Tiles that keep most multiprocessors of Hopper busy.
const ENOUGH_TILES: usize = 120;

/// How a block uses its room.
#[derive(Clone, Copy)]
struct Division {
    /// `ROWS`, `SPANS`, `STAGED`, `VECTORS`, `WARPS` and `STAGES` of the text.
    rows: usize,
    spans: usize,
    staged: bool,
    vectors: usize,
    warps: usize,
    stages: usize,
    /// Bytes of shared memory that the launch asks for.
    shared: usize,
}

impl Division {
    /// With x in shared memory or not; `None` where that leaves the ring less than `least` bytes, or two stages.
    fn new(room: Room, linears: &LinearCall<'_>, by: StreamedX, staged: bool, least: usize) -> Option<Self> {
        let gated = linears.after == LinearEpilogue::Swiglu;
        let sides = if gated { 2 } else { 1 };
        let rows = linears.rows.next_power_of_two().min(MAX_ROWS);
        let element = if by == StreamedX::Plain { linears.dtype.size_bytes() } else { 1 };
        let bytes = linears.depth * element;
        // Each warp takes two turns at least.
        let warps = if bytes >= 2 * room.warps * PIECE_BYTES { room.warps } else { LEAST_WARPS };
        // x is read less often by wide tiles.
        let wide = !staged && !gated && linears.tiles(2 * COLUMNS) >= ENOUGH_TILES;
        let spans = if wide { 2 } else { 1 };
        let sums = if rows == 1 { 2 } else { rows + 1 } * warps * sides * spans * COLUMNS * 4;
        let x = if staged { linears.rows.min(rows) * (bytes.next_multiple_of(128) + 64) } else { 0 };
        let behind = by.scale_bytes(sides, if staged { rows } else { 0 }, linears.depth) + x;
        let stage = warps * sides * spans * COLUMNS * PIECE_BYTES;
        let stages = (room.shared.checked_sub(OTHER_BYTES + sums + behind)? / stage).min(MOST_STAGES);
        // A norm, and what makes codes, holds x as it is given.
        let becomes_codes = matches!(by, StreamedX::Quantised(_));
        let given = if by == StreamedX::Plain || becomes_codes { linears.x().dtype.size_bytes() } else { element };
        let vectors = if becomes_codes { linears.depth * given } else { bytes }.div_ceil(16 * 32 * LEAST_WARPS);
        let of_vector = if becomes_codes { 1 } else { given / element };
        let held = vectors * rows.div_ceil(warps / LEAST_WARPS) * of_vector;
        let holds = !staged || held <= MOST_VECTORS || (becomes_codes && rows == 1);
        let fits = holds && stages >= 2 && stages * stage >= least;
        fits.then_some(Self { rows, spans, staged, vectors, warps, stages, shared: stages * stage + behind })
    }
}

impl LinearCall<'_> {
    /// Every weight read once for every few rows, by one launch, for x at `x`: codes with `scales` of x and the weights, or the
    /// operand itself, which is normed where there is a norm.
    ///
    /// # Errors
    ///
    /// If a row that becomes codes is so long that it does not fit beside weights on their way.
    pub(super) fn stream_rows(
        &self,
        by: StreamedX,
        x: SlotOffset,
        scales: Option<LaunchArg>,
    ) -> Result<CudaKernel, String> {
        if self.column_blocks() == 0 || self.rows == 0 {
            return Ok(CudaKernel::default());
        }
        let norm = self.norm.filter(|_| !matches!(by, StreamedX::Codes(_)));
        let threads = norm.map_or(0, |_| norm::threads_of(self.depth * self.dtype.size_bytes() / 16));
        let in_room = |room: Room| -> Result<CudaKernel, String> {
            let divided = |staged, least| Division::new(room, self, by, staged, least);
            let becomes_codes = matches!(by, StreamedX::Quantised(_));
            let enough = if becomes_codes { 0 } else { ENOUGH_BYTES.min(room.shared / 2) };
            if let Some(division) = divided(true, enough) {
                return self.rows_launch(by, division, threads, x, &scales);
            }
            let division = if becomes_codes { None } else { divided(false, 0) };
            let division = division
                .ok_or_else(|| format!("a row of {} elements does not fit beside weights on their way", self.depth))?;
            // What does not fit is normed by a launch of its own.
            let (mut kernel, x) = if norm.is_some() { self.normed()? } else { (CudaKernel::default(), x) };
            kernel.actions.extend(self.rows_launch(by, division, 0, x, &scales)?.actions);
            Ok(kernel)
        };
        let (hopper, others) = (in_room(HOPPER)?, in_room(EVERY)?);
        let scratch = hopper.scratch.max(others.scratch);
        let action = DeviceAction::ByArch { arch: "sm_90a", actions: hopper.actions, otherwise: others.actions };
        Ok(CudaKernel { scratch, ..action.into() })
    }

    fn rows_launch(
        &self,
        by: StreamedX,
        division: Division,
        norm_threads: usize,
        x: SlotOffset,
        scales: &Option<LaunchArg>,
    ) -> Result<CudaKernel, String> {
        let gain = &self.spec.inputs[self.x + usize::from(self.norm.is_some())];
        let Division { rows, spans, staged, vectors, warps, stages, shared } = division;
        let [of_rows, of_spans, of_vectors, of_warps, of_stages, of_count, of_norm] =
            [rows, spans, vectors, warps, stages, self.count, norm_threads].map(|n| n.to_string());
        let caches = self.after == LinearEpilogue::Cache;
        let of_cache = if caches { cache_epilogue::defines(self.spec) } else { Vec::new() };
        let mut defines = vec![
            ("D", name(self.dtype)),
            ("X", name(if norm_threads > 0 { self.x().dtype } else { self.dtype })),
            ("SCALED", by.scaled()),
            ("CODE", by.code()),
            ("QUANTISE", flag(matches!(by, StreamedX::Quantised(_)))),
            ("ROWS", &of_rows),
            ("SPANS", &of_spans),
            ("STAGED", flag(staged)),
            ("VECTORS", &of_vectors),
            ("WARPS", &of_warps),
            ("STAGES", &of_stages),
            ("COUNT", &*of_count),
            ("ADD", flag(self.after == LinearEpilogue::Add)),
            ("BIAS", flag(self.biases)),
            ("BIAS_TYPE", name(self.spec.inputs[self.bias(0)].dtype)),
            ("SWIGLU", flag(self.after == LinearEpilogue::Swiglu)),
            ("NORM", &of_norm),
            ("NORM_TYPE", name(gain.dtype)),
            ("CACHED", flag(caches)),
        ];
        defines.extend(of_cache.iter().map(|(name, value)| (*name, value.as_str())));
        let mut args = self.streaming_args(x);
        args.extend(scales.clone());
        args.extend(caches.then(|| cache_epilogue::args(self.spec)).into_iter().flatten());
        let source = CudaSource::new("linear_rows", &defines, &ROWS);
        let blocks = [self.tiles(spans * COLUMNS), self.rows.div_ceil(rows), 1];
        let mut launch = grid(source, blocks, 32 * warps as u32, args)?;
        self.prefetch_weights(&mut launch, shared as u32);
        Ok(launch)
    }
}

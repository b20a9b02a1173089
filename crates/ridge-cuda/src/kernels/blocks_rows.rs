//! Products of several rows by weights in blocks of few bits on Hopper: `kernels/blocks_rows.cu`.

use super::block_text::{BlockText, CHUNK, Formats};
use super::cache_epilogue;
use super::linear_call::{LinearCall, LinearEpilogue};
use crate::gemm::PROCESSORS;
use crate::kernel::{CudaKernel, CudaSource, KernelText, OperandSlot, flag, grid, name};

/// The weights are prefetched; see [`crate::kernel::DeviceAction::Launch`].
pub(super) const SEVERAL: KernelText<'_> = KernelText::new(concat!(
    include_str!("../../kernels/blocks.cuh"),
    include_str!("../../kernels/angles.cuh"),
    include_str!("../../kernels/blocks_rows.cuh"),
    include_str!("../../kernels/blocks_rows.cu")
))
.with_hopper()
.early_launch();

/// The architecture that it is for.
pub(super) const ARCH: &str = "sm_90a";
/// Maximum number of rows.
const MAX_ROWS: usize = 16;
/// Warps of a block, of which a multiprocessor has one.
const WARPS: usize = 8;
/// Slices of 16 columns of a tile.
const SLICES: usize = 2;
/// Shared memory of a block of Hopper, less what the launch itself takes of it.
const ROOM: usize = 226 << 10;
/// Tiles of a batch that are enough, where blocks have more.
const ENOUGH_TILES: usize = 4;

/// Stages of a ring, by which weights are on their way, from what is best on.
const STAGES: [usize; 2] = [3, 2];
/// Blocks of a cluster. Of clusters of four an H200 runs 30 at once, which leaves it too many multiprocessors.
const CLUSTER: usize = 2;
/// Tiles of a cluster from which on it pays: it takes some 9 us before the first, as long as the kernel of every GPU takes for two.
const LEAST_TILES: usize = 3;

/// How blocks divide the work.
struct Division {
    /// `ROWS`, `CLUSTER`, `STAGES`, `RING` and `BATCH` of the text.
    rows: usize,
    cluster: usize,
    stages: usize,
    ring: usize,
    batch: usize,
    /// Bytes of a block's shared memory.
    shared: usize,
}

impl Division {
    /// For so many rows of `depth` and so many tiles of weights in `formats`; `None` where a block has no room, or it does not pay.
    fn new(rows: usize, depth: usize, tiles: usize, formats: &Formats, normed: bool) -> Option<Self> {
        let rows = if rows <= 8 { 8 } else { MAX_ROWS };
        let chunks = depth / CHUNK;
        // As `SUMS` and `Fragments` of the text.
        let sums = SLICES * rows * 20 * 4;
        let of_x = rows / 8 * (CHUNK / 32 * 512 + 256) + rows * 4;
        let cluster = CLUSTER.min(chunks);
        let tiles = tiles.div_ceil(PROCESSORS / cluster);
        // x stays: reading it in turns for each batch loses what is gained.
        let own = chunks.div_ceil(cluster);
        let squares = if normed { (own + 1) * rows * 4 } else { 0 };
        let with = |stages: usize| {
            let ring = formats.distinct().map(|f| SLICES * stages * f.stage_bytes()).max()?;
            let before = WARPS * ring + own * of_x + squares;
            let room = (ROOM.checked_sub(before)? / sums).checked_sub(WARPS)?;
            // Batches of as many tiles each.
            let batch = tiles.div_ceil(tiles.div_ceil(room.max(1)));
            let shared = before + (WARPS + batch) * sums;
            (room >= tiles.min(ENOUGH_TILES)).then_some(Self { rows, cluster, stages, ring, batch, shared })
        };
        if tiles < LEAST_TILES { None } else { STAGES.into_iter().find_map(with) }
    }
}

/// Are there blocks for these linears? They are of 2 to [`MAX_ROWS`] rows by weights of codes and scales that f16 holds together, of
/// [`LEAST_TILES`] tiles a cluster, and of a depth whose x fits into its shared memory.
pub(super) fn serves(linears: &LinearCall<'_>, formats: &Formats) -> bool {
    division(linears, formats).is_some()
}

fn tiles(linears: &LinearCall<'_>) -> usize {
    linears.tiles(if linears.after == LinearEpilogue::Swiglu { 16 } else { 16 * SLICES })
}

fn division(linears: &LinearCall<'_>, formats: &Formats) -> Option<Division> {
    let LinearCall { rows, depth, .. } = *linears;
    let some = depth > 0 && depth.is_multiple_of(CHUNK) && tiles(linears) > 0;
    let few = (2..=MAX_ROWS).contains(&rows) && formats.distinct().all(BlockText::is_exact_in_f16);
    (some && few).then(|| Division::new(rows, depth, tiles(linears), formats, linears.norm.is_some()))?
}

/// The launch for linears that it [`serves`].
///
/// # Errors
/// Where it does not.
pub(super) fn linear(linears: &LinearCall<'_>, formats: &Formats) -> Result<CudaKernel, String> {
    let gated = linears.after == LinearEpilogue::Swiglu;
    let division = division(linears, formats).ok_or("there are no blocks for these rows, columns and formats")?;
    let Division { rows, cluster, stages, ring, batch, shared } = division;
    let [rows, of_cluster, stages, ring, batch, warps, depth, count] =
        [rows, cluster, stages, ring, batch, WARPS, linears.depth, linears.count].map(|n| n.to_string());
    let gain = &linears.spec.inputs[linears.x + usize::from(linears.norm.is_some())];
    let caches = linears.after == LinearEpilogue::Cache;
    let of_cache = if caches { cache_epilogue::defines(linears.spec) } else { Vec::new() };
    let defines = [
        ("D", name(linears.x().dtype)),
        ("ROWS", &*rows),
        ("DEPTH", &*depth),
        ("CLUSTER", &*of_cluster),
        ("WARPS", &*warps),
        ("STAGES", &*stages),
        ("RING", &*ring),
        ("BATCH", &*batch),
        ("COUNT", &*count),
        ("EACH_FORMAT(F)", &*formats.each()),
        ("FORMATS", &*formats.places()),
        ("ADD", flag(linears.after == LinearEpilogue::Add)),
        ("BIAS", flag(linears.biases)),
        ("BIAS_TYPE", name(linears.spec.inputs[linears.bias(0)].dtype)),
        ("SWIGLU", flag(gated)),
        ("NORM", flag(linears.norm.is_some())),
        ("NORM_TYPE", name(gain.dtype)),
        ("CACHED", flag(caches)),
    ];
    let defines: Vec<(&str, &str)> =
        defines.into_iter().chain(of_cache.iter().map(|(name, value)| (*name, value.as_str()))).collect();
    let source = CudaSource::new("linear_blocks_rows", &defines, &SEVERAL.persistent(cluster as u32));
    let blocks = [tiles(linears) * cluster, 1, 1];
    let mut args = linears.streaming_args((OperandSlot::Input(linears.x), 0));
    args.extend(caches.then(|| cache_epilogue::args(linears.spec)).into_iter().flatten());
    let mut kernel = grid(source, blocks, 32 * WARPS as u32, args)?;
    linears.prefetch_weights(&mut kernel, shared as u32);
    Ok(kernel)
}

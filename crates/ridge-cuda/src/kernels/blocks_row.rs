//! Products of one row by weights in block formats: `kernels/blocks_row.cu`.

use super::block_text::{BlockText, CHUNK, Formats};
use super::linear_call::{LinearCall, LinearEpilogue};
use super::norm;
use crate::gemm::PROCESSORS;
use crate::kernel::{CudaKernel, CudaSource, DeviceAction, KernelText, LaunchArg, OperandSlot, flag, name};

/// The weights are prefetched; see [`DeviceAction::Launch`].
pub(super) const ROW: KernelText<'_> = KernelText::new(concat!(
    include_str!("../../kernels/blocks.cuh"),
    include_str!("../../kernels/block_bytes.cuh"),
    include_str!("../../kernels/norm.cuh"),
    include_str!("../../kernels/digits.cuh"),
    include_str!("../../kernels/blocks_ring.cuh"),
    include_str!("../../kernels/blocks_row.cu")
))
.with_tiles()
.early_launch();

/// Columns of a tile.
pub(super) const COLUMNS: usize = 16;
/// Warps of a multiprocessor, which has registers for no more.
const RESIDENT_WARPS: usize = 16;
/// Shared memory of a multiprocessor and of a block: Hopper's, and what every GPU has.
#[derive(Clone, Copy)]
pub(super) struct Room {
    processor: usize,
    block: usize,
    /// Blocks one after another: several where the number of multiprocessors is not known, so that the last ones are few.
    turns: usize,
}
pub(super) const HOPPER: Room = Room { processor: 224 << 10, block: 224 << 10, turns: 1 };
pub(super) const EVERY: Room = Room { processor: 97 << 10, block: 97 << 10, turns: 4 };
/// Stages that are enough: of light formats, and of others, which more warps serve better. At most `MOST_STAGES` are used.
const ENOUGH_STAGES: [usize; 2] = [3, 2];
const MOST_STAGES: usize = 4;
/// What a block takes of it besides rings and x.
const OTHER_BYTES: usize = 4 << 10;
/// x as digits: bytes of each group of [`GROUP`] elements.
const DIGIT_BYTES: usize = 96 + 4 + 8;
const GROUP: usize = 32;

/// How blocks divide the work.
pub(super) struct Division {
    /// Warps of a block: `WARPS` of the text.
    warps: usize,
    /// Chunks of a warp's ring: `STAGES` of the text.
    stages: usize,
    /// Bytes of x: `STAGED` of the text.
    staged: usize,
    /// Bytes of a block's shared memory.
    shared: usize,
    /// Blocks of a multiprocessor, at a time and one after another.
    resident: usize,
    turns: usize,
}

impl Division {
    /// For columns of `depth` elements, chunks of which take `stage` bytes of a ring, and whether these are light work; `None` where a block has no
    /// room.
    pub(super) fn new(room: Room, depth: usize, [stage, staged]: [usize; 2], light: bool) -> Option<Self> {
        let chunks = depth.div_ceil(CHUNK);
        // As many warps as share the chunks evenly.
        let slots = |warps: usize| chunks.div_ceil(warps) * warps;
        let warps = (2..=8).rev().min_by_key(|&warps| slots(warps))?;
        let stages = |resident: usize| {
            let bytes = (room.processor / resident).min(room.block).saturating_sub(OTHER_BYTES + staged);
            (bytes / (warps * stage)).min(MOST_STAGES)
        };
        // As many blocks of a multiprocessor as have rings that are long enough.
        let resident = (2..=RESIDENT_WARPS / warps)
            .rev()
            .find(|&resident| stages(resident) >= ENOUGH_STAGES[usize::from(!light)])
            .unwrap_or(1);
        let stages = stages(resident);
        (stages >= 2).then_some(Self {
            warps,
            stages,
            staged,
            shared: staged + warps * stages * stage,
            resident,
            turns: room.turns,
        })
    }

    /// Blocks of a launch over so many tiles.
    pub(super) fn blocks(&self, tiles: usize) -> usize {
        tiles.min(PROCESSORS * self.resident * self.turns)
    }

    /// The launch of `entry` over so many tiles.
    pub(super) fn launch(
        &self,
        entry: &str,
        text: &KernelText<'_>,
        defines: &[(&str, &str)],
        tiles: usize,
        args: Vec<LaunchArg>,
        prefetched: Vec<OperandSlot>,
    ) -> DeviceAction {
        let texts = [self.warps, self.stages, self.staged].map(|n| n.to_string());
        let mut defines = defines.to_vec();
        defines.extend(["WARPS", "STAGES", "STAGED"].into_iter().zip(texts.iter().map(String::as_str)));
        DeviceAction::Launch {
            source: CudaSource::new(entry, &defines, text),
            grid: [self.blocks(tiles) as u32, 1, 1],
            threads: 32 * self.warps as u32,
            shared: self.shared as u32,
            args,
            prefetched,
        }
    }
}

/// Bytes of a row of x as digits.
pub(super) fn digits(depth: usize) -> usize {
    depth.div_ceil(CHUNK) * (CHUNK / GROUP) * DIGIT_BYTES
}

/// A kernel for Hopper, and one for every GPU.
pub(super) fn by_arch(hopper: CudaKernel, others: CudaKernel) -> CudaKernel {
    let scratch = hopper.scratch.max(others.scratch);
    let action = DeviceAction::ByArch { arch: "sm_90a", actions: hopper.actions, otherwise: others.actions };
    CudaKernel { scratch, ..action.into() }
}

/// Linears of one row, by weights of these formats; `otherwise` where blocks have no room for x.
pub(super) fn linear(
    linears: &LinearCall<'_>,
    formats: &Formats,
    otherwise: impl FnOnce() -> Result<CudaKernel, String>,
) -> Result<CudaKernel, String> {
    let others = linear_in(EVERY, linears, formats)?.map_or_else(otherwise, Ok)?;
    Ok(match linear_in(HOPPER, linears, formats)? {
        Some(hopper) => by_arch(hopper, others),
        None => others,
    })
}

fn linear_in(room: Room, linears: &LinearCall<'_>, formats: &Formats) -> Result<Option<CudaKernel>, String> {
    let gated = linears.after == LinearEpilogue::Swiglu;
    let sides: usize = if gated { 2 } else { 1 };
    let paired = formats.distinct().filter(|format| format.is_paired()).count();
    if paired > 0 && paired < formats.distinct().count() {
        return Ok(None);
    }
    let stage = sides * formats.distinct().map(BlockText::stage_bytes).max().unwrap_or(0);
    let light = formats.distinct().all(BlockText::is_light);
    let division = |staged: usize| Division::new(room, linears.depth, [stage, staged], light);
    let bytes = linears.depth * linears.x().dtype.size_bytes();
    let threads = norm::threads_of(bytes / 16);
    // The norm is made on the way if the block has the threads for its sums, and room for its result.
    let with_norm = linears.norm.and_then(|_| division(digits(linears.depth) + bytes));
    let with_norm = with_norm.filter(|division| threads <= 32 * division.warps);
    let on_the_way = with_norm.is_some();
    let Some(division) = with_norm.or_else(|| division(digits(linears.depth))) else {
        return Ok(None);
    };
    let (mut kernel, x) =
        if on_the_way { (CudaKernel::default(), (OperandSlot::Input(linears.x), 0)) } else { linears.normed()? };
    let gain = &linears.spec.inputs[linears.x + usize::from(linears.norm.is_some())];
    let defines = [
        ("GROUPED", "0"),
        ("D", name(linears.x().dtype)),
        ("DEPTH", &*linears.depth.to_string()),
        ("COUNT", &*linears.count.to_string()),
        ("EACH_FORMAT(F)", &*formats.each()),
        ("FORMATS", &*formats.places()),
        ("PAIRED", flag(paired > 0)),
        ("ADD", flag(linears.after == LinearEpilogue::Add)),
        ("BIAS", flag(linears.biases)),
        ("BIAS_TYPE", name(linears.spec.inputs[linears.bias(0)].dtype)),
        ("SWIGLU", flag(gated)),
        ("NORM", if on_the_way { &*threads.to_string() } else { "0" }),
        ("NORM_TYPE", name(gain.dtype)),
    ];
    if linears.column_blocks() == 0 {
        return Ok(Some(CudaKernel::default()));
    }
    let weights = (0..linears.count).map(|i| OperandSlot::Input(linears.first + i)).collect();
    let (tiles, args) = (linears.column_blocks(), linears.streaming_args(x));
    kernel.actions.push(division.launch("linear_blocks_row", &ROW, &defines, tiles, args, weights));
    Ok(Some(kernel))
}

//! The whole gradient of a norm, with the sums over its rows: `kernels/norm_gradients.cu`.

use ridge_graph::Function;
use ridge_graph::ops::NormGradients;

use super::entry::CudaKernelEntry;
use crate::kernel::{
    CudaKernel, CudaKernelSpec, CudaSource, KernelText, LaunchArg, OperandSlot, grid, input, name, numbers, output,
};

pub(super) const GRADIENTS: KernelText<'_> =
    KernelText::new(include_str!("../../kernels/norm_gradients.cu")).with_tiles().early_launch();

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    let all = [
        ("layer_norm_gradients", "layer_norm_gradients(x, w, dy)"),
        ("rms_norm_gradients", "rms_norm_gradients(x, w, dy)"),
        ("layer_norm_gradients_add", "layer_norm_gradients(x, w, dy, r)"),
        ("rms_norm_gradients_add", "rms_norm_gradients(x, w, dy, r)"),
    ];
    all.map(|(name, pattern)| CudaKernelEntry::new(name, pattern, supports, make).numerics_by_extents()).into()
}

/// Elements of a row at most: sums of its columns stay in registers.
const MAX_ROW: usize = 8192;
/// Vectors of 16 bytes up to which a warp makes a row, and rows that a block of warps makes at a time.
const WARP_VECTORS: usize = 96;
const LINES: usize = 4;
/// Threads of a row at most, and below which a thread holds one vector.
const THREADS: usize = 512;
const ONE_VECTOR_THREADS: usize = 256;
/// Multiprocessors of an H100. The number of blocks does not depend on the GPU, so that the order of sums does not.
const MULTIPROCESSORS: usize = 132;
/// 32-bit registers of a multiprocessor, and those of a thread beside sums and one row.
const REGISTERS: usize = 65_536;
const OTHER_REGISTERS: usize = 48;
/// Bytes of shared memory of a block at most, which all GPUs since `sm_80` have, and of the blocks of a multiprocessor: more
/// on their way would gain nothing.
const MAX_SHARED: usize = 96 << 10;
const ALL_SHARED: usize = 160 << 10;
/// Blocks of a multiprocessor at most, where a block makes several rows or one.
const MAX_RESIDENT: [usize; 2] = [4, 8];
/// Threads of a block that adds parts, and its columns.
const JOIN_THREADS: u32 = 256;
const JOIN_COLUMNS: usize = 32;

/// Rows, all of one type, are whole vectors that fit into registers.
fn supports(body: &Function) -> bool {
    let x = &body.args[0].ty;
    let size = x.dtype.size_bytes();
    let fits = |row: usize| row > 0 && row <= MAX_ROW && (row * size).is_multiple_of(16);
    size >= 2 && x.shape.rank() > 1 && x.shape.last().as_const().is_some_and(fits)
}

/// How rows are divided among threads and blocks.
#[derive(Clone, Copy)]
struct Division {
    /// Vectors of 16 bytes that a thread holds.
    vectors: usize,
    /// Threads of a row.
    threads: usize,
    /// Rows that a block makes at a time.
    lines: usize,
    /// Rows that are in shared memory or on their way there.
    stages: usize,
    /// Blocks of a multiprocessor.
    resident: usize,
    /// Bytes of shared memory of a block.
    shared: usize,
}

/// The division of rows of so many bytes, of which `operands` are read and `kinds` sums kept.
fn division(row_bytes: usize, wide: usize, operands: usize, kinds: usize) -> Division {
    let all = row_bytes / 16;
    let (threads, lines) = match all {
        0..=WARP_VECTORS => (32, LINES),
        _ if all <= ONE_VECTOR_THREADS => (all.next_multiple_of(32), 1),
        _ => (all.div_ceil(2).next_multiple_of(32).clamp(ONE_VECTOR_THREADS, THREADS), 1),
    };
    let vectors = all.div_ceil(threads);
    let stage = lines * operands * vectors * threads * 16;
    let stages = if 2 * stage <= MAX_SHARED { 2 } else { 1 };
    let shared = stages * stage;
    let registers = ((kinds + 1) * vectors * wide + OTHER_REGISTERS).next_multiple_of(8);
    let most = MAX_RESIDENT[usize::from(lines == 1)];
    let resident = (REGISTERS / (registers * threads * lines)).min(ALL_SHARED / shared).clamp(1, most);
    Division { vectors, threads, lines, stages, resident, shared }
}

fn make(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let op = *spec.composite::<NormGradients>().ok_or("no gradient in the group")?;
    let x = &spec.inputs[0];
    let row = x.shape.last().copied().unwrap_or(1);
    let rows = x.len() / row.max(1);
    let sums = &spec.outputs[1..];
    let size = x.dtype.size_bytes();
    let divided = division(row * size, 16 / size, 2 + usize::from(op.added), sums.len());
    let parts = rows.div_ceil(divided.lines).clamp(1, MULTIPROCESSORS * divided.resident);
    let numeric = [
        ("VECTORS", divided.vectors),
        ("THREADS", divided.threads),
        ("LINES", divided.lines),
        ("STAGES", divided.stages),
        ("RESIDENT", divided.resident),
    ]
    .map(|(name, n)| (name, n.to_string()));
    let flag = |on: bool| if on { "1" } else { "0" };
    let mut defines = vec![
        ("D", name(x.dtype)),
        ("W", name(spec.inputs[1].dtype)),
        ("ADD", flag(op.added)),
        ("CENTRED", flag(op.centred)),
        ("OF_DY", flag(op.bias.is_some())),
        ("OF_OUT", flag(op.sum.is_some())),
        ("OF_R", flag(op.sum_added.is_some())),
    ];
    // Of sums that are not wanted, nothing is written.
    let dtype = |kind: usize| name(sums.get(kind).unwrap_or(&sums[0]).dtype);
    defines.extend(["OUT0", "OUT1", "OUT2", "OUT3"].into_iter().enumerate().map(|(kind, name)| (name, dtype(kind))));
    defines.extend(numeric.iter().map(|(name, n)| (*name, n.as_str())));
    let source = |entry| CudaSource::new(entry, &defines, &GRADIENTS);

    let scratch = LaunchArg::Pointer(OperandSlot::Scratch, 0);
    let r = input(if op.added { 3 } else { 0 });
    let eps = LaunchArg::Float(op.eps as f32);
    let args = vec![input(0), input(1), input(2), r, output(0), scratch.clone(), eps, numbers(&[rows, row])];
    let threads = (divided.threads * divided.lines) as u32;
    let mut kernel = grid(source("norm_gradients"), [parts, 1, 1], threads, args)?.with_shared(divided.shared as u32);
    kernel.scratch = sums.len() * parts * row * 4;
    let mut args = vec![scratch];
    args.extend((0..4).map(|kind| output(1 + kind.min(sums.len() - 1))));
    args.push(numbers(&[parts, row]));
    let blocks = [row.div_ceil(JOIN_COLUMNS), sums.len(), 1];
    kernel.actions.extend(grid(source("norm_gradients_join"), blocks, JOIN_THREADS, args)?.actions);
    Ok(kernel)
}

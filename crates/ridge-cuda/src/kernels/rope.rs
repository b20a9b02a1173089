//! Rotations, and what is written to the cache: `kernels/rope.cu`.

use ridge_graph::Function;
use ridge_graph::ops::Rope;

use super::entry::CudaKernelEntry;
use crate::kernel::{
    CudaKernel, CudaKernelSpec, CudaSource, KernelText, LaunchArg, OperandSlot, grid, input, name, numbers, output,
};

pub(super) const ROPE: KernelText<'_> =
    KernelText::new(concat!(include_str!("../../kernels/rotate.cuh"), include_str!("../../kernels/rope.cu")))
        .early_launch();

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    vec![
        CudaKernelEntry::new("rope", "rope(x, positions)", |_| true, rope),
        CudaKernelEntry::new("kv_write", "kv_write(kv, k, v, slots)", two_sided, write),
        CudaKernelEntry::new("rope_kv_write", "kv_write(kv, rope(k, positions), v, slots)", two_sided, write),
        CudaKernelEntry::new("key_write", "kv_write(kv, k, slots)", |_| true, write),
        CudaKernelEntry::new("rope_key_write", "kv_write(kv, rope(k, positions), slots)", |_| true, write),
    ]
}

/// Has the cache, the first argument, keys and values? One of codes with one side has scales in the place of slots.
fn two_sided(body: &Function) -> bool {
    body.args[0].ty.shape.0[1].as_const() == Some(2)
}

/// Heads of a block: a token's angles are taken once for them, and few tokens are many blocks.
fn held(tokens: usize, heads: usize) -> usize {
    if tokens >= 64 { heads.clamp(1, 32) } else { 2 }
}

/// What `kernels/rotate.cuh` takes; nothing is rotated without `op`.
pub(super) fn rotation(op: Option<&Rope>) -> [(&'static str, String); 3] {
    let (freqs, scale) = op.map_or((&[][..], 1.0), |op| (&op.inv_freq[..], op.scale));
    let list = freqs.iter().map(|f| format!("{f:e}")).collect::<Vec<_>>().join(", ");
    [("PAIRS", freqs.len().to_string()), ("FREQUENCIES", list), ("SCALE", format!("{scale:e}"))]
}

fn source(entry: &str, op: Option<&Rope>, defines: &[(&str, &str)]) -> std::sync::Arc<CudaSource> {
    let rotation = rotation(op);
    let all: Vec<(&str, &str)> =
        rotation.iter().map(|(name, value)| (*name, value.as_str())).chain(defines.iter().copied()).collect();
    CudaSource::new(entry, &all, &ROPE)
}

fn rope(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    rotate(spec, OperandSlot::Output(0))
}

/// Inputs 0 and 1, x and positions, to x rotated at `out`.
pub(super) fn rotate(spec: &CudaKernelSpec<'_>, out: OperandSlot) -> Result<CudaKernel, String> {
    let op = spec.composite::<Rope>().ok_or("no rope in the group")?;
    let [tokens, heads, dim] = spec.inputs[0].shape[..] else { return Err("x must have three axes".into()) };
    let held = held(tokens, heads);
    let defines =
        [("D", name(spec.inputs[0].dtype)), ("DIM", &*dim.to_string()), ("HEADS", &*held.to_string()), ("WRITE", "0")];
    let args = vec![input(0), input(1), LaunchArg::Pointer(out, 0), numbers(&[tokens, heads])];
    grid(source("rope", Some(op), &defines), [tokens, heads.div_ceil(held), 1], 256, args)
}

fn write(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let op = spec.composite::<Rope>();
    let (cache, k) = (&spec.inputs[0], &spec.inputs[1]);
    let [blocks, sides, heads, block, dim] = cache.shape[..] else {
        return Err("the cache must have five axes".into());
    };
    let tokens = k.shape[0];
    let held = held(tokens, heads);
    let defines = [
        ("D", name(k.dtype)),
        ("CACHE", name(cache.dtype)),
        ("DIM", &*dim.to_string()),
        ("BLOCK", &*block.to_string()),
        ("SIDES", &*sides.to_string()),
        ("HEADS", &*held.to_string()),
        ("WRITE", "1"),
    ];
    // Without a rotation there are no positions, and none are read; nor are values of a cache with one side.
    let rest = if op.is_some() { 3 } else { 2 };
    let slots = rest + sides - 1;
    let (positions, v) = (if op.is_some() { 2 } else { slots }, rest);
    let n = numbers(&[tokens, heads, blocks * block]);
    let args = vec![output(0), input(1), input(v), input(positions), input(slots), n];
    grid(source("kv_write", op, &defines), [tokens * usize::from(dim > 0), heads.div_ceil(held), 1], 256, args)
}

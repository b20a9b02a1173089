//! Rotations, and what is written to the cache: `kernels/rope.cu`.

use ridge_graph::ops::{RmsNorm, Rope};
use ridge_graph::{DType, Dim, Function, Node, Op, Prim};

use super::body::slice_of_arg;
use super::entry::CudaKernelEntry;
use crate::kernel::{
    CudaKernel, CudaKernelSpec, CudaSource, KernelText, LaunchArg, OperandSlot, composite, each, flag, grid, input,
    name, numbers, output,
};

pub(super) const ROPE: KernelText<'_> = KernelText::new(concat!(
    include_str!("../../kernels/angles.cuh"),
    include_str!("../../kernels/rotate.cuh"),
    include_str!("../../kernels/rope.cu")
))
.early_launch();

/// The cosines and sines of tokens, for kernels that rotate on their way.
pub(super) const TABLE: KernelText<'_> =
    KernelText::new(concat!(include_str!("../../kernels/angles.cuh"), include_str!("../../kernels/rotary_table.cu")))
        .early_launch();

/// A key that is a latent, behind what is rotated: of a row that has both the other way round, the latent is normed.
const LATENT_KEY: &str = "reshape(concat(slice(row), rms_norm(slice(row), w)))";

/// Keys that are latents, with what is rotated as it is, or of pairs of neighbours.
fn latent_entries() -> impl Iterator<Item = CudaKernelEntry> {
    let neighbours = format!("concat(reshape(transpose(reshape(slice(k@{LATENT_KEY})))), slice(k))");
    let keys = [("", LATENT_KEY.to_owned()), ("interleaved_", neighbours)];
    keys.into_iter().flat_map(|(of_pairs, key)| {
        ["", "_codes"].map(|codes| {
            let scales = if codes.is_empty() { "" } else { ", scales" };
            let pattern = format!("kv_write(kv, rope({key}, positions), slots{scales})");
            let name = format!("{of_pairs}latent_key_write{codes}");
            CudaKernelEntry::new(name, &pattern, |body| LatentKey::read(body).is_some(), write)
        })
    })
}

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    let mut entries = plain_entries();
    entries.extend(latent_entries());
    entries
}

fn plain_entries() -> Vec<CudaKernelEntry> {
    vec![
        CudaKernelEntry::new("rope", "rope(x, positions)", |_| true, rope),
        CudaKernelEntry::new("norm_rope", "rope(rms_norm(x, w), positions)", |_| true, rope),
        CudaKernelEntry::new("kv_write", "kv_write(kv, k, v, slots)", two_sided, write),
        CudaKernelEntry::new("rope_kv_write", "kv_write(kv, rope(k, positions), v, slots)", two_sided, write),
        CudaKernelEntry::new(
            "norm_rope_kv_write",
            "kv_write(kv, rope(rms_norm(k, w), positions), v, slots)",
            two_sided,
            write,
        ),
        CudaKernelEntry::new("key_write", "kv_write(kv, k, slots)", one_sided, write),
        CudaKernelEntry::new("rope_key_write", "kv_write(kv, rope(k, positions), slots)", one_sided, write),
        CudaKernelEntry::new(
            "kv_write_codes",
            "kv_write(kv, k, v, slots, scales)",
            |body| two_sided(body) && some(body),
            write,
        ),
        CudaKernelEntry::new(
            "rope_kv_write_codes",
            "kv_write(kv, rope(k, positions), v, slots, scales)",
            |body| two_sided(body) && some(body),
            write,
        ),
        CudaKernelEntry::new(
            "norm_rope_kv_write_codes",
            "kv_write(kv, rope(rms_norm(k, w), positions), v, slots, scales)",
            |body| two_sided(body) && some(body),
            write,
        ),
        CudaKernelEntry::new(
            "key_write_codes",
            "kv_write(kv, k, slots, scales)",
            |body| one_sided(body) && some(body),
            write,
        ),
        CudaKernelEntry::new(
            "rope_key_write_codes",
            "kv_write(kv, rope(k, positions), slots, scales)",
            |body| one_sided(body) && some(body),
            write,
        ),
    ]
}

/// Has the cache, the first argument, keys and values? One of codes with one side has scales in the place of slots.
fn two_sided(body: &Function) -> bool {
    body.args[0].ty.shape.0[1].as_const() == Some(2)
}

/// Are keys the values too?
fn one_sided(body: &Function) -> bool {
    body.args[0].ty.shape.0[1].as_const() == Some(1)
}

/// Have heads elements? Without, there are scales all the same, and nothing to launch for.
fn some(body: &Function) -> bool {
    body.args[0].ty.shape.0[4].as_const().is_some_and(|dim| dim > 0)
}

/// How a key that is a latent lies in its row.
struct LatentKey {
    /// Are pairs neighbours before they are rotated?
    interleaved: bool,
}

impl LatentKey {
    /// That of a group that writes one.
    fn read(body: &Function) -> Option<Self> {
        let rope: &Rope = composite(body)?;
        let is_norm = |node: &&Node| matches!(&node.op, Op::Composite(op) if op.downcast::<RmsNorm>().is_some());
        let normed = slice_of_arg(body, body.nodes.iter().find(is_norm)?.inputs[0], 1)?;
        let (dim, turned) = (body.args[0].ty.shape.last().as_const()?, 2 * rope.inv_freq.len());
        let rank = dim.checked_sub(turned).filter(|rank| *rank > 0 && turned > 0)?;
        let of_row: Vec<_> = (0..body.nodes.len()).filter_map(|i| slice_of_arg(body, body.var(i, 0), 1)).collect();
        // What is rotated, and the latent ahead of it.
        let is_part = |first: usize, len: usize| of_row.iter().any(|part| (part.0, part.1) == (first, len));
        let interleaved = body.nodes.iter().find_map(|node| match &node.op {
            Op::Prim(Prim::Transpose(perm)) => Some((**perm == [0, 1, 3, 2]).then_some(node)),
            _ => None,
        });
        // All that is rotated is in pairs.
        let pairs = |node: &Node| {
            let shape = &body.ty(node.inputs[0]).shape;
            shape.last().as_const() == Some(2) && shape.0.get(2).and_then(Dim::as_const) == Some(turned / 2)
        };
        let known = interleaved.is_none_or(|node| node.is_some_and(pairs));
        let one = body.args[0].ty.shape.0[2].as_const() == Some(1);
        let whole = is_part(rank, turned) && (normed.0, normed.1) == (0, rank) && of_row.len() == 2;
        (one_sided(body) && one && known && whole).then_some(Self { interleaved: interleaved.is_some() })
    }
}

/// Heads of a block: a token's angles are taken once for them, and few tokens are many blocks.
fn held(tokens: usize, heads: usize) -> usize {
    if tokens >= 64 { heads.clamp(1, 32) } else { 2 }
}

/// What `kernels/angles.cuh` takes; nothing is rotated without `op`.
pub(super) fn rotation(op: Option<&Rope>) -> [(&'static str, String); 3] {
    let (freqs, scale) = op.map_or((&[][..], 1.0), |op| (&op.inv_freq[..], op.scale));
    let list = freqs.iter().map(|f| format!("{f:e}")).collect::<Vec<_>>().join(", ");
    [("PAIRS", freqs.len().to_string()), ("FREQUENCIES", list), ("SCALE", format!("{scale:e}"))]
}

/// The norm of heads before their rotation, of which input `gain` is the weight, as kernels take it: two definitions of
/// `kernels/rotate.cuh`, and two arguments if there is a norm.
pub(super) fn head_norm(spec: &CudaKernelSpec<'_>, gain: usize) -> ([(&'static str, &'static str); 2], Vec<LaunchArg>) {
    match spec.composite::<RmsNorm>() {
        Some(norm) => {
            let defines = [("NORM", "1"), ("NORM_TYPE", name(spec.inputs[gain].dtype))];
            (defines, vec![input(gain), LaunchArg::Float(norm.eps as f32)])
        }
        None => no_norm(),
    }
}

/// The same of heads that are not normed.
pub(super) fn no_norm() -> ([(&'static str, &'static str); 2], Vec<LaunchArg>) {
    ([("NORM", "0"), ("NORM_TYPE", "F32")], Vec::new())
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

/// Does [`table`] take rotations of so many pairs? They are whole vectors of 8.
pub(super) fn has_table(op: &Rope) -> bool {
    !op.inv_freq.is_empty() && op.inv_freq.len().is_multiple_of(8)
}

/// The cosines and sines by which `tokens` tokens at positions of input 1 are rotated, in f32 at the beginning of scratch memory.
pub(super) fn table(op: &Rope, tokens: usize) -> CudaKernel {
    let rotation = rotation(Some(op));
    let defines = rotation.each_ref().map(|(name, value)| (*name, value.as_str()));
    let source = CudaSource::new("rotary_table", &defines, &TABLE);
    let pairs = tokens * op.inv_freq.len();
    let args = vec![input(1), LaunchArg::Pointer(OperandSlot::Scratch, 0), numbers(&[tokens])];
    CudaKernel { scratch: pairs * 2 * DType::F32.size_bytes(), ..each(source, pairs, args) }
}

/// Inputs 0 and 1, x and positions, to x rotated at `out`; normed before with the weight between them.
pub(super) fn rotate(spec: &CudaKernelSpec<'_>, out: OperandSlot) -> Result<CudaKernel, String> {
    let op = spec.composite::<Rope>().ok_or("no rope in the group")?;
    let [tokens, heads, dim] = spec.inputs[0].shape[..] else { return Err("x must have three axes".into()) };
    let held = held(tokens, heads);
    let (norm, gain) = head_norm(spec, 1);
    let positions = if gain.is_empty() { 1 } else { 2 };
    let (dim_text, held_text) = (dim.to_string(), held.to_string());
    let defines = [("D", name(spec.inputs[0].dtype)), ("DIM", &*dim_text), ("HEADS", &*held_text), ("WRITE", "0")];
    let defines = [&defines[..], &norm].concat();
    let mut args = vec![input(0), input(positions), LaunchArg::Pointer(out, 0)];
    args.extend(gain);
    args.push(numbers(&[tokens, heads]));
    let kernel = grid(source("rope", Some(op), &defines), [tokens, heads.div_ceil(held), 1], 256, args)?;
    Ok(kernel.prefetching([positions]))
}

fn write(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let op = spec.composite::<Rope>();
    let (cache, k) = (&spec.inputs[0], &spec.inputs[1]);
    let [blocks, sides, heads, block, dim] = cache.shape[..] else {
        return Err("the cache must have five axes".into());
    };
    let tokens = k.shape[0];
    let held = held(tokens, heads);
    let [dim_text, block_text, sides_text, held_text] = [dim, block, sides, held].map(|n| n.to_string());
    let latent = LatentKey::read(spec.body);
    // The row of a latent is an input twice.
    let of_k = if latent.is_some() { 2 } else { 1 };
    let (norm, gain) = head_norm(spec, 1 + of_k);
    let coded = spec.outputs.len() > 1;
    let defines = [
        ("D", name(k.dtype)),
        ("CACHE", name(cache.dtype)),
        ("DIM", &*dim_text),
        ("BLOCK", &*block_text),
        ("SIDES", &*sides_text),
        ("HEADS", &*held_text),
        ("CODED", flag(coded)),
        ("WRITE", "1"),
        ("LATENT", flag(latent.is_some())),
        ("INTERLEAVED", flag(latent.is_some_and(|key| key.interleaved))),
    ];
    let defines = [&defines[..], &norm].concat();
    // Without a rotation there are no positions, and none are read; nor are values of a cache with one side.
    let rest = 1 + of_k + usize::from(op.is_some()) + usize::from(!gain.is_empty());
    let slots = rest + sides - 1;
    let (positions, v) = (if op.is_some() { rest - 1 } else { slots }, rest);
    let mut args = vec![output(0), input(1), input(v), input(positions), input(slots)];
    args.extend(coded.then(|| output(1)));
    args.extend(gain);
    args.push(numbers(&[tokens, heads, blocks * block]));
    let blocks = [tokens * usize::from(dim > 0), heads.div_ceil(held), 1];
    Ok(grid(source("kv_write", op, &defines), blocks, 256, args)?.prefetching([positions, slots]))
}

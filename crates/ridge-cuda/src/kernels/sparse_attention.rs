//! Sparse attention: the positions that an indexer scores best (`kernels/index_topk.cu`), and attention to them, which
//! `attention.rs` launches.

use ridge_graph::ops::{IndexTopK, PagedAttention, SelectedAttention};
use ridge_graph::{DType, Function};

use super::attention::{AttentionCall, ENOUGH, MOST, set_shared};
use super::entry::CudaKernelEntry;
use crate::kernel::{
    CudaKernel, CudaKernelSpec, CudaSource, KernelText, LaunchArg, OperandSlot, grid, input, name, numbers, output,
};

pub(super) const INDEX: KernelText<'_> = KernelText::new(include_str!("../../kernels/index_topk.cu")).early_launch();

/// Positions of a tile of scores, at most.
const TILE: usize = 128;
/// Bytes of shared memory that a block of scores may have in all: 99 KB are the least of all GPUs from Ampere on.
const ROOM: usize = 99 << 10;
/// Heads are padded to a multiple of this: `GROUP` of the text.
const GROUP: usize = 16;

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    vec![
        CudaKernelEntry::new(
            "index_topk",
            "index_topk(q, w, keys, block_table, seq_ids, positions)",
            |body| tile_of(body).is_some(),
            index,
        ),
        CudaKernelEntry::new(
            "index_topk_codes",
            "index_topk(q, w, keys, block_table, seq_ids, positions, scales)",
            |body| tile_of(body).is_some(),
            index,
        ),
        // Selections are cut into a number of spans that the bucket's extents give.
        CudaKernelEntry::new(
            "selected_attention",
            "selected_attention(q, kv, block_table, seq_ids, selected)",
            supports_selection,
            selected_attention,
        )
        .numerics_by_extents(),
    ]
}

/// The positions of a tile whose keys, and the queries of a token, fit into shared memory, if there are such.
fn tile_of(body: &Function) -> Option<usize> {
    let q = &body.args[0].ty.shape.0;
    tile(q[1].as_const()?, q[2].as_const()?)
}

fn tile(heads: usize, dim: usize) -> Option<usize> {
    // Beside what a launch asks for, the text has a weight of each head.
    let weights = heads.next_multiple_of(GROUP) * 4;
    let fits = |tile: &usize| shared_bytes(heads, dim, *tile) + weights <= ROOM;
    [TILE, TILE / 2, TILE / 4].into_iter().find(fits).filter(|_| heads > 0 && dim > 0)
}

/// Bytes of queries and keys in f32.
fn shared_bytes(heads: usize, dim: usize, tile: usize) -> usize {
    (dim * heads.next_multiple_of(GROUP) + tile * (dim | 1)) * 4
}

fn index(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let op = spec.composite::<IndexTopK>().ok_or("no index in the group")?;
    let (q, w, keys, table) = (&spec.inputs[0], &spec.inputs[1], &spec.inputs[2], &spec.inputs[3]);
    let (tokens, heads, dim) = (q.shape[0], q.shape[1], q.shape[2]);
    let (columns, block) = (table.shape[1], keys.shape[3]);
    let tile = tile(heads, dim).ok_or("no tile of keys fits into shared memory")?;
    let scaled = spec.inputs.len() > 6;
    let defines = [
        ("D", name(q.dtype).to_owned()),
        ("W", name(w.dtype).to_owned()),
        ("CACHE", name(keys.dtype).to_owned()),
        ("DIM", dim.to_string()),
        ("HEADS", heads.to_string()),
        ("BLOCK", block.to_string()),
        ("TOP", op.top_k.to_string()),
        ("TILE", tile.to_string()),
        ("SCALES", u8::from(scaled).to_string()),
    ];
    let defines: Vec<(&str, &str)> = defines.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let n = || numbers(&[columns, table.shape[0], keys.shape[0]]);
    let scores = || LaunchArg::Pointer(OperandSlot::Scratch, 0);
    let width = columns * block;
    let mut kernel = CudaKernel::default();
    // Where all positions are kept there is nothing to score.
    if width > op.top_k {
        kernel.scratch = tokens * width * 4;
        let spans = ENOUGH.div_ceil(tokens.max(1)).min(width.div_ceil(tile)).max(1);
        let args = (0..6 + usize::from(scaled)).map(input).chain([scores(), n()]).collect();
        let source = CudaSource::new("index_scores", &defines, &INDEX);
        let mut scoring = grid(source, [tokens, spans, 1], tile as u32, args)?;
        set_shared(&mut scoring, shared_bytes(heads, dim, tile));
        kernel.actions.extend(scoring.actions);
    }
    let args = vec![input(4), input(5), scores(), output(0), n()];
    let source = CudaSource::new("index_select", &defines, &INDEX);
    kernel.actions.extend(grid(source, [tokens, 1, 1], 1024, args)?.actions);
    Ok(kernel)
}

fn supports_selection(body: &Function) -> bool {
    let (kv, selected) = (&body.args[1].ty, &body.args[4].ty.shape);
    kv.dtype != DType::I8
        && kv.shape.0[2].as_const().is_some_and(|heads| heads > 0)
        && kv.shape.0[4].as_const().is_some_and(|dim| (1..=MOST).contains(&dim))
        && selected.last().as_const().is_some_and(|count| count > 0)
}

fn selected_attention(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let op = spec.composite::<SelectedAttention>().ok_or("no selected attention in the group")?;
    let plain = PagedAttention::new(op.scale, op.pairs.clone(), op.cached.clone());
    AttentionCall::new(spec, &plain, Some(spec.inputs[4].shape[1]))?.of_tokens(spec)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_of_positions_fit_beside_the_queries_of_published_sizes() {
        // DeepSeek V3.2 and GLM-5.
        assert_eq!([tile(64, 128), tile(32, 128)], [Some(TILE); 2]);
        assert_eq!(tile(128, 128), Some(TILE / 2), "queries alone take 64 KB");
        assert_eq!(tile(256, 128), None, "queries alone take 128 KB");
    }
}

//! Keys and values of few tokens, which go to the cache in the launch of their products: `kernels/linear_rows.cu`, and for weights in blocks
//! `kernels/blocks_rows.cu`.

use ridge_graph::format::{BLOCK, ScaleLayout};
use ridge_graph::ops::{LinearGroup, Rope};
use ridge_graph::{DType, Function};

use super::block_text::Formats;
use super::entry::CudaKernelEntry;
use super::linear_call::{LinearCall, LinearEpilogue, weights, x_of};
use super::linear_rows::{MAX_ROWS, StreamedX};
use super::quantize::scaled;
use super::{blocks_rows, linear_blocks, linear_scaled, norm};
use crate::kernel::{CudaKernel, CudaKernelSpec, OperandSlot, composite};

type Supports = fn(&Function) -> bool;
type Make = fn(&CudaKernelSpec<'_>) -> Result<CudaKernel, String>;

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    let products: [(&str, &str, Supports, Make); 6] = [
        ("linear_group", "x", plain, plain_rows),
        ("norm_linear_group", "rms_norm(x, w)", |body| plain(body) && normed(body), plain_rows),
        ("quantize_linear_group", "quantize(x)?", codes, coded_rows),
        ("norm_quantize_linear_group", "quantize(rms_norm(x, w))", |body| codes(body) && normed(body), coded_rows),
        ("linear_blocks_group", "x", blocks, block_rows),
        ("norm_linear_blocks_group", "rms_norm(x, w)", |body| blocks(body) && normed(body), block_rows),
    ];
    let mut entries = Vec::new();
    for (products, x, supports, make) in products {
        let in_blocks = products.contains("blocks");
        let keys = format!("reshape(g@linear_group({x}, ...).1)");
        for (rotated, keys) in [("", keys.clone()), ("rope_", format!("rope({keys}, positions)"))] {
            let name = format!("{products}_{rotated}kv_write");
            let pattern = format!("kv_write(kv, {keys}, reshape(g.2), slots), g.0");
            // Few rows are summed in an order of their own.
            let entry = CudaKernelEntry::new(name, &pattern, supports, make).numerics_by_extents();
            entries.push(if in_blocks {
                entry.where_it_pays(few_rows_of_blocks).only_on(blocks_rows::ARCH)
            } else {
                entry.where_it_pays(few_rows)
            });
        }
    }
    entries
}

/// Columns of a slice of a tile: of keys that are rotated, half of them are of one half of a head's pairs, and half of the other.
const COLUMNS: usize = 16;

/// The products of three weights are queries, and keys and values of the cache's heads, which are whole slices.
fn writes(body: &Function) -> bool {
    let (cache, x) = (&body.args[0].ty, &body.args[x_of(body)].ty);
    let [_, sides, heads, _, dim] = &cache.shape.0[..] else { return false };
    let (Some(heads), Some(dim)) = (heads.as_const(), dim.as_const()) else { return false };
    let pairs = composite::<Rope>(body).map_or(0, |rope| rope.inv_freq.len());
    let rows: Vec<Option<usize>> = weights(body).iter().map(|w| w.ty.shape.0[0].as_const()).collect();
    composite::<LinearGroup>(body).is_some_and(|group| group.count == 3)
        && sides.as_const() == Some(2)
        && heads * dim > 0
        && dim.is_multiple_of(COLUMNS)
        && (2 * pairs).is_multiple_of(COLUMNS)
        && rows[1..] == [Some(heads * dim); 2]
        && x.shape.rank() == 2
        && matches!(x.dtype, DType::BF16 | DType::F16)
}

/// Weights are plain, as x is.
fn plain(body: &Function) -> bool {
    let x = &body.args[x_of(body)].ty;
    let depth = x.shape.last().as_const().unwrap_or(0);
    let streamed = depth > 0 && depth.is_multiple_of(8) && weights(body).iter().all(|w| w.ty.dtype == x.dtype);
    writes(body) && streamed && body.args.iter().all(|arg| arg.ty.format.is_none())
}

/// Weights are codes, and x is or becomes codes for them. Elements that are rotated together have one block's scale.
fn codes(body: &Function) -> bool {
    let dim = body.args[0].ty.shape.last().as_const().unwrap_or(0);
    let in_blocks = weights(body).iter().any(|w| scaled(&w.ty).is_some_and(|f| f.scales == ScaleLayout::Block));
    let apart = in_blocks && composite::<Rope>(body).is_some() && !BLOCK.is_multiple_of(dim);
    writes(body) && linear_scaled::matched(body) && !apart
}

/// Weights are in blocks, and heads of keys and the rotated parts of them are whole tiles.
fn blocks(body: &Function) -> bool {
    let dim = body.args[0].ty.shape.last().as_const().unwrap_or(0);
    let pairs = composite::<Rope>(body).map_or(0, |rope| rope.inv_freq.len());
    writes(body)
        && pairs.is_multiple_of(COLUMNS)
        && (dim - 2 * pairs).is_multiple_of(2 * COLUMNS)
        && linear_blocks::in_blocks(body)
}

fn normed(body: &Function) -> bool {
    norm::wide(&body.args[x_of(body)].ty)
}

fn few_rows(spec: &CudaKernelSpec<'_>) -> bool {
    LinearCall::new(spec, LinearEpilogue::Cache).is_ok_and(|linears| (1..=MAX_ROWS).contains(&linears.rows))
}

fn few_rows_of_blocks(spec: &CudaKernelSpec<'_>) -> bool {
    let linears = LinearCall::new(spec, LinearEpilogue::Cache);
    linears.is_ok_and(|linears| {
        linear_blocks::formats(&linears).is_ok_and(|formats| blocks_rows::serves(&linears, &Formats::new(formats)))
    })
}

fn plain_rows(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let linears = LinearCall::new(spec, LinearEpilogue::Cache)?;
    linears.stream_rows(StreamedX::Plain, (OperandSlot::Input(linears.x), 0), None)
}

fn block_rows(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let linears = LinearCall::new(spec, LinearEpilogue::Cache)?;
    let formats = Formats::new(linear_blocks::formats(&linears)?);
    blocks_rows::linear(&linears, &formats)
}

fn coded_rows(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    linear_scaled::coded(spec, LinearEpilogue::Cache)
}

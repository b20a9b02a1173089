//! Products with parameters: one, or several of one input, with biases, then a residual added or the gate of an MLP
//! applied.
//!
//! Floor: every weight read once a step (decode), or `2 M N K` operations (prompts). But on tiles, weights are used where
//! they lie, in rows of K. An output is a sum over K in [`LANES`] partial sums and a fixed tree, element `k` going to lane
//! `k % LANES` in the order of `k`, however many rows of x there are: `tile.rs` computes the same sums for a few
//! rows (weights widened in registers) and for many (weights widened once into a packed block). What does not fill the
//! lanes comes last, at the end of a vector whose beginning is masked, so that it is read without a loop. Of many rows with AVX2 or
//! AVX-512 each lane is a product of its own, of the same bits (`by_lane.rs`).
//! Weights in blocks are widened into cache, a few columns at a time. Weights of bf16 are multiplied on matrix tiles
//! where the machine has them (`on_panels.rs` if they are repacked for it, else `on_tiles.rs`), by x of bf16 in pairs where it
//! has instructions for that (`in_pairs.rs`), and one row by weights of f32 has a loop of its own (`one_row.rs`).

mod by_codes;
#[cfg(target_arch = "x86_64")]
pub(super) mod by_lane;
#[cfg(target_arch = "x86_64")]
mod float_codes;
mod in_lanes;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod in_pairs;
mod kernel;
#[cfg(target_arch = "x86_64")]
mod on_panels;
#[cfg(target_arch = "x86_64")]
mod on_tiles;
#[cfg(target_arch = "x86_64")]
mod one_row;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod pairs;
pub(super) mod scales;
pub(super) mod source;
pub(super) mod tile;

use std::ops::Range;

use ridge_graph::format::ScaledFormat;
use ridge_graph::ops::{Linear as LinearOp, LinearGroup};
use ridge_graph::passes::{Layout, OfferRequest};
use ridge_graph::{DType, Dim, FormatRef, Function, Op, Type};

use super::{int8, quant};
#[cfg(target_arch = "x86_64")]
use crate::amx;
use crate::io::KernelIo;
use crate::kernel::{CpuKernel, KernelEntry, KernelSpec, OperandType, Preparation};
#[cfg(target_arch = "x86_64")]
use crate::packing::FLOAT_CODES;
use crate::packing::Packing;
use crate::scratch::Scratch;
use crate::simd::{self, Isa};
use kernel::{After, LinearKernel, LinearWeight};
use scales::WeightScales;

pub(super) fn entries() -> [KernelEntry; 6] {
    let entries = [
        KernelEntry::new("linear", "linear(quantize(x)?, w)", supports, |s| make(s, After::Nothing)),
        KernelEntry::new("linear_bias", "linear(quantize(x)?, w, b)", supports, |s| make(s, After::Nothing)),
        KernelEntry::new("linear_group", "linear_group(quantize(x)?, ...)", supports, |s| make(s, After::Nothing)),
        KernelEntry::new("linear_add", "add(r, linear(quantize(x)?, w))", adds, |s| make(s, After::Add)),
        KernelEntry::new("linear_bias_add", "add(r, linear(quantize(x)?, w, b))", adds, |s| make(s, After::Add)),
        KernelEntry::new("linear_swiglu", "swiglu(g@linear_group(quantize(x)?, ...).0, g.1)", gates, |s| {
            make(s, After::Swiglu)
        }),
    ];
    entries.map(|entry| entry.wanting(layouts))
}

/// Weights are wanted packed that the kernel, once it is made, takes so ([`CpuKernel::takes_panels`]): plain ones of bf16 where
/// there are matrix tiles or products of pairs, those in blocks where products of bytes are those of x's codes or tiles are made of
/// them.
fn layouts(request: &OfferRequest<'_>) -> Vec<(usize, Layout)> {
    let Some((x, weights)) = operands(request.body) else { return Vec::new() };
    let inner = x.shape.0.last().and_then(Dim::as_const).unwrap_or(0);
    let isa = Isa::named(&request.target.architecture);
    let packed = |w: &Type| {
        let packing = Packing::on(isa?, w)?;
        let takes = takes(isa?, packing, x.dtype, x.format.is_some(), inner, w.format.is_some());
        takes.then(|| packing.layout().into())
    };
    let Some(names) = weights.iter().map(packed).collect::<Option<Vec<_>>>() else { return Vec::new() };
    // Arguments are in the order of the pattern's text: a residual if one is added, x, weights, biases.
    let adds = request.body.nodes.last().is_some_and(|root| matches!(root.op, Op::Prim(_)));
    let first = 1 + usize::from(adds);
    (first..).zip(names).map(|(at, name)| (at, Layout::Named(name))).collect()
}

/// Are weights packed so multiplied by x of `inner` elements, which may be codes?
fn takes(isa: Isa, packing: Packing, x: DType, is_codes: bool, inner: usize, in_blocks: bool) -> bool {
    match packing {
        #[cfg(target_arch = "x86_64")]
        Packing::Tiles => !is_codes && amx::takes(x, inner),
        #[cfg(target_arch = "x86_64")]
        Packing::Words(FLOAT_CODES) => {
            let as_pairs = inner > 0 && inner.is_multiple_of(float_codes::FOUR) && x == DType::BF16;
            !is_codes && as_pairs && (isa != Isa::Amx || amx::takes(x, inner) && inner.is_multiple_of(amx::DEPTH))
        }
        // Rows of 8-bit codes with scales behind them have any width; only those of whole blocks are packed.
        Packing::Words([elements, _]) if in_blocks => {
            inner > 0 && inner.is_multiple_of(elements) && (is_codes || takes_blocks_on_tiles(isa, x, inner))
        }
        Packing::Words(_) => inner > 0 && !is_codes && x == DType::BF16,
    }
}

/// Are weights in blocks multiplied on matrix tiles by x that is not codes? In any other dtype than bf16 their values would have to
/// be more than one term.
fn takes_blocks_on_tiles(isa: Isa, x: DType, inner: usize) -> bool {
    #[cfg(target_arch = "x86_64")]
    return isa == Isa::Amx && x == DType::BF16 && amx::takes(x, inner);
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = (isa, x, inner);
        false
    }
}

/// Plain weights, or such in blocks or with scales; codes of x, 256 to a scale, are multiplied by codes of all weights.
fn supports(body: &Function) -> bool {
    let Some((x, weights)) = operands(body) else { return false };
    let reads = |format: &FormatRef| quant::supports(format) || scales::scaled(format).is_some();
    let multiplies = |w: &Type, format: &FormatRef| {
        let inner = w.shape.0.last().and_then(Dim::as_const);
        quant::supports(format) || inner.is_some_and(|inner| scales::are_bytes(format, inner))
    };
    match &x.format {
        None => weights.iter().all(|w| w.format.as_ref().is_none_or(reads)),
        Some(format) => {
            is_codes(format) && weights.iter().all(|w| w.format.as_ref().is_some_and(|format| multiplies(w, format)))
        }
    }
}

/// Are values in `format` the codes that kernels of 8-bit codes take?
fn is_codes(format: &FormatRef) -> bool {
    format.downcast::<ScaledFormat>() == Some(&ScaledFormat::INT8_G256)
}

/// The types of what the linear or the linears of a claim multiply: x, and each weight.
fn operands(body: &Function) -> Option<(Type, Vec<Type>)> {
    body.nodes.iter().find_map(|node| {
        let Op::Composite(op) = &node.op else { return None };
        let one = op.downcast::<LinearOp>().map(|_| 1);
        let count = one.or_else(|| op.downcast::<LinearGroup>().map(|group| group.count))?;
        let mut types = body.types(&node.inputs[..=count]);
        let x = types.remove(0);
        Some((x, types))
    })
}

/// Nothing is broadcast.
fn adds(body: &Function) -> bool {
    let sum = body.ty(body.outputs[0].var);
    let is_linear = |op: &Op| matches!(op, Op::Composite(op) if op.downcast::<LinearOp>().is_some());
    let product = body.nodes.iter().find(|n| is_linear(&n.op));
    supports(body) && body.args[0].ty == *sum && product.is_some_and(|n| n.outputs[0] == *sum)
}

fn gates(body: &Function) -> bool {
    supports(body) && group(body).is_some_and(|g| g.count == 2)
}

fn group(body: &Function) -> Option<&LinearGroup> {
    body.nodes.iter().find_map(|n| match &n.op {
        Op::Composite(op) => op.downcast(),
        _ => None,
    })
}

/// Rows of x that a packed block is used for, at most: their part of one block of K stays in L2, and weights are widened seldom.
const ROW_BLOCK: usize = 128;

/// Products on matrix tiles take weights of bf16, and those in blocks by x that [`takes_blocks_on_tiles`]; both kinds together where
/// they are packed.
#[cfg(target_arch = "x86_64")]
fn on_tiles(x: &OperandType, weights: &[OperandType], packed: bool) -> bool {
    let fits = |w: &OperandType| match &w.format {
        Some(format) => {
            let decodes = quant::supports(format)
                || scales::are_bytes(format, w.last())
                || float_codes::takes(format, w.last()) && w.last().is_multiple_of(amx::DEPTH);
            decodes && takes_blocks_on_tiles(simd::isa(), x.dtype, x.last())
        }
        None => w.dtype == DType::BF16 && amx::takes(x.dtype, x.last()) && simd::isa() == Isa::Amx,
    };
    let alike = weights.iter().all(|w| w.format.is_some() == weights[0].format.is_some());
    weights.iter().all(fits) && (packed || alike)
}

/// Rows of x that weights in first-level cache are multiplied by, at most: their codes stay in second-level cache.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const PAIRED_ROWS: usize = 128;

/// Products of x of bf16 by weights of bf16, plain or made of codes of E4M3, are those of pairs, where there are instructions for
/// them and no tiles.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn in_pairs(x: &OperandType, weights: &[OperandType]) -> bool {
    let takes = |w: &OperandType| match &w.format {
        None => w.dtype == DType::BF16,
        #[cfg(target_arch = "x86_64")]
        Some(format) => float_codes::takes(format, w.last()),
        #[cfg(not(target_arch = "x86_64"))]
        Some(_) => false,
    };
    pairs::available() && x.dtype == DType::BF16 && x.last() > 0 && weights.iter().all(takes)
}

/// How the rows of `weights` are codes.
fn codes(weights: &[OperandType]) -> Result<Vec<int8::WeightCodes>, String> {
    let of_weight = |w: &OperandType| match &w.format {
        Some(format) if scales::are_bytes(format, w.last()) => Ok(int8::codes_of_bytes()),
        format => format.as_ref().and_then(int8::codes).ok_or("a weight is not stored in codes"),
    };
    Ok(weights.iter().map(of_weight).collect::<Result<_, _>>()?)
}

fn make(spec: &KernelSpec<'_>, after: After) -> Result<Box<dyn CpuKernel>, String> {
    let (count, biases) = match (spec.composite::<LinearOp>(), spec.composite::<LinearGroup>()) {
        (Some(one), _) => (1, one.bias),
        (_, Some(group)) => (group.count, group.biases),
        _ => return Err("no linear in the group".into()),
    };
    let first = usize::from(after == After::Add);
    let x = &spec.inputs[first];
    let rows = x.rows();
    let by_codes = match operands(spec.body) {
        Some((Type { format: Some(_), .. }, _)) => Some(codes(&spec.inputs[first + 1..][..count])?),
        _ => None,
    };
    // Where x lies in memory as codes, its scales are behind them.
    let scales_of_x = if x.format.is_some() { x.component_offsets()?.get(1).copied() } else { None };
    let takes_panels = spec.inputs[first + 1..][..count].iter().all(|w| {
        let packing = Packing::of_operand(w);
        packing.is_some_and(|packing| {
            takes(simd::isa(), packing, x.dtype, by_codes.is_some(), x.last(), w.format.is_some())
        })
    });
    let packed = takes_panels && spec.inputs[first + 1..][..count].iter().all(|w| w.panels);
    #[cfg(target_arch = "x86_64")]
    let on_tiles = by_codes.is_none() && on_tiles(x, &spec.inputs[first + 1..][..count], packed);
    let (tile, row_block) = (tile::columns(rows.min(ROW_BLOCK)), ROW_BLOCK);
    #[cfg(target_arch = "x86_64")]
    let plain = |w: &OperandType| w.dtype == DType::F32 && w.format.is_none() && one_row::takes(w.shape[0], x.last());
    #[cfg(target_arch = "x86_64")]
    let by_one_row = rows == 1 && spec.inputs[first + 1..][..count].iter().all(plain);
    #[cfg(target_arch = "x86_64")]
    let tile = if by_one_row { one_row::COLUMNS } else { tile };
    #[cfg(target_arch = "x86_64")]
    let (tile, row_block) =
        if on_tiles { (amx::COLUMNS, amx::rows_together(x.dtype, rows)) } else { (tile, row_block) };
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    let in_pairs = by_codes.is_none() && in_pairs(x, &spec.inputs[first + 1..][..count]);
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    let (tile, row_block) = if in_pairs { (pairs::COLUMNS, PAIRED_ROWS) } else { (tile, row_block) };
    #[cfg(target_arch = "x86_64")]
    let all_columns = spec.inputs[first + 1..][..count].iter().map(|w| w.shape[0]).sum();
    #[cfg(target_arch = "x86_64")]
    let by_lane = if by_codes.is_some() || on_tiles || in_pairs { None } else { by_lane::product(rows, x.last()) };
    #[cfg(target_arch = "x86_64")]
    let (tile, row_block) = match by_lane {
        Some(product) => (product.columns(), by_lane::row_block(product, rows, all_columns)),
        None => (tile, row_block),
    };
    let (tile, row_block) =
        if by_codes.is_some() { (int8::COLUMNS, int8::rows_together(rows, x.last())) } else { (tile, row_block) };
    let mut tiles = 0;
    let mut weights = Vec::with_capacity(count);
    for (i, w) in spec.inputs[first + 1..][..count].iter().enumerate() {
        let bias = first + 1 + count + i;
        let rows_of = |format| match scales::are_bytes(format, x.last()) {
            true => Some(quant::BlockRows::of_bytes(x.last())),
            false => quant::BlockRows::new(format, x.last()),
        };
        weights.push(LinearWeight {
            columns: w.shape[0],
            dtype: w.dtype,
            stored: w.format.as_ref().filter(|_| by_codes.is_none()).and_then(rows_of),
            scales: WeightScales::new(w, packed)?,
            #[cfg(target_arch = "x86_64")]
            float_codes: w.format.as_ref().is_some_and(|format| float_codes::takes(format, w.last())),
            bias: biases.then(|| (bias, spec.inputs[bias].dtype)),
            tiles_before: tiles,
        });
        tiles += w.shape[0].div_ceil(tile);
    }
    if after == After::Swiglu {
        tiles = weights[0].columns.div_ceil(tile);
    }
    let columns: usize = weights.iter().map(|w| w.columns).sum();
    let macs = (rows.min(row_block) * columns * x.last()) as f64;
    // Small weights are in cache.
    let bytes = match (&by_codes, weights.first()) {
        (Some(codes), _) => weights.iter().zip(codes).map(|(w, codes)| w.columns * codes.bytes(x.last())).sum(),
        (None, first) => columns * x.last() * first.map_or(0, |w| w.dtype.size_bytes()),
    } as f64;
    let nanos_per_byte = if bytes < 1e6 { 0.02 } else { 0.08 };
    let nanos_per_mac = 0.015;
    #[cfg(target_arch = "x86_64")]
    let nanos_per_mac = match (on_tiles, in_pairs) {
        (true, _) => 0.001 * amx::terms(x.dtype) as f64,
        (false, true) => 0.008,
        (false, false) => nanos_per_mac,
    };
    #[cfg(target_arch = "aarch64")]
    let nanos_per_mac = if in_pairs { 0.008 } else { nanos_per_mac };
    let nanos_per_mac = match (by_codes.is_some(), int8::by()) {
        (false, _) => nanos_per_mac,
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        (true, int8::CodeMultiplier::Stream) => 0.0015,
        (true, int8::CodeMultiplier::Lanes) => 0.01,
    };
    let nanos = (macs * nanos_per_mac).max(bytes * nanos_per_byte) + columns as f64;
    Ok(Box::new(LinearKernel {
        rows,
        inner: x.last(),
        dtype: x.dtype,
        x: first,
        weights,
        after,
        tiles,
        tile,
        row_block,
        nanos_per_piece: nanos / tiles.max(1) as f64,
        #[cfg(target_arch = "x86_64")]
        on_tiles,
        packed,
        takes_panels,
        by_codes,
        scales_of_x,
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        in_pairs,
        #[cfg(target_arch = "x86_64")]
        by_one_row,
        #[cfg(target_arch = "x86_64")]
        by_lane,
    }))
}

impl CpuKernel for LinearKernel {
    fn pieces(&self) -> usize {
        self.tiles * self.rows.div_ceil(self.row_block)
    }

    fn nanos_per_piece(&self) -> f64 {
        self.nanos_per_piece
    }

    fn takes_panels(&self) -> Range<usize> {
        if self.takes_panels { self.x + 1..self.x + 1 + self.weights.len() } else { 0..0 }
    }

    fn preparation(&self) -> Option<Preparation> {
        if self.by_codes.is_some() {
            return Some(self.preparation_of_codes());
        }
        #[cfg(target_arch = "x86_64")]
        if self.on_tiles {
            return if self.on_panels() { self.preparation_on_panels() } else { self.preparation_on_tiles() };
        }
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        if self.in_pairs {
            return None;
        }
        #[cfg(target_arch = "x86_64")]
        if let Some(product) = self.by_lane {
            return Some(self.preparation_by_lane(product));
        }
        self.preparation_in_lanes()
    }

    fn prepare(&self, io: &KernelIo<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        if self.by_codes.is_some() {
            return self.prepare_codes(io, pieces, scratch);
        }
        #[cfg(target_arch = "x86_64")]
        if self.on_tiles {
            return if self.on_panels() {
                self.prepare_on_panels(io, pieces);
            } else {
                self.prepare_on_tiles(io, pieces);
            };
        }
        #[cfg(target_arch = "x86_64")]
        if let Some(product) = self.by_lane {
            return self.prepare_by_lane(product, io, pieces, scratch);
        }
        self.prepare_in_lanes(io, pieces);
    }

    fn run(&self, io: &KernelIo<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        if let Some(of_weights) = &self.by_codes {
            return self.run_by_codes(of_weights, io, pieces, scratch);
        }
        #[cfg(target_arch = "x86_64")]
        if self.on_tiles {
            if self.on_panels() {
                return self.run_on_panels(io, pieces, scratch);
            }
            return self.run_on_tiles(io, pieces, scratch);
        }
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        if self.in_pairs {
            return self.run_in_pairs(io, pieces, scratch);
        }
        #[cfg(target_arch = "x86_64")]
        if self.by_one_row && self.dtype == DType::F32 && self.weights.iter().all(|w| w.bias.is_none()) {
            return self.run_one_row(io, pieces, scratch);
        }
        #[cfg(target_arch = "x86_64")]
        if let Some(product) = self.by_lane {
            return self.run_by_lane(product, io, pieces, scratch);
        }
        self.run_in_lanes(io, pieces, scratch);
    }
}

#[cfg(test)]
#[cfg(target_arch = "x86_64")]
mod tests {
    use std::sync::Arc;

    use ridge_graph::format::{CodeType, ScaleLayout};
    use ridge_graph::passes::{Extents, Target};
    use ridge_graph::{Builder, FormatRef, format};

    use super::*;

    #[test]
    fn rows_of_codes_that_are_no_whole_blocks_are_not_packed() {
        let int8 = ScaledFormat { codes: CodeType::Int8, scales: ScaleLayout::Row };
        for (inner, packs) in [(64, true), (52, false), (33, false)] {
            let w = Type::tensor(DType::BF16, [37, inner]).stored_as(FormatRef::new(int8));
            let packing = Packing::on(Isa::Amx, &w).unwrap();
            assert_eq!(takes(Isa::Amx, packing, DType::BF16, false, inner, true), packs, "{inner}");
        }
    }

    /// The arguments that the kernel of the one linear's group wants in panels on `architecture`.
    fn wanted(architecture: &str, x: DType, w: DType, stored: Option<FormatRef>, residual: bool) -> Vec<usize> {
        let mut g = Builder::new();
        let ty = |dtype, columns: usize| Type::tensor(dtype, [Dim::sym("rows"), columns.into()]);
        let x_var = g.step_input("x", ty(x, 256)).unwrap();
        let w = Type::tensor(w, [8, 256]);
        let w = g.weight("w", stored.clone().map_or(w.clone(), |format| w.stored_as(format))).unwrap();
        let mut y = g.linear(x_var, w).unwrap();
        if residual {
            let r = g.step_input("r", ty(x, 8)).unwrap();
            y = g.add(r, y).unwrap();
        }
        let graph = g.finish(vec![("y".into(), y)]).unwrap();
        let target = Arc::new(Target { architecture: architecture.into(), ..Target::default() });
        let kernels: Vec<_> = entries().iter().map(|entry| entry.claim(&target)).collect();
        let lowered = ridge_runtime::lower(&graph, &["y"], &kernels).unwrap();
        let groups = lowered.main().nodes.iter().filter_map(|node| match &node.op {
            Op::Group(group) => Some(group),
            _ => None,
        });
        let [group] = groups.collect::<Vec<_>>()[..] else { panic!("is one group: {lowered}") };
        let kernel = kernels.iter().find(|kernel| *kernel.name == *group.name()).unwrap();
        let request = OfferRequest { body: &group.body, target: &target, extents: Extents::Any };
        let layouts = (kernel.offer)(&request).unwrap().layouts;
        let name = if architecture == "amx" && stored.is_none() { "panels" } else { "interleaved" };
        assert!(layouts.iter().all(|(_, layout)| *layout == Layout::Named(name.into())));
        layouts.into_iter().map(|(at, _)| at).collect()
    }

    #[test]
    fn plain_weights_of_bf16_are_wanted_packed_where_there_are_tiles_or_products_of_pairs() {
        use DType::{BF16, F32};
        for x in [BF16, F32] {
            assert_eq!(wanted("amx", x, BF16, None, false), [1]);
            assert_eq!(wanted("amx", x, BF16, None, true), [2]);
            assert!(wanted("amx", x, F32, None, false).is_empty());
            assert!(wanted("avx512_vnni", x, BF16, None, true).is_empty());
        }
        assert_eq!(wanted("avx512_bf16", BF16, BF16, None, true), [2]);
        assert!(wanted("avx512_bf16", F32, BF16, None, true).is_empty());
        // Weights in blocks are multiplied as codes by codes of x alone, but as panels where there are tiles.
        let blocks = || Some(FormatRef::new(format::Q8_0));
        assert!(wanted("avx512_vnni", BF16, BF16, blocks(), false).is_empty());
        assert_eq!(wanted("amx", BF16, BF16, blocks(), true), [2]);
        assert!(wanted("amx", F32, F32, blocks(), false).is_empty());
    }
}

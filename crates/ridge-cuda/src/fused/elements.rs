//! Parts whose threads make an element, or a vector, at a time.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use ridge_graph::{Function, Node, Op, Prim};

use super::part::PartText;
use super::place::{Coord, Place};
use super::value::Writer;
use crate::kernel::name;

/// Threads of a block.
const THREADS: u32 = 256;

/// Elements from which a thread takes a vector of them.
const LARGE: usize = 1 << 18;

/// Bytes of the vectors that a thread has in registers at a time: half of what a thread of the largest block has.
const VECTOR_BYTES: usize = 256;

/// The most values that a part reads and writes, unless one output alone reads more: vectors of 16 bytes of each fit.
pub(super) const MAX_OPERANDS: usize = VECTOR_BYTES / 16;

/// The part that makes `outputs`, of equally many elements.
pub(super) fn write(writer: &mut Writer<'_>, outputs: &[usize]) -> Result<PartText, String> {
    let body = writer.body;
    let nodes: Vec<usize> = outputs.iter().map(|output| body.outputs[*output].var.index()).collect();
    let total = writer.extents.product_value(&writer.ty(nodes[0]).shape.0)?;
    let wide = vector(writer, &nodes, total);
    let count = writer.number(total as i64);
    let integer = writer.extents.integer;
    writer.wide = wide;
    let mark = writer.mark();
    let index = Coord { lane: (wide > 1).then_some(true), ..Coord::new("i") };
    let place = Place::at_index(index);
    let values = nodes.iter().map(|node| writer.value(*node, &place)).collect::<Result<Vec<_>, _>>()?;
    writer.forget(mark);
    let (outer, inner) = (std::mem::take(&mut writer.outer), std::mem::take(&mut writer.text));
    writer.wide = 1;
    let mut text = format!(
        "for ({integer} i = (block * ({integer})blockDim.x + threadIdx.x) * {wide}; i < ({integer}){count}; \
         i += block_count * ({integer})blockDim.x * {wide}) {{\n"
    );
    let dtypes = || outputs.iter().map(|output| (*output, name(writer.spec.outputs[*output].dtype)));
    if wide == 1 {
        text += &inner;
        for ((output, dtype), value) in dtypes().zip(&values) {
            let _ = writeln!(text, "put<{dtype}>(out{output}, i, {value});");
        }
    } else {
        text += &outer;
        dtypes().for_each(|(output, dtype)| {
            let _ = writeln!(text, "Pack<{dtype}, {wide}> q{output};");
        });
        let _ = writeln!(text, "#pragma unroll\nfor (u32 e = 0; e < {wide}; ++e) {{\n{inner}");
        for ((output, dtype), value) in dtypes().zip(&values) {
            let _ = writeln!(text, "q{output}.x[e] = {dtype}::store({value});");
        }
        text += "}\n";
        dtypes().for_each(|(output, dtype)| {
            let _ = writeln!(text, "*(Pack<{dtype}, {wide}>*)(({dtype}::Raw*)out{output} + i) = q{output};");
        });
    }
    text += "}\n";
    let blocks = (total / wide).div_ceil(THREADS as usize);
    Ok(PartText { text, blocks, threads: THREADS, max_threads: THREADS })
}

/// By node of the body: does `node` need it?
fn needed(body: &Function, node: usize) -> Vec<bool> {
    let mut needed = vec![false; node + 1];
    needed[node] = true;
    for node in (0..=node).rev() {
        if needed[node] {
            body.nodes[node].inputs.iter().for_each(|v| needed[v.index()] = true);
        }
    }
    needed
}

/// Does what is read for `node` depend on places or on what was read before?
pub(super) fn branches(body: &Function, node: usize) -> bool {
    let branch =
        |node: &Node| matches!(node.op, Op::Prim(Prim::Concat { .. } | Prim::Pad { .. } | Prim::Gather { .. }));
    needed(body, node).iter().zip(&body.nodes).any(|(needed, node)| *needed && branch(node))
}

/// The arguments of the body that these nodes need.
pub(super) fn arguments(body: &Function, nodes: &[usize]) -> BTreeSet<usize> {
    let of = |node: &usize| needed(body, *node).into_iter().enumerate().filter(|(_, needed)| *needed);
    let all = nodes.iter().flat_map(of).map(|(node, _)| node);
    all.filter(|node| matches!(body.nodes[*node].op, Op::Arg(_))).collect()
}

/// Elements of a vector of 16 bytes of the widest operand, or of less where there are many operands; 1 where there are too few to fill a
/// GPU, or where there are branches.
fn vector(writer: &Writer<'_>, nodes: &[usize], total: usize) -> usize {
    if total < LARGE || nodes.iter().any(|node| branches(writer.body, *node)) {
        return 1;
    }
    let operands = arguments(writer.body, nodes).into_iter().chain(nodes.iter().copied());
    let sizes: Vec<usize> = operands.map(|node| writer.ty(node).dtype.size_bytes()).collect();
    let mut wide = (16 / sizes.iter().max().copied().unwrap_or(1)).min(8);
    while wide > 1 && wide * sizes.iter().sum::<usize>() > VECTOR_BYTES {
        wide /= 2;
    }
    if total.is_multiple_of(wide) { wide } else { 1 }
}

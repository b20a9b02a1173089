//! Fused groups as CUDA C++: elementwise ops, views, and reductions over the last axis.
//!
//! Each value of a group is a function of a place in it (`fused/place.rs`): an elementwise op reads its inputs at its own place, a
//! view at another that follows from it, and an argument is loaded there (`fused/value.rs`). So a group may store values of any
//! shapes. Those with equally many elements are a part of the kernel in which a thread makes an element at a time, or in large parts
//! a vector of them (`fused/elements.rs`); rows with reductions are a part in which a block makes a row (`fused/rows.rs`). Parts do
//! not read each other: each has blocks of its own.
//!
//! Every op's result is rounded to its dtype before the next op sees it, so a fused group means what its ops mean one by one.

mod elements;
mod part;
mod place;
mod rows;
#[cfg(test)]
mod tests;
mod value;

use std::fmt::Write as _;

use ridge_graph::{Function, Op, Prim, Shape};

use crate::kernel::{CudaKernel, CudaKernelSpec, CudaSource, KernelText, LaunchArg, MAX_BLOCKS, blocks, input, output};
use part::PartText;
pub(crate) use part::combine;
use value::Writer;

/// Values of a group that are made together.
struct Part {
    /// Indices of the outputs.
    outputs: Vec<usize>,
    /// The shape whose rows are reduced, in a part by rows.
    rows: Option<Shape>,
}

/// The kernel of a fused group.
///
/// # Errors
/// Names what it cannot run.
pub(crate) fn make(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let mut writer = Writer::new(spec)?;
    let mut texts = Vec::new();
    for part in parts(spec.body) {
        let text = match &part.rows {
            Some(space) => rows::write(&mut writer, &part.outputs, space)?,
            None => elements::write(&mut writer, &part.outputs)?,
        };
        texts.push(text);
    }
    // Blocks loop over what is left.
    let most = MAX_BLOCKS / texts.len().max(1);
    texts.iter_mut().for_each(|part| part.blocks = part.blocks.min(most));
    let total = texts.iter().map(|part| part.blocks).sum();
    // The order of a reduction's sums is that of its block.
    let threads = texts.iter().map(|part| part.threads).max().unwrap_or(0);
    let text = assemble(spec, &mut writer, &texts);
    let inputs = (0..spec.inputs.len()).map(input);
    let args = inputs.chain((0..spec.outputs.len()).map(output));
    let args = args.chain([LaunchArg::Numbers(writer.numbers.clone())]).collect();
    Ok(blocks(CudaSource::new("fused", &[], &KernelText::new(&text).early_launch()), total, threads, args))
}

/// The parts of a group: values by rows, then those of equally many elements, with and without branches, and with few enough operands.
fn parts(body: &Function) -> Vec<Part> {
    let reduce = body.nodes.iter().find(|n| matches!(n.op, Op::Prim(Prim::Reduce { .. })));
    let space = reduce.map(|node| (body.ty(node.inputs[0]).shape.clone(), node.outputs[0].shape.clone()));
    let mut parts: Vec<Part> = Vec::new();
    if let Some((space, _)) = &space {
        parts.push(Part { outputs: Vec::new(), rows: Some(space.clone()) });
    }
    for (index, output) in body.outputs.iter().enumerate() {
        let shape = &body.ty(output.var).shape;
        let alike = |other: usize| {
            let other = body.outputs[other].var;
            body.ty(other).shape.elements() == shape.elements()
                && elements::branches(body, other.index()) == elements::branches(body, output.var.index())
        };
        let fits = |others: &[usize], index: usize| {
            let nodes: Vec<usize> = others.iter().chain([&index]).map(|i| body.outputs[*i].var.index()).collect();
            elements::arguments(body, &nodes).len() + nodes.len() <= elements::MAX_OPERANDS
        };
        let joined = parts.iter_mut().find(|part| match (&part.rows, &space) {
            (Some(_), Some((space, row))) => shape == space || shape == row,
            _ => alike(part.outputs[0]) && fits(&part.outputs, index),
        });
        match joined {
            Some(part) => part.outputs.push(index),
            None => parts.push(Part { outputs: vec![index], rows: None }),
        }
    }
    parts
}

/// The text of the kernel.
fn assemble(spec: &CudaKernelSpec<'_>, writer: &mut Writer<'_>, parts: &[PartText]) -> String {
    let mut body = String::new();
    let mut first = 0;
    for (index, part) in parts.iter().enumerate() {
        let (begin, end) = (first, first + part.blocks);
        first = end;
        if parts.len() == 1 {
            let _ = write!(body, "const u32 block = blockIdx.x, block_count = gridDim.x;\n{}", part.text);
            continue;
        }
        let (begin, end) = (writer.number(begin as i64), writer.number(end as i64));
        let last = index + 1 == parts.len();
        let when = if last { String::new() } else { format!("if (blockIdx.x < (u32){end}) ") };
        let otherwise = if index == 0 { "" } else { " else " };
        let _ = write!(
            body,
            "{otherwise}{when}{{\nconst u32 block = blockIdx.x - (u32){begin}, block_count = (u32){end} - (u32){begin};\n{}}}",
            part.text
        );
    }
    let mut text =
        "template <class D, int N> struct __align__(N * sizeof(typename D::Raw)) Pack { typename D::Raw x[N]; };\n\
                    extern \"C\" __global__ void "
            .to_owned();
    // A block must find registers for all its threads, whatever its part needs.
    let max_threads = parts.iter().map(|part| part.max_threads).max().unwrap_or(1);
    let _ = writeln!(text, "__launch_bounds__({max_threads}) fused(");
    for i in 0..spec.inputs.len() {
        // Not `__restrict__`: what such a pointer leads to may be read before `after_others`.
        let _ = writeln!(text, "const void* in{i},");
    }
    for i in 0..spec.outputs.len() {
        let _ = writeln!(text, "void* __restrict__ out{i},");
    }
    let _ = writeln!(text, "Numbers<{}> n) {{\nothers_may_begin();\nafter_others();", writer.numbers.len());
    text + &writer.header + &body + "\n}\n"
}

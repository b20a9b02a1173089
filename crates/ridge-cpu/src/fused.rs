//! Fused groups: chains of elementwise ops, and reductions over the last axis, tile by tile in cache.
//!
//! `view` says where an operand's elements lie in the group's iteration space, `compile` turns the body into a program
//! over registers that hold a tile each, `program` runs it, `load` moves tiles between storage and registers, and
//! `loops` has the loop of each op.
//!
//! Every op's result is rounded to its dtype before the next op sees it, so a fused chain means what its ops mean one
//! by one. A single elementwise primitive is a chain of one.

mod compile;
pub(crate) mod load;
pub(crate) mod loops;
mod program;
pub(crate) mod view;

use crate::kernel::{CpuKernel, KernelSpec};
use ridge_graph::Op;

pub(crate) use compile::{ChainNode, ChainSource};

/// The kernel of a fused group.
///
/// # Errors
/// Names what it cannot run.
pub(crate) fn make(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    let body = spec.body;
    let mut nodes: Vec<ChainNode<'_>> = Vec::new();
    let mut sources: Vec<ChainSource> = Vec::with_capacity(body.nodes.len());
    for node in &body.nodes {
        sources.push(match &node.op {
            Op::Arg(index) => ChainSource::Input(*index),
            Op::Prim(prim) => {
                let inputs = node.inputs.iter().map(|v| sources[v.index()]).collect();
                let ty = &node.outputs[0];
                let shape = ty.shape.eval(spec.bindings).map_err(|e| e.to_string())?;
                nodes.push(ChainNode { prim, inputs, dtype: ty.dtype, shape });
                ChainSource::ChainNode(nodes.len() - 1)
            }
            _ => return Err(format!("{} in a fused group", node.op_name())),
        });
    }
    let outputs: Vec<ChainSource> = body.outputs.iter().map(|o| sources[o.var.index()]).collect();
    chain(&nodes, &spec.inputs, &outputs)
}

/// The kernel of `nodes`, which gives `outputs`.
///
/// # Errors
/// Names what it cannot run.
pub(crate) fn chain(
    nodes: &[ChainNode<'_>],
    inputs: &[crate::kernel::OperandType],
    outputs: &[ChainSource],
) -> Result<Box<dyn CpuKernel>, String> {
    Ok(Box::new(compile::compile(nodes, inputs, outputs)?))
}

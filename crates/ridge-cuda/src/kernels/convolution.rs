//! Causal convolutions of a few taps: `kernels/causal_conv1d.cu`.

use ridge_graph::ops::{CausalConv1d, StatefulConv1d};
use ridge_graph::{Function, Node, Op, Prim, Var};

use super::entry::CudaKernelEntry;
use crate::kernel::{CudaKernel, CudaKernelSpec, CudaSource, KernelText, flag, grid, input, name, numbers, output};

pub(super) const CAUSAL: KernelText<'_> =
    KernelText::new(concat!(include_str!("../../kernels/lines.cuh"), include_str!("../../kernels/causal_conv1d.cu")))
        .early_launch();

/// Taps at most: a thread has the inputs of all in registers.
const MAX_TAPS: usize = 32;
/// Threads of a block, and tokens of a block, as the kernel has them.
const THREADS: usize = 128;
const TOKENS: usize = 16;

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    let entry = |name, pattern: &str| CudaKernelEntry::new(name, pattern, supports, make);
    let behind = "w, table, lines, ids, starts, ...";
    vec![
        entry("causal_conv1d", "causal_conv1d(x, w, state, ids, starts)"),
        entry("stateful_conv1d", &format!("stateful_conv1d(slice(x)?, {behind})")),
        entry("mul_stateful_conv1d", &format!("stateful_conv1d(mul(slice(x)?, slice(f)?), {behind})")),
    ]
}

/// The convolution of a body, and its attributes if its states are lines of a table.
fn convolution(body: &Function) -> Option<(&Node, Option<&StatefulConv1d>)> {
    body.nodes.iter().find_map(|node| match &node.op {
        Op::Composite(op) if op.downcast::<CausalConv1d>().is_some() => Some((node, None)),
        Op::Composite(op) => op.downcast::<StatefulConv1d>().map(|op| (node, Some(op))),
        _ => None,
    })
}

/// An input, and the first of its columns that is taken.
type Columns = (usize, usize);

/// The columns that `var` is; `None` of another part.
fn columns(body: &Function, var: Var) -> Option<Columns> {
    let node = &body.nodes[var.index()];
    match &node.op {
        Op::Arg(i) => Some((*i, 0)),
        Op::Prim(Prim::Slice { axis: 1, start, .. }) => Some((columns(body, node.inputs[0])?.0, start.as_const()?)),
        _ => None,
    }
}

/// The columns that are convolved, or both of which the product is.
fn convolved(body: &Function) -> Option<Vec<Columns>> {
    let x = convolution(body)?.0.inputs[0];
    let factors = match &body.nodes[x.index()] {
        Node { op: Op::Prim(Prim::Binary(_)), inputs, .. } => &inputs[..],
        _ => &[x],
    };
    factors.iter().map(|x| columns(body, *x)).collect()
}

/// Plain operands, few taps, and parts of x that are columns of it.
fn supports(body: &Function) -> bool {
    let taps = convolution(body).and_then(|(node, _)| body.ty(node.inputs[1]).shape.last().as_const());
    taps.is_some_and(|taps| (2..=MAX_TAPS).contains(&taps))
        && body.args.iter().all(|arg| arg.ty.format.is_none())
        && convolved(body).is_some()
}

fn make(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let (_, op) = convolution(spec.body).ok_or("no convolution in the group")?;
    let convolved = convolved(spec.body).ok_or("what is convolved is not columns of a value")?;
    let factors = convolved.len();
    let (x, w, before) = (&spec.inputs[0], &spec.inputs[factors], &spec.inputs[factors + 1]);
    let (tokens, channels, taps) = (x.shape[0], w.shape[0], w.shape[1]);
    // The inputs behind the state: which lines its rows are, if it is a table, and tokens' sequences, where they begin and a bias.
    let lines = factors + 2;
    let ids = lines + usize::from(op.is_some());
    let rows = spec.inputs[if op.is_some() { lines } else { factors + 1 }].shape[0];
    let bias = op.filter(|op| op.bias).map(|_| ids + 2);
    let strides: Vec<usize> =
        convolved.iter().cycle().take(2).flat_map(|(i, first)| [spec.inputs[*i].shape[1], *first]).collect();
    let wide = if channels.is_multiple_of(2) && strides.iter().all(|n| n.is_multiple_of(2)) { 2 } else { 1 };
    let (taps, wide_text) = (taps.to_string(), wide.to_string());
    let defines = [
        ("D", name(x.dtype)),
        ("W", name(w.dtype)),
        ("TAPS", &*taps),
        ("LINES", flag(op.is_some())),
        ("FACTOR", flag(factors == 2)),
        ("BIAS", flag(bias.is_some())),
        ("BIAS_TYPE", name(bias.map_or(w, |bias| &spec.inputs[bias]).dtype)),
        ("SILU", flag(op.is_some_and(|op| op.silu))),
        ("WIDE", &*wide_text),
    ];
    // Where there is no bias and no line, any address will do.
    let inputs = [0, factors - 1, factors, bias.unwrap_or(0), factors + 1, lines, ids, ids + 1].map(input);
    let extents = [tokens, channels, rows, if op.is_some() { before.shape[0] } else { 0 }];
    let args = inputs.into_iter().chain([output(0), output(1), numbers(&[&extents[..], &strides].concat())]).collect();
    let pieces = rows + tokens.div_ceil(TOKENS);
    let source = CudaSource::new("causal_conv1d", &defines, &CAUSAL);
    grid(source, [pieces * channels.div_ceil(THREADS * wide), 1, 1], THREADS as u32, args)
}

//! Root-mean-square norms: `kernels/norm.cu`.

use ridge_graph::ops::RmsNorm;
use ridge_graph::{Function, Type};

use super::Entry;
use crate::kernel::{Arg, Kernel, Source, Spec, grid, input, name, numbers, output};

const NORM: &str = include_str!("../../kernels/norm.cu");

pub(super) const ENTRIES: &[Entry] = &[
    Entry { name: "rms_norm", pattern: "rms_norm(x, w)", supports: |body| wide(&body.args[0].ty), make },
    Entry { name: "add_rms_norm", pattern: "rms_norm(*add(x, r), w)", supports: same_rows, make },
];

/// Threads of a block, and 16-byte vectors that each holds at most.
const THREADS: usize = 256;
const MOST_VECTORS: usize = 16;

/// Threads among which `kernels/norm.cu` divides a row of so many 16-byte vectors.
pub(super) fn threads_of(vectors: usize) -> usize {
    vectors.next_multiple_of(32).min(THREADS)
}

/// Rows are whole vectors, and fit into a block's registers.
pub(super) fn wide(x: &Type) -> bool {
    let size = x.dtype.size_bytes();
    x.shape.last().as_const().is_some_and(|row| {
        row > 0 && (row * size).is_multiple_of(16) && row * size <= 16 * THREADS * MOST_VECTORS && size >= 2
    })
}

fn same_rows(body: &Function) -> bool {
    body.args[0].ty == body.args[1].ty && wide(&body.args[0].ty)
}

fn make(spec: &Spec<'_>) -> Result<Kernel, String> {
    let last = spec.inputs.len() - 1;
    launch(spec, last, [output(0), output(last - 1)])
}

/// The norm of input 0, after input 1 was added if `last`, the weight, comes after that, to the first of `outputs`; the
/// sum to the second.
pub(super) fn launch(spec: &Spec<'_>, last: usize, [out, sum]: [Arg; 2]) -> Result<Kernel, String> {
    let op = spec.composite::<RmsNorm>().ok_or("no rms_norm in the group")?;
    let x = &spec.inputs[0];
    let row = x.shape.last().copied().unwrap_or(1);
    let vectors = row * x.dtype.size_bytes() / 16;
    // A thread for each vector as far as that goes.
    let threads = threads_of(vectors);
    let (each, threads_text) = (vectors.div_ceil(threads).to_string(), threads.to_string());
    let add = if last == 2 { "1" } else { "0" };
    let defines = [
        ("D", name(x.dtype)),
        ("W", name(spec.inputs[last].dtype)),
        ("ADD", add),
        ("VECTORS", &each),
        ("THREADS", &threads_text),
    ];
    let args = vec![input(0), input(last - 1), input(last), out, sum, Arg::Float(op.eps as f32), numbers(&[row])];
    grid(Source::new("rms_norm", &defines, NORM), [x.len() / row, 1, 1], threads as u32, args)
}

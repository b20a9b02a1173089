//! Output projection and loss with their gradient, some rows of logits after others: `kernels/cross_entropy.cu` between
//! matrix products.

use ridge_graph::ops::LinearCrossEntropySaving;
use ridge_graph::{DType, Function};

use super::entry::CudaKernelEntry;
use super::training::LOSS;
use crate::kernel::{
    CudaKernel, CudaKernelSpec, CudaSource, LaunchArg, OperandSlot, SlotOffset, blocks, each, input, name, numbers,
    output,
};
use crate::prims::{MatrixProduct, product};

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    let entry =
        CudaKernelEntry::new("linear_cross_entropy_saving", "linear_cross_entropy_saving(x, w, targets)", narrow, make);
    vec![entry.numerics_by_extents()]
}

/// Operands of one dtype of 16 bits.
fn narrow(body: &Function) -> bool {
    let (x, w) = (&body.args[0].ty, &body.args[1].ty);
    matches!(x.dtype, DType::BF16 | DType::F16) && w.dtype == x.dtype && w.format.is_none()
}

/// Bytes of the logits that are held at a time.
const LOGITS: usize = 512 << 20;
/// Columns of products on tensor cores are a multiple of this; where those of the vocabulary are not, rows of zeros behind the
/// weight make them one of [`PADDED`].
const COLUMNS: usize = 8;
const PADDED: usize = 64;
/// Rows of logits are a multiple of this.
const ROWS: usize = 64;
/// Threads of a row of logits.
const THREADS: u32 = 512;

fn at(slot: SlotOffset) -> LaunchArg {
    LaunchArg::Pointer(slot.0, slot.1)
}

fn make(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let op = spec.composite::<LinearCrossEntropySaving>().ok_or("no loss in the group")?.0;
    let (x, w) = (&spec.inputs[0], &spec.inputs[1]);
    let (tokens, hidden, vocab, dtype) = (x.shape[0], x.shape[1], w.shape[0], x.dtype);
    let size = dtype.size_bytes();
    let columns = if vocab.is_multiple_of(COLUMNS) { vocab } else { vocab.next_multiple_of(PADDED) };
    let part = (LOGITS / (columns * size).max(1) / ROWS * ROWS).max(ROWS).min(tokens.max(1));
    let aligned = |bytes: usize| bytes.next_multiple_of(256);
    // Logits, losses, the sum of the parts' gradients of the weight, and the weight if it is padded.
    let losses = aligned(part * columns * size);
    let sums = losses + aligned(tokens * 4);
    let copy = sums + aligned(columns * hidden * 4);
    let is_padded = columns != vocab;
    let scratch = |offset: usize| (OperandSlot::Scratch, offset);
    let mut kernel =
        CudaKernel { scratch: copy + if is_padded { columns * hidden * size } else { 0 }, ..CudaKernel::default() };
    let defines = [
        ("D", name(dtype)),
        ("SAVING", "0"),
        ("SOFTCAP", if op.softcap.is_some() { "1" } else { "0" }),
        ("CAP", &*format!("{:e}f", op.softcap.unwrap_or(1.0))),
    ];
    let source = |entry| CudaSource::new(entry, &defines, &LOSS);
    let weight = if is_padded { scratch(copy) } else { (OperandSlot::Input(1), 0) };
    if is_padded {
        let args = vec![input(1), at(weight), numbers(&[vocab * hidden, columns * hidden])];
        kernel.actions.extend(each(source("padded"), columns * hidden, args).actions);
    }
    let mut first = 0;
    // Without tokens there is one empty part, which leaves zeros.
    while first < tokens.max(1) {
        let rows = part.min(tokens - first);
        let of = |slot: OperandSlot| ((slot, first * hidden * size), dtype);
        let (logits, weight) = ((scratch(0), dtype), (weight, dtype));
        let matrix = |rows, width, depth, a, b, out, transposed, added| {
            product(&MatrixProduct {
                batches: 1,
                rows,
                columns: width,
                depth,
                a,
                b,
                out,
                transposed,
                added,
                deterministic: false,
            })
            .actions
        };
        kernel.actions.extend(matrix(
            rows,
            columns,
            hidden,
            of(OperandSlot::Input(0)),
            weight,
            logits,
            (false, true),
            false,
        ));
        let args = vec![
            at(scratch(0)),
            LaunchArg::Pointer(OperandSlot::Input(2), first * 4),
            at(scratch(losses + first * 4)),
            LaunchArg::Float(op.z_loss as f32),
            numbers(&[rows, vocab, columns]),
        ];
        kernel.actions.extend(blocks(source("loss_and_gradient"), rows, THREADS, args).actions);
        let dx = of(OperandSlot::Output(1));
        kernel.actions.extend(matrix(rows, hidden, columns, logits, weight, dx, (false, false), false));
        let sum = (scratch(sums), DType::F32);
        let x = of(OperandSlot::Input(0));
        kernel.actions.extend(matrix(columns, hidden, rows, logits, x, sum, (true, false), first > 0));
        first += part;
    }
    let args = vec![at(scratch(losses)), output(0), numbers(&[tokens])];
    kernel.actions.extend(blocks(source("sum_losses"), 1, 1024, args).actions);
    let args = vec![at(scratch(sums)), output(2), numbers(&[vocab * hidden])];
    kernel.actions.extend(each(source("rounded"), vocab * hidden, args).actions);
    Ok(kernel)
}

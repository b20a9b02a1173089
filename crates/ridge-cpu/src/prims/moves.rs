//! Copies of elements, whatever they are: views made real, joins, padding, constants.
//!
//! Floor: each output byte written once and read once.

use std::ops::Range;

use ridge_graph::Literal;

use crate::bytes::Pod;
use crate::fused::view::{View, around};
use crate::io::KernelIo;
use crate::kernel::{CpuKernel, OperandType};
use crate::scratch::Scratch;

/// Bytes of output in a piece.
const PIECE_BYTES: usize = 16 << 10;

/// The elements that `view` sees of input `index`, in order.
pub(super) fn copied(output: &OperandType, index: usize, view: View) -> Box<dyn CpuKernel> {
    let (elements, size) = (output.len(), output.dtype.size_bytes());
    if let Some((rows, columns, stride)) = view.transposed() {
        return Box::new(Turned { index, view, matrices: elements / (rows * columns), rows, columns, stride, size });
    }
    Box::new(Copied { index, view, elements, size })
}

/// The bytes of input 0, in whatever format it is stored.
pub(super) fn bytes(output: &OperandType) -> Result<Box<dyn CpuKernel>, String> {
    let bytes = [output.bytes()?];
    Ok(Box::new(Copied { index: 0, view: View::broadcast(&bytes, &bytes), elements: bytes[0], size: 1 }))
}

/// Rows and columns that are transposed together, within a page and the cache lines of its rows.
const TURN: usize = 32;

/// Transposed matrices.
struct Turned {
    index: usize,
    view: View,
    matrices: usize,
    rows: usize,
    columns: usize,
    stride: usize,
    size: usize,
}

impl Turned {
    /// Up to `TURN` rows of the output.
    fn copy<T: Pod>(&self, io: &KernelIo<'_>, piece: usize) {
        let blocks = self.rows.div_ceil(TURN);
        let (matrix, first) = (piece / blocks, piece % blocks * TURN);
        let count = TURN.min(self.rows - first);
        let at = (matrix * self.rows + first) * self.columns;
        let from = &io.input::<T>(self.index)[self.view.place(at)..];
        // SAFETY: these rows are our piece.
        let to = unsafe { io.output::<T>(0).part(at..at + count * self.columns) };
        for column in (0..self.columns).step_by(TURN) {
            let width = TURN.min(self.columns - column);
            for (row, to) in to.chunks_exact_mut(self.columns).enumerate() {
                let from = from[column * self.stride + row..].iter().step_by(self.stride);
                to[column..column + width].iter_mut().zip(from).for_each(|(to, x)| *to = *x);
            }
        }
    }
}

impl CpuKernel for Turned {
    fn pieces(&self) -> usize {
        self.matrices * self.rows.div_ceil(TURN)
    }

    fn nanos_per_piece(&self) -> f64 {
        (TURN * self.columns) as f64
    }

    fn run(&self, io: &KernelIo<'_>, pieces: Range<usize>, _scratch: &mut Scratch) {
        for piece in pieces {
            match self.size {
                1 => self.copy::<u8>(io, piece),
                2 => self.copy::<u16>(io, piece),
                4 => self.copy::<u32>(io, piece),
                _ => self.copy::<u64>(io, piece),
            }
        }
    }
}

struct Copied {
    index: usize,
    view: View,
    elements: usize,
    size: usize,
}

impl Copied {
    fn per_piece(&self) -> usize {
        PIECE_BYTES / self.size
    }

    fn copy<T: Pod>(&self, io: &KernelIo<'_>, elements: Range<usize>) {
        let from = io.input::<T>(self.index);
        // SAFETY: these elements belong to our pieces.
        let to = unsafe { io.output::<T>(0).part(elements.clone()) };
        self.view.runs(elements, |run| {
            let to = &mut to[run.at..run.at + run.len];
            match run.stride {
                1 => to.copy_from_slice(&from[run.from..run.from + run.len]),
                0 => to.fill(from[run.from]),
                stride => to.iter_mut().zip(from[run.from..].iter().step_by(stride)).for_each(|(to, x)| *to = *x),
            }
        });
    }
}

impl CpuKernel for Copied {
    fn pieces(&self) -> usize {
        self.elements.div_ceil(self.per_piece())
    }

    fn nanos_per_piece(&self) -> f64 {
        PIECE_BYTES as f64 * 0.1
    }

    fn run(&self, io: &KernelIo<'_>, pieces: Range<usize>, _scratch: &mut Scratch) {
        let elements = pieces.start * self.per_piece()..(pieces.end * self.per_piece()).min(self.elements);
        match self.size {
            1 => self.copy::<u8>(io, elements),
            2 => self.copy::<u16>(io, elements),
            4 => self.copy::<u32>(io, elements),
            _ => self.copy::<u64>(io, elements),
        }
    }
}

/// A constant's elements.
pub(super) fn constant(literal: &Literal) -> Box<dyn CpuKernel> {
    Box::new(Constant { bytes: literal.dtype.encode(literal.values.iter().copied()) })
}

struct Constant {
    bytes: Vec<u8>,
}

impl CpuKernel for Constant {
    fn pieces(&self) -> usize {
        usize::from(!self.bytes.is_empty())
    }

    fn nanos_per_piece(&self) -> f64 {
        self.bytes.len() as f64 * 0.1
    }

    fn run(&self, io: &KernelIo<'_>, _pieces: Range<usize>, _scratch: &mut Scratch) {
        // SAFETY: the only piece.
        unsafe { io.output::<u8>(0).part(0..self.bytes.len()) }.copy_from_slice(&self.bytes);
    }
}

/// Tensors one after another along `axis`.
pub(super) fn concat(inputs: &[OperandType], output: &OperandType, axis: usize) -> Box<dyn CpuKernel> {
    let size = output.dtype.size_bytes();
    let spans = inputs.iter().enumerate().map(|(i, operand)| {
        let (_, extent, inner) = around(&operand.shape, axis);
        Span { bytes: extent * inner * size, from: Some(i) }
    });
    joined(spans.collect(), output, Vec::new())
}

/// The input with elements of `value` before and after along `axis`.
pub(super) fn pad(
    input: &OperandType,
    output: &OperandType,
    axis: usize,
    before: usize,
    value: f64,
) -> Box<dyn CpuKernel> {
    let size = output.dtype.size_bytes();
    let (_, extent, inner) = around(&input.shape, axis);
    let after = output.shape[axis] - extent - before;
    let fill = |extent: usize| Span { bytes: extent * inner * size, from: None };
    let spans = vec![fill(before), Span { from: Some(0), ..fill(extent) }, fill(after)];
    joined(spans, output, output.dtype.encode([value]))
}

/// The components of a value in a format, each where the plan has it.
pub(super) fn assemble(inputs: &[OperandType], output: &OperandType) -> Result<Box<dyn CpuKernel>, String> {
    let bytes = inputs.iter().map(|part| part.len() * part.dtype.size_bytes());
    Ok(Box::new(Assembled { parts: output.component_offsets()?.into_iter().zip(bytes).collect() }))
}

/// Offset and bytes of each component: the pieces.
struct Assembled {
    parts: Vec<(usize, usize)>,
}

impl CpuKernel for Assembled {
    fn pieces(&self) -> usize {
        self.parts.len()
    }

    fn nanos_per_piece(&self) -> f64 {
        self.parts.iter().map(|(_, bytes)| bytes).sum::<usize>() as f64 * 0.1
    }

    fn run(&self, io: &KernelIo<'_>, pieces: Range<usize>, _scratch: &mut Scratch) {
        for part in pieces {
            let (offset, bytes) = self.parts[part];
            // SAFETY: this component is our piece.
            unsafe { io.output::<u8>(0).part(offset..offset + bytes) }.copy_from_slice(&io.input::<u8>(part)[..bytes]);
        }
    }
}

/// Part of a row of the output: the next bytes of an input, or of the filling.
#[derive(Clone, Copy)]
struct Span {
    bytes: usize,
    from: Option<usize>,
}

/// Rows that are put together from spans.
struct Joined {
    spans: Vec<Span>,
    row_bytes: usize,
    bytes: usize,
    /// One element.
    fill: Vec<u8>,
}

fn joined(spans: Vec<Span>, output: &OperandType, fill: Vec<u8>) -> Box<dyn CpuKernel> {
    let row_bytes = spans.iter().map(|s| s.bytes).sum();
    Box::new(Joined { spans, row_bytes, bytes: output.len() * output.dtype.size_bytes(), fill })
}

impl CpuKernel for Joined {
    fn pieces(&self) -> usize {
        self.bytes.div_ceil(PIECE_BYTES)
    }

    fn nanos_per_piece(&self) -> f64 {
        PIECE_BYTES as f64 * 0.1
    }

    fn run(&self, io: &KernelIo<'_>, pieces: Range<usize>, _scratch: &mut Scratch) {
        let bytes = pieces.start * PIECE_BYTES..(pieces.end * PIECE_BYTES).min(self.bytes);
        // SAFETY: these elements belong to our pieces.
        let mut to = unsafe { io.output::<u8>(0).part(bytes.clone()) };
        let mut at = bytes.start;
        while !to.is_empty() {
            let (row, mut skip) = (at / self.row_bytes, at % self.row_bytes);
            for span in &self.spans {
                if skip >= span.bytes {
                    skip -= span.bytes;
                    continue;
                }
                let len = (span.bytes - skip).min(to.len());
                let (mine, rest) = to.split_at_mut(len);
                match span.from {
                    Some(index) => mine.copy_from_slice(&io.input::<u8>(index)[row * span.bytes + skip..][..len]),
                    // Spans and pieces begin at whole elements.
                    None => mine.chunks_exact_mut(self.fill.len()).for_each(|to| to.copy_from_slice(&self.fill)),
                }
                to = rest;
                at += len;
                skip = 0;
            }
        }
    }
}

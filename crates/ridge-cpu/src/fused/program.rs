//! A program over registers, run tile by tile.

use std::ops::Range;

use ridge_graph::{Binary, Combine, Compare, DType, Unary, uniform};

use super::view::View;
use super::{load, loops};
use crate::io::KernelIo;
use crate::kernel::CpuKernel;
use crate::scratch::Scratch;
use crate::simd;

/// What a step does. Floats and booleans are in registers of f32, integers in registers of i64.
#[derive(Clone, Debug)]
pub(super) enum Op {
    Fill(f32),
    FillInts(i64),
    Load {
        input: usize,
        dtype: DType,
        view: View,
    },
    /// The view's places are the indices themselves.
    Iota {
        dtype: DType,
        view: View,
    },
    Copy,
    Unary(Unary),
    UnaryInts(Unary, DType),
    Binary(Binary),
    BinaryInts(Binary, DType),
    Compare(Compare),
    CompareInts(Compare),
    Select,
    SelectInts,
    ToBool,
    IntsToBool,
    ToFloats,
    ToInts(DType),
    Wrap(DType),
    Random(u32),
    /// Of each row of the tile, into a row value.
    Reduce(Combine, DType),
    ReduceInts(Combine, DType),
    /// A row value along its row.
    Spread,
    SpreadInts,
    Store {
        output: usize,
        dtype: DType,
    },
}

impl Op {
    pub(super) fn gives_ints(&self) -> bool {
        match self {
            Self::Load { dtype, .. } | Self::Iota { dtype, .. } => load::is_int(*dtype),
            Self::FillInts(_)
            | Self::UnaryInts(..)
            | Self::BinaryInts(..)
            | Self::SelectInts
            | Self::ToInts(_)
            | Self::Wrap(_)
            | Self::ReduceInts(..)
            | Self::SpreadInts => true,
            _ => false,
        }
    }

    /// Nanoseconds an element, roughly.
    fn nanos(&self) -> f64 {
        match self {
            Self::Unary(Unary::Exp | Unary::Sigmoid) => 0.5,
            Self::Unary(Unary::Log | Unary::Sin | Unary::Cos | Unary::Tanh | Unary::Erf)
            | Self::Binary(Binary::Pow | Binary::Rem)
            | Self::Random(_) => 5.0,
            Self::Load { dtype, .. } | Self::Store { dtype, .. } if dtype.size_bytes() == 1 => 1.0,
            _ => 0.15,
        }
    }
}

/// One op on a tile.
#[derive(Clone, Debug)]
pub(super) struct TileOp {
    pub(super) op: Op,
    pub(super) inputs: Vec<usize>,
    pub(super) output: usize,
    /// Does it give all elements of the rows, not one a row?
    pub(super) wide: bool,
    /// What the result is rounded to.
    pub(super) round: DType,
}

/// A compiled group. Without row values every element is a row of its own.
pub(super) struct TileProgram {
    /// Run once before the tiles.
    pub(super) constants: Vec<TileOp>,
    pub(super) steps: Vec<TileOp>,
    /// Registers of floats, and of integers.
    pub(super) registers: [usize; 2],
    pub(super) rows: usize,
    /// Elements of a row.
    pub(super) row: usize,
    pub(super) rows_per_tile: usize,
}

impl CpuKernel for TileProgram {
    fn pieces(&self) -> usize {
        self.rows.div_ceil(self.rows_per_tile)
    }

    fn nanos_per_piece(&self) -> f64 {
        let elements = (self.rows_per_tile * self.row) as f64;
        self.steps.iter().map(|step| 10.0 + step.op.nanos() * elements).sum()
    }

    fn run(&self, io: &KernelIo<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        // A row value has an element even where rows have none.
        let width = self.rows_per_tile * self.row.max(1);
        let [floats, ints] = self.registers;
        let [cells] = scratch.slices::<i64, 1>([(ints * width) + (floats * width).div_ceil(2)]);
        let (ints, floats) = cells.split_at_mut(ints * width);
        // SAFETY: any bits are an f32, half as many i64 cover as many bytes, and the alignment is more than enough.
        let floats = unsafe { std::slice::from_raw_parts_mut(floats.as_mut_ptr().cast::<f32>(), floats.len() * 2) };
        let mut tile = Tile {
            floats: Bank { cells: floats, width },
            ints: Bank { cells: ints, width },
            first: 0,
            rows: 0,
            row: 0,
        };
        for step in &self.constants {
            tile.constant(step, io);
        }
        for piece in pieces {
            tile.first = piece * self.rows_per_tile;
            tile.rows = self.rows_per_tile.min(self.rows - tile.first);
            tile.row = self.row;
            for step in &self.steps {
                tile.step(step, io);
            }
        }
    }
}

/// Registers of one kind.
struct Bank<'a, T> {
    cells: &'a mut [T],
    width: usize,
}

/// The registers beside the one that is written.
struct Others<'a, T> {
    before: &'a [T],
    after: &'a [T],
    written: usize,
    width: usize,
}

impl<T> Bank<'_, T> {
    fn get(&self, register: usize, len: usize) -> &[T] {
        &self.cells[register * self.width..][..len]
    }

    fn get_mut(&mut self, register: usize, len: usize) -> &mut [T] {
        &mut self.cells[register * self.width..][..len]
    }

    /// A register to write, and the others to read.
    fn split(&mut self, register: usize, len: usize) -> (&mut [T], Others<'_, T>) {
        let (before, rest) = self.cells.split_at_mut(register * self.width);
        let (mine, after) = rest.split_at_mut(self.width);
        (&mut mine[..len], Others { before, after, written: register, width: self.width })
    }
}

impl<T> Others<'_, T> {
    fn get(&self, register: usize, len: usize) -> &[T] {
        if register < self.written {
            &self.before[register * self.width..][..len]
        } else {
            &self.after[(register - self.written - 1) * self.width..][..len]
        }
    }
}

/// The registers and where in the space they stand.
struct Tile<'a> {
    floats: Bank<'a, f32>,
    ints: Bank<'a, i64>,
    first: usize,
    rows: usize,
    row: usize,
}

impl Tile<'_> {
    /// Fills a register that stays as it is.
    fn constant(&mut self, step: &TileOp, io: &KernelIo<'_>) {
        let width = self.floats.width;
        match &step.op {
            Op::Fill(value) => self.floats.get_mut(step.output, width).fill(*value),
            Op::FillInts(value) => self.ints.get_mut(step.output, width).fill(*value),
            Op::Load { input, dtype, view } if load::is_int(*dtype) => {
                load::ints(io, *input, *dtype, view, 0..width, self.ints.get_mut(step.output, width));
            }
            Op::Load { input, dtype, view } => {
                load::floats(io, *input, *dtype, view, 0..width, self.floats.get_mut(step.output, width));
            }
            other => unreachable!("{other:?} is no constant"),
        }
    }

    fn step(&mut self, step: &TileOp, io: &KernelIo<'_>) {
        let per_row = if step.wide { self.row } else { 1 };
        let (len, all) = (self.rows * per_row, self.rows * self.row);
        let range = self.first * per_row..self.first * per_row + len;
        let (inputs, out) = (&step.inputs, step.output);
        match &step.op {
            Op::Store { output, dtype } if load::is_int(*dtype) => {
                // SAFETY: the tile's rows are ours alone.
                unsafe { load::store_ints(io, *output, *dtype, range.start, self.ints.get(inputs[0], len)) };
            }
            Op::Store { output, dtype } => {
                // SAFETY: the tile's rows are ours alone.
                unsafe { load::store_floats(io, *output, *dtype, range.start, self.floats.get(inputs[0], len)) };
            }
            // What reads integers and gives floats.
            Op::CompareInts(op) => {
                let (a, b) = (self.ints.get(inputs[0], len), self.ints.get(inputs[1], len));
                loops::compare_ints(*op, a, b, self.floats.get_mut(out, len));
            }
            Op::IntsToBool => {
                map(self.ints.get(inputs[0], len), self.floats.get_mut(out, len), |x| f32::from(u8::from(x != 0)));
            }
            Op::ToFloats => map(self.ints.get(inputs[0], len), self.floats.get_mut(out, len), |x| x as f32),
            Op::Random(stream) => {
                let [seed, sequence, position, index] = [0, 1, 2, 3].map(|i: usize| self.ints.get(inputs[i], len));
                for (i, to) in self.floats.get_mut(out, len).iter_mut().enumerate() {
                    *to = uniform(seed[i], *stream, sequence[i], position[i], index[i]);
                }
            }
            op if op.gives_ints() => self.gives_ints(op, io, inputs, out, (len, all), range),
            op => self.gives_floats(op, io, inputs, out, (len, all), range),
        }
        if step.round != DType::F32 {
            simd::round(step.round, self.floats.get_mut(out, len));
        }
    }

    fn gives_ints(
        &mut self,
        op: &Op,
        io: &KernelIo<'_>,
        inputs: &[usize],
        out: usize,
        (len, all): (usize, usize),
        range: Range<usize>,
    ) {
        let row = self.row;
        let floats = &self.floats;
        let (out, ints) = self.ints.split(out, len);
        let arg = |i: usize| ints.get(inputs[i], len);
        match op {
            Op::Load { input, dtype, view } => load::ints(io, *input, *dtype, view, range, out),
            Op::Iota { dtype, view } => view.runs(range, |run| {
                for (i, to) in out[run.at..run.at + run.len].iter_mut().enumerate() {
                    *to = load::wrap(*dtype, (run.from + i * run.stride) as i64);
                }
            }),
            Op::UnaryInts(op, dtype) => loops::unary_ints(*op, *dtype, arg(0), out),
            Op::BinaryInts(op, dtype) => loops::binary_ints(*op, *dtype, arg(0), arg(1), out),
            Op::SelectInts => loops::select_ints(floats.get(inputs[0], len), arg(1), arg(2), out),
            Op::ToInts(dtype) => map(floats.get(inputs[0], len), out, |x| load::to_int(*dtype, x)),
            Op::Wrap(dtype) => map(arg(0), out, |x| load::wrap(*dtype, x)),
            Op::ReduceInts(op, dtype) => {
                let of = ints.get(inputs[0], all);
                for (r, to) in out.iter_mut().enumerate() {
                    *to = loops::reduce_ints(*op, *dtype, &of[r * row..][..row]);
                }
            }
            Op::SpreadInts => spread(ints.get(inputs[0], self.rows), out, row),
            other => unreachable!("{other:?} gives no integers"),
        }
    }

    fn gives_floats(
        &mut self,
        op: &Op,
        io: &KernelIo<'_>,
        inputs: &[usize],
        out: usize,
        (len, all): (usize, usize),
        range: Range<usize>,
    ) {
        let row = self.row;
        let (out, floats) = self.floats.split(out, len);
        let arg = |i: usize| floats.get(inputs[i], len);
        match op {
            Op::Load { input, dtype, view } => load::floats(io, *input, *dtype, view, range, out),
            Op::Iota { dtype, view } => view.runs(range, |run| {
                for (i, to) in out[run.at..run.at + run.len].iter_mut().enumerate() {
                    let index = run.from + i * run.stride;
                    *to = if *dtype == DType::Bool { f32::from(u8::from(index != 0)) } else { index as f32 };
                }
            }),
            Op::Copy => out.copy_from_slice(arg(0)),
            Op::Unary(op) => loops::unary(*op, arg(0), out),
            Op::Binary(op) => loops::binary(*op, arg(0), arg(1), out),
            Op::Compare(op) => loops::compare(*op, arg(0), arg(1), out),
            Op::Select => loops::select(arg(0), arg(1), arg(2), out),
            Op::ToBool => map(arg(0), out, |x| f32::from(u8::from(x != 0.0))),
            Op::Reduce(op, dtype) => {
                let of = floats.get(inputs[0], all);
                for (r, to) in out.iter_mut().enumerate() {
                    *to = loops::reduce(*op, *dtype, &of[r * row..][..row]);
                }
            }
            Op::Spread => spread(floats.get(inputs[0], self.rows), out, row),
            other => unreachable!("{other:?} gives no floats"),
        }
    }
}

fn map<T: Copy, R>(from: &[T], to: &mut [R], f: impl Fn(T) -> R) {
    to.iter_mut().zip(from).for_each(|(to, x)| *to = f(*x));
}

fn spread<T: Copy>(values: &[T], out: &mut [T], row: usize) {
    if row > 0 {
        out.chunks_exact_mut(row).zip(values).for_each(|(to, x)| to.fill(*x));
    }
}

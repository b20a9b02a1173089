//! What a kernel is: CUDA C++ text of its own, and the launches that one run of it takes.
//!
//! Extents and strides are arguments, so that one compilation serves every bucket of a program; what shapes the code
//! (dtypes, the number of axes, which of them are broadcast) is in the text.

use std::sync::Arc;

use ridge_graph::{Bindings, Composite, DType, Function, Op, Type};
use ridge_runtime::component_offsets;

use crate::cublaslt::Shape;

/// The header that every kernel stands on.
const HEADER: &str = include_str!("../kernels/ridge.cuh");
/// The header of kernels that work on tiles.
const TILE: &str = include_str!("../kernels/tile.cuh");
/// The header of kernels for Hopper.
const HOPPER: &str = include_str!("../kernels/hopper.cuh");

/// Most threads of a launch of the simple kernels, which then loop.
const MOST_BLOCKS: usize = 1 << 16;

/// An operand of fixed shape.
#[derive(Clone, Debug)]
pub(crate) struct Operand {
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    /// Of the dtype's elements, or all components of its format.
    pub(crate) bytes: usize,
}

impl Operand {
    /// The operand of type `ty` under `bindings`.
    pub(crate) fn new(ty: &Type, bindings: &Bindings) -> Result<Self, String> {
        Ok(Self {
            dtype: ty.dtype,
            shape: ty.shape.eval(bindings).map_err(|e| e.to_string())?,
            bytes: component_offsets(ty, bindings).map_err(|e| e.to_string())?.1,
        })
    }

    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        self.shape.iter().product()
    }
}

/// What a kernel is made for.
pub(crate) struct Spec<'a> {
    /// A group's nodes; empty for a single primitive.
    pub(crate) body: &'a Function,
    pub(crate) inputs: Vec<Operand>,
    pub(crate) outputs: Vec<Operand>,
    pub(crate) bindings: &'a Bindings,
}

impl Spec<'_> {
    /// The attributes of the first composite of type `T` in the body.
    pub(crate) fn composite<T: Composite>(&self) -> Option<&T> {
        composite(self.body)
    }
}

/// The attributes of the first composite of type `T` in `body`.
pub(crate) fn composite<T: Composite>(body: &Function) -> Option<&T> {
    body.nodes.iter().find_map(|n| match &n.op {
        Op::Composite(op) => op.downcast::<T>(),
        _ => None,
    })
}

/// An operand of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Slot {
    Input(usize),
    Output(usize),
    /// Memory that no other launch uses meanwhile.
    Scratch,
}

/// So many bytes into an operand.
pub(crate) type At = (Slot, usize);

/// An argument of a launch.
#[derive(Clone, Debug)]
pub(crate) enum Arg {
    /// An address: an operand's, so many bytes in.
    Pointer(Slot, usize),
    /// A struct of addresses, by value.
    Pointers(Vec<Slot>),
    /// `Numbers<N>`, by value.
    Numbers(Vec<i64>),
    /// A `float`.
    Float(f32),
    /// A `TensorMap` of an operand: a matrix of so many rows and columns, copied by boxes of so many.
    Matrix { at: At, dtype: DType, extents: [usize; 2], tile: [usize; 2] },
}

/// Something that the device does in one go.
#[derive(Clone, Debug)]
pub(crate) enum Action {
    /// Runs `source.entry` over `grid` blocks of `threads` threads, each block with `shared` bytes of shared memory
    /// beside what the text declares.
    Launch { source: Arc<Source>, grid: [u32; 3], threads: u32, shared: u32, args: Vec<Arg> },
    /// A matrix product of x, w and perhaps a summand by cuBLASLt, or where that is not to be had by other actions.
    Product { shape: Shape, x: At, w: At, r: Option<At>, y: At, otherwise: Vec<Self> },
    /// The way that takes least time on this GPU, timed on random operands of so many elements; a choice is kept under
    /// the key. The first way runs everywhere.
    Fastest { key: String, operands: Vec<(At, DType, usize)>, ways: Vec<Way> },
    /// Moves bytes between operands.
    Copy { from: Slot, to: Slot, to_offset: usize, bytes: usize },
    /// Brings these bytes to an operand.
    Constant { bytes: Vec<u8>, to: Slot },
}

/// Actions that do the same as others.
#[derive(Clone, Debug)]
pub(crate) struct Way {
    pub(crate) actions: Vec<Action>,
    /// The architecture that they are for, or any.
    pub(crate) arch: Option<&'static str>,
}

/// A kernel made for fixed extents.
#[derive(Clone, Debug, Default)]
pub(crate) struct Kernel {
    pub(crate) actions: Vec<Action>,
    /// Bytes of [`Slot::Scratch`].
    pub(crate) scratch: usize,
}

impl From<Action> for Kernel {
    fn from(action: Action) -> Self {
        Self { actions: vec![action], scratch: 0 }
    }
}

/// The text of one kernel and its name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Source {
    pub(crate) entry: &'static str,
    pub(crate) text: String,
}

impl Source {
    /// `body` behind the header and the instance's definitions.
    pub(crate) fn new(entry: &'static str, defines: &[(&str, &str)], body: &str) -> Arc<Self> {
        Self::behind(HEADER.to_owned(), entry, defines, body)
    }

    /// The same with the header of tiles.
    pub(crate) fn tiled(entry: &'static str, defines: &[(&str, &str)], body: &str) -> Arc<Self> {
        Self::behind([HEADER, TILE].concat(), entry, defines, body)
    }

    /// The same with the headers of tiles and of Hopper.
    pub(crate) fn hopper(entry: &'static str, defines: &[(&str, &str)], body: &str) -> Arc<Self> {
        Self::behind([HEADER, TILE, HOPPER].concat(), entry, defines, body)
    }

    fn behind(mut text: String, entry: &'static str, defines: &[(&str, &str)], body: &str) -> Arc<Self> {
        for (name, value) in defines {
            text += &format!("#define {name} {value}\n");
        }
        text += body;
        Arc::new(Self { entry, text })
    }

    /// Does the kernel wait by itself for the launches before it?
    pub(crate) fn waits(&self) -> bool {
        let own = self.text.find("#define INF").map_or(&*self.text, |header| &self.text[header..]);
        own.contains("after_others()")
    }
}

/// A launch of a thread for each of `elements`, or none where there are none.
pub(crate) fn each(source: Arc<Source>, elements: usize, args: Vec<Arg>) -> Kernel {
    blocks(source, elements.div_ceil(256), 256, args)
}

/// A launch of this many blocks, at most [`MOST_BLOCKS`], or none where there are none.
pub(crate) fn blocks(source: Arc<Source>, blocks: usize, threads: u32, args: Vec<Arg>) -> Kernel {
    if blocks == 0 {
        return Kernel::default();
    }
    Action::Launch { source, grid: [blocks.min(MOST_BLOCKS) as u32, 1, 1], threads, shared: 0, args }.into()
}

/// A launch of exactly this grid, or none where it is empty.
pub(crate) fn grid(source: Arc<Source>, grid: [usize; 3], threads: u32, args: Vec<Arg>) -> Result<Kernel, String> {
    const MOST: [usize; 3] = [i32::MAX as usize, 65_535, 65_535];
    if grid.contains(&0) {
        return Ok(Kernel::default());
    }
    if grid.iter().zip(MOST).any(|(n, most)| *n > most) {
        return Err(format!("{} would take a grid of {grid:?}, at most {MOST:?}", source.entry));
    }
    Ok(Action::Launch { source, grid: grid.map(|n| n as u32), threads, shared: 0, args }.into())
}

/// The address of input `i`.
pub(crate) fn input(i: usize) -> Arg {
    Arg::Pointer(Slot::Input(i), 0)
}

/// The address of output `i`.
pub(crate) fn output(i: usize) -> Arg {
    Arg::Pointer(Slot::Output(i), 0)
}

/// Extents and the like.
pub(crate) fn numbers(of: &[usize]) -> Arg {
    Arg::Numbers(of.iter().map(|n| *n as i64).collect())
}

/// The struct of the header that stands for `dtype`.
pub(crate) fn name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "F32",
        DType::BF16 => "BF16",
        DType::F16 => "F16",
        DType::F8E4M3 => "F8E4M3",
        DType::F8E5M2 => "F8E5M2",
        DType::I8 => "I8",
        DType::U8 => "U8",
        DType::I32 => "I32",
        DType::I64 => "I64",
        DType::Bool => "BOOL",
    }
}

/// The unsigned integer of the dtype's size.
pub(crate) fn raw(dtype: DType) -> &'static str {
    match dtype.size_bytes() {
        1 => "u8",
        2 => "u16",
        4 => "u32",
        _ => "u64",
    }
}

//! What a kernel is: the CUDA C++ source of its launches, and the arguments with which they run.
//!
//! Extents and strides are arguments, so that one compilation serves every bucket of a program; what shapes the code
//! (dtypes, the number of axes, which of them are broadcast) is in the source.

mod placed;

use std::sync::Arc;

use ridge_graph::{Bindings, Composite, DType, FormatRef, Function, Op, Shape, Type};
use ridge_runtime::component_offsets;

use crate::communicator::Transfer;
use crate::cublaslt::GemmShape;
use crate::nccl::Elements;

/// The header that every kernel includes.
const HEADER: &str = include_str!("../kernels/ridge.cuh");
/// The header of kernels that work on tiles.
const TILE: &str = include_str!("../kernels/tile.cuh");
/// The header of kernels for Hopper.
const HOPPER: &str = include_str!("../kernels/hopper.cuh");

/// Bytes of [`OperandSlot::Zeros`].
pub(crate) const ZERO_BYTES: usize = 4096;

/// Maximum number of blocks of a launch of the simple kernels, which loop over what is left.
pub(crate) const MAX_BLOCKS: usize = 1 << 16;

/// An operand of fixed shape.
#[derive(Clone, Debug)]
pub struct CudaOperand {
    /// The dtype of its elements.
    pub dtype: DType,
    /// Its extents.
    pub shape: Vec<usize>,
    /// Bytes of its elements, or of all components of its format.
    pub bytes: usize,
    /// The format that it is stored in, if it is not stored as elements of `dtype`.
    pub format: Option<FormatRef>,
}

impl CudaOperand {
    /// The operand of type `ty` under `bindings`.
    pub(crate) fn new(ty: &Type, bindings: &Bindings) -> Result<Self, String> {
        Ok(Self {
            dtype: ty.dtype,
            shape: ty.shape.eval(bindings).map_err(|e| e.to_string())?,
            bytes: component_offsets(ty, bindings).map_err(|e| e.to_string())?.1,
            format: ty.format.clone(),
        })
    }

    /// Where each component of a value in a format begins, in bytes; one 0 for a plain value.
    pub(crate) fn component_offsets(&self) -> Result<Vec<usize>, String> {
        let shape = Shape::new(self.shape.iter().copied());
        let ty = Type { format: self.format.clone(), ..Type::tensor(self.dtype, shape) };
        Ok(component_offsets(&ty, &Bindings::new()).map_err(|e| e.to_string())?.0)
    }

    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        self.shape.iter().product()
    }
}

/// What a kernel is made for: operands of fixed shape, and the ops that it computes.
pub struct CudaKernelSpec<'a> {
    /// The nodes of the group; empty for a single primitive.
    pub body: &'a Function,
    /// The inputs, in the order of the pattern.
    pub inputs: Vec<CudaOperand>,
    /// The outputs.
    pub outputs: Vec<CudaOperand>,
    /// The values of the symbols.
    pub bindings: &'a Bindings,
    /// Must the sums of a row have one order, whatever the number of rows
    /// ([`CudaOptions::deterministic`](crate::CudaOptions::deterministic))?
    pub deterministic: bool,
    /// Are scores of prompts over a cache of int8 products of int8
    /// ([`CudaOptions::int8_attention`](crate::CudaOptions::int8_attention))?
    pub int8_attention: bool,
}

impl CudaKernelSpec<'_> {
    /// The attributes of the first composite of type `T` in the body.
    pub fn composite<T: Composite>(&self) -> Option<&T> {
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
pub enum OperandSlot {
    /// Input `i`.
    Input(usize),
    /// Output `i`.
    Output(usize),
    /// Memory that no other launch uses meanwhile.
    Scratch,
    /// `ZERO_BYTES` bytes that are zeros when a launch begins, and that it leaves as zeros.
    Zeros,
}

/// An operand and an offset into it in bytes.
pub type SlotOffset = (OperandSlot, usize);

/// An argument of a launch.
#[derive(Clone, Debug)]
pub enum LaunchArg {
    /// The address of an operand plus an offset in bytes.
    Pointer(OperandSlot, usize),
    /// A struct of addresses as of [`LaunchArg::Pointer`], by value.
    Pointers(Vec<SlotOffset>),
    /// `Numbers<N>`, by value.
    Numbers(Vec<i64>),
    /// A `float`.
    Float(f32),
    /// A `TensorMap` of an operand: a matrix of `extents` rows and columns, copied in boxes of `tile` rows and columns.
    Matrix {
        /// Where the matrix begins.
        at: SlotOffset,
        /// The dtype of its elements.
        dtype: DType,
        /// Its rows and columns.
        extents: [usize; 2],
        /// Rows and columns of a box.
        tile: [usize; 2],
    },
    /// A `TensorMap` of an operand: a matrix of `extents` rows and columns, multiples of 8 and 64, in groups of eight rows
    /// whose slices of 64 columns follow each other, copied in boxes of `groups` groups.
    Groups {
        /// Where the matrix begins.
        at: SlotOffset,
        /// The dtype of its elements.
        dtype: DType,
        /// Its rows and columns.
        extents: [usize; 2],
        /// Groups of a box.
        groups: usize,
    },
    /// A `TensorMap` of an operand: a matrix of 8-bit codes, `extents` rows and columns, of which there are 64 or 128, copied in boxes
    /// of so many whole rows and swizzled by the bytes of one.
    CodeRows {
        /// Where the matrix begins.
        at: SlotOffset,
        /// The dtype of its elements.
        dtype: DType,
        /// Its rows and columns.
        extents: [usize; 2],
        /// Rows of a box.
        rows: usize,
    },
}

/// One operation that the device runs.
#[derive(Clone, Debug)]
pub(crate) enum DeviceAction {
    /// Runs `source.entry` over `grid` blocks of `threads` threads, each block with `shared` bytes of shared memory
    /// beside what the source declares. `prefetched` are the operands that an early launch reads before `after_others`.
    Launch {
        source: Arc<CudaSource>,
        grid: [u32; 3],
        threads: u32,
        shared: u32,
        args: Vec<LaunchArg>,
        prefetched: Vec<OperandSlot>,
    },
    /// A matrix product of x, w and perhaps a summand and a bias by cuBLASLt, or by the actions of `otherwise` where cuBLASLt is
    /// missing or has no algorithm for it.
    Product {
        shape: GemmShape,
        x: SlotOffset,
        w: SlotOffset,
        r: Option<SlotOffset>,
        bias: Option<SlotOffset>,
        /// The pre-activations of GELU: written, or read by its gradient.
        aux: Option<SlotOffset>,
        y: SlotOffset,
        /// Of x and w.
        scales: Option<[SlotOffset; 2]>,
        otherwise: Vec<Self>,
    },
    /// The candidate that takes least time on this GPU, timed on random operands with these numbers of elements; the
    /// choice is stored under the key. The first candidate runs on every GPU.
    Autotuned { key: String, operands: Vec<(SlotOffset, DType, usize)>, candidates: Vec<KernelCandidate> },
    /// `actions` on GPUs of the architecture `arch`, such as `sm_90a`, and `otherwise` on others.
    ByArch { arch: &'static str, actions: Vec<Self>, otherwise: Vec<Self> },
    /// Moves bytes between operands.
    Copy { from: OperandSlot, to: OperandSlot, to_offset: usize, bytes: usize },
    /// Brings these bytes to an operand.
    Constant { bytes: Vec<u8>, to: OperandSlot },
    /// Communicates with other ranks.
    Collective(CollectiveAction),
}

/// What is communicated with the ranks of a mesh axis.
#[derive(Clone, Debug)]
pub(crate) struct CollectiveAction {
    pub(crate) axis: Arc<str>,
    /// The op with its operand, which all ranks must have in common.
    pub(crate) what: String,
    pub(crate) transfer: Transfer,
    pub(crate) from: SlotOffset,
    pub(crate) to: SlotOffset,
    /// Elements of one part.
    pub(crate) count: usize,
    pub(crate) elements: Elements,
    /// Bytes of one part.
    pub(crate) bytes: usize,
}

/// One of several lists of actions with the same result.
#[derive(Clone, Debug)]
pub(crate) struct KernelCandidate {
    /// Its name in the choice file.
    pub(crate) name: String,
    pub(crate) actions: Vec<DeviceAction>,
    /// The architecture that it needs, such as `sm_90a`; `None` for any.
    pub(crate) arch: Option<&'static str>,
}

/// A kernel made for fixed extents.
#[derive(Clone, Debug, Default)]
pub struct CudaKernel {
    pub(crate) actions: Vec<DeviceAction>,
    /// Bytes of [`OperandSlot::Scratch`].
    pub(crate) scratch: usize,
}

impl CudaKernel {
    /// A kernel of one launch: `grid` blocks of `threads` threads, over `scratch` bytes of [`OperandSlot::Scratch`].
    /// Nothing is launched where the grid is empty.
    ///
    /// # Safety
    /// `args` are the parameters that the source declares, in its order, and the kernel stays within its operands.
    ///
    /// # Errors
    /// When the grid is larger than a GPU allows.
    pub unsafe fn launch(
        source: Arc<CudaSource>,
        grid: [usize; 3],
        threads: u32,
        args: Vec<LaunchArg>,
        scratch: usize,
    ) -> Result<Self, String> {
        Ok(Self { scratch, ..self::grid(source, grid, threads, args)? })
    }

    /// This kernel, whose blocks take so many bytes of shared memory beside what their source declares.
    pub(crate) fn with_shared(mut self, bytes: u32) -> Self {
        for action in &mut self.actions {
            if let DeviceAction::Launch { shared, .. } = action {
                *shared = bytes;
            }
        }
        self
    }

    /// This kernel, whose launches read these inputs before the launch ahead has ended, where they outlive the step.
    pub(crate) fn prefetching(mut self, inputs: impl IntoIterator<Item = usize>) -> Self {
        let inputs: Vec<_> = inputs.into_iter().map(OperandSlot::Input).collect();
        for action in &mut self.actions {
            if let DeviceAction::Launch { prefetched, .. } = action {
                prefetched.extend(inputs.iter().copied());
            }
        }
        self
    }
}

impl From<DeviceAction> for CudaKernel {
    fn from(action: DeviceAction) -> Self {
        Self { actions: vec![action], scratch: 0 }
    }
}

/// The CUDA C++ of a kernel, before it is instantiated: the headers it includes, its body, and how its launches are
/// ordered.
#[derive(Clone, Copy, Debug)]
pub struct KernelText<'a> {
    headers: &'static [&'static str],
    body: &'a str,
    early_launch: bool,
    /// Blocks of a cluster, where blocks take their work in turn; 0 where they do not.
    persistent: u32,
}

impl<'a> KernelText<'a> {
    /// A text over the common header, whose launches begin when all earlier work has ended.
    pub const fn new(body: &'a str) -> Self {
        Self { headers: &[HEADER], body, early_launch: false, persistent: 0 }
    }

    /// This text, including the header of tiles too.
    pub const fn with_tiles(self) -> Self {
        Self { headers: &[HEADER, TILE], ..self }
    }

    /// This text, including the headers of tiles and of Hopper too.
    pub const fn with_hopper(self) -> Self {
        Self { headers: &[HEADER, TILE, HOPPER], ..self }
    }

    /// The text without its headers, and whether it declares an early launch.
    #[cfg(test)]
    pub(crate) fn declared(&self) -> (&'a str, bool) {
        (self.body, self.early_launch)
    }

    /// Declares that launches may begin before the launch ahead of them has ended (programmatic dependent launch).
    ///
    /// The kernel calls `others_may_begin` and `after_others`, in every thread, and until `after_others` it neither
    /// writes anything nor reads an operand, except those that its launches list as `prefetched`.
    pub const fn early_launch(self) -> Self {
        Self { early_launch: true, ..self }
    }

    /// Declares that blocks take their work in turn, so that along x no more are launched than there are multiprocessors, and only
    /// whole clusters of so many.
    pub const fn persistent(self, cluster: u32) -> Self {
        Self { persistent: cluster, ..self }
    }
}

/// The source of one kernel, ready to be compiled.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CudaSource {
    /// The name of the kernel in the text.
    pub entry: Arc<str>,
    /// CUDA C++, headers and definitions included.
    pub text: String,
    /// See [`KernelText::early_launch`].
    pub(crate) early_launch: bool,
    /// See [`KernelText::persistent`].
    pub(crate) persistent: u32,
}

impl CudaSource {
    /// Kernel `entry` of `text`, with `defines` as preprocessor definitions.
    pub fn new(entry: &str, defines: &[(&str, &str)], text: &KernelText<'_>) -> Arc<Self> {
        let defined = |(name, value): &(&str, &str)| ["#define ", name, " ", value, "\n"].concat();
        let defined: String = defines.iter().map(defined).collect();
        // In one allocation: headers have 100 KB, and planning a model's memory makes tens of thousands of sources.
        let source = text.headers.iter().copied().chain([&*defined, text.body]).collect::<Vec<_>>().concat();
        let KernelText { early_launch, persistent, .. } = *text;
        Arc::new(Self { entry: entry.into(), text: source, early_launch, persistent })
    }

    /// The text without its headers.
    #[cfg(test)]
    pub(crate) fn own_text(&self) -> String {
        [HEADER, TILE, HOPPER].iter().fold(self.text.clone(), |text, header| text.replace(header, ""))
    }
}

/// A launch of a thread for each of `elements`, or none where there are none.
pub(crate) fn each(source: Arc<CudaSource>, elements: usize, args: Vec<LaunchArg>) -> CudaKernel {
    blocks(source, elements.div_ceil(256), 256, args)
}

/// A launch of this many blocks, at most [`MAX_BLOCKS`], or none where there are none.
pub(crate) fn blocks(source: Arc<CudaSource>, blocks: usize, threads: u32, args: Vec<LaunchArg>) -> CudaKernel {
    if blocks == 0 {
        return CudaKernel::default();
    }
    DeviceAction::Launch {
        source,
        grid: [blocks.min(MAX_BLOCKS) as u32, 1, 1],
        threads,
        shared: 0,
        args,
        prefetched: Vec::new(),
    }
    .into()
}

/// A launch of exactly this grid, or none where it is empty.
pub(crate) fn grid(
    source: Arc<CudaSource>,
    grid: [usize; 3],
    threads: u32,
    args: Vec<LaunchArg>,
) -> Result<CudaKernel, String> {
    const MAX: [usize; 3] = [i32::MAX as usize, 65_535, 65_535];
    if grid.contains(&0) {
        return Ok(CudaKernel::default());
    }
    if grid.iter().zip(MAX).any(|(n, max)| *n > max) {
        return Err(format!("{} would take a grid of {grid:?}, at most {MAX:?}", source.entry));
    }
    Ok(DeviceAction::Launch { source, grid: grid.map(|n| n as u32), threads, shared: 0, args, prefetched: Vec::new() }
        .into())
}

/// The address of input `i`.
pub(crate) fn input(i: usize) -> LaunchArg {
    LaunchArg::Pointer(OperandSlot::Input(i), 0)
}

/// The address of output `i`.
pub(crate) fn output(i: usize) -> LaunchArg {
    LaunchArg::Pointer(OperandSlot::Output(i), 0)
}

/// Extents and the like.
pub(crate) fn numbers(of: &[usize]) -> LaunchArg {
    LaunchArg::Numbers(of.iter().map(|n| *n as i64).collect())
}

/// How a kernel's text is told whether something is so.
pub(crate) fn flag(on: bool) -> &'static str {
    if on { "1" } else { "0" }
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

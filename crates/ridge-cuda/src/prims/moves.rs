//! Primitives that move elements as they are: each element is an unsigned integer of its size.

use ridge_graph::{DType, Dim};

use crate::iteration_space::{IterationSpace, around, broadcast, strides};
use crate::kernel::{
    CudaKernel, CudaKernelSpec, CudaSource, DeviceAction, KernelText, LaunchArg, OperandSlot, SlotOffset, each, grid,
    input, name, numbers, output, raw,
};

pub(super) const ROWS: KernelText<'_> = KernelText::new(include_str!("../../kernels/rows.cu"));

/// Input `i` as output 0.
pub(super) fn copy(spec: &CudaKernelSpec<'_>, i: usize) -> CudaKernel {
    match spec.outputs[0].bytes {
        0 => CudaKernel::default(),
        bytes => {
            DeviceAction::Copy { from: OperandSlot::Input(i), to: OperandSlot::Output(0), to_offset: 0, bytes }.into()
        }
    }
}

/// Elements of an operand.
pub(super) struct Strided {
    /// The first of them.
    pub(super) at: SlotOffset,
    /// Elements between neighbours along each axis.
    pub(super) strides: Vec<usize>,
}

/// Copies `space` elements.
pub(super) fn strided(dtype: DType, space: &[usize], from: Strided, to: Strided) -> CudaKernel {
    let merged = IterationSpace::merged(space, &[from.strides, to.strides]);
    let integer = if merged.is_small() { "u32" } else { "i64" };
    let total: usize = space.iter().product();
    let mut n = vec![total as i64];
    let places = merged.places("i", integer, &mut n);
    let text = format!(
        "extern \"C\" __global__ void move(const RAW* __restrict__ in, RAW* __restrict__ out, Numbers<{}> n) {{\n\
         for ({integer} i = blockIdx.x * ({integer})blockDim.x + threadIdx.x; i < ({integer})n.v[0]; \
         i += gridDim.x * ({integer})blockDim.x) {{\n{places}out[at1] = in[at0];\n}}\n}}\n",
        n.len()
    );
    let pointer = |(slot, offset)| LaunchArg::Pointer(slot, offset);
    let args = vec![pointer(from.at), pointer(to.at), LaunchArg::Numbers(n)];
    each(CudaSource::new("move", &[("RAW", raw(dtype))], &KernelText::new(&text)), total, args)
}

/// Elements of input `i`, `offset` elements in.
fn from(spec: &CudaKernelSpec<'_>, i: usize, strides: Vec<usize>, offset: usize) -> Strided {
    Strided { at: (OperandSlot::Input(i), offset * spec.inputs[i].dtype.size_bytes()), strides }
}

/// Elements of output 0, `offset` elements in.
fn to(spec: &CudaKernelSpec<'_>, strides: Vec<usize>, offset: usize) -> Strided {
    Strided { at: (OperandSlot::Output(0), offset * spec.outputs[0].dtype.size_bytes()), strides }
}

pub(super) fn transpose(spec: &CudaKernelSpec<'_>, perm: &[usize]) -> CudaKernel {
    let (x, shape) = (&spec.inputs[0], &spec.outputs[0].shape);
    let own = strides(&x.shape);
    let permuted = perm.iter().map(|axis| own[*axis]).collect();
    strided(x.dtype, shape, from(spec, 0, permuted, 0), to(spec, strides(shape), 0))
}

pub(super) fn broadcast_to(spec: &CudaKernelSpec<'_>) -> CudaKernel {
    let (x, shape) = (&spec.inputs[0], &spec.outputs[0].shape);
    strided(x.dtype, shape, from(spec, 0, broadcast(&x.shape, shape), 0), to(spec, strides(shape), 0))
}

pub(super) fn slice(spec: &CudaKernelSpec<'_>, axis: usize, start: &Dim) -> Result<CudaKernel, String> {
    let (x, shape) = (&spec.inputs[0], &spec.outputs[0].shape);
    let start = start.eval(spec.bindings).map_err(|e| e.to_string())?;
    if start + shape[axis] > x.shape[axis] {
        return Err(format!("slice {start}..{} of an extent of {}", start + shape[axis], x.shape[axis]));
    }
    let own = strides(&x.shape);
    let offset = start * own[axis];
    Ok(strided(x.dtype, shape, from(spec, 0, own, offset), to(spec, strides(shape), 0)))
}

pub(super) fn concat(spec: &CudaKernelSpec<'_>, axis: usize) -> CudaKernel {
    let whole = strides(&spec.outputs[0].shape);
    let mut kernel = CudaKernel::default();
    let mut start = 0;
    for (i, part) in spec.inputs.iter().enumerate() {
        let (own, place) = (from(spec, i, strides(&part.shape), 0), to(spec, whole.clone(), start * whole[axis]));
        kernel.actions.extend(strided(part.dtype, &part.shape, own, place).actions);
        start += part.shape[axis];
    }
    kernel
}

/// Components one after another, where the plan has those of a value.
pub(super) fn assemble(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let mut kernel = CudaKernel::default();
    for (i, (part, to_offset)) in spec.inputs.iter().zip(spec.outputs[0].component_offsets()?).enumerate() {
        if part.bytes > 0 {
            let (from, to) = (OperandSlot::Input(i), OperandSlot::Output(0));
            kernel.actions.push(DeviceAction::Copy { from, to, to_offset, bytes: part.bytes });
        }
    }
    Ok(kernel)
}

pub(super) fn pad(spec: &CudaKernelSpec<'_>, axis: usize, before: &Dim, value: f64) -> Result<CudaKernel, String> {
    let (x, out) = (&spec.inputs[0], &spec.outputs[0]);
    let before = before.eval(spec.bindings).map_err(|e| e.to_string())?;
    let (outer, extent, inner) = around(&x.shape, axis);
    let bits = if x.dtype == DType::I64 { (value as i64).to_le_bytes().to_vec() } else { x.dtype.encode([value]) };
    let bits = bits.iter().rev().fold(0u64, |bits, byte| bits << 8 | u64::from(*byte));
    let sizes = [outer, extent, inner, out.shape[axis], before].map(|n| n as i64);
    let args = vec![input(0), output(0), LaunchArg::Numbers([&sizes[..], &[bits as i64]].concat())];
    Ok(each(CudaSource::new("pad", &[("PAD", "1"), ("RAW", raw(x.dtype))], &ROWS), out.len(), args))
}

pub(super) fn gather(spec: &CudaKernelSpec<'_>, axis: usize) -> CudaKernel {
    let (data, indices) = (&spec.inputs[0], &spec.inputs[1]);
    let (outer, extent, inner) = around(&data.shape, axis);
    let defines = [("GATHER", "1"), ("RAW", raw(data.dtype)), ("INDEX", name(indices.dtype))];
    let args = vec![input(0), input(1), output(0), numbers(&[outer, extent, inner, indices.len()])];
    each(CudaSource::new("gather", &defines, &ROWS), spec.outputs[0].len(), args)
}

/// Blocks of rows that are added to, beyond which a block takes several rows, at most so many.
const SCATTERED_BLOCKS: usize = 1024;
const SCATTERED_ROWS: usize = 64;

/// Rows of f32 added to rows, as the gradient of an embedding has them.
fn scatter_rows(spec: &CudaKernelSpec<'_>, extent: usize, inner: usize) -> Result<CudaKernel, String> {
    let across = inner.div_ceil(256);
    let rows = (extent * across / SCATTERED_BLOCKS).clamp(1, SCATTERED_ROWS);
    let indices = &spec.inputs[1];
    let defines = [("ROWS", &*rows.to_string()), ("INDEX", name(indices.dtype))];
    let args = vec![input(0), input(1), input(2), output(0), numbers(&[extent, inner, indices.len()])];
    grid(CudaSource::new("scatter_rows", &defines, &ROWS), [extent.div_ceil(rows), across, 1], 256, args)
}

pub(super) fn scatter(spec: &CudaKernelSpec<'_>, axis: usize, add: bool) -> CudaKernel {
    let (data, indices) = (&spec.inputs[0], &spec.inputs[1]);
    let (outer, extent, inner) = around(&data.shape, axis);
    let wide = [data.dtype, spec.inputs[2].dtype] == [DType::F32; 2];
    if add
        && wide
        && outer == 1
        && let Ok(kernel) = scatter_rows(spec, extent, inner)
    {
        return kernel;
    }
    let defines = [
        ("SCATTER", "1"),
        ("D", name(data.dtype)),
        ("INDEX", name(indices.dtype)),
        ("ADD", if add { "1" } else { "0" }),
    ];
    let args = vec![input(0), input(1), input(2), output(0), numbers(&[outer, extent, inner, indices.len()])];
    each(CudaSource::new("scatter", &defines, &ROWS), data.len(), args)
}

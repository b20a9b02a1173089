//! Collectives: parts of ranks brought one after another, as NCCL has them, communicated, and brought where they belong.

use ridge_graph::{CollectiveKind, DType};

use super::moves::{Strided, copy, strided};
use crate::communicator::{MeshRanks, Transfer};
use crate::iteration_space::{around, strides};
use crate::kernel::{CollectiveAction, CudaKernel, CudaKernelSpec, CudaOperand, DeviceAction, OperandSlot, SlotOffset};
use crate::nccl::Elements;

const INPUT: SlotOffset = (OperandSlot::Input(0), 0);
const OUTPUT: SlotOffset = (OperandSlot::Output(0), 0);

/// Alignment of what is packed, in bytes.
const ALIGN: usize = 256;

/// The collective over mesh axis `axis`.
///
/// # Errors
/// When the mesh has no such axis, or one of another number of ranks.
pub(super) fn make(
    spec: &CudaKernelSpec<'_>,
    kind: CollectiveKind,
    axis: &str,
    ranks: usize,
    mesh: &MeshRanks,
) -> Result<CudaKernel, String> {
    if ranks == 1 {
        return Ok(copy(spec, 0));
    }
    let rank = match mesh.get(axis) {
        Some((has, rank)) if *has == ranks => *rank,
        Some((has, _)) => return Err(format!("is over {ranks} ranks of mesh axis `{axis}`, which has {has}")),
        None => {
            let mut known: Vec<&str> = mesh.keys().map(String::as_str).collect();
            known.sort_unstable();
            return Err(format!(
                "is over mesh axis `{axis}`, and the backend was given the axes {known:?}; pass a group of {ranks} ranks \
                 for it in the mesh"
            ));
        }
    };
    let (input, output) = (&spec.inputs[0], &spec.outputs[0]);
    let dims: Vec<String> = input.shape.iter().map(ToString::to_string).collect();
    let what = format!("{}({}[{}]) over {axis}={ranks}", kind.name(), input.dtype, dims.join(", "));
    let communicate = |transfer, from, to, part: &CudaOperand| {
        let elements = match transfer {
            Transfer::AllReduce | Transfer::Reduce(_) | Transfer::ReduceScatter => Elements::summed(input.dtype),
            Transfer::Broadcast(_) | Transfer::AllGather | Transfer::AllToAll | Transfer::Send { .. } => {
                Elements::BYTES
            }
        };
        let count = if elements == Elements::BYTES { part.bytes } else { part.len() };
        let (axis, what) = (axis.into(), what.clone());
        DeviceAction::Collective(CollectiveAction {
            axis,
            what,
            transfer,
            from,
            to,
            count,
            elements,
            bytes: part.bytes,
        })
    };
    let alone = |transfer| Ok(communicate(transfer, INPUT, OUTPUT, input).into());
    let mut kernel = CudaKernel::default();
    match kind {
        CollectiveKind::AllReduce => return alone(Transfer::AllReduce),
        CollectiveKind::Reduce(root) => return alone(Transfer::Reduce(root)),
        CollectiveKind::Broadcast(root) => return alone(Transfer::Broadcast(root)),
        CollectiveKind::Send { from, to } => return alone(Transfer::Send { from, to }),
        CollectiveKind::AllGather(axis) => {
            let slices = Slices::of(input, axis, ranks);
            let to = if slices.are_apart() { kernel.reserve(output.bytes) } else { OUTPUT };
            kernel.actions.push(communicate(Transfer::AllGather, INPUT, to, input));
            if slices.are_apart() {
                kernel.actions.extend(slices.unpack(input.dtype, to, OUTPUT).actions);
            }
        }
        CollectiveKind::ReduceScatter(axis) => {
            let slices = Slices::of(output, axis, ranks);
            let from = slices.pack(input, &mut kernel);
            kernel.actions.push(communicate(Transfer::ReduceScatter, from, OUTPUT, output));
        }
        CollectiveKind::AllToAll { split, concat } => {
            let mut part = input.clone();
            part.shape[split] /= ranks;
            part.bytes /= ranks;
            let (cut, joined) = (Slices::of(&part, split, ranks), Slices::of(&part, concat, ranks));
            let from = cut.pack(input, &mut kernel);
            let to = if joined.are_apart() { kernel.reserve(output.bytes) } else { OUTPUT };
            kernel.actions.push(communicate(Transfer::AllToAll, from, to, &part));
            if joined.are_apart() {
                kernel.actions.extend(joined.unpack(input.dtype, to, OUTPUT).actions);
            }
        }
        CollectiveKind::Split(axis) => {
            let own = strides(&input.shape);
            let offset = rank * output.shape[axis] * own[axis];
            let from = Strided { at: (INPUT.0, offset * input.dtype.size_bytes()), strides: own };
            let to = Strided { at: OUTPUT, strides: strides(&output.shape) };
            return Ok(strided(input.dtype, &output.shape, from, to));
        }
    }
    Ok(kernel)
}

/// The slices along an axis that a tensor consists of: `outer` times, the rows of all ranks.
#[derive(Clone, Copy)]
struct Slices {
    outer: usize,
    /// Elements of one rank's row.
    row: usize,
    ranks: usize,
}

impl Slices {
    /// `part` is one of them.
    fn of(part: &CudaOperand, axis: usize, ranks: usize) -> Self {
        let (outer, extent, inner) = around(&part.shape, axis);
        Self { outer, row: extent * inner, ranks }
    }

    /// Does a slice lie in several places?
    fn are_apart(self) -> bool {
        self.outer > 1
    }

    /// The space of all elements, and the strides over it of slices that lie one after another, and of the tensor.
    fn walk(self) -> ([usize; 3], Vec<usize>, Vec<usize>) {
        let Self { outer, row, ranks } = self;
        ([outer, ranks, row], vec![row, outer * row, 1], vec![ranks * row, row, 1])
    }

    /// Brings the slices of the input one after another, where they are not.
    fn pack(self, input: &CudaOperand, kernel: &mut CudaKernel) -> SlotOffset {
        if !self.are_apart() {
            return INPUT;
        }
        let packed = kernel.reserve(input.bytes);
        let (space, apart, whole) = self.walk();
        let (from, to) = (Strided { at: INPUT, strides: whole }, Strided { at: packed, strides: apart });
        kernel.actions.extend(strided(input.dtype, &space, from, to).actions);
        packed
    }

    /// Brings slices that lie one after another to their places in the tensor.
    fn unpack(self, dtype: DType, from: SlotOffset, to: SlotOffset) -> CudaKernel {
        let (space, apart, whole) = self.walk();
        strided(dtype, &space, Strided { at: from, strides: apart }, Strided { at: to, strides: whole })
    }
}

impl CudaKernel {
    /// More scratch memory.
    fn reserve(&mut self, bytes: usize) -> SlotOffset {
        let at = self.scratch.next_multiple_of(ALIGN);
        self.scratch = at + bytes;
        (OperandSlot::Scratch, at)
    }
}

//! Collectives within this rank's groups of the mesh.
//!
//! A single piece: the ranks meet once, and the copies beside it are small next to that.

use std::ops::Range;
use std::sync::Arc;

use ridge_graph::{CollectiveKind, DType};
use ridge_runtime::Collectives;

use crate::fused::view::around;
use crate::io::KernelIo;
use crate::kernel::{CpuKernel, OperandType};
use crate::mesh::MeshGroups;
use crate::scratch::Scratch;

/// The collective over mesh axis `axis`.
///
/// # Errors
/// When the mesh has no such axis, or one of another number of ranks.
pub(super) fn make(
    kind: CollectiveKind,
    axis: &str,
    ranks: usize,
    input: &OperandType,
    output: &OperandType,
    mesh: &MeshGroups,
) -> Result<Box<dyn CpuKernel>, String> {
    let group = match mesh.get(axis) {
        Some(group) if group.ranks() == ranks => Some(Arc::clone(group)),
        Some(group) => {
            let has = group.ranks();
            return Err(format!("is over {ranks} ranks of mesh axis `{axis}`, which has {has}"));
        }
        // A group of one has nobody to talk to.
        None if ranks == 1 => None,
        None => {
            let mut known: Vec<&str> = mesh.keys().map(String::as_str).collect();
            known.sort_unstable();
            return Err(format!(
                "is over mesh axis `{axis}`, and the backend was given the axes {known:?}; pass a group of {ranks} \
                 ranks for it in the mesh"
            ));
        }
    };
    let axis = match kind {
        CollectiveKind::AllReduce => 0,
        CollectiveKind::AllGather(axis) | CollectiveKind::ReduceScatter(axis) | CollectiveKind::Split(axis) => axis,
    };
    let part = if matches!(kind, CollectiveKind::AllGather(_)) { input } else { output };
    let (outer, row) = match part.shape.get(axis) {
        Some(_) => (around(&part.shape, axis).0, part.shape[axis..].iter().product()),
        None => (1, 1),
    };
    Ok(Box::new(Collective { kind, group, dtype: input.dtype, elements: input.len(), outer, row }))
}

struct Collective {
    kind: CollectiveKind,
    group: Option<Arc<dyn Collectives>>,
    dtype: DType,
    /// Of the input.
    elements: usize,
    /// Rows of one rank's part, and elements of such a row: of the whole, each row has one of every rank.
    outer: usize,
    row: usize,
}

impl CpuKernel for Collective {
    fn pieces(&self) -> usize {
        // Every rank takes part in every collective, even one of no elements.
        1
    }

    fn nanos_per_piece(&self) -> f64 {
        self.elements as f64
    }

    fn run(&self, io: &KernelIo<'_>, _pieces: Range<usize>, scratch: &mut Scratch) {
        let bytes = self.elements * self.dtype.size_bytes();
        let row = self.row * self.dtype.size_bytes();
        let from = &io.input::<u8>(0)[..bytes];
        let to_bytes = match (&self.group, self.kind) {
            (Some(group), CollectiveKind::AllGather(_)) => bytes * group.ranks(),
            (Some(group), CollectiveKind::ReduceScatter(_) | CollectiveKind::Split(_)) => bytes / group.ranks(),
            _ => bytes,
        };
        // SAFETY: the only piece.
        let to = unsafe { io.output::<u8>(0).part(0..to_bytes) };
        let Some(group) = &self.group else { return to.copy_from_slice(from) };
        match self.kind {
            CollectiveKind::AllReduce => {
                to.copy_from_slice(from);
                group.all_reduce(self.dtype, to);
            }
            CollectiveKind::AllGather(_) if self.outer == 1 => group.all_gather(from, to),
            CollectiveKind::AllGather(_) => {
                let [whole] = scratch.slices::<u8, 1>([to_bytes]);
                group.all_gather(from, whole);
                for (i, to) in to.chunks_exact_mut(row.max(1)).enumerate() {
                    let (outer, rank) = (i / group.ranks(), i % group.ranks());
                    to.copy_from_slice(&whole[rank * bytes + outer * row..][..row]);
                }
            }
            CollectiveKind::ReduceScatter(_) => {
                let [whole] = scratch.slices::<u8, 1>([bytes]);
                whole.copy_from_slice(from);
                group.all_reduce(self.dtype, whole);
                own_rows(group.as_ref(), whole, row, to);
            }
            CollectiveKind::Split(_) => own_rows(group.as_ref(), from, row, to),
        }
    }
}

/// Copies this rank's rows of `row` bytes out of `whole`, where those of all ranks follow each other.
fn own_rows(group: &dyn Collectives, whole: &[u8], row: usize, to: &mut [u8]) {
    for (outer, to) in to.chunks_exact_mut(row.max(1)).enumerate() {
        to.copy_from_slice(&whole[(outer * group.ranks() + group.rank()) * row..][..row]);
    }
}

//! Collectives within this rank's groups of the mesh, made of exchanges.
//!
//! A single piece: the ranks meet once or twice, and the copies beside that are small.

use std::ops::Range;
use std::sync::Arc;

use half::{bf16, f16};
use ridge_graph::{CollectiveKind, DType};
use ridge_runtime::{CollectiveError, Collectives};

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
    let dims: Vec<String> = input.shape.iter().map(ToString::to_string).collect();
    let what = format!("{}({}[{}]) over {axis}={ranks}", kind.name(), input.dtype, dims.join(", "));
    let (input, output) = (input.clone(), output.clone());
    Ok(Box::new(Collective { kind, group, ranks, what, input, output }))
}

struct Collective {
    kind: CollectiveKind,
    /// `None` of one rank.
    group: Option<Arc<dyn Collectives>>,
    ranks: usize,
    /// For errors, and to tell collectives apart.
    what: String,
    input: OperandType,
    output: OperandType,
}

/// The slices along an axis that a tensor consists of, as bytes: `outer` times, the rows of all ranks.
#[derive(Clone, Copy)]
struct Slices {
    outer: usize,
    /// Bytes of one rank's row.
    row: usize,
    ranks: usize,
}

impl Slices {
    /// `part` is the type of one of them.
    fn of(part: &OperandType, axis: usize, ranks: usize) -> Self {
        let row: usize = part.shape[axis..].iter().product();
        Self { outer: around(&part.shape, axis).0, row: row * part.dtype.size_bytes(), ranks }
    }

    /// Where the row of `rank` lies in the `outer`-th run of rows.
    fn at(self, outer: usize, rank: usize) -> Range<usize> {
        let start = (outer * self.ranks + rank) * self.row;
        start..start + self.row
    }

    /// Bytes of one slice.
    fn bytes(self) -> usize {
        self.outer * self.row
    }

    /// Copies the slice of `rank` out of `whole`.
    fn take(self, whole: &[u8], rank: usize, to: &mut [u8]) {
        for (outer, to) in to.chunks_exact_mut(self.row.max(1)).enumerate() {
            to.copy_from_slice(&whole[self.at(outer, rank)]);
        }
    }

    /// Copies the slice of `rank` into `whole`.
    fn put(self, whole: &mut [u8], rank: usize, from: &[u8]) {
        for (outer, from) in from.chunks_exact(self.row.max(1)).enumerate() {
            whole[self.at(outer, rank)].copy_from_slice(from);
        }
    }
}

/// Sums of fewer bytes are sent whole to every rank, which takes one exchange and not two.
const SMALL: usize = 16 << 10;

impl Collective {
    fn communicate(
        &self,
        group: &dyn Collectives,
        from: &[u8],
        to: &mut [u8],
        scratch: &mut Scratch,
    ) -> Result<(), CollectiveError> {
        let (ranks, rank) = (self.ranks, group.rank());
        match self.kind {
            CollectiveKind::AllReduce => self.sum(group, None, from, to, scratch),
            CollectiveKind::Reduce(root) => self.sum(group, Some(root), from, to, scratch),
            CollectiveKind::AllGather(axis) => {
                let slices = Slices::of(&self.input, axis, ranks);
                if slices.outer == 1 {
                    return self.exchange(group, &vec![from; ranks], &mut parts(to, ranks));
                }
                let [whole] = scratch.slices::<u8, 1>([to.len()]);
                self.exchange(group, &vec![from; ranks], &mut parts(whole, ranks))?;
                for (rank, part) in whole.chunks_exact(slices.bytes().max(1)).enumerate() {
                    slices.put(to, rank, part);
                }
                Ok(())
            }
            CollectiveKind::ReduceScatter(axis) => {
                let slices = Slices::of(&self.output, axis, ranks);
                let [packed, received] = scratch.slices::<u8, 2>([from.len(), from.len()]);
                self.pack_and_exchange(group, slices, from, packed, received)?;
                let received: Vec<&[u8]> = received.chunks_exact(slices.bytes().max(1)).collect();
                add(self.input.dtype, &received, to);
                Ok(())
            }
            CollectiveKind::AllToAll { split, concat } => {
                let mut part = self.input.clone();
                part.shape[split] /= ranks;
                let (cut, joined) = (Slices::of(&part, split, ranks), Slices::of(&part, concat, ranks));
                let [packed, received] = scratch.slices::<u8, 2>([from.len(), from.len()]);
                self.pack_and_exchange(group, cut, from, packed, received)?;
                for (rank, part) in received.chunks_exact(joined.bytes().max(1)).enumerate() {
                    joined.put(to, rank, part);
                }
                Ok(())
            }
            CollectiveKind::Broadcast(root) => self.pass_on(group, root, 0..ranks, from, to),
            CollectiveKind::Send { from: root, to: only } => {
                to.fill(0);
                self.pass_on(group, root, only..only + 1, from, to)
            }
            CollectiveKind::Split(axis) => {
                Slices::of(&self.output, axis, ranks).take(from, rank, to);
                Ok(())
            }
        }
    }

    fn exchange(
        &self,
        group: &dyn Collectives,
        send: &[&[u8]],
        receive: &mut [&mut [u8]],
    ) -> Result<(), CollectiveError> {
        group.exchange(&self.what, send, receive)
    }

    /// Sends every rank its slice of `from`. What the ranks sent follows each other in `received`.
    fn pack_and_exchange(
        &self,
        group: &dyn Collectives,
        slices: Slices,
        from: &[u8],
        packed: &mut [u8],
        received: &mut [u8],
    ) -> Result<(), CollectiveError> {
        let packed = if slices.outer == 1 {
            from
        } else {
            for (rank, to) in packed.chunks_exact_mut(slices.bytes().max(1)).enumerate() {
                slices.take(from, rank, to);
            }
            &*packed
        };
        let send: Vec<&[u8]> = (0..self.ranks).map(|r| &packed[r * slices.bytes()..][..slices.bytes()]).collect();
        self.exchange(group, &send, &mut parts(received, self.ranks))
    }

    /// The ranks `to_whom` get what rank `root` has.
    fn pass_on(
        &self,
        group: &dyn Collectives,
        root: usize,
        to_whom: Range<usize>,
        from: &[u8],
        to: &mut [u8],
    ) -> Result<(), CollectiveError> {
        let rank = group.rank();
        let sends = |to: usize| rank == root && to_whom.contains(&to);
        let send: Vec<&[u8]> = (0..self.ranks).map(|r| if sends(r) { from } else { &[] }).collect();
        let mut receive: Vec<&mut [u8]> = (0..self.ranks).map(|_| &mut [][..]).collect();
        if to_whom.contains(&rank) {
            receive[root] = to;
        }
        self.exchange(group, &send, &mut receive)
    }

    /// The sum over ranks in the order of ranks, in `to` of every rank or of `root` alone. Each rank adds up one part and
    /// sends it to whoever wants the sum, or all of it where that is little.
    fn sum(
        &self,
        group: &dyn Collectives,
        root: Option<usize>,
        from: &[u8],
        to: &mut [u8],
        scratch: &mut Scratch,
    ) -> Result<(), CollectiveError> {
        let (ranks, rank, size) = (self.ranks, group.rank(), self.input.dtype.size_bytes());
        let wants = |rank: usize| root.is_none_or(|root| root == rank);
        if from.len() <= SMALL {
            let [whole] = scratch.slices::<u8, 1>([if wants(rank) { from.len() * ranks } else { 0 }]);
            let send: Vec<&[u8]> = (0..ranks).map(|r| if wants(r) { from } else { &[] }).collect();
            self.exchange(group, &send, &mut parts(whole, ranks))?;
            if wants(rank) {
                add(
                    self.input.dtype,
                    &(0..ranks).map(|r| &whole[r * from.len()..][..from.len()]).collect::<Vec<_>>(),
                    to,
                );
            } else {
                to.fill(0);
            }
            return Ok(());
        }
        let part = (from.len() / size).div_ceil(ranks) * size;
        let of = |rank: usize| (rank * part).min(from.len())..((rank + 1) * part).min(from.len());
        let mine = of(rank).len();
        let [received, summed] = scratch.slices::<u8, 2>([mine * ranks, mine]);
        let send: Vec<&[u8]> = (0..ranks).map(|r| &from[of(r)]).collect();
        self.exchange(group, &send, &mut parts(received, ranks))?;
        add(self.input.dtype, &(0..ranks).map(|r| &received[r * mine..][..mine]).collect::<Vec<_>>(), summed);
        let send: Vec<&[u8]> = (0..ranks).map(|r| if wants(r) { &*summed } else { &[] }).collect();
        if !wants(rank) {
            to.fill(0);
            return self.exchange(group, &send, &mut parts(&mut [], ranks));
        }
        let mut receive = Vec::with_capacity(ranks);
        let mut rest = to;
        for rank in 0..ranks {
            let (part, others) = rest.split_at_mut(of(rank).len());
            receive.push(part);
            rest = others;
        }
        self.exchange(group, &send, &mut receive)
    }
}

impl CpuKernel for Collective {
    fn pieces(&self) -> usize {
        // Every rank takes part in every collective, even one of no elements.
        1
    }

    fn nanos_per_piece(&self) -> f64 {
        self.input.len() as f64
    }

    fn run(&self, io: &KernelIo<'_>, _pieces: Range<usize>, scratch: &mut Scratch) {
        let from = &io.input::<u8>(0)[..self.input.len() * self.input.dtype.size_bytes()];
        // SAFETY: the only piece.
        let to = unsafe { io.output::<u8>(0).part(0..self.output.len() * self.output.dtype.size_bytes()) };
        let Some(group) = &self.group else { return to.copy_from_slice(from) };
        if let Err(error) = self.communicate(&**group, from, to, scratch) {
            // The step fails, as by any kernel that cannot continue. Nothing is wrong with this program, so no panic is told.
            std::panic::resume_unwind(Box::new(error.to_string()));
        }
    }
}

/// `whole` in as many equal parts.
fn parts(whole: &mut [u8], ranks: usize) -> Vec<&mut [u8]> {
    let (bytes, mut rest) = (whole.len() / ranks, whole);
    let part = |_| {
        let (part, others) = std::mem::take(&mut rest).split_at_mut(bytes);
        rest = others;
        part
    };
    (0..ranks).map(part).collect()
}

/// The sum of `parts` in their order, from zero. Floats are added in f64 and rounded once, integers wrap.
fn add(dtype: DType, parts: &[&[u8]], to: &mut [u8]) {
    match dtype {
        DType::F32 => floats(parts, to, f32::from_le_bytes, f64::from, |sum| (sum as f32).to_le_bytes()),
        DType::BF16 => floats(parts, to, bf16::from_le_bytes, bf16::to_f64, |sum| bf16::from_f64(sum).to_le_bytes()),
        DType::F16 => floats(parts, to, f16::from_le_bytes, f16::to_f64, |sum| f16::from_f64(sum).to_le_bytes()),
        DType::Bool => {
            for (i, to) in to.iter_mut().enumerate() {
                *to = u8::from(parts.iter().any(|part| part[i] != 0));
            }
        }
        _ if dtype.is_float() => {
            let mut sums = vec![0f64; to.len() / dtype.size_bytes()];
            for part in parts {
                sums.iter_mut().zip(dtype.decode(part)).for_each(|(sum, x)| *sum += x);
            }
            to.copy_from_slice(&dtype.encode(sums));
        }
        _ => {
            // Little-endian, with a carry from byte to byte: modulo the size, signed or not.
            let size = dtype.size_bytes();
            for (i, to) in to.chunks_exact_mut(size).enumerate() {
                let mut carry = 0u32;
                for (byte, to) in to.iter_mut().enumerate() {
                    let sum: u32 = parts.iter().map(|part| u32::from(part[i * size + byte])).sum::<u32>() + carry;
                    (*to, carry) = (sum as u8, sum >> 8);
                }
            }
        }
    }
}

fn floats<T, const N: usize>(
    parts: &[&[u8]],
    to: &mut [u8],
    read: impl Fn([u8; N]) -> T,
    wide: impl Fn(T) -> f64,
    write: impl Fn(f64) -> [u8; N],
) {
    for (i, to) in to.as_chunks_mut::<N>().0.iter_mut().enumerate() {
        let sum = parts.iter().fold(0.0, |sum, part| sum + wide(read(part.as_chunks::<N>().0[i])));
        *to = write(sum);
    }
}

//! Kernels in safe code: each piece is a part of the only output.

use std::ops::Range;

use crate::bytes::Pod;
use crate::io::KernelIo;
use crate::kernel::{CpuKernel, KernelSpec};
use crate::scratch::Scratch;

/// A kernel with one output, which is no state, cut into equal parts that are computed on their own. Unlike [`CpuKernel`],
/// it needs no unsafe code.
pub trait PartKernel: Send + Sync + 'static {
    /// Elements of the output.
    type Element: Pod;

    /// Elements of a part; the last one may have fewer. At least 1.
    fn part_len(&self) -> usize;

    /// What one part takes, in nanoseconds, roughly.
    fn nanos_per_part(&self) -> f64;

    /// Computes the elements from `first` on (of the whole output, in row-major order) into `out`, from the inputs of `io`
    /// ([`KernelIo::input`]). Every element must be written.
    fn compute(&self, io: &KernelIo<'_>, first: usize, out: &mut [Self::Element]);
}

/// A [`PartKernel`] as the device runs it, for a [`MakeKernel`](crate::MakeKernel) function to return.
///
/// # Errors
/// When the group has several outputs or a state among them, or the output's elements have another size than
/// `K::Element`.
pub fn part_kernel<K: PartKernel>(spec: &KernelSpec<'_>, kernel: K) -> Result<Box<dyn CpuKernel>, String> {
    let [output] = &spec.outputs[..] else {
        return Err(format!("computed in parts is one output, there are {}", spec.outputs.len()));
    };
    if spec.body.outputs.iter().any(|o| spec.body.ty(o.var).state) {
        return Err("a state is not computed in parts; implement `CpuKernel`".into());
    }
    if output.dtype.size_bytes() != size_of::<K::Element>() {
        let (dtype, size) = (output.dtype, size_of::<K::Element>());
        return Err(format!("the output is of {dtype}, the kernel computes elements of {size} bytes"));
    }
    Ok(Box::new(OutputParts { part: kernel.part_len().max(1), len: output.len(), kernel }))
}

struct OutputParts<K> {
    kernel: K,
    part: usize,
    len: usize,
}

impl<K: PartKernel> CpuKernel for OutputParts<K> {
    fn pieces(&self) -> usize {
        self.len.div_ceil(self.part)
    }

    fn nanos_per_piece(&self) -> f64 {
        self.kernel.nanos_per_part()
    }

    fn run(&self, io: &KernelIo<'_>, pieces: Range<usize>, _scratch: &mut Scratch) {
        for piece in pieces {
            let first = piece * self.part;
            let range = first..(first + self.part).min(self.len);
            // SAFETY: a piece is these elements, which belong to this call alone; the slice ends with the iteration. The
            // output is no state, so no input is the same memory.
            let out = unsafe { io.output::<K::Element>(0).part(range) };
            self.kernel.compute(io, first, out);
        }
    }
}

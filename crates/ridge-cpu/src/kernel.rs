//! What a kernel is on the CPU, and what it may touch.

use std::marker::PhantomData;
use std::ops::Range;

use ridge_graph::{Bindings, Composite, DType, FormatRef, Function, Op};

use crate::buffer::Memory;

/// A kernel for fixed shapes, made once for each distinct node of a bucket and run by any thread.
pub(crate) trait Kernel: Send + Sync {
    /// Into how many independent pieces its work can be cut, such as rows of the output. Zero where there is nothing
    /// to do.
    fn pieces(&self) -> usize;

    /// What one piece takes, in nanoseconds, roughly: decides into how many parts the work is worth cutting.
    fn nanos_per_piece(&self) -> f64;

    /// Inputs that it would take repacked in panels ([`crate::kernels::panels`]), all of them or none.
    fn takes_panels(&self) -> Range<usize> {
        0..0
    }

    /// Work that must be done before the first piece, if there is some.
    fn preparation(&self) -> Option<Preparation> {
        None
    }

    /// Does `pieces` of the preparation, into the parts of [`Io::room`] that belong to them.
    fn prepare(&self, _io: &Io<'_>, _pieces: Range<usize>, _scratch: &mut Scratch) {}

    /// Computes `pieces`. Different threads get ranges that do not overlap, and every piece is in exactly one range.
    /// A kernel writes only the output elements of its pieces.
    fn run(&self, io: &Io<'_>, pieces: Range<usize>, scratch: &mut Scratch);
}

/// Work on a kernel's inputs that all of its pieces share, such as another layout: done by all threads before the first
/// piece, once for a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Preparation {
    /// Bytes that it fills of the workspace, from [`Io::room`] on; all pieces may read them.
    pub(crate) bytes: usize,
    /// As [`Kernel::pieces`].
    pub(crate) pieces: usize,
    /// As [`Kernel::nanos_per_piece`].
    pub(crate) nanos_per_piece: f64,
}

/// A tensor's type with numbers for its extents.
#[derive(Clone, Debug)]
pub(crate) struct Operand {
    pub(crate) dtype: DType,
    pub(crate) format: Option<FormatRef>,
    pub(crate) shape: Vec<usize>,
    /// Is it a weight that is repacked in panels?
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "panels are of matrix tiles"))]
    pub(crate) panels: bool,
}

impl Operand {
    pub(crate) fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// The innermost extent; 1 for a scalar.
    pub(crate) fn last(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Elements over all axes but the innermost.
    pub(crate) fn rows(&self) -> usize {
        self.shape.iter().rev().skip(1).product()
    }
}

/// What a kernel is made from.
pub(crate) struct Spec<'a> {
    /// The claimed or fused nodes, as a function of the group's inputs; the single node for a primitive.
    pub(crate) body: &'a Function,
    pub(crate) inputs: Vec<Operand>,
    pub(crate) outputs: Vec<Operand>,
    /// Numbers of the symbols in the body's types and attributes.
    pub(crate) bindings: &'a Bindings,
}

impl Spec<'_> {
    /// The attributes of the first composite of type `T` in the body.
    pub(crate) fn composite<T: Composite>(&self) -> Option<&T> {
        self.body.nodes.iter().find_map(|n| match &n.op {
            Op::Composite(op) => op.downcast::<T>(),
            _ => None,
        })
    }
}

/// Memory of one operand during a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block {
    pub(crate) ptr: *mut u8,
    pub(crate) bytes: usize,
}

/// A kernel's operands during a run.
///
/// The planner has laid them out so that outputs overlap no input, except that a state output is the state input.
pub(crate) struct Io<'a> {
    pub(crate) inputs: &'a [Block],
    pub(crate) outputs: &'a [Block],
    /// What the kernel's [`Preparation`] fills.
    pub(crate) room: Block,
}

/// Plain old data that operands consist of.
///
/// # Safety
/// Every bit pattern is a value, and there is no padding. (Booleans are handled as `u8`.)
pub(crate) unsafe trait Pod: Copy + 'static {}

macro_rules! pod {
    ($($t:ty),*) => {$(
        // SAFETY: a number without padding, for which every bit pattern is a value.
        unsafe impl Pod for $t {}
    )*};
}
pod!(u8, i8, u16, i16, u32, i32, i64, u64, f32, half::f16, half::bf16);

/// Memory as elements of `T`, of which any bits are one.
pub(crate) fn view<T: Pod>(bytes: &[u8]) -> &[T] {
    assert!((bytes.as_ptr() as usize).is_multiple_of(align_of::<T>()));
    // SAFETY: inside of the bytes, aligned as just checked, and any bits are an element.
    unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len() / size_of::<T>()) }
}

/// As [`view`], to be written.
pub(crate) fn cast<T: Pod>(bytes: &mut [u8]) -> &mut [T] {
    assert!((bytes.as_ptr() as usize).is_multiple_of(align_of::<T>()));
    // SAFETY: inside of the bytes, aligned as just checked, and any bits are an element.
    unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), bytes.len() / size_of::<T>()) }
}

impl<'a> Io<'a> {
    /// Input `index` from byte `offset` on, as elements of `T`.
    pub(crate) fn input_at<T: Pod>(&self, index: usize, offset: usize) -> &'a [T] {
        let block = self.inputs[index];
        assert!(offset <= block.bytes && (block.ptr as usize + offset).is_multiple_of(align_of::<T>()));
        // SAFETY: the block is memory of the run of `bytes` bytes, initialised, aligned as just checked, and written by
        // nobody while this kernel runs.
        unsafe {
            std::slice::from_raw_parts(block.ptr.add(offset).cast::<T>(), (block.bytes - offset) / size_of::<T>())
        }
    }

    /// Input `index` as elements of `T`.
    pub(crate) fn input<T: Pod>(&self, index: usize) -> &'a [T] {
        self.input_at(index, 0)
    }

    /// What was prepared, as elements of `T`.
    pub(crate) fn prepared<T: Pod>(&self) -> &'a [T] {
        assert!((self.room.ptr as usize).is_multiple_of(align_of::<T>()));
        // SAFETY: memory of the run, initialised, aligned as just checked, and written by nobody while pieces run.
        unsafe { std::slice::from_raw_parts(self.room.ptr.cast::<T>(), self.room.bytes / size_of::<T>()) }
    }

    /// Where to prepare, as elements of `T`.
    pub(crate) fn room<T: Pod>(&self) -> Output<'a, T> {
        Self::shared(self.room)
    }

    /// Output `index` as elements of `T`.
    pub(crate) fn output<T: Pod>(&self, index: usize) -> Output<'a, T> {
        Self::shared(self.outputs[index])
    }

    fn shared<T: Pod>(block: Block) -> Output<'a, T> {
        assert!((block.ptr as usize).is_multiple_of(align_of::<T>()));
        Output { ptr: block.ptr.cast(), len: block.bytes / size_of::<T>(), lives: PhantomData }
    }
}

/// An output that several threads write in parts.
#[derive(Clone, Copy)]
pub(crate) struct Output<'a, T> {
    ptr: *mut T,
    len: usize,
    lives: PhantomData<&'a mut [T]>,
}

impl<'a, T: Pod> Output<'a, T> {
    /// Elements `range`, to be written (and, of a state, read).
    ///
    /// # Safety
    /// No other slice of these elements is alive: they belong to the pieces that the caller was given.
    pub(crate) unsafe fn part(&self, range: Range<usize>) -> &'a mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of an output of {}", self.len);
        // SAFETY: inside the block, aligned as checked when it was made, and by the caller's promise unaliased.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(range.start), range.len()) }
    }
}

/// What memory holds that nobody has written, where a test asks for it: NaN in every float type.
pub(crate) const POISON: u8 = 0xff;

/// Memory of a thread that kernels use as they like, on huge pages where there are some; it grows to what they ask for
/// and stays.
#[derive(Default)]
pub(crate) struct Scratch {
    memory: Option<Memory>,
}

/// Aligns for every element type and a full vector register.
const SCRATCH_ALIGN: usize = 64;

impl Scratch {
    /// Fills all of it with bytes that no kernel may rely on: NaN in every float type.
    pub(crate) fn poison(&mut self) {
        if let Some(memory) = &mut self.memory {
            // SAFETY: memory of this thread alone, borrowed for as long.
            unsafe { memory.bytes_mut() }.fill(POISON);
        }
    }

    /// `N` slices of `T` of these lengths, aligned to 64 bytes, with whatever was there before.
    ///
    /// # Panics
    /// When memory runs out, which ends the step with an error.
    pub(crate) fn slices<T: Pod, const N: usize>(&mut self, lengths: [usize; N]) -> [&mut [T]; N] {
        let bytes = |len: usize| (len * size_of::<T>()).next_multiple_of(SCRATCH_ALIGN);
        let total: usize = lengths.iter().map(|l| bytes(*l)).sum();
        let memory = match self.memory.take() {
            Some(memory) if memory.block().bytes >= total => memory,
            // Twice as much each time, since small memory that is given back is not taken again.
            _ => Memory::zeroed(total.next_power_of_two(), "a thread's workspace").unwrap_or_else(|e| panic!("{e}")),
        };
        // SAFETY: memory of this thread alone, borrowed for as long as the slices are.
        let mut rest = unsafe { self.memory.insert(memory).bytes_mut() };
        lengths.map(|len| {
            let (mine, others) = std::mem::take(&mut rest).split_at_mut(bytes(len));
            rest = others;
            &mut cast(mine)[..len]
        })
    }
}

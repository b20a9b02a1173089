//! A kernel's operands during a run.

use std::marker::PhantomData;
use std::ops::Range;

use crate::bytes::{MemoryBlock, Pod};

/// A kernel's operands during a run.
///
/// The planner has laid them out so that outputs overlap no input, except that a state output is the state input.
pub struct KernelIo<'a> {
    pub(crate) inputs: &'a [MemoryBlock],
    pub(crate) outputs: &'a [MemoryBlock],
    /// What the kernel's [`Preparation`](crate::kernel::Preparation) fills.
    pub(crate) room: MemoryBlock,
}

impl<'a> KernelIo<'a> {
    /// Input `index` from byte `offset` on, as elements of `T`.
    ///
    /// # Panics
    /// When there is no such input, or `offset` is behind its end or not aligned for `T`.
    pub fn input_at<T: Pod>(&self, index: usize, offset: usize) -> &'a [T] {
        let block = self.inputs[index];
        assert!(offset <= block.bytes && (block.ptr as usize + offset).is_multiple_of(align_of::<T>()));
        // SAFETY: the block is memory of the run of `bytes` bytes, initialised, aligned as just checked, and written by
        // nobody while this kernel runs.
        unsafe {
            std::slice::from_raw_parts(block.ptr.add(offset).cast::<T>(), (block.bytes - offset) / size_of::<T>())
        }
    }

    /// Input `index` as elements of `T`.
    pub fn input<T: Pod>(&self, index: usize) -> &'a [T] {
        self.input_at(index, 0)
    }

    /// What was prepared, as elements of `T`.
    pub fn prepared<T: Pod>(&self) -> &'a [T] {
        assert!((self.room.ptr as usize).is_multiple_of(align_of::<T>()));
        // SAFETY: memory of the run, initialised, aligned as just checked, and written by nobody while pieces run.
        unsafe { std::slice::from_raw_parts(self.room.ptr.cast::<T>(), self.room.bytes / size_of::<T>()) }
    }

    /// Where to prepare, as elements of `T`.
    pub fn room<T: Pod>(&self) -> KernelOutput<'a, T> {
        Self::shared(self.room)
    }

    /// Output `index` as elements of `T`.
    pub fn output<T: Pod>(&self, index: usize) -> KernelOutput<'a, T> {
        Self::shared(self.outputs[index])
    }

    fn shared<T: Pod>(block: MemoryBlock) -> KernelOutput<'a, T> {
        assert!((block.ptr as usize).is_multiple_of(align_of::<T>()));
        KernelOutput { ptr: block.ptr.cast(), len: block.bytes / size_of::<T>(), lives: PhantomData }
    }
}

/// An output that several threads write in parts.
#[derive(Clone, Copy)]
pub struct KernelOutput<'a, T> {
    ptr: *mut T,
    len: usize,
    lives: PhantomData<&'a mut [T]>,
}

impl<'a, T: Pod> KernelOutput<'a, T> {
    /// Elements `range`, to be written (and, of a state, read).
    ///
    /// # Safety
    /// No other slice of these elements is alive: they belong to the pieces that the caller was given.
    pub unsafe fn part(&self, range: Range<usize>) -> &'a mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of an output of {}", self.len);
        // SAFETY: inside the block, aligned as checked when it was made, and by the caller's promise unaliased.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(range.start), range.len()) }
    }

    /// Where element `at` is, the first of `rows` rows of `width` elements that are `stride` apart.
    ///
    /// # Panics
    /// When the output ends before the last row does.
    pub(crate) fn address(&self, at: usize, [rows, width]: [usize; 2], stride: usize) -> *mut T {
        let end = at + rows.saturating_sub(1) * stride + width;
        assert!(end <= self.len, "{at}..{end} of an output of {}", self.len);
        self.ptr.wrapping_add(at)
    }
}

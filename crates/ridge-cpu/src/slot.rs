//! A slot of a bucket's ring: staging memory, outputs and the outcome of the step that is in it.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ridge_runtime::{Staged, StepOrder};

use crate::bytes::MemoryBlock;
use crate::gate::Gate;
use crate::memory::AlignedMemory;
use crate::scratch::POISON;

/// Memory of a slot.
pub(crate) struct SlotMemory {
    /// Of each step input what was staged.
    pub(crate) staging: Vec<AlignedMemory>,
    pub(crate) outputs: Vec<AlignedMemory>,
}

/// A slot as the launches of its step see it.
pub(crate) struct BoundSlot {
    pub(crate) memory: SlotMemory,
    /// Where the operands of launches lie. Written only between steps of the slot.
    resolved: UnsafeCell<Vec<MemoryBlock>>,
    /// The step's number on the device.
    number: AtomicU64,
    /// What each segment of the step copies from staging memory before its launches.
    copies: [Mutex<Vec<Staged>>; 2],
    failed: AtomicBool,
    failure: Mutex<Option<String>>,
    /// Collectives of the step that are complete.
    pub(crate) gate: Gate,
}

// SAFETY: while a step is submitted, the addresses in `resolved` point into memory that the bucket and the run keep alive;
// who writes where is the planner's, and the pool runs one launch of a device at a time.
unsafe impl Send for BoundSlot {}
// SAFETY: `resolved` is written by `resolve` alone, which the one owner of the run calls while no step of it is queued.
unsafe impl Sync for BoundSlot {}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl BoundSlot {
    /// A slot for a bucket of so many operands and step inputs.
    pub(crate) fn new(memory: SlotMemory, operands: usize) -> Self {
        let copies = [(); 2].map(|()| Mutex::new(Vec::with_capacity(memory.staging.len())));
        Self {
            memory,
            resolved: UnsafeCell::new(Vec::with_capacity(operands)),
            number: AtomicU64::new(0),
            copies,
            failed: AtomicBool::new(false),
            failure: Mutex::new(None),
            gate: Gate::default(),
        }
    }

    /// Writes the addresses of the operands.
    ///
    /// # Safety
    /// No step of this slot is queued or running.
    pub(crate) unsafe fn resolve(&self, operands: impl Iterator<Item = MemoryBlock>) {
        // SAFETY: the only reference, by the caller's promise.
        let resolved = unsafe { &mut *self.resolved.get() };
        resolved.clear();
        resolved.extend(operands);
    }

    /// The addresses of the operands.
    ///
    /// # Safety
    /// A step of this slot is running.
    pub(crate) unsafe fn operands(&self) -> &[MemoryBlock] {
        // SAFETY: nobody writes them while a step is running.
        unsafe { &*self.resolved.get() }
    }

    /// Prepares step `number`, which segment 0 of is queued next.
    pub(crate) fn begin(&self, number: u64, staged: &[Staged]) {
        self.number.store(number, Ordering::Relaxed);
        self.failed.store(false, Ordering::Relaxed);
        *lock(&self.failure) = None;
        self.stage(0, staged);
        self.stage(1, &[]);
    }

    /// Names what `segment` copies.
    pub(crate) fn stage(&self, segment: usize, staged: &[Staged]) {
        let copies = &mut *lock(&self.copies[segment]);
        copies.clear();
        copies.extend_from_slice(staged);
    }

    pub(crate) fn number(&self) -> u64 {
        self.number.load(Ordering::Relaxed)
    }

    /// Begins a segment: copies what was staged to `inputs`, unless a step before this one failed.
    ///
    /// # Safety
    /// The only launch of the device that is running, of a step of this slot; nobody else uses the staging memory of what
    /// the segment copies.
    pub(crate) unsafe fn begin_segment(
        &self,
        segment: usize,
        inputs: &[AlignedMemory],
        order: &StepOrder,
        poison: bool,
    ) {
        if let Some(why) = order.failed_before(self.number()) {
            self.fail(&why);
            return;
        }
        for Staged { input, bytes } in lock(&self.copies[segment]).iter() {
            // SAFETY: by the caller's promise.
            let (to, from) = unsafe { (inputs[*input].bytes_mut(), self.memory.staging[*input].bytes_mut()) };
            to[..*bytes].copy_from_slice(&from[..*bytes]);
            if poison {
                from.fill(POISON);
            }
        }
    }

    /// The step failed: the rest of its launches is skipped.
    pub(crate) fn fail(&self, why: &str) {
        lock(&self.failure).get_or_insert_with(|| why.to_owned());
        self.failed.store(true, Ordering::Release);
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// Why the step failed.
    pub(crate) fn failure(&self) -> Option<String> {
        if self.has_failed() { lock(&self.failure).clone() } else { None }
    }
}

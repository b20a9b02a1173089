//! Working memory of a thread.

use std::sync::Arc;

use ridge_runtime::{MemoryLedger, MemoryOwner};

use crate::bytes::{Pod, cast};
use crate::memory::AlignedMemory;

/// What memory holds that nobody has written, where a test asks for it: NaN in every float type.
pub(crate) const POISON: u8 = 0xff;

/// Memory of a thread that kernels use as they like, on huge pages where there are some; it grows to what they ask for
/// and stays.
#[derive(Default)]
pub struct Scratch {
    memory: Option<AlignedMemory>,
    /// Of the backend whose step it served last.
    ledger: Arc<MemoryLedger>,
}

/// Aligns for every element type and a full vector register.
const SCRATCH_ALIGN: usize = 64;

impl Scratch {
    /// Lets `ledger` count what is allocated from now on.
    pub(crate) fn count_in(&mut self, ledger: &Arc<MemoryLedger>) {
        if !Arc::ptr_eq(&self.ledger, ledger) {
            self.ledger = Arc::clone(ledger);
        }
    }

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
    pub fn slices<T: Pod, const N: usize>(&mut self, lengths: [usize; N]) -> [&mut [T]; N] {
        let bytes = |len: usize| (len * size_of::<T>()).next_multiple_of(SCRATCH_ALIGN);
        let total: usize = lengths.iter().map(|l| bytes(*l)).sum();
        let memory = match self.memory.take() {
            Some(memory) if memory.block().bytes >= total => memory,
            // Twice as much each time, since small memory that is given back is not taken again.
            _ => AlignedMemory::zeroed(&self.ledger, MemoryOwner::Threads, total.next_power_of_two())
                .unwrap_or_else(|e| panic!("{e}")),
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

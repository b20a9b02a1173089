//! Steps of a bucket: submitted to the pool, released, waited for, timed.

use std::cell::Cell;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use ridge_runtime::{LaunchTime, MemoryBytes, Result, Run, RuntimeError, SLOTS, Staged};

use crate::bucket::{BoundBucket, BucketLaunches, TracedLaunch};
use crate::device::{CpuDevice, Workspace};
use crate::pool::PoolJob;
use crate::sync;

/// A bucket that is ready to run.
///
/// The workspace is shared by all buckets of the device, and replaced when one needs more. A run keeps it alive only
/// from a submission until the end of that step is seen, so that a workspace that was replaced is freed although idle
/// buckets have used it.
pub(crate) struct CpuRun {
    device: Arc<CpuDevice>,
    bucket: Arc<BoundBucket>,
    slots: [RunSlot; SLOTS],
    arena_bytes: [usize; 2],
    /// Bytes of inputs and outputs.
    staging: MemoryBytes,
}

/// A slot as the owner of the run sees it.
struct RunSlot {
    /// Of a whole step, and of its two segments where there are late inputs.
    jobs: Vec<sync::Arc<PoolJob>>,
    /// The job that was queued last.
    queued: usize,
    /// Does the step wait for its late inputs?
    held: bool,
    /// The workspace that operands' addresses were found for, and its number.
    arena: Weak<Workspace>,
    arena_number: usize,
    /// That workspace while a step may use it.
    arena_in_use: Cell<Option<Arc<Workspace>>>,
}

impl CpuRun {
    pub(crate) fn new(
        device: Arc<CpuDevice>,
        bound: BoundBucket,
        arena_bytes: [usize; 2],
        staging: MemoryBytes,
    ) -> Self {
        let bucket = Arc::new(bound);
        let end = bucket.launches();
        let slots = std::array::from_fn(|slot| {
            let job = |launches: Range<usize>| {
                let launches = BucketLaunches { bucket: Arc::clone(&bucket), slot, launches };
                sync::Arc::new(PoolJob::new(Box::new(launches)))
            };
            let segments = bucket.cut.map(|cut| [0..cut, cut..end]);
            let jobs = std::iter::once(0..end).chain(segments.into_iter().flatten()).map(job).collect();
            let (arena, arena_number, arena_in_use) = (Weak::new(), 0, Cell::new(None));
            RunSlot { jobs, queued: 0, held: false, arena, arena_number, arena_in_use }
        });
        Self { device, bucket, slots, arena_bytes, staging }
    }

    /// Waits for what is queued of the step in `slot`, which then needs no workspace unless it is held.
    fn finish(&self, slot: usize) {
        let slot = &self.slots[slot];
        self.device.pool.wait(&slot.jobs[slot.queued]);
        if !slot.held {
            slot.arena_in_use.take();
        }
    }

    /// The workspace for the next step of `slot`, with the addresses of operands in it. Only a new one takes a lock.
    fn current_arena(&mut self, slot: usize) -> Result<Arc<Workspace>> {
        let state = &mut self.slots[slot];
        if state.arena_number == self.device.arena_number()
            && let Some(arena) = state.arena.upgrade()
        {
            return Ok(arena);
        }
        let (arena, number) = self.device.arena(self.arena_bytes)?;
        // SAFETY: no step of this slot is queued: the caller has waited, and only this run submits it.
        unsafe { self.bucket.resolve(slot, &arena) };
        (state.arena, state.arena_number) = (Arc::downgrade(&arena), number);
        Ok(arena)
    }

    fn outcome(&self, slot: usize) -> Result<()> {
        let slot = &self.bucket.slots[slot];
        match slot.failure() {
            None => Ok(()),
            Some(why) => {
                self.device.order.reported(slot.number());
                Err(failed(why))
            }
        }
    }

    /// A bucket of which a kernel panicked runs no more.
    fn whole(&self) -> Result<()> {
        let why = self.slots.iter().flat_map(|slot| &slot.jobs).find_map(|job| job.failure());
        why.map_or(Ok(()), |why| Err(failed(why)))
    }
}

fn failed(why: String) -> RuntimeError {
    RuntimeError::Device { backend: "cpu", why }
}

impl Run for CpuRun {
    fn input(&mut self, slot: usize, index: usize) -> &mut [u8] {
        // The first segment of a step that is held copies no late inputs.
        if !(self.slots[slot].held && self.bucket.late[index]) {
            self.finish(slot);
        }
        // SAFETY: nothing queued uses it, and nothing is queued while the slice borrows the run.
        unsafe { self.bucket.slots[slot].memory.staging[index].bytes_mut() }
    }

    fn submit(&mut self, slot: usize, staged: &[Staged], held: bool) -> Result<()> {
        if self.slots[slot].held {
            return Err(failed("the step in the slot waits for its late inputs".into()));
        }
        self.finish(slot);
        self.whole()?;
        let held = held && self.bucket.cut.is_some();
        assert!(!held || staged.iter().all(|staged| !self.bucket.late[staged.input]), "late inputs of a held step");
        let arena = self.current_arena(slot)?;
        let state = &mut self.slots[slot];
        state.queued = usize::from(held);
        self.device.order.submit(held, |number| {
            state.arena_in_use.set(Some(arena));
            self.bucket.slots[slot].begin(number, staged);
            self.device.pool.submit(&state.jobs[state.queued]);
            Ok(())
        })?;
        state.held = held;
        Ok(())
    }

    fn release(&mut self, slot: usize, staged: &[Staged]) -> Result<()> {
        let (state, bound) = (&mut self.slots[slot], &self.bucket.slots[slot]);
        if !std::mem::take(&mut state.held) {
            return Ok(());
        }
        state.queued = 2;
        bound.stage(1, staged);
        self.device.order.release(bound.number(), || {
            self.device.pool.submit(&state.jobs[state.queued]);
            Ok(())
        })
    }

    fn poll(&mut self, slot: usize) -> Result<bool> {
        let state = &self.slots[slot];
        if !self.device.pool.poll(&state.jobs[state.queued]) || state.held {
            return Ok(false);
        }
        state.arena_in_use.take();
        self.outcome(slot).map(|()| true)
    }

    fn wait(&mut self, slot: usize) -> Result<()> {
        if self.slots[slot].held {
            return Err(failed("the step waits for its late inputs".into()));
        }
        self.finish(slot);
        self.outcome(slot)
    }

    fn output(&self, slot: usize, index: usize) -> &[u8] {
        self.finish(slot);
        // SAFETY: no step of this slot is running, and none starts while the slice borrows the run.
        unsafe { self.bucket.slots[slot].memory.outputs[index].bytes() }
    }

    fn memory(&self) -> MemoryBytes {
        self.staging
    }

    fn timed(&mut self, slot: usize, staged: &[Staged]) -> Result<Vec<LaunchTime>> {
        (0..SLOTS).for_each(|slot| self.finish(slot));
        let bucket = Arc::clone(&self.bucket);
        let watch = &bucket.watch;
        watch.ends.iter().for_each(|end| end.store(0, Ordering::Relaxed));
        watch.on.store(true, Ordering::Relaxed);
        let outcome = self.submit(slot, staged, false).and_then(|()| self.wait(slot));
        watch.on.store(false, Ordering::Relaxed);
        outcome?;
        let mut times = Vec::with_capacity(bucket.traced.len());
        // Behind copies and poisoning.
        let start = watch.ends[usize::from(bucket.poison)].load(Ordering::Relaxed);
        // When the launch before ended, of those that compute and of those that communicate beside them.
        let mut lanes = [start; 2];
        for TracedLaunch { func, node, path, communicates, step } in &bucket.traced {
            // Communication begins when what is before it has been computed, and communicated.
            let before = lanes[0].max(if *communicates { lanes[1] } else { 0 });
            // The time of a preparation is that of what it prepares for.
            let end = step.map_or(before, |step| watch.ends[step].load(Ordering::Relaxed));
            let seconds = |from: u64| end.saturating_sub(from) as f64 * 1e-9;
            let (end_of, took) = (seconds(start), seconds(before));
            times.push(LaunchTime { func: *func, node: *node, path: path.clone(), end: end_of, seconds: took });
            lanes[usize::from(*communicates)] = before.max(end);
        }
        Ok(times)
    }
}

impl Drop for CpuRun {
    fn drop(&mut self) {
        for slot in 0..SLOTS {
            if std::mem::take(&mut self.slots[slot].held) {
                // The rest of the step is given up.
                let _ = self.device.order.release(self.bucket.slots[slot].number(), || Ok(()));
            }
            self.finish(slot);
        }
    }
}

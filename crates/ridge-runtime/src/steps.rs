//! Steps of one bucket with up to [`SLOTS`] of them in flight: staged, submitted, released and waited for one by one.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::backend::{LaunchTime, Run, SLOTS, Staged};
use crate::error::{Result, RuntimeError};
use crate::param::ParamUses;

/// A slot in use: freed when it is dropped.
#[derive(Debug)]
struct SlotLease {
    index: usize,
    /// A bit for each slot in use, shared with the bucket.
    taken: Arc<AtomicUsize>,
}

impl Drop for SlotLease {
    fn drop(&mut self) {
        self.taken.fetch_and(!(1 << self.index), Ordering::Release);
    }
}

/// A step whose inputs are being staged. Dropping it frees the slot.
#[derive(Debug)]
#[must_use]
pub struct Slot(SlotLease);

/// A step that was submitted. Dropping it frees the slot, with the step's outputs; the step itself runs on. Where the
/// step is held, drop it after its release.
#[derive(Debug)]
#[must_use]
pub struct Ticket(SlotLease);

impl Ticket {
    /// The slot again, for the next step.
    pub(crate) fn into_slot(self) -> Slot {
        Slot(self.0)
    }
}

impl From<Slot> for Ticket {
    /// The step that [`Steps::timed`] ran in the slot, whose outputs can be read.
    fn from(slot: Slot) -> Self {
        Self(slot.0)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    /// No step, or one whose end is known.
    Complete,
    /// Waits for its late inputs.
    Held,
    Queued,
}

struct SlotState {
    progress: Progress,
    /// Does the step update parameters with versions?
    updates: bool,
    /// Of each input the bytes that were staged.
    staged: Vec<Option<usize>>,
}

/// The steps of one bucket.
///
/// [`stage`](Self::stage) gives a slot, [`input`](Self::input) its inputs, [`submit`](Self::submit) a ticket. Step inputs
/// that a step does not stage keep the value that the bucket's step before had; before the first step all are zero.
/// Where a step is submitted without all of the program's late inputs it is held: what does not depend on them runs, and
/// the rest follows with [`release`](Self::release). Nothing can be submitted to the device behind a held step.
pub struct Steps {
    run: Box<dyn Run>,
    params: Arc<ParamUses>,
    /// The store's epoch at which the parameters were found ready.
    checked: Option<u64>,
    /// Of each step input: is it late?
    late: Vec<bool>,
    slots: [SlotState; SLOTS],
    taken: Arc<AtomicUsize>,
    /// Room for what a submission copies.
    copies: Vec<Staged>,
}

impl Steps {
    pub(crate) fn new(run: Box<dyn Run>, params: Arc<ParamUses>, late: Vec<bool>) -> Self {
        let slot = || SlotState { progress: Progress::Complete, updates: false, staged: vec![None; late.len()] };
        let slots = std::array::from_fn(|_| slot());
        let copies = Vec::with_capacity(late.len());
        Self { run, params, checked: None, late, slots, taken: Arc::default(), copies }
    }

    pub(crate) fn run(&self) -> &dyn Run {
        &*self.run
    }

    fn index(&self, lease: &SlotLease) -> usize {
        assert!(Arc::ptr_eq(&lease.taken, &self.taken), "the slot or ticket is of another bucket");
        lease.index
    }

    /// How many steps run otherwise than all that follow, since the device records them, say.
    pub fn steps_to_learn(&self) -> usize {
        self.run.steps_to_learn()
    }

    /// A free slot of the ring. Where a step without a ticket is in it, waits for that step.
    ///
    /// # Errors
    /// When all slots are in use: drop the ticket of a step that is complete first.
    pub fn stage(&mut self) -> Result<Slot> {
        let taken = self.taken.load(Ordering::Acquire);
        let mut free = (0..SLOTS).filter(|slot| taken & 1 << slot == 0);
        let first = free.next().ok_or_else(|| {
            let why = format!("all {SLOTS} slots of the bucket are in use; drop the ticket of a complete step first");
            RuntimeError::Argument { kind: "step", name: "stage".into(), why }
        })?;
        let complete = |slot: &usize| self.slots[*slot].progress == Progress::Complete;
        let index = if complete(&first) { first } else { free.find(complete).unwrap_or(first) };
        // A failure breaks parameters, and concerns the next step only so far.
        let _ = self.end(index);
        self.taken.fetch_or(1 << index, Ordering::AcqRel);
        let slot = Slot(SlotLease { index, taken: Arc::clone(&self.taken) });
        self.restage(&slot);
        Ok(slot)
    }

    /// Forgets what was staged in the slot.
    pub(crate) fn restage(&mut self, slot: &Slot) {
        let index = self.index(&slot.0);
        self.slots[index].staged.fill(None);
    }

    /// Staging bytes of step input `index`, little-endian, all of which the step takes over.
    ///
    /// # Panics
    /// When the slot is another bucket's, or there is no such input.
    pub fn input(&mut self, slot: &Slot, index: usize) -> &mut [u8] {
        let at = self.index(&slot.0);
        let bytes = self.run.input(at, index);
        self.slots[at].staged[index] = Some(bytes.len());
        bytes
    }

    /// Staging bytes of the front of step input `index`, the only part that the step takes over: the rest keeps its value.
    ///
    /// # Errors
    /// When the input is smaller.
    ///
    /// # Panics
    /// As for [`input`](Self::input).
    pub fn input_part(&mut self, slot: &Slot, index: usize, bytes: usize) -> Result<&mut [u8]> {
        let at = self.index(&slot.0);
        let whole = self.run.input(at, index);
        if bytes > whole.len() {
            return Err(too_long(index, bytes, whole.len()));
        }
        self.slots[at].staged[index] = Some(bytes);
        Ok(&mut whole[..bytes])
    }

    /// Queues a step. Lazy copies whose sources have changed are refreshed first. The versions of the parameters that
    /// the step updates move. Where late inputs of the program were not staged, the step is held.
    ///
    /// # Errors
    /// When the device failed, a step of the device is held, a parameter is broken by a step that failed, or a copy is
    /// stale that is refreshed explicitly only.
    ///
    /// # Panics
    /// When the slot is another bucket's.
    pub fn submit(&mut self, slot: Slot) -> Result<Ticket> {
        let index = self.index(&slot.0);
        self.prepare(index)?;
        let staged = &self.slots[index].staged;
        let held = self.late.iter().zip(staged).any(|(late, staged)| *late && staged.is_none());
        self.copies.clear();
        // Late inputs of a held step follow with the others.
        let now = self.late.iter().zip(staged).enumerate().filter(|(_, (late, _))| !(held && **late));
        self.copies.extend(now.filter_map(|(input, (_, bytes))| Some(Staged { input, bytes: (*bytes)? })));
        let outcome = self.run.submit(index, &self.copies, held);
        match &outcome {
            Ok(()) => {
                self.params.submitted();
                self.slots[index].progress = if held { Progress::Held } else { Progress::Queued };
            }
            // What was not queued changes nothing.
            Err(error) => {
                let failed = matches!(error, RuntimeError::Device { .. });
                self.completed(index, failed);
            }
        }
        outcome.map(|()| Ticket(slot.0))
    }

    /// Does the step wait for its late inputs?
    ///
    /// # Panics
    /// When the ticket is another bucket's.
    pub fn is_held(&self, ticket: &Ticket) -> bool {
        self.slots[self.index(&ticket.0)].progress == Progress::Held
    }

    /// Gives a held step the front of some of its late inputs, by index, and queues the rest of it. Late inputs that were
    /// neither staged nor are among `late` keep their values. Does nothing where the step is not held and `late` is empty.
    ///
    /// # Errors
    /// When the step is not held, an input is not late or smaller, or the device failed.
    ///
    /// # Panics
    /// When the ticket is another bucket's.
    pub fn release(&mut self, ticket: &Ticket, late: &[(usize, &[u8])]) -> Result<()> {
        let at = self.index(&ticket.0);
        if self.slots[at].progress != Progress::Held {
            return match late {
                [] => Ok(()),
                _ => Err(step_error(
                    "release",
                    "the step was queued completely, because all its late inputs were staged",
                )),
            };
        }
        for (index, bytes) in late {
            if !self.late.get(*index).is_some_and(|late| *late) {
                let why = "is not a late input of the program; stage it before the step is submitted";
                return Err(RuntimeError::Argument { kind: "input", name: index.to_string(), why: why.into() });
            }
            let whole = self.run.input(at, *index);
            let all = whole.len();
            let part = whole.get_mut(..bytes.len()).ok_or_else(|| too_long(*index, bytes.len(), all))?;
            part.copy_from_slice(bytes);
            self.slots[at].staged[*index] = Some(bytes.len());
        }
        self.release_slot(at)
    }

    fn release_slot(&mut self, index: usize) -> Result<()> {
        let staged = self.late.iter().zip(&self.slots[index].staged).enumerate().filter(|(_, (late, _))| **late);
        self.copies.clear();
        self.copies.extend(staged.filter_map(|(input, (_, bytes))| Some(Staged { input, bytes: (*bytes)? })));
        self.slots[index].progress = Progress::Queued;
        self.run.release(index, &self.copies)
    }

    /// Is the step complete? A held step is not.
    ///
    /// # Errors
    /// When the step failed, or one before it: parameters that the step updates are then broken until they are loaded
    /// again.
    ///
    /// # Panics
    /// When the ticket is another bucket's.
    pub fn poll(&mut self, ticket: &Ticket) -> Result<bool> {
        let index = self.index(&ticket.0);
        if self.slots[index].progress == Progress::Held {
            return Ok(false);
        }
        let outcome = self.run.poll(index);
        if !matches!(outcome, Ok(false)) {
            self.completed(index, outcome.is_err());
        }
        outcome
    }

    /// Waits for the step.
    ///
    /// # Errors
    /// As for [`poll`](Self::poll), and when the step is held.
    ///
    /// # Panics
    /// When the ticket is another bucket's.
    pub fn wait(&mut self, ticket: &Ticket) -> Result<()> {
        let index = self.index(&ticket.0);
        if self.slots[index].progress == Progress::Held {
            return Err(step_error("wait", "the step waits for its late inputs; release it first"));
        }
        let outcome = self.run.wait(index);
        self.completed(index, outcome.is_err());
        outcome
    }

    /// Bytes of output `index` of a complete step, little-endian.
    ///
    /// # Panics
    /// When the ticket is another bucket's, the step is held, or there is no such output.
    pub fn output(&self, ticket: &Ticket, index: usize) -> &[u8] {
        let slot = self.index(&ticket.0);
        assert!(self.slots[slot].progress != Progress::Held, "a held step has no outputs");
        self.run.output(slot, index)
    }

    /// Output `index` of the last step of the slot.
    pub(crate) fn slot_output(&self, slot: &Slot, index: usize) -> &[u8] {
        self.run.output(self.index(&slot.0), index)
    }

    /// Is the end of the step known?
    pub(crate) fn is_complete(&self, ticket: &Ticket) -> bool {
        self.slots[self.index(&ticket.0)].progress == Progress::Complete
    }

    /// Runs a step and tells what each launch took; see [`Run::timed`].
    ///
    /// # Errors
    /// As for [`submit`](Self::submit) and [`wait`](Self::wait), or when the device does not time launches.
    ///
    /// # Panics
    /// When the slot is another bucket's.
    pub fn timed(&mut self, slot: &Slot) -> Result<Vec<LaunchTime>> {
        let index = self.index(&slot.0);
        self.prepare(index)?;
        self.copies.clear();
        let staged = self.slots[index].staged.iter().enumerate();
        self.copies.extend(staged.filter_map(|(input, bytes)| Some(Staged { input, bytes: (*bytes)? })));
        let outcome = self.run.timed(index, &self.copies);
        self.params.submitted();
        self.completed(index, outcome.is_err());
        outcome
    }

    /// Makes sure that the parameters are as the step needs them, where any has changed since the last step.
    fn prepare(&mut self, index: usize) -> Result<()> {
        let epoch = self.params.store.epoch();
        if self.checked != Some(epoch) {
            self.params.ready()?;
            self.checked = Some(epoch);
        }
        self.slots[index].updates = !self.params.updated.is_empty();
        Ok(())
    }

    fn completed(&mut self, index: usize, failed: bool) {
        self.slots[index].progress = Progress::Complete;
        if std::mem::take(&mut self.slots[index].updates) && failed {
            self.params.failed();
        }
    }

    /// Waits for the step of a slot, releasing it with what the device has of its late inputs if it is held.
    fn end(&mut self, index: usize) -> Result<()> {
        let released = match self.slots[index].progress {
            Progress::Complete => return Ok(()),
            Progress::Queued => Ok(()),
            Progress::Held => self.release_slot(index),
        };
        let outcome = released.and_then(|()| self.run.wait(index));
        self.completed(index, outcome.is_err());
        outcome
    }
}

impl Drop for Steps {
    fn drop(&mut self) {
        for index in 0..SLOTS {
            let slot = &self.slots[index];
            // A failure that nobody waited for breaks parameters too.
            if slot.updates || slot.progress == Progress::Held {
                let _ = self.end(index);
            }
        }
    }
}

fn step_error(name: &str, why: &str) -> RuntimeError {
    RuntimeError::Argument { kind: "step", name: name.into(), why: why.into() }
}

fn too_long(index: usize, given: usize, all: usize) -> RuntimeError {
    let why = format!("takes at most {all} bytes, got {given}");
    RuntimeError::Argument { kind: "input", name: index.to_string(), why }
}

//! Lanes of a step: what is communicated beside what is computed, and what waits for what; and agreement of the ranks that
//! communicate.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use ridge_runtime::{Plan, Result};

use super::actions::{BoundAction, BoundWork};
use crate::communicator::Communicator;
use crate::device::{CudaDevice, CudaEvent, StreamQueue};
use crate::error::device as failed;

/// The lanes of a bucket: `[computation, communication]`. Communication forks from computation, and joins it again at the
/// latest where a segment of the step ends, so that a captured segment is one graph.
pub(super) struct Lanes {
    /// Of each launch, how many launches that communicate must be complete before it.
    after: Vec<usize>,
    /// Of each launch that communicates, which of them it is.
    ordinal: Vec<Option<usize>>,
    /// Recorded behind what is computed before each launch that communicates, and behind the launch itself.
    marks: Vec<[CudaEvent; 2]>,
}

/// How far a segment has been queued.
#[derive(Default)]
pub(super) struct LaneWalk {
    /// The launch whose actions are being queued.
    launch: Option<usize>,
    /// Launches that were communicated, and of them those that computation has waited for.
    begun: Vec<usize>,
    waited: usize,
}

impl Lanes {
    pub(super) fn new(device: &CudaDevice, plan: &Plan) -> Result<Self> {
        let mut most = 0;
        let after = plan.launches.iter().map(|launch| {
            most = most.max(launch.after);
            most
        });
        let after = after.collect();
        let mut count = 0;
        let ordinal = plan.launches.iter().map(|launch| {
            launch.communicates.then(|| {
                count += 1;
                count - 1
            })
        });
        let ordinal = ordinal.collect();
        let marks = (0..count).map(|_| Ok([device.event()?, device.event()?])).collect::<Result<_>>()?;
        Ok(Self { after, ordinal, marks })
    }

    /// Has `launch` wait for what it must, if it is not the one that is being queued.
    pub(super) fn come_to(&self, launch: usize, walk: &mut LaneWalk, lanes: &[StreamQueue<'_>; 2]) -> Result<()> {
        if walk.launch == Some(launch) {
            return Ok(());
        }
        self.leave(walk, lanes)?;
        walk.launch = Some(launch);
        if let Some(nth) = self.ordinal[launch] {
            lanes[0].record(&self.marks[nth][0])?;
            lanes[1].wait_for(&self.marks[nth][0])?;
            return Ok(());
        }
        let needed = walk.begun.partition_point(|nth| *nth < self.after[launch]);
        self.wait_for(needed, walk, lanes)
    }

    /// Has computation wait for all that was communicated.
    pub(super) fn join(&self, walk: &mut LaneWalk, lanes: &[StreamQueue<'_>; 2]) -> Result<()> {
        self.leave(walk, lanes)?;
        self.wait_for(walk.begun.len(), walk, lanes)
    }

    /// Marks the end of the launch that was being queued.
    fn leave(&self, walk: &mut LaneWalk, lanes: &[StreamQueue<'_>; 2]) -> Result<()> {
        let Some(nth) = walk.launch.take().and_then(|launch| self.ordinal[launch]) else { return Ok(()) };
        walk.begun.push(nth);
        lanes[1].record(&self.marks[nth][1])
    }

    /// Has computation wait for the first `needed` launches that were communicated. They end in their order.
    fn wait_for(&self, needed: usize, walk: &mut LaneWalk, lanes: &[StreamQueue<'_>; 2]) -> Result<()> {
        if needed > walk.waited {
            lanes[0].wait_for(&self.marks[walk.begun[needed - 1]][1])?;
            walk.waited = needed;
        }
        Ok(())
    }
}

/// The ranks that a bucket communicates with.
pub(super) struct StepRanks {
    communicators: Vec<Arc<Communicator>>,
    /// What a step communicates, the same on every rank.
    what: String,
}

impl StepRanks {
    pub(super) fn of(actions: &[BoundAction]) -> Self {
        let mut communicators: BTreeMap<&str, &Arc<Communicator>> = BTreeMap::new();
        let mut runs: Vec<(&str, usize)> = Vec::new();
        for action in actions {
            let BoundWork::Collective { communicator, action } = &action.work else { continue };
            communicators.insert(&action.axis, communicator);
            match runs.last_mut() {
                Some((what, times)) if *what == action.what => *times += 1,
                _ => runs.push((&action.what, 1)),
            }
        }
        let mut hash = DefaultHasher::new();
        runs.hash(&mut hash);
        let count: usize = runs.iter().map(|(_, times)| times).sum();
        let mut what = format!("a step of {count} collectives ({:016x}):", hash.finish());
        for (i, (of, times)) in runs.iter().enumerate() {
            let times = if *times > 1 { format!("{times} x ") } else { String::new() };
            let _ = write!(what, "{} {times}{of}", if i > 0 { "," } else { "" });
        }
        Self { communicators: communicators.into_values().map(Arc::clone).collect(), what }
    }

    /// Waits until all ranks have come to this step.
    ///
    /// # Errors
    /// When they come to another, or one is lost.
    pub(super) fn agree(&self) -> Result<()> {
        self.communicators.iter().try_for_each(|communicator| communicator.agree(&self.what))
    }

    /// # Errors
    /// When the ranks cannot continue: what was computed is of no use.
    pub(super) fn check(&self) -> Result<()> {
        self.communicators.iter().find_map(|communicator| communicator.failure()).map_or(Ok(()), |why| Err(failed(why)))
    }

    /// Tells the other ranks that this one cannot continue.
    pub(super) fn fail(&self, why: &str) {
        self.communicators.iter().for_each(|communicator| communicator.fail(why));
    }
}

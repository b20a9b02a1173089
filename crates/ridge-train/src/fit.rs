//! Fitting a step into a memory budget in the least time: what the backward pass computes again is weighed against what waits in
//! memory of the host.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use ridge_graph::passes::Target;
use ridge_hw::units::Bytes;
use ridge_runtime::{Backend, MemoryOwner, ProgramCache, RuntimeError, Schedule};

use crate::choices::exposed_seconds;
use crate::error::{Result, TrainError};
use crate::prepared_step::PreparedStep;
use crate::recompute::RecomputeLevel;
use crate::settings::Offload;
use crate::stop::check_stop;

/// Shares of the peak, of the bandwidth and of the link's nominal rate that a step is taken to reach.
const COMPUTE: f64 = 0.5;
const MEMORY: f64 = 0.8;
const LINK: f64 = 0.8;

impl PreparedStep {
    /// Fits a step into `train.memory`, if that is given, in the least predicted time: raises recomputation, and where the device
    /// has memory of its own also what is offloaded, from what the settings ask for.
    ///
    /// # Errors
    /// When nothing fits, or a program cannot be compiled; [`TrainError::Stopped`] when `stop` is set meanwhile.
    pub fn fit(&mut self, backend: &Arc<dyn Backend>, stop: &AtomicBool) -> Result<()> {
        let Some(Bytes(budget)) = self.settings.train.memory else { return Ok(()) };
        let set = self.settings.train.offload;
        // What fits as it is needs no other way.
        let programs = ProgramCache::new(Arc::clone(backend));
        if self.memory_of(&self.schedule, set, &programs)?.on_device() as u64 <= budget {
            return Ok(());
        }
        let rates = Rates::of(backend)?;
        let mut fitting: Vec<Fitting> = Vec::new();
        let mut least = u64::MAX;
        for offload in Offload::ALL {
            if offload == set || rates.is_some() && offload.includes(set) {
                let mut search = Search { step: self, backend, stop, offload, budget, tried: BTreeMap::new() };
                let found = search.fastest(rates.as_ref())?;
                least = search.tried.values().map(|tried| tried.bytes).fold(least, u64::min);
                fitting.extend(found);
            }
        }
        // Of equals the first: it moves the least.
        let Some(best) = fitting.into_iter().min_by(|a, b| a.seconds.total_cmp(&b.seconds)) else {
            let offloaded = if rates.is_some() { " and all offloaded that can be" } else { "" };
            let why = format!(
                "is less than the {} that a step needs with all layers recomputed{offloaded}; raise it, or lower \
                 train.batch_size or data.sequence_length",
                Bytes(least)
            );
            return Err(TrainError::setting("train.memory", Bytes(budget), why));
        };
        (self.recompute, self.schedule, self.settings.train.offload) = (best.level, best.schedule, best.offload);
        Ok(())
    }
}

/// What a device and its link reach.
struct Rates {
    target: Arc<Target>,
    /// Bytes a second in each direction.
    link: f64,
}

impl Rates {
    /// Those of the backend; none where the device has no memory of its own.
    fn of(backend: &Arc<dyn Backend>) -> Result<Option<Self>> {
        let Some((link, kernel)) = backend.host_link()?.zip(backend.kernels().first()) else { return Ok(None) };
        Ok(Some(Self { target: Arc::clone(&kernel.target), link: nominal(link) * LINK }))
    }
}

/// The rate of a link in whose neighbourhood `measured` is: links have powers of two in GB/s. A run that continues must choose as
/// it did at first, whatever is measured this time.
fn nominal(measured: f64) -> f64 {
    (measured / 1e9).log2().round().exp2() * 1e9
}

/// A way that fits.
struct Fitting {
    level: RecomputeLevel,
    offload: Offload,
    schedule: Schedule,
    /// Predicted, of a step; 0 where nothing is compared.
    seconds: f64,
}

/// A way that was looked at.
struct Tried {
    schedule: Schedule,
    bytes: u64,
    seconds: f64,
}

/// The levels of recomputation with one offloading.
struct Search<'a> {
    step: &'a PreparedStep,
    backend: &'a Arc<dyn Backend>,
    stop: &'a AtomicBool,
    offload: Offload,
    budget: u64,
    /// By the place of the level among those from the one that is set.
    tried: BTreeMap<usize, Tried>,
}

impl Search<'_> {
    /// The fastest level that fits.
    fn fastest(&mut self, rates: Option<&Rates>) -> Result<Option<Fitting>> {
        let levels: Vec<RecomputeLevel> = self.step.recompute.and_above().collect();
        let Some(mut best) = self.lowest(&levels, rates)? else { return Ok(None) };
        // Computing takes longer at each level, and the transfers of activations shorter, but ever less so: the sum has one
        // minimum.
        let (mut low, mut high) = (best, levels.len() - 1);
        while self.offload.has_activations() && rates.is_some() && low < high {
            let middle = usize::midpoint(low, high);
            let [here, above] =
                [middle, middle + 1].map(|at| Ok::<_, TrainError>(self.look(&levels, at, rates)?.seconds));
            if here? <= above? {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        for (at, tried) in &self.tried {
            if tried.bytes <= self.budget && self.tried.get(&best).is_some_and(|best| tried.seconds < best.seconds) {
                best = *at;
            }
        }
        let (offload, level) = (self.offload, levels[best]);
        Ok(self.tried.remove(&best).map(|Tried { schedule, seconds, .. }| Fitting {
            level,
            offload,
            schedule,
            seconds,
        }))
    }

    /// The lowest level that fits.
    fn lowest(&mut self, levels: &[RecomputeLevel], rates: Option<&Rates>) -> Result<Option<usize>> {
        // It is in `low..=high`, where `high` stands for none.
        let (mut low, mut high) = (0, levels.len());
        let mut found = None;
        // Most runs fit as they are, and whether any level does decides on the rest.
        let mut next = 0;
        while low < high {
            if self.look(levels, next, rates)?.bytes <= self.budget {
                high = next;
                found = Some(next);
            } else if next + 1 == high && levels[next].is_whole() {
                // The last layer, whose backward pass comes first, may take less where it is not computed again.
                high = next;
            } else {
                low = next + 1;
            }
            next = if found.is_none() { high.saturating_sub(1) } else { usize::midpoint(low, high) };
        }
        Ok(found)
    }

    fn look(&mut self, levels: &[RecomputeLevel], at: usize, rates: Option<&Rates>) -> Result<&Tried> {
        if !self.tried.contains_key(&at) {
            let tried = self.tried(levels[at], rates)?;
            self.tried.insert(at, tried);
        }
        Ok(&self.tried[&at])
    }

    fn tried(&self, level: RecomputeLevel, rates: Option<&Rates>) -> Result<Tried> {
        let Self { step, offload, .. } = self;
        check_stop(self.stop)?;
        let schedule = step.schedule_at(level, *offload)?;
        let programs = ProgramCache::new(Arc::clone(self.backend));
        let memory = step.memory_of(&schedule, *offload, &programs)?;
        let bytes = memory.on_device() as u64;
        let Some(rates) = rates else { return Ok(Tried { schedule, bytes, seconds: 0.0 }) };
        let parts = step.settings.train.accumulation;
        let compute = self.compute_seconds(level, &programs, &rates.target)?;
        let moved = step.snapshot_of(&schedule, &programs)?.host_values.iter().map(|value| value.bytes as u64).sum();
        // The backward pass has two products for each of the forward pass; what is computed again only hides more.
        let forward = compute / 3.0;
        let exposed = exposed_seconds(moved, parts, memory.get(MemoryOwner::HostStates) as u64, forward, rates.link);
        Ok(Tried { schedule, bytes, seconds: parts as f64 * compute + exposed })
    }

    /// Seconds of the forward and backward pass of a micro-batch without transfers: its launches, whose traffic and arithmetic are
    /// not taken to overlap, as for offers of kernels.
    fn compute_seconds(&self, level: RecomputeLevel, programs: &ProgramCache, target: &Target) -> Result<f64> {
        let schedule = self.step.schedule_at(level, Offload::None)?;
        let Some(stage) = schedule.stages.first() else { return Ok(0.0) };
        let program = programs.get(&stage.graph, &stage.outputs)?;
        let (cost, bindings) = (program.graph().cost(), self.step.bindings()?);
        let [flops, bytes] = [cost.flops(), cost.bytes()].map(|poly| poly.eval(&bindings).map_err(RuntimeError::from));
        Ok(flops? as f64 / (target.flops_per_second * COMPUTE) + bytes? as f64 / (target.bytes_per_second * MEMORY))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measured_rates_are_those_of_the_generation_of_the_link() {
        // PCIe 3, 4 and 5 with 16 lanes, as copies reach them.
        for (measured, rate) in [(12.4e9, 16e9), (25.1e9, 32e9), (26.3e9, 32e9), (55.2e9, 64e9), (53.0e9, 64e9)] {
            assert_eq!(nominal(measured), rate);
        }
    }
}

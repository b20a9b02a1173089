//! Programs of one session that are run in order: the accumulation, reduction and update of a training step, or the
//! modules of a pipeline. What one stage gives another lies in parameters, so a stage may run on other ranks and
//! devices than the one before, and no value passes through the host.

use std::collections::{HashSet, VecDeque};
use std::ops::ControlFlow;

use ridge_graph::{Bindings, DType, Graph, Role};

use crate::backend::{Backend, SLOTS};
use crate::error::{Result, RuntimeError};
use crate::memory::{MemoryBytes, MemoryOwner};
use crate::program::Bucket;
use crate::program_cache::ProgramCache;
use crate::session::Session;
use crate::steps::{Slot, Ticket};

/// How often a stage runs in one pass over its schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Times {
    /// Once.
    Once,
    /// Once for each part of the pass: each micro-batch of a training step, each step of a denoising loop.
    EachPart,
}

/// A program of a schedule.
#[derive(Clone, Debug)]
pub struct Stage {
    /// What it is called in errors and by its driver.
    pub name: &'static str,
    /// What it computes.
    pub graph: Graph,
    /// The outputs that its driver reads; states are updated besides.
    pub outputs: Vec<&'static str>,
    /// How often it runs.
    pub times: Times,
}

impl Stage {
    /// FLOPs of one run under `bindings`, of matrix products and all else.
    ///
    /// # Errors
    /// When a symbol of the cost is unbound.
    pub fn flops(&self, bindings: &Bindings) -> Result<u64> {
        let cost = self.graph.cost();
        let polys = [&cost.matrix_flops, &cost.vector_flops, &cost.special_flops];
        let flops = polys.into_iter().map(|poly| poly.eval(bindings)).sum::<Result<i128, _>>()?;
        Ok(u64::try_from(flops).unwrap_or(u64::MAX))
    }
}

/// The stages of a pass, in order.
#[derive(Clone, Debug, Default)]
pub struct Schedule {
    /// The stages.
    pub stages: Vec<Stage>,
}

/// What gives a pass its inputs and learns its results.
pub trait ScheduleDriver {
    /// Why a pass ends early.
    type Error: From<RuntimeError>;

    /// Stages the inputs of a run of the stage called `stage`, for this part of the pass (0 for a stage that runs once).
    ///
    /// # Errors
    /// Ends the pass.
    fn fill(&mut self, stage: &'static str, part: usize, inputs: &mut StageInputs<'_>) -> Result<(), Self::Error>;

    /// Learns the outputs of a stage that runs once and has some, when it is complete. To break leaves out the stages
    /// behind it.
    ///
    /// # Errors
    /// Ends the pass.
    fn done(&mut self, stage: &'static str, outputs: &mut StageOutputs<'_>) -> Result<ControlFlow<()>, Self::Error>;
}

impl Schedule {
    /// What `backend` allocates for all states and weights that the stages use, each counted once: as states, those of them
    /// that are kept in memory of the host as such.
    ///
    /// # Errors
    /// When the shape of a parameter has an unbound symbol.
    pub fn parameter_memory(
        &self,
        bindings: &Bindings,
        backend: &dyn Backend,
        on_host: &HashSet<&str>,
    ) -> Result<MemoryBytes> {
        let mut seen: HashSet<&str> = HashSet::new();
        let mut memory = MemoryBytes::default();
        for stage in &self.stages {
            for arg in stage.graph.args(Role::State).chain(stage.graph.args(Role::Weight)) {
                if seen.insert(&arg.name) {
                    let stored = usize::try_from(arg.ty.bytes().eval(bindings)?).unwrap_or(usize::MAX);
                    let is_on_host = on_host.contains(&*arg.name);
                    let owner = if is_on_host { MemoryOwner::HostStates } else { MemoryOwner::States };
                    memory = memory.with(owner, backend.padded_bytes(stored));
                }
            }
        }
        Ok(memory)
    }

    /// The states that the stage `name` alone uses: they may be kept in memory of the host without a transfer in any other.
    pub fn states_of(&self, name: &str) -> impl Iterator<Item = &str> {
        let (of, others): (Vec<_>, Vec<_>) = self.stages.iter().partition(|stage| stage.name == name);
        let elsewhere: HashSet<&str> =
            others.iter().flat_map(|stage| &stage.graph.main().args).map(|arg| &*arg.name).collect();
        let states = of.into_iter().flat_map(|stage| stage.graph.args(Role::State)).map(|arg| &*arg.name);
        states.filter(move |name| !elsewhere.contains(name))
    }

    /// What the stages' buckets allocate besides parameters: of what buckets share as much as the largest needs, of the
    /// rest the sum. Compiles what `programs` does not have.
    ///
    /// # Errors
    /// As for [`ProgramCache::get`], and when a symbol is unbound.
    pub fn memory(&self, programs: &ProgramCache, bindings: &Bindings) -> Result<MemoryBytes> {
        let mut all = MemoryBytes::default();
        for stage in &self.stages {
            all = all.and_bucket(&programs.get(&stage.graph, &stage.outputs)?.program.memory(bindings)?);
        }
        Ok(all)
    }

    /// Allocates the states of all stages that the session does not have, compiles the stages and binds them.
    ///
    /// # Errors
    /// As for [`Session::allocate_states`] and [`Session::compile`], and when memory runs out.
    pub fn bind(&self, session: &mut Session, bindings: &Bindings) -> Result<BoundSchedule> {
        for stage in &self.stages {
            session.allocate_states(&stage.graph, bindings)?;
        }
        // What one stage updates has rows for all of them.
        let programs: Vec<(&Graph, &[&str])> = self.stages.iter().map(|s| (&s.graph, &s.outputs[..])).collect();
        session.declare(&programs)?;
        let bind = |stage: &Stage| {
            let compiled = session.compile(&stage.graph, &stage.outputs)?;
            let bucket = compiled.bucket(bindings)?;
            let waits = stage.times == Times::Once && !stage.outputs.is_empty();
            Ok(BoundStage { name: stage.name, times: stage.times, waits, bucket, in_flight: VecDeque::new() })
        };
        Ok(BoundSchedule { stages: self.stages.iter().map(bind).collect::<Result<_>>()? })
    }
}

/// A schedule whose programs are compiled and bound to extents.
pub struct BoundSchedule {
    stages: Vec<BoundStage>,
}

struct BoundStage {
    name: &'static str,
    times: Times,
    /// Does its driver read it?
    waits: bool,
    bucket: Bucket,
    in_flight: VecDeque<Ticket>,
}

impl BoundSchedule {
    /// One pass: every stage in order, those of [`Times::EachPart`] `parts` times. Runs are submitted without waiting for
    /// those before; the pass waits where the driver reads what a stage gives.
    ///
    /// # Errors
    /// Those of the driver, and when the device failed: parameters that the failed step updates are broken then.
    pub fn pass<D: ScheduleDriver>(&mut self, parts: usize, driver: &mut D) -> Result<(), D::Error> {
        for stage in &mut self.stages {
            let runs = if stage.times == Times::EachPart { parts } else { 1 };
            for part in 0..runs {
                stage.submit(part, driver)?;
            }
            if stage.waits {
                let Some(ticket) = stage.in_flight.pop_back() else { continue };
                stage.drain()?;
                stage.bucket.steps().wait(&ticket)?;
                let mut outputs = StageOutputs { bucket: &mut stage.bucket, ticket: &ticket };
                if driver.done(stage.name, &mut outputs)?.is_break() {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Waits for all runs that were submitted.
    ///
    /// # Errors
    /// When one of them failed.
    pub fn wait(&mut self) -> Result<()> {
        self.stages.iter_mut().try_for_each(BoundStage::drain)
    }
}

impl BoundStage {
    fn submit<D: ScheduleDriver>(&mut self, part: usize, driver: &mut D) -> Result<(), D::Error> {
        if self.in_flight.len() == SLOTS {
            self.wait_for_first()?;
        }
        let slot = self.bucket.steps().stage()?;
        driver.fill(self.name, part, &mut StageInputs { bucket: &mut self.bucket, slot: &slot })?;
        let ticket = self.bucket.steps().submit(slot)?;
        self.in_flight.push_back(ticket);
        Ok(())
    }

    fn wait_for_first(&mut self) -> Result<()> {
        self.in_flight.pop_front().map_or(Ok(()), |ticket| self.bucket.steps().wait(&ticket))
    }

    fn drain(&mut self) -> Result<()> {
        while !self.in_flight.is_empty() {
            self.wait_for_first()?;
        }
        Ok(())
    }
}

/// The step inputs of one run of a stage. What is not set keeps the value of the stage's run before.
pub struct StageInputs<'a> {
    bucket: &'a mut Bucket,
    slot: &'a Slot,
}

impl StageInputs<'_> {
    fn bytes(&mut self, name: &str, given: usize) -> Result<Option<&mut [u8]>> {
        let Some(index) = self.bucket.input_index(name)? else { return Ok(None) };
        let bytes = self.bucket.steps().input(self.slot, index);
        if bytes.len() != given {
            let why = format!("takes {} bytes, got {given}", bytes.len());
            return Err(RuntimeError::Argument { kind: "input", name: name.into(), why });
        }
        Ok(Some(bytes))
    }

    /// Fills an input of i32; ignored if the stage's outputs and states do not depend on it.
    ///
    /// # Errors
    /// When there is no such step input, or it has another size.
    pub fn set_i32(&mut self, name: &str, values: &[i32]) -> Result<()> {
        if let Some(bytes) = self.bytes(name, values.len() * 4)? {
            for (to, value) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(values) {
                *to = value.to_le_bytes();
            }
        }
        Ok(())
    }

    /// Fills a scalar of `dtype`, as [`set_i32`](Self::set_i32).
    ///
    /// # Errors
    /// As for [`set_i32`](Self::set_i32).
    pub fn set_scalar(&mut self, name: &str, dtype: DType, value: f64) -> Result<()> {
        let encoded = dtype.encode([value]);
        if let Some(bytes) = self.bytes(name, encoded.len())? {
            bytes.copy_from_slice(&encoded);
        }
        Ok(())
    }

    /// Does the graph have this step input?
    pub fn has(&self, name: &str) -> bool {
        self.bucket.input_index(name).is_ok()
    }
}

/// The outputs of a complete run of a stage.
pub struct StageOutputs<'a> {
    bucket: &'a mut Bucket,
    ticket: &'a Ticket,
}

impl StageOutputs<'_> {
    /// An output of f32, its elements in row-major order.
    ///
    /// # Errors
    /// When the stage was compiled without it.
    pub fn f32s(&mut self, name: &str) -> Result<Vec<f32>> {
        let index = self.bucket.output_index(name)?;
        let bytes = self.bucket.steps().output(self.ticket, index);
        Ok(bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
    }
}

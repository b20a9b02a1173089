//! Compiled graphs with their parameters, and the buckets that are submitted step by step.

use std::sync::Arc;

use ridge_graph::{Bindings, DType, Graph, Role, Tensor, Type};

use crate::backend::{Buffer, LaunchTime};
use crate::error::{Result, RuntimeError};
use crate::memory::MemoryBytes;
use crate::param::{Param, ParamUses, RecipeRun, Refresh};
use crate::program_cache::{CachedProgram, CompileReason};
use crate::steps::{Slot, Steps, Ticket};

/// A graph compiled for a device together with the parameters it uses.
pub struct Compiled {
    pub(crate) cached: Arc<CachedProgram>,
    pub(crate) params: Arc<ParamUses>,
    /// Names of all step inputs of the graph as it was written.
    pub(crate) declared: Arc<[String]>,
    /// Those that the program reads.
    pub(crate) inputs: Vec<(String, Type)>,
    pub(crate) outputs: Vec<(String, Type)>,
}

impl Compiled {
    /// The graph as the device runs it.
    pub fn graph(&self) -> &Graph {
        &self.cached.lowered
    }

    /// Why it was compiled.
    pub fn reason(&self) -> &CompileReason {
        self.cached.reason()
    }

    /// Bytes that a bucket takes besides parameters; see [`Program::workspace_bytes`](crate::Program::workspace_bytes).
    ///
    /// # Errors
    /// When a symbol is unbound.
    pub fn workspace_bytes(&self, bindings: &Bindings) -> Result<usize> {
        self.cached.program.workspace_bytes(bindings)
    }

    /// Bytes that a bucket takes besides parameters, by owner; see [`Program::memory`](crate::Program::memory).
    ///
    /// # Errors
    /// When a symbol is unbound.
    pub fn memory(&self, bindings: &Bindings) -> Result<MemoryBytes> {
        self.cached.program.memory(bindings)
    }

    /// Prepares a bucket.
    ///
    /// # Errors
    /// When a symbol is unbound or memory runs out.
    pub fn bucket(&self, bindings: &Bindings) -> Result<Bucket> {
        let buffers = |uses: &[(Arc<Param>, Buffer)]| uses.iter().map(|(_, b)| b.clone()).collect::<Vec<_>>();
        let run = self.cached.program.bind(bindings, &buffers(&self.params.weights), &buffers(&self.params.states))?;
        let late = self.graph().args(Role::StepInput).map(|arg| arg.late).collect();
        Ok(Bucket {
            steps: Steps::new(run, Arc::clone(&self.params), late),
            single: None,
            declared: Arc::clone(&self.declared),
            inputs: concrete(&self.inputs, bindings)?,
            outputs: concrete(&self.outputs, bindings)?,
        })
    }
}

fn concrete(types: &[(String, Type)], bindings: &Bindings) -> Result<Vec<Named>> {
    types.iter().map(|(name, ty)| Ok((name.clone(), (ty.dtype, ty.shape.eval(bindings)?)))).collect()
}

fn unknown<'a>(kind: &'static str, name: &str, why: &str, known: impl Iterator<Item = &'a str>) -> RuntimeError {
    let known: Vec<&str> = known.collect();
    let why =
        if known.is_empty() { format!("{why}; it has none") } else { format!("{why}; it has {}", known.join(", ")) };
    RuntimeError::Argument { kind, name: name.into(), why }
}

type Named = (String, (DType, Vec<usize>));

/// A program ready to run with one set of extents, its inputs and outputs found by name.
///
/// Its own methods run one step at a time: [`input`](Self::input) or [`set`](Self::set), [`submit`](Self::submit),
/// [`wait`](Self::wait), [`output`](Self::output). They take one slot of the ring, and keep it; [`steps`](Self::steps) is
/// for several steps in flight.
pub struct Bucket {
    steps: Steps,
    /// The slot of the bucket's own methods, from their first use.
    single: Option<SingleStep>,
    declared: Arc<[String]>,
    inputs: Vec<Named>,
    outputs: Vec<Named>,
}

/// Where the step of a bucket's own methods is.
enum SingleStep {
    Staging(Slot),
    Submitted(Ticket),
}

impl Bucket {
    /// Bytes of owners that the bucket has its own of: inputs, outputs, constants and staging.
    pub fn memory(&self) -> MemoryBytes {
        self.steps.run().memory()
    }

    /// Its steps, of which several may be in flight.
    pub fn steps(&mut self) -> &mut Steps {
        &mut self.steps
    }

    /// The slot of the bucket's own methods, once the step in it is complete; see [`Steps::stage`].
    fn slot(&mut self) -> Result<Slot> {
        match self.single.take() {
            None => self.steps.stage(),
            Some(SingleStep::Staging(slot)) => Ok(slot),
            Some(SingleStep::Submitted(ticket)) => {
                let outcome = if self.steps.is_complete(&ticket) { Ok(()) } else { self.end(&ticket) };
                let slot = ticket.into_slot();
                self.steps.restage(&slot);
                if let Err(error) = outcome {
                    self.single = Some(SingleStep::Staging(slot));
                    return Err(error);
                }
                Ok(slot)
            }
        }
    }

    fn end(&mut self, ticket: &Ticket) -> Result<()> {
        self.steps.release(ticket, &[])?;
        self.steps.wait(ticket)
    }

    /// Names of the step inputs that the program reads, by position.
    pub fn input_names(&self) -> impl Iterator<Item = &str> {
        self.inputs.iter().map(|(name, _)| &**name)
    }

    /// Position of the step input `name`, for [`Bucket::input`]; `None` if the outputs that the program was compiled for
    /// do not depend on it.
    ///
    /// # Errors
    /// When the graph has no such step input.
    pub fn input_index(&self, name: &str) -> Result<Option<usize>> {
        let index = self.inputs.iter().position(|(n, _)| n == name);
        if index.is_none() && !self.declared.iter().any(|n| n == name) {
            let known = self.declared.iter().map(String::as_str);
            return Err(unknown("input", name, "the graph has no such step input", known));
        }
        Ok(index)
    }

    /// Position of the output `name`, for [`Bucket::output`].
    ///
    /// # Errors
    /// When the program was compiled without it.
    pub fn output_index(&self, name: &str) -> Result<usize> {
        self.outputs.iter().position(|(n, _)| n == name).ok_or_else(|| {
            let known = self.outputs.iter().map(|(n, _)| &**n);
            unknown("output", name, "the program was compiled without it", known)
        })
    }

    /// Staging bytes of step input `index`, little-endian. Waits for the step that was submitted last. A step input that is
    /// not staged keeps its value.
    ///
    /// # Panics
    /// When all slots are in use by [`steps`](Self::steps), or there is no such input.
    pub fn input(&mut self, index: usize) -> &mut [u8] {
        // What failed broke its parameters; otherwise it concerns the next step only if `submit` says so.
        let slot = self.slot().or_else(|_| self.slot()).unwrap_or_else(|error| panic!("{error}"));
        let SingleStep::Staging(slot) = self.single.insert(SingleStep::Staging(slot)) else { unreachable!("just put") };
        self.steps.input(slot, index)
    }

    /// Fills step input `name`; ignored when the outputs that the program was compiled for do not depend on it.
    ///
    /// # Errors
    /// When the graph has no such step input, or its dtype or shape are others.
    pub fn set(&mut self, name: &str, tensor: &Tensor) -> Result<()> {
        let Some(index) = self.input_index(name)? else { return Ok(()) };
        let (dtype, shape) = &self.inputs[index].1;
        if (*dtype, shape) != (tensor.dtype, &tensor.shape) {
            let why = format!("must be {dtype}{shape:?}, but is {}{:?}", tensor.dtype, tensor.shape);
            return Err(RuntimeError::Argument { kind: "input", name: name.into(), why });
        }
        self.input(index).copy_from_slice(&tensor.to_bytes());
        Ok(())
    }

    /// Queues a step, which is held until [`wait`](Self::wait) where a late input was not staged; see [`Steps::submit`].
    /// Waits for the step that was submitted before.
    ///
    /// # Errors
    /// As for [`Steps::submit`], and when the step before failed and nobody waited for it.
    pub fn submit(&mut self) -> Result<()> {
        let slot = self.slot()?;
        self.single = Some(SingleStep::Submitted(self.steps.submit(slot)?));
        Ok(())
    }

    /// Is the step complete?
    ///
    /// # Errors
    /// When the device failed: parameters that the step updates are then broken until they are loaded again.
    pub fn poll(&mut self) -> Result<bool> {
        match &self.single {
            Some(SingleStep::Submitted(ticket)) => {
                self.steps.release(ticket, &[])?;
                self.steps.poll(ticket)
            }
            Some(SingleStep::Staging(_)) | None => Ok(true),
        }
    }

    /// Waits for the step.
    ///
    /// # Errors
    /// When the device failed: parameters that the step updates are then broken until they are loaded again.
    pub fn wait(&mut self) -> Result<()> {
        match &self.single {
            Some(SingleStep::Submitted(ticket)) => {
                self.steps.release(ticket, &[])?;
                self.steps.wait(ticket)
            }
            Some(SingleStep::Staging(_)) | None => Ok(()),
        }
    }

    /// Runs a step and tells what each launch took; see [`Run::timed`](crate::Run::timed).
    ///
    /// # Errors
    /// As for [`submit`](Self::submit) and [`wait`](Self::wait), or when the device does not time launches.
    pub fn timed(&mut self) -> Result<Vec<LaunchTime>> {
        let slot = self.slot()?;
        let outcome = self.steps.timed(&slot);
        self.steps.restage(&slot);
        self.single = Some(SingleStep::Staging(slot));
        outcome
    }

    /// Bytes of output `index` of the last complete step, little-endian; zeros before the first.
    pub fn output(&self, index: usize) -> &[u8] {
        match &self.single {
            Some(SingleStep::Submitted(ticket)) => self.steps.output(ticket, index),
            Some(SingleStep::Staging(slot)) => self.steps.slot_output(slot, index),
            None => self.steps.run().output(0, index),
        }
    }

    /// Output `name` of the last complete step as a tensor.
    ///
    /// # Errors
    /// When there is no such output.
    pub fn tensor(&self, name: &str) -> Result<Tensor> {
        let index = self.output_index(name)?;
        let (dtype, shape) = &self.outputs[index].1;
        Ok(Tensor::from_bytes(*dtype, shape, self.output(index)))
    }
}

impl RecipeRun for Bucket {
    fn run(&mut self) -> Result<()> {
        self.submit()
    }
}

/// Requires that a program that updates derived copies updates their sources with them.
pub(crate) fn check_copies(updated: &[Arc<Param>]) -> Result<()> {
    let among = |source: &Arc<Param>| updated.iter().any(|param| Arc::ptr_eq(param, source));
    for param in updated {
        let Some(derivation) = &param.derivation else { continue };
        if derivation.refresh != Refresh::Fused {
            return Err(param.error(format!("is a {:?} copy, which only its recipe updates", derivation.refresh)));
        }
        if let Some(source) = derivation.sources.iter().find(|source| !among(source)) {
            let why = format!("is a copy of {}, which the program does not update with it", source.name);
            return Err(param.error(why));
        }
    }
    Ok(())
}

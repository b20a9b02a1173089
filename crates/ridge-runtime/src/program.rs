//! Compiled graphs with the parameters they use, and their buckets: what is submitted step by step.

use std::sync::Arc;

use ridge_graph::{Bindings, DType, Graph, Tensor, Type};

use crate::backend::{Buffer, LaunchTime, Run};
use crate::error::{Result, RuntimeError};
use crate::memory::MemoryBytes;
use crate::param::{Param, ParamStore, RecipeRun, Refresh};
use crate::program_cache::{CachedProgram, CompileReason};

/// The parameters of a program, which stay where they are as long as it lives.
pub(crate) struct ParamUses {
    pub(crate) store: Arc<ParamStore>,
    /// In the order of the main function's weights, and of its states.
    pub(crate) weights: Vec<(Arc<Param>, Buffer)>,
    pub(crate) states: Vec<(Arc<Param>, Buffer)>,
    /// Those whose versions a step moves.
    pub(crate) updated: Vec<Arc<Param>>,
    /// The copy that the program makes, if it is a recipe.
    pub(crate) makes: Option<Arc<Param>>,
}

impl ParamUses {
    /// Brings copies up to date, and requires that all parameters are whole.
    fn ready(&self) -> Result<()> {
        for (param, _) in self.weights.iter().chain(&self.states) {
            if self.makes.as_ref().is_some_and(|makes| Arc::ptr_eq(makes, param)) {
                continue;
            }
            param.make_fresh()?;
            param.whole()?;
        }
        Ok(())
    }

    /// A step was submitted: versions move.
    fn submitted(&self) {
        if self.updated.is_empty() {
            return;
        }
        self.updated.iter().for_each(|param| param.changed());
        if self.makes.is_none() {
            // Copies last: they are made from what the same step gives their sources.
            self.updated.iter().for_each(|param| param.made());
        }
        self.store.moved();
    }

    /// A step failed.
    fn failed(&self) {
        self.updated.iter().for_each(|param| param.break_off());
        self.store.moved();
    }
}

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
        Ok(Bucket {
            run,
            params: Arc::clone(&self.params),
            checked: None,
            updating: false,
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
pub struct Bucket {
    run: Box<dyn Run>,
    params: Arc<ParamUses>,
    /// The store's epoch at which the parameters were found ready.
    checked: Option<u64>,
    /// Is a step in flight that updates parameters with versions?
    updating: bool,
    declared: Arc<[String]>,
    inputs: Vec<Named>,
    outputs: Vec<Named>,
}

impl Bucket {
    /// Bytes of owners that the bucket has its own of: inputs, outputs and constants.
    pub fn memory(&self) -> MemoryBytes {
        self.run.memory()
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

    /// Staging bytes of step input `index`, little-endian.
    pub fn input(&mut self, index: usize) -> &mut [u8] {
        self.run.input(index)
    }

    /// Fills step input `name`; ignored when the outputs that the program was compiled for do not depend on it.
    ///
    /// # Errors
    /// When the graph has no such step input, or its dtype or shape are others.
    pub fn set(&mut self, name: &str, tensor: &Tensor) -> Result<()> {
        let Some(index) = self.input_index(name)? else { return Ok(()) };
        let (dtype, shape) = &self.inputs[index].1;
        if (*dtype, shape) != (tensor.dtype, &tensor.shape) {
            let why = format!("must be {dtype}{shape:?}, got {}{:?}", tensor.dtype, tensor.shape);
            return Err(RuntimeError::Argument { kind: "input", name: name.into(), why });
        }
        self.run.input(index).copy_from_slice(&tensor.to_bytes());
        Ok(())
    }

    /// Queues a step. Lazy copies whose sources have changed are refreshed first. The versions of the parameters that
    /// the step updates move.
    ///
    /// # Errors
    /// When the device failed, a parameter is broken by a step that failed, or a copy is stale that is refreshed
    /// explicitly only.
    pub fn submit(&mut self) -> Result<()> {
        self.prepare()?;
        let outcome = self.run.submit();
        match &outcome {
            Ok(()) => self.params.submitted(),
            Err(_) => self.completed(true),
        }
        outcome
    }

    /// Is the step complete?
    ///
    /// # Errors
    /// When the device failed: parameters that the step updates are then broken until they are loaded again.
    pub fn poll(&mut self) -> Result<bool> {
        let outcome = self.run.poll();
        if !matches!(outcome, Ok(false)) {
            self.completed(outcome.is_err());
        }
        outcome
    }

    /// Waits for the step.
    ///
    /// # Errors
    /// When the device failed: parameters that the step updates are then broken until they are loaded again.
    pub fn wait(&mut self) -> Result<()> {
        let outcome = self.run.wait();
        self.completed(outcome.is_err());
        outcome
    }

    /// Runs a step and tells what each launch took; see [`Run::timed`].
    ///
    /// # Errors
    /// As for [`submit`](Self::submit) and [`wait`](Self::wait), or when the device does not time launches.
    pub fn timed(&mut self) -> Result<Vec<LaunchTime>> {
        self.prepare()?;
        let outcome = self.run.timed();
        self.params.submitted();
        self.completed(outcome.is_err());
        outcome
    }

    /// Makes sure that the parameters are as the step needs them, where any has changed since the last step.
    fn prepare(&mut self) -> Result<()> {
        let epoch = self.params.store.epoch();
        if self.checked != Some(epoch) {
            self.params.ready()?;
            self.checked = Some(epoch);
        }
        self.updating = !self.params.updated.is_empty();
        Ok(())
    }

    fn completed(&mut self, failed: bool) {
        if std::mem::take(&mut self.updating) && failed {
            self.params.failed();
        }
    }

    /// Bytes of output `index` of the last complete step, little-endian.
    pub fn output(&self, index: usize) -> &[u8] {
        self.run.output(index)
    }

    /// Output `name` of the last complete step as a tensor.
    ///
    /// # Errors
    /// When there is no such output.
    pub fn tensor(&self, name: &str) -> Result<Tensor> {
        let index = self.output_index(name)?;
        let (dtype, shape) = &self.outputs[index].1;
        Ok(Tensor::from_bytes(*dtype, shape, self.run.output(index)))
    }
}

impl RecipeRun for Bucket {
    fn run(&mut self) -> Result<()> {
        self.submit()
    }
}

impl Drop for Bucket {
    fn drop(&mut self) {
        // A failure that nobody waited for breaks parameters too.
        if self.updating {
            let _ = self.wait();
        }
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

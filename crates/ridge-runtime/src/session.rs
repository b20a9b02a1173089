//! Weights, states and programs of one model on one device.

use std::collections::HashMap;
use std::sync::Arc;

use ridge_graph::{Arg, Bindings, DType, Graph, Role, Tensor, Type};

use crate::backend::{Backend, Buffer, LaunchTime, Run, WeightData};
use crate::error::{Result, RuntimeError};
use crate::memory::MemoryBytes;
use crate::plan::component_offsets;
use crate::program_cache::{CachedProgram, CompileReason, ProgramCache};

/// A model's memory on a device: its weights by name, shared by every program compiled for it, and its states.
pub struct Session {
    backend: Arc<dyn Backend>,
    programs: Arc<ProgramCache>,
    weights: HashMap<String, (Type, Buffer)>,
    states: HashMap<String, (Type, Buffer)>,
}

impl Session {
    /// A session on `backend`, without weights yet.
    pub fn new(backend: Arc<dyn Backend>) -> Self {
        Self::sharing(Arc::new(ProgramCache::new(backend)))
    }

    /// A session, without weights yet, that compiles nothing that `programs` has: another of the same model.
    pub fn sharing(programs: Arc<ProgramCache>) -> Self {
        let backend = Arc::clone(programs.backend());
        Self { backend, programs, weights: HashMap::new(), states: HashMap::new() }
    }

    /// What was compiled for it and for those that it shares programs with.
    pub fn programs(&self) -> &Arc<ProgramCache> {
        &self.programs
    }

    /// The device.
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }

    /// Brings a weight to the device, in place of one of that name.
    ///
    /// # Errors
    /// When the bytes do not fit the type, or memory runs out.
    pub fn load(&mut self, name: &str, ty: &Type, parts: Vec<WeightData>) -> Result<()> {
        let buffer = self.backend.upload(ty, parts).map_err(|e| named("weight", name, &e))?;
        self.weights.insert(name.into(), (ty.clone(), buffer));
        Ok(())
    }

    /// Makes a weight of random numbers on the device, in place of one of that name; false where the device leaves that
    /// to the host. See [`Backend::random`].
    ///
    /// # Errors
    /// When memory runs out.
    pub fn load_random(&mut self, name: &str, ty: &Type, state: u64, scale: f64) -> Result<bool> {
        let made = self.backend.random(ty, state, scale).map_err(|e| named("weight", name, &e))?;
        let done = made.is_some();
        self.weights.extend(made.map(|buffer| (name.into(), (ty.clone(), buffer))));
        Ok(done)
    }

    /// Allocates every state of `graph` that does not exist yet, zeroed, under `bindings` for its symbols.
    ///
    /// # Errors
    /// When a symbol is unbound or memory runs out.
    pub fn allocate_states(&mut self, graph: &Graph, bindings: &Bindings) -> Result<()> {
        for arg in graph.args(Role::State) {
            if !self.states.contains_key(&*arg.name) {
                let bytes = component_offsets(&arg.ty, bindings)?.1;
                let buffer = self.backend.allocate(bytes).map_err(|e| named("state", &arg.name, &e))?;
                self.states.insert(arg.name.to_string(), (arg.ty.clone(), buffer));
            }
        }
        Ok(())
    }

    /// The device memory of a state.
    pub fn state(&self, name: &str) -> Option<&Buffer> {
        self.states.get(name).map(|(_, buffer)| buffer)
    }

    /// Bytes of all weights on the device.
    pub fn weight_bytes(&self) -> usize {
        self.weights.values().map(|(_, b)| b.bytes()).sum()
    }

    /// Bytes of all states on the device.
    pub fn state_bytes(&self) -> usize {
        self.states.values().map(|(_, b)| b.bytes()).sum()
    }

    /// Compiles `graph` for these outputs, once however often it is asked for.
    ///
    /// # Errors
    /// Names an output that does not exist, an op without a kernel, or a weight or state that is missing or of
    /// another type.
    pub fn compile(&self, graph: &Graph, outputs: &[&str]) -> Result<Compiled> {
        let cached = self.programs.get(graph, outputs)?;
        let lowered = &cached.lowered;
        let weights = find("weight", lowered, Role::Weight, &self.weights)?;
        let states = find("state", lowered, Role::State, &self.states)?;
        let declared = graph.args(Role::StepInput).map(|a| a.name.to_string()).collect();
        let inputs = lowered.args(Role::StepInput).map(|a| (a.name.to_string(), a.ty.clone())).collect();
        let results = lowered
            .main()
            .outputs
            .iter()
            .filter(|o| o.role == Role::Data)
            .map(|o| (o.name.to_string(), lowered.main().ty(o.var).clone()))
            .collect();
        Ok(Compiled { cached, weights, states, declared, inputs, outputs: results })
    }
}

fn named(kind: &'static str, name: &str, error: &RuntimeError) -> RuntimeError {
    RuntimeError::Argument { kind, name: name.into(), why: error.to_string() }
}

fn find(kind: &'static str, graph: &Graph, role: Role, known: &HashMap<String, (Type, Buffer)>) -> Result<Vec<Buffer>> {
    let wrong = |arg: &Arg, why: String| RuntimeError::Argument { kind, name: arg.name.to_string(), why };
    graph
        .args(role)
        .map(|arg| match known.get(&*arg.name) {
            None => Err(wrong(arg, format!("the graph needs it as {}, and it is not loaded", arg.ty))),
            Some((ty, _)) if *ty != arg.ty => Err(wrong(arg, format!("the graph needs {}, loaded is {ty}", arg.ty))),
            Some((_, buffer)) => Ok(buffer.clone()),
        })
        .collect()
}

/// A graph compiled for a device together with the weights and states it uses.
pub struct Compiled {
    cached: Arc<CachedProgram>,
    weights: Vec<Buffer>,
    states: Vec<Buffer>,
    /// Names of all step inputs of the graph as it was written.
    declared: Arc<[String]>,
    /// Those that the program reads.
    inputs: Vec<(String, Type)>,
    outputs: Vec<(String, Type)>,
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

    /// Bytes that a bucket takes besides weights and states; see [`Program::workspace_bytes`].
    ///
    /// # Errors
    /// When a symbol is unbound.
    pub fn workspace_bytes(&self, bindings: &Bindings) -> Result<usize> {
        self.cached.program.workspace_bytes(bindings)
    }

    /// Bytes that a bucket takes besides weights and states, by owner; see [`Program::memory`].
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
        let run = self.cached.program.bind(bindings, &self.weights, &self.states)?;
        Ok(Bucket {
            run,
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

    /// Queues a step.
    ///
    /// # Errors
    /// When the device failed.
    pub fn submit(&mut self) -> Result<()> {
        self.run.submit()
    }

    /// Is the step complete?
    ///
    /// # Errors
    /// When the device failed.
    pub fn poll(&mut self) -> Result<bool> {
        self.run.poll()
    }

    /// Waits for the step.
    ///
    /// # Errors
    /// When the device failed.
    pub fn wait(&mut self) -> Result<()> {
        self.run.wait()
    }

    /// Runs a step and tells what each launch took; see [`Run::timed`].
    ///
    /// # Errors
    /// When the device failed, or does not time launches.
    pub fn timed(&mut self) -> Result<Vec<LaunchTime>> {
        self.run.timed()
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

//! Parameters and programs of models on one device.

use std::collections::HashMap;
use std::sync::Arc;

use ridge_graph::{Arg, Bindings, Graph, Role, Type};

use crate::alias::is_updated;
use crate::backend::{Backend, Buffer};
use crate::error::{Result, RuntimeError};
use crate::launches::component_offsets;
use crate::layout::settle;
use crate::param::{Derivation, Param, ParamKind, ParamStore, ParamUses, ParamVersions, Refresh, lock};
use crate::program::{Compiled, check_copies};
use crate::program_cache::ProgramCache;

mod loading;

/// The parameters of models on a device, and what compiles programs that use them.
///
/// A parameter is memory that outlives a step. One program reads it as a weight, another updates it as a state of the
/// same name, dtype and shape; both work on the same memory. A caller submits programs that update parameters and
/// programs that read them in one order.
///
/// A session has a model's namespace, at first the empty one, and caches of its own: the states whose shape has a symbol.
/// All other parameters are shared with the sessions made by [`share`](Self::share) and [`model`](Self::model).
pub struct Session {
    backend: Arc<dyn Backend>,
    programs: Arc<ProgramCache>,
    store: Arc<ParamStore>,
    model: Arc<str>,
    caches: HashMap<String, Arc<Param>>,
}

/// How a parameter is made from others.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// Its weights are the sources, its one state is the copy, which it updates. It has no step inputs or symbols.
    pub graph: Graph,
    /// When the copy is made again.
    pub refresh: Refresh,
    /// May [`Session::evict`] free the copy while no program uses it?
    pub evictable: bool,
}

impl Session {
    /// A session on `backend`, without parameters yet.
    pub fn new(backend: Arc<dyn Backend>) -> Self {
        Self::sharing(Arc::new(ProgramCache::new(backend)))
    }

    /// A session, without parameters yet, that compiles nothing that `programs` has: another of the same model.
    pub fn sharing(programs: Arc<ProgramCache>) -> Self {
        let backend = Arc::clone(programs.backend());
        Self { backend, programs, store: Arc::default(), model: "".into(), caches: HashMap::new() }
    }

    /// What was compiled for it and for those that it shares programs with.
    pub fn programs(&self) -> &Arc<ProgramCache> {
        &self.programs
    }

    /// Another session on the same parameters and programs, with caches of its own.
    pub fn share(&self) -> Self {
        self.model(&self.model)
    }

    /// As [`share`](Self::share), in the namespace of the model `name`: equal names of different models are different
    /// parameters.
    pub fn model(&self, name: &str) -> Self {
        Self {
            backend: Arc::clone(&self.backend),
            programs: Arc::clone(&self.programs),
            store: Arc::clone(&self.store),
            model: name.into(),
            caches: HashMap::new(),
        }
    }

    /// The device.
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }

    /// Settles one layout for each parameter that these programs (a graph and its outputs each) use, if it has none yet: the
    /// one that all kernels that read it want, rows if they differ or a program updates it. Parameters that are loaded
    /// afterwards are brought to that layout at once, others now. Where nothing is declared,
    /// [`compile`](Self::compile) settles layouts over the first program that uses a parameter.
    ///
    /// # Errors
    /// As [`ProgramCache::get`], and when memory runs out.
    pub fn declare(&self, programs: &[(&Graph, &[&str])]) -> Result<()> {
        let programs = programs.iter().map(|(graph, outputs)| self.programs.get(graph, outputs));
        let programs = programs.collect::<Result<Vec<_>>>()?;
        self.settle_layouts(&programs.iter().map(|program| &*program.lowered).collect::<Vec<_>>())
    }

    /// Settles the layouts of all parameters of lowered programs that have none yet.
    fn settle_layouts(&self, programs: &[&Graph]) -> Result<()> {
        let mut layouts = lock(&self.store.layouts);
        let known = layouts.entry(Arc::clone(&self.model)).or_default();
        for (name, layout) in settle(programs, self.backend.kernels(), known) {
            if let Some(param) = self.store.get(&self.model, &name)
                && let Some(buffer) = &*param.memory()
            {
                self.set_layout(&name, &param.ty, buffer, Some(&layout))?;
            }
            known.insert(name, layout);
        }
        Ok(())
    }

    /// Makes sure of every state of `graph`: allocates it, zeroed, under `bindings` for its symbols, if it does not exist
    /// yet, and gives a parameter that was loaded memory that can be written. A state with a symbol in its shape is a
    /// cache of this session alone.
    ///
    /// # Errors
    /// When a symbol is unbound, memory runs out, or programs read a loaded parameter where it cannot be written.
    pub fn allocate_states(&mut self, graph: &Graph, bindings: &Bindings) -> Result<()> {
        for arg in graph.args(Role::State) {
            if let Some(param) = self.find(&arg.name) {
                self.make_writable(&param)?;
                continue;
            }
            let bytes = component_offsets(&arg.ty, bindings)?.1;
            let buffer = self.allocate("state", &arg.name, bytes)?;
            if arg.ty.shape.as_const().is_some() {
                self.add(Param::new(&arg.name, &arg.ty, ParamKind::State, buffer));
            } else {
                let cache = Param::new(&arg.name, &arg.ty, ParamKind::Cache, buffer);
                self.caches.insert(arg.name.to_string(), Arc::new(cache));
            }
        }
        Ok(())
    }

    /// Moves a parameter to memory that can be written, while no program uses it.
    fn make_writable(&self, param: &Param) -> Result<()> {
        let mut memory = param.memory();
        let Some(buffer) = memory.as_ref().filter(|b| !self.backend.is_writable(b)) else { return Ok(()) };
        if buffer.owners() > 1 {
            let why = "is to be updated, but programs read it where it cannot be written; allocate the states of all \
                       programs before compiling the first";
            return Err(param.error(why.into()));
        }
        let bytes = self.backend.read(buffer)?;
        let own = self.allocate("parameter", &param.name, bytes.len())?;
        self.backend.write(&own, &bytes)?;
        *memory = Some(own);
        Ok(())
    }

    fn find(&self, name: &str) -> Option<Arc<Param>> {
        self.caches.get(name).cloned().or_else(|| self.store.get(&self.model, name))
    }

    fn known(&self, name: &str) -> Result<Arc<Param>> {
        let unknown = || RuntimeError::Argument { kind: "parameter", name: name.into(), why: "is not loaded".into() };
        self.find(name).ok_or_else(unknown)
    }

    /// The device memory of a parameter, if it exists and is not evicted. Steps that update it write there.
    pub fn state(&self, name: &str) -> Option<Buffer> {
        self.find(name).and_then(|param| param.memory().clone())
    }

    /// Moves whenever a step that updates the parameter is submitted, or it is loaded again. That of a copy that follows
    /// its sources moves with theirs; a cache has none.
    pub fn version(&self, name: &str) -> Option<u64> {
        self.find(name).filter(|param| param.kind != ParamKind::Cache).map(|param| param.version())
    }

    /// The versions of all weights of `graph` that are loaded, for caches of what was computed from them.
    pub fn versions(&self, graph: &Graph) -> ParamVersions {
        let params = graph.args(Role::Weight).filter_map(|arg| self.find(&arg.name)).collect();
        ParamVersions::new(Arc::clone(&self.store), params)
    }

    /// Bytes of all weights and derived copies on the device, those of other namespaces not included.
    pub fn weight_bytes(&self) -> usize {
        let is_weight = |param: &&Arc<Param>| matches!(param.kind, ParamKind::Weight | ParamKind::Derived);
        self.store.of(&self.model).iter().filter(is_weight).map(|param| param.bytes()).sum()
    }

    /// Bytes of all other parameters: states and this session's caches.
    pub fn state_bytes(&self) -> usize {
        let states = self.store.of(&self.model);
        let states = states.iter().filter(|param| param.kind == ParamKind::State);
        states.chain(self.caches.values()).map(|param| param.bytes()).sum()
    }

    /// Adds a derived copy: the one state of the recipe's graph, made from its weights. It is made when a step first reads
    /// it. No program has been compiled for it yet, so [`allocate_states`](Self::allocate_states) can still make its
    /// sources writable.
    ///
    /// # Errors
    /// When the recipe has another form, a source is not loaded, the copy exists, or memory runs out.
    pub fn derive(&mut self, recipe: &Recipe) -> Result<()> {
        let Recipe { graph, refresh, evictable } = recipe;
        let states: Vec<&Arg> = graph.args(Role::State).collect();
        let &[copy] = &states[..] else {
            let names: Vec<&str> = states.iter().map(|arg| &*arg.name).collect();
            let why = format!("must update one state, its copy; it has {names:?}");
            return Err(RuntimeError::Argument { kind: "recipe", name: graph.main().name.to_string(), why });
        };
        if self.find(&copy.name).is_some() {
            return Err(self.known(&copy.name)?.error("exists already, and cannot become a derived copy".into()));
        }
        let sources: Vec<_> = graph.args(Role::Weight).map(|arg| self.known(&arg.name)).collect::<Result<_>>()?;
        let bytes = component_offsets(&copy.ty, &Bindings::new())?.1;
        let buffer = self.allocate("parameter", &copy.name, bytes)?;
        let derivation = Derivation::new(graph.clone(), sources, *refresh, *evictable);
        self.add(Param::derived(&copy.name, &copy.ty, derivation, buffer));
        Ok(())
    }

    /// Makes a derived copy again, whether it is stale or not.
    ///
    /// # Errors
    /// When there is no such parameter, or its recipe fails.
    pub fn refresh(&self, name: &str) -> Result<()> {
        let param = self.known(name)?;
        self.memory_of(&param)?;
        self.bind_recipe(&param)?;
        param.refresh()
    }

    /// Frees the memory of a derived copy, and gives its bytes. It is made again when the next program that reads it is
    /// compiled and run.
    ///
    /// # Errors
    /// When the parameter is not evictable, or programs use it.
    pub fn evict(&mut self, name: &str) -> Result<usize> {
        let param = self.known(name)?;
        let Some(derivation) = param.derivation.as_ref().filter(|d| d.evictable) else {
            return Err(param.error("is not an evictable copy".into()));
        };
        let mut memory = param.memory();
        let mut recipe = lock(&derivation.recipe);
        // The recipe is bound to the copy too.
        if memory.as_ref().is_some_and(|b| b.owners() > 1 + usize::from(recipe.is_some())) {
            return Err(param.error("is used by programs; drop them before evicting it".into()));
        }
        *recipe = None;
        param.forgotten();
        Ok(memory.take().map_or(0, |buffer| buffer.bytes()))
    }

    /// Compiles the recipe of a copy for its memory, if it is not.
    fn bind_recipe(&self, param: &Arc<Param>) -> Result<()> {
        let unbound = |derivation: &&Derivation| lock(&derivation.recipe).is_none();
        let Some(derivation) = param.derivation.as_ref().filter(unbound) else { return Ok(()) };
        let compiled = self.compile_for(&derivation.graph, &[], Some(param))?;
        *lock(&derivation.recipe) = Some(Box::new(compiled.bucket(&Bindings::new())?));
        Ok(())
    }

    /// Compiles `graph` for these outputs, once however often it is asked for.
    ///
    /// # Errors
    /// Names an output that does not exist, an op without a kernel, or a parameter that is missing, of another type, read
    /// as a weight and updated as a state by one program, or updated without being writable.
    pub fn compile(&self, graph: &Graph, outputs: &[&str]) -> Result<Compiled> {
        self.compile_for(graph, outputs, None)
    }

    fn compile_for(&self, graph: &Graph, outputs: &[&str], makes: Option<&Arc<Param>>) -> Result<Compiled> {
        let cached = self.programs.get(graph, outputs)?;
        let lowered = &cached.lowered;
        let weights = self.used("weight", lowered, Role::Weight, None)?;
        let states = self.used("state", lowered, Role::State, makes)?;
        for (state, buffer) in &states {
            if weights.iter().any(|(weight, _)| Arc::ptr_eq(weight, state)) {
                return Err(state.error("is a weight and a state of one program; read the state instead".into()));
            }
            if !self.backend.is_writable(buffer) {
                return Err(state.error("is updated, but not writable; allocate the program's states first".into()));
            }
        }
        let output_of =
            |param: &Arc<Param>| lowered.main().outputs.iter().find(|o| o.role == Role::State && o.name == param.name);
        let is_updated = |param: &&Arc<Param>| {
            param.kind != ParamKind::Cache
                && output_of(param).is_some_and(|output| is_updated(lowered, lowered.main, output.var))
        };
        let updated: Vec<_> = states.iter().map(|(param, _)| param).filter(is_updated).map(Arc::clone).collect();
        if makes.is_none() {
            check_copies(&updated)?;
        }
        self.settle_layouts(&[lowered])?;
        let declared = graph.args(Role::StepInput).map(|a| a.name.to_string()).collect();
        let inputs = lowered.args(Role::StepInput).map(|a| (a.name.to_string(), a.ty.clone())).collect();
        let outputs = lowered
            .main()
            .outputs
            .iter()
            .filter(|o| o.role == Role::Data)
            .map(|o| (o.name.to_string(), lowered.main().ty(o.var).clone()))
            .collect();
        let params =
            Arc::new(ParamUses { store: Arc::clone(&self.store), weights, states, updated, makes: makes.cloned() });
        Ok(Compiled { cached, params, declared, inputs, outputs })
    }

    /// The parameters that a graph asks for in this role, with their memory; `makes` may not be among those known yet.
    fn used(
        &self,
        kind: &'static str,
        graph: &Graph,
        role: Role,
        makes: Option<&Arc<Param>>,
    ) -> Result<Vec<(Arc<Param>, Buffer)>> {
        let wrong = |arg: &Arg, why: String| RuntimeError::Argument { kind, name: arg.name.to_string(), why };
        let of = |arg: &Arg| {
            let made = makes.filter(|param| param.name == arg.name).cloned();
            let param = made
                .or_else(|| self.find(&arg.name))
                .ok_or_else(|| wrong(arg, format!("the graph needs it as {}, but it is not loaded", arg.ty)))?;
            if param.ty != (Type { state: false, ..arg.ty.clone() }) {
                return Err(wrong(arg, format!("the graph needs {}, but {} is loaded", arg.ty, param.ty)));
            }
            if param.kind == ParamKind::Weight && role == Role::State {
                self.make_writable(&param)?;
            }
            let buffer = self.memory_of(&param)?;
            if makes.is_none() {
                self.bind_recipe(&param)?;
            }
            Ok((param, buffer))
        };
        graph.args(role).map(of).collect()
    }

    /// The memory of a parameter; an evicted copy gets some again.
    fn memory_of(&self, param: &Param) -> Result<Buffer> {
        let mut memory = param.memory();
        if let Some(buffer) = &*memory {
            return Ok(buffer.clone());
        }
        let bytes = component_offsets(&param.ty, &Bindings::new())?.1;
        let buffer = self.allocate("parameter", &param.name, bytes)?;
        Ok(memory.insert(buffer).clone())
    }
}

fn named(kind: &'static str, name: &str, error: &RuntimeError) -> RuntimeError {
    RuntimeError::Argument { kind, name: name.into(), why: error.to_string() }
}

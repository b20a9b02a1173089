//! Parameters: memory that outlives a step. Weights, optimiser states, accumulators, caches and derived copies are handled
//! uniformly: found by name, read by some programs and updated by others.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ridge_graph::passes::Layout;
use ridge_graph::{Graph, Type};

use crate::backend::Buffer;
use crate::error::{Result, RuntimeError};
use crate::layout::Layouts;

/// Where a parameter's memory comes from, and whether its changes have versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ParamKind {
    /// Loaded.
    Weight,
    /// Allocated, zeroed, with constant extents: moments of an optimiser, accumulators.
    State,
    /// Allocated, zeroed, with extents that the session chose: keys and values. It has no version, and a step that fails
    /// does not break it: who writes it knows which parts are valid.
    Cache,
    /// Made from other parameters by a recipe.
    Derived,
}

/// When a derived copy is made again after one of its sources has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refresh {
    /// The programs that update the sources write the copy too. After any other change of a source it is refreshed as
    /// a lazy one is.
    Fused,
    /// Before the next step that reads it.
    Lazy,
    /// By [`Session::refresh`](crate::Session::refresh) alone. A step that reads a stale copy is an error.
    Explicit,
}

/// Runs the recipe of a derived copy.
pub(crate) trait RecipeRun: Send {
    /// Queues the recipe.
    fn run(&mut self) -> Result<()>;
}

/// What makes a copy of other parameters.
pub(crate) struct Derivation {
    pub(crate) graph: Graph,
    pub(crate) sources: Vec<Arc<Param>>,
    pub(crate) refresh: Refresh,
    pub(crate) evictable: bool,
    /// The version of the sources that the copy was made from.
    made_from: AtomicU64,
    /// The recipe, once it is compiled and bound to the copy's memory.
    pub(crate) recipe: Mutex<Option<Box<dyn RecipeRun>>>,
}

/// Of a copy that was never made.
const NEVER: u64 = u64::MAX;

impl Derivation {
    pub(crate) fn new(graph: Graph, sources: Vec<Arc<Param>>, refresh: Refresh, evictable: bool) -> Self {
        Self { graph, sources, refresh, evictable, made_from: AtomicU64::new(NEVER), recipe: Mutex::new(None) }
    }

    /// Grows with every update of any source.
    fn version(&self) -> u64 {
        self.sources.iter().map(|source| source.version()).sum()
    }
}

/// A parameter.
pub(crate) struct Param {
    pub(crate) name: Arc<str>,
    /// Its type, without the mark of states.
    pub(crate) ty: Type,
    pub(crate) kind: ParamKind,
    /// Of an evicted copy there is none.
    memory: Mutex<Option<Buffer>>,
    version: AtomicU64,
    broken: AtomicBool,
    pub(crate) derivation: Option<Derivation>,
}

impl Param {
    pub(crate) fn new(name: &str, ty: &Type, kind: ParamKind, memory: Buffer) -> Self {
        Self {
            name: name.into(),
            ty: Type { state: false, ..ty.clone() },
            kind,
            memory: Mutex::new(Some(memory)),
            version: AtomicU64::new(0),
            broken: AtomicBool::new(false),
            derivation: None,
        }
    }

    pub(crate) fn derived(name: &str, ty: &Type, derivation: Derivation, memory: Buffer) -> Self {
        Self { derivation: Some(derivation), ..Self::new(name, ty, ParamKind::Derived, memory) }
    }

    /// Its memory, which may be replaced while it is locked and nobody else has it.
    pub(crate) fn memory(&self) -> MutexGuard<'_, Option<Buffer>> {
        lock(&self.memory)
    }

    /// Bytes of its memory.
    pub(crate) fn bytes(&self) -> usize {
        self.memory().as_ref().map_or(0, Buffer::bytes)
    }

    /// Moves with every update, and for a copy that follows its sources, with theirs.
    pub(crate) fn version(&self) -> u64 {
        match &self.derivation {
            Some(derivation) if derivation.refresh != Refresh::Explicit => derivation.version(),
            _ => self.version.load(Ordering::Acquire),
        }
    }

    /// Says that its values are others now, and whole.
    pub(crate) fn changed(&self) {
        self.version.fetch_add(1, Ordering::AcqRel);
        self.broken.store(false, Ordering::Release);
    }

    /// Says that a step failed that was updating it.
    pub(crate) fn break_off(&self) {
        self.broken.store(true, Ordering::Release);
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }

    /// Was the copy made from its sources as they are, and not broken since?
    pub(crate) fn is_fresh(&self) -> bool {
        let made = |d: &Derivation| d.made_from.load(Ordering::Acquire) == d.version() && !self.is_broken();
        self.derivation.as_ref().is_none_or(made)
    }

    /// Says that the copy was made from its sources as they are.
    pub(crate) fn made(&self) {
        if let Some(derivation) = &self.derivation {
            derivation.made_from.store(derivation.version(), Ordering::Release);
        }
    }

    /// Says that the copy's memory does not hold it.
    pub(crate) fn forgotten(&self) {
        if let Some(derivation) = &self.derivation {
            derivation.made_from.store(NEVER, Ordering::Release);
        }
    }

    /// Makes a copy again, where its sources have changed and its policy allows that.
    ///
    /// # Errors
    /// When it is stale and refreshed explicitly only, or the recipe fails.
    pub(crate) fn make_fresh(&self) -> Result<()> {
        if self.is_fresh() {
            return Ok(());
        }
        match &self.derivation {
            Some(derivation) if derivation.refresh == Refresh::Explicit => {
                let sources: Vec<&str> = derivation.sources.iter().map(|source| &*source.name).collect();
                let why =
                    format!("is a stale copy of {}, which have changed; refresh it explicitly", sources.join(", "));
                Err(self.error(why))
            }
            _ => self.refresh(),
        }
    }

    /// Makes a copy again. Nothing for what is no copy.
    ///
    /// # Errors
    /// When the recipe fails.
    pub(crate) fn refresh(&self) -> Result<()> {
        let Some(derivation) = &self.derivation else { return Ok(()) };
        let version = derivation.version();
        match &mut *lock(&derivation.recipe) {
            Some(recipe) => {
                recipe.run()?;
                derivation.made_from.store(version, Ordering::Release);
                Ok(())
            }
            None => Err(self.error("was evicted; compile the program that reads it again".into())),
        }
    }

    /// # Errors
    /// When a step failed that was updating it.
    pub(crate) fn whole(&self) -> Result<()> {
        if self.is_broken() {
            return Err(self.error("a step that was updating it failed; load it again".into()));
        }
        Ok(())
    }

    pub(crate) fn error(&self, why: String) -> RuntimeError {
        RuntimeError::Argument { kind: "parameter", name: self.name.to_string(), why }
    }
}

/// A model and a name.
type ParamKey = (Arc<str>, Arc<str>);

/// Parameters by the model that they belong to and their name.
#[derive(Default)]
pub(crate) struct ParamStore {
    params: Mutex<HashMap<ParamKey, Arc<Param>>>,
    /// Settled layouts, of each model. A parameter's may be known before it is loaded.
    pub(crate) layouts: Mutex<HashMap<Arc<str>, Layouts>>,
    /// Parameters that are kept in memory of the host, and whether they are weights or states.
    on_host: Mutex<HashMap<ParamKey, ParamKind>>,
    /// Moves when any version does, or a parameter breaks: while it stands, nothing needs to be checked again.
    epoch: AtomicU64,
}

impl ParamStore {
    pub(crate) fn get(&self, model: &Arc<str>, name: &str) -> Option<Arc<Param>> {
        lock(&self.params).get(&(Arc::clone(model), name.into())).cloned()
    }

    /// Adds a parameter, in place of one of that name.
    pub(crate) fn insert(&self, model: &Arc<str>, param: Arc<Param>) {
        lock(&self.params).insert((Arc::clone(model), Arc::clone(&param.name)), param);
        self.moved();
    }

    /// The settled layout of a parameter.
    pub(crate) fn layout(&self, model: &Arc<str>, name: &str) -> Option<Layout> {
        lock(&self.layouts).get(model)?.get(name).cloned()
    }

    /// Has a parameter, which has no memory yet, kept in memory of the host.
    pub(crate) fn keep_on_host(&self, model: &Arc<str>, name: &str, kind: ParamKind) {
        lock(&self.on_host).insert((Arc::clone(model), name.into()), kind);
    }

    /// As what a parameter is kept in memory of the host; `None` where it is not.
    pub(crate) fn on_host(&self, model: &Arc<str>, name: &str) -> Option<ParamKind> {
        let on_host = lock(&self.on_host);
        if on_host.is_empty() { None } else { on_host.get(&(Arc::clone(model), name.into())).copied() }
    }

    /// The parameters of a model.
    pub(crate) fn of(&self, model: &Arc<str>) -> Vec<Arc<Param>> {
        lock(&self.params).iter().filter(|((of, _), _)| of == model).map(|(_, param)| Arc::clone(param)).collect()
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Says that a version moved, or a parameter broke.
    pub(crate) fn moved(&self) {
        self.epoch.fetch_add(1, Ordering::AcqRel);
    }
}

/// The version of a set of parameters, at one atomic load while nothing changes.
pub struct ParamVersions {
    store: Arc<ParamStore>,
    params: Vec<Arc<Param>>,
    epoch: u64,
    version: u64,
}

impl ParamVersions {
    pub(crate) fn new(store: Arc<ParamStore>, params: Vec<Arc<Param>>) -> Self {
        let mut versions = Self { store, params, epoch: 0, version: 0 };
        versions.update();
        versions
    }

    /// Has a parameter changed since the last [`update`](Self::update)? Updates count from when they are submitted.
    pub fn changed(&self) -> bool {
        self.store.epoch() != self.epoch && self.sum() != self.version
    }

    /// Has a parameter changed since the last call? The next call counts from here.
    pub fn update(&mut self) -> bool {
        // Before the sum, so that what changes meanwhile is seen by the next call at the latest.
        let epoch = self.store.epoch();
        if epoch == self.epoch {
            return false;
        }
        let version = self.sum();
        self.epoch = epoch;
        std::mem::replace(&mut self.version, version) != version
    }

    /// Versions only grow, so equal sums are equal versions.
    fn sum(&self) -> u64 {
        self.params.iter().map(|param| param.version()).sum()
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

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
    pub(crate) fn ready(&self) -> Result<()> {
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
    pub(crate) fn submitted(&self) {
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
    pub(crate) fn failed(&self) {
        self.updated.iter().for_each(|param| param.break_off());
        self.store.moved();
    }
}

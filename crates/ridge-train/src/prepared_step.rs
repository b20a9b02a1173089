//! A training step of a model, before anything is on a device and without its data: the graph that is differentiated, the updates
//! of weights, the schedule, and the memory that it takes.

use std::collections::{BTreeMap, HashSet};

use ridge_graph::passes::{OpPrecision, RoutedLayer};
use ridge_graph::{Bindings, DType, Graph, Role, Type, passes};
use ridge_models::{BuildOptions, ModelConfig, training_bindings};
use ridge_runtime::{
    MemoryBytes, MemoryOwner, MemorySnapshot, ProgramCache, Schedule, Stage, Times, memory_snapshot, plan,
};

use crate::error::{Result, TrainError};
use crate::experts::{balance_biases, routed};
use crate::fp8;
use crate::mup::WidthScaling;
use crate::optimizer::{UpdateState, WeightUpdate, weight_updates};
use crate::recompute::RecomputeLevel;
use crate::settings::{Offload, OptimizerName, Precision, Settings};
use crate::step::{StepPlan, UPDATE, compensation_name, ema_name, master_name, trained_weights};

/// A step of a run.
pub struct PreparedStep {
    /// The settings.
    pub settings: Settings,
    /// The model.
    pub config: ModelConfig,
    /// The training graph, without dropout, z-loss and products in 8 bits: what losses are measured with.
    pub graph: Graph,
    /// The graph that is differentiated, with dropout and what is asked of routing.
    trained: Graph,
    /// Layers with experts.
    pub experts: Vec<RoutedLayer>,
    /// The updates of weights.
    pub updates: Vec<WeightUpdate>,
    /// What its backward pass computes again.
    pub recompute: RecomputeLevel,
    /// Its programs.
    pub schedule: Schedule,
}

/// A parameter of the session that a checkpoint holds.
#[derive(Clone, Debug, PartialEq)]
pub struct KeptState {
    /// Its name in a session.
    pub name: String,
    /// Its name in a checkpoint.
    pub saved: String,
    /// Its type, of constant shape.
    pub ty: Type,
    /// What every byte is at first; `None` of weights.
    pub fill: Option<u8>,
}

impl PreparedStep {
    /// Builds the graphs. Of the settings, those of data count but for its files.
    ///
    /// # Errors
    /// When a setting does not fit the model.
    pub fn new(settings: Settings, config: ModelConfig) -> Result<Self> {
        let length = settings.data.sequence_length;
        if length > config.max_context() {
            let why = format!("is more than the {} positions of the model; lower it", config.max_context());
            return Err(TrainError::setting("data.sequence_length", length, why));
        }
        let activations = settings.train.precision.dtype();
        let built = |z_loss: f64| {
            let options = BuildOptions { activations, cache: activations, z_loss, ..BuildOptions::default() };
            let module = config.build_training(&options)?;
            let stored = |_: &str, ty: &Type| Some(Type { dtype: activations, ..ty.clone() });
            Ok::<_, TrainError>(passes::retype(&module.graph, &stored)?)
        };
        let graph = built(0.0)?;
        let trained = if settings.train.z_loss > 0.0 { built(settings.train.z_loss)? } else { graph.clone() };
        let [tokens, _] = extents(&settings)?;
        let (trained, experts) = routed(trained, &settings.experts, config.model_type(), tokens)?;
        let mut kept = vec!["loss_sum", "target_count"];
        if !experts.is_empty() {
            kept.extend([passes::EXPERT_LOAD, passes::EXPERT_DROPPED]);
        }
        let [residual, attention] = [settings.model.dropout, settings.model.attention_dropout];
        let trained = if residual == 0.0 && attention == 0.0 {
            trained
        } else {
            let mut pruned = trained;
            passes::prune(&mut pruned, &kept)?;
            let places = passes::DropoutPlaces { residual, attention, scopes: &config.residual_scopes() };
            passes::with_dropout(&pruned, &places)?
        };
        let trained = fp8::with_products(trained, &kept, &settings.train)?;
        let weights = trained_weights(&graph);
        let role = |name: &str, rank: usize| config.weight_role(name, rank);
        let width = WidthScaling::new(&settings, &config, &weights)?;
        let mut updates = weight_updates(&weights, &settings.optimizer, width, role)?;
        balance_biases(&mut updates, &experts, settings.experts.bias_update_speed);
        let recompute = RecomputeLevel::of(settings.train.recomputation, &trained);
        let schedule = Schedule::default();
        let mut prepared = Self { settings, config, graph, trained, experts, updates, recompute, schedule };
        prepared.schedule = prepared.schedule_at(recompute, prepared.settings.train.offload)?;
        Ok(prepared)
    }

    /// The schedule of a step that recomputes and offloads so much.
    pub(crate) fn schedule_at(&self, recompute: RecomputeLevel, offload: Offload) -> Result<Schedule> {
        let Settings { train, optimizer, .. } = &self.settings;
        let (parts, ema) = (train.accumulation, optimizer.ema);
        let experts = self.experts.first().map(|layer| [self.experts.len(), layer.experts]);
        let (graph, updates, precision) = (&self.trained, &self.updates, train.precision);
        let fp8_history = train.fp8_history;
        let bindings = self.bindings()?;
        let offload = offload.has_activations().then_some(&bindings);
        let plan = StepPlan { graph, updates, precision, parts, ema, experts, fp8_history, recompute, offload };
        Ok(plan.schedule()?)
    }

    /// The extents of a micro-batch.
    ///
    /// # Errors
    /// When they cannot be counted.
    pub fn bindings(&self) -> Result<Bindings> {
        let [tokens, pairs] = extents(&self.settings)?;
        Ok(training_bindings(&self.graph, tokens, pairs))
    }

    /// Elements of the weights that are trained.
    pub fn parameters(&self) -> u64 {
        let elements =
            |update: &WeightUpdate| update.shape.as_const().map_or(0, |shape| shape.iter().product::<usize>());
        self.updates.iter().map(|update| elements(update) as u64).sum()
    }

    /// Parameters that a checkpoint holds, weights first.
    pub fn kept_states(&self) -> Vec<KeptState> {
        let mut kept = Vec::new();
        let precision = self.settings.train.precision;
        for update in &self.updates {
            let name = if precision.has_masters() { master_name(&update.name) } else { update.name.clone() };
            let dtype = if precision.has_masters() { DType::F32 } else { precision.dtype() };
            let ty = Type::tensor(dtype, update.shape.clone());
            kept.push(KeptState { name, saved: format!("weight.{}", update.name), ty, fill: None });
        }
        for update in self.updates.iter().filter(|update| update.rate_scale != 0.0) {
            for UpdateState { name, ty, fill } in update.op.states(&update.name, &update.shape) {
                kept.push(KeptState { saved: name.clone(), name, ty, fill: Some(fill) });
            }
            if precision == Precision::Bf16Kahan {
                let (name, ty) = (compensation_name(&update.name), Type::tensor(DType::BF16, update.shape.clone()));
                kept.push(KeptState { saved: name.clone(), name, ty, fill: Some(0) });
            }
            if self.settings.optimizer.ema > 0.0 {
                let (name, ty) = (ema_name(&update.name), Type::tensor(DType::F32, update.shape.clone()));
                kept.push(KeptState { saved: name.clone(), name, ty, fill: None });
            }
        }
        for arg in fp8::magnitudes(&self.trained) {
            let (history, ty) = fp8::history(arg, self.settings.train.fp8_history);
            for (name, ty) in [(arg.name.to_string(), arg.ty.clone()), (history, ty)] {
                kept.push(KeptState { saved: format!("fp8.{name}"), name, ty, fill: Some(0) });
            }
        }
        kept
    }

    /// The optimiser's name as settings have it.
    pub fn optimizer_name(&self) -> String {
        optimizer_name(self.settings.optimizer.name)
    }

    /// The states that are kept in memory of the host.
    pub fn on_host(&self) -> HashSet<&str> {
        on_host(&self.schedule, self.settings.train.offload)
    }

    /// What a run allocates: all parameters as states, and what the programs of steps and of validation need besides.
    /// Samples of text, if there are any, add the programs and the cache of an engine.
    ///
    /// # Errors
    /// When a program cannot be compiled.
    pub fn memory(&self, programs: &ProgramCache) -> Result<MemoryBytes> {
        self.memory_of(&self.schedule, self.settings.train.offload, programs)
    }

    /// [`PreparedStep::memory`] with another schedule and offloading.
    pub(crate) fn memory_of(
        &self,
        schedule: &Schedule,
        offload: Offload,
        programs: &ProgramCache,
    ) -> Result<MemoryBytes> {
        let bindings = self.bindings()?;
        let mut all = schedule.clone();
        let (graph, outputs) = (self.graph.clone(), EVALUATED.to_vec());
        all.stages.push(Stage { name: "evaluate", graph, outputs, times: Times::Once });
        let parameters = all.parameter_memory(&bindings, &**programs.backend(), &on_host(schedule, offload))?;
        let owners = [MemoryOwner::States, MemoryOwner::HostStates];
        let besides = all.memory(programs, &bindings)?;
        Ok(owners.into_iter().fold(besides, |memory, owner| memory.with(owner, parameters.get(owner))))
    }

    /// What the forward and backward pass of a micro-batch has in memory, launch by launch.
    ///
    /// # Errors
    /// When the program cannot be compiled.
    pub fn snapshot(&self, programs: &ProgramCache) -> Result<MemorySnapshot> {
        self.snapshot_of(&self.schedule, programs)
    }

    /// [`PreparedStep::snapshot`] with another schedule.
    pub(crate) fn snapshot_of(&self, schedule: &Schedule, programs: &ProgramCache) -> Result<MemorySnapshot> {
        let Some(stage) = schedule.stages.first() else { return Ok(MemorySnapshot::default()) };
        let program = programs.get(&stage.graph, &stage.outputs)?;
        let (lowered, bindings) = (program.graph(), self.bindings()?);
        Ok(memory_snapshot(lowered, &plan(lowered, &bindings)?, &bindings)?)
    }

    /// In which precision the programs of a step compute, by stage: each op at each choice of types, and how often it is applied.
    ///
    /// # Errors
    /// Those of the decomposition of an op.
    pub fn precisions(&self) -> Result<Vec<(&'static str, OpPrecisions)>> {
        let of = |stage: &Stage| Ok((stage.name, passes::op_precisions(&stage.graph)?));
        self.schedule.stages.iter().map(of).collect()
    }

    /// What a step keeps between its programs, by kind (`weights`, `master`, `gradient`, `optimizer.m` and so on): the dtypes
    /// that it is stored in, and bytes.
    ///
    /// # Errors
    /// When the shape of a state is not constant.
    pub fn stored(&self) -> Result<Vec<StoredKind>> {
        let mut kinds: BTreeMap<(String, DType), u64> = BTreeMap::new();
        let mut seen = HashSet::new();
        let bindings = self.bindings()?;
        let args = self.schedule.stages.iter().flat_map(|stage| &stage.graph.main().args);
        for arg in args.filter(|arg| matches!(arg.role, Role::Weight | Role::State) && seen.insert(&*arg.name)) {
            let of = |update: &WeightUpdate| arg.name.strip_suffix(update.name.as_str()).map(str::to_owned);
            let kind = self.updates.iter().find_map(of).unwrap_or_else(|| "other".to_owned());
            let kind = if kind.is_empty() { "weights".to_owned() } else { kind.trim_end_matches('.').to_owned() };
            let bytes = arg.ty.bytes().eval(&bindings).map_err(ridge_runtime::RuntimeError::from)?;
            *kinds.entry((kind, arg.ty.dtype)).or_default() += u64::try_from(bytes).unwrap_or(u64::MAX);
        }
        Ok(kinds.into_iter().map(|((kind, dtype), bytes)| StoredKind { kind, dtype, bytes }).collect())
    }
}

/// The states of a schedule that are kept in memory of the host.
fn on_host(schedule: &Schedule, offload: Offload) -> HashSet<&str> {
    match offload.has_optimizer() {
        true => schedule.states_of(UPDATE).collect(),
        false => HashSet::new(),
    }
}

/// Tokens of a micro-batch, and pairs of a token and one that it sees.
fn extents(settings: &Settings) -> Result<[usize; 2]> {
    let (sequences, length) = (settings.train.batch_size, settings.data.sequence_length);
    // Each token sees itself and those before it.
    let of_sequence = length as u128 * (length as u128 + 1) / 2;
    let extents = [length as u128, of_sequence].map(|of_one| of_one.checked_mul(sequences as u128));
    let counted = |count: Option<u128>, max: usize| usize::try_from(count?).ok().filter(|count| *count <= max);
    match (counted(extents[0], MAX_TOKENS), counted(extents[1], MAX_PAIRS)) {
        (Some(tokens), Some(pairs)) => Ok([tokens, pairs]),
        _ => {
            let why =
                format!("is too many sequences of {length} tokens for a micro-batch; lower it or data.sequence_length");
            Err(TrainError::setting("train.batch_size", sequences, why))
        }
    }
}

/// Tokens of a micro-batch: bytes of values with an element for each and each token of a vocabulary can be counted.
const MAX_TOKENS: usize = 1 << 40;
/// Pairs of tokens of a micro-batch: one sequence of 20 million tokens has fewer.
const MAX_PAIRS: usize = 1 << 48;

/// The output of the training graph that losses are measured by.
pub(crate) const EVALUATED: [&str; 1] = ["loss_sum"];

/// Ops with how often each is applied.
pub type OpPrecisions = Vec<(OpPrecision, usize)>;

/// Parameters of one kind and dtype.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredKind {
    /// What they are, such as `weights`, `master` or `gradient`.
    pub kind: String,
    /// Their dtype.
    pub dtype: DType,
    /// Bytes of all.
    pub bytes: u64,
}

fn optimizer_name(name: OptimizerName) -> String {
    serde_json::to_value(name).ok().and_then(|name| name.as_str().map(str::to_owned)).unwrap_or_default()
}

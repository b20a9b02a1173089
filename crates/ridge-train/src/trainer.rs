//! A run on one device: its weights and states, single steps, losses, samples, checkpoints. `run.rs` is the loop.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use ridge_engine::{Engine, EngineOptions, Request, Sampling};
use ridge_graph::passes::{EXPERT_DROPPED, EXPERT_LOAD};
use ridge_graph::{Builder, DType, Role, Type, passes};
use ridge_models::BuildOptions;
use ridge_runtime::{
    BoundSchedule, Bucket, ProgramCache, RuntimeError, ScheduleDriver, Session, StageInputs, StageOutputs,
};

use crate::checkpoint::{self, CheckpointInfo, SavedState, SavedTensor, Snapshot};
use crate::data::{Batch, Batches};
use crate::error::{Result, TrainError};
use crate::experts::{ExpertLoads, LayerUse};
use crate::guard::{LossScale, LossStatistics, Refusal};
use crate::loading::{load_initial, load_saved};
use crate::prepare::Prepared;
use crate::prepared_step::{EVALUATED, KeptState};
use crate::rate::learning_rate;
use crate::same_run::check_same_run;
use crate::settings::{Precision, TrainSettings, shown_settings};
use crate::step::{
    ACCUMULATE, FIRST, GRADIENT_NORM, GRADIENT_SCALE, LEARNING_RATE, LOSS, LOSS_SCALE, REDUCE, UPDATE, UPDATE_NUMBER,
};
use crate::stop::check_stop;

/// A run whose weights are on a device.
pub struct Trainer {
    prepared: Prepared,
    session: Session,
    kept: Vec<KeptState>,
    schedule: BoundSchedule,
    evaluate: Bucket,
    batches: Batches,
    /// The micro-batches of a step.
    parts: Vec<Batch>,
    engine: Option<Engine>,
    fingerprint: u64,
    progress: RunProgress,
    loads: ExpertLoads,
}

/// How far a run is.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunProgress {
    /// Steps that were made.
    pub step: u64,
    /// Updates that were made: steps less those that were refused.
    pub updates: u64,
    /// Losses so far.
    pub losses: LossStatistics,
    /// What the loss is multiplied by in f16.
    pub loss_scale: LossScale,
    /// The lowest validation loss so far.
    pub best_validation: Option<f64>,
}

/// What a step came to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepResult {
    /// The mean loss over its targets, before its update.
    pub loss: f64,
    /// The norm of its gradient, before clipping.
    pub gradient_norm: f64,
    /// Its learning rate.
    pub learning_rate: f64,
    /// Why its update was not made.
    pub refusal: Option<Refusal>,
}

impl Trainer {
    /// Brings the weights to the device of `programs`, which is where the programs of the run are compiled: those of `saved`, else
    /// those that the settings name, else initial ones.
    ///
    /// # Errors
    /// When memory runs out, a checkpoint is of another model or run, or a weight holds what is no number;
    /// [`TrainError::Stopped`] when `stop` is set meanwhile.
    pub fn new(
        prepared: Prepared,
        programs: Arc<ProgramCache>,
        saved: Option<&SavedState>,
        stop: &AtomicBool,
    ) -> Result<Self> {
        let settings = &prepared.step.settings;
        let kept = prepared.step.kept_states();
        let fingerprint = prepared.corpus.fingerprint();
        let mut batches = Batches::new(&prepared.corpus, &settings.data, settings.train.seed)?;
        let mut session = Session::sharing(programs);
        session.keep_states_on_host(prepared.step.on_host());
        if let Some(saved) = saved {
            check_same_run(&prepared, saved, fingerprint)?;
        }
        // Where updates write. All is zeros there, and what begins otherwise is loaded into it.
        let bindings = prepared.step.bindings()?;
        for stage in &prepared.step.schedule.stages {
            check_stop(stop)?;
            session.allocate_states(&stage.graph, &bindings)?;
        }
        let mut progress = RunProgress::default();
        match saved {
            Some(saved) => {
                load_saved(&mut session, &prepared, &kept, saved, stop)?;
                progress = restored(&saved.info);
                batches.seek(saved.info.position.clone())?;
            }
            None => load_initial(&mut session, &prepared, &kept, stop)?,
        }
        check_stop(stop)?;
        let schedule = prepared.step.schedule.bind(&mut session, &bindings)?;
        check_stop(stop)?;
        let evaluate = session.compile(&prepared.step.graph, &EVALUATED)?.bucket(&bindings)?;
        check_stop(stop)?;
        let parts = vec![Batch::default(); settings.train.accumulation];
        let loads = ExpertLoads::new(&prepared.step.experts);
        let engine = None;
        Ok(Self { prepared, session, kept, schedule, evaluate, batches, parts, engine, fingerprint, progress, loads })
    }

    /// What is known of the run.
    pub fn prepared(&self) -> &Prepared {
        &self.prepared
    }

    /// How far it is.
    pub fn progress(&self) -> &RunProgress {
        &self.progress
    }

    /// The session that holds the weights: an engine on [`Session::share`] of it reads them as they are trained.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Passes over the data so far.
    pub fn epochs(&self) -> f64 {
        self.batches.epochs()
    }

    /// Makes the next step.
    ///
    /// # Errors
    /// When the device fails.
    pub fn step(&mut self) -> Result<StepResult> {
        let Self { prepared, schedule, batches, parts, progress, loads, .. } = self;
        let settings = &prepared.step.settings;
        for part in parts.iter_mut() {
            batches.next(settings.train.batch_size, part);
        }
        let rate = learning_rate(&settings.optimizer, progress.step, settings.train.steps);
        let mut driver = StepDriver {
            settings: &settings.train,
            targets: parts.iter().map(Batch::target_count).sum::<usize>().max(1),
            parts,
            progress,
            loads,
            rate,
            scale: 1.0,
            loss_scale: 1.0,
            result: None,
        };
        if settings.train.precision == Precision::F16 {
            driver.loss_scale = driver.progress.loss_scale.scale;
        }
        schedule.pass(driver.parts.len(), &mut driver)?;
        schedule.wait()?;
        let Some(result) = driver.result else { unreachable!("the schedule has a stage with outputs") };
        progress.step += 1;
        if result.refusal.is_none() {
            progress.updates += 1;
        }
        Ok(result)
    }

    /// How evenly the experts of each layer were used since this was last asked; empty for a model without.
    pub fn take_expert_use(&mut self) -> Vec<LayerUse> {
        self.loads.take(&self.prepared.step.settings.experts)
    }

    /// The mean loss on the data that is set aside; `None` if there is none.
    ///
    /// # Errors
    /// When the device fails.
    pub fn validate(&mut self) -> Result<Option<f64>> {
        let settings = &self.prepared.step.settings;
        let (parts, sequences) = (settings.validation.batches, settings.train.batch_size);
        let mut batch = Batch::default();
        let (mut sum, mut targets) = (0.0, 0);
        for part in 0..parts {
            if !self.batches.validation(part, parts, sequences, &mut batch) {
                break;
            }
            for (name, values) in inputs(&batch) {
                if let Some(index) = self.evaluate.input_index(name)? {
                    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                    self.evaluate.input(index).copy_from_slice(&bytes);
                }
            }
            self.evaluate.submit()?;
            self.evaluate.wait()?;
            sum += self.evaluate.tensor(EVALUATED[0])?.floats()[0];
            targets += batch.target_count();
        }
        Ok((targets > 0).then(|| sum / targets as f64))
    }

    /// Remembers a validation loss; true if it is the lowest so far.
    pub fn note_validation(&mut self, loss: f64) -> bool {
        let is_best = self.progress.best_validation.is_none_or(|best| loss < best);
        if is_best {
            self.progress.best_validation = Some(loss);
        }
        is_best
    }

    /// Text that the model writes behind the prompt of the settings, with that prompt: from the weights as they are, in the
    /// session that trains them.
    ///
    /// # Errors
    /// When the prompt has a character that the vocabulary lacks, or the device fails.
    pub fn sample(&mut self) -> Result<String> {
        let settings = &self.prepared.step.settings.sample;
        let vocabulary = &self.prepared.corpus.vocabulary;
        let mut prompt = Vec::new();
        vocabulary.encode("sample.prompt", &settings.prompt, &mut prompt)?;
        if prompt.is_empty() {
            return Err(TrainError::setting("sample.prompt", "\"\"", "must have a token or more"));
        }
        let context = self.prepared.step.config.max_context().min(prompt.len() + settings.tokens);
        let engine = match &mut self.engine {
            Some(engine) => engine,
            None => {
                let activations = self.activations();
                let options = BuildOptions { activations, cache: activations, ..BuildOptions::default() };
                let mut model = self.prepared.step.config.build(&options)?;
                let stored = |_: &str, ty: &Type| Some(Type { dtype: activations, ..ty.clone() });
                model.module.graph = passes::retype(&model.module.graph, &stored)?;
                let options = EngineOptions { context, sequences: 1, chunk: prompt.len().max(16), blocks: None };
                self.engine.insert(Engine::new(self.session.share(), &model, options)?)
            }
        };
        let sampling = Sampling {
            temperature: settings.temperature as f32,
            seed: self.prepared.step.settings.train.seed ^ self.progress.step,
            ..Sampling::GREEDY
        };
        let max_tokens = settings.tokens.min(context.saturating_sub(prompt.len())).max(1);
        let stop_tokens = vocabulary.end_of_text().into_iter().collect();
        let request = Request { prompt: prompt.clone(), sampling, max_tokens, stop_tokens };
        let mut tokens = prompt;
        tokens.extend(engine.generate(&request, |_| ControlFlow::Continue(()))?.tokens);
        let known = vocabulary.size() as u32;
        tokens.retain(|token| *token < known);
        Ok(vocabulary.tokenizer().decode(&tokens, true)?)
    }

    /// All of a checkpoint, copied to the host.
    ///
    /// # Errors
    /// When the device fails.
    pub fn snapshot(&self) -> Result<Snapshot> {
        let tensor = |kept: &KeptState| {
            Ok(SavedTensor {
                name: kept.saved.clone(),
                dtype: kept.ty.dtype,
                shape: kept.ty.shape.as_const().unwrap_or_default(),
                bytes: self.read(&kept.name)?,
            })
        };
        let RunProgress { step, updates, losses, loss_scale, best_validation } = self.progress.clone();
        Ok(Snapshot {
            info: CheckpointInfo {
                format: CheckpointInfo::format(),
                step,
                updates,
                position: self.batches.position().clone(),
                data_fingerprint: self.fingerprint,
                model: self.prepared.config_json.clone(),
                optimizer: self.prepared.step.optimizer_name(),
                seed: self.prepared.step.settings.train.seed,
                losses,
                loss_scale,
                best_validation,
                sha256: String::new(),
            },
            tensors: self.kept.iter().map(tensor).collect::<Result<_>>()?,
            tokenizer: self.prepared.corpus.vocabulary.json().to_owned(),
            settings: shown_settings(&self.prepared.step.settings),
        })
    }

    /// Goes back to a checkpoint of this run, and on with the data behind the last step.
    ///
    /// # Errors
    /// When it is of another run, or the device fails.
    pub fn roll_back(&mut self, saved: &SavedState) -> Result<()> {
        check_same_run(&self.prepared, saved, self.fingerprint)?;
        load_saved(&mut self.session, &self.prepared, &self.kept, saved, &AtomicBool::new(false))?;
        let refused = self.progress.losses.refused;
        self.progress = restored(&saved.info);
        self.progress.losses.refused = refused;
        Ok(())
    }

    /// The weights as a safetensors file under the names of the graph: as they are stored, or their running means.
    pub(crate) fn weights(&self, means: bool) -> Result<Vec<u8>> {
        let dtype = self.activations();
        let tensor = |arg: &ridge_graph::Arg| {
            let mean = crate::step::ema_name(&arg.name);
            let bytes = match means && self.session.state(&mean).is_some() {
                true => dtype.encode(DType::F32.decode(&self.read(&mean)?)),
                false => self.read(&arg.name)?,
            };
            let shape = arg.ty.shape.as_const().unwrap_or_default();
            Ok(SavedTensor { name: arg.name.to_string(), dtype: arg.ty.dtype, shape, bytes })
        };
        let tensors = self.prepared.step.graph.args(Role::Weight).map(tensor).collect::<Result<Vec<_>>>()?;
        Ok(checkpoint::tensor_bytes(&tensors))
    }

    fn activations(&self) -> DType {
        self.prepared.step.settings.train.precision.dtype()
    }

    fn read(&self, name: &str) -> Result<Vec<u8>> {
        let unknown = || RuntimeError::Argument { kind: "state", name: name.into(), why: "is not allocated".into() };
        let buffer = self.session.state(name).ok_or_else(unknown)?;
        Ok(self.session.backend().read(&buffer)?)
    }
}

fn inputs(batch: &Batch) -> [(&'static str, &[i32]); 4] {
    let Batch { token_ids, positions, seq_ids, targets } = batch;
    [("token_ids", token_ids), ("positions", positions), ("seq_ids", seq_ids), ("targets", targets)]
}

struct StepDriver<'a> {
    settings: &'a TrainSettings,
    parts: &'a [Batch],
    /// Targets of all parts.
    targets: usize,
    progress: &'a mut RunProgress,
    loads: &'a mut ExpertLoads,
    rate: f64,
    /// What clipping multiplies the gradient by.
    scale: f64,
    /// What the loss is multiplied by.
    loss_scale: f64,
    result: Option<StepResult>,
}

impl ScheduleDriver for StepDriver<'_> {
    type Error = RuntimeError;

    fn fill(&mut self, stage: &'static str, part: usize, to: &mut StageInputs<'_>) -> Result<(), RuntimeError> {
        match stage {
            ACCUMULATE => {
                for (name, values) in inputs(&self.parts[part]) {
                    if to.has(name) {
                        to.set_i32(name, values)?;
                    }
                }
                to.set_scalar(LOSS_SCALE, DType::F32, self.loss_scale / self.targets as f64)?;
                if to.has(FIRST) {
                    to.set_scalar(FIRST, DType::F32, if part == 0 { 1.0 } else { 0.0 })?;
                }
                self.fill_random(part, to)
            }
            UPDATE => {
                self.fill_random(0, to)?;
                to.set_scalar(LEARNING_RATE, DType::F32, self.rate)?;
                to.set_scalar(UPDATE_NUMBER, DType::F32, (self.progress.updates + 1) as f64)?;
                to.set_scalar(GRADIENT_SCALE, DType::F32, self.scale / self.loss_scale)
            }
            _ => Ok(()),
        }
    }

    fn done(&mut self, stage: &'static str, outputs: &mut StageOutputs<'_>) -> Result<ControlFlow<()>, RuntimeError> {
        debug_assert_eq!(stage, REDUCE);
        let [loss, gradient_norm] =
            [LOSS, GRADIENT_NORM].map(|name| outputs.f32s(name).map(|values| f64::from(values[0])));
        if self.loads.has_layers() {
            let tokens = self.parts.iter().map(|part| part.token_ids.len()).sum();
            self.loads.add(&outputs.f32s(EXPERT_LOAD)?, &outputs.f32s(EXPERT_DROPPED)?, tokens);
        }
        let (loss, gradient_norm) = (loss? / self.loss_scale, gradient_norm? / self.loss_scale);
        let mut overflow = None;
        if self.settings.precision == Precision::F16 && loss.is_finite() {
            if gradient_norm.is_finite() {
                self.progress.loss_scale.held();
            } else {
                overflow = self.progress.loss_scale.overflowed();
            }
        }
        let judged = || self.progress.losses.judge(loss, gradient_norm, self.settings).err();
        let refusal = overflow.or_else(judged);
        if self.settings.clip > 0.0 && gradient_norm > self.settings.clip {
            self.scale = self.settings.clip / gradient_norm;
        }
        self.result = Some(StepResult { loss, gradient_norm, learning_rate: self.rate, refusal });
        Ok(if refusal.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    }
}

impl StepDriver<'_> {
    fn fill_random(&self, part: usize, to: &mut StageInputs<'_>) -> Result<(), RuntimeError> {
        if !to.has(Builder::RANDOM_SEED) {
            return Ok(());
        }
        let number = self.progress.step * self.parts.len() as u64 + part as u64;
        to.set_scalar(Builder::RANDOM_SEED, DType::I64, self.settings.seed as f64)?;
        to.set_scalar(Builder::RANDOM_STEP, DType::I64, number as f64)
    }
}

fn restored(info: &CheckpointInfo) -> RunProgress {
    RunProgress {
        step: info.step,
        updates: info.updates,
        losses: info.losses,
        loss_scale: info.loss_scale,
        best_validation: info.best_validation,
    }
}

/// The folder of a run's checkpoints.
pub fn checkpoints_of(folder: &Path) -> std::path::PathBuf {
    folder.join("checkpoints")
}

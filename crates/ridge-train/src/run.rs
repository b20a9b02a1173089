//! The loop of a run: steps, reports, validation, samples, checkpoints, and the export at its end.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use ridge_runtime::{Backend, ProgramCache};

use crate::admission::FreeMemory;
use crate::checkpoint::{self, CheckpointWriter, SavedState};
use crate::error::{Result, TrainError, io_error};
use crate::export::{check_writable, export, lacking, remove_empty};
use crate::guard::Refusal;
use crate::loading::initial_source;
use crate::log::{LOG, Logs, RunEnded, StepReport, TrainEvent};
use crate::prepare::Prepared;
use crate::settings::{Guard, Settings};
use crate::trainer::{StepResult, Trainer, checkpoints_of};

/// How a run ended.
#[derive(Clone, Debug, PartialEq)]
pub enum RunEnd {
    /// All steps were made.
    Finished {
        /// The last validation loss.
        validation: Option<f64>,
        /// Where the model was exported to.
        exported: Option<PathBuf>,
    },
    /// It was asked to stop, and saved.
    Stopped {
        /// Steps that were made.
        step: u64,
    },
    /// It was asked to stop before it had made a step. It saved nothing; the checkpoint that it continues from is as it was.
    StoppedBeforeFirstStep,
}

/// Trains as `settings` say on `backend`, until all steps are made or `stop` is set: then it saves what steps were made and returns.
/// Before the first one it has written nothing, and returns as soon as a call that cannot be interrupted has ended: a compilation, a request to
/// a server, the tokenisation of one text. `free` says how much memory there is, and is asked before any weight is made. `observe` learns what happens.
///
/// # Errors
/// When data, model, checkpoint or folder cannot be used, the run does not fit into memory, the device fails, or the loss diverges.
/// Checkpoints that are complete stay as they are.
pub fn train(
    settings: Settings,
    backend: Arc<dyn Backend>,
    free: &dyn Fn() -> FreeMemory,
    stop: &AtomicBool,
    observe: &mut dyn FnMut(&TrainEvent),
) -> Result<RunEnd> {
    let folder = settings.checkpoint.folder.clone();
    check_writable(&folder)?;
    match begin(settings, backend, free, stop) {
        Err(TrainError::Stopped) => Ok(RunEnd::StoppedBeforeFirstStep),
        // Nothing is on disk yet.
        Ok(_) if stop.load(Ordering::SeqCst) => Ok(RunEnd::StoppedBeforeFirstStep),
        begun => logged(&folder, begun?, stop, observe),
    }
}

/// A run before its first step: nothing of it is on disk.
struct Begun {
    settings: Settings,
    /// With the weights on the device. A run that fails while these are made is one that servers of logs learn of.
    trainer: Result<Trainer>,
    notes: Vec<String>,
}

/// Everything in front of the first step that may take long.
fn begin(
    settings: Settings,
    backend: Arc<dyn Backend>,
    free: &dyn Fn() -> FreeMemory,
    stop: &AtomicBool,
) -> Result<Begun> {
    let (saved, mut notes) = resumed(&settings, stop)?;
    let mut prepared = Prepared::new(settings, stop)?;
    if saved.is_none() {
        // Before anything is compiled.
        initial_source(&prepared)?;
    }
    prepared.step.fit(&backend, stop)?;
    let programs = Arc::new(ProgramCache::new(backend));
    notes.extend(prepared.step.admit(&programs, free(), stop)?);
    if prepared.step.settings.train.memory.is_some() {
        let (recompute, offload) = (prepared.step.recompute, prepared.step.settings.train.offload);
        notes.push(format!(
            "to fit into train.memory, the backward pass recomputes {recompute}, and train.offload is {offload}"
        ));
    }
    let settings = prepared.step.settings.clone();
    match Trainer::new(prepared, programs, saved.as_ref(), stop) {
        Err(TrainError::Stopped) => Err(TrainError::Stopped),
        trainer => Ok(Begun { settings, trainer, notes }),
    }
}

/// The run from its first step on, between the opening and the closing of its logs.
fn logged(folder: &Path, begun: Begun, stop: &AtomicBool, observe: &mut dyn FnMut(&TrainEvent)) -> Result<RunEnd> {
    let lacking = lacking(folder);
    std::fs::create_dir_all(folder).map_err(|cause| io_error(folder, "make the folder", &cause))?;
    let mut logs = Logs::open(folder, &begun.settings)?;
    let mut tell = |logs: &mut Logs, event: TrainEvent| {
        let notes = logs.notes().into_iter().map(|text| TrainEvent::Note { text });
        notes.chain([event]).try_for_each(|event| {
            observe(&event);
            logs.write(&event)
        })
    };
    let end = run(begun, stop, &mut logs, &mut tell);
    let closed = logs.close(match &end {
        Ok(RunEnd::Finished { .. }) => RunEnded::Finished,
        Ok(RunEnd::Stopped { .. } | RunEnd::StoppedBeforeFirstStep) => RunEnded::Stopped,
        Err(_) => RunEnded::Failed,
    });
    // The run's own error says more than one of a log.
    let notes = logs.notes().into_iter().try_for_each(|text| tell(&mut logs, TrainEvent::Note { text }));
    if end.is_err() {
        // Of a run that failed before its first event nothing is left.
        let log = folder.join(LOG);
        if std::fs::metadata(&log).is_ok_and(|log| log.len() == 0) && std::fs::remove_file(log).is_ok() {
            remove_empty(&lacking);
        }
    }
    let end = end?;
    closed.and(notes).map(|()| end)
}

fn run(begun: Begun, stop: &AtomicBool, logs: &mut Logs, tell: Tell<'_>) -> Result<RunEnd> {
    for text in begun.notes {
        tell(logs, TrainEvent::Note { text })?;
    }
    let trainer = begun.trainer?;
    let prepared = trainer.prepared();
    let tokens = prepared.corpus.train.iter().map(|tokens| tokens.len() as u64).sum();
    let (parameters, step) = (prepared.step.parameters(), trainer.progress().step);
    tell(logs, TrainEvent::Started { step, parameters, tokens })?;
    Run::new(trainer, logs).until_end(stop, tell)
}

/// The checkpoint that `checkpoint.resume` names, and notes about damaged ones.
fn resumed(settings: &Settings, stop: &AtomicBool) -> Result<(Option<SavedState>, Vec<String>)> {
    let folder = checkpoints_of(&settings.checkpoint.folder);
    match settings.checkpoint.resume.as_str() {
        "auto" => {
            let (saved, damaged) = checkpoint::latest(&folder, stop)?;
            Ok((saved, damaged.iter().map(|error| format!("passed over a checkpoint: {error}")).collect()))
        }
        "never" => match checkpoint::numbered(&folder)?.is_empty() {
            true => Ok((None, Vec::new())),
            false => {
                let remedy = "continue it with checkpoint.resume = auto, or give another checkpoint.folder";
                Err(TrainError::path(folder, "it holds the checkpoints of a run", remedy))
            }
        },
        path => Ok((Some(checkpoint::open(Path::new(path), stop)?), Vec::new())),
    }
}

struct Run<'a> {
    trainer: Trainer,
    logs: &'a mut Logs,
    writer: CheckpointWriter,
    /// FLOPs of a step.
    flops: Option<f64>,
    /// FLOP/s of the device.
    peak: Option<f64>,
    /// When the last report was made, and behind which step; time for all else is taken out.
    reported: (Instant, u64),
    /// Steps that were made here in seconds.
    spent: (u64, f64),
    rollbacks: u64,
    /// Layers whose experts had collapsed at the last report.
    collapsed: Vec<String>,
}

type Tell<'a> = &'a mut dyn FnMut(&mut Logs, TrainEvent) -> Result<()>;

impl<'a> Run<'a> {
    fn new(trainer: Trainer, logs: &'a mut Logs) -> Self {
        let prepared = trainer.prepared();
        let folder = checkpoints_of(&prepared.step.settings.checkpoint.folder);
        let writer = CheckpointWriter::new(folder, prepared.step.settings.checkpoint.clone(), None);
        // The backward pass has two products for each of the forward pass.
        let bindings = prepared.step.bindings().ok();
        let forward = bindings.and_then(|bindings| prepared.step.graph.cost().matrix_flops.eval(&bindings).ok());
        let flops = forward.map(|forward| 3.0 * forward as f64 * prepared.step.settings.train.accumulation as f64);
        let peak = trainer.session().backend().kernels().first().map(|kernel| kernel.target.flops_per_second);
        let step = trainer.progress().step;
        let reported = (Instant::now(), step);
        Self { trainer, logs, writer, flops, peak, reported, spent: (0, 0.0), rollbacks: 0, collapsed: Vec::new() }
    }

    fn settings(&self) -> &Settings {
        &self.trainer.prepared().step.settings
    }

    fn until_end(&mut self, stop: &AtomicBool, tell: Tell<'_>) -> Result<RunEnd> {
        let steps = self.settings().train.steps;
        let (mut validation, mut has_stepped) = (None, false);
        while self.trainer.progress().step < steps {
            if stop.load(Ordering::Relaxed) {
                if !has_stepped {
                    return Ok(RunEnd::StoppedBeforeFirstStep);
                }
                self.save(false, tell)?;
                self.writer.wait()?;
                return Ok(RunEnd::Stopped { step: self.trainer.progress().step });
            }
            has_stepped = true;
            let result = self.trainer.step()?;
            let step = self.trainer.progress().step;
            if let Some(refusal) = result.refusal {
                self.refused(refusal, tell)?;
                if self.trainer.progress().step != step {
                    continue;
                }
            }
            self.after_step(step, &result, &mut validation, tell)?;
        }
        if validation.is_none() {
            validation = self.trainer.validate()?;
        }
        self.writer.wait()?;
        let folder = self.settings().checkpoint.folder.join("model");
        let mut exported = None;
        if self.settings().checkpoint.export {
            export(&self.trainer, &folder, false)?;
            if self.settings().optimizer.ema > 0.0 {
                export(&self.trainer, &folder.with_file_name("model-ema"), true)?;
            }
            tell(self.logs, TrainEvent::Exported { folder: folder.display().to_string() })?;
            exported = Some(folder);
        }
        Ok(RunEnd::Finished { validation, exported })
    }

    /// Reports, losses, samples and checkpoints that are due behind `step`.
    fn after_step(&mut self, step: u64, result: &StepResult, last: &mut Option<f64>, tell: Tell<'_>) -> Result<()> {
        let Settings { train, validation, sample, checkpoint, log, .. } = self.settings().clone();
        let is_last = step == train.steps;
        let is_due = |every: u64| every > 0 && step.is_multiple_of(every);
        if is_due(log.every) || is_last || step == 1 {
            let report = self.report(result);
            tell(self.logs, TrainEvent::Step(report))?;
            self.report_experts(step, tell)?;
        }
        let mut is_best = false;
        if is_due(validation.every) || is_last && validation.every > 0 {
            *last = None;
            if let Some(loss) = self.trainer.validate()? {
                is_best = self.trainer.note_validation(loss);
                *last = Some(loss);
                tell(self.logs, TrainEvent::Validation { step, loss, best: is_best })?;
            }
        }
        if is_due(sample.every) {
            let text = self.trainer.sample()?;
            tell(self.logs, TrainEvent::Sample { step, text })?;
        }
        if is_due(checkpoint.every) || is_last {
            self.save(is_best, tell)?;
        }
        if is_due(validation.every) || is_due(sample.every) || is_due(checkpoint.every) {
            // What is not training is not counted.
            if self.reported.1 == step {
                self.reported.0 = Instant::now();
            }
        }
        Ok(())
    }

    /// How evenly experts were used, with an alarm for each layer that collapsed since the last report.
    fn report_experts(&mut self, step: u64, tell: Tell<'_>) -> Result<()> {
        let layers = self.trainer.take_expert_use();
        if layers.is_empty() {
            return Ok(());
        }
        let before = std::mem::take(&mut self.collapsed);
        self.collapsed = layers.iter().filter(|used| used.collapsed).map(|used| used.layer.clone()).collect();
        let new: Vec<_> =
            layers.iter().filter(|used| used.collapsed && !before.contains(&used.layer)).cloned().collect();
        tell(self.logs, TrainEvent::Experts { step, layers })?;
        new.into_iter().try_for_each(|used| tell(self.logs, TrainEvent::ExpertCollapse { step, used }))
    }

    fn save(&mut self, is_best: bool, tell: Tell<'_>) -> Result<()> {
        // The copy of the checkpoint before is freed first.
        self.writer.wait()?;
        let snapshot = self.trainer.snapshot()?;
        let step = snapshot.info.step;
        self.writer.begin(snapshot, is_best)?;
        tell(self.logs, TrainEvent::Checkpoint { step })
    }

    fn report(&mut self, result: &StepResult) -> StepReport {
        let settings = self.settings();
        let (steps, train) = (settings.train.steps, &settings.train);
        let tokens = (train.batch_size * train.accumulation * settings.data.sequence_length) as f64;
        let step = self.trainer.progress().step;
        let (since, before) = self.reported;
        let (made, seconds) = (step.saturating_sub(before), since.elapsed().as_secs_f64());
        self.reported = (Instant::now(), step);
        // The first step compiles and touches memory for the first time.
        if step > 1 {
            self.spent = (self.spent.0 + made, self.spent.1 + seconds);
        }
        let each = if self.spent.0 > 0 { self.spent.1 / self.spent.0 as f64 } else { seconds };
        let rate = made as f64 / seconds.max(1e-9);
        let memory = self.trainer.session().backend().memory().live.on_device();
        StepReport {
            step,
            steps,
            loss: result.loss,
            gradient_norm: result.gradient_norm,
            learning_rate: result.learning_rate,
            tokens_per_second: rate * tokens,
            mfu: self.flops.zip(self.peak).map(|(flops, peak)| flops * rate / peak),
            memory_bytes: memory as u64,
            epoch: self.trainer.epochs(),
            seconds_left: each * (steps - step) as f64,
        }
    }

    fn refused(&mut self, refusal: Refusal, tell: Tell<'_>) -> Result<()> {
        let progress = self.trainer.progress();
        let (step, in_a_row) = (progress.step, progress.losses.refused);
        let (guard, patience) = (self.settings().train.guard, self.settings().train.patience);
        tell(self.logs, TrainEvent::Refused { step, why: refusal.to_string() })?;
        if matches!(refusal, Refusal::Overflow(_)) {
            return Ok(());
        }
        let diverged = |problem: String| TrainError::Diverged {
            step,
            problem,
            remedy: "lower optimizer.learning_rate, lengthen optimizer.warmup, or continue from an older checkpoint"
                .to_owned(),
        };
        match guard {
            Guard::Stop => Err(diverged(refusal.to_string())),
            _ if in_a_row >= patience => {
                Err(diverged(format!("{refusal}, and {in_a_row} steps in a row were refused")))
            }
            Guard::Skip => Ok(()),
            Guard::Rollback => {
                self.rollbacks += 1;
                if self.rollbacks > patience {
                    return Err(diverged(format!("{refusal}, and the run was rolled back {patience} times")));
                }
                self.writer.wait()?;
                let (saved, _) = checkpoint::latest(self.writer.folder(), &AtomicBool::new(false))?;
                let Some(saved) = saved else { return Ok(()) };
                self.trainer.roll_back(&saved)?;
                self.reported = (Instant::now(), saved.info.step);
                tell(self.logs, TrainEvent::RolledBack { step: saved.info.step })
            }
        }
    }
}

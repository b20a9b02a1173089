//! The log files of a run.

use std::path::Path;

use super::event::TrainEvent;
use super::jsonl::JsonLines;
use super::tensorboard::EventFile;
use crate::error::Result;
use crate::settings::LogSettings;

/// The log files of a run.
pub struct Logs {
    jsonl: Option<JsonLines>,
    tensorboard: Option<EventFile>,
}

impl Logs {
    /// Those that `settings` asks for, in the folder of the run.
    ///
    /// # Errors
    /// When one cannot be written.
    pub fn open(folder: &Path, settings: &LogSettings) -> Result<Self> {
        let jsonl = settings.jsonl.then(|| JsonLines::open(&folder.join("log.jsonl"))).transpose()?;
        let tensorboard = settings.tensorboard.then(|| EventFile::create(&folder.join("tensorboard"))).transpose()?;
        Ok(Self { jsonl, tensorboard })
    }

    /// Logs an event.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&mut self, event: &TrainEvent) -> Result<()> {
        if let Some(jsonl) = &mut self.jsonl {
            jsonl.write(event)?;
        }
        let Some(file) = &mut self.tensorboard else { return Ok(()) };
        match event {
            TrainEvent::Step(report) => {
                file.scalar(report.step, "train/loss", report.loss)?;
                file.scalar(report.step, "train/gradient_norm", report.gradient_norm)?;
                file.scalar(report.step, "train/learning_rate", report.learning_rate)?;
                file.scalar(report.step, "train/tokens_per_second", report.tokens_per_second)
            }
            TrainEvent::Experts { step, layers } => layers.iter().try_for_each(|layer| {
                let of = |what: &str| format!("experts/{}/{what}", layer.layer);
                file.scalar(*step, &of("entropy"), layer.entropy)?;
                file.scalar(*step, &of("max_load"), layer.max_load)?;
                file.scalar(*step, &of("dead"), layer.dead as f64)?;
                file.scalar(*step, &of("dropped"), layer.dropped)
            }),
            TrainEvent::Validation { step, loss, .. } => file.scalar(*step, "validation/loss", *loss),
            _ => Ok(()),
        }
    }
}

//! The log files of a run.

use std::path::Path;

use serde_json::Value;
use sha2::{Digest as _, Sha256};

use super::event::{RunEnded, TrainEvent};
use super::jsonl::{JsonLines, seconds};
use super::mlflow::MlflowRun;
use super::numbers::numbers;
use super::tensorboard::EventFile;
use super::wandb::WandbRun;
use crate::error::{Result, io_error};
use crate::settings::{LogSettings, Settings};

/// The log files of a run.
pub struct Logs {
    jsonl: Option<JsonLines>,
    tensorboard: Option<EventFile>,
    mlflow: Option<MlflowRun>,
    wandb: Option<WandbRun>,
}

impl Logs {
    /// Those that `settings` asks for: in the folder of the run, and in the file store of MLflow.
    ///
    /// # Errors
    /// When one cannot be written.
    pub fn open(folder: &Path, settings: &Settings) -> Result<Self> {
        let LogSettings { jsonl, tensorboard, mlflow, wandb, .. } = &settings.log;
        let jsonl = jsonl.then(|| JsonLines::open(&folder.join("log.jsonl"))).transpose()?;
        let tensorboard = tensorboard.then(|| EventFile::create(&folder.join("tensorboard"))).transpose()?;
        let (mut in_mlflow, mut in_wandb) = (None, None);
        if mlflow.is_some() || wandb.is_some() {
            let (id, keys) = (run_id(folder)?, keys(settings));
            let name = folder.file_name().map_or_else(|| "run".to_owned(), |name| name.to_string_lossy().into_owned());
            if let Some(store) = mlflow {
                in_mlflow = Some(MlflowRun::open(store, &id, &name, &keys)?);
            }
            if let Some(project) = wandb {
                in_wandb = Some(WandbRun::create(folder, project, &id[..8], &name, &keys)?);
            }
        }
        Ok(Self { jsonl, tensorboard, mlflow: in_mlflow, wandb: in_wandb })
    }

    /// Logs an event.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&mut self, event: &TrainEvent) -> Result<()> {
        let Self { jsonl, tensorboard, mlflow, wandb } = self;
        if let Some(jsonl) = jsonl {
            jsonl.write(event)?;
        }
        let Some((step, numbers)) = numbers(event) else { return Ok(()) };
        if let Some(file) = tensorboard {
            numbers.iter().try_for_each(|(name, value)| file.scalar(step, name, *value))?;
        }
        if let Some(run) = mlflow {
            run.numbers(step, &numbers)?;
        }
        wandb.as_mut().map_or(Ok(()), |run| run.numbers(step, &numbers))
    }

    /// Notes how the run ended.
    ///
    /// # Errors
    /// When that cannot be written.
    pub fn close(&mut self, ended: RunEnded) -> Result<()> {
        let Self { mlflow, wandb, .. } = self;
        if let Some(run) = mlflow {
            run.close(ended)?;
        }
        wandb.as_mut().map_or(Ok(()), |run| run.close(ended))
    }
}

/// The id by which others know the run of this folder: 32 hexadecimal digits, made when it is first asked for.
fn run_id(folder: &Path) -> Result<String> {
    let path = folder.join("run-id");
    if let Ok(id) = std::fs::read_to_string(&path)
        && id.len() == 32
        && id.bytes().all(|byte| byte.is_ascii_hexdigit())
    {
        return Ok(id);
    }
    let seed = format!("{} {} {}", folder.display(), seconds(), std::process::id());
    let id: String = Sha256::digest(seed).iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    std::fs::write(&path, &id).map_err(|cause| io_error(&path, "write the id of the run", &cause))?;
    Ok(id)
}

/// Settings by `section.key`.
fn keys(settings: &Settings) -> Vec<(String, Value)> {
    let Ok(Value::Object(sections)) = serde_json::to_value(settings) else { return Vec::new() };
    let of = |(section, keys): (String, Value)| {
        let keys = if let Value::Object(keys) = keys { keys } else { serde_json::Map::new() };
        keys.into_iter().map(move |(key, value)| (format!("{section}.{key}"), value))
    };
    sections.into_iter().flat_map(of).collect()
}

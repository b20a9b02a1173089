//! A run in a file store of MLflow (MLflow documentation, "Backend Stores", file store): a folder of experiments, each a
//! folder of runs, each a folder of `meta.yaml` and of a file for each metric, parameter and tag. `mlflow ui
//! --backend-store-uri FOLDER` shows it.

use std::fs::{File, OpenOptions, create_dir_all};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::event::RunEnded;
use super::jsonl::{milliseconds, seconds};
use crate::error::{Result, io_error};

/// The experiment that runs are of, and its id, which file stores choose at random.
const EXPERIMENT: [&str; 2] = ["ridge", "271828182845904523"];

/// A run that is logged to.
pub struct MlflowRun {
    folder: PathBuf,
    id: String,
    name: String,
    began: f64,
}

impl MlflowRun {
    /// Goes on with the run `id` in `store`, or makes it, with `settings` by `section.key` as parameters.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub fn open(store: &Path, id: &str, name: &str, settings: &[(String, Value)]) -> Result<Self> {
        let experiment = store.join(EXPERIMENT[1]);
        let began = seconds();
        let meta = experiment.join("meta.yaml");
        if !meta.is_file() {
            let [name, id] = EXPERIMENT;
            let now = milliseconds(began);
            write(
                &meta,
                &format!(
                    "artifact_location: {}\ncreation_time: {now}\nexperiment_id: '{id}'\nlast_update_time: {now}\n\
                 lifecycle_stage: active\nname: {name}\n",
                    uri(&experiment)
                ),
            )?;
        }
        let run = Self { folder: experiment.join(id), id: id.to_owned(), name: name.to_owned(), began };
        for part in ["artifacts", "metrics", "params", "tags"] {
            make(&run.folder.join(part))?;
        }
        run.write_meta(None)?;
        write(&run.folder.join("tags/mlflow.runName"), name)?;
        write(&run.folder.join("tags/mlflow.source.name"), "ridge train")?;
        for (key, value) in settings {
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            write(&run.folder.join("params").join(key), &text)?;
        }
        Ok(run)
    }

    /// Adds numbers of a step.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn numbers(&mut self, step: u64, numbers: &[(String, f64)]) -> Result<()> {
        let now = milliseconds(seconds());
        for (name, value) in numbers {
            let path = self.folder.join("metrics").join(name);
            make(path.parent().unwrap_or(&path))?;
            let value = if value.is_nan() { "nan".to_owned() } else { value.to_string() };
            let file = OpenOptions::new().create(true).append(true).open(&path);
            file.and_then(|mut file| file.write_all(format!("{now} {value} {step}\n").as_bytes()))
                .map_err(|cause| io_error(&path, "write the log", &cause))?;
        }
        Ok(())
    }

    /// Notes how the run ended.
    ///
    /// # Errors
    /// When its file cannot be written.
    pub fn close(&mut self, ended: RunEnded) -> Result<()> {
        self.write_meta(Some(ended))
    }

    fn write_meta(&self, ended: Option<RunEnded>) -> Result<()> {
        // RunStatus of MLflow's protocol.
        let status = match ended {
            None => 1,
            Some(RunEnded::Finished) => 3,
            Some(RunEnded::Failed) => 4,
            Some(RunEnded::Stopped) => 5,
        };
        let end = ended.map_or_else(|| "null".to_owned(), |_| milliseconds(seconds()).to_string());
        let Self { folder, id, name, began } = self;
        let quoted = Value::from(name.as_str());
        write(
            &folder.join("meta.yaml"),
            &format!(
                "artifact_uri: {}\nend_time: {end}\nentry_point_name: ''\nexperiment_id: '{}'\nlifecycle_stage: active\n\
             run_id: '{id}'\nrun_name: {quoted}\nrun_uuid: '{id}'\nsource_name: ''\nsource_type: 4\nsource_version: ''\n\
             start_time: {}\nstatus: {status}\ntags: []\nuser_id: ''\n",
                uri(&folder.join("artifacts")),
                EXPERIMENT[1],
                milliseconds(*began)
            ),
        )
    }
}

/// A `file:` address, quoted as YAML and JSON do.
fn uri(folder: &Path) -> Value {
    let whole = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
    format!("file://{}", whole.display()).into()
}

fn make(folder: &Path) -> Result<()> {
    create_dir_all(folder).map_err(|cause| io_error(folder, "make the folder", &cause))
}

fn write(path: &Path, text: &str) -> Result<()> {
    make(path.parent().unwrap_or(path))?;
    let written = File::create(path).and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(|cause| io_error(path, "write the log", &cause))
}

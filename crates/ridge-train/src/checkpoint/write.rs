//! Writing checkpoints, on a thread of their own.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use super::info::{CheckpointInfo, INFO_FILE, STATE_FILE};
use super::retain::retain;
use super::tensors::{SavedTensor, write_tensors};
use crate::error::{Result, TrainError, io_error};
use crate::settings::CheckpointSettings;

/// All of a checkpoint, on the host.
pub struct Snapshot {
    /// What is not tensors; its `sha256` is filled in when they are written.
    pub info: CheckpointInfo,
    /// Weights and states of the optimiser.
    pub tensors: Vec<SavedTensor>,
    /// The text of `tokenizer.json`.
    pub tokenizer: String,
    /// The settings of the run, as a configuration file.
    pub settings: String,
}

/// The folder of the checkpoint of `step`.
fn name(step: u64) -> String {
    format!("step-{step:08}")
}

/// Writes a checkpoint into `folder`, which is made if it is not there. It has its name when it is complete.
///
/// # Errors
/// When it cannot be written; what was written of it is removed.
pub fn write_checkpoint(folder: &Path, snapshot: &Snapshot) -> Result<PathBuf> {
    std::fs::create_dir_all(folder).map_err(|cause| io_error(folder, "make the folder", &cause))?;
    let done = folder.join(name(snapshot.info.step));
    let part = folder.join(format!(".{}.{}.part", name(snapshot.info.step), std::process::id()));
    let written = write_files(&part, snapshot).and_then(|()| {
        // One of the same step, from before a roll-back or a kill, is replaced.
        let old = folder.join(format!(".{}.{}.old", name(snapshot.info.step), std::process::id()));
        let failed = |cause| io_error(&done, "name the checkpoint", &cause);
        if done.exists() {
            std::fs::rename(&done, &old).map_err(failed)?;
        }
        std::fs::rename(&part, &done).map_err(failed)?;
        sync_folder(folder)?;
        let _ = std::fs::remove_dir_all(&old);
        Ok(())
    });
    if written.is_err() {
        let _ = std::fs::remove_dir_all(&part);
    }
    written.map(|()| done)
}

fn write_files(part: &Path, snapshot: &Snapshot) -> Result<()> {
    let _ = std::fs::remove_dir_all(part);
    std::fs::create_dir(part).map_err(|cause| io_error(part, "make the folder", &cause))?;
    let sha256 = write_tensors(&part.join(STATE_FILE), &snapshot.tensors)?;
    write_text(&part.join("tokenizer.json"), &snapshot.tokenizer)?;
    write_text(&part.join("config.json"), &ridge_files::json::pretty(&snapshot.info.model))?;
    write_text(&part.join("settings.toml"), &snapshot.settings)?;
    let info = CheckpointInfo { sha256, ..snapshot.info.clone() };
    let text = serde_json::to_string_pretty(&info).map_err(|error| {
        TrainError::path(part, format!("cannot write the state: {error}"), "report this, it is a mistake of Ridge's")
    })?;
    write_text(&part.join(INFO_FILE), &text)?;
    sync_folder(part)
}

/// Writes a file and synchronises it with the disk.
pub(crate) fn write_text(path: &Path, text: &str) -> Result<()> {
    let write = || {
        let mut file = File::create(path)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()
    };
    write().map_err(|cause| io_error(path, "write the file", &cause))
}

/// Makes the names in a folder last.
pub(crate) fn sync_folder(folder: &Path) -> Result<()> {
    File::open(folder)
        .and_then(|file| file.sync_all())
        .map_err(|cause| io_error(folder, "synchronise the folder", &cause))
}

/// Writes checkpoints one after another beside what else is done.
pub struct CheckpointWriter {
    folder: PathBuf,
    settings: CheckpointSettings,
    /// The step of the checkpoint with the lowest validation loss.
    best: Option<u64>,
    running: Option<JoinHandle<Result<PathBuf>>>,
}

impl CheckpointWriter {
    /// One that writes into `folder`.
    pub fn new(folder: PathBuf, settings: CheckpointSettings, best: Option<u64>) -> Self {
        Self { folder, settings, best, running: None }
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Begins to write a checkpoint, when the one before is complete; `is_best` if its validation loss is the lowest so far.
    /// Then removes those that no rule keeps.
    ///
    /// # Errors
    /// When the one before could not be written.
    pub fn begin(&mut self, snapshot: Snapshot, is_best: bool) -> Result<()> {
        self.wait()?;
        if is_best {
            self.best = Some(snapshot.info.step);
        }
        let (folder, settings, best) = (self.folder.clone(), self.settings.clone(), self.best);
        let write = move || {
            let path = write_checkpoint(&folder, &snapshot)?;
            retain(&folder, &settings, best)?;
            Ok(path)
        };
        let thread = std::thread::Builder::new().name("checkpoint".to_owned()).spawn(write);
        self.running = Some(thread.map_err(|cause| io_error(&self.folder, "start a thread", &cause))?);
        Ok(())
    }

    /// Waits until what was begun is complete; gives its folder.
    ///
    /// # Errors
    /// When it could not be written.
    pub fn wait(&mut self) -> Result<Option<PathBuf>> {
        let Some(running) = self.running.take() else { return Ok(None) };
        match running.join() {
            Ok(written) => written.map(Some),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }

    /// Is nothing being written any more?
    pub fn is_idle(&self) -> bool {
        self.running.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl Drop for CheckpointWriter {
    fn drop(&mut self) {
        if let Some(running) = self.running.take() {
            let _ = running.join();
        }
    }
}

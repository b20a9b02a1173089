//! Finding and opening checkpoints.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use super::info::{CheckpointInfo, FORMAT, INFO_FILE, STATE_FILE};
use super::tensors::TensorFile;
use crate::error::{Result, TrainError, io_error};

/// A checkpoint that was verified.
pub struct SavedState {
    /// Its folder.
    pub path: PathBuf,
    /// What is not tensors.
    pub info: CheckpointInfo,
    /// Its tensors.
    pub tensors: TensorFile,
    /// The text of its `tokenizer.json`.
    pub tokenizer: String,
}

/// The checkpoints of a folder with their steps, in no order; none if there is no such folder.
///
/// # Errors
/// When it cannot be listed.
pub fn numbered(folder: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let entries = match std::fs::read_dir(folder) {
        Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(|cause| io_error(folder, "list the folder", &cause))?,
    };
    let step = |entry: &std::fs::DirEntry| entry.file_name().to_str()?.strip_prefix("step-")?.parse().ok();
    Ok(entries.flatten().filter_map(|entry| Some((step(&entry)?, entry.path()))).collect())
}

/// Opens the checkpoint in the folder `path`.
///
/// # Errors
/// When it is none, damaged, or of another format; [`TrainError::Stopped`] when `stop` is set meanwhile.
pub fn open(path: &Path, stop: &AtomicBool) -> Result<SavedState> {
    let file = path.join(INFO_FILE);
    if !file.is_file() {
        let remedy = "give the folder of a checkpoint, such as run/checkpoints/step-00001000";
        return Err(TrainError::path(path, format!("it is no checkpoint: it has no {INFO_FILE}"), remedy));
    }
    let text = std::fs::read_to_string(&file).map_err(|cause| io_error(&file, "read the state", &cause))?;
    let remedy = "continue from another checkpoint, named with checkpoint.resume";
    let info: CheckpointInfo = serde_json::from_str(&text)
        .map_err(|error| TrainError::path(&file, format!("it is no state of a run: {error}"), remedy))?;
    if info.format != FORMAT {
        let problem = format!("it has the format {}, and {FORMAT} is read", info.format);
        return Err(TrainError::path(&file, problem, remedy));
    }
    let tensors = TensorFile::open(&path.join(STATE_FILE), &info.sha256, stop)?;
    let tokenizer = path.join("tokenizer.json");
    let tokenizer =
        std::fs::read_to_string(&tokenizer).map_err(|cause| io_error(&tokenizer, "read the vocabulary", &cause))?;
    Ok(SavedState { path: path.to_owned(), info, tensors, tokenizer })
}

/// The most recent checkpoint of a folder that is whole, and why more recent ones are not.
///
/// # Errors
/// When there are some and none is whole; [`TrainError::Stopped`] when `stop` is set meanwhile.
pub fn latest(folder: &Path, stop: &AtomicBool) -> Result<(Option<SavedState>, Vec<TrainError>)> {
    let mut all = numbered(folder)?;
    all.sort_by_key(|(step, _)| std::cmp::Reverse(*step));
    let mut damaged = Vec::new();
    for (_, path) in all {
        match open(&path, stop) {
            Ok(state) => return Ok((Some(state), damaged)),
            Err(TrainError::Stopped) => return Err(TrainError::Stopped),
            Err(error) => damaged.push(error),
        }
    }
    match damaged.into_iter().next() {
        None => Ok((None, Vec::new())),
        Some(first) => Err(first),
    }
}

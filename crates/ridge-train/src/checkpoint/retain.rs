//! Which checkpoints stay.

use std::path::Path;

use super::read::numbered;
use crate::error::{Result, io_error};
use crate::settings::CheckpointSettings;

/// Removes the checkpoints of `folder` that no rule of `settings` keeps, and what writers that were killed have left. The
/// one of step `best` stays if `keep_best`.
///
/// # Errors
/// When one cannot be removed.
pub fn retain(folder: &Path, settings: &CheckpointSettings, best: Option<u64>) -> Result<()> {
    let mut all = numbered(folder)?;
    all.sort_by_key(|(step, _)| std::cmp::Reverse(*step));
    for (place, (step, path)) in all.iter().enumerate() {
        let is_kept = place < settings.keep.max(1)
            || settings.keep_every > 0 && step.is_multiple_of(settings.keep_every)
            || settings.keep_best && best == Some(*step);
        if !is_kept {
            remove(path)?;
        }
    }
    let entries = std::fs::read_dir(folder).map_err(|cause| io_error(folder, "list the folder", &cause))?;
    for entry in entries.flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with(".step-") && (name.ends_with(".part") || name.ends_with(".old")) {
            remove(&entry.path())?;
        }
    }
    Ok(())
}

/// Under another name first, so that no half of a checkpoint is ever there.
fn remove(path: &Path) -> Result<()> {
    let failed = |cause| io_error(path, "remove the checkpoint", &cause);
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let gone = path.with_file_name(format!(".{}.old", name.trim_start_matches('.')));
    if gone != path {
        let _ = std::fs::remove_dir_all(&gone);
        std::fs::rename(path, &gone).map_err(failed)?;
    }
    std::fs::remove_dir_all(&gone).map_err(failed)
}

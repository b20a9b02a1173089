//! Whether a checkpoint is of the run that is to continue from it.

use crate::checkpoint::{CheckpointInfo, SavedState};
use crate::error::{Result, TrainError};
use crate::prepare::Prepared;

/// Requires that a checkpoint is of this model, optimiser, seed and data.
///
/// # Errors
/// Names what differs.
pub(crate) fn check_same_run(prepared: &Prepared, saved: &SavedState, fingerprint: u64) -> Result<()> {
    let CheckpointInfo { model, optimizer, seed, data_fingerprint, .. } = &saved.info;
    let differs = |what: &str, was: &dyn std::fmt::Display, is: &dyn std::fmt::Display| {
        let remedy = "continue with the settings that it was made with, or train into another checkpoint.folder";
        TrainError::path(&saved.path, format!("it is of another run: {what} was {was}, and is {is}"), remedy)
    };
    if let (Some(was), Some(is)) = (model.as_object(), prepared.config_json.as_object()) {
        let changed = was.iter().find(|(key, value)| is.get(*key) != Some(value));
        if let Some((key, value)) = changed {
            let now = is.get(key).unwrap_or(&serde_json::Value::Null);
            return Err(differs(&format!("{key} of config.json"), value, now));
        }
    }
    if *optimizer != prepared.step.optimizer_name() {
        return Err(differs("optimizer.name", optimizer, &prepared.step.optimizer_name()));
    }
    if *seed != prepared.step.settings.train.seed {
        return Err(differs("train.seed", seed, &prepared.step.settings.train.seed));
    }
    if saved.tokenizer != prepared.corpus.vocabulary.json() {
        return Err(differs("the vocabulary", &"another", &"that of data.vocabulary"));
    }
    if *data_fingerprint != fingerprint {
        return Err(differs("the data", &format!("{data_fingerprint:016x}"), &format!("{fingerprint:016x}")));
    }
    Ok(())
}

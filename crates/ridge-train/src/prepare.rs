//! From settings to data, the model's configuration and a step.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use ridge_files::json;
use ridge_models::{ModelConfig, ModelFiles};
use serde_json::Value;

use crate::data::{Corpus, Vocabulary};
use crate::error::{Result, TrainError, io_error};
use crate::prepared_step::PreparedStep;
use crate::settings::Settings;

/// All that is known of a run before anything is on a device.
pub struct Prepared {
    /// The data.
    pub corpus: Corpus,
    /// `config.json` as it is exported.
    pub config_json: Value,
    /// The files whose weights are trained on, if any.
    pub from: Option<ModelFiles>,
    /// A step.
    pub step: PreparedStep,
}

impl Prepared {
    /// Reads data and configuration, and builds the graphs. Nothing is allocated on a device.
    ///
    /// # Errors
    /// When a file cannot be read or does not fit another, or a setting does not fit the model; [`TrainError::Stopped`] when `stop`
    /// is set meanwhile.
    pub fn new(settings: Settings, stop: &AtomicBool) -> Result<Self> {
        let folder = settings.model.from.as_deref().map(ridge_files::hub::find_model).transpose()?;
        let from = folder.as_deref().map(|folder| ModelFiles::open(Some(folder))).transpose()?;
        let tokenizer = match folder {
            Some(folder) if settings.data.vocabulary.is_none() && folder.join("tokenizer.json").is_file() => {
                Some(Vocabulary::open(&folder)?)
            }
            _ => None,
        };
        let corpus = Corpus::read(&settings.data, tokenizer, stop)?;
        let (file, text) = config_text(&settings, from.as_ref())?;
        let (config_json, config) = configured(&file, &text, &corpus.vocabulary, from.is_some())?;
        if config.vocab_size < corpus.vocabulary.size() {
            let why = format!(
                "is less than the {} tokens of the vocabulary; set it to that number, or give another data.vocabulary",
                corpus.vocabulary.size()
            );
            return Err(TrainError::setting(&format!("{}: vocab_size", file.display()), config.vocab_size, why));
        }
        let step = PreparedStep::new(settings, config)?;
        Ok(Self { corpus, config_json, from, step })
    }
}

/// The text of the model's configuration, and the file it is from.
fn config_text(settings: &Settings, from: Option<&ModelFiles>) -> Result<(PathBuf, String)> {
    if let Some(files) = from {
        return Ok((
            settings.model.from.clone().unwrap_or_default().join("config.json"),
            files.config_text()?.into_owned(),
        ));
    }
    let path = settings.model.config.as_deref().unwrap_or(Path::new("config.json"));
    let file = if path.is_dir() { path.join("config.json") } else { path.to_owned() };
    let text = std::fs::read_to_string(&file).map_err(|cause| io_error(&file, "read the configuration", &cause))?;
    Ok((file, text))
}

/// The configuration, with the vocabulary's size and end token where it has none of its own.
fn configured(file: &Path, text: &str, vocabulary: &Vocabulary, is_trained: bool) -> Result<(Value, ModelConfig)> {
    let name = file.display().to_string();
    let mut keys = json::object(&name, text.as_bytes())?;
    if !is_trained {
        keys.entry("vocab_size").or_insert_with(|| vocabulary.size().into());
        // Defaults of other vocabularies would name tokens that this one may lack.
        keys.entry("bos_token_id").or_insert(Value::Null);
        keys.entry("eos_token_id").or_insert_with(|| vocabulary.end_of_text().map_or(Value::Null, Into::into));
    }
    let json = Value::Object(keys);
    let config = ModelConfig::from_json(&name, &json.to_string())?;
    Ok((json, config))
}

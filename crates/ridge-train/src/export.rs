//! The model of a run in the layout of Hugging Face, which Ridge and transformers load.

use std::path::Path;

use ridge_files::json::pretty;
use serde_json::{Value, json};

use crate::checkpoint::{SavedTensor, sync_folder, write_tensors, write_text};
use crate::error::{Result, TrainError, io_error};
use crate::settings::Precision;
use crate::trainer::Trainer;

/// Files of the tokenizer that go with a model that was trained on.
const TOKENIZER_FILES: [&str; 4] =
    ["tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json"];

/// Writes `config.json`, `model.safetensors`, `tokenizer.json` and `tokenizer_config.json` to `folder`, in place of those
/// that may be there; with `means` the running means of weights.
///
/// # Errors
/// When the folder cannot be written, or the device fails.
pub fn export(trainer: &Trainer, folder: &Path, means: bool) -> Result<()> {
    let part = folder.with_extension(format!("{}.part", std::process::id()));
    let _ = std::fs::remove_dir_all(&part);
    std::fs::create_dir_all(&part).map_err(|cause| io_error(&part, "make the folder", &cause))?;
    let written = write(trainer, &part, means).and_then(|()| {
        let failed = |cause| io_error(folder, "name the exported model", &cause);
        if folder.exists() {
            std::fs::remove_dir_all(folder).map_err(failed)?;
        }
        std::fs::rename(&part, folder).map_err(failed)?;
        sync_folder(folder.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new(".")))
    });
    if written.is_err() {
        let _ = std::fs::remove_dir_all(&part);
    }
    written
}

fn write(trainer: &Trainer, folder: &Path, means: bool) -> Result<()> {
    let prepared = trainer.prepared();
    let tensors = prepared.step.config.publish(trainer.weights(means)?)?;
    let tensors: Vec<SavedTensor> = tensors
        .into_iter()
        .map(|tensor| SavedTensor { name: tensor.name, dtype: tensor.dtype, shape: tensor.shape, bytes: tensor.bytes })
        .collect();
    write_tensors(&folder.join("model.safetensors"), &tensors)?;

    let mut config = prepared.config_json.clone();
    if let Value::Object(keys) = &mut config {
        if let Some(class) = prepared.step.config.class() {
            keys.insert("architectures".to_owned(), json!([class]));
        }
        let dtype = match prepared.step.settings.train.precision {
            Precision::F32 => "float32",
            Precision::F16 => "float16",
            Precision::Bf16 | Precision::Bf16Stochastic | Precision::Bf16Kahan => "bfloat16",
        };
        keys.remove("dtype");
        keys.insert("torch_dtype".to_owned(), dtype.into());
        keys.retain(|_, value| !value.is_null());
        if prepared.from.is_none() && prepared.corpus.vocabulary.end_of_text().is_none() {
            // Left out, they would be those of another vocabulary.
            keys.insert("bos_token_id".to_owned(), Value::Null);
            keys.insert("eos_token_id".to_owned(), Value::Null);
        }
    }
    write_text(&folder.join("config.json"), &pretty(&config))?;
    write_text(&folder.join("tokenizer.json"), prepared.corpus.vocabulary.json())?;
    let from = prepared.step.settings.model.from.as_deref();
    let mut copied = false;
    for name in TOKENIZER_FILES {
        let Some(source) = from.map(|from| from.join(name)).filter(|source| source.is_file()) else { continue };
        let text = std::fs::read_to_string(&source).map_err(|cause| io_error(&source, "read the file", &cause))?;
        write_text(&folder.join(name), &text)?;
        copied |= name == "tokenizer_config.json";
    }
    if !copied {
        let end = prepared.corpus.vocabulary.end_of_text();
        let end = end.and_then(|id| prepared.corpus.vocabulary.tokenizer().id_to_token(id));
        let mut settings = json!({
            "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": false,
            "model_max_length": prepared.step.config.max_context(),
        });
        if let (Value::Object(keys), Some(end)) = (&mut settings, end) {
            keys.insert("eos_token".to_owned(), end.into());
        }
        write_text(&folder.join("tokenizer_config.json"), &pretty(&settings))?;
    }
    sync_folder(folder)
}

/// Requires that `folder` can be made and written, before a long run. Leaves nothing that was not there.
///
/// # Errors
/// When it cannot.
pub(crate) fn check_writable(folder: &Path) -> Result<()> {
    let lacking = lacking(folder);
    let written = try_writing(folder);
    remove_empty(&lacking);
    written
}

/// `folder` and those above it that are not there, the innermost first.
pub(crate) fn lacking(folder: &Path) -> Vec<&Path> {
    folder.ancestors().take_while(|above| *above != Path::new("") && !above.exists()).collect()
}

/// Removes folders that nothing was put into, by another process either; the innermost come first.
pub(crate) fn remove_empty(folders: &[&Path]) {
    for made in folders {
        let _ = std::fs::remove_dir(made);
    }
}

fn try_writing(folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(|cause| io_error(folder, "make the folder", &cause))?;
    let probe = folder.join(format!(".probe.{}", std::process::id()));
    let written = std::fs::write(&probe, b"ridge");
    let _ = std::fs::remove_file(&probe);
    written.map_err(|cause| match cause.kind() {
        std::io::ErrorKind::PermissionDenied | std::io::ErrorKind::ReadOnlyFilesystem => {
            let remedy = "give another checkpoint.folder, or change the permissions of this one";
            TrainError::path(folder, format!("the folder cannot be written: {cause}"), remedy)
        }
        _ => io_error(folder, "write to the folder", &cause),
    })
}

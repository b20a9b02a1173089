//! Where a model comes from: a folder, or the one that is compiled in.

use std::borrow::Cow;
use std::fmt;
use std::path::{Path, PathBuf};

use ridge_files::hub::find_model;
use ridge_files::{Checkpoint, FilesError, Gguf, TensorView, read_text, replace_file};
use ridge_image::Preprocessing;
use ridge_text::gguf::{TokenizerSource, tokenizer_json};
use ridge_text::{ChatTemplates, Tokenizer};

use crate::config::{DecoderConfig, GenerationConfig, image_preprocessing, language_model};
use crate::embedded::{EmbeddedModel, STORIES_260K};
use crate::error::{ModelError, Result};
use crate::families::{EncoderConfig, LlamaConfig, ModelConfig, NetworkConfig};
use crate::gguf;

/// The files of one model. Opening reads `config.json`; weights and tokenizer are read when asked for, so a folder
/// that holds only `config.json` is enough to plan a model or to run it with random weights.
#[derive(Debug)]
pub struct ModelFiles {
    origin: Origin,
    /// Empty for a GGUF file, whose metadata is read when a configuration is asked for: a vocabulary needs none.
    config_text: String,
}

#[derive(Debug)]
enum Origin {
    Embedded(&'static EmbeddedModel),
    Folder(PathBuf),
    /// A file that holds all parts.
    Gguf {
        path: PathBuf,
        gguf: Box<Gguf>,
    },
    /// A configuration file that stands for its model alone.
    Config(PathBuf),
}

const CONFIG: &str = "config.json";
const GENERATION_CONFIG: &str = "generation_config.json";
const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const SPECIAL_TOKENS_MAP: &str = "special_tokens_map.json";
/// How images are prepared.
const PREPROCESSOR_CONFIG: &str = "preprocessor_config.json";
const CHAT_TEMPLATE: &str = "chat_template.jinja";
const CHAT_TEMPLATE_FOLDER: &str = "additional_chat_templates";
const LEGACY_CHAT_TEMPLATE: &str = "chat_template.json";
/// Files that a converted model has as they are; the last ones are the tokenizer in older layouts.
const COPIED: [&str; 10] = [
    GENERATION_CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    SPECIAL_TOKENS_MAP,
    CHAT_TEMPLATE,
    LEGACY_CHAT_TEMPLATE,
    "added_tokens.json",
    "merges.txt",
    "tokenizer.model",
    "vocab.json",
];

impl ModelFiles {
    /// Opens the model in `folder`: a folder in the layout of Hugging Face, a GGUF file, or the name of a model that was
    /// downloaded from the Hub, [`HubModel`](ridge_files::hub::HubModel). Without a folder, opens the embedded model.
    ///
    /// # Errors
    ///
    /// [`ModelError::Files`] if there is no such folder, file or downloaded model, or its `config.json` cannot be read, with
    /// what to do about it.
    pub fn open(folder: Option<&Path>) -> Result<Self> {
        let Some(folder) = folder else {
            return Ok(Self { origin: Origin::Embedded(&STORIES_260K), config_text: STORIES_260K.config.to_owned() });
        };
        let path = find_model(folder)?;
        if is_gguf(&path) {
            let gguf = Box::new(Gguf::open(&path)?);
            return Ok(Self { origin: Origin::Gguf { path, gguf }, config_text: String::new() });
        }
        check_folder(&path)?;
        let config_text = language_model(read_text(&path.join(CONFIG), "read the configuration")?);
        Ok(Self { origin: Origin::Folder(path), config_text })
    }

    /// Opens a `config.json` under whatever name, and nothing beside it: enough to plan a model. A GGUF file is opened as
    /// [`ModelFiles::open`] does.
    ///
    /// # Errors
    ///
    /// [`ModelError::Files`] if the file cannot be read.
    pub fn from_config(file: &Path) -> Result<Self> {
        if file.extension().is_some_and(|e| e == "safetensors") {
            return Err(FilesError::Path {
                path: file.to_owned(),
                problem: "it holds weights, and a configuration is wanted".to_owned(),
                remedy: "give the config.json beside it, or the folder that holds both".to_owned(),
            }
            .into());
        }
        if is_gguf(file) {
            return Self::open(Some(file));
        }
        let config_text = language_model(read_text(file, "read the configuration")?);
        Ok(Self { origin: Origin::Config(file.to_owned()), config_text })
    }

    /// A model that is a configuration alone, the text of a `config.json`; `name` is what it is called.
    pub fn of_text(name: &str, config: &str) -> Self {
        Self { origin: Origin::Config(PathBuf::from(name)), config_text: language_model(config.to_owned()) }
    }

    /// The folder of the model, if it is one.
    pub fn folder(&self) -> Option<&Path> {
        match &self.origin {
            Origin::Folder(folder) => Some(folder),
            _ => None,
        }
    }

    /// Are there files of weights, complete or not?
    pub fn has_weights(&self) -> bool {
        let weights = |name: &std::ffi::OsStr| {
            name.to_str().is_some_and(|n| n.ends_with(".safetensors") || n.ends_with(".safetensors.index.json"))
        };
        match &self.origin {
            Origin::Embedded(_) => true,
            Origin::Gguf { gguf, .. } => !gguf.tensors().is_empty(),
            Origin::Folder(folder) => {
                folder.read_dir().is_ok_and(|mut files| files.any(|f| f.is_ok_and(|f| weights(&f.file_name()))))
            }
            Origin::Config(_) => false,
        }
    }

    /// The GGUF file, if the model is one.
    pub fn gguf(&self) -> Option<&Gguf> {
        match &self.origin {
            Origin::Gguf { gguf, .. } => Some(gguf),
            _ => None,
        }
    }

    /// Is there a `tokenizer.json`?
    pub fn has_tokenizer(&self) -> bool {
        match &self.origin {
            Origin::Embedded(_) => true,
            Origin::Gguf { gguf, .. } => gguf.metadata().contains_key("tokenizer.ggml.tokens"),
            Origin::Folder(folder) => folder.join(TOKENIZER).exists(),
            Origin::Config(_) => false,
        }
    }

    /// Is this the model that is compiled in?
    pub fn is_embedded(&self) -> bool {
        matches!(self.origin, Origin::Embedded(_))
    }

    /// The text of `config.json`; of a multimodal model, that of its language model; of a GGUF file, what its metadata
    /// says.
    ///
    /// # Errors
    ///
    /// [`ModelError::Files`] if the metadata of a GGUF file describes no model that Ridge knows.
    pub fn config_text(&self) -> Result<Cow<'_, str>> {
        match &self.origin {
            Origin::Gguf { gguf, .. } => gguf::config_json(gguf).map(Cow::Owned),
            _ => Ok(Cow::Borrowed(&self.config_text)),
        }
    }

    /// The configuration, with the end tokens of `generation_config.json` if that file names some, and with an output
    /// projection of its own if the weights beside it have one that differs from the embedding, whatever
    /// `tie_word_embeddings` says.
    ///
    /// # Errors
    ///
    /// As for [`ModelConfig::from_json`] and [`GenerationConfig::from_json`].
    pub fn config(&self) -> Result<ModelConfig> {
        let mut config = ModelConfig::from_json(&self.file(CONFIG), &self.config_text()?)?;
        self.read_generation(&mut config)?;
        if config.tie_word_embeddings && self.has_output_projection(&config) {
            config.tie_word_embeddings = false;
        }
        Ok(config)
    }

    /// Does the checkpoint in the folder have an output projection that is not the embedding once more? A checkpoint that
    /// cannot be read is reported when its weights are.
    fn has_output_projection(&self, config: &ModelConfig) -> bool {
        let Origin::Folder(folder) = &self.origin else { return false };
        let tensors = &config.family().tensors;
        let (Some(head), Some(embedding)) = (tensors.head.weight(), tensors.embedding.weight()) else { return false };
        if !self.has_weights() {
            return false;
        }
        let Ok(checkpoint) = Checkpoint::open(folder) else { return false };
        let bare = embedding.split_once('.').map_or("", |(_, bare)| bare);
        let view = |name: &str| checkpoint.tensor(name).ok();
        let same = |a: &TensorView<'_>, b: &TensorView<'_>| (a.dtype, a.shape, a.data) == (b.dtype, b.shape, b.data);
        view(&head).zip(view(&embedding).or_else(|| view(bare))).is_some_and(|(head, table)| !same(&head, &table))
    }

    /// The configuration of an encoder, if the model is one.
    ///
    /// # Errors
    ///
    /// As for [`EncoderConfig::from_json`].
    pub fn encoder_config(&self) -> Result<Option<EncoderConfig>> {
        let file = self.file(CONFIG);
        let text = self.config_text()?;
        match EncoderConfig::is_one(&file, &text)? {
            true => EncoderConfig::from_json(&file, &text).map(Some),
            false => Ok(None),
        }
    }

    /// The configuration of a network of any family, a decoder's as [`ModelFiles::config`] gives it.
    ///
    /// # Errors
    ///
    /// As for [`NetworkConfig::from_json`].
    pub fn network_config(&self) -> Result<NetworkConfig> {
        match NetworkConfig::from_json(&self.file(CONFIG), &self.config_text()?)? {
            NetworkConfig::Decoder(_) => self.config().map(NetworkConfig::Decoder),
            other => Ok(other),
        }
    }

    /// What is done to an image before the model sees it.
    ///
    /// # Errors
    ///
    /// If `preprocessor_config.json` cannot be read, and as for [`image_preprocessing`].
    pub fn image_preprocessing(&self) -> Result<Preprocessing> {
        let text = self.optional_text(PREPROCESSOR_CONFIG, "read how images are prepared")?;
        let text = text.ok_or_else(|| ModelError::Missing {
            file: self.to_string(),
            key: PREPROCESSOR_CONFIG.to_owned(),
            expected: "a JSON file that says how images are prepared",
        })?;
        image_preprocessing(&self.file(PREPROCESSOR_CONFIG), &text)
    }

    /// The configuration of a Llama model, as [`ModelFiles::config`].
    ///
    /// # Errors
    ///
    /// As for [`LlamaConfig::from_json`] and [`GenerationConfig::from_json`].
    pub fn llama_config(&self) -> Result<LlamaConfig> {
        let mut config = LlamaConfig::from_json(&self.file(CONFIG), &self.config_text()?)?;
        self.read_generation(&mut config)?;
        Ok(config)
    }

    fn read_generation(&self, config: &mut DecoderConfig) -> Result<()> {
        if let Some(text) = self.optional_text(GENERATION_CONFIG, "read the generation settings")? {
            let generation = GenerationConfig::from_json(&self.file(GENERATION_CONFIG), &text)?;
            if let Some(ids) = generation.eos_token_ids {
                config.eos_token_ids = ids;
            }
        }
        Ok(())
    }

    /// Opens the weights.
    ///
    /// # Errors
    ///
    /// As for [`Checkpoint::open`].
    pub fn checkpoint(&self) -> Result<Checkpoint> {
        match &self.origin {
            Origin::Embedded(model) => Ok(Checkpoint::from_bytes(&self.to_string(), model.weights)?),
            Origin::Gguf { gguf, .. } => gguf::checkpoint(gguf),
            Origin::Folder(folder) => Ok(Checkpoint::open(folder)?),
            Origin::Config(file) => Err(config_alone(file, "weights").into()),
        }
    }

    /// Reads the tokenizer, and `tokenizer_config.json` if there is one.
    ///
    /// # Errors
    ///
    /// [`ModelError::Files`] if there is no `tokenizer.json`, else as for [`Tokenizer::from_bytes`] and
    /// [`Tokenizer::with_config`].
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        let tokenizer = match &self.origin {
            Origin::Embedded(model) => Tokenizer::from_bytes(&self.file(TOKENIZER), model.tokenizer.as_bytes())?,
            Origin::Gguf { gguf, .. } => {
                let (tokenizer, config) = tokenizer_json(gguf)?;
                return Ok(Tokenizer::from_bytes(gguf.file(), tokenizer.as_bytes())?.with_config(gguf.file(), &config)?);
            }
            Origin::Folder(folder) => {
                check_tokenizer(folder)?;
                Tokenizer::from_file(folder.join(TOKENIZER))?
            }
            Origin::Config(file) => return Err(config_alone(file, "a tokenizer").into()),
        };
        match self.optional_text(TOKENIZER_CONFIG, "read the tokenizer settings")? {
            Some(text) => Ok(tokenizer.with_config(&self.file(TOKENIZER_CONFIG), &text)?),
            None => Ok(tokenizer),
        }
    }

    /// The files that describe the tokenizer, as a GGUF file is written from them.
    pub(crate) fn tokenizer_source(&self) -> Result<TokenizerSource> {
        const ACTION: &str = "read the tokenizer";
        let (json, config) = match &self.origin {
            Origin::Embedded(model) => (model.tokenizer.to_owned(), self.optional_text(TOKENIZER_CONFIG, ACTION)?),
            Origin::Folder(folder) => {
                check_tokenizer(folder)?;
                (read_text(&folder.join(TOKENIZER), ACTION)?, self.optional_text(TOKENIZER_CONFIG, ACTION)?)
            }
            Origin::Gguf { gguf, .. } => {
                let (json, config) = tokenizer_json(gguf)?;
                (json, Some(config))
            }
            Origin::Config(file) => return Err(config_alone(file, "a tokenizer").into()),
        };
        let chat_template = self.optional_text(CHAT_TEMPLATE, "read the chat template")?;
        Ok(TokenizerSource { name: self.to_string(), json, config, chat_template })
    }

    /// Reads the chat templates: those of `chat_template.jinja` and `additional_chat_templates/*.jinja` if there are
    /// such files, else `chat_template` of `tokenizer_config.json`, else that of `chat_template.json`. A model without
    /// any gives an empty set.
    ///
    /// # Errors
    ///
    /// [`ModelError::Files`] if a file cannot be read, else as for [`ChatTemplates::from_json`].
    pub fn chat_templates(&self) -> Result<ChatTemplates> {
        const ACTION: &str = "read the chat templates";
        let read = |name: &str| -> Result<Option<(String, String)>> {
            Ok(self.optional_text(name, ACTION)?.map(|text| (self.file(name), text)))
        };
        fn borrowed(file: &Option<(String, String)>) -> Option<(&str, &str)> {
            file.as_ref().map(|(name, text)| (name.as_str(), text.as_str()))
        }
        let config = read(TOKENIZER_CONFIG)?;
        let (tokens, legacy) = (read(SPECIAL_TOKENS_MAP)?, read(LEGACY_CHAT_TEMPLATE)?);
        let set = ChatTemplates::from_json(borrowed(&config), borrowed(&tokens), borrowed(&legacy))?;
        let mut files = Vec::new();
        if let Some((file, text)) = read(CHAT_TEMPLATE)? {
            files.push(("default".to_owned(), file, text));
        }
        if let Origin::Folder(folder) = &self.origin
            && let Ok(entries) = folder.join(CHAT_TEMPLATE_FOLDER).read_dir()
        {
            let mut paths: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
            paths.sort();
            for path in paths {
                let name = path.file_name().and_then(|name| name.to_str()?.strip_suffix(".jinja"));
                if let Some(name) = name {
                    files.push((name.to_owned(), path.display().to_string(), read_text(&path, ACTION)?));
                }
            }
        }
        Ok(set.with_files(files))
    }

    /// Copies the files beside weights and configuration to `folder`: tokenizer, chat templates and settings of generation.
    ///
    /// # Errors
    ///
    /// [`FilesError::Io`] if one of them cannot be read or written.
    pub(crate) fn copy_texts(&self, folder: &Path) -> Result<()> {
        let Origin::Folder(from) = &self.origin else { return Ok(()) };
        let copy = |from: &Path, to: &Path| {
            let failed = |cause| FilesError::Io { path: from.to_owned(), action: "copy the file", cause };
            let copied = || replace_file(to, |out| std::io::copy(&mut std::fs::File::open(from)?, out).map(|_| ()));
            if from.is_file() { copied().map_err(failed) } else { Ok(()) }
        };
        for name in COPIED {
            copy(&from.join(name), &folder.join(name))?;
        }
        if let Ok(entries) = from.join(CHAT_TEMPLATE_FOLDER).read_dir() {
            let to = folder.join(CHAT_TEMPLATE_FOLDER);
            let failed = |cause| FilesError::Io { path: to.clone(), action: "make the folder", cause };
            std::fs::create_dir_all(&to).map_err(failed)?;
            for entry in entries.flatten() {
                copy(&entry.path(), &to.join(entry.file_name()))?;
            }
        }
        Ok(())
    }

    /// A file of the model that need not be there.
    pub(crate) fn optional_text(&self, name: &str, action: &'static str) -> Result<Option<String>> {
        match &self.origin {
            Origin::Embedded(model) => Ok(match name {
                TOKENIZER_CONFIG => Some(model.tokenizer_config.to_owned()),
                _ => None,
            }),
            Origin::Folder(folder) => {
                let path = folder.join(name);
                if path.exists() { Ok(Some(read_text(&path, action)?)) } else { Ok(None) }
            }
            Origin::Gguf { gguf, .. } => match name {
                TOKENIZER_CONFIG if self.has_tokenizer() => Ok(Some(tokenizer_json(gguf)?.1)),
                _ => Ok(None),
            },
            Origin::Config(_) => Ok(None),
        }
    }

    /// What errors call the file that holds the configuration.
    pub fn config_name(&self) -> String {
        self.file(CONFIG)
    }

    /// What errors call the file `name` of this model.
    pub(crate) fn file(&self, name: &str) -> String {
        match &self.origin {
            Origin::Embedded(model) => format!("{} (embedded) {name}", model.name),
            Origin::Folder(folder) => folder.join(name).display().to_string(),
            Origin::Gguf { path: file, .. } | Origin::Config(file) => file.display().to_string(),
        }
    }
}

/// The path as it was given, or the name of the embedded model.
impl fmt::Display for ModelFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.origin {
            Origin::Embedded(model) => write!(f, "{} (embedded)", model.name),
            Origin::Folder(path) | Origin::Config(path) | Origin::Gguf { path, .. } => write!(f, "{}", path.display()),
        }
    }
}

/// Is it a GGUF file, by its name?
fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf")) && path.is_file()
}

fn config_alone(file: &Path, wanted: &str) -> FilesError {
    FilesError::Path {
        path: file.to_owned(),
        problem: format!("it is a configuration, which has no {}", wanted.trim_start_matches("a ")),
        remedy: format!("give a folder that holds {wanted} too"),
    }
}

fn check_folder(folder: &Path) -> Result<(), FilesError> {
    let fail = |problem: &str, remedy: String| FilesError::Path {
        path: folder.to_owned(),
        problem: problem.to_owned(),
        remedy,
    };
    if folder.is_file() {
        let parent = match folder.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        return Err(fail(
            "it is a file, and a model is a folder",
            format!("give the folder that holds config.json: {}", parent.display()),
        ));
    }
    let there = folder.try_exists().map_err(|cause| {
        fail(&format!("cannot look for it: {cause}"), "check the path and the permissions of its parents".to_owned())
    })?;
    if !there && folder.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf")) {
        return Err(fail("there is no such file", "check the path".to_owned()));
    }
    if !there {
        let remedy = "check the path, or leave it out to use the small model that is compiled in";
        return Err(fail("there is no such folder", remedy.to_owned()));
    }
    let config = folder.join(CONFIG);
    let found = config.try_exists().map_err(|cause| {
        let advice = "check the permissions of the folder and of its parents";
        fail(&format!("cannot look for config.json in it: {cause}"), advice.to_owned())
    })?;
    if !found {
        let remedy = if folder.join("params.json").exists() {
            "its params.json is of Meta's own layout: download the Hugging Face layout of the model"
        } else {
            "give the folder that a model was downloaded to, or download config.json into it"
        };
        return Err(fail("it holds no config.json", remedy.to_owned()));
    }
    Ok(())
}

fn check_tokenizer(folder: &Path) -> Result<(), FilesError> {
    if folder.join(TOKENIZER).exists() {
        return Ok(());
    }
    let remedy = if folder.join("tokenizer.model").exists() {
        "its tokenizer.model is of SentencePiece: convert it to tokenizer.json, or download that"
    } else {
        "download tokenizer.json into it"
    };
    Err(FilesError::Path {
        path: folder.to_owned(),
        problem: "it holds no tokenizer.json".to_owned(),
        remedy: remedy.to_owned(),
    })
}

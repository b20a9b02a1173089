//! The short form of the library: a model, opened, placed and run.

use std::fmt;
use std::ops::ControlFlow;
use std::path::Path;

use ridge_engine::scoring::{Scorer, ScorerOptions};
use ridge_engine::service::{Policy, Service, ServiceOptions};
use ridge_engine::{EmbedOptions, Embedder, Engine, EngineOptions, Finish, Request, Sampling, TextStream};
use ridge_graph::{DType, FormatRef};
use ridge_models::{ModelConfig, ModelFiles};
use ridge_runtime::Backend;
use ridge_text::template::{ChatInput, Clock, Data};
use ridge_text::{ChatTemplates, Tokenizer};

use crate::admission::{CacheSize, EnginePrograms, StepExtents, engine_bytes, scorer_bytes};
use crate::error::{Error, Result};
use crate::load::{LoadObserver, LoadedModel, RunSettings, load_embedder, load_model};
use crate::placement::Placement;
use crate::settings::{ActivationMode, NumberSettings};

/// The default context: as long as most uses need, without the memory that a model's longest would take.
const CONTEXT: usize = 4096;
/// Tokens of a prompt in one step.
const CHUNK: usize = 512;

/// A model whose files are open, and how it is to be stored and computed. Weights are read when it runs.
#[derive(Debug)]
pub struct Model {
    files: ModelFiles,
    numbers: NumberSettings,
    random_weights: bool,
    context: Option<usize>,
    chunk: usize,
}

impl Model {
    /// Opens a folder in the layout of Hugging Face, or a GGUF file.
    ///
    /// # Errors
    /// When it is not there or not readable; the error says what to do.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Ok(Self::of(ModelFiles::open(Some(path.as_ref()))?))
    }

    /// The small model that is compiled in.
    ///
    /// # Errors
    /// None that a build which passes its tests has.
    pub fn embedded() -> Result<Self> {
        Ok(Self::of(ModelFiles::open(None)?))
    }

    fn of(files: ModelFiles) -> Self {
        Self { files, numbers: NumberSettings::default(), random_weights: false, context: None, chunk: CHUNK }
    }

    /// Stores matrices in this format, converted while they are loaded.
    #[must_use]
    pub fn with_format(mut self, format: FormatRef) -> Self {
        self.numbers.format = Some(format);
        self
    }

    /// Computes with activations of this dtype rather than the one that the model names.
    #[must_use]
    pub fn with_dtype(mut self, dtype: DType) -> Self {
        self.numbers.dtype = Some(dtype);
        self
    }

    /// Keeps keys and values in this dtype rather than in that of activations.
    #[must_use]
    pub fn with_cache_dtype(mut self, dtype: DType) -> Self {
        self.numbers.cache_dtype = Some(dtype);
        self
    }

    /// Multiplies block-quantised weights so on the CPU.
    #[must_use]
    pub fn with_activations(mut self, activations: ActivationMode) -> Self {
        self.numbers.activations = activations;
        self
    }

    /// Takes random weights, for which a configuration is enough.
    #[must_use]
    pub fn with_random_weights(mut self) -> Self {
        self.random_weights = true;
        self
    }

    /// Makes room for sequences of so many tokens, prompt and answer together, rather than for 4096 or what the model was
    /// made for if that is less.
    #[must_use]
    pub fn with_context(mut self, tokens: usize) -> Self {
        self.context = Some(tokens);
        self
    }

    /// Processes at most so many tokens of a prompt in one step rather than 512.
    #[must_use]
    pub fn with_chunk(mut self, tokens: usize) -> Self {
        self.chunk = tokens.max(1);
        self
    }

    /// Its files.
    pub fn files(&self) -> &ModelFiles {
        &self.files
    }

    /// Its tokenizer.
    ///
    /// # Errors
    /// When there is none, or it cannot be read.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        Ok(self.files.tokenizer()?)
    }

    /// Its chat templates; a base model has none.
    ///
    /// # Errors
    /// When they cannot be read.
    pub fn chat_templates(&self) -> Result<ChatTemplates> {
        Ok(self.files.chat_templates()?)
    }

    /// Where it is to run: a [`Device`](crate::Device), or a [`Placement`] that also says how many ranks share it. Devices
    /// are opened when it runs.
    pub fn on(self, placement: impl Into<Placement>) -> PlacedModel {
        PlacedModel { model: self, placement: placement.into() }
    }
}

/// The path as it was given, or the name of the embedded model.
impl fmt::Display for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.files.fmt(f)
    }
}

/// A model and the devices that it is to run on.
#[derive(Debug)]
pub struct PlacedModel {
    model: Model,
    placement: Placement,
}

impl PlacedModel {
    fn context(&self, config: &ModelConfig) -> Result<usize> {
        let most = config.max_context();
        match self.model.context {
            Some(context) if context > most => {
                let value = context.to_string();
                let why = format!("the model supports at most {most} tokens");
                Err(ridge_engine::EngineError::Setting { name: "context", value, why }.into())
            }
            Some(context) => Ok(context),
            None => Ok(CONTEXT.min(most)),
        }
    }

    fn load(
        &self,
        sequences: usize,
        programs: EnginePrograms,
        observer: &mut dyn LoadObserver,
    ) -> Result<(LoadedModel, EngineOptions)> {
        let config = self.model.files.config()?;
        let context = self.context(&config)?;
        let chunk = self.model.chunk.max(sequences);
        let run = RunSettings {
            placement: self.placement.clone(),
            context,
            prompt: context,
            chunk,
            random_weights: self.model.random_weights,
            drafts: 0,
        };
        let options = EngineOptions { context, sequences, chunk: chunk.min(context * sequences), blocks: None };
        let largest = StepExtents { tokens: options.chunk, sequences, context, candidates: 0 };
        let workspace =
            |model: &ridge_models::Model, backend: &dyn Backend| engine_bytes(model, backend, programs, largest);
        let (files, numbers) = (&self.model.files, &self.model.numbers);
        let loaded = load_model(files, &config, numbers, &run, CacheSize::Engine(options), workspace, observer)?;
        Ok((loaded, options))
    }

    /// Loads it into an engine for one sequence at a time.
    ///
    /// # Errors
    /// When a device cannot be opened, memory does not suffice, or a file does not fit the model.
    pub fn engine(&self) -> Result<Engine> {
        let (LoadedModel { session, model, .. }, options) = self.load(1, EnginePrograms::Sampling, &mut ())?;
        Ok(Engine::new(session, &model, options)?)
    }

    /// Loads it into a scheduler of many requests: at most `sequences` answers at a time, and `queue` requests that wait.
    ///
    /// # Errors
    /// As for [`engine`](Self::engine).
    pub fn service(&self, sequences: usize, queue: usize) -> Result<Service> {
        let (LoadedModel { session, model, .. }, engine) = self.load(sequences, EnginePrograms::All, &mut ())?;
        let options = ServiceOptions { engine, queue, policy: Policy::default(), prefix_cache: true };
        Ok(Service::new(session, &model, options)?)
    }

    /// Loads it to make vectors of texts.
    ///
    /// # Errors
    /// As for [`engine`](Self::engine), and when it sees images.
    pub fn embedder(&self, options: EmbedOptions) -> Result<Embedder> {
        let Model { files, numbers, random_weights, .. } = &self.model;
        load_embedder(files, options, numbers, &self.placement, *random_weights, &mut ())
    }

    /// Loads it to score given texts, one at a time.
    ///
    /// # Errors
    /// As for [`engine`](Self::engine).
    pub fn scorer(&self) -> Result<Scorer> {
        let config = self.model.files.config()?;
        let context = self.context(&config)?;
        let step = self.model.chunk.min(context);
        let options = ScorerOptions { context, step, questions: 1 };
        let run = RunSettings {
            placement: self.placement.clone(),
            context,
            prompt: context,
            chunk: step,
            random_weights: self.model.random_weights,
            drafts: 0,
        };
        let (files, numbers) = (&self.model.files, &self.model.numbers);
        let cached = CacheSize::Scorer(options);
        let largest = StepExtents { tokens: step, sequences: 1, context, candidates: 0 };
        let workspace = |model: &ridge_models::Model, backend: &dyn Backend| scorer_bytes(model, backend, largest);
        let LoadedModel { session, model, .. } = load_model(files, &config, numbers, &run, cached, workspace, &mut ())?;
        Ok(Scorer::new(session, &model, options)?)
    }

    /// Loads it to continue texts and conversations.
    ///
    /// # Errors
    /// As for [`engine`](Self::engine), and when there is no tokenizer.
    pub fn writer(&self) -> Result<Writer> {
        let tokenizer = self.model.tokenizer()?;
        let config = self.model.files.config()?;
        let stop_tokens = config.eos_token_ids.iter().copied().chain(tokenizer.eos()).collect();
        let templates = self.model.chat_templates()?;
        Ok(Writer { engine: self.engine()?, tokenizer, stop_tokens, templates, model: self.model.to_string() })
    }
}

/// An engine with its tokenizer: texts in, texts out.
pub struct Writer {
    engine: Engine,
    tokenizer: Tokenizer,
    stop_tokens: Vec<u32>,
    templates: ChatTemplates,
    /// Its name in errors.
    model: String,
}

impl Writer {
    /// Goes on with `prompt` for at most `max_tokens` tokens. `on_text` gets each piece of text as it comes, and can end
    /// it. Gives the whole answer and why it ended.
    ///
    /// # Errors
    /// When the prompt has no tokens or too many, a setting makes no sense, or the device fails.
    pub fn write(
        &mut self,
        prompt: &str,
        sampling: Sampling,
        max_tokens: usize,
        on_text: impl FnMut(&str) -> ControlFlow<()>,
    ) -> Result<(String, Finish)> {
        let prompt = self.tokenizer.encode(prompt, true)?;
        self.write_behind(prompt, self.stop_tokens.clone(), sampling, max_tokens, on_text)
    }

    /// Answers a conversation: a list of messages, each a map with `role` and `content`, which the model's chat template
    /// renders. Otherwise as [`write`](Self::write).
    ///
    /// # Errors
    /// As for `write`, and when the model has no chat template or it rejects the messages.
    pub fn chat(
        &mut self,
        messages: Vec<Data>,
        sampling: Sampling,
        max_tokens: usize,
        on_text: impl FnMut(&str) -> ControlFlow<()>,
    ) -> Result<(String, Finish)> {
        if self.templates.is_empty() {
            return Err(Error::Kind { model: self.model.clone(), wanted: "chat model: it has no chat template" });
        }
        let mut input = ChatInput::new(messages, Clock::now_utc());
        input.add_generation_prompt = true;
        let text = self.templates.render(None, &input)?.text;
        let mut stop_tokens = self.stop_tokens.clone();
        stop_tokens.extend(self.templates.end_of_turn(None, &input, &self.tokenizer));
        // Templates spell the begin token themselves.
        let prompt = self.tokenizer.encode(&text, false)?;
        self.write_behind(prompt, stop_tokens, sampling, max_tokens, on_text)
    }

    fn write_behind(
        &mut self,
        prompt: Vec<u32>,
        stop_tokens: Vec<u32>,
        sampling: Sampling,
        max_tokens: usize,
        mut on_text: impl FnMut(&str) -> ControlFlow<()>,
    ) -> Result<(String, Finish)> {
        let mut stream = TextStream::new(&self.tokenizer, &[]);
        stream.skip(&prompt)?;
        let request = Request { prompt, sampling, max_tokens, stop_tokens };
        let mut answer = String::new();
        let mut failure = None;
        let generated = self.engine.generate(&request, |token| match stream.push(token) {
            Ok(text) => {
                answer.push_str(&text);
                if text.is_empty() { ControlFlow::Continue(()) } else { on_text(&text) }
            }
            Err(error) => {
                failure = Some(error);
                ControlFlow::Break(())
            }
        })?;
        if let Some(error) = failure {
            return Err(error.into());
        }
        let rest = stream.finish()?;
        if !rest.is_empty() {
            answer.push_str(&rest);
            let _ = on_text(&rest);
        }
        Ok((answer, generated.finish))
    }

    /// The engine below.
    pub fn engine(&mut self) -> &mut Engine {
        &mut self.engine
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }
}

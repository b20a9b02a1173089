//! What a family registers, and a decoder's configuration together with its family.

use std::ops::{Deref, DerefMut};

use ridge_graph::{FormatRef, Result as GraphResult};

use super::arrange;
use super::blocks::NormKind;
use super::decoder::{self, DecoderFamily};
use super::drafts;
use super::encoder::EncoderConfig;
use super::gguf_mapping::{GgufEntry, GgufMapping};
use super::image_classifier::VitConfig;
use super::tensors::{TensorName, TensorTable};
use super::text_classifier::TextClassifier;
use crate::config::{DecoderConfig, Fields, REMEDY};
use crate::error::{ModelError, Result};
use crate::model::{BuildOptions, Model};
use crate::module::Module;
use crate::sentence::WordScore;
use ridge_files::Checkpoint;
use ridge_files::checkpoint::Published;

/// All that Ridge knows of a family by its name. Each is registered in `registry.rs`, once.
pub(crate) struct FamilyDefinition {
    /// The name that people see, such as `gemma3`.
    pub(crate) name: &'static str,
    /// The `model_type` of its `config.json`.
    pub(crate) model_type: &'static str,
    /// The class that `architectures` has, if the file has it; any if `None`.
    pub(crate) class: Option<&'static str>,
    /// Keys that cannot change the forward pass, besides those of the base class.
    pub(crate) harmless: &'static [&'static [&'static str]],
    /// How the rest of its configuration is read.
    pub(crate) read: ReadConfig,
    /// Names and placements of its tensors.
    pub(crate) tensors: TensorTable,
    /// How GGUF describes it; `None` if GGUF files of it are not read or written.
    pub(crate) gguf: Option<GgufMapping>,
}

/// How a configuration is read, and with that what can be done with the family.
#[derive(Clone, Copy)]
pub(crate) enum ReadConfig {
    /// It writes text.
    Decoder(fn(&mut Fields<'_>) -> Result<Box<dyn DecoderFamily>>),
    /// It makes vectors.
    Encoder(fn(&mut Fields<'_>) -> Result<EncoderConfig>),
    /// It tells what an image shows.
    ImageClassifier(fn(&mut Fields<'_>) -> Result<VitConfig>),
}

impl std::fmt::Debug for FamilyDefinition {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.model_type)
    }
}

/// What Ridge can do with a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FamilyKind {
    /// It writes text: [`ModelConfig`] reads its configuration.
    Decoder,
    /// It makes vectors of texts, or classifies them: [`EncoderConfig`] reads its configuration.
    Encoder,
    /// It tells what an image shows: [`VitConfig`] reads its configuration.
    ImageClassifier,
}

impl FamilyDefinition {
    /// What Ridge can do with the family.
    pub(crate) fn kind(&self) -> FamilyKind {
        match self.read {
            ReadConfig::Decoder(_) => FamilyKind::Decoder,
            ReadConfig::Encoder(_) => FamilyKind::Encoder,
            ReadConfig::ImageClassifier(_) => FamilyKind::ImageClassifier,
        }
    }

    /// As [`FamilyDefinition::begin`], of a decoder that is read as an encoder: the class may be that without a head, or with
    /// one that classifies texts.
    pub(crate) fn begin_encoder(&self, fields: &mut Fields<'_>) -> Result<()> {
        const HEADS: [&str; 2] = ["LMHeadModel", "ForCausalLM"];
        if let Some(class) = self.class {
            let head = HEADS.into_iter().find(|head| class.ends_with(head)).unwrap_or_default();
            let stem = class.strip_suffix(head).unwrap_or(class);
            let ends = [head, "Model", "ForSequenceClassification"];
            let classes: Vec<String> =
                ["", "Text"].iter().flat_map(|text| ends.map(|end| format!("{stem}{text}{end}"))).collect();
            fields.architecture_of(&classes.iter().map(String::as_str).collect::<Vec<_>>())?;
        }
        self.harmless.iter().for_each(|keys| fields.harmless(keys));
        Ok(())
    }

    /// Checks the class of the model, and marks the keys that cannot change the forward pass.
    pub(crate) fn begin(&self, fields: &mut Fields<'_>) -> Result<()> {
        if let Some(class) = self.class {
            fields.architecture(class)?;
        }
        self.harmless.iter().for_each(|keys| fields.harmless(keys));
        Ok(())
    }

    /// The graph of `config`, which is of this family.
    pub(crate) fn build(&self, config: &dyn DecoderFamily, options: &BuildOptions) -> GraphResult<Model> {
        let mut model = decoder::build(self.name, &self.tensors, config, options)?;
        if options.drafts > 0 {
            model.drafts = Some(drafts::build(&self.tensors, config, options)?);
        }
        Ok(model)
    }

    /// The training graph of `config`, which is of this family.
    pub(crate) fn build_training(&self, config: &dyn DecoderFamily, options: &BuildOptions) -> GraphResult<Module> {
        decoder::build_training(self.name, &self.tensors, config, options)
    }
}

/// The configuration of a decoder of one of the families that Ridge knows. Derefs to what all of them have.
#[derive(Debug)]
pub struct ModelConfig {
    family: &'static FamilyDefinition,
    config: Box<dyn DecoderFamily>,
}

impl ModelConfig {
    /// The configuration `config` of `family`.
    pub(crate) fn new(family: &'static FamilyDefinition, config: Box<dyn DecoderFamily>) -> Self {
        Self { family, config }
    }

    /// Its family's `model_type`, such as `llama`.
    pub fn model_type(&self) -> &'static str {
        self.family.model_type
    }

    /// The configuration as that of one family, such as [`LlamaConfig`](super::LlamaConfig), if it is of that.
    pub fn downcast_ref<T: 'static>(&self) -> Option<&T> {
        self.config.as_any().downcast_ref()
    }

    /// Builds the graph of this model, with every weight as plain f32;
    /// [`WeightSource::retype`](crate::WeightSource::retype) gives them the storage that a checkpoint has.
    ///
    /// # Errors
    /// When drafts are asked for and the model has no module that predicts tokens. Others are mistakes of ours: the configuration
    /// has been checked.
    pub fn build(&self, options: &BuildOptions) -> GraphResult<Model> {
        self.family.build(&*self.config, options)
    }

    /// Parameters of the module that predicts further tokens, if there is one, besides the embedding and the output projection, which
    /// it shares with the model.
    ///
    /// # Errors
    /// As for [`ModelConfig::build`].
    pub fn prediction_parameters(&self) -> GraphResult<Option<u64>> {
        if !self.predicts() {
            return Ok(None);
        }
        let model = |drafts| self.build(&BuildOptions { drafts, ..BuildOptions::default() });
        Ok(Some(model(1)?.parameter_count() - model(0)?.parameter_count()))
    }

    /// Builds the graph that this model is trained with: the same weights without a cache, each token attending to those of
    /// its own sequence in the step. The cache and block size of `options` do not matter.
    ///
    /// Step inputs, each i32 `[tokens]`: `token_ids`; `positions`, from 0 in each sequence; `seq_ids`, the sequence of each
    /// token, negative for padding: tokens of a sequence stand together and in order, and documents that are packed into one
    /// row have ids of their own; and `targets`, the token that should follow each, negative where none is asked for.
    ///
    /// Outputs, of which a program is compiled for those that it needs ([`prune`](ridge_graph::passes::prune) the graph
    /// before it is differentiated):
    /// - `loss`: f32 scalar, the mean over the targets asked for of their negative log likelihood; 0 without targets;
    /// - `loss_sum`, `target_count`: f32 scalars, of which `loss` is the quotient;
    /// - `all_logits`: f32 `[tokens, vocab]`; `hidden`: f32 `[tokens, hidden]`.
    ///
    /// # Errors
    /// As [`ModelConfig::build`].
    pub fn build_training(&self, options: &BuildOptions) -> GraphResult<Module> {
        self.family.build_training(&*self.config, options)
    }

    /// The same layers as an encoder that scores texts by what this model would write after them.
    ///
    /// # Errors
    /// When a token is not of the vocabulary; `file` names it in errors.
    pub fn into_scorer(self, file: &str, words: WordScore) -> Result<EncoderConfig> {
        for id in [Some(words.yes), words.no].into_iter().flatten() {
            if id as usize >= self.vocab_size {
                return Err(ModelError::Value {
                    file: file.to_owned(),
                    key: "vocab_size".to_owned(),
                    value: self.vocab_size.to_string(),
                    problem: format!("is not above {id}, a token that texts are scored by"),
                    remedy: REMEDY.to_owned(),
                });
            }
        }
        let (family, classifier) = (self.family, TextClassifier::of_words(words));
        Ok(EncoderConfig::of_decoder(family.model_type, &family.tensors, self.config.into(), Some(classifier)))
    }

    /// `checkpoint` with the names and shapes that the graph's weights have: fused tensors are divided and transposed
    /// ones turned.
    ///
    /// # Errors
    /// [`FilesError::Safetensors`](ridge_files::FilesError::Safetensors) when a fused tensor is missing or has too few rows.
    pub fn arrange(&self, checkpoint: Checkpoint) -> Result<Checkpoint> {
        self.arrange_for(checkpoint, &BuildOptions::default())
    }

    /// As [`ModelConfig::arrange`], for the graph that is built with `options`.
    ///
    /// # Errors
    /// As for [`ModelConfig::arrange`].
    pub fn arrange_for(&self, checkpoint: Checkpoint, options: &BuildOptions) -> Result<Checkpoint> {
        arrange::arrange(&self.family.tensors, &*self.config, checkpoint, options.drafts > 0)
    }

    /// Has the model a module that predicts further tokens, which [`BuildOptions::drafts`] can be taken from?
    pub fn predicts(&self) -> bool {
        self.config.prediction().is_some()
    }

    /// The tensors of an arranged checkpoint as the family publishes them.
    pub(crate) fn published<'a>(&self, checkpoint: &'a Checkpoint) -> Vec<Published<'a>> {
        checkpoint.published(&self.config.parts(), &self.config.stacks())
    }

    /// Is one added to the weights of its norms?
    pub(crate) fn adds_one_to_norms(&self) -> bool {
        matches!(self.config.norm(), NormKind::RmsPlusOne(_))
    }

    /// As [`DecoderFamily::published_format`].
    pub(crate) fn published_format(&self, name: &str, rank: usize) -> Option<FormatRef> {
        self.config.published_format(name, rank)
    }

    /// Its family.
    pub(crate) fn family(&self) -> &'static FamilyDefinition {
        self.family
    }

    /// The tensors of a layer.
    pub(crate) fn layer_tensors(&self) -> Vec<TensorName> {
        self.config.layer_tensors(self.family.tensors.of_layer().copied().collect())
    }

    /// As [`DecoderFamily::gguf_metadata`].
    pub(crate) fn gguf_metadata(&self) -> Result<Vec<(&'static str, GgufEntry)>, &'static str> {
        self.config.gguf_metadata()
    }
}

impl Clone for ModelConfig {
    fn clone(&self) -> Self {
        Self { family: self.family, config: self.config.boxed() }
    }
}

impl PartialEq for ModelConfig {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self.family, other.family) && self.config.equals(&*other.config)
    }
}

impl Deref for ModelConfig {
    type Target = DecoderConfig;

    fn deref(&self) -> &DecoderConfig {
        self.config.decoder()
    }
}

impl DerefMut for ModelConfig {
    fn deref_mut(&mut self) -> &mut DecoderConfig {
        self.config.decoder_mut()
    }
}

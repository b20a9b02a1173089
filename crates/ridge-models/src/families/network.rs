//! A network of any kind, and its configuration: for what treats all of them alike, such as `ridge inspect`.

use ridge_files::Checkpoint;
use ridge_graph::{DType, Result as GraphResult};

use super::definition::{FamilyKind, ModelConfig};
use super::encoder::EncoderConfig;
use super::image_classifier::VitConfig;
use super::registry::family_kind;
use crate::error::Result;
use crate::model::{BuildOptions, Encoder, ImageClassifier, Model};
use crate::module::Module;

/// The configuration of a network of any family.
#[derive(Debug)]
pub enum NetworkConfig {
    /// Of a decoder.
    Decoder(ModelConfig),
    /// Of an encoder of texts.
    Encoder(EncoderConfig),
    /// Of a classifier of images.
    ImageClassifier(VitConfig),
}

/// A network ready to be compiled.
#[derive(Clone, Debug)]
pub enum Network {
    /// A decoder.
    Decoder(Model),
    /// An encoder of texts.
    Encoder(Encoder),
    /// A classifier of images.
    ImageClassifier(ImageClassifier),
}

impl NetworkConfig {
    /// Reads the text of a `config.json` of any family that Ridge knows. `file` names it in errors.
    ///
    /// # Errors
    /// As for [`ModelConfig::from_json`].
    pub fn from_json(file: &str, text: &str) -> Result<Self> {
        Ok(match family_kind(file, text)? {
            Some(FamilyKind::Encoder) => Self::Encoder(EncoderConfig::from_json(file, text)?),
            Some(FamilyKind::ImageClassifier) => Self::ImageClassifier(VitConfig::from_json(file, text)?),
            Some(FamilyKind::Decoder) | None => Self::Decoder(ModelConfig::from_json(file, text)?),
        })
    }

    /// The dtype the weights were published in, if the file says.
    pub fn torch_dtype(&self) -> Option<DType> {
        match self {
            Self::Decoder(config) => config.torch_dtype,
            Self::Encoder(config) => config.torch_dtype,
            Self::ImageClassifier(config) => config.torch_dtype,
        }
    }

    /// Builds the graph, with every weight as plain f32.
    ///
    /// # Errors
    /// A mistake of ours: the configuration has been checked.
    pub fn build(&self, options: &BuildOptions) -> GraphResult<Network> {
        Ok(match self {
            Self::Decoder(config) => Network::Decoder(config.build(options)?),
            Self::Encoder(config) => Network::Encoder(config.build(options)?),
            Self::ImageClassifier(config) => Network::ImageClassifier(config.build(options)?),
        })
    }

    /// `checkpoint` with the names and shapes that the graph's weights have; as it is if the family only is planned.
    ///
    /// # Errors
    /// [`FilesError::Safetensors`](ridge_files::FilesError::Safetensors) when a tensor does not fit the configuration.
    pub fn arrange(&self, checkpoint: Checkpoint) -> Result<Checkpoint> {
        match self {
            Self::Decoder(config) => config.arrange(checkpoint),
            Self::Encoder(config) => config.arrange(checkpoint),
            Self::ImageClassifier(config) => Ok(config.arrange(checkpoint)),
        }
    }
}

impl Network {
    /// What all networks have.
    pub fn module(&self) -> &Module {
        match self {
            Self::Decoder(model) => &model.module,
            Self::Encoder(encoder) => &encoder.module,
            Self::ImageClassifier(classifier) => &classifier.module,
        }
    }

    /// What all networks have, to be changed.
    pub fn module_mut(&mut self) -> &mut Module {
        match self {
            Self::Decoder(model) => &mut model.module,
            Self::Encoder(encoder) => &mut encoder.module,
            Self::ImageClassifier(classifier) => &mut classifier.module,
        }
    }
}

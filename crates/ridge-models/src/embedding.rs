//! A model's files, read as those of one that makes vectors of texts.

use ridge_files::Checkpoint;

use crate::error::{ModelError, Result};
use crate::families::{EncoderConfig, FamilyKind, NetworkConfig, family_kind};
use crate::gguf;
use crate::sentence::SentenceConfig;
use crate::source::ModelFiles;

const MODULES: &str = "modules.json";
const ACTION: &str = "read how texts become vectors";

impl ModelFiles {
    /// What sentence-transformers' files beside the model say, if they are there.
    ///
    /// # Errors
    ///
    /// [`ModelError::Files`] if a file cannot be read, else as for [`SentenceConfig::read`].
    pub fn sentence_config(&self) -> Result<Option<SentenceConfig>> {
        if let Some(gguf) = self.gguf() {
            let said = |pooling| SentenceConfig { pooling, ..SentenceConfig::default() };
            return Ok(gguf::pooling(gguf)?.map(said));
        }
        let modules = self.optional_text(MODULES, ACTION)?;
        let read = |name: &str| self.optional_text(name, ACTION);
        modules.map(|modules| SentenceConfig::read(&modules, &|name| self.file(name), &read)).transpose()
    }

    /// Do the files say how texts become vectors?
    fn makes_vectors(&self) -> Result<bool> {
        match self.gguf() {
            Some(gguf) => Ok(gguf::pooling(gguf)?.is_some()),
            None => Ok(self.optional_text(MODULES, ACTION)?.is_some()),
        }
    }

    /// The configuration of the network that makes vectors or scores as `sentence` says. A decoder is read as an encoder, which
    /// keeps no cache, where its files say how texts become vectors or `sentence` how they are scored.
    ///
    /// # Errors
    ///
    /// As for [`ModelFiles::network_config`], when a dense layer does not take what the one before gives, and when a model
    /// that is scored by words writes none.
    pub fn embedding_config(&self, sentence: &SentenceConfig) -> Result<NetworkConfig> {
        let name = self.file("config.json");
        if let Some(words) = sentence.words {
            return Ok(NetworkConfig::Encoder(self.config()?.into_scorer(&name, words)?));
        }
        let text = self.config_text()?;
        let reads = match family_kind(&name, &text)? {
            Some(FamilyKind::Encoder) => true,
            Some(FamilyKind::Decoder) => self.makes_vectors()?,
            _ => false,
        };
        if !reads {
            return self.network_config();
        }
        let mut config = EncoderConfig::from_json(&name, &text)?;
        let mut width = config.hidden_size;
        for layer in &sentence.dense {
            if layer.from != width {
                return Err(ModelError::Value {
                    file: self.file(&format!("{}/config.json", layer.folder)),
                    key: "in_features".to_owned(),
                    value: layer.from.to_string(),
                    problem: format!("is not {width}, the width of the vectors before it"),
                    remedy: "check that the module belongs to this model".to_owned(),
                });
            }
            width = layer.to;
        }
        config.dense.clone_from(&sentence.dense);
        if let (Some(classifier), Some(sigmoid)) = (&mut config.classifier, sentence.sigmoid) {
            classifier.sigmoid = sigmoid;
        }
        Ok(NetworkConfig::Encoder(config))
    }

    /// The weights of the network of this configuration, under the names that its graph has: those of the model, and of layers
    /// behind pooling, which have folders of their own.
    ///
    /// # Errors
    ///
    /// As for [`ModelFiles::checkpoint`] and [`NetworkConfig::arrange`].
    pub fn network_checkpoint(&self, config: &NetworkConfig) -> Result<Checkpoint> {
        let mut checkpoint = config.arrange(self.checkpoint()?)?;
        if let (NetworkConfig::Encoder(config), Some(folder)) = (config, self.folder()) {
            for layer in &config.dense {
                let of_layer = Checkpoint::open(folder.join(&layer.folder))?;
                checkpoint = checkpoint.with_tensors(&format!("{}.", layer.folder), of_layer)?;
            }
        }
        Ok(checkpoint)
    }
}

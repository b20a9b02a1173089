//! The families, a file each: what a layer is made of, from the blocks of `blocks.rs`, and the table of tensor names.
//! Everything that decoders have in common is in `decoder.rs`. A family knows nothing of devices, parallelism or
//! formats.
//!
//! Read `decoder.rs`, then `llama.rs`, then whichever differs in what you are after: `gemma.rs` has local layers and
//! caps, `olmo2.rs` norms after each half of a layer, `gpt_neox.rs` both halves side by side, `phi3.rs` fused tensors.

mod bert;
mod blocks;
mod decoder;
mod falcon;
mod gemma;
mod gpt2;
mod gpt_neox;
mod llama;
mod mistral;
mod olmo2;
mod phi3;
mod planned;
mod qwen;

use ridge_graph::Result as GraphResult;

use crate::config::{LlamaConfig, ModelConfig};
use crate::error::Result;
use crate::model::{BuildOptions, Model};
use decoder::Family;
use ridge_files::Checkpoint;
use ridge_files::checkpoint::Published;

impl ModelConfig {
    fn family(&self) -> &dyn Family {
        match self {
            Self::Llama(c) => c,
            Self::Mistral(c) => c,
            Self::Qwen(c) => c,
            Self::Gemma(c) => c,
            Self::Phi3(c) => c,
            Self::Olmo2(c) => c,
            Self::Gpt2(c) => c,
            Self::GptNeox(c) => c,
            Self::Falcon(c) => c,
        }
    }

    /// Builds the graph of this model, with every weight as plain f32;
    /// [`WeightSource::retype`](crate::WeightSource::retype) gives them the storage that a checkpoint has.
    ///
    /// # Errors
    /// A mistake of ours: the configuration has been checked.
    pub fn build(&self, options: &BuildOptions) -> GraphResult<Model> {
        decoder::build(self.family(), options)
    }

    /// `checkpoint` with the names and shapes that the graph's weights have: fused tensors are divided and transposed
    /// ones turned.
    ///
    /// # Errors
    /// [`FilesError::Safetensors`](ridge_files::FilesError::Safetensors) when a fused tensor is missing or has too few rows.
    pub fn arrange(&self, checkpoint: Checkpoint) -> Result<Checkpoint> {
        decoder::arrange(self.family(), checkpoint)
    }

    /// The tensors of an arranged checkpoint as the family publishes them.
    pub(crate) fn published<'a>(&self, checkpoint: &'a Checkpoint) -> Vec<Published<'a>> {
        checkpoint.published(&self.family().parts())
    }
}

/// Builds the graph of a Llama; see [`ModelConfig::build`].
///
/// # Errors
/// A mistake of ours: `config` has been checked.
pub fn llama(config: &LlamaConfig, options: &BuildOptions) -> GraphResult<Model> {
    decoder::build(config, options)
}

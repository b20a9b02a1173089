//! BERT and the encoders of its build (Devlin et al. 2019): learned positions, segments, norms after each half of a layer.

use ridge_graph::DType;
use ridge_graph::ops::Gelu;

use super::decoder::{DecoderConfig, Keys, USUAL};
use super::fields::Fields;
use crate::error::Result;
use ridge_files::json;

/// Every size and switch of a BERT encoder.
#[derive(Clone, Debug, PartialEq)]
pub struct BertConfig {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Layers.
    pub num_hidden_layers: usize,
    /// Heads of each layer; they divide the width.
    pub num_attention_heads: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Positions that are learned: a limit.
    pub max_position_embeddings: usize,
    /// Segments that are learned.
    pub type_vocab_size: usize,
    /// Added to the variance inside every norm.
    pub norm_eps: f64,
    /// Activation of the MLP.
    pub activation: Gelu,
    /// The dtype the weights were published in, if the file says.
    pub torch_dtype: Option<DType>,
}

impl BertConfig {
    /// Is `text`, a `config.json`, one of a BERT?
    ///
    /// # Errors
    /// When the text is not a JSON object. `file` names it in errors.
    pub fn is_one(file: &str, text: &str) -> Result<bool> {
        let map = json::object(file, text.as_bytes())?;
        Ok(map.get("model_type").is_some_and(|kind| kind == "bert"))
    }

    /// Reads the text of a `config.json`. `file` names it in errors.
    ///
    /// # Errors
    /// As for [`ModelConfig::from_json`](super::ModelConfig::from_json).
    pub fn from_json(file: &str, text: &str) -> Result<Self> {
        const KEYS: Keys =
            Keys { norm_eps: "layer_norm_eps", attention_dropout: "attention_probs_dropout_prob", ..USUAL };
        let map = json::object(file, text.as_bytes())?;
        let mut f = Fields::new(file, &map);
        if f.required::<&str>("model_type")? != "bert" {
            return Err(f.wrong("model_type", "is not an encoder that Ridge reads", "choose a checkpoint of bert"));
        }
        // What heads for other tasks the checkpoint has makes no difference to the encoder.
        f.harmless(&["architectures", "classifier_dropout", "hidden_dropout_prob"]);
        f.must_be("position_embedding_type", "absolute")?;
        let type_vocab_size = f.size("type_vocab_size", 1 << 16)?;
        let activation = f.gelu("hidden_act", Gelu::Erf)?;
        let of_decoders = DecoderConfig::read(&mut f, &KEYS)?;
        f.finish()?;
        Ok(Self {
            hidden_size: of_decoders.hidden_size,
            intermediate_size: of_decoders.intermediate_size,
            num_hidden_layers: of_decoders.num_hidden_layers,
            num_attention_heads: of_decoders.num_attention_heads,
            vocab_size: of_decoders.vocab_size,
            max_position_embeddings: of_decoders.max_position_embeddings,
            type_vocab_size,
            norm_eps: of_decoders.norm_eps,
            activation,
            torch_dtype: of_decoders.torch_dtype,
        })
    }
}

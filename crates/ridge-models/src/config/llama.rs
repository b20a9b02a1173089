//! The Llama family: Llama 2, Llama 3 and the many checkpoints that share their layers.

use ridge_graph::DType;

use super::fields::Fields;
use super::{RopeScaling, common, rope};
use crate::error::Result;
use crate::json;

/// Every size and switch of a Llama model, checked against each other.
///
/// Sizes are within limits so wide that no published model comes near them, and so narrow that the number of
/// parameters, and of bytes at any dtype, fits a `u64`.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the gated MLP.
    pub intermediate_size: usize,
    /// Number of decoder layers.
    pub num_hidden_layers: usize,
    /// Query heads of each layer.
    pub num_attention_heads: usize,
    /// Key and value heads of each layer; divides `num_attention_heads`.
    pub num_key_value_heads: usize,
    /// Width of one head, even. Not always `hidden_size / num_attention_heads`.
    pub head_dim: usize,
    /// Rows of the embedding and of the output projection. May exceed the tokenizer's vocabulary.
    pub vocab_size: usize,
    /// Longest context the model was made for, in tokens.
    pub max_position_embeddings: usize,
    /// Added to the mean square inside every RMS norm; above 0.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies; above 0.
    pub rope_theta: f64,
    /// How the rotary frequencies are stretched, if they are.
    pub rope_scaling: Option<RopeScaling>,
    /// Is the output projection the embedding, transposed?
    pub tie_word_embeddings: bool,
    /// Do the four projections of attention have biases?
    pub attention_bias: bool,
    /// Do the three projections of the MLP have biases?
    pub mlp_bias: bool,
    /// Probability in `0.0..1.0` of dropping an attention weight, in training only.
    pub attention_dropout: f64,
    /// The dtype the weights were published in, if the file says.
    pub torch_dtype: Option<DType>,
    /// The token that begins a text; below `vocab_size`.
    pub bos_token_id: Option<u32>,
    /// The tokens that end a text, each below `vocab_size`; may be empty.
    pub eos_token_ids: Vec<u32>,
}

const MOST_HIDDEN: usize = 1 << 20;
const MOST_INTERMEDIATE: usize = 1 << 22;
const MOST_LAYERS: usize = 1 << 12;
const MOST_HEADS: usize = 1 << 14;
const MOST_HEAD_DIM: usize = 1 << 12;
const MOST_VOCAB: usize = 1 << 26;
const MOST_POSITIONS: usize = 1 << 30;

/// Keys that some checkpoints of this family carry and that do not change the forward pass.
const HARMLESS: &[&str] = &["is_llama_config", "max_sequence_length"];

impl LlamaConfig {
    /// Reads the text of a `config.json`. `file` names it in errors.
    ///
    /// # Errors
    ///
    /// An error that names file, key, value and remedy if the text is not JSON, a needed key is missing, a value is
    /// impossible or contradicts another, the model is of another family or asks for something that Ridge does not
    /// do, or there is a key that Ridge does not know.
    pub fn from_json(file: &str, text: &str) -> Result<Self> {
        let map = json::object(file, text.as_bytes())?;
        let mut fields = Fields::new(file, &map);
        check_family(&mut fields)?;
        let config = Self::read(&mut fields)?;
        config.check(&fields)?;
        fields.finish()?;
        Ok(config)
    }

    fn read(f: &mut Fields<'_>) -> Result<Self> {
        f.harmless(HARMLESS);
        f.must_be("hidden_act", "silu")?;
        f.must_be("pretraining_tp", 1)?;
        let common = common::read(f)?;
        let rope = rope::read(f, MOST_POSITIONS)?;
        let hidden_size = f.size("hidden_size", MOST_HIDDEN)?;
        let num_attention_heads = f.size("num_attention_heads", MOST_HEADS)?;
        let head_dim = match f.optional_size("head_dim", MOST_HEAD_DIM)? {
            Some(head_dim) => head_dim,
            None if hidden_size.is_multiple_of(num_attention_heads) => hidden_size / num_attention_heads,
            None => {
                return Err(f.wrong(
                    "num_attention_heads",
                    format!("does not divide hidden_size = {hidden_size}, and there is no head_dim"),
                    "check that the file is complete",
                ));
            }
        };
        Ok(Self {
            hidden_size,
            intermediate_size: f.size("intermediate_size", MOST_INTERMEDIATE)?,
            num_hidden_layers: f.size("num_hidden_layers", MOST_LAYERS)?,
            num_attention_heads,
            num_key_value_heads: f.optional_size("num_key_value_heads", MOST_HEADS)?.unwrap_or(num_attention_heads),
            head_dim,
            vocab_size: f.size("vocab_size", MOST_VOCAB)?,
            max_position_embeddings: f.size("max_position_embeddings", MOST_POSITIONS)?,
            rms_norm_eps: f.positive("rms_norm_eps")?,
            rope_theta: rope.theta.unwrap_or(10_000.0), // Llama 2 leaves it out
            rope_scaling: rope.scaling,
            tie_word_embeddings: common.tie_word_embeddings.unwrap_or(false),
            attention_bias: f.optional("attention_bias")?.unwrap_or(false),
            mlp_bias: f.optional("mlp_bias")?.unwrap_or(false),
            attention_dropout: f.optional("attention_dropout")?.unwrap_or(0.0),
            torch_dtype: common.dtype,
            bos_token_id: common.bos_token_id,
            eos_token_ids: common.eos_token_ids,
        })
    }

    /// What one key cannot say alone.
    fn check(&self, f: &Fields<'_>) -> Result<()> {
        const REMEDY: &str = "check that the config belongs to this checkpoint";
        let heads = self.num_attention_heads;
        if !heads.is_multiple_of(self.num_key_value_heads) {
            return Err(f.wrong(
                "num_key_value_heads",
                format!("does not divide num_attention_heads = {heads}"),
                REMEDY,
            ));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(f.wrong(
                "head_dim",
                format!("makes heads {} wide, which is odd: rotary embedding turns pairs", self.head_dim),
                REMEDY,
            ));
        }
        if !(0.0..1.0).contains(&self.attention_dropout) {
            return Err(f.wrong("attention_dropout", "is outside 0.0..1.0", REMEDY));
        }
        let outside = |id: &u32| *id as usize >= self.vocab_size;
        let below = format!("is not below vocab_size = {}", self.vocab_size);
        if self.bos_token_id.as_ref().is_some_and(outside) {
            return Err(f.wrong("bos_token_id", below, REMEDY));
        }
        if self.eos_token_ids.iter().any(outside) {
            return Err(f.wrong("eos_token_id", below, REMEDY));
        }
        Ok(())
    }
}

fn check_family(fields: &mut Fields<'_>) -> Result<()> {
    if fields.required::<&str>("model_type")? != "llama" {
        return Err(fields.wrong(
            "model_type",
            "is not a family that Ridge reads",
            "choose a checkpoint of the family \"llama\"",
        ));
    }
    let architectures: Option<Vec<&str>> = fields.optional("architectures")?;
    if architectures.is_some_and(|names| names != ["LlamaForCausalLM"]) {
        return Err(fields.wrong(
            "architectures",
            "is not what Ridge reads",
            "choose a causal language model: architectures = [\"LlamaForCausalLM\"]",
        ));
    }
    Ok(())
}

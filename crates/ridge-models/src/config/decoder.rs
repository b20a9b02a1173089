//! What the configuration of every decoder says, under the names that its family gave the keys.

use ridge_graph::DType;

use super::common;
use super::fields::{Fields, REMEDY};
use super::published_codes::PublishedCodes;
use super::rope::{MAX_POSITIONS, RopeConfig, RopeScaling, RopeSizes};
use crate::error::Result;

/// The sizes and tokens that every decoder has, checked against each other. A family's configuration derefs to this.
///
/// Sizes are within limits so wide that no published model comes near them, and so narrow that the number of
/// parameters, and of bytes at any dtype, fits a `u64`.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Number of decoder layers.
    pub num_hidden_layers: usize,
    /// Query heads of each layer.
    pub num_attention_heads: usize,
    /// Key and value heads of each layer; divides `num_attention_heads`.
    pub num_key_value_heads: usize,
    /// Width of one head; even where a part of it is rotated. Not always `hidden_size / num_attention_heads`.
    pub head_dim: usize,
    /// Key and value heads of layers that have others, and the width of heads there.
    pub other_heads: Option<[usize; 2]>,
    /// Do all query heads share one latent in the cache (latent attention)? Then `num_key_value_heads` is 1 whatever the file
    /// says, and `head_dim` is the latent's width.
    pub latent_attention: bool,
    /// Rows of the embedding and of the output projection. May exceed the tokenizer's vocabulary.
    pub vocab_size: usize,
    /// Positions of the context according to the file; see [`DecoderConfig::max_context`].
    pub max_position_embeddings: usize,
    /// Added to the mean square or the variance inside every norm; above 0.
    pub norm_eps: f64,
    /// How queries and keys are rotated, if they are.
    pub rope: Option<RopeConfig>,
    /// Is the output projection the embedding, transposed?
    pub tie_word_embeddings: bool,
    /// Probability in `0.0..1.0` of dropping an attention weight, in training only.
    pub attention_dropout: f64,
    /// The dtype the weights were published in, if the file says.
    pub torch_dtype: Option<DType>,
    /// The 8-bit codes that the weights were published in, if the file says so.
    pub(crate) codes: Option<PublishedCodes>,
    /// The token that begins a text; below `vocab_size`.
    pub bos_token_id: Option<u32>,
    /// The tokens that end a text, each below `vocab_size`; may be empty.
    pub eos_token_ids: Vec<u32>,
}

pub(crate) const MAX_HIDDEN: usize = 1 << 20;
pub(crate) const MAX_INTERMEDIATE: usize = 1 << 22;
pub(crate) const MAX_LAYERS: usize = 1 << 12;
pub(crate) const MAX_HEADS: usize = 1 << 14;
const MAX_HEAD_DIM: usize = 1 << 12;
const MAX_VOCAB: usize = 1 << 26;

/// A family's names of the keys, and its defaults. A key that a family lacks is empty: without attention there
/// is one head, and a family that lists its layers counts them itself.
pub(crate) struct DecoderKeys {
    pub(crate) hidden_size: &'static str,
    pub(crate) intermediate_size: &'static str,
    /// The width of the MLP, in widths of the residual stream, where the file has none.
    pub(crate) intermediate_factor: Option<usize>,
    pub(crate) num_hidden_layers: &'static str,
    pub(crate) num_attention_heads: &'static str,
    pub(crate) num_key_value_heads: &'static str,
    pub(crate) max_position_embeddings: &'static str,
    /// Positions where the file has none.
    pub(crate) positions: Option<usize>,
    pub(crate) norm_eps: &'static str,
    /// The epsilon of norms where the file has none.
    pub(crate) default_eps: Option<f64>,
    pub(crate) attention_dropout: &'static str,
    pub(crate) tie_word_embeddings: bool,
}

/// The names of Llama, which most families took over. As many key and value heads as query heads, heads that divide
/// the hidden size, and an output projection of its own if the file does not say otherwise.
pub(crate) const DECODER_KEYS: DecoderKeys = DecoderKeys {
    hidden_size: "hidden_size",
    intermediate_size: "intermediate_size",
    intermediate_factor: None,
    num_hidden_layers: "num_hidden_layers",
    num_attention_heads: "num_attention_heads",
    num_key_value_heads: "num_key_value_heads",
    max_position_embeddings: "max_position_embeddings",
    positions: None,
    norm_eps: "rms_norm_eps",
    default_eps: None,
    attention_dropout: "attention_dropout",
    tie_word_embeddings: false,
};

impl DecoderConfig {
    /// The longest context that the model was made for, in tokens: more than the file's positions where dynamic
    /// scaling of the frequencies extends them.
    pub fn max_context(&self) -> usize {
        match self.rope.as_ref().and_then(|rope| rope.scaling.as_ref()) {
            Some(RopeScaling::Dynamic { factor, .. }) => (self.max_position_embeddings as f64 * factor) as usize,
            _ => self.max_position_embeddings,
        }
    }

    /// What a rotation of its heads depends on.
    pub(crate) fn rope_sizes(&self) -> RopeSizes {
        RopeSizes { head_dim: self.head_dim, positions: self.max_position_embeddings }
    }

    /// Reads `keys` and those of the base class; without rotation, which [`super::rope::read`] reads.
    pub(crate) fn read(f: &mut Fields<'_>, keys: &DecoderKeys) -> Result<Self> {
        let common = common::read(f)?;
        let hidden_size = f.size(keys.hidden_size, MAX_HIDDEN)?;
        let num_attention_heads = match keys.num_attention_heads {
            "" => 1,
            key => f.size(key, MAX_HEADS)?,
        };
        let head_dim = match f.optional_size("head_dim", MAX_HEAD_DIM)? {
            Some(head_dim) => head_dim,
            None if hidden_size.is_multiple_of(num_attention_heads) => hidden_size / num_attention_heads,
            None => {
                let problem = format!("does not divide {} = {hidden_size}, and there is no head_dim", keys.hidden_size);
                return Err(f.wrong(keys.num_attention_heads, problem, "check that the file is complete"));
            }
        };
        let intermediate_size = match keys.intermediate_factor {
            Some(factor) => f.optional_size(keys.intermediate_size, MAX_INTERMEDIATE)?.unwrap_or(factor * hidden_size),
            None => f.size(keys.intermediate_size, MAX_INTERMEDIATE)?,
        };
        let max_position_embeddings = match keys.positions {
            Some(positions) => f.optional_size(keys.max_position_embeddings, MAX_POSITIONS)?.unwrap_or(positions),
            None => f.size(keys.max_position_embeddings, MAX_POSITIONS)?,
        };
        let config = Self {
            hidden_size,
            intermediate_size,
            num_hidden_layers: match keys.num_hidden_layers {
                "" => 1,
                key => f.size(key, MAX_LAYERS)?,
            },
            num_attention_heads,
            num_key_value_heads: f.optional_size(keys.num_key_value_heads, MAX_HEADS)?.unwrap_or(num_attention_heads),
            head_dim,
            other_heads: None,
            latent_attention: false,
            vocab_size: f.size("vocab_size", MAX_VOCAB)?,
            max_position_embeddings,
            norm_eps: match keys.default_eps {
                Some(eps) => f.optional_positive(keys.norm_eps)?.unwrap_or(eps),
                None => f.positive(keys.norm_eps)?,
            },
            rope: None,
            tie_word_embeddings: common.tie_word_embeddings.unwrap_or(keys.tie_word_embeddings),
            attention_dropout: f.optional(keys.attention_dropout)?.unwrap_or(0.0),
            torch_dtype: common.dtype,
            codes: common.codes,
            bos_token_id: common.bos_token_id,
            eos_token_ids: common.eos_token_ids,
        };
        config.check(f, keys)?;
        Ok(config)
    }

    /// Checks what depends on several keys.
    fn check(&self, f: &Fields<'_>, keys: &DecoderKeys) -> Result<()> {
        let heads = self.num_attention_heads;
        if !heads.is_multiple_of(self.num_key_value_heads) {
            let problem = format!("does not divide {} = {heads}", keys.num_attention_heads);
            return Err(f.wrong(keys.num_key_value_heads, problem, REMEDY));
        }
        if !(0.0..1.0).contains(&self.attention_dropout) {
            return Err(f.wrong(keys.attention_dropout, "is outside 0.0..1.0", REMEDY));
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

/// The window of each layer: `layer_types` of the file, or else `is_local` by the layer's number, says which layers
/// have it.
pub(crate) fn layer_windows(
    f: &mut Fields<'_>,
    layers: usize,
    window: Option<usize>,
    is_local: impl Fn(usize) -> bool,
) -> Result<Vec<Option<usize>>> {
    let Some(types) = f.optional::<Vec<&str>>("layer_types")? else {
        return Ok((0..layers).map(|layer| window.filter(|_| is_local(layer))).collect());
    };
    if types.len() != layers {
        return Err(f.wrong("layer_types", format!("names {} layers of {layers}", types.len()), REMEDY));
    }
    let of = |kind: &&str| match *kind {
        "full_attention" => Ok(None),
        "sliding_attention" if window.is_some() => Ok(window),
        "sliding_attention" => {
            Err(f.wrong("layer_types", "has sliding layers, and there is no sliding_window", REMEDY))
        }
        _ => Err(f.wrong(
            "layer_types",
            format!("has {kind:?}, which is not supported"),
            "Ridge knows \"full_attention\" and \"sliding_attention\": choose a checkpoint that uses these",
        )),
    };
    types.iter().map(of).collect()
}

/// The window that `sliding_window` says, in tokens; `absent` where the file does not have the key, none if it is
/// null.
pub(crate) fn sliding_window(f: &mut Fields<'_>, absent: Option<usize>) -> Result<Option<usize>> {
    let given = f.has("sliding_window");
    Ok(f.optional_size("sliding_window", MAX_POSITIONS)?.or(absent.filter(|_| !given)))
}

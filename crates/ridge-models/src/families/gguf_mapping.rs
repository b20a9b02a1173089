//! What a family says of GGUF: its architecture's name there, its keys, and what only it reads and writes. Names of
//! tensors are in [`TensorTable`](super::tensors::TensorTable).

use serde_json::{Map, Value as Json};

use crate::error::{ModelError, Result};

/// The metadata and tensors of a GGUF file as a family reads them. Keys are without the architecture's name.
pub(crate) trait GgufMetadata {
    /// The whole number under `key`.
    ///
    /// # Errors
    /// [`ModelError::Files`] if the value is something else.
    fn int(&self, key: &str) -> Result<Option<u64>>;

    /// The number under `key`; errors as those of `int`.
    fn float(&self, key: &str) -> Result<Option<f64>>;

    /// The truth value under `key`; errors as those of `int`.
    fn flag(&self, key: &str) -> Result<Option<bool>>;

    /// The numbers of the array under `key`, or the one number there, truth values as 0 and 1; errors as those of `int`.
    fn list(&self, key: &str) -> Result<Option<Vec<f64>>>;

    /// The numbers of the vector `name`, if the file has this tensor.
    ///
    /// # Errors
    /// [`ModelError::Files`] if it is no vector, or in blocks.
    fn numbers(&self, name: &str) -> Result<Option<Vec<f64>>>;

    /// How many tokens a token sees, if the file says; 0 as it stands there.
    fn window_or_zero(&self) -> Option<u64>;

    /// How many tokens a token sees, if that is not all.
    fn window(&self) -> Option<u64> {
        self.window_or_zero().filter(|window| *window > 0)
    }

    /// How many experts a layer has; 0 without.
    fn experts(&self) -> u64;

    /// The number of kinds of segments, which has no architecture in its key; errors as those of `int`.
    fn token_types(&self) -> Result<Option<u64>>;

    /// Does the file have the tensor `name`?
    fn has(&self, name: &str) -> bool;

    /// The rows of the tensor `name`, if the file has it.
    fn rows(&self, name: &str) -> Option<usize>;

    /// The error that `key` has a `problem`.
    fn wrong(&self, key: &str, problem: &str) -> ModelError;
}

/// A value of metadata that a family writes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum GgufEntry {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(&'static str),
}

/// The rules by which llama.cpp's mixes of formats treat a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MixRules {
    /// Those of most families.
    Usual,
    /// Those of Llama and Qwen 2, whose largest models have small matrices of values.
    Llama,
    /// Those of Falcon.
    Falcon,
}

/// A tensor in GGUF whose name, shape or order of rows is not that of a weight with another scope, which [`TensorName`] covers.
/// `*` in names is the number of a layer.
///
/// [`TensorName`]: super::tensors::TensorName
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GgufTensorName {
    /// Its whole name.
    pub(crate) file: &'static str,
    /// The whole names of the weights that it has.
    pub(crate) weights: &'static [&'static str],
    /// How it has them.
    pub(crate) layout: GgufLayout,
}

/// How a tensor in GGUF has one weight or several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GgufLayout {
    /// One, as it is.
    Same,
    /// One, `[heads, head_dim]`, as a vector; tables leave the number of heads 0.
    Flat(usize),
    /// Weights of one shape along a new first axis.
    Stacked,
    /// Two of experts, `[experts, rows, columns]` each: the rows of both one after another, expert by expert.
    ExpertHalves,
    /// None: the file repeats a weight where the model has none.
    Unused,
}

impl GgufTensorName {
    /// The weight `weight` under the name `file`.
    pub(crate) const fn new(file: &'static str, weights: &'static [&'static str], layout: GgufLayout) -> Self {
        Self { file, weights, layout }
    }
}

/// How GGUF describes a family.
pub(crate) struct GgufMapping {
    /// The value of `general.architecture`. Families may share it; see `applies`.
    pub(crate) architecture: &'static str,
    /// Is a file with this architecture of this family?
    pub(crate) applies: fn(&dyn GgufMetadata) -> bool,
    /// Keys of metadata and what the family's configuration calls them, where that differs from [`GGUF_KEYS`]; `None`
    /// for what it does not have.
    pub(crate) keys: &'static [(&'static str, Option<&'static str>)],
    /// What the configuration calls the base of the rotation; `None` without rotation.
    pub(crate) rope_theta: Option<&'static str>,
    /// Are the rows of queries and keys in the order that has the two numbers that a rotation turns side by side?
    pub(crate) interleaved: bool,
    /// Do norms have one added?
    pub(crate) norms_plus_one: bool,
    /// Tensors besides those of the family's table; of several that give a weight, a file has one.
    pub(crate) tensors: &'static [GgufTensorName],
    /// How mixes of formats treat it.
    pub(crate) mix: MixRules,
    /// Adds what only this family has to a configuration.
    pub(crate) read: fn(&dyn GgufMetadata, &mut Map<String, Json>) -> Result<()>,
}

impl GgufMapping {
    /// A family that differs from Llama in its name alone, and has no reordered rows.
    pub(crate) const fn new(architecture: &'static str) -> Self {
        Self {
            architecture,
            applies: |_| true,
            keys: &[],
            rope_theta: Some("rope_theta"),
            interleaved: false,
            norms_plus_one: false,
            tensors: &[],
            mix: MixRules::Usual,
            read: |_, _| Ok(()),
        }
    }

    /// The key of the epsilon of norms.
    pub(crate) fn epsilon_key(&self) -> &'static str {
        match self.keys.iter().any(|(key, _)| *key == LAYER_NORM_EPSILON) {
            true => LAYER_NORM_EPSILON,
            false => RMS_NORM_EPSILON,
        }
    }

    /// The keys that differ from the usual ones, with what the configuration calls them.
    pub(crate) fn copied_keys(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        let usual = GGUF_KEYS.iter().filter(|(key, _)| !self.keys.iter().any(|(own, _)| own == key));
        let own = self.keys.iter().filter_map(|(key, ours)| Some((*key, (*ours)?)));
        usual.copied().chain(own)
    }
}

/// The number of layers.
pub(crate) const LAYERS_KEY: &str = "block_count";
/// How many tokens a token sees.
pub(crate) const WINDOW_KEY: &str = "attention.sliding_window";
/// How many elements of a head are rotated.
pub(crate) const ROTATED_KEY: &str = "rope.dimension_count";
/// The epsilon of norms by mean and variance.
pub(crate) const LAYER_NORM_EPSILON: &str = "attention.layer_norm_epsilon";
const RMS_NORM_EPSILON: &str = "attention.layer_norm_rms_epsilon";

/// Keys of metadata behind the architecture's name, and what they are called in most families.
pub(crate) const GGUF_KEYS: [(&str, &str); 8] = [
    ("embedding_length", "hidden_size"),
    ("feed_forward_length", "intermediate_size"),
    (LAYERS_KEY, "num_hidden_layers"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("context_length", "max_position_embeddings"),
    (RMS_NORM_EPSILON, "rms_norm_eps"),
    ("attention.key_length", "head_dim"),
];

/// Adds `attention_bias`, for families whose queries have a tensor of their own.
pub(crate) fn read_attention_bias(file: &dyn GgufMetadata, to: &mut Map<String, Json>) -> Result<()> {
    to.insert("attention_bias".into(), file.has("blk.0.attn_q.bias").into());
    Ok(())
}

/// Adds the share of a head that is rotated, as `name`.
pub(crate) fn read_rotary_share(file: &dyn GgufMetadata, to: &mut Map<String, Json>, name: &str) -> Result<()> {
    let rotated = file.int(ROTATED_KEY)?;
    let (hidden, heads) = (file.int("embedding_length")?, file.int("attention.head_count")?);
    let dim = match file.int("attention.key_length")? {
        Some(dim) => Some(dim),
        None => hidden.zip(heads).filter(|(_, heads)| *heads > 0).map(|(hidden, heads)| hidden / heads),
    };
    if let Some((rotated, dim)) = rotated.zip(dim.filter(|dim| *dim > 0)) {
        to.insert(name.into(), (rotated as f64 / dim as f64).into());
    }
    Ok(())
}

/// The entry of a window of so many tokens, if there is one.
pub(crate) fn window_metadata(window: Option<usize>) -> Vec<(&'static str, GgufEntry)> {
    window.map(|window| (WINDOW_KEY, GgufEntry::U32(window as u32))).into_iter().collect()
}

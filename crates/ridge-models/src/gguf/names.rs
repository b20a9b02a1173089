//! The tensors of a file, and the weights of a graph that each of them holds.
//!
//! A file has queries, keys and values as one tensor where the model was published so, one after another. The rows of
//! Llama's queries and keys are in another order, since there the two numbers that a rotation turns lie side by side;
//! Gemma's norms have one added.

use std::ops::Range;

use ridge_files::checkpoint::{Change, Gathered, Rows};
use ridge_files::gguf::{GgufTensor, TensorStorage};
use ridge_files::{Checkpoint, Gguf};

use super::config::config_json;
use crate::config::DecoderConfig;
use crate::error::{ModelError, Result};
use crate::families::{EncoderConfig, FamilyDefinition, GgufLayout, GgufTensorName, MixRules, ModelConfig, TensorName};

/// One tensor of a file.
#[derive(Clone, Debug)]
pub(super) struct Rule {
    /// Its name, such as `blk.0.attn_q.weight`.
    pub(super) file: String,
    /// The weights whose rows it has, and how many rows each; all of its rows if 0.
    pub(super) weights: Vec<(String, usize)>,
    /// How the weight follows from what the file has.
    pub(super) change: Change,
    /// How the file has these weights.
    pub(super) layout: GgufLayout,
}

/// What decides how many rows tensors have, and which.
pub(super) struct Sizes {
    pub(super) layers: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    head_dim: usize,
    intermediate: usize,
}

impl From<&DecoderConfig> for Sizes {
    fn from(config: &DecoderConfig) -> Self {
        Self {
            layers: config.num_hidden_layers,
            heads: config.num_attention_heads,
            kv_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            intermediate: config.intermediate_size,
        }
    }
}

impl From<&EncoderConfig> for Sizes {
    fn from(config: &EncoderConfig) -> Self {
        let heads = config.num_attention_heads;
        Self {
            layers: config.num_hidden_layers,
            heads,
            kv_heads: heads,
            head_dim: config.hidden_size / heads,
            intermediate: config.intermediate_size,
        }
    }
}

/// The tensors that a file of `config` may have; not all models have biases, or an output projection of their own.
pub(super) fn decoder_rules(config: &ModelConfig) -> Vec<Rule> {
    rules(config.family(), &config.layer_tensors(), &Sizes::from(&**config))
}

/// As [`decoder_rules`], for an encoder.
pub(super) fn encoder_rules(config: &EncoderConfig) -> Vec<Rule> {
    let of_family = |family: &FamilyDefinition| {
        let layer: Vec<TensorName> = family.tensors.of_layer().copied().collect();
        rules(family, &layer, &Sizes::from(config))
    };
    config.family().map(of_family).unwrap_or_default()
}

/// How mixes of formats treat a family.
pub(super) fn mix_rules(family: Option<&FamilyDefinition>) -> MixRules {
    family.and_then(|family| family.gguf.as_ref()).map_or(MixRules::Usual, |mapping| mapping.mix)
}

/// The tensors of `family` in GGUF, with those of each layer that are in `layer`.
fn rules(family: &FamilyDefinition, layer: &[TensorName], sizes: &Sizes) -> Vec<Rule> {
    let Some(mapping) = &family.gguf else { return Vec::new() };
    let (q, kv) = (sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim);
    let mut rules = Vec::new();
    let mut add = |file: String, weights: Vec<(String, usize)>, change: Change| {
        for kind in ["weight", "bias"] {
            let weights = weights.iter().map(|(name, rows)| (format!("{name}.{kind}"), *rows)).collect();
            rules.push(Rule { file: format!("{file}.{kind}"), weights, change, layout: GgufLayout::Same });
        }
    };
    let change_of = |file: &str| match file {
        "attn_q" if mapping.interleaved => Change::Interleaved { heads: sizes.heads },
        "attn_k" if mapping.interleaved => Change::Interleaved { heads: sizes.kv_heads },
        file if mapping.norms_plus_one && file.ends_with("norm") => Change::MinusOne,
        _ => Change::None,
    };
    let table = &family.tensors;
    for tensor in [&table.embedding, &table.norm, &table.head].into_iter().chain(table.others) {
        if let Some(file) = tensor.gguf {
            add(file.to_owned(), vec![(tensor.scope.to_owned(), 0)], change_of(file));
        }
    }
    for index in 0..sizes.layers {
        for fused in layer.chunk_by(|a, b| a.gguf == b.gguf) {
            let Some(file) = fused[0].gguf else { continue };
            let rows = |i: usize| match (fused.len(), i) {
                (1, _) => 0,
                (2, _) => sizes.intermediate,
                (_, 0) => q,
                _ => kv,
            };
            let name = |tensor: &TensorName| format!("{}.{index}.{}", table.layers, tensor.scope);
            let weights = fused.iter().enumerate().map(|(i, tensor)| (name(tensor), rows(i)));
            add(format!("blk.{index}.{file}"), weights.collect(), change_of(file));
        }
    }
    rules.extend(mapping.tensors.iter().flat_map(|tensor| of_layers(tensor, sizes)));
    rules
}

/// The rules of `tensor`: one for each layer if its name has a place for their number.
fn of_layers(tensor: &GgufTensorName, sizes: &Sizes) -> Vec<Rule> {
    let layers = if tensor.file.contains('*') { sizes.layers } else { 1 };
    let rule = |index: usize| {
        let name = |name: &str| name.replace('*', &index.to_string());
        let weights = tensor.weights.iter().map(|weight| (name(weight), 0)).collect();
        let layout = match tensor.layout {
            GgufLayout::Flat(_) => GgufLayout::Flat(sizes.heads),
            other => other,
        };
        Rule { file: name(tensor.file), weights, change: Change::None, layout }
    };
    (0..layers).map(rule).collect()
}

/// Tensors that hold no weights: what they say is in the configuration.
const TABLES: [&str; 3] = ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"];

/// The weights of `gguf` under the names that the family's graph has.
///
/// # Errors
///
/// [`ModelError::Files`](crate::ModelError::Files) if the architecture is not one that Ridge runs, or a tensor has a wrong
/// shape.
pub fn checkpoint(gguf: &Gguf) -> Result<Checkpoint> {
    let text = config_json(gguf)?;
    let rules = match EncoderConfig::is_one(gguf.file(), &text)? {
        true => encoder_rules(&EncoderConfig::from_json(gguf.file(), &text)?),
        false => decoder_rules(&ModelConfig::from_json(gguf.file(), &text)?),
    };
    let named: std::collections::BTreeMap<&str, &GgufTensor> =
        gguf.tensors().iter().map(|t| (t.name.as_str(), t)).collect();
    let mut left = named;
    TABLES.iter().for_each(|table| {
        left.remove(table);
    });
    let mut tensors = Vec::new();
    for rule in &rules {
        let Some(tensor) = left.remove(rule.file.as_str()) else { continue };
        match rule.layout {
            GgufLayout::Same => tensors.extend(of_rows(gguf, rule, tensor)?),
            layout => tensors.extend(of_layout(gguf, rule, layout, tensor)?),
        }
    }
    // What has no rule keeps its name, so that the list of what is not in the model has it.
    for (name, tensor) in left {
        tensors.push(gathered(name.to_owned(), tensor, tensor.shape.clone(), tensor.range.clone(), Change::None));
    }
    Ok(Checkpoint::from_gguf(gguf, tensors)?)
}

/// The weights of `rule`, each of rows of its own, in `tensor`.
fn of_rows(gguf: &Gguf, rule: &Rule, tensor: &GgufTensor) -> Result<Vec<Gathered>> {
    let rows = tensor.shape.first().copied().unwrap_or(1);
    let wanted: usize = rule.weights.iter().map(|(_, rows)| rows).sum();
    if wanted != 0 && wanted != rows {
        return Err(wrong_shape(gguf, tensor, &format!("has {rows} rows, and the metadata asks for {wanted}")));
    }
    // A vector's rows are its elements, of which a block is none.
    let row = match tensor.shape.len() {
        1 if tensor.storage.format.is_some() => 0,
        _ => tensor.range.len() / rows.max(1),
    };
    let mut from = tensor.range.start;
    let mut parts = Vec::new();
    for (name, part) in &rule.weights {
        let (mut shape, mut bytes) = (tensor.shape.clone(), tensor.range.len());
        if rule.weights.len() > 1 {
            shape[0] = *part;
            bytes = part * row;
        }
        let range = from..from + bytes;
        from = range.end;
        parts.push(gathered(name.clone(), tensor, shape, range, rule.change));
    }
    Ok(parts)
}

/// The weights of `rule` in `tensor`, which has another shape.
fn of_layout(gguf: &Gguf, rule: &Rule, layout: GgufLayout, tensor: &GgufTensor) -> Result<Vec<Gathered>> {
    let (range, count) = (tensor.range.clone(), rule.weights.len());
    let each = |of: &dyn Fn(usize) -> (Vec<usize>, Range<usize>, Change)| {
        let weights = rule.weights.iter().enumerate();
        Ok(weights
            .map(|(nth, (name, _))| {
                let (shape, range, change) = of(nth);
                gathered(name.clone(), tensor, shape, range, change)
            })
            .collect())
    };
    match (layout, &tensor.shape[..]) {
        (GgufLayout::Unused, _) => Ok(Vec::new()),
        (GgufLayout::Flat(heads), [all]) if heads > 0 && all % heads == 0 => {
            each(&|_| (vec![heads, all / heads], range.clone(), Change::None))
        }
        (GgufLayout::Stacked, [first, shape @ ..]) if *first == count => {
            let bytes = range.len() / count.max(1);
            each(&|nth| {
                let from = range.start + nth * bytes;
                (shape.to_vec(), from..from + bytes, Change::None)
            })
        }
        (GgufLayout::ExpertHalves, [experts, both, columns]) if both % count == 0 => {
            let len = both / count;
            each(&|nth| {
                let rows = Rows { first: nth * len, len, stride: *both, blocks: *experts };
                (vec![*experts, len, *columns], range.clone(), Change::Rows(rows))
            })
        }
        _ => Err(wrong_shape(
            gguf,
            tensor,
            &format!("has the shape {:?}, which does not hold {count} weights", tensor.shape),
        )),
    }
}

fn wrong_shape(gguf: &Gguf, tensor: &GgufTensor, problem: &str) -> ModelError {
    let problem = format!("the tensor {} {problem}", tensor.name);
    gguf.fail(problem, "download the file again, or convert the model again").into()
}

fn gathered(name: String, tensor: &GgufTensor, shape: Vec<usize>, range: Range<usize>, change: Change) -> Gathered {
    let TensorStorage { dtype, format } = tensor.storage.clone();
    Gathered { name, dtype, format, shape, part: tensor.part, range, change }
}

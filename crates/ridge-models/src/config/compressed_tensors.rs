//! Quantised checkpoints as llm-compressor writes them, in the layout of the library compressed-tensors: the object under
//! `quantization_config` whose `quant_method` is `compressed-tensors`.

use ridge_graph::format::{CodeType, ScaleLayout};
use serde_json::{Map, Value};

use super::fields::Fields;
use super::published_codes::PublishedCodes;
use crate::error::Result;

const REMEDY: &str = "Ridge reads 8-bit floats with a scale for each channel, tensor or block of 128 x 128, and symmetric int8 weights \
                      with a scale for each channel or tensor and activations quantised for each token: choose such a checkpoint";

/// Requires weights that [`Checkpoint::scaled`](ridge_files::Checkpoint::scaled) reads: 8-bit floats, whatever is said of
/// activations, whose scales are found at run time; or int8 with activations that are int8 too ("W8A8"), as they would be
/// computed otherwise than published if they had fixed scales or zero points. What is said of the first group of modules is
/// taken as the format of all that are not ignored.
pub(super) fn read(mut block: Fields<'_>) -> Result<PublishedCodes> {
    let integers = match block.raw("format").and_then(Value::as_str) {
        Some("float-quantized") => false,
        Some("int-quantized") => true,
        _ => return Err(block.wrong("format", "is neither float-quantized nor int-quantized", REMEDY)),
    };
    block.must_be("kv_cache_scheme", Value::Null)?;
    block.must_be("transform_config", Map::<String, Value>::new())?;
    let dense = |value: &Value| value.get("format").is_none_or(|format| format == "dense");
    if block.raw("sparsity_config").is_some_and(|value| !value.is_null() && !dense(value)) {
        return Err(block.wrong("sparsity_config", "is not dense", "choose a checkpoint without sparsity"));
    }
    let groups = block.raw("config_groups").and_then(Value::as_object).filter(|groups| !groups.is_empty());
    let Some(groups) = groups else {
        return Err(block.wrong("config_groups", "does not say how weights and activations are quantised", REMEDY));
    };
    for (name, group) in groups {
        let side = |side: &str| Scheme { group: name, side: side.to_owned(), values: group.get(side) };
        let weights = side("weights");
        let outputs = group.get("output_activations").unwrap_or(&Value::Null);
        let checked = if !outputs.is_null() {
            Err(format!("has {name}.output_activations = {outputs}, which is not supported"))
        } else if integers {
            weights.int8(&["channel", "tensor"]).and_then(|()| side("input_activations").dynamic())
        } else {
            weights.floats()
        };
        if let Err(why) = checked {
            return Err(block.wrong("config_groups", why, REMEDY));
        }
    }
    let in_blocks = groups.values().next().and_then(|group| group.pointer("/weights/strategy"));
    let scales =
        if in_blocks.is_some_and(|strategy| strategy == "block") { ScaleLayout::Block } else { ScaleLayout::Row };
    let codes = if integers { CodeType::Int8 } else { CodeType::F8E4M3 };
    let codes = PublishedCodes::new(codes, scales, [block.raw("ignore")]);
    block.harmless(&["config_groups", "quantization_status", "global_compression_ratio", "version", "sparsity_config"]);
    block.finish()?;
    Ok(codes)
}

/// How the weights or the activations of a group of modules are quantised.
struct Scheme<'a> {
    group: &'a str,
    side: String,
    values: Option<&'a Value>,
}

impl Scheme<'_> {
    /// The value of `key`, null where there is none.
    fn value(&self, key: &str) -> &Value {
        self.values.and_then(|values| values.get(key)).unwrap_or(&Value::Null)
    }

    /// Requires that `key` is one of these.
    fn is(&self, key: &str, allowed: &[Value]) -> std::result::Result<(), String> {
        let value = self.value(key);
        if allowed.contains(value) {
            return Ok(());
        }
        Err(format!("has {}.{}.{key} = {value}, which is not supported", self.group, self.side))
    }

    fn floats(&self) -> std::result::Result<(), String> {
        self.is("num_bits", &[8.into()])?;
        self.is("type", &["float".into()])?;
        self.is("symmetric", &[Value::Null, true.into()])?;
        self.is("strategy", &["channel".into(), "tensor".into(), "block".into()])?;
        if self.value("strategy") == "block" { self.is("block_structure", &[vec![128, 128].into()]) } else { Ok(()) }
    }

    /// Symmetric int8 with one of these strategies.
    fn int8(&self, strategies: &[&str]) -> std::result::Result<(), String> {
        self.is("num_bits", &[8.into()])?;
        // What both are where a file does not say.
        self.is("type", &[Value::Null, "int".into()])?;
        self.is("symmetric", &[Value::Null, true.into()])?;
        let strategies: Vec<Value> = strategies.iter().map(|strategy| Value::from(*strategy)).collect();
        self.is("strategy", &strategies)
    }

    /// Int8 with a scale for each token, found at run time.
    fn dynamic(&self) -> std::result::Result<(), String> {
        self.int8(&["token"])?;
        self.is("dynamic", &[true.into()])
    }
}

//! Quantised checkpoints as llm-compressor writes them, in the layout of the library compressed-tensors: the object under
//! `quantization_config` whose `quant_method` is `compressed-tensors`.

use ridge_files::checkpoint::{Int4Layout, Int4Scheme};
use ridge_graph::format::{CodeType, ScaleLayout};
use serde_json::{Map, Value};

use super::fields::Fields;
use super::int4::{columns_of, is_group};
use super::published_codes::{CodeGroup, PublishedCodes, of_4_bits, scaled};
use crate::error::Result;

const REMEDY: &str = "Ridge reads 8-bit floats with a scale for each channel, tensor or block of 128 x 128, symmetric int8 weights \
                      with a scale for each channel or tensor and activations quantised for each token, and weights of 4 bits \
                      (pack-quantized) with a scale for each group of a multiple of 32 columns or each channel: choose such a checkpoint";

/// How a checkpoint's codes are written, by `format`.
#[derive(Clone, Copy, PartialEq)]
enum Layout {
    Floats,
    Int8,
    Int4,
}

/// Requires weights that [`Checkpoint::scaled`](ridge_files::Checkpoint::scaled) or
/// [`Checkpoint::in_int4`](ridge_files::Checkpoint::in_int4) reads: 8-bit floats, whatever is said of
/// activations, whose scales are found at run time; int8 with activations that are int8 too ("W8A8"), as they would be
/// computed otherwise than published if they had fixed scales or zero points; or integers of 4 bits with plain activations
/// ("W4A16"), whose groups of modules are all symmetric or none.
pub(super) fn read(mut block: Fields<'_>) -> Result<PublishedCodes> {
    let layout = match block.raw("format").and_then(Value::as_str) {
        Some("float-quantized") => Layout::Floats,
        Some("int-quantized") => Layout::Int8,
        Some("pack-quantized") => Layout::Int4,
        _ => return Err(block.wrong("format", "is none of float-quantized, int-quantized and pack-quantized", REMEDY)),
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
        } else {
            match layout {
                Layout::Floats => weights.floats(),
                Layout::Int8 => weights.int8(&["channel", "tensor"]).and_then(|()| side("input_activations").dynamic()),
                Layout::Int4 => weights.int4().and_then(|()| side("input_activations").none()),
            }
        };
        if let Err(why) = checked {
            return Err(block.wrong("config_groups", why, REMEDY));
        }
    }
    let symmetric = |group: &Value| group.pointer("/weights/symmetric") != Some(&Value::Bool(false));
    let all_symmetric = groups.values().all(symmetric);
    if layout == Layout::Int4 && !all_symmetric && groups.values().any(symmetric) {
        return Err(block.wrong("config_groups", "has groups with zero points and groups without", REMEDY));
    }
    let of_group = |group: &Value| {
        let in_blocks = group.pointer("/weights/strategy").is_some_and(|strategy| strategy == "block");
        let scales = if in_blocks { ScaleLayout::Block } else { ScaleLayout::Row };
        let format = match layout {
            Layout::Floats => scaled(CodeType::F8E4M3, scales),
            Layout::Int8 => scaled(CodeType::Int8, scales),
            Layout::Int4 => of_4_bits(all_symmetric),
        };
        CodeGroup::new(format, group.get("targets"))
    };
    let mut codes = PublishedCodes::new(groups.values().map(of_group).collect(), [block.raw("ignore")]);
    if layout == Layout::Int4 {
        // Of groups of modules that differ in it, tensors show it.
        let columns = |group: &Value| match group.pointer("/weights/strategy").and_then(Value::as_str) {
            Some("channel") => Some(0),
            _ => columns_of(group.pointer("/weights/group_size")),
        };
        let mut sizes = groups.values().map(columns);
        let first = sizes.next().flatten();
        let group = if sizes.all(|size| size == first) { first } else { None };
        codes = codes.with(Int4Scheme { group, ..Int4Scheme::new(Int4Layout::Compressed, all_symmetric) });
    }
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

    /// Integers of 4 bits whose columns are in groups in their order.
    fn int4(&self) -> std::result::Result<(), String> {
        self.is("num_bits", &[4.into()])?;
        self.is("type", &[Value::Null, "int".into()])?;
        self.is("strategy", &["group".into(), "channel".into()])?;
        // Those of "weight" and "static" are moved back in place after they were found in another order.
        self.is("actorder", &[Value::Null, false.into(), "weight".into(), "static".into()])?;
        let size = self.value("group_size");
        if is_group(size) { Ok(()) } else { self.is("group_size", &["a multiple of 32".into()]) }
    }

    /// Values that are not quantised.
    fn none(&self) -> std::result::Result<(), String> {
        match self.values {
            None | Some(Value::Null) => Ok(()),
            Some(_) => Err(format!("has {}.{}, where weights of 4 bits take plain values", self.group, self.side)),
        }
    }

    /// Int8 with a scale for each token, found at run time.
    fn dynamic(&self) -> std::result::Result<(), String> {
        self.int8(&["token"])?;
        self.is("dynamic", &[true.into()])
    }
}

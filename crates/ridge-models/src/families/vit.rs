//! ViT (Dosovitskiy et al. 2021): an encoder of an image's patches, with a class. Its graph is in `image_classifier.rs`.

use ridge_graph::ops::Gelu;
use serde_json::{Map, Value as Json};

use super::definition::{FamilyDefinition, ReadConfig};
use super::image_classifier::VitConfig;
use super::tensors::{TensorName, TensorTable};
use crate::config::{Fields, MAX_HEADS, MAX_HIDDEN, MAX_INTERMEDIATE, MAX_LAYERS, REMEDY, read_common};
use crate::error::Result;

/// Pixels of an image's side at most, and classes at most.
const MAX_PIXELS: usize = 1 << 14;
const MAX_LABELS: usize = 1 << 20;

/// How it is registered.
pub(super) static VIT: FamilyDefinition = FamilyDefinition {
    name: "vit",
    model_type: "vit",
    class: Some("ViTForImageClassification"),
    // Of heads for other uses, and dropout.
    harmless: &[&[
        "attention_probs_dropout_prob",
        "encoder_stride",
        "hidden_dropout_prob",
        "pooler_act",
        "pooler_output_size",
    ]],
    read: ReadConfig::ImageClassifier(read),
    tensors: TensorTable {
        embedding: TensorName::NONE,
        layers: "vit.encoder.layer",
        attention: "attention",
        norm: TensorName::NONE,
        head: TensorName::NONE,
        others: &[],
        layer: &[],
        computed: &[],
    },
    gguf: None,
};

fn read(f: &mut Fields<'_>) -> Result<VitConfig> {
    let common = read_common(f)?;
    let hidden_size = f.size("hidden_size", MAX_HIDDEN)?;
    let num_attention_heads = f.size("num_attention_heads", MAX_HEADS)?;
    if !hidden_size.is_multiple_of(num_attention_heads) {
        let problem = format!("does not divide hidden_size = {hidden_size}");
        return Err(f.wrong("num_attention_heads", problem, REMEDY));
    }
    let [image_size, patch_size] = [sides(f, "image_size")?, sides(f, "patch_size")?];
    if image_size.iter().zip(patch_size).any(|(image, patch)| !image.is_multiple_of(patch)) {
        let problem = format!("does not divide image_size = {} x {}", image_size[0], image_size[1]);
        return Err(f.wrong("patch_size", problem, REMEDY));
    }
    Ok(VitConfig {
        family: VIT.model_type,
        hidden_size,
        intermediate_size: f.size("intermediate_size", MAX_INTERMEDIATE)?,
        num_hidden_layers: f.size("num_hidden_layers", MAX_LAYERS)?,
        num_attention_heads,
        image_size,
        patch_size,
        num_channels: f.optional_size("num_channels", 1 << 10)?.unwrap_or(3),
        norm_eps: f.optional_positive("layer_norm_eps")?.unwrap_or(1e-12),
        activation: f.gelu("hidden_act", Gelu::Erf)?,
        qkv_bias: f.optional("qkv_bias")?.unwrap_or(true),
        labels: labels(f)?,
        torch_dtype: common.dtype,
    })
}

/// Height and width: one number for both, or a list of them.
fn sides(f: &mut Fields<'_>, key: &'static str) -> Result<[usize; 2]> {
    if !f.is_list(key) {
        let side = f.size(key, MAX_PIXELS)?;
        return Ok([side, side]);
    }
    match f.required::<Vec<u64>>(key)?[..] {
        [height, width] if [height, width].iter().all(|side| (1..=MAX_PIXELS as u64).contains(side)) => {
            Ok([height as usize, width as usize])
        }
        _ => Err(f.wrong(key, format!("is not a height and a width in 1..={MAX_PIXELS}"), REMEDY)),
    }
}

/// The names under `id2label`; two numbers, as its absence means, where it is not there.
fn labels(f: &mut Fields<'_>) -> Result<Vec<String>> {
    let Some(names) = f.optional::<&Map<String, Json>>("id2label")? else {
        let count = f.optional_size("num_labels", MAX_LABELS)?.unwrap_or(2);
        return Ok((0..count).map(|i| format!("LABEL_{i}")).collect());
    };
    let named = |i: usize| names.get(&i.to_string())?.as_str().map(str::to_owned);
    let labels: Option<Vec<String>> = (0..names.len()).map(named).collect();
    match labels {
        Some(labels) if (1..=MAX_LABELS).contains(&labels.len()) => Ok(labels),
        _ => Err(f.wrong("id2label", "does not name classes 0, 1, 2 and so on", REMEDY)),
    }
}

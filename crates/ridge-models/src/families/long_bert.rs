//! Encoders of BERT's build for long texts: Longformer (Beltagy et al. 2020, "Longformer: The Long-Document Transformer", section
//! 3.1), whose tokens see a window, and all of them the first token where it is classified; and BigBird (Zaheer et al. 2020, "Big
//! Bird: Transformers for Longer Sequences", section 2), whose tokens see blocks of long texts and all of others.

use super::bert::{BertVariant, HARMLESS, TENSORS, read_variant};
use super::definition::{FamilyDefinition, ReadConfig};
use super::encoder::EncoderConfig;
use super::text_classifier::InnerLayer;
use crate::config::{Fields, MAX_POSITIONS, REMEDY};
use crate::error::Result;
use ridge_graph::ops::Gelu;

/// How Longformer is registered.
pub(super) static LONGFORMER: FamilyDefinition = FamilyDefinition {
    name: "longformer",
    model_type: "longformer",
    class: None,
    harmless: &[HARMLESS, &["onnx_export", "attention_mode", "ignore_attention_mask"]],
    read: ReadConfig::Encoder(read_longformer),
    tensors: TENSORS,
    gguf: None,
};

/// How BigBird is registered.
pub(super) static BIG_BIRD: FamilyDefinition = FamilyDefinition {
    name: "big_bird",
    model_type: "big_bird",
    class: None,
    harmless: &[HARMLESS],
    read: ReadConfig::Encoder(read_big_bird),
    tensors: TENSORS,
    gguf: None,
};

fn read_longformer(f: &mut Fields<'_>) -> Result<EncoderConfig> {
    const WINDOW: &str = "attention_window";
    read_variant(f, LONGFORMER.model_type, InnerLayer::Roberta, |f, sizes, classifies| {
        let layers = sizes.num_hidden_layers;
        // Tokens on both sides together, without the token itself.
        let windows: Vec<u64> = match f.is_list(WINDOW) {
            true => f.required(WINDOW)?,
            false => vec![f.optional_size(WINDOW, MAX_POSITIONS)?.unwrap_or(512) as u64; layers],
        };
        if windows.len() != layers {
            return Err(f.wrong(WINDOW, format!("has windows of {} layers of {layers}", windows.len()), REMEDY));
        }
        if windows.iter().any(|window| *window == 0 || *window > MAX_POSITIONS as u64 || window % 2 == 1) {
            return Err(f.wrong(WINDOW, "has a window that is not even and above 0", REMEDY));
        }
        let windows = windows.into_iter().map(|window| window as usize / 2 + 1).collect();
        // transformers gives the first token of a text that is classified global attention, and other tokens none.
        Ok(BertVariant { windows, first_sees_all: classifies, ..BertVariant::BERT })
    })
}

fn read_big_bird(f: &mut Fields<'_>) -> Result<EncoderConfig> {
    const KIND: &str = "attention_type";
    let mut blocks = None;
    match f.optional(KIND)?.unwrap_or("block_sparse") {
        "original_full" => f.harmless(&["block_size", "num_random_blocks"]),
        "block_sparse" => {
            let size = f.optional_size("block_size", MAX_POSITIONS)?.unwrap_or(64);
            let random = f.count("num_random_blocks")?.unwrap_or(3).min(MAX_POSITIONS as u64) as usize;
            // A block that no text has two of is none.
            blocks = (size > 0).then_some([size, random]);
        }
        _ => return Err(f.wrong(KIND, "is not supported", "Ridge knows \"original_full\" and \"block_sparse\"")),
    }
    let rescaled = f.optional("rescale_embeddings")?.unwrap_or(false);
    let qkv_bias = f.optional("use_bias")?.unwrap_or(true);
    let head = InnerLayer::BigBird(Gelu::Tanh);
    read_variant(f, BIG_BIRD.model_type, head, |_, sizes, _| {
        let word_scale = if rescaled { (sizes.hidden_size as f64).sqrt() } else { 1.0 };
        // Texts at which all tokens are seen have no blocks.
        let long = |[size, random]: &[usize; 2]| sizes.max_position_embeddings > (5 + 2 * random) * size;
        Ok(BertVariant { word_scale, qkv_bias, blocks: blocks.filter(long), ..BertVariant::BERT })
    })
}

//! Keys that every family's file may carry, because the library that writes it keeps them in a common base class.

use ridge_graph::DType;
use ridge_graph::format::{CodeType, ScaleLayout};
use serde_json::{Map, Value};

use super::fields::{Fields, TokenIds};
use super::published_codes::{CodeGroup, PublishedCodes, is_listed, scaled};
use super::{compressed_tensors, int4};
use crate::error::Result;

/// The keys that any model may have.
pub(crate) struct CommonFields {
    pub(crate) tie_word_embeddings: Option<bool>,
    pub(crate) dtype: Option<DType>,
    pub(crate) bos_token_id: Option<u32>,
    pub(crate) eos_token_ids: Vec<u32>,
    pub(crate) codes: Option<PublishedCodes>,
}

/// Reads the keys of the base class, and marks those of them that cannot change the forward pass.
pub(crate) fn read(fields: &mut Fields<'_>) -> Result<CommonFields> {
    fields.harmless(HARMLESS);
    fields.harmless(ridge_graph::SAMPLER_SETTINGS);
    fields.must_be("is_encoder_decoder", false)?;
    fields.must_be("add_cross_attention", false)?;
    fields.must_be("tie_encoder_decoder", false)?;
    fields.must_be("pruned_heads", Map::<String, Value>::new())?;
    Ok(CommonFields {
        tie_word_embeddings: fields.optional("tie_word_embeddings")?,
        dtype: read_dtype(fields)?,
        bos_token_id: fields.optional("bos_token_id")?,
        eos_token_ids: fields.optional("eos_token_id")?.map_or_else(Vec::new, |TokenIds(ids)| ids),
        codes: read_quantization(fields)?,
    })
}

/// Requires that the weights are not quantised, or f8e4m3 codes with a scale for each block of 128 x 128, for each row or for
/// all, or int8 codes with one for each row or for all, which [`Checkpoint::scaled`](ridge_files::Checkpoint::scaled) reads. Which tensors are, they show themselves. Scales of
/// activations are found at run time whatever the file says.
fn read_quantization(fields: &mut Fields<'_>) -> Result<Option<PublishedCodes>> {
    let Some(mut block) = fields.object("quantization_config")? else { return Ok(None) };
    // An object without keys says nothing of the weights.
    if block.is_empty() {
        return Ok(None);
    }
    match block.raw("quant_method").and_then(Value::as_str) {
        Some("fp8") => {}
        Some("compressed-tensors") => return compressed_tensors::read(block).map(Some),
        Some("gptq") => return int4::gptq(block).map(Some),
        Some("awq") => return int4::awq(block).map(Some),
        Some(MXFP4) if fields.raw("model_type").and_then(Value::as_str) == Some("gpt_oss") => {
            return NotConverted::read(block).map(|_| None);
        }
        _ => {
            let remedy = "Ridge reads \"fp8\", \"compressed-tensors\", \"gptq\" and \"awq\" of 4 bits, and \"mxfp4\" of gpt_oss: choose \
                          such a checkpoint, or the unquantised model, which --format converts";
            return Err(block.wrong("quant_method", "is not supported", remedy));
        }
    }
    // torch's name of the dtype is as good.
    if block.raw("fmt").and_then(Value::as_str) != Some("float8_e4m3fn") {
        block.must_be("fmt", "e4m3")?;
    }
    block.harmless(&["activation_scheme"]);
    let size: Option<Vec<u64>> = block.optional("weight_block_size")?;
    if size.as_ref().is_some_and(|size| *size != [128, 128]) {
        let remedy = "Ridge reads blocks of [128, 128]: choose another checkpoint of the model";
        return Err(block.wrong("weight_block_size", "is not supported", remedy));
    }
    let plain = ["modules_to_not_convert", "ignored_layers"];
    // A scale for all elements is read as one for each row.
    let scales = if size.is_some() { ScaleLayout::Block } else { ScaleLayout::Row };
    let all = vec![CodeGroup::new(scaled(CodeType::F8E4M3, scales), None)];
    let codes = PublishedCodes::new(all, plain.map(|key| block.raw(key)));
    block.harmless(&["dequantize", "scale_fmt"]);
    block.finish()?;
    Ok(Some(codes))
}

/// What `quant_method` is where experts are in MXFP4, which [`Checkpoint::in_mxfp4`](ridge_files::Checkpoint::in_mxfp4) reads.
const MXFP4: &str = "mxfp4";

/// The modules that a checkpoint in MXFP4 has plainly: names in which `*` stands for any characters.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct NotConverted(Vec<String>);

impl NotConverted {
    /// Those of the object under `quantization_config`, if its method is MXFP4.
    pub(crate) fn of_model(fields: &mut Fields<'_>) -> Result<Option<Self>> {
        let Some(mut block) = fields.object("quantization_config")? else { return Ok(None) };
        match block.raw("quant_method").and_then(Value::as_str) {
            Some(MXFP4) => Self::read(block).map(Some),
            _ => Ok(None),
        }
    }

    fn read(mut block: Fields<'_>) -> Result<Self> {
        const KEY: &str = "modules_to_not_convert";
        block.harmless(&["quant_method", "dequantize"]);
        let names: Vec<&str> = block.optional(KEY)?.unwrap_or_default();
        // transformers takes them as regular expressions.
        let plain = |name: &str| name.chars().all(|c| c.is_alphanumeric() || matches!(c, '.' | '_' | '-' | '*'));
        if let Some(name) = names.iter().find(|name| !plain(name)) {
            return Err(block.wrong(
                KEY,
                format!("has {name:?}, which is no name"),
                "write names, with * for any characters",
            ));
        }
        block.finish()?;
        Ok(Self(names.into_iter().map(str::to_owned).collect()))
    }

    /// Is the module one of them, by the beginning of its name, up to a dot, or by its end?
    pub(crate) fn has(&self, module: &str) -> bool {
        is_listed(&self.0, module)
    }
}

/// `torch_dtype`, which newer files call `dtype`.
fn read_dtype(fields: &mut Fields<'_>) -> Result<Option<DType>> {
    let old: Option<DType> = fields.optional("torch_dtype")?;
    let new: Option<DType> = fields.optional("dtype")?;
    match (old, new) {
        (Some(old), Some(new)) if old != new => Err(fields.wrong(
            "dtype",
            format!("contradicts torch_dtype, which is {old}"),
            "remove the one that the weights do not have",
        )),
        _ => Ok(new.or(old)),
    }
}

/// Keys that describe the file, its training, its use for other tasks, or how to sample from it.
const HARMLESS: &[&str] = &[
    // The file and the software that wrote it.
    "_name_or_path",
    "_commit_hash",
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_flash_attn_2_enabled",
    "attn_implementation",
    "auto_map",
    "cache_implementation",
    "name_or_path",
    "tokenizer_class",
    "torchscript",
    "transformers_version",
    "transformers.js_config",
    "unsloth_fixed",
    "unsloth_version",
    // How outputs are handed to the caller.
    "chunk_size_feed_forward",
    "cross_attention_hidden_size",
    "is_decoder",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "use_cache",
    // Training.
    "gradient_checkpointing",
    "initializer_range",
    "task_specific_params",
    // Other tokens, for batching and for other kinds of model.
    "decoder_start_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "pad_token_id",
    "prefix",
    "sep_token_id",
    "unk_token_id",
    // Classification heads, which a causal model does not have.
    "finetuning_task",
    "id2label",
    "label2id",
    "num_labels",
    "problem_type",
    // Defaults for sampling, besides the settings that Ridge has. It takes those from the request.
    "bad_words_ids",
    "begin_suppress_tokens",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_scores",
    "remove_invalid_values",
    "return_dict_in_generate",
    "suppress_tokens",
];

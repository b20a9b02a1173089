//! The objects under `quantization_config` of checkpoints whose weights are integers of 4 bits, as GPTQ's libraries (AutoGPTQ,
//! GPTQModel) and AWQ's (AutoAWQ, llm-awq) write them.

use ridge_files::checkpoint::{Int4Layout, Int4Scheme};
use serde_json::{Map, Value};

use super::fields::Fields;
use super::published_codes::{CodeGroup, PublishedCodes, of_4_bits};
use crate::error::Result;

const REMEDY: &str = "Ridge reads weights of 4 bits with a scale for each group of a multiple of 32 columns or each row: choose such a \
                      checkpoint";

/// Is it what a file may say of the columns of a group: nothing, -1 for all, or a number that blocks of 32 divide?
pub(super) fn is_group(size: &Value) -> bool {
    size.is_null() || size.as_i64().is_some_and(|size| size == -1 || (size > 0 && size % 32 == 0))
}

/// The columns of a group, 0 for all of a row, of what [`is_group`] has found to be one.
pub(super) fn columns_of(size: Option<&Value>) -> Option<usize> {
    size?.as_i64().map(|size| usize::try_from(size).unwrap_or(0))
}

/// Requires codes of 4 bits, in groups that blocks of 32 divide, and gives their columns.
fn check_codes(block: &mut Fields<'_>) -> Result<Option<usize>> {
    block.must_be("bits", 4)?;
    match block.raw("group_size") {
        Some(size) if !is_group(size) => {
            Err(block.wrong("group_size", "is neither -1, for whole rows, nor a positive multiple of 32", REMEDY))
        }
        size => Ok(columns_of(size)),
    }
}

/// The value of `key`, or of `format`, as transformers calls it, and which of the two it is.
fn either<'a>(block: &mut Fields<'a>, key: &'static str) -> (&'static str, Option<&'a Value>) {
    let (own, other) = (block.raw(key), block.raw("format"));
    if own.is_some() { (key, own) } else { ("format", other) }
}

/// All matrices but those in the list `plain`.
fn codes_of(scheme: Int4Scheme, plain: Option<&Value>) -> PublishedCodes {
    PublishedCodes::new(vec![CodeGroup::new(of_4_bits(scheme.symmetric), None)], [plain]).with(scheme)
}

/// What GPTQ's libraries say of how codes were found and where they are used.
const OF_GPTQ: [&str; 25] = [
    "act_group_aware",
    "backend",
    "batch_size",
    "block_name_to_quantize",
    "cache_block_outputs",
    "damp_percent",
    "dataset",
    "disable_exllama",
    "exllama_config",
    "max_input_length",
    "meta",
    "method",
    "model_file_base_name",
    "model_name_or_path",
    "model_seqlen",
    "module_name_preceding_first_block",
    "modules_in_block_to_quantize",
    "pad_token_id",
    "quant_method",
    "quantizer",
    "static_groups",
    "tokenizer",
    "true_sequential",
    "use_cuda_fp16",
    "use_exllama",
];

/// A checkpoint of GPTQ (Frantar et al. 2023) whose columns are in groups in their order.
pub(super) fn gptq(mut block: Fields<'_>) -> Result<PublishedCodes> {
    let group = check_codes(&mut block)?;
    if block.optional("desc_act")?.unwrap_or(false) {
        let remedy = "choose a checkpoint that was quantised with desc_act = false";
        return Err(block.wrong("desc_act", "says that columns are in groups by an order of their own", remedy));
    }
    let symmetric = block.optional("sym")?.unwrap_or(true);
    let (key, format) = either(&mut block, "checkpoint_format");
    let one_above = match format.and_then(Value::as_str) {
        None | Some("gptq") => true,
        Some("gptq_v2") => false,
        Some(_) => return Err(block.wrong(key, "is neither gptq nor gptq_v2", REMEDY)),
    };
    let scheme = Int4Scheme { one_above, group, ..Int4Scheme::new(Int4Layout::Gptq, symmetric) };
    block.must_be("lm_head", false)?;
    block.must_be("is_marlin_format", false)?;
    block.must_be("pack_dtype", "int32")?;
    if !matches!(block.raw("dynamic"), None | Some(Value::Null)) {
        block.must_be("dynamic", Map::<String, Value>::new())?;
    }
    let codes = codes_of(scheme, block.raw("modules_to_not_convert"));
    block.harmless(&OF_GPTQ);
    block.finish()?;
    Ok(codes)
}

/// A checkpoint of AWQ (Lin et al. 2024) in the layout "gemm".
pub(super) fn awq(mut block: Fields<'_>) -> Result<PublishedCodes> {
    let group = check_codes(&mut block)?;
    let (key, version) = either(&mut block, "version");
    let version = version.and_then(Value::as_str).unwrap_or("gemm");
    // transformers writes GPTQ's keys too.
    block.must_be("desc_act", false)?;
    block.must_be("lm_head", false)?;
    if !version.eq_ignore_ascii_case("gemm") {
        let remedy = "choose a checkpoint whose version is gemm";
        return Err(block.wrong(key, "is not gemm: its codes are packed otherwise", remedy));
    }
    let points = block.optional("zero_point")?.unwrap_or(true);
    let scheme = Int4Scheme { group, ..Int4Scheme::new(Int4Layout::Awq, !points) };
    let codes = codes_of(scheme, block.raw("modules_to_not_convert"));
    block.harmless(&OF_GPTQ);
    block.harmless(&["do_fuse", "fuse_max_seq_len", "modules_to_fuse", "sym", "checkpoint_format"]);
    block.finish()?;
    Ok(codes)
}

//! A decoder's published checkpoint with the names and shapes that its graph's weights have.

use ridge_files::Checkpoint;

use super::decoder::DecoderFamily;
use super::tensors::TensorTable;
use crate::error::Result;

/// A published checkpoint of a family with the names and shapes that its graph's weights have; `drafts` says whether these include
/// those of the prediction module.
pub(super) fn arrange(
    tensors: &TensorTable,
    family: &dyn DecoderFamily,
    checkpoint: Checkpoint,
    drafts: bool,
) -> Result<Checkpoint> {
    let embedding = format!("{}.weight", tensors.embedding.scope);
    let prefix = &embedding[..=embedding.find('.').unwrap_or(0)];
    let unused = family.unused(drafts);
    let unused: Vec<&str> = unused.iter().map(String::as_str).collect();
    let mut checkpoint = language_model(checkpoint)?.leaving_out(&unused).scaled()?.in_mxfp4()?;
    if let Some(scheme) = family.decoder().codes.as_ref().and_then(|codes| codes.int4) {
        checkpoint = checkpoint.in_int4(scheme)?;
    }
    Ok(checkpoint.prefixed(prefix, &embedding).stacked(&family.stacks())?.divided(&family.parts())?)
}

/// The language model of a multimodal checkpoint, under the names that it has alone; another checkpoint as it is.
fn language_model(checkpoint: Checkpoint) -> Result<Checkpoint> {
    // The older and the newer spelling.
    const WITHIN: [(&str, &str); 2] = [("language_model.", ""), ("model.language_model.", "model.")];
    const BESIDE: [&str; 9] = [
        "vision_tower.*",
        "vision_model.*",
        "multi_modal_projector.*",
        "model.vision_tower.*",
        "model.visual.*",
        "model.multi_modal_projector.*",
        "model.audio_tower.*",
        "model.embed_audio.*",
        "model.embed_vision.*",
    ];
    if !checkpoint.names().any(|name| WITHIN.iter().any(|(prefix, _)| name.starts_with(prefix))) {
        return Ok(checkpoint);
    }
    let checkpoint = checkpoint.without(&BESIDE);
    Ok(checkpoint.renamed(|name| {
        WITHIN.iter().find_map(|(prefix, alone)| Some(format!("{alone}{}", name.strip_prefix(prefix)?)))
    })?)
}

//! DeepSeek V3.2 (DeepSeek-AI 2025, "DeepSeek-V3.2", section 2.1): V3, whose layers attend to the tokens that an indexer
//! selects.

use super::deepseek::{DEEPSEEK_V3, DeepseekConfig, TENSORS};
use super::definition::{FamilyDefinition, ReadConfig};
use super::indexer::IndexerConfig;
use crate::config::{Fields, REMEDY};
use crate::error::Result;

/// How V3.2 is registered.
pub(super) static DEEPSEEK_V32: FamilyDefinition = FamilyDefinition {
    name: "deepseek_v32",
    model_type: "deepseek_v32",
    class: Some("DeepseekV32ForCausalLM"),
    harmless: DEEPSEEK_V3.harmless,
    read: ReadConfig::Decoder(|f| Ok(Box::new(read(f)?))),
    tensors: TENSORS,
    gguf: None,
};

/// A V3 with an indexer in each layer, whose rotation turns elements half a rotation apart.
pub(super) fn read(f: &mut Fields<'_>) -> Result<DeepseekConfig> {
    read_sparse(f, false)
}

/// A V3 with an indexer, which turns neighbours as said if the file does not say.
pub(super) fn read_sparse(f: &mut Fields<'_>, interleaved: bool) -> Result<DeepseekConfig> {
    f.must_be("rope_interleave", true)?;
    // The defaults of V3 are others.
    f.needs(&["routed_scaling_factor", "first_k_dense_replace", "n_shared_experts"])?;
    let indexer = IndexerConfig::read(f, interleaved)?;
    let mut config = DeepseekConfig::read_v3(f)?;
    config.latent.indexer = Some(indexer);
    if let Some(types) = f.optional::<Vec<&str>>("layer_types")?
        && (types.len() != config.decoder.num_hidden_layers || types.iter().any(|kind| *kind != INDEXED))
    {
        let problem = format!("is not `{INDEXED}` for each of {} layers", config.decoder.num_hidden_layers);
        return Err(f.wrong("layer_types", problem, REMEDY));
    }
    Ok(config)
}

/// What a file calls layers with an indexer.
const INDEXED: &str = "indexed_attention";

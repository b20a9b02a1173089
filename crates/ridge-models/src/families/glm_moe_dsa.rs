//! GLM-5 (GLM-5 Team 2026, "GLM-5: from Vibe Coding to Agentic Engineering", section 2): the sparse attention of DeepSeek V3.2
//! with other sizes and an indexer whose rotation turns neighbours. Layers may take the selection of an earlier layer instead
//! of having an indexer.

use super::deepseek::{DEEPSEEK_V3, DeepseekConfig, TENSORS};
use super::deepseek_v32;
use super::definition::{FamilyDefinition, ReadConfig};
use crate::config::{Fields, REMEDY};
use crate::error::Result;

/// How it is registered.
pub(super) static GLM_MOE_DSA: FamilyDefinition = FamilyDefinition {
    name: "glm_moe_dsa",
    model_type: "glm_moe_dsa",
    class: Some("GlmMoeDsaForCausalLM"),
    harmless: DEEPSEEK_V3.harmless,
    read: ReadConfig::Decoder(|f| Ok(Box::new(read(f)?))),
    tensors: TENSORS,
    gguf: None,
};

pub(super) fn read(f: &mut Fields<'_>) -> Result<DeepseekConfig> {
    let mut config = deepseek_v32::read_sparse(f, true)?;
    let sharing = read_sharing(f, config.decoder.num_hidden_layers)?;
    if let Some(indexer) = &mut config.latent.indexer
        && sharing.contains(&true)
    {
        indexer.sharing = sharing;
    }
    Ok(config)
}

/// Which layers take the selection of another: as `indexer_types` lists, or the letters of `index_topk_pattern`; else all but
/// every `index_topk_freq`th behind `index_skip_topk_offset`.
fn read_sharing(f: &mut Fields<'_>, layers: usize) -> Result<Vec<bool>> {
    let (types, pattern, skip) = ("indexer_types", "index_topk_pattern", "index_skip_topk_offset");
    let every = f.count("index_topk_freq")?.unwrap_or(1).max(1) as usize;
    let offset = f.count(skip)?.unwrap_or(2) as usize;
    let letters = f.optional::<&str>(pattern)?.map(|letters| letters.split("").filter(|s| !s.is_empty()).collect());
    let (key, names) = match f.optional::<Vec<&str>>(types)? {
        Some(names) => (types, Some(names)),
        None if letters.is_some() => (pattern, letters),
        None => (skip, None),
    };
    let shares = |name: &&str| match *name {
        "full" | "F" => Ok(false),
        "shared" | "S" => Ok(true),
        _ => Err(f.wrong(key, format!("has {name:?}, which is not supported"), REMEDY)),
    };
    let sharing = match names {
        None => (0..layers).map(|layer| (layer + 1).saturating_sub(offset) % every != 0).collect(),
        Some(names) if names.len() != layers => {
            return Err(f.wrong(key, format!("is of {} layers and not of {layers}", names.len()), REMEDY));
        }
        Some(names) => names.iter().map(shares).collect::<Result<Vec<bool>>>()?,
    };
    match sharing.first() {
        Some(true) => Err(f.wrong(key, "lets the first layer share a selection that no layer before it makes", REMEDY)),
        _ => Ok(sharing),
    }
}

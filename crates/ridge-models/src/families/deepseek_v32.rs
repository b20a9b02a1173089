//! DeepSeek V3.2 (DeepSeek-AI 2025, "DeepSeek-V3.2-Exp", section 2): V3 with an indexer that chooses which tokens are attended to. It can
//! be planned and not run yet.

use super::deepseek::{DEEPSEEK_V3, DeepseekConfig, TENSORS};
use super::definition::{FamilyDefinition, ReadConfig};
use super::experts::MAX_SIZE;
use super::planned_config::{Channel, LatentConfig, Mixer, PlannedConfig};
use crate::config::Fields;
use crate::error::Result;

/// How V3.2 is registered.
pub(super) static DEEPSEEK_V32: FamilyDefinition = FamilyDefinition {
    name: "deepseek_v32",
    model_type: "deepseek_v32",
    class: Some("DeepseekV32ForCausalLM"),
    harmless: DEEPSEEK_V3.harmless,
    read: ReadConfig::Planned(|f| read(f, DEEPSEEK_V32.model_type, true)),
    tensors: TENSORS,
    gguf: None,
};

/// The configuration for plans of V3 and its like, and of V3.2 where it is `indexed`: what V3 is run with, and the indexer.
pub(super) fn read(f: &mut Fields<'_>, family: &'static str, indexed: bool) -> Result<PlannedConfig> {
    // A plan expands the latents, so that heads of keys and values are those of queries unless the file says otherwise.
    let heads_of_keys = f.optional_size("num_key_value_heads", MAX_SIZE)?;
    let DeepseekConfig { mut decoder, latent: l, experts, dense_layers, .. } = DeepseekConfig::read_v3(f)?;
    if indexed {
        f.needs(&["q_lora_rank"])?;
    }
    let latent = LatentConfig {
        q_rank: l.q_rank,
        kv_rank: l.kv_rank,
        nope: l.nope,
        rope: l.rope,
        value: l.value,
        index: match indexed {
            true => Some((
                f.size("index_n_heads", MAX_SIZE)?,
                f.size("index_head_dim", MAX_SIZE)?,
                f.size("index_topk", MAX_SIZE)?,
            )),
            false => None,
        },
    };
    decoder.num_key_value_heads = heads_of_keys.unwrap_or(decoder.num_attention_heads);
    decoder.head_dim = l.nope + l.rope;
    let channel = |layer| if layer < dense_layers { Channel::Gated } else { Channel::Experts };
    let layers = (0..decoder.num_hidden_layers).map(|layer| (Some(Mixer::Latent), Some(channel(layer)))).collect();
    Ok(PlannedConfig { family, decoder, layers, qk_norm: false, experts: Some(experts), latent: Some(latent) })
}

//! Configurations of graphs for plans alone: of latent attention as other programs serve it, which expand the cache for prompts
//! and cut its heads over ranks. The rule of every configuration holds: what is read is understood, the rest is refused.

use super::deepseek::DeepseekConfig;
use super::experts::{ExpertsConfig, MAX_SIZE};
use crate::config::{DecoderConfig, Fields};
use crate::error::Result;

/// What a layer does with the tokens of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mixer {
    /// Multi-head latent attention.
    Latent,
    /// The same, to the tokens that an earlier layer's indexer selects.
    SharingLatent,
}

/// What a layer does with each token alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Channel {
    /// `down(silu(gate(x)) * up(x))`.
    Gated,
    /// A few experts of many.
    Experts,
}

/// A layer: its two halves.
pub type LayerKind = (Mixer, Channel);

/// Latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentConfig {
    /// Width of the queries' latent, if they have one.
    pub q_rank: Option<usize>,
    /// Width of the latent of keys and values.
    pub kv_rank: usize,
    /// Elements of a head that are not rotated.
    pub nope: usize,
    /// Elements that are.
    pub rope: usize,
    /// Elements of a value.
    pub value: usize,
    /// `(heads, dim, top_k)` of the indexer that chooses which tokens are attended to.
    pub index: Option<(usize, usize, usize)>,
}

/// A model for plans.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedConfig {
    /// The `model_type` of its configuration.
    pub family: &'static str,
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// The layers in order.
    pub layers: Vec<LayerKind>,
    /// Of layers with [`Channel::Experts`].
    pub experts: ExpertsConfig,
    /// Attention of every layer.
    pub latent: LatentConfig,
}

/// The configuration for plans of `family`, whose own is read by `read`.
pub(super) fn read_latent(
    f: &mut Fields<'_>,
    family: &'static str,
    read: fn(&mut Fields<'_>) -> Result<DeepseekConfig>,
) -> Result<PlannedConfig> {
    // A plan expands the latents, so that heads of keys and values are those of queries unless the file says otherwise.
    let heads_of_keys = f.optional_size("num_key_value_heads", MAX_SIZE)?;
    let config = read(f)?;
    let layers = (0..config.num_hidden_layers).map(|layer| {
        let mixer = if config.shares(layer) { Mixer::SharingLatent } else { Mixer::Latent };
        let channel = if layer < config.dense_layers { Channel::Gated } else { Channel::Experts };
        (mixer, channel)
    });
    let layers = layers.collect();
    let DeepseekConfig { mut decoder, latent: l, experts, .. } = config;
    let latent = LatentConfig {
        q_rank: l.q_rank,
        kv_rank: l.kv_rank,
        nope: l.nope,
        rope: l.rope,
        value: l.value,
        index: l.indexer.map(|indexer| (indexer.heads, indexer.dim, indexer.top_k)),
    };
    decoder.num_key_value_heads = heads_of_keys.unwrap_or(decoder.num_attention_heads);
    decoder.head_dim = l.nope + l.rope;
    Ok(PlannedConfig { family, decoder, layers, experts, latent })
}

//! Configurations of families whose graphs can be planned and not run yet: latent attention. The
//! rule of every configuration holds: what is read is understood, the rest is refused.

use super::experts::ExpertsConfig;
use crate::config::DecoderConfig;

/// What a layer does with the tokens of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mixer {
    /// Grouped-query attention, with norms of queries and keys where `qk_norm` says.
    Attention,
    /// Multi-head latent attention.
    Latent,
}

/// What a layer does with each token alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Channel {
    /// `down(silu(gate(x)) * up(x))`.
    Gated,
    /// A few experts of many.
    Experts,
}

/// A layer: one of both halves or both.
pub type LayerKind = (Option<Mixer>, Option<Channel>);

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

/// A model that can be planned.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedConfig {
    /// The `model_type` of its configuration.
    pub family: &'static str,
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// The layers in order.
    pub layers: Vec<LayerKind>,
    /// Are queries and keys normalised, head by head?
    pub qk_norm: bool,
    /// Where a layer has [`Channel::Experts`].
    pub experts: Option<ExpertsConfig>,
    /// Where a layer has [`Mixer::Latent`].
    pub latent: Option<LatentConfig>,
}

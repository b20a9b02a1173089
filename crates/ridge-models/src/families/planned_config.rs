//! Configurations of families whose graphs can be planned and not run yet: mixtures of experts, latent attention and
//! hybrids with Mamba. The rule of every configuration holds: what is read is understood, the rest is refused.

use super::tensors::{Cut, TensorName};
use crate::config::{DecoderConfig, Fields, REMEDY};
use crate::error::Result;

/// What a layer does with the tokens of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mixer {
    /// Grouped-query attention, with norms of queries and keys where `qk_norm` says.
    Attention,
    /// Multi-head latent attention.
    Latent,
    /// A state-space scan.
    Mamba,
}

/// What a layer does with each token alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Channel {
    /// `down(silu(gate(x)) * up(x))`.
    Gated,
    /// `down(relu(up(x))^2)`.
    Squared,
    /// A few experts of many.
    Experts,
}

/// A layer: one of both halves or both.
pub type LayerKind = (Option<Mixer>, Option<Channel>);

/// Experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertsConfig {
    /// How many there are.
    pub experts: usize,
    /// How many a token takes.
    pub top_k: usize,
    /// Width of one.
    pub intermediate_size: usize,
    /// Width of those that all tokens take, together; 0 without.
    pub shared_size: usize,
    /// Are they gated, or squared?
    pub gated: bool,
    /// Scores are sigmoids with a bias for the choice; else their softmax.
    pub sigmoid: bool,
    /// Are the weights divided by their sum?
    pub normalise: bool,
    /// Factor of the weights.
    pub scale: f64,
    /// `(groups, kept)`, see [`ridge_graph::ops::MoeRouter`].
    pub groups: Option<(usize, usize)>,
}

/// Latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentConfig {
    /// Width of the queries' latent.
    pub q_rank: usize,
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

/// The scan of Mamba-2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MambaConfig {
    /// Heads.
    pub heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Groups.
    pub groups: usize,
    /// Elements of the state of a channel.
    pub state: usize,
    /// Tokens that the convolution sees.
    pub kernel: usize,
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
    /// Where a layer has [`Mixer::Mamba`].
    pub mamba: Option<MambaConfig>,
}

/// The largest size that a configuration may have.
pub(super) const MAX_SIZE: usize = 1 << 22;

/// Keys of routing that training alone has.
pub(super) const ROUTER_TRAINING: &[&str] = &["router_aux_loss_coef", "output_router_logits", "ep_size"];

/// Experts, those that all tokens take among them. GGUF files of these families are not read.
pub(super) const EXPERTS: &[TensorName] = &[
    TensorName::planned("mlp.experts.gate_proj", Cut::Columns),
    TensorName::planned("mlp.experts.up_proj", Cut::Columns),
    TensorName::planned("mlp.experts.down_proj", Cut::Terms),
    TensorName::planned("mlp.shared_experts.gate_proj", Cut::Columns),
    TensorName::planned("mlp.shared_experts.up_proj", Cut::Columns),
    TensorName::planned("mlp.shared_experts.down_proj", Cut::Terms),
];

/// Checks that a token can choose its experts.
pub(super) fn check_experts(f: &Fields<'_>, e: &ExpertsConfig) -> Result<()> {
    let (groups, kept) = e.groups.unwrap_or((1, 1));
    if !e.experts.is_multiple_of(groups) || kept > groups {
        return Err(f.wrong("n_group", format!("does not divide {} experts with {kept} kept", e.experts), REMEDY));
    }
    if e.top_k > e.experts / groups * kept {
        let problem = format!("is above the {} experts that a token chooses from", e.experts / groups * kept);
        return Err(f.wrong("num_experts_per_tok", problem, REMEDY));
    }
    Ok(())
}

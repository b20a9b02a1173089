//! Kinds of work, as those who plan tell ops apart.

use crate::dim::Sym;

/// What kind of work an op is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Work {
    /// Another view of its input, or values that are known before: nothing moves.
    View,
    /// A pass over its operands.
    Pass,
    /// Products of input 0 with the matrix that is this input.
    Product {
        /// Which input.
        weight: usize,
    },
    /// Products of rows of input 0, each with the matrix of an expert: `[experts, n, k]`, this input.
    Experts {
        /// Which input.
        weight: usize,
    },
    /// Attention, of queries `[tokens, heads, dim]`, input 0.
    Attention(AttentionWork),
}

/// What an op of attention tells of its work beside its cost.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AttentionWork {
    /// Symbols of its cost that count (query, key) pairs.
    pub pairs: Vec<Sym>,
    /// Symbols of its cost that count tokens read from a cache.
    pub cached: Vec<Sym>,
    /// How many keys a query sees at most, the last or the best; all if `None`.
    pub window: Option<usize>,
    /// The input that takes latents to keys and values, of latent attention.
    pub weight: Option<usize>,
    /// FLOPs of a head for each pair where keys and values are made from their latents first; `None` where there is no such
    /// way.
    pub expanded_pair: Option<usize>,
}

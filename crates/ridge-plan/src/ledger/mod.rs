//! What a rank holds in its memory, entry by entry, each with its formula: `training` and `serving`.

mod entries;
mod quantisation;
mod serving;
mod training;

pub use entries::{Ledger, LedgerEntry};
pub use quantisation::Quantisation;
pub use serving::{
    SequenceState, ServingLedger, ServingMemory, cache_tokens, holding_one, of_latents, sequence_bytes,
    sequence_states, serving,
};
pub use training::{
    LayerActivations, RankParameters, activations_of_layer, rank_parameters, training, training_stages, training_total,
};

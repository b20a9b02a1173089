//! What is trained: sequences, precision, and how states are kept.

use ridge_hw::spec::Precision;
use serde::Serialize;

/// What is trained, but for the model and the layout.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Workload {
    /// Tokens of a sequence.
    pub seq: usize,
    /// Sequences of a step, over all replicas.
    pub global_batch: usize,
    /// Of matrix products.
    pub precision: Precision,
    /// How states are kept.
    pub states: StateBytes,
    /// Is attention fused, so that scores never reach memory?
    pub fused_attention: bool,
    /// Is there dropout behind each half of a layer and on the scores?
    pub dropout: bool,
    /// Is what follows the logits fused, so that their f32 logarithms never reach memory?
    pub fused_loss: bool,
    /// Is communication of data parallelism hidden behind arithmetic where it fits?
    pub overlap: bool,
}

/// Bytes of a parameter's states.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StateBytes {
    /// The weight as the forward pass has it.
    pub weight: f64,
    /// Its gradient.
    pub gradient: f64,
    /// A master copy, if there is one.
    pub master: f64,
    /// The optimiser's moments.
    pub moments: f64,
}

impl StateBytes {
    /// 16-bit weights with f32 gradients, master weights and moments: 18 bytes, as Megatron keeps them.
    pub const MIXED: Self = Self { weight: 2.0, gradient: 4.0, master: 4.0, moments: 8.0 };
    /// f32 weights, cast where they are used, f32 gradients and moments: 16 bytes, as FSDP keeps them.
    pub const FULL: Self = Self { weight: 4.0, gradient: 4.0, master: 0.0, moments: 8.0 };
    /// All in 16 bits: 8 bytes.
    pub const HALF: Self = Self { weight: 2.0, gradient: 2.0, master: 0.0, moments: 4.0 };
}

impl Default for Workload {
    fn default() -> Self {
        Self {
            seq: 4096,
            global_batch: 256,
            precision: Precision::Bf16,
            states: StateBytes::MIXED,
            fused_attention: true,
            dropout: false,
            fused_loss: true,
            overlap: true,
        }
    }
}

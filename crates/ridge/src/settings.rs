//! The number formats in which a model is stored and computed.

use ridge_graph::passes::Activations;
use ridge_graph::{DType, FormatRef};
use ridge_models::BuildOptions;

/// In which number formats a model is stored and computes.
#[derive(Clone, Debug, Default)]
pub struct NumberSettings {
    /// Storage format of the matrices; as the checkpoint stores them if `None`.
    pub format: Option<FormatRef>,
    /// Dtype of activations; the one that the configuration names if `None`.
    pub dtype: Option<DType>,
    /// Dtype of cached keys and values; that of activations if `None`.
    pub cache_dtype: Option<DType>,
    /// How weights that are codes are multiplied.
    pub activations: ActivationMode,
}

impl NumberSettings {
    /// Options to build a model whose configuration names `named` as its dtype.
    pub fn options(&self, named: Option<DType>) -> BuildOptions {
        let activations = self.dtype.or(named).unwrap_or(DType::F32);
        BuildOptions { activations, cache: self.cache_dtype.unwrap_or(activations), ..BuildOptions::default() }
    }
}

/// Whether activations are rounded before they are multiplied by weights that are codes: on the CPU to int8 by block-quantised
/// and int8 ones, on a GPU to 8 bits by those that have a
/// [`ScaledFormat::of_activations`](ridge_graph::format::ScaledFormat::of_activations).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ActivationMode {
    /// The faster for each: on a CPU with AMX exact for tokens of a prompt if activations are bf16, else int8; on a GPU 8 bits.
    #[default]
    Auto,
    /// Int8 on the CPU, and on a GPU as [`ActivationMode::Auto`].
    Int8,
    /// Never rounded.
    Exact,
}

impl ActivationMode {
    /// Name on the command line and in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Int8 => Activations::Int8.name(),
            Self::Exact => Activations::Exact.name(),
        }
    }

    /// How products on a GPU take activations.
    pub fn on_gpu(self) -> Activations {
        match self {
            Self::Auto | Self::Int8 => Activations::Matched,
            Self::Exact => Activations::Exact,
        }
    }

    /// How products on the CPU take activations of `dtype`: those of tokens of prompts, and those of tokens of answers.
    pub fn for_prompts_and_answers(self, dtype: DType) -> (Activations, Activations) {
        match self {
            Self::Auto if dtype == DType::BF16 && ridge_cpu::has_tiles() => (Activations::Exact, Activations::Int8),
            Self::Auto | Self::Int8 => (Activations::Int8, Activations::Int8),
            Self::Exact => (Activations::Exact, Activations::Exact),
        }
    }
}

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
    /// How the CPU multiplies block-quantised weights.
    pub activations: ActivationMode,
}

impl NumberSettings {
    /// Options to build a model whose configuration names `named` as its dtype.
    pub fn options(&self, named: Option<DType>) -> BuildOptions {
        let activations = self.dtype.or(named).unwrap_or(DType::F32);
        BuildOptions { activations, cache: self.cache_dtype.unwrap_or(activations), ..BuildOptions::default() }
    }
}

/// Whether the CPU rounds activations to int8 before it multiplies them by block-quantised weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ActivationMode {
    /// The faster for each: exact for tokens of a prompt if activations are bf16 and the CPU has AMX, else rounded.
    #[default]
    Auto,
    /// Always rounded.
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

    /// How products take activations of `dtype`: those of tokens of prompts, and those of tokens of answers.
    pub fn for_prompts_and_answers(self, dtype: DType) -> (Activations, Activations) {
        match self {
            Self::Auto if dtype == DType::BF16 && ridge_cpu::has_tiles() => (Activations::Exact, Activations::Int8),
            Self::Auto | Self::Int8 => (Activations::Int8, Activations::Int8),
            Self::Exact => (Activations::Exact, Activations::Exact),
        }
    }
}

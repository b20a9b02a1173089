//! Mistral: Llama's layers over a sliding window (Jiang et al. 2023, "Mistral 7B", section 2).

use ridge_graph::{Builder, Result as GraphResult, Var};

use super::blocks::Norm;
use super::decoder::{Family, Layer};
use super::llama;
use crate::config::{DecoderConfig, MistralConfig};

impl Family for MistralConfig {
    fn name(&self) -> &'static str {
        "mistral"
    }

    fn config(&self) -> &DecoderConfig {
        self
    }

    fn window(&self, _index: usize) -> Option<usize> {
        self.sliding_window
    }

    fn norm(&self) -> Norm {
        Norm::Rms(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &Layer<'_>) -> GraphResult<Var> {
        llama::layer(self, g, x, at, false, false)
    }
}

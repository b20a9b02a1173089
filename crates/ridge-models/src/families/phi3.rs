//! Phi-3: Llama's layers, published with fused projections (Abdin et al. 2024, "Phi-3 Technical Report", section 2).

use ridge_graph::{Builder, Result as GraphResult, Var};

use super::blocks::Norm;
use super::decoder::{Family, Layer};
use super::llama;
use crate::config::{DecoderConfig, Phi3Config};
use ridge_files::checkpoint::{Part, Rows};

impl Family for Phi3Config {
    fn name(&self) -> &'static str {
        "phi3"
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

    fn parts(&self) -> Vec<Part> {
        let (q, kv) = (self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim);
        let inner = self.intermediate_size;
        let part = |of: &str, name: &str, first, len| Part {
            of: format!("model.layers.*.{of}.weight"),
            name: format!("model.layers.*.{name}.weight"),
            transposed: false,
            rows: Some(Rows::range(first, len)),
        };
        vec![
            part("self_attn.qkv_proj", "self_attn.q_proj", 0, q),
            part("self_attn.qkv_proj", "self_attn.k_proj", q, kv),
            part("self_attn.qkv_proj", "self_attn.v_proj", q + kv, kv),
            part("mlp.gate_up_proj", "mlp.gate_proj", 0, inner),
            part("mlp.gate_up_proj", "mlp.up_proj", inner, inner),
        ]
    }
}

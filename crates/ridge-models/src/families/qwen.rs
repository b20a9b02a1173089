//! Qwen 2, with biases on queries, keys and values (Yang et al. 2024, "Qwen2 Technical Report", section 2.2), and
//! Qwen 3, with norms of queries and keys instead (2025, "Qwen3 Technical Report", section 2).

use ridge_graph::{Builder, Result as GraphResult, Var};

use super::blocks::{Gate, Half, Norm, gated_mlp, linear};
use super::decoder::{Family, Layer};
use super::llama::QKV;
use crate::config::{DecoderConfig, QwenConfig};

impl Family for QwenConfig {
    fn name(&self) -> &'static str {
        if self.qk_norm { "qwen3" } else { "qwen2" }
    }

    fn config(&self) -> &DecoderConfig {
        self
    }

    fn window(&self, index: usize) -> Option<usize> {
        self.windows.get(index).copied().flatten()
    }

    fn norm(&self) -> Norm {
        Norm::Rms(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &Layer<'_>) -> GraphResult<Var> {
        let norm = self.norm();
        let x = Half::before(norm, "input_layernorm").add(g, x, "self_attn", |g, x| {
            let [mut q, mut k, v] = at.project(g, x, QKV, self.qkv_bias)?;
            if self.qk_norm {
                (q, k) = (norm.apply(g, "q_norm", q)?, norm.apply(g, "k_norm", k)?);
            }
            let a = at.attend(g, [q, k, v], &at.scores())?;
            linear(g, "o_proj", a, self.hidden_size, self.output_bias)
        })?;
        Half::before(norm, "post_attention_layernorm")
            .add(g, x, "mlp", |g, x| gated_mlp(g, x, self.intermediate_size, Gate::Silu, false))
    }
}

//! OLMo 2: norms after attention and MLP instead of before, and norms of queries and keys over all heads together
//! (2024, "2 OLMo 2 Furious", section 2.1).

use ridge_graph::{Builder, Result as GraphResult, Var};

use super::blocks::{Gate, Half, Norm, gated_mlp, linear};
use super::decoder::{Family, Layer};
use super::llama::QKV;
use crate::config::{DecoderConfig, Olmo2Config};

impl Family for Olmo2Config {
    fn name(&self) -> &'static str {
        "olmo2"
    }

    fn config(&self) -> &DecoderConfig {
        self
    }

    fn norm(&self) -> Norm {
        Norm::Rms(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &Layer<'_>) -> GraphResult<Var> {
        let norm = self.norm();
        let half = |after| Half { norm, before: None, after: Some(after) };
        let x = half("post_attention_layernorm").add(g, x, "self_attn", |g, x| {
            let [q, k, v] = at.project(g, x, QKV, self.attention_bias)?;
            let q = at.across_heads(g, q, |g, q| norm.apply(g, "q_norm", q))?;
            let k = at.across_heads(g, k, |g, k| norm.apply(g, "k_norm", k))?;
            let a = at.attend(g, [q, k, v], &at.scores())?;
            linear(g, "o_proj", a, self.hidden_size, self.attention_bias)
        })?;
        half("post_feedforward_layernorm")
            .add(g, x, "mlp", |g, x| gated_mlp(g, x, self.intermediate_size, Gate::Silu, false))
    }
}

//! Gemma 2 (Gemma Team 2024, "Gemma 2: Improving Open Language Models at a Practical Size", section 2) and Gemma 3
//! (2025, "Gemma 3 Technical Report", section 2): local and global layers in turn, norms on both sides of each half,
//! and soft caps in the one or norms of queries and keys in the other.

use ridge_graph::ops::Gelu;
use ridge_graph::{Builder, Result as GraphResult, Var};

use super::blocks::{Gate, Half, Norm, gated_mlp, linear, soft_cap};
use super::decoder::{Family, Layer, Scores};
use super::llama::QKV;
use crate::config::{DecoderConfig, GemmaConfig};

impl Family for GemmaConfig {
    fn name(&self) -> &'static str {
        if self.qk_norm { "gemma3" } else { "gemma2" }
    }

    fn config(&self) -> &DecoderConfig {
        self
    }

    fn window(&self, index: usize) -> Option<usize> {
        self.windows.get(index).copied().flatten()
    }

    fn embed(&self, g: &mut Builder, x: Var, _positions: Var) -> GraphResult<Var> {
        // The factor is rounded to the dtype of activations, as in training.
        let scale = g.constant_like(x, (self.hidden_size as f64).sqrt())?;
        g.mul(x, scale)
    }

    fn norm(&self) -> Norm {
        Norm::RmsPlusOne(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &Layer<'_>) -> GraphResult<Var> {
        let norm = self.norm();
        let half = |before, after| Half { norm, before: Some(before), after: Some(after) };
        let x = half("input_layernorm", "post_attention_layernorm").add(g, x, "self_attn", |g, x| {
            let [mut q, mut k, v] = at.project(g, x, QKV, self.attention_bias)?;
            if self.qk_norm {
                (q, k) = (norm.apply(g, "q_norm", q)?, norm.apply(g, "k_norm", k)?);
            }
            let mut scores = Scores {
                scale: 1.0 / self.query_pre_attn_scalar.sqrt(),
                softcap: self.attn_logit_softcapping,
                ..at.scores()
            };
            if at.window.is_some() {
                scores.rope = Some(at.rope(&self.local_rope));
            }
            let a = at.attend(g, [q, k, v], &scores)?;
            linear(g, "o_proj", a, self.hidden_size, self.attention_bias)
        })?;
        half("pre_feedforward_layernorm", "post_feedforward_layernorm")
            .add(g, x, "mlp", |g, x| gated_mlp(g, x, self.intermediate_size, Gate::Gelu(Gelu::Tanh), false))
    }

    fn logits(&self, g: &mut Builder, logits: Var) -> GraphResult<Var> {
        match self.final_logit_softcapping {
            Some(cap) => soft_cap(g, logits, cap),
            None => Ok(logits),
        }
    }
}

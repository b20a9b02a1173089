//! Falcon (Almazrouei et al. 2023, "The Falcon Series of Open Language Models", section 4): attention and MLP side by
//! side, and one or a few heads of keys and values.

use ridge_graph::{Builder, Result as GraphResult, Var};

use super::blocks::{Norm, linear, mlp};
use super::decoder::{Family, Layer, Names};
use super::llama::QKV;
use crate::config::{DecoderConfig, FalconConfig};
use ridge_files::checkpoint::{Part, Rows};

impl Family for FalconConfig {
    fn name(&self) -> &'static str {
        "falcon"
    }

    fn config(&self) -> &DecoderConfig {
        self
    }

    fn names(&self) -> Names {
        Names {
            embedding: "transformer.word_embeddings",
            layers: "transformer.h",
            attention: "self_attention",
            norm: "transformer.ln_f",
            head: "lm_head",
        }
    }

    fn norm(&self) -> Norm {
        Norm::Layer(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &Layer<'_>) -> GraphResult<Var> {
        let norm = self.norm();
        let (to_attention, to_mlp) = if self.two_norms {
            (norm.apply(g, "ln_attn", x)?, norm.apply(g, "ln_mlp", x)?)
        } else {
            let h = norm.apply(g, "input_layernorm", x)?;
            (h, h)
        };
        let a = g.scoped("self_attention", |g| {
            let qkv = at.project(g, to_attention, QKV, self.bias)?;
            let a = at.attend(g, qkv, &at.scores())?;
            linear(g, "dense", a, self.hidden_size, self.bias)
        })?;
        let m = g.scoped("mlp", |g| {
            let names = ["dense_h_to_4h", "dense_4h_to_h"];
            mlp(g, to_mlp, names, self.intermediate_size, self.activation, self.bias)
        })?;
        let both = g.add(m, a)?;
        g.add(x, both)
    }

    /// Rows of all queries, then of keys, then of values; or the same for each group of heads.
    fn parts(&self) -> Vec<Part> {
        let (dim, groups) = (self.head_dim, if self.grouped_rows { self.num_key_value_heads } else { 1 });
        let kv = dim * self.num_key_value_heads / groups;
        let q = dim * self.num_attention_heads / groups;
        let kinds = if self.bias { &["weight", "bias"][..] } else { &["weight"] };
        let mut parts = Vec::new();
        for (name, first, len) in [(QKV[0], 0, q), (QKV[1], q, kv), (QKV[2], q + kv, kv)] {
            for kind in kinds {
                parts.push(Part {
                    of: format!("transformer.h.*.self_attention.query_key_value.{kind}"),
                    name: format!("transformer.h.*.self_attention.{name}.{kind}"),
                    transposed: false,
                    rows: Some(Rows { first, len, stride: q + 2 * kv, blocks: groups }),
                });
            }
        }
        parts
    }
}

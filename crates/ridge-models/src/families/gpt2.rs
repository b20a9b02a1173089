//! GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3): learned positions,
//! layer norms, biases everywhere, and matrices that are published transposed.

use ridge_graph::{Builder, Result as GraphResult, Var};

use super::blocks::{Half, Norm, linear, mlp, weight};
use super::decoder::{Family, Layer, Names};
use super::llama::QKV;
use crate::config::{DecoderConfig, Gpt2Config};
use ridge_files::checkpoint::{Part, Rows};

impl Family for Gpt2Config {
    fn name(&self) -> &'static str {
        "gpt2"
    }

    fn config(&self) -> &DecoderConfig {
        self
    }

    fn names(&self) -> Names {
        Names {
            embedding: "transformer.wte",
            layers: "transformer.h",
            attention: "attn",
            norm: "transformer.ln_f",
            head: "lm_head",
        }
    }

    fn embed(&self, g: &mut Builder, x: Var, positions: Var) -> GraphResult<Var> {
        let dtype = g.ty(x)?.dtype;
        g.scoped("transformer.wpe", |g| {
            let table = weight(g, "weight", [self.max_position_embeddings, self.hidden_size])?;
            let place = g.embedding(table, positions, dtype)?;
            g.add(x, place)
        })
    }

    fn norm(&self) -> Norm {
        Norm::Layer(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &Layer<'_>) -> GraphResult<Var> {
        let norm = self.norm();
        let x = Half::before(norm, "ln_1").add(g, x, "attn", |g, x| {
            let qkv = at.project(g, x, QKV, true)?;
            let a = at.attend(g, qkv, &at.scores())?;
            linear(g, "c_proj", a, self.hidden_size, true)
        })?;
        Half::before(norm, "ln_2")
            .add(g, x, "mlp", |g, x| mlp(g, x, ["c_fc", "c_proj"], self.intermediate_size, self.activation, true))
    }

    fn parts(&self) -> Vec<Part> {
        let width = self.num_attention_heads * self.head_dim;
        let part = |of: &str, name: &str, rows: Option<Rows>| Part {
            of: format!("transformer.h.*.{of}"),
            name: format!("transformer.h.*.{name}"),
            transposed: true,
            rows,
        };
        let mut parts: Vec<Part> = ["attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"]
            .into_iter()
            .map(|whole| part(whole, whole, None))
            .collect();
        for (i, name) in QKV.into_iter().enumerate() {
            for kind in ["weight", "bias"] {
                let rows = Rows::range(i * width, width);
                parts.push(part(&format!("attn.c_attn.{kind}"), &format!("attn.{name}.{kind}"), Some(rows)));
            }
        }
        parts
    }
}

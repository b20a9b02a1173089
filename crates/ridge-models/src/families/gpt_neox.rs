//! GPT-NeoX (Black et al. 2022, "GPT-NeoX-20B", section 2.1) and Pythia: attention and MLP side by side, and rotation
//! of a part of each head.

use ridge_graph::{Builder, Result as GraphResult, Var};

use super::blocks::{Half, Norm, linear, mlp};
use super::decoder::{Family, Layer, Names};
use super::llama::QKV;
use crate::config::{DecoderConfig, GptNeoxConfig};
use ridge_files::checkpoint::{Part, Rows};

impl GptNeoxConfig {
    fn attention(&self, g: &mut Builder, x: Var, at: &Layer<'_>) -> GraphResult<Var> {
        let qkv = at.project(g, x, QKV, self.attention_bias)?;
        let a = at.attend(g, qkv, &at.scores())?;
        linear(g, "dense", a, self.hidden_size, self.attention_bias)
    }

    fn mlp(&self, g: &mut Builder, x: Var) -> GraphResult<Var> {
        mlp(g, x, ["dense_h_to_4h", "dense_4h_to_h"], self.intermediate_size, self.activation, true)
    }
}

impl Family for GptNeoxConfig {
    fn name(&self) -> &'static str {
        "gpt_neox"
    }

    fn config(&self) -> &DecoderConfig {
        self
    }

    fn names(&self) -> Names {
        Names {
            embedding: "gpt_neox.embed_in",
            layers: "gpt_neox.layers",
            attention: "attention",
            norm: "gpt_neox.final_layer_norm",
            head: "embed_out",
        }
    }

    fn norm(&self) -> Norm {
        Norm::Layer(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &Layer<'_>) -> GraphResult<Var> {
        let norm = self.norm();
        let (attend, feed) = (Half::before(norm, "input_layernorm"), Half::before(norm, "post_attention_layernorm"));
        let attended = attend.add(g, x, "attention", |g, x| self.attention(g, x, at))?;
        if !self.use_parallel_residual {
            return feed.add(g, attended, "mlp", |g, x| self.mlp(g, x));
        }
        let h = norm.apply(g, "post_attention_layernorm", x)?;
        let m = g.scoped("mlp", |g| self.mlp(g, h))?;
        g.add(attended, m)
    }

    /// Each head's rows of queries, then of keys, then of values.
    fn parts(&self) -> Vec<Part> {
        let (dim, heads) = (self.head_dim, self.num_attention_heads);
        let kinds = if self.attention_bias { &["weight", "bias"][..] } else { &["weight"] };
        let part = |i: usize, name: &str, kind: &str| Part {
            of: format!("gpt_neox.layers.*.attention.query_key_value.{kind}"),
            name: format!("gpt_neox.layers.*.attention.{name}.{kind}"),
            transposed: false,
            rows: Some(Rows { first: i * dim, len: dim, stride: 3 * dim, blocks: heads }),
        };
        let of = |(i, name): (usize, &'static str)| kinds.iter().map(move |kind| part(i, name, kind));
        QKV.into_iter().enumerate().flat_map(of).collect()
    }
}

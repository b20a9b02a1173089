//! The graph of encoders of BERT's build (Devlin et al. 2019, "BERT: Pre-training of Deep Bidirectional Transformers for
//! Language Understanding", section 3): every token sees every other of its text, norms come after each half of a layer.

use ridge_graph::ops::{Gelu, RaggedAttention};
use ridge_graph::{Builder, DType, Dim, Result as GraphResult, Sym, Type, Var};

use super::blocks::{NormKind, linear, mlp, weight};
use super::text_classifier::TextClassifier;
use crate::error::Result;
use crate::model::{BuildOptions, Encoder, symbols};
use crate::module::Module;
use crate::pooling::with_pooling;
use ridge_files::Checkpoint;

const WORDS: &str = "bert.embeddings.word_embeddings";

/// What checkpoints hold besides: heads that the encoder was trained with, and its positions in a list.
const BESIDE: &[&str] = &[
    "bert.pooler.*",
    "cls.*",
    "bert.cls.*",
    "classifier.*",
    "lm_head.*",
    "pre_classifier.*",
    "qa_outputs.*",
    "vocab_layer_norm.*",
    "vocab_projector.*",
    "vocab_transform.*",
    "*.position_ids",
];

/// Every size and switch of an encoder of BERT's build.
#[derive(Clone, Debug, PartialEq)]
pub struct BertConfig {
    /// The `model_type` of its configuration.
    pub family: &'static str,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Layers.
    pub num_hidden_layers: usize,
    /// Heads of each layer; they divide the width.
    pub num_attention_heads: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Positions that are learned, which limits the length of a text.
    pub max_position_embeddings: usize,
    /// The row of a text's first position among those that are learned.
    pub first_position: usize,
    /// Segments that are learned; none if 0.
    pub type_vocab_size: usize,
    /// Added to the variance inside every norm.
    pub norm_eps: f64,
    /// Activation of the MLP.
    pub activation: Gelu,
    /// The classifier that it has, if any.
    pub classifier: Option<TextClassifier>,
    /// The dtype the weights were published in, if the file says.
    pub torch_dtype: Option<DType>,
}

impl BertConfig {
    /// Builds the graph of the encoder, with every weight as plain f32.
    ///
    /// # Errors
    /// A mistake of ours: the configuration has been checked.
    pub fn build(&self, options: &BuildOptions) -> GraphResult<Encoder> {
        let mut g = Builder::new();
        let (tokens, seqs) = (Dim::sym(symbols::TOKENS), Dim::sym(symbols::SEQS));
        let mut per_token = |name: &str| g.step_input(name, Type::tensor(DType::I32, [&tokens]));
        let (ids, types, seq_ids) = (per_token("token_ids")?, per_token("token_type_ids")?, per_token("seq_ids")?);
        let starts = g.step_input("query_start", Type::tensor(DType::I32, [seqs + 1]))?;
        let place = g.iota([&tokens], 0, DType::I32)?;
        let start = g.gather(starts, seq_ids, 0)?;
        let mut positions = g.sub(place, start)?;
        if self.first_position > 0 {
            let first = g.constant(DType::I32, self.first_position as f64)?;
            positions = g.add(positions, first)?;
        }

        let norm = NormKind::Layer(self.norm_eps);
        let mut x = self.look_up(&mut g, WORDS, self.vocab_size, ids, options)?;
        for (scope, rows, ids) in [
            ("bert.embeddings.token_type_embeddings", self.type_vocab_size, types),
            ("bert.embeddings.position_embeddings", self.max_position_embeddings, positions),
        ]
        .into_iter()
        .filter(|(_, rows, _)| *rows > 0)
        {
            let more = self.look_up(&mut g, scope, rows, ids, options)?;
            x = g.add(x, more)?;
        }
        x = norm.apply(&mut g, "bert.embeddings.LayerNorm", x)?;
        let layer = g.function("encoder_layer", |g| {
            let x = g.arg("x", Type::tensor(options.activations, [tokens.clone(), self.hidden_size.into()]));
            let seq_ids = g.arg("seq_ids", Type::tensor(DType::I32, [&tokens]));
            Ok(vec![self.layer(g, x, seq_ids)?])
        })?;
        for index in 0..self.num_hidden_layers {
            x = g.scoped(&format!("bert.encoder.layer.{index}"), |g| g.call(layer, &[x, seq_ids]))?[0];
        }
        let hidden = g.cast(x, DType::F32)?;
        let mut outputs = vec![("hidden".into(), hidden)];
        if let Some(classifier) = &self.classifier {
            let [logits, scores] = classifier.build(&mut g, x)?;
            outputs.extend([("class_logits".into(), logits), ("scores".into(), scores)]);
        }
        let graph = with_pooling(&g.finish(outputs)?)?;
        Ok(Encoder {
            module: Module {
                family: self.family,
                graph,
                state_groups: Vec::new(),
                activations: options.activations,
                shares: None,
            },
            hidden_size: self.hidden_size,
            vocab_size: self.vocab_size,
            max_context: self.max_position_embeddings.saturating_sub(self.first_position),
            labels: self.classifier.map_or(0, |classifier| classifier.labels),
        })
    }

    /// The rows `ids` of the table of scope `scope`.
    fn look_up(&self, g: &mut Builder, scope: &str, rows: usize, ids: Var, options: &BuildOptions) -> GraphResult<Var> {
        g.scoped(scope, |g| {
            let table = weight(g, "weight", [rows, self.hidden_size])?;
            g.embedding(table, ids, options.activations)
        })
    }

    fn layer(&self, g: &mut Builder, x: Var, seq_ids: Var) -> GraphResult<Var> {
        let norm = NormKind::Layer(self.norm_eps);
        let a = g.scoped("attention.self", |g| attend_all(g, x, seq_ids, self.num_attention_heads, true))?;
        let a = linear(g, "attention.output.dense", a, self.hidden_size, true)?;
        let x = g.add(a, x)?;
        let x = norm.apply(g, "attention.output.LayerNorm", x)?;
        let h = mlp(g, x, ["intermediate.dense", "output.dense"], self.intermediate_size, self.activation, true)?;
        let x = g.add(h, x)?;
        norm.apply(g, "output.LayerNorm", x)
    }

    /// A published checkpoint with the names that the graph's weights have, which are BERT's: some leave out the first part,
    /// other families have their own names, and those converted from TensorFlow call the parameters of norms `gamma` and
    /// `beta`.
    ///
    /// # Errors
    /// [`FilesError::Safetensors`](ridge_files::FilesError::Safetensors) if a tensor is there under both names.
    pub fn arrange(&self, checkpoint: Checkpoint) -> Result<Checkpoint> {
        let renamed = checkpoint.renamed(|name| {
            let (scope, kind) = name.rsplit_once('.')?;
            let kind = [("gamma", "weight"), ("beta", "bias")].iter().find(|(old, _)| *old == kind)?.1;
            scope.ends_with("LayerNorm").then(|| format!("{scope}.{kind}"))
        })?;
        let distils = self.family == "distilbert";
        let renamed = renamed.renamed(|name| match name.strip_prefix("roberta.") {
            Some(rest) => Some(format!("bert.{rest}")),
            None if distils => distilled(name),
            None => None,
        })?;
        let whole = renamed.prefixed("bert.", &format!("{WORDS}.weight"));
        let beside: Vec<&str> = BESIDE
            .iter()
            .copied()
            .filter(|pattern| !self.classifier.is_some_and(|classifier| classifier.has(pattern.trim_end_matches(".*"))))
            .collect();
        Ok(whole.without(&beside))
    }
}

/// BERT's name of a tensor that DistilBERT calls `name`; none where they agree.
fn distilled(name: &str) -> Option<String> {
    let within = name.strip_prefix("distilbert.").unwrap_or(name);
    if within.starts_with("embeddings.") {
        return Some(format!("bert.{within}"));
    }
    let (layer, within) = within.strip_prefix("transformer.layer.")?.split_once('.')?;
    let (scope, kind) = within.rsplit_once('.')?;
    const NAMES: [(&str, &str); 8] = [
        ("attention.q_lin", "attention.self.query"),
        ("attention.k_lin", "attention.self.key"),
        ("attention.v_lin", "attention.self.value"),
        ("attention.out_lin", "attention.output.dense"),
        ("sa_layer_norm", "attention.output.LayerNorm"),
        ("ffn.lin1", "intermediate.dense"),
        ("ffn.lin2", "output.dense"),
        ("output_layer_norm", "output.LayerNorm"),
    ];
    let (_, theirs) = NAMES.iter().find(|(distilled, _)| *distilled == scope)?;
    Some(format!("bert.encoder.layer.{layer}.{theirs}.{kind}"))
}

/// Attention of each token of `x`, `[tokens, hidden]`, to all tokens of its own sequence, i32 `[tokens]`, with the weights
/// `query`, `key` and `value` of the scope; gives the type of `x`.
pub(super) fn attend_all(g: &mut Builder, x: Var, seq_ids: Var, heads: usize, bias: bool) -> GraphResult<Var> {
    let shape = g.ty(x)?.shape.clone();
    let hidden = shape.last().as_const().unwrap_or_default();
    let dim = hidden / heads.max(1);
    let mut qkv = [x; 3];
    for (name, y) in ["query", "key", "value"].into_iter().zip(&mut qkv) {
        let flat = linear(g, name, x, hidden, bias)?;
        *y = g.reshape(flat, [shape.0[0].clone(), heads.into(), dim.into()])?;
    }
    let op = RaggedAttention::new(1.0 / (dim as f64).sqrt(), Sym::new(symbols::PAIRS));
    let a = g.ragged_attention(qkv, seq_ids, op)?;
    g.reshape(a, shape)
}

//! The graph of encoders of texts (Devlin et al. 2019, "BERT: Pre-training of Deep Bidirectional Transformers for Language
//! Understanding", section 3): tokens are embedded, every token sees tokens on both sides of it, and nothing is kept between
//! steps. A family says what its embeddings and layers are.

use std::fmt::Debug;
use std::sync::Arc;

use ridge_graph::ops::{RaggedAttention, Rope};
use ridge_graph::{Builder, DType, Dim, FuncId, Result as GraphResult, Shape, Type, Var};

use super::blocks::{linear, weight};
use super::gguf_mapping::GgufEntry;
use super::text_classifier::TextClassifier;
use crate::config::DecoderConfig;
use crate::error::Result;
use crate::model::{BuildOptions, Encoder, attention_symbols, symbols};
use crate::module::Module;
use crate::pooling::with_pooling;
use ridge_files::Checkpoint;
use ridge_files::checkpoint::{Part, Published};

/// The configuration of an encoder of any family.
#[derive(Clone, Debug)]
pub struct EncoderConfig {
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
    /// Positions according to the file.
    pub max_position_embeddings: usize,
    /// Tokens of a text at most.
    pub max_context: usize,
    /// Segments that are learned; none if 0.
    pub type_vocab_size: usize,
    /// Added to the variance inside every norm.
    pub norm_eps: f64,
    /// The classifier that it has, if any.
    pub classifier: Option<TextClassifier>,
    /// The dtype the weights were published in, if the file says.
    pub torch_dtype: Option<DType>,
    /// What its family has besides.
    pub(super) layers: Arc<dyn EncoderFamily>,
}

/// What the graph of one family of encoders has besides what all of them share.
pub(super) trait EncoderFamily: Debug + Send + Sync {
    /// Scope of the layers, each under its number.
    fn scope(&self) -> &'static str;

    /// How many tokens a token of layer `index` sees to each side, itself included; all if `None`. Layers with equal windows
    /// and of one kind are one function.
    fn window(&self, _index: usize) -> Option<usize> {
        None
    }

    /// The kind of layer `index`, where a family has several besides windows; the usual one has no name.
    fn kind(&self, _index: usize) -> &'static str {
        ""
    }

    /// Are queries and keys rotated?
    fn rotates(&self) -> bool {
        false
    }

    /// The input of the first layer: `[tokens, hidden]`.
    fn embed(&self, g: &mut Builder, c: &EncoderConfig, at: &EmbeddedTokens<'_>) -> GraphResult<Var>;

    /// One layer: `x`, `[tokens, hidden]`, to the next.
    fn layer(&self, g: &mut Builder, x: Var, at: &EncoderLayer<'_>) -> GraphResult<Var>;

    /// The output of the last layer, after the norm that follows it if there is one.
    fn finish(&self, _g: &mut Builder, x: Var) -> GraphResult<Var> {
        Ok(x)
    }

    /// Weights that are parts of published tensors.
    fn parts(&self, _c: &EncoderConfig) -> Vec<Part> {
        Vec::new()
    }

    /// A published checkpoint without what the encoder does not use, under the names that `parts` and the graph have.
    ///
    /// # Errors
    /// [`FilesError::Safetensors`](ridge_files::FilesError::Safetensors) if a tensor is there under two names.
    fn arrange(&self, c: &EncoderConfig, checkpoint: Checkpoint) -> Result<Checkpoint>;

    /// What GGUF's metadata has of this family alone, by key without the architecture's name.
    ///
    /// # Errors
    /// What of the configuration GGUF cannot express.
    fn gguf_metadata(&self) -> Result<Vec<(&'static str, GgufEntry)>, &'static str> {
        Ok(Vec::new())
    }
}

/// The tokens of a step, each i32 `[tokens]`.
pub(super) struct EmbeddedTokens<'a> {
    options: &'a BuildOptions,
    /// What they are.
    pub(super) ids: Var,
    /// Segments.
    pub(super) types: Var,
    /// Positions in their texts.
    pub(super) positions: Var,
}

impl EmbeddedTokens<'_> {
    /// The rows `ids` of the table of scope `scope`, which has `rows` of `hidden` elements.
    pub(super) fn look_up(
        &self,
        g: &mut Builder,
        scope: &str,
        [rows, hidden]: [usize; 2],
        ids: Var,
    ) -> GraphResult<Var> {
        g.scoped(scope, |g| {
            let table = weight(g, "weight", [rows, hidden])?;
            g.embedding(table, ids, self.options.activations)
        })
    }
}

/// Where and how a layer is built.
pub(super) struct EncoderLayer<'a> {
    /// The encoder's configuration.
    pub(super) config: &'a EncoderConfig,
    /// How many tokens a token sees to each side.
    pub(super) window: Option<usize>,
    /// [`EncoderFamily::kind`].
    pub(super) kind: &'static str,
    seq_ids: Var,
    positions: Option<Var>,
}

impl EncoderLayer<'_> {
    /// Attention of `x`, `[tokens, hidden]`, with projections of these names, rotated if `rope` says how; gives the type of `x`.
    pub(super) fn attend(
        &self,
        g: &mut Builder,
        x: Var,
        names: [&str; 3],
        bias: bool,
        rope: Option<&Rope>,
    ) -> GraphResult<Var> {
        let [mut q, mut k, v] = project(g, x, names, self.config.num_attention_heads, bias)?;
        if let Some((rope, positions)) = rope.zip(self.positions) {
            (q, k) = (g.rope(q, positions, rope)?, g.rope(k, positions, rope)?);
        }
        attend(g, [q, k, v], self.seq_ids, self.window)
    }
}

/// Names of the projections of BERT's attention.
pub(super) const QUERY_KEY_VALUE: [&str; 3] = ["query", "key", "value"];

/// Queries, keys and values of `x`, `[tokens, hidden]`, with weights of these names: `[tokens, heads, hidden / heads]` each.
pub(super) fn project(g: &mut Builder, x: Var, names: [&str; 3], heads: usize, bias: bool) -> GraphResult<[Var; 3]> {
    let shape = g.ty(x)?.shape.clone();
    let hidden = shape.last().as_const().unwrap_or_default();
    let mut qkv = [x; 3];
    for (name, y) in names.into_iter().zip(&mut qkv) {
        let flat = linear(g, name, x, hidden, bias)?;
        *y = g.reshape(flat, [shape.0[0].clone(), heads.into(), (hidden / heads.max(1)).into()])?;
    }
    Ok(qkv)
}

/// Attention of each token to those of its own sequence, i32 `[tokens]`, that are less than `window` places away:
/// `[tokens, heads * dim]`.
pub(super) fn attend(g: &mut Builder, qkv: [Var; 3], seq_ids: Var, window: Option<usize>) -> GraphResult<Var> {
    let shape = g.ty(qkv[0])?.shape.clone();
    let [heads, dim] = [1, 2].map(|axis| shape.0[axis].as_const().unwrap_or_default());
    let (pairs, _) = attention_symbols(window);
    let op = RaggedAttention { window, ..RaggedAttention::new(1.0 / (dim as f64).sqrt(), pairs) };
    let a = g.ragged_attention(qkv, seq_ids, op)?;
    g.reshape(a, [shape.0[0].clone(), (heads * dim).into()])
}

impl EncoderConfig {
    /// A family's configuration, of the sizes that the reader of decoders read.
    pub(super) fn new(family: &'static str, sizes: &DecoderConfig, layers: impl EncoderFamily + 'static) -> Self {
        Self {
            family,
            hidden_size: sizes.hidden_size,
            intermediate_size: sizes.intermediate_size,
            num_hidden_layers: sizes.num_hidden_layers,
            num_attention_heads: sizes.num_attention_heads,
            vocab_size: sizes.vocab_size,
            max_position_embeddings: sizes.max_position_embeddings,
            max_context: sizes.max_context(),
            type_vocab_size: 0,
            norm_eps: sizes.norm_eps,
            classifier: None,
            torch_dtype: sizes.torch_dtype,
            layers: Arc::new(layers),
        }
    }

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
        let positions = g.sub(place, start)?;

        let family = &*self.layers;
        let mut x = family.embed(&mut g, self, &EmbeddedTokens { options, ids, types, positions })?;
        let mut args = vec![x, seq_ids];
        args.extend(family.rotates().then_some(positions));
        let mut functions: Vec<(Option<usize>, &'static str, FuncId)> = Vec::new();
        for index in 0..self.num_hidden_layers {
            let (window, kind) = (family.window(index), family.kind(index));
            let known = functions.iter().find(|(w, k, _)| (*w, *k) == (window, kind)).map(|(_, _, function)| *function);
            let function = match known {
                Some(function) => function,
                None => self.layer_function(&mut g, window, kind, options)?,
            };
            if known.is_none() {
                functions.push((window, kind, function));
            }
            args[0] = x;
            x = g.scoped(&format!("{}.{index}", family.scope()), |g| g.call(function, &args))?[0];
        }
        let x = family.finish(&mut g, x)?;
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
            max_context: self.max_context,
            labels: self.classifier.map_or(0, |classifier| classifier.labels),
        })
    }

    /// The layers of one kind: from `x`, `[tokens, hidden]`, `seq_ids` and, if they rotate, `positions`, i32 `[tokens]`.
    fn layer_function(
        &self,
        g: &mut Builder,
        window: Option<usize>,
        kind: &'static str,
        options: &BuildOptions,
    ) -> GraphResult<FuncId> {
        let name = if window.is_some() { "local_encoder_layer" } else { "encoder_layer" };
        let name = if kind.is_empty() { name.to_owned() } else { format!("{kind}_{name}") };
        g.function(&name, |g| {
            let tokens = Dim::sym(symbols::TOKENS);
            let x = g.arg("x", Type::tensor(options.activations, [tokens.clone(), self.hidden_size.into()]));
            let row = Type::tensor(DType::I32, Shape(vec![tokens]));
            let seq_ids = g.arg("seq_ids", row.clone());
            let positions = self.layers.rotates().then(|| g.arg("positions", row));
            let at = EncoderLayer { config: self, window, kind, seq_ids, positions };
            Ok(vec![self.layers.layer(g, x, &at)?])
        })
    }

    /// A published checkpoint with the names and shapes that the graph's weights have.
    ///
    /// # Errors
    /// [`FilesError::Safetensors`](ridge_files::FilesError::Safetensors) if a tensor is there under two names, or does not fit
    /// the configuration.
    pub fn arrange(&self, checkpoint: Checkpoint) -> Result<Checkpoint> {
        Ok(self.layers.arrange(self, checkpoint)?.divided(&self.layers.parts(self))?)
    }

    /// The tensors of an arranged checkpoint as the family publishes them.
    pub(crate) fn published<'a>(&self, checkpoint: &'a Checkpoint) -> Vec<Published<'a>> {
        checkpoint.published(&self.layers.parts(self), &[])
    }

    /// As [`EncoderFamily::gguf_metadata`].
    pub(crate) fn gguf_metadata(&self) -> Result<Vec<(&'static str, GgufEntry)>, &'static str> {
        self.layers.gguf_metadata()
    }

    /// `checkpoint` without tensors of the names `beside`, which are those of heads, but for those of its own classifier.
    pub(super) fn without_heads(&self, checkpoint: Checkpoint, beside: &[&str]) -> Checkpoint {
        let own =
            |pattern: &str| self.classifier.is_some_and(|classifier| classifier.has(pattern.trim_end_matches(".*")));
        let beside: Vec<&str> = beside.iter().copied().filter(|pattern| !own(pattern)).collect();
        checkpoint.without(&beside)
    }
}

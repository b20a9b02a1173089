//! The graph of encoders of texts (Devlin et al. 2019, "BERT: Pre-training of Deep Bidirectional Transformers for Language
//! Understanding", section 3): tokens are embedded, every token sees tokens on both sides of it, and nothing is kept between
//! steps. A family says what its embeddings and layers are.

use std::fmt::Debug;
use std::sync::Arc;

use ridge_graph::ops::{RaggedAttention, Rope};
use ridge_graph::{Builder, DType, Dim, FuncId, GraphError, Result as GraphResult, Shape, Type, Var};

use super::arrange;
use super::blocks::{linear, weight};
use super::decoder::{self, DecoderFamily};
use super::gguf_mapping::GgufEntry;
use super::tensors::TensorTable;
use super::text_classifier::TextClassifier;
use crate::config::DecoderConfig;
use crate::dense::DenseLayer;
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
    /// Layers that pooled vectors go through, in order.
    pub dense: Vec<DenseLayer>,
    /// The dtype the weights were published in, if the file says.
    pub torch_dtype: Option<DType>,
    /// What its family has besides.
    pub(super) layers: EncoderLayers,
}

/// What an encoder's hidden states come from.
#[derive(Clone, Debug)]
pub(super) enum EncoderLayers {
    /// The layers of a family of encoders.
    Encoder(Arc<dyn EncoderFamily>),
    /// Those of a decoder, without a cache, with tensors of these names.
    Decoder(Arc<dyn DecoderFamily>, &'static TensorTable),
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

    /// Do layers read the positions of tokens, as those that rotate queries and keys?
    fn reads_positions(&self) -> bool {
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
    /// The sequence of each token, i32 `[tokens]`.
    pub(super) seq_ids: Var,
    /// Its position in that, i32 `[tokens]`, if the family reads them.
    pub(super) positions: Option<Var>,
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
        Self::with_layers(family, sizes, EncoderLayers::Encoder(Arc::new(layers)))
    }

    fn with_layers(family: &'static str, sizes: &DecoderConfig, layers: EncoderLayers) -> Self {
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
            dense: Vec::new(),
            torch_dtype: sizes.torch_dtype,
            layers,
        }
    }

    /// The decoder `config` of the family called `family`, read as an encoder: its hidden states are what is pooled or
    /// classified.
    pub(super) fn of_decoder(
        family: &'static str,
        tensors: &'static TensorTable,
        config: Arc<dyn DecoderFamily>,
        classifier: Option<TextClassifier>,
    ) -> Self {
        let sizes = config.decoder().clone();
        Self { classifier, ..Self::with_layers(family, &sizes, EncoderLayers::Decoder(config, tensors)) }
    }

    /// Are its layers those of a decoder?
    pub fn is_decoder(&self) -> bool {
        matches!(self.layers, EncoderLayers::Decoder(..))
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

        let x = match &self.layers {
            EncoderLayers::Decoder(config, tensors) => {
                decoder::hidden_states(&mut g, tensors, &**config, options, [ids, positions])?
            }
            EncoderLayers::Encoder(family) => {
                let tokens = EmbeddedTokens { options, ids, types, positions };
                self.hidden_states(&mut g, &**family, &tokens, seq_ids)?
            }
        };
        let hidden = g.cast(x, DType::F32)?;
        let mut outputs = vec![("hidden".into(), hidden)];
        if let Some(classifier) = &self.classifier {
            let [logits, scores] = classifier.build(&mut g, x, |g, x, words| self.word_logits(g, x, words))?;
            outputs.extend([("class_logits".into(), logits), ("scores".into(), scores)]);
        }
        let graph = with_pooling(&g.finish(outputs)?, &self.dense)?;
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
            causal: matches!(&self.layers, EncoderLayers::Decoder(config, _) if !config.sees_both_ways()),
        })
    }

    /// The hidden states behind the last layer, `[tokens, hidden]`, of `tokens`, which are of sequences `seq_ids`, i32 `[tokens]`.
    fn hidden_states(
        &self,
        g: &mut Builder,
        family: &dyn EncoderFamily,
        tokens: &EmbeddedTokens<'_>,
        seq_ids: Var,
    ) -> GraphResult<Var> {
        let mut x = family.embed(g, self, tokens)?;
        let mut args = vec![x, seq_ids];
        args.extend(family.reads_positions().then_some(tokens.positions));
        let mut functions: Vec<(Option<usize>, &'static str, FuncId)> = Vec::new();
        for index in 0..self.num_hidden_layers {
            let (window, kind) = (family.window(index), family.kind(index));
            let known = functions.iter().find(|(w, k, _)| (*w, *k) == (window, kind)).map(|(_, _, function)| *function);
            let function = match known {
                Some(function) => function,
                None => self.layer_function(g, family, window, kind, tokens.options)?,
            };
            if known.is_none() {
                functions.push((window, kind, function));
            }
            args[0] = x;
            x = g.scoped(&format!("{}.{index}", family.scope()), |g| g.call(function, &args))?[0];
        }
        family.finish(g, x)
    }

    /// The layers of one kind: from `x`, `[tokens, hidden]`, `seq_ids` and, if they read them, `positions`, i32 `[tokens]`.
    fn layer_function(
        &self,
        g: &mut Builder,
        family: &dyn EncoderFamily,
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
            let positions = family.reads_positions().then(|| g.arg("positions", row));
            let at = EncoderLayer { config: self, window, kind, seq_ids, positions };
            Ok(vec![family.layer(g, x, &at)?])
        })
    }

    /// A published checkpoint with the names and shapes that the graph's weights have.
    ///
    /// # Errors
    /// [`FilesError::Safetensors`](ridge_files::FilesError::Safetensors) if a tensor is there under two names, or does not fit
    /// the configuration.
    pub fn arrange(&self, checkpoint: Checkpoint) -> Result<Checkpoint> {
        match &self.layers {
            EncoderLayers::Encoder(family) => Ok(family.arrange(self, checkpoint)?.divided(&family.parts(self))?),
            EncoderLayers::Decoder(config, tensors) => {
                let arranged = arrange::arrange(tensors, &**config, checkpoint, false)?;
                let reads_words = self.classifier.is_some_and(|classifier| classifier.reads_words());
                let head = tensors.head.weight().filter(|_| !reads_words);
                Ok(arranged.without(&head.iter().map(String::as_str).collect::<Vec<_>>()))
            }
        }
    }

    /// Logits of these words after `x`, `[seqs, hidden]`: f32 `[seqs, words]`.
    fn word_logits(&self, g: &mut Builder, x: Var, words: &[u32]) -> GraphResult<Var> {
        match &self.layers {
            EncoderLayers::Decoder(config, tensors) => decoder::word_logits(g, tensors, &**config, x, words),
            EncoderLayers::Encoder(_) => {
                let why = format!("{} has no output projection", self.family);
                Err(GraphError::Use { at: g.scope().into(), why })
            }
        }
    }

    /// The tensors of an arranged checkpoint as the family publishes them.
    pub(crate) fn published<'a>(&self, checkpoint: &'a Checkpoint) -> Vec<Published<'a>> {
        match &self.layers {
            EncoderLayers::Encoder(family) => checkpoint.published(&family.parts(self), &[]),
            EncoderLayers::Decoder(config, _) => checkpoint.published(&config.parts(), &config.stacks()),
        }
    }

    /// As [`EncoderFamily::gguf_metadata`].
    pub(crate) fn gguf_metadata(&self) -> Result<Vec<(&'static str, GgufEntry)>, &'static str> {
        match &self.layers {
            EncoderLayers::Encoder(family) => family.gguf_metadata(),
            EncoderLayers::Decoder(..) => Err("it is a decoder that is read as an encoder"),
        }
    }

    /// `checkpoint` without tensors of the names `beside`, which are those of heads, but for those of its own classifier.
    pub(super) fn without_heads(&self, checkpoint: Checkpoint, beside: &[&str]) -> Checkpoint {
        let own =
            |pattern: &str| self.classifier.is_some_and(|classifier| classifier.has(pattern.trim_end_matches(".*")));
        let beside: Vec<&str> = beside.iter().copied().filter(|pattern| !own(pattern)).collect();
        checkpoint.without(&beside)
    }
}

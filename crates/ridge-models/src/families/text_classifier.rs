//! Heads that classify whole texts or pairs of them, as cross-encoders rank documents (Nogueira and Cho 2019, "Passage
//! Re-ranking with BERT", section 3): from the first token's vector, or the mean of all, to a logit for each label. And decoders
//! that do so by the last token's vector, or by what they would write.

use ridge_graph::ops::Gelu;
use ridge_graph::{Builder, DType, Dim, Result as GraphResult, Type, Var};
use serde_json::{Map, Value as Json};

use super::blocks::{NormKind, linear};
use crate::config::Fields;
use crate::error::Result;
use crate::model::symbols;
use crate::pooling::{Pooling, pool};
use crate::sentence::WordScore;

/// A classifier on an encoder.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TextClassifier {
    /// Labels: columns of its logits.
    pub labels: usize,
    /// Are scores sigmoids of the logits, or the logits themselves?
    pub sigmoid: bool,
    /// How the tokens' vectors become logits.
    head: ClassifierHead,
}

/// How the vectors of a text's tokens become logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum ClassifierHead {
    /// By two layers, of the first token's vector or the mean of all.
    Layered(InnerLayer),
    /// By one layer of scope `score` without a bias, of the last token's vector: in a decoder it has seen all others.
    Last,
    /// By a decoder's output projection, of the last token's vector.
    Words(WordScore),
}

/// The layer in front of that of the logits: its scope, and that of the logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum InnerLayer {
    /// BERT's pooler, with a hyperbolic tangent.
    Bert,
    /// RoBERTa's, within the head, with a hyperbolic tangent.
    Roberta,
    /// DistilBERT's, with a ReLU.
    Distilbert,
    /// BigBird's, within the head, with the activation of its layers.
    BigBird(Gelu),
    /// ModernBERT's, with a norm behind it.
    ModernBert(ModernHead),
}

/// What ModernBERT's head has of its own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ModernHead {
    /// Is the mean of all tokens classified, and not the first?
    pub(super) mean: bool,
    /// Does its first layer have a bias?
    pub(super) bias: bool,
    pub(super) activation: Gelu,
    pub(super) norm: NormKind,
}

impl InnerLayer {
    /// Scopes of the layer and of the logits, as published behind the family's own prefix.
    fn scopes(self) -> [&'static str; 2] {
        match self {
            Self::Bert => ["bert.pooler.dense", "classifier"],
            Self::Roberta | Self::BigBird(_) => ["classifier.dense", "classifier.out_proj"],
            Self::ModernBert(_) => ["head.dense", "classifier"],
            Self::Distilbert => ["pre_classifier", "classifier"],
        }
    }

    /// Logits of `x`, `[tokens, hidden]`: `[seqs, labels]`.
    fn logits(self, g: &mut Builder, x: Var, labels: usize) -> GraphResult<Var> {
        let hidden = g.ty(x)?.shape.last().as_const().unwrap_or_default();
        let seqs = Dim::sym(symbols::SEQS);
        let starts = g.step_input("query_start", Type::tensor(DType::I32, [seqs.clone() + 1]))?;
        let pooled = match self {
            Self::ModernBert(ModernHead { mean: true, .. }) => {
                let dtype = g.ty(x)?.dtype;
                let x = g.cast(x, DType::F32)?;
                let mean = pool(g, Pooling::Mean, x)?;
                g.cast(mean, dtype)?
            }
            _ => {
                let first = g.slice(starts, 0, 0, &seqs)?;
                g.gather(x, first, 0)?
            }
        };
        let [inner, out] = self.scopes();
        let bias = !matches!(self, Self::ModernBert(ModernHead { bias: false, .. }));
        let h = linear(g, inner, pooled, hidden, bias)?;
        let h = match self {
            Self::ModernBert(head) => {
                let h = g.gelu(h, head.activation)?;
                head.norm.apply(g, "head.norm", h)?
            }
            Self::Distilbert => {
                let zero = g.constant_like(h, 0.0)?;
                g.max(h, zero)?
            }
            Self::BigBird(activation) => g.gelu(h, activation)?,
            Self::Bert | Self::Roberta => g.tanh(h)?,
        };
        linear(g, out, h, labels, true)
    }
}

/// Scope of the layer of a decoder's classifier.
const SCORE: &str = "score";
/// The end of the names of classes with such a head.
pub(super) const CLASS: &str = "ForSequenceClassification";
/// Where sentence-transformers says what becomes of logits: by its newer versions, in an object, and by older ones.
const NEWER: &str = "sentence_transformers";
const OLDER: &str = "sbert_ce_default_activation_function";
/// Labels where the file has none.
const LABELS: usize = 2;
const MAX_LABELS: usize = 1 << 16;

impl TextClassifier {
    /// The head that the checkpoint's class has, if it is one that classifies texts.
    pub(super) fn read(f: &mut Fields<'_>, head: ClassifierHead) -> Result<Option<Self>> {
        let classes: Option<Vec<&str>> = f.optional("architectures")?;
        let classifies = classes.is_some_and(|classes| classes.iter().any(|class| class.ends_with(CLASS)));
        let said = f.optional_size("num_labels", MAX_LABELS)?;
        let names: Option<&Map<String, Json>> = f.optional("id2label")?;
        let mut activation: Option<&str> = f.optional(OLDER)?;
        if let Some(mut newer) = f.object(NEWER)? {
            newer.harmless(&["version"]);
            activation = newer.optional("activation_fn")?.or(activation);
            newer.finish()?;
        }
        if !classifies {
            return Ok(None);
        }
        let labels = names.map(Map::len).filter(|labels| (1..=MAX_LABELS).contains(labels)).or(said).unwrap_or(LABELS);
        let sigmoid = match activation.map(|name| name.rsplit('.').next().unwrap_or_default()) {
            None => labels == 1,
            Some("Sigmoid") => true,
            Some("Identity") => false,
            Some(_) => {
                let remedy = "Ridge applies Sigmoid or Identity to the logits of a classifier";
                return Err(f.wrong(OLDER, "or its newer spelling is not supported", remedy));
            }
        };
        Ok(Some(Self { labels, sigmoid, head }))
    }

    /// Scores texts by what a decoder would write after them.
    pub(super) fn of_words(words: WordScore) -> Self {
        Self { labels: 1, sigmoid: words.sigmoid, head: ClassifierHead::Words(words) }
    }

    /// Does it need a decoder's output projection?
    pub(super) fn reads_words(&self) -> bool {
        matches!(self.head, ClassifierHead::Words(..))
    }

    /// Logits and scores, f32 `[seqs, labels]` each, of `x`, `[tokens, hidden]`. `words` gives the logits of words after
    /// `[seqs, hidden]`.
    pub(super) fn build(
        &self,
        g: &mut Builder,
        x: Var,
        words: impl FnOnce(&mut Builder, Var, &[u32]) -> GraphResult<Var>,
    ) -> GraphResult<[Var; 2]> {
        let logits = match self.head {
            ClassifierHead::Layered(inner) => inner.logits(g, x, self.labels)?,
            ClassifierHead::Last => {
                let last = pool(g, Pooling::Last, x)?;
                linear(g, SCORE, last, self.labels, false)?
            }
            ClassifierHead::Words(WordScore { yes, no, .. }) => {
                let last = pool(g, Pooling::Last, x)?;
                let ids: Vec<u32> = [Some(yes), no].into_iter().flatten().collect();
                let logits = words(g, last, &ids)?;
                let yes = g.slice(logits, 1, 0, 1usize)?;
                match no {
                    Some(_) => {
                        let no = g.slice(logits, 1, 1, 1usize)?;
                        g.sub(yes, no)?
                    }
                    None => yes,
                }
            }
        };
        let logits = g.cast(logits, DType::F32)?;
        let scores = if self.sigmoid { g.sigmoid(logits)? } else { logits };
        Ok([logits, scores])
    }

    /// Are published tensors whose names begin with `prefix` of the head?
    pub(super) fn has(&self, prefix: &str) -> bool {
        match self.head {
            ClassifierHead::Layered(inner) => inner.scopes().iter().any(|scope| scope.starts_with(prefix)),
            ClassifierHead::Last | ClassifierHead::Words(..) => false,
        }
    }
}

//! Heads that classify whole texts or pairs of them, as cross-encoders rank documents (Nogueira and Cho 2019, "Passage
//! Re-ranking with BERT", section 3): from the first token's vector, or the mean of all, to a logit for each label.

use ridge_graph::ops::Gelu;
use ridge_graph::{Builder, DType, Dim, Result as GraphResult, Type, Var};
use serde_json::{Map, Value as Json};

use super::blocks::{NormKind, linear};
use crate::config::Fields;
use crate::error::Result;
use crate::model::symbols;
use crate::pooling::{Pooling, pool};

/// A classifier on an encoder.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TextClassifier {
    /// Labels: columns of its logits.
    pub labels: usize,
    /// Are scores sigmoids of the logits, or the logits themselves?
    pub sigmoid: bool,
    /// What lies between the tokens' vectors and the logits.
    pub(super) inner: InnerLayer,
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
            Self::Roberta => ["classifier.dense", "classifier.out_proj"],
            Self::ModernBert(_) => ["head.dense", "classifier"],
            Self::Distilbert => ["pre_classifier", "classifier"],
        }
    }
}

/// The end of the names of classes with such a head.
const CLASS: &str = "ForSequenceClassification";
/// Where sentence-transformers says what becomes of logits: by its newer versions, in an object, and by older ones.
const NEWER: &str = "sentence_transformers";
const OLDER: &str = "sbert_ce_default_activation_function";
/// Labels where the file has none.
const LABELS: usize = 2;
const MAX_LABELS: usize = 1 << 16;

impl TextClassifier {
    /// The head that the checkpoint's class has, if it is one that classifies texts.
    pub(super) fn read(f: &mut Fields<'_>, inner: InnerLayer) -> Result<Option<Self>> {
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
        Ok(Some(Self { labels, sigmoid, inner }))
    }

    /// Logits and scores, f32 `[seqs, labels]` each, of `x`, `[tokens, hidden]`.
    pub(super) fn build(&self, g: &mut Builder, x: Var) -> GraphResult<[Var; 2]> {
        let hidden = g.ty(x)?.shape.last().as_const().unwrap_or_default();
        let seqs = Dim::sym(symbols::SEQS);
        let starts = g.step_input("query_start", Type::tensor(DType::I32, [seqs.clone() + 1]))?;
        let pooled = match self.inner {
            InnerLayer::ModernBert(ModernHead { mean: true, .. }) => {
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
        let [inner, out] = self.inner.scopes();
        let bias = !matches!(self.inner, InnerLayer::ModernBert(ModernHead { bias: false, .. }));
        let h = linear(g, inner, pooled, hidden, bias)?;
        let h = match self.inner {
            InnerLayer::ModernBert(head) => {
                let h = g.gelu(h, head.activation)?;
                head.norm.apply(g, "head.norm", h)?
            }
            InnerLayer::Bert | InnerLayer::Roberta => g.tanh(h)?,
            InnerLayer::Distilbert => {
                let zero = g.constant_like(h, 0.0)?;
                g.max(h, zero)?
            }
        };
        let logits = linear(g, out, h, self.labels, true)?;
        let logits = g.cast(logits, DType::F32)?;
        let scores = if self.sigmoid { g.sigmoid(logits)? } else { logits };
        Ok([logits, scores])
    }

    /// Are published tensors whose names begin with `prefix` of the head?
    pub(super) fn has(&self, prefix: &str) -> bool {
        self.inner.scopes().iter().any(|scope| scope.starts_with(prefix))
    }
}

//! One vector for a text, from those of its tokens, as sentence-transformers makes them (Reimers and Gurevych 2019,
//! "Sentence-BERT", section 3).

use std::fmt;

use ridge_graph::{Builder, DType, Dim, Graph, GraphError, Result as GraphResult, Shape, Type, Var};

use crate::dense::DenseLayer;
use crate::model::symbols;

/// How the vectors of a text's tokens become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// Their mean.
    Mean,
    /// The first token's, as BERT has a token for it.
    Cls,
    /// The last token's, which alone has seen all others in a decoder.
    Last,
    /// The largest of each element.
    Max,
}

impl Pooling {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Mean, Self::Cls, Self::Last, Self::Max];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mean => "mean",
            Self::Cls => "cls",
            Self::Last => "last",
            Self::Max => "max",
        }
    }

    /// The output of [`with_pooling`] that has it, divided by its Euclidean norm or not.
    pub fn output(self, normalized: bool) -> String {
        format!("{}{}", self.name(), if normalized { "_normalized" } else { "" })
    }
}

impl fmt::Display for Pooling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// `graph`, which has an output `hidden`, f32 `[tokens, hidden]`, with an f32 `[seqs, width]` output for each way of
/// pooling it over the rows of the step: see [`Pooling::output`]. What is pooled goes through the layers `dense`; its width is
/// that of the last one, or `hidden` without any.
///
/// # Errors
/// When the graph has no output `hidden`, or a layer does not take what the one before gives.
pub fn with_pooling(graph: &Graph, dense: &[DenseLayer]) -> GraphResult<Graph> {
    let (mut g, mut outputs) = Builder::reopen(graph.clone());
    let hidden = outputs.iter().find(|(name, _)| name == "hidden").map(|(_, var)| *var);
    let hidden = hidden
        .ok_or_else(|| GraphError::Use { at: "pooling".into(), why: "the graph has no output `hidden`".to_owned() })?;
    for pooling in Pooling::ALL {
        let mut vector = g.scoped("pooling", |g| pool(g, pooling, hidden))?;
        for layer in dense {
            vector = layer.apply(&mut g, vector)?;
        }
        let normal = g.scoped("pooling", |g| normalize(g, vector))?;
        outputs.extend([(pooling.output(false), vector), (pooling.output(true), normal)]);
    }
    g.finish(outputs)
}

/// `hidden`, f32 `[tokens, hidden]`, pooled over the rows of the step: f32 `[seqs, hidden]`.
pub(crate) fn pool(g: &mut Builder, pooling: Pooling, hidden: Var) -> GraphResult<Var> {
    let (tokens, seqs) = (Dim::sym(symbols::TOKENS), Dim::sym(symbols::SEQS));
    let one = Dim::from(1);
    let width = g.ty(hidden)?.shape.last();
    let seq_ids = g.step_input("seq_ids", Type::tensor(DType::I32, [&tokens]))?;
    let starts = g.step_input("query_start", Type::tensor(DType::I32, [seqs.clone() + 1]))?;
    let bounds = |g: &mut Builder, from: usize| g.slice(starts, 0, from, &seqs);
    // Is each token of each row's text? `[seqs, tokens]`.
    let member = |g: &mut Builder| {
        let ids = g.reshape(seq_ids, Shape(vec![one.clone(), tokens.clone()]))?;
        let rows = g.iota(Shape(vec![seqs.clone(), one.clone()]), 0, DType::I32)?;
        g.eq(rows, ids)
    };
    match pooling {
        Pooling::Cls => {
            let first = bounds(g, 0)?;
            g.gather(hidden, first, 0)
        }
        Pooling::Last => {
            let end = bounds(g, 1)?;
            let one = g.constant(DType::I32, 1.0)?;
            let last = g.sub(end, one)?;
            g.gather(hidden, last, 0)
        }
        Pooling::Mean => {
            let member = member(g)?;
            let member = g.cast(member, DType::F32)?;
            let sum = g.matmul(member, hidden, false, false, DType::F32)?;
            let count = g.reduce_sum(member, 1)?;
            let least = g.constant(DType::F32, 1.0)?;
            let count = g.max(count, least)?;
            g.div(sum, count)
        }
        Pooling::Max => {
            let member = member(g)?;
            let member = g.reshape(member, Shape(vec![seqs.clone(), tokens.clone(), one.clone()]))?;
            let hidden = g.reshape(hidden, Shape(vec![one.clone(), tokens.clone(), width.clone()]))?;
            let least = g.constant(DType::F32, f64::from(f32::MIN))?;
            let of_row = g.select(member, hidden, least)?;
            let largest = g.reduce_max(of_row, 1)?;
            g.reshape(largest, Shape(vec![seqs.clone(), width]))
        }
    }
}

/// Rows divided by their Euclidean norms, which count as 1e-12 at least (torch's `normalize`).
fn normalize(g: &mut Builder, x: Var) -> GraphResult<Var> {
    let squares = g.mul(x, x)?;
    let sum = g.reduce_sum(squares, 1)?;
    let norm = g.sqrt(sum)?;
    let least = g.constant(DType::F32, 1e-12)?;
    let norm = g.max(norm, least)?;
    g.div(x, norm)
}

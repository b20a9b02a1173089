//! Attention within a window, but for the first token of each text, which sees and is seen by all (Beltagy et al. 2020,
//! "Longformer: The Long-Document Transformer", section 3.1).

use ridge_graph::ops::{RaggedAttention, RaggedAttentionSaving};
use ridge_graph::{Builder, DType, Dim, Result as GraphResult, Shape, Type, Var};

use super::blocks::linear;
use super::encoder::{EncoderLayer, QUERY_KEY_VALUE, project};
use crate::model::{attention_symbols, symbols};

/// The projections of attention of the first token, within the scope of attention.
const OF_FIRST: [&str; 3] = ["query_global", "key_global", "value_global"];
/// Their published tensors.
pub(super) const TENSORS: &str = "*_global.*";

/// Attention of `x`, `[tokens, hidden]`, with BERT's projections and those of the first token; gives the type of `x`.
pub(super) fn attend(g: &mut Builder, x: Var, at: &EncoderLayer<'_>) -> GraphResult<Var> {
    let ty = g.ty(x)?.clone();
    let seqs = Dim::sym(symbols::SEQS);
    let starts = g.step_input("query_start", Type::tensor(DType::I32, [seqs.clone() + 1]))?;
    let firsts = g.slice(starts, 0, 0, &seqs)?;
    let positions = at.positions.unwrap_or(at.seq_ids);
    let position = g.reshape(positions, [ty.shape.0[0].clone(), 1.into(), 1.into()])?;

    let local = local(g, x, at, firsts, position)?;
    let first = of_first(g, x, at, firsts)?;
    let first = g.gather(first, at.seq_ids, 0)?;
    let zero = g.constant(DType::I32, 0.0)?;
    let is_first = g.eq(position, zero)?;
    let y = g.select(is_first, first, local)?;
    let y = g.cast(y, ty.dtype)?;
    g.reshape(y, ty.shape)
}

/// What each token sees within its window, and of the first token: f32 `[tokens, heads, dim]`. `firsts` are the places of first
/// tokens, i32 `[seqs]`, and `position` is i32 `[tokens, 1, 1]`.
fn local(g: &mut Builder, x: Var, at: &EncoderLayer<'_>, firsts: Var, position: Var) -> GraphResult<Var> {
    let [q, k, v] = project(g, x, QUERY_KEY_VALUE, at.config.num_attention_heads, true)?;
    let shape = g.ty(q)?.shape.clone();
    let scale = scale(&shape);
    let (pairs, _) = attention_symbols(at.window);
    let op = RaggedAttention { window: at.window, ..RaggedAttention::new(scale, pairs) };
    let seen = g.composite(RaggedAttentionSaving(op), &[q, k, v, at.seq_ids])?;
    let y = g.cast(seen[0], DType::F32)?;
    let lse = g.reshape(seen[1], [shape.0[0].clone(), shape.0[1].clone(), 1.into()])?;
    // One more key: the softmax over both has shares of the two in proportion to their sums of exponentials.
    let first = g.gather(firsts, at.seq_ids, 0)?;
    let (k, v) = (g.gather(k, first, 0)?, g.gather(v, first, 0)?);
    let score = scores(g, q, k, scale)?;
    let beyond = g.sub(score, lse)?;
    let share = g.sigmoid(beyond)?;
    let v = g.cast(v, DType::F32)?;
    let more = g.sub(v, y)?;
    let more = g.mul(more, share)?;
    let with_first = g.add(y, more)?;
    // Within the window the first token is among the keys already.
    let window = g.constant(DType::I32, at.window.unwrap_or(usize::MAX).min(1 << 30) as f64)?;
    let near = g.lt(position, window)?;
    g.select(near, y, with_first)
}

/// What the first token of each text sees, which is all of it: f32 `[seqs, heads, dim]`.
fn of_first(g: &mut Builder, x: Var, at: &EncoderLayer<'_>, firsts: Var) -> GraphResult<Var> {
    let heads = at.config.num_attention_heads;
    let hidden = at.config.hidden_size;
    let [tokens, seqs] = [symbols::TOKENS, symbols::SEQS].map(Dim::sym);
    let one = Dim::from(1);
    let by_head = |g: &mut Builder, x: Var, rows: &Dim| {
        g.reshape(x, [rows.clone(), heads.into(), (hidden / heads.max(1)).into()])
    };
    let first = g.gather(x, firsts, 0)?;
    let q = linear(g, OF_FIRST[0], first, hidden, true)?;
    let k = linear(g, OF_FIRST[1], x, hidden, true)?;
    let v = linear(g, OF_FIRST[2], x, hidden, true)?;
    let (q, k, v) = (by_head(g, q, &seqs)?, by_head(g, k, &tokens)?, by_head(g, v, &tokens)?);
    let scale = scale(&g.ty(k)?.shape.clone());
    let q = g.gather(q, at.seq_ids, 0)?;
    let score = scores(g, q, k, scale)?;
    let score = g.reshape(score, [tokens.clone(), heads.into()])?;

    // Softmax over the tokens of each text: `[seqs, tokens]` says which they are.
    let ids = g.reshape(at.seq_ids, [one.clone(), tokens.clone()])?;
    let rows = g.iota(Shape(vec![seqs.clone(), one.clone()]), 0, DType::I32)?;
    let member = g.eq(rows, ids)?;
    let of_row = g.reshape(member, [seqs.clone(), tokens.clone(), one.clone()])?;
    let candidates = g.reshape(score, [one, tokens.clone(), heads.into()])?;
    let least = g.constant(DType::F32, f64::from(f32::MIN))?;
    let candidates = g.select(of_row, candidates, least)?;
    let largest = g.reduce_max(candidates, 1)?;
    let largest = g.reshape(largest, [seqs.clone(), heads.into()])?;
    let largest = g.gather(largest, at.seq_ids, 0)?;
    let score = g.sub(score, largest)?;
    let weight = g.exp(score)?;
    let member = g.cast(member, DType::F32)?;
    let total = g.matmul(member, weight, false, false, DType::F32)?;
    let weight = g.reshape(weight, [tokens.clone(), heads.into(), 1.into()])?;
    let v = g.cast(v, DType::F32)?;
    let weighed = g.mul(v, weight)?;
    let weighed = g.reshape(weighed, [tokens, hidden.into()])?;
    let sum = g.matmul(member, weighed, false, false, DType::F32)?;
    let sum = by_head(g, sum, &seqs)?;
    let total = g.reshape(total, [seqs, heads.into(), 1.into()])?;
    g.div(sum, total)
}

/// One by the root of a head's width, of `[tokens, heads, dim]`.
fn scale(shape: &Shape) -> f64 {
    1.0 / (shape.last().as_const().unwrap_or(1) as f64).sqrt()
}

/// The score of each row of `q` with the same row of `k`, `[tokens, heads, dim]` both: f32 `[tokens, heads, 1]`.
fn scores(g: &mut Builder, q: Var, k: Var, scale: f64) -> GraphResult<Var> {
    let (q, k) = (g.cast(q, DType::F32)?, g.cast(k, DType::F32)?);
    let products = g.mul(q, k)?;
    let sum = g.reduce_sum(products, 2)?;
    let scale = g.constant(DType::F32, scale)?;
    g.mul(sum, scale)
}

//! What attention over the tokens of a step and its gradient share: attributes, checks and scores.

use super::super::require::{flat, takes, want, want_floats};
use crate::dim::{Dim, Sym};
use crate::dtype::DType;
use crate::dyn_eq::eq_by_bits;
use crate::error::{GraphError, Result};
use crate::graph::{Builder, Var};
use crate::poly::Poly;
use crate::shape::Shape;
use crate::types::Type;
use crate::why::Why;
use crate::work::{AttentionWork, Work};

/// Attention of each token to tokens of its own sequence, without a cache, computed in f32.
///
/// `q`: `[tokens, heads, dim]`, `k`, `v`: `[tokens, kv_heads, dim]`, all of one float dtype; `seq_ids`: i32 `[tokens]`,
/// negative for padding. Gives the type of `q`. Query head `h` uses key and value head `h / (heads / kv_heads)`. The
/// output of padding is zero.
///
/// Tokens of a sequence stand in their order, and usually together; documents that are packed into one row of a batch
/// have ids of their own. A causal token sees none that stand behind it. With a window it sees only tokens less than
/// `window` places away, its own included (Beltagy et al. 2020, "Longformer", section 3.1). With a soft cap each score `s` is
/// `softcap * tanh(s / softcap)` (Gemma Team 2024, "Gemma 2", section 2).
///
/// With dropout there are two inputs more: `key`, an I64 scalar, and `heads`, I64 `[heads]`, the number of each query head in
/// the whole model. Each share of the softmax is then dropped or scaled up by a function of key and place alone
/// ([`RaggedAttention::DROPOUT_STREAM`]), so that nothing is kept for the gradient.
///
/// Its gradient is [`RaggedAttentionBackward`](super::RaggedAttentionBackward), which keeps the logarithm of each row's
/// sum of exponentials (Dao et al. 2022, "FlashAttention", appendix B).
#[derive(Clone, Debug)]
pub struct RaggedAttention {
    /// Factor of the scores, usually `1 / sqrt(dim)`.
    pub scale: f64,
    /// Does a token see only itself and tokens before it?
    pub causal: bool,
    /// How many places a token sees to each side that it sees, its own included; 1 or more. All if `None`.
    pub window: Option<usize>,
    /// Scores stay within this; above 0.
    pub softcap: Option<f64>,
    /// The probability that a share of the softmax is dropped, in `[0, 1)`; rounded to [`RaggedAttention::DROPOUT_STEPS`].
    pub dropout: f64,
    /// The step's number of (query, key) pairs, for the cost alone.
    pub pairs: Sym,
}

eq_by_bits!(RaggedAttention { scale, softcap, dropout; causal, window, pairs });

/// Below every score, and finite, so that a row without any key has no infinite differences.
pub(super) const MASKED: f64 = -3.0e38;

/// Extents that the decompositions use: batches of one kv head, whose rows are its query heads' tokens.
pub(super) struct Extents {
    pub(super) tokens: Dim,
    pub(super) heads: Dim,
    pub(super) group: Dim,
    pub(super) dim: Dim,
    pub(super) rows: Dim,
}

/// Scores of every pair, and which count.
pub(super) struct Scores {
    /// F32 `[kv_heads, group, tokens, tokens]`, capped, not masked.
    pub(super) scores: Var,
    /// Bool `[1, 1, tokens, tokens]`.
    pub(super) seen: Var,
}

impl RaggedAttention {
    /// Attention to all tokens of a sequence, in both directions.
    pub fn new(scale: f64, pairs: Sym) -> Self {
        Self { scale, causal: false, window: None, softcap: None, dropout: 0.0, pairs }
    }

    /// Attention to tokens before, and to itself.
    pub fn causal(scale: f64, pairs: Sym) -> Self {
        Self { causal: true, ..Self::new(scale, pairs) }
    }

    /// `(query heads of each kv head, kv heads)`.
    pub(super) fn groups(q: &Type, k: &Type) -> Result<(usize, usize), Why> {
        let (heads, kv_heads) = (&q.shape.0[1], &k.shape.0[1]);
        match (heads.as_const(), kv_heads.as_const()) {
            (Some(h), Some(k)) if k > 0 && h % k == 0 => Ok((h / k, k)),
            _ => Err(format!("q has {heads} heads, which must be a multiple of the {kv_heads} of k")),
        }
    }

    /// Requires q, k, v, ids and, with dropout, key and heads that fit, and attributes that mean something.
    pub(in crate::ops) fn check(&self, inputs: &[Type]) -> Result<(), Why> {
        let ([q, k, v, ids], random) = match inputs {
            [q, k, v, ids] if !self.drops() => ([q, k, v, ids], None),
            [q, k, v, ids, key, heads] if self.drops() => ([q, k, v, ids], Some([key, heads])),
            _ if self.drops() => return Err(takes("q, k, v, seq_ids, key and heads", inputs)),
            _ => return Err(takes("q, k, v and seq_ids", inputs)),
        };
        want_floats("q", q, 3, "[tokens, heads, dim]")?;
        want_floats("k", k, 3, "[tokens, kv_heads, dim]")?;
        let [tokens, _, dim] = &q.shape.0[..] else { unreachable!("q has three axes") };
        want("k", k, q.dtype, [tokens, &k.shape.0[1], dim])?;
        want("v", v, q.dtype, k.shape.clone())?;
        want("seq_ids", ids, DType::I32, [tokens])?;
        Self::groups(q, k)?;
        if let Some([key, heads]) = random {
            want("key", key, DType::I64, Shape::default())?;
            want("heads", heads, DType::I64, [&q.shape.0[1]])?;
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return Err(format!("dropout must be at least 0 and below 1, got {}", self.dropout));
        }
        if self.window == Some(0) {
            return Err("a window must have 1 place or more".into());
        }
        match self.softcap {
            Some(cap) if !(cap.is_finite() && cap > 0.0) => Err(format!("softcap must be above 0, got {cap}")),
            _ => Ok(()),
        }
    }

    pub(super) fn extents(g: &Builder, q: Var, k: Var) -> Result<Extents> {
        let (qt, kt) = (g.ty(q)?, g.ty(k)?);
        let fail = |why: Why| GraphError::usage(g.scope(), why);
        let (group, heads) = Self::groups(qt, kt).map_err(fail)?;
        let (tokens, dim) = (qt.shape.0[0].clone(), qt.shape.0[2].clone());
        let rows = flat(&[group.into(), tokens.clone()]).map_err(fail)?;
        Ok(Extents { tokens, heads: heads.into(), group: group.into(), dim, rows })
    }

    /// Scores of f32 `x`, `[kv_heads, group * tokens, dim]`, and `k`, `[kv_heads, tokens, dim]`.
    pub(super) fn scores(&self, g: &mut Builder, e: &Extents, [x, k, ids]: [Var; 3]) -> Result<Scores> {
        let scores = g.matmul(x, k, false, true, DType::F32)?;
        let scale = g.constant(DType::F32, self.scale)?;
        let scores = g.mul(scores, scale)?;
        let mut scores = g.reshape(scores, Shape::new([&e.heads, &e.group, &e.tokens, &e.tokens]))?;
        if let Some(cap) = self.softcap {
            let inverse = g.constant(DType::F32, 1.0 / cap)?;
            let bent = g.mul(scores, inverse)?;
            let bent = g.tanh(bent)?;
            let cap = g.constant(DType::F32, cap)?;
            scores = g.mul(bent, cap)?;
        }
        Ok(Scores { scores, seen: self.seen(g, e, ids)? })
    }

    fn seen(&self, g: &mut Builder, e: &Extents, ids: Var) -> Result<Var> {
        let one = Dim::from(1);
        let rows = Shape::new([&one, &one, &e.tokens, &one]);
        let columns = Shape::new([&one, &one, &one, &e.tokens]);
        let of_query = g.reshape(ids, rows.clone())?;
        let of_key = g.reshape(ids, columns.clone())?;
        let same = g.eq(of_query, of_key)?;
        let zero = g.constant(DType::I32, 0.0)?;
        let real = g.ge(of_query, zero)?;
        let mut seen = g.and(same, real)?;
        if !self.causal && self.window.is_none() {
            return Ok(seen);
        }
        let query = g.iota(rows, 2, DType::I32)?;
        let key = g.iota(columns, 3, DType::I32)?;
        if self.causal {
            let before = g.le(key, query)?;
            seen = g.and(seen, before)?;
        }
        if let Some(window) = self.window {
            let window = g.constant(DType::I32, window as f64)?;
            let sides = if self.causal { &[[key, query]][..] } else { &[[key, query], [query, key]] };
            for [from, to] in sides {
                let end = g.add(*from, window)?;
                let near = g.gt(end, *to)?;
                seen = g.and(seen, near)?;
            }
        }
        Ok(seen)
    }

    /// `(query, key)` pairs of all heads.
    pub(super) fn scored_pairs(&self, q: &Type) -> Poly {
        &Poly::from(&q.shape.0[1]) * &Poly::from(&Dim::from(self.pairs.clone()))
    }

    pub(super) fn attention_work(&self) -> Work {
        Work::Attention(AttentionWork {
            pairs: vec![self.pairs.clone()],
            window: self.window,
            ..AttentionWork::default()
        })
    }
}

/// `x`, `[tokens, heads, dim]`, as f32 `[kv_heads, group * tokens, dim]`.
pub(super) fn by_kv_head(g: &mut Builder, e: &Extents, x: Var) -> Result<Var> {
    let x = g.cast(x, DType::F32)?;
    let x = g.reshape(x, Shape::new([&e.tokens, &e.heads, &e.group, &e.dim]))?;
    let x = g.transpose(x, &[1, 2, 0, 3])?;
    g.reshape(x, Shape::new([&e.heads, &e.rows, &e.dim]))
}

/// The inverse of [`by_kv_head`], as the type `ty`.
pub(super) fn by_token(g: &mut Builder, e: &Extents, x: Var, ty: &Type) -> Result<Var> {
    let x = g.reshape(x, Shape::new([&e.heads, &e.group, &e.tokens, &e.dim]))?;
    let x = g.transpose(x, &[2, 0, 1, 3])?;
    let x = g.reshape(x, ty.shape.clone())?;
    g.cast(x, ty.dtype)
}

/// Keys or values, `[tokens, kv_heads, dim]`, as f32 `[kv_heads, tokens, dim]`.
pub(super) fn head_first(g: &mut Builder, x: Var) -> Result<Var> {
    let wide = g.cast(x, DType::F32)?;
    g.transpose(wide, &[1, 0, 2])
}

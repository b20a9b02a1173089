//! What attention and its gradient share: extents, and how work is cut.

use std::ops::Range;

use ridge_graph::DType;
use ridge_graph::ops::{RaggedAttention, ShareDropout};

use crate::gemm::{Lines, TileProduct};
use crate::kernel::KernelSpec;

/// Tokens of a piece.
pub(super) const PIECE: usize = 192;

/// Tokens of the other side that are scored at a time.
pub(super) const SPAN: usize = 64;

/// What both directions share.
pub(super) struct Attention {
    pub(super) op: RaggedAttention,
    pub(super) tokens: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) dim: usize,
    pub(super) dtype: DType,
    pub(super) tile: TileProduct,
    /// Are a key and heads among the inputs?
    pub(super) has_key: bool,
    /// How shares are dropped, if any are.
    pub(super) dropout: Option<ShareDropout>,
}

impl Attention {
    pub(super) fn new(spec: &KernelSpec<'_>, op: &RaggedAttention) -> Self {
        let [q, k] = [&spec.inputs[0], &spec.inputs[1]];
        Self {
            op: op.clone(),
            tokens: q.shape[0],
            heads: q.shape[1],
            kv_heads: k.shape[1],
            dim: q.shape[2],
            dtype: q.dtype,
            tile: TileProduct::new(q.dtype),
            has_key: op.dropout != 0.0,
            dropout: op.share_dropout(),
        }
    }

    pub(super) fn group(&self) -> usize {
        self.heads / self.kv_heads.max(1)
    }

    /// The rows of a block of queries that see something of `span`: not those of whole panels before it, where attention is
    /// causal.
    pub(super) fn rows_seeing(&self, queries: &Range<usize>, span: &Range<usize>) -> Range<usize> {
        let before = if self.op.causal { span.start.saturating_sub(queries.start).min(queries.len()) } else { 0 };
        self.tile.whole_rows(before)..queries.len()
    }

    /// The rows of a block of keys that something of `span` sees: not those behind it, where attention is causal.
    pub(super) fn rows_seen(&self, keys: &Range<usize>, span: &Range<usize>) -> Range<usize> {
        0..if self.op.causal { span.end.saturating_sub(keys.start).min(keys.len()) } else { keys.len() }
    }

    /// Pieces of a head.
    pub(super) fn blocks(&self) -> usize {
        self.tokens.div_ceil(PIECE)
    }

    pub(super) fn pieces(&self) -> usize {
        if self.heads * self.dim == 0 { 0 } else { self.kv_heads * self.blocks() }
    }

    /// Nanoseconds of a piece that computes `products` products for each pair.
    pub(super) fn nanos(&self, products: f64) -> f64 {
        let pairs = PIECE.min(self.tokens) * self.tokens * self.group() / 2;
        500.0 + pairs as f64 * (1.0 + self.dim as f64 * products * 0.02)
    }

    /// Tokens of one head, of a tensor of `heads` heads, as lines of `dim` steps.
    pub(super) fn by_token(&self, heads: usize, count: usize) -> Lines {
        Lines { lines: count, line_stride: heads * self.dim, step_stride: 1 }
    }

    /// The same as `dim` lines of tokens.
    pub(super) fn by_element(&self, heads: usize) -> Lines {
        Lines { lines: self.dim, line_stride: 1, step_stride: heads * self.dim }
    }

    /// Where the elements of `head` of `token` begin in a tensor of `heads` heads.
    pub(super) fn at(&self, heads: usize, token: usize, head: usize) -> usize {
        (token * heads + head) * self.dim
    }
}

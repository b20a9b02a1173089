//! Scores of many queries in panels of lanes ([`LaneProduct`]): the same bits as those of a few in `in_lanes.rs`.
//!
//! Floor: that of the product. A panel of keys of all lanes and one of queries are in cache together, of the first level up to heads of
//! 128, with the partial sums of a tile.

use std::ops::Range;

use super::kernel::{AttentionKernel, SPAN, TokenRows};
use super::narrow;
use crate::gemm::{LaneProduct, SLOTS};
use crate::io::KernelIo;
use crate::kernels::linear::by_lane::pack;
use crate::kernels::linear::source::{Lanes, Plain};
use crate::simd::{Element, LANES};

/// Rows (a query head of a token each) from which on they are packed.
const FEWEST: usize = 24;

/// Rows of a piece of a long prompt, if tokens have fewer.
const ROWS: usize = 96;

/// Pieces that threads share well.
const PIECES: usize = 64;

/// Tokens of a piece where there are `tokens`, of `kv_heads` groups of `group` heads: `least` if there would else be few pieces.
pub(super) fn together(tokens: usize, [kv_heads, group]: [usize; 2], least: usize) -> usize {
    let most = (ROWS / group.max(1)).max(least);
    if tokens >= 4 * most && kv_heads * (tokens / most) >= PIECES { most } else { least }
}

/// Memory for panels.
pub(super) struct LanePanels<'a> {
    pub(super) product: LaneProduct,
    pub(super) q: &'a mut [f32],
    pub(super) keys: &'a mut [f32],
    pub(super) sums: &'a mut [f32],
}

impl LanePanels<'_> {
    /// Elements of queries of `rows` rows, of keys and of sums.
    pub(super) fn sizes(product: Option<LaneProduct>, rows: usize) -> [usize; 3] {
        let Some(product) = product else { return [0; 3] };
        let panels = rows.div_ceil(product.rows());
        [panels * product.of_panel(), LANES * product.apart(), SLOTS * product.rows() * product.columns()]
    }

    /// Packs queries.
    pub(super) fn take(&mut self, q: &[Lanes], count: usize) {
        let (product, stride) = (self.product, q.len() / count.max(1) * LANES);
        for (panel, to) in self.q.chunks_exact_mut(product.of_panel()).enumerate() {
            let rows = (panel * product.rows()).min(count)..((panel + 1) * product.rows()).min(count);
            pack(
                Plain { data: q.as_flattened(), inner: stride },
                rows,
                stride,
                [product.of_lane(), product.rows()],
                to,
            );
        }
    }
}

impl AttentionKernel {
    /// How the scores of up to `rows` rows are computed, if so.
    pub(super) fn lane_product(&self, rows: usize) -> Option<LaneProduct> {
        let takes = rows >= FEWEST && self.dim > 0 && !narrow::is_narrow(self.dim);
        if takes { LaneProduct::new(self.dim.div_ceil(LANES)) } else { None }
    }

    /// Are those of `count` rows?
    pub(super) fn packs(count: usize) -> bool {
        count >= FEWEST
    }

    /// Scores of `rows` for the keys of `span`: [`SPAN`] a row. A key that is nowhere is zero.
    pub(super) fn scores_by_lane<T: Element>(
        &self,
        io: &KernelIo<'_>,
        head: usize,
        rows: &TokenRows,
        span: &Range<usize>,
        panels: &mut LanePanels<'_>,
        scores: &mut [f32],
    ) {
        let (cache, group) = (io.input::<T>(1), self.group());
        let (product, count) = (panels.product, rows.tokens.len() * group);
        let (height, width) = (product.rows(), product.columns());
        for from in span.clone().step_by(width) {
            let keys = from..span.end.min(from + width);
            let to = from - span.start..keys.end - span.start;
            self.runs(io, rows.sequence, &keys, |within, at| {
                let Some(at) = at else { return };
                let lines = Plain { data: self.slab(cache, head, 0, at), inner: self.dim };
                pack(lines, 0..within.len(), self.dim, [product.apart(), width], &mut panels.keys[within.start..]);
            });
            for first in (0..count).step_by(height) {
                let rows_of = first..(first + height).min(count);
                if rows.seen + (rows_of.end - 1) / group <= from {
                    continue;
                }
                let q = &panels.q[first / height * product.of_panel()..][..product.of_panel()];
                product.multiply(q, panels.keys, panels.sums);
                for (row, sums) in rows_of.zip(panels.sums.chunks_exact(width)) {
                    scores[row * SPAN..][to.clone()].copy_from_slice(&sums[..keys.len()]);
                }
            }
            self.runs(io, rows.sequence, &keys, |within, at| {
                if at.is_none() {
                    let nowhere = to.start + within.start..to.start + within.end;
                    scores.chunks_exact_mut(SPAN).take(count).for_each(|row| row[nowhere.clone()].fill(0.0));
                }
            });
        }
    }
}

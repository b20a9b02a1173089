//! Products whose elements are sums of [`LANES`] partial sums in a fixed tree: element `k` of the inner extent goes to lane
//! `k % LANES` in the order of `k`, and lanes are added up as [`crate::simd::sum_lanes`] does. So they are the same bits as
//! inner products in registers of [`LANES`] floats, but no register holds several elements of one sum.
//!
//! Operands are packed lane by lane, and the product of a lane is one of [`Micro`] over a part of the inner extent, every
//! sixteenth element. Lanes come in the order of the tree (0, 8, 4, 12, 2, ...), so that a sum is added to the one before it as
//! soon as both are complete, while it is in registers: of partial sums only [`SLOTS`] tiles are in memory.
//!
//! Floor: that of `gemm/micro.rs`. A panel of a lane of the weights stays in first-level cache while all rows of x pass by.

use super::micro::{Merge, Micro};
use super::words::Words;
use crate::simd::{self, Isa, LANES};

/// Tiles of partial sums: one for each level of the tree.
pub(crate) const SLOTS: usize = LANES.ilog2() as usize + 1;

/// Vectors of the inner extent that are multiplied at once.
const DEPTH: usize = 512;

/// Elements between the panels of lanes of the weights beyond their own, so that they do not share sets of a cache.
const GAP: usize = 16;

/// How such products are computed on this machine.
#[derive(Clone, Copy)]
pub(crate) struct LaneProduct {
    micro: Micro,
    /// Vectors of [`LANES`] elements that the inner extent takes.
    vectors: usize,
}

impl LaneProduct {
    /// Of `vectors` vectors of [`LANES`] elements each, where there are vector instructions for it.
    pub(crate) fn new(vectors: usize) -> Option<Self> {
        (simd::isa() >= Isa::Avx2).then(|| Self { micro: Micro::in_vectors(Words::F32), vectors })
    }

    /// Rows of x in a panel.
    pub(crate) fn rows(self) -> usize {
        self.micro.rows
    }

    /// Columns of the result.
    pub(crate) fn columns(self) -> usize {
        self.micro.columns
    }

    /// Elements of a panel of x: for each lane, each vector's element of each row.
    pub(crate) fn of_panel(self) -> usize {
        LANES * self.of_lane()
    }

    /// Elements of a lane in a panel of x.
    pub(crate) fn of_lane(self) -> usize {
        self.vectors * self.micro.rows
    }

    /// Elements from the weights of one lane to those of the next: each vector's element of each column.
    pub(crate) fn apart(self) -> usize {
        self.vectors * self.micro.columns + GAP
    }

    /// Products of the panels `x` with `weights`: the first rows of `sums`, which has [`SLOTS`] times as many.
    ///
    /// # Panics
    /// When a slice is too short.
    pub(crate) fn multiply(self, x: &[f32], weights: &[f32], sums: &mut [f32]) {
        let (rows, columns) = (self.micro.rows, self.micro.columns);
        let panels = x.len() / self.of_panel().max(1);
        let slot = panels * rows * columns;
        assert!(sums.len() >= SLOTS * slot);
        if self.vectors == 0 {
            return;
        }
        for nth in 0..LANES {
            let lane = nth.reverse_bits() >> (usize::BITS - LANES.ilog2());
            let weights = &weights[lane * self.apart()..];
            for from in (0..self.vectors).step_by(DEPTH) {
                let steps = DEPTH.min(self.vectors - from);
                // Complete sums of as many lanes as the number of this one ends in ones are waiting to be merged.
                let count = if from + steps == self.vectors { nth.trailing_ones() as usize } else { 0 };
                let top = nth.count_ones() as usize * slot;
                for (panel, x) in x.chunks_exact(self.of_panel()).enumerate() {
                    let x = &x[lane * self.of_lane() + from * rows..];
                    let (panels, merge) = ([x, &weights[from * columns..]], Merge { count, apart: slot });
                    // SAFETY: the slots have so many panels, as asserted, and `count` of them lie before this one.
                    unsafe {
                        let c = sums.as_mut_ptr().add(top + panel * rows * columns);
                        self.micro.multiply_lane(steps, panels, c, columns, from > 0, merge);
                    }
                }
            }
        }
    }
}

//! Products whose elements are sums of [`LANES`] partial sums in a fixed tree: element `k` of the inner extent goes to lane
//! `k % LANES` in the order of `k`, and lanes are added up as [`crate::simd::sum_lanes`] does. So they are the same bits as
//! inner products in registers of [`LANES`] floats, but no register holds several elements of one sum.
//!
//! Operands are packed lane by lane, and the product of a lane is one of [`Micro`] over a part of the inner extent, every
//! sixteenth element. Lanes come in the order of the tree (0, 8, 4, 12, 2, ...), so that a sum is added to the one before it as
//! soon as both are complete, while it is in registers: of partial sums only [`SLOTS`] tiles are in memory.
//!
//! Floor: that of `gemm/micro.rs`. A panel of a lane of the weights stays in cache, of the first level up to a K of 4096, while all rows of x pass by.
#![allow(clippy::inline_always)] // must compile with the instruction set of the caller

use super::micro::{Ahead, Merge, Micro, x86};
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
        assert!(sums.len() >= SLOTS * slot && (self.vectors == 0 || weights.len() >= LANES * self.apart() - GAP));
        let walk = Walk { of: self, panels, slot, operands: [x.as_ptr(), weights.as_ptr()], sums: sums.as_mut_ptr() };
        // SAFETY: the machine has the instructions that the product was made for, and slices are as long as asserted.
        unsafe {
            if simd::isa() >= Isa::Avx512 {
                walk.by_avx512();
            } else {
                walk.by_avx2();
            }
        }
    }
}

/// A product and where its operands are.
struct Walk {
    of: LaneProduct,
    panels: usize,
    /// Elements of a tile of partial sums of all panels.
    slot: usize,
    /// x and weights.
    operands: [*const f32; 2],
    sums: *mut f32,
}

/// A step of a product by [`Micro`]: so many steps of panels, from sums of 0 or what is there, with what is added in the end.
struct Step {
    steps: usize,
    panels: [*const f32; 2],
    sums: *mut f32,
    add: bool,
    merge: Merge,
}

impl Walk {
    /// # Safety
    /// There is AVX2, and slices are as long as the product asks for.
    #[target_feature(enable = "avx2,fma")]
    unsafe fn by_avx2(&self) {
        // SAFETY: by the caller's promise.
        self.each(|step| unsafe { x86::narrow(step.steps, step.panels, step.sums, 16, step.add, step.merge) });
    }

    /// # Safety
    /// As for [`Walk::by_avx2`], with AVX-512.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")]
    unsafe fn by_avx512(&self) {
        let multiply = |Step { steps, panels, sums, add, merge }: Step| {
            // SAFETY: by the caller's promise.
            unsafe { x86::wide(steps, panels, sums, 32, add, Ahead::NOTHING, merge) };
        };
        self.each(multiply);
    }

    #[inline(always)]
    fn each(&self, mut multiply: impl FnMut(Step)) {
        let LaneProduct { micro: Micro { rows, columns, .. }, vectors } = self.of;
        let [x, weights] = self.operands;
        for nth in 0..LANES {
            let lane = nth.reverse_bits() >> (usize::BITS - LANES.ilog2());
            let (top, pending) = (nth.count_ones() as usize * self.slot, nth.trailing_ones() as usize);
            for from in (0..vectors).step_by(DEPTH) {
                let steps = DEPTH.min(vectors - from);
                // Sums of as many lanes as the number of this one ends in ones wait for it to be complete.
                let count = if from + steps == vectors { pending } else { 0 };
                let b = weights.wrapping_add(lane * self.of.apart() + from * columns);
                for panel in 0..self.panels {
                    let a = x.wrapping_add(panel * self.of.of_panel() + lane * self.of.of_lane() + from * rows);
                    let sums = self.sums.wrapping_add(top + panel * rows * columns);
                    let merge = Merge { count, apart: self.slot };
                    multiply(Step { steps, panels: [a, b], sums, add: from > 0, merge });
                }
            }
        }
    }
}

//! Attention on matrix tiles (AMX), for heads of 32 elements and more.
//!
//! All is turned so that a query is a column: the tiles of scores have a key in each row and a query in each lane, so
//! the largest score, the exponentials and their sum are taken lane by lane, and two rows of exponentials together are
//! a row of the tile by which values are multiplied. Values are transposed once for all queries of a piece.
//!
//! Queries, keys, exponentials and values are as many terms of bf16 as the dtype of the queries has ([`amx::Terms`]);
//! with one they are rounded to bf16, and the sum of the exponentials is that of the rounded ones.
//!
//! Codes of a cache of i8 are one term, exactly; the scales of keys multiply scores, and those of values weights.
//!
//! A value that is infinite or NaN goes through no product, where the weight 0 of a query that does not see it would
//! make NaN of it: it is zero there, and is added afterwards for the queries that see it. Of a key it is the last term,
//! which meets the first term of a query only, so that it gives the score that it means.
//!
//! Of a long context each part has a softmax of its own (`parts.rs`).
//!
//! Floor: 16 cycles for each term product of 16 queries, 16 keys and 32 elements, twice; some 6 cycles for 16
//! exponentials.

mod few;
mod many;
mod parts;
mod rests;
mod softmax;
mod span;
mod state;
mod terms;

use std::ops::Range;

use half::{bf16, f16};
use ridge_graph::DType;

use super::kernel::AttentionKernel;
use crate::amx;
use crate::io::KernelIo;
use crate::scratch::Scratch;

/// Rows (a query head of a token each) of a piece, at most, if tokens have fewer: keys and values are read and turned
/// once for all of them.
const ROWS: usize = 256;

/// Tokens of a piece.
pub(super) fn together(tokens: usize, group: usize) -> usize {
    (ROWS / group.max(1)).clamp(1, tokens.max(1))
}

impl AttentionKernel {
    pub(super) fn run_on_tiles(&self, io: &KernelIo<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        match self.dtype {
            DType::BF16 => self.run_of::<bf16, 1>(io, pieces, scratch),
            DType::F16 => self.run_of::<f16, 2>(io, pieces, scratch),
            _ => self.run_of::<f32, 3>(io, pieces, scratch),
        }
    }

    pub(super) fn prepare_on_tiles(&self, io: &KernelIo<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        match self.dtype {
            DType::BF16 => self.prepare_parts::<bf16, 1>(io, pieces, scratch),
            DType::F16 => self.prepare_parts::<f16, 2>(io, pieces, scratch),
            _ => self.prepare_parts::<f32, 3>(io, pieces, scratch),
        }
    }

    fn run_of<T: amx::Terms, const TERMS: usize>(
        &self,
        io: &KernelIo<'_>,
        pieces: Range<usize>,
        scratch: &mut Scratch,
    ) {
        if self.preparation_on_tiles().is_some() {
            return self.finish_parts::<TERMS>(io, pieces, scratch);
        }
        let mut state = self.state::<TERMS>(scratch);
        if self.together == 1 {
            // Head by head of a token, as its keys lie.
            let mut piece = pieces.start;
            while piece < pieces.end {
                let (token, head) = (piece / self.kv_heads, piece % self.kv_heads);
                let heads = head..self.kv_heads.min(head + self.heads_together()).min(head + pieces.end - piece);
                piece += heads.len();
                self.attend_by_parts::<T, TERMS>(io, &heads, &self.rows(io, token..token + 1), &mut state);
            }
            return;
        }
        let per_head = self.tokens.div_ceil(self.together);
        for piece in pieces {
            let (head, block) = (piece / per_head, piece % per_head);
            let end = ((block + 1) * self.together).min(self.tokens);
            let mut token = block * self.together;
            while token < end {
                let rows = self.rows(io, token..end);
                token = rows.tokens.end;
                self.attend_by_parts::<T, TERMS>(io, &(head..head + 1), &rows, &mut state);
            }
        }
    }
}

//! Dropout of shares: which of a tile's go. Random numbers are computed anew in each pass.

use std::ops::Range;

use ridge_graph::ops::ShareDropout;

use crate::io::KernelIo;
use crate::simd::vectorised;

/// What shares are dropped by in one launch.
#[derive(Clone, Copy)]
pub(super) struct Dropping<'a> {
    dropout: ShareDropout,
    key: i64,
    /// The number of each query head in the whole model.
    heads: &'a [i64],
}

impl<'a> Dropping<'a> {
    /// Of `dropout`, its key being input `first` and its heads the one behind.
    pub(super) fn new(io: &KernelIo<'a>, dropout: Option<ShareDropout>, first: usize) -> Option<Self> {
        let dropout = dropout?;
        Some(Self { dropout, key: io.input::<i64>(first)[0], heads: io.input::<i64>(first + 1) })
    }

    /// Multiplies what is there of `query` in `head`, for each of `keys`, by its factor.
    pub(super) fn row(&self, head: usize, query: usize, keys: Range<usize>, row: &mut [f32]) {
        let places =
            Places { key: self.key, head: self.heads[head], at: [query as u32, keys.start as u32], step: [0, 1] };
        drop_shares(row, &self.dropout, &places);
    }

    /// Multiplies what is there of the key `place` in `head`, for each of `queries`, by its factor.
    pub(super) fn column(&self, head: usize, place: usize, queries: Range<usize>, row: &mut [f32]) {
        let at = [queries.start as u32, place as u32];
        let places = Places { key: self.key, head: self.heads[head], at, step: [1, 0] };
        drop_shares(row, &self.dropout, &places);
    }
}

/// Places of the shares of a row: query and key of the first, and how far each is from the one before.
struct Places {
    key: i64,
    head: i64,
    at: [u32; 2],
    step: [u32; 2],
}

vectorised! {
    fn drop_shares(row: &mut [f32], dropout: &ShareDropout, places: &Places) {
        let scale = dropout.scale as f32;
        for (i, share) in row.iter_mut().enumerate() {
            let [query, place] = [0, 1].map(|side| places.at[side].wrapping_add(i as u32 * places.step[side]));
            let factor = if dropout.keeps(places.key, places.head, query, place) { scale } else { 0.0 };
            // Not a product, which would make NaN of what is infinite.
            *share = if factor == 0.0 { 0.0 } else { *share * factor };
        }
    }
}

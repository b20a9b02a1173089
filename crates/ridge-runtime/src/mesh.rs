//! Communication between the ranks of a mesh axis, as backends use it.

use ridge_graph::DType;

/// One rank's end of a group of ranks. Every rank calls the same operations in the same order.
pub trait Collectives: Send + Sync {
    /// Number of ranks.
    fn ranks(&self) -> usize;

    /// This rank.
    fn rank(&self) -> usize;

    /// Replaces `data`, elements of `dtype`, by the sum over ranks, in an order of addition that is the same on every
    /// rank. `data` is aligned to its dtype.
    fn all_reduce(&self, dtype: DType, data: &mut [u8]);

    /// Gives every rank's `part` in rank order. `whole` has `ranks` times its length.
    fn all_gather(&self, part: &[u8], whole: &mut [u8]);
}

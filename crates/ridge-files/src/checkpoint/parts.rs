//! Weights as parts of published tensors: which tensor, which rows, transposed or not. The caller gives the list.

use std::ops::Range;

use super::pattern::star;

/// A weight of a graph as a part of a published tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Name of the published tensor, in which `*` stands for any characters, such as a layer's number.
    pub of: String,
    /// Name of the weight, with `*` for what that of the tensor stood for.
    pub name: String,
    /// Is the tensor the weight's transpose, `[in, out]`? A vector is not turned.
    pub transposed: bool,
    /// The rows of the tensor, after transposition, that are the weight's; all if `None`.
    pub rows: Option<Rows>,
}

impl Part {
    /// The name of the published tensor, if the weight called `name` is such a part of it.
    pub fn published(&self, name: &str) -> Option<String> {
        Some(self.of.replace('*', star(&self.name, name)?))
    }
}

/// A weight of a graph as several published tensors of one shape: its first axis counts them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stack {
    /// Names of the published tensors. Of its two `*` the first stands for any characters, such as a layer's number, and the
    /// second for the tensor's own number, from 0 on.
    pub of: String,
    /// Name of the weight, with `*` for what the first one stood for.
    pub name: String,
    /// How many tensors there are.
    pub count: usize,
}

impl Stack {
    /// The name of the published tensor of this number, if the weight called `name` is such a stack.
    pub fn published(&self, name: &str, number: usize) -> Option<String> {
        Some(self.of.replacen('*', star(&self.name, name)?, 1).replace('*', &number.to_string()))
    }
}

/// Blocks of rows at equal distances, the first of which begins at `first`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Where the first block begins.
    pub first: usize,
    /// Rows of each block.
    pub len: usize,
    /// Rows from the beginning of a block to the next one's.
    pub stride: usize,
    /// How many blocks there are.
    pub blocks: usize,
}

impl Rows {
    /// Rows that lie together.
    pub const fn range(first: usize, len: usize) -> Self {
        Self { first, len, stride: len, blocks: 1 }
    }

    pub(super) fn end(&self) -> usize {
        self.first + self.stride * self.blocks.saturating_sub(1) + self.len
    }

    pub(super) fn count(&self) -> usize {
        self.len * self.blocks
    }

    /// The rows of each block.
    pub(super) fn ranges(&self) -> impl Iterator<Item = Range<usize>> {
        let Self { first, len, stride, blocks } = *self;
        (0..blocks).map(move |block| first + block * stride..first + block * stride + len)
    }

    /// The row that is the `i`-th of them.
    pub(super) fn at(&self, i: usize) -> usize {
        self.first + i / self.len * self.stride + i % self.len
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = usize> {
        self.ranges().flatten()
    }
}

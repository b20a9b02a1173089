//! The elements of packed panels.

/// What a word of a panel is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Words {
    /// One f32.
    F32,
    /// Two neighbouring bf16.
    Pairs,
}

/// A panel of B: parts of `Micro::lanes` columns, `apart` words from one to the next.
#[derive(Clone, Copy)]
pub(super) struct PanelOfB<'a> {
    pub(super) words: &'a [u32],
    pub(super) apart: usize,
}

impl Words {
    /// Words that `inner` steps take.
    pub(super) fn count(self, inner: usize) -> usize {
        match self {
            Self::F32 => inner,
            Self::Pairs => inner.div_ceil(2),
        }
    }

    /// Steps of a word.
    pub(super) fn steps(self) -> usize {
        match self {
            Self::F32 => 1,
            Self::Pairs => 2,
        }
    }
}

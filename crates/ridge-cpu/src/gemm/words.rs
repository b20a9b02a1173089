//! The elements of packed panels.

/// What a word of a panel is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Words {
    /// One f32.
    F32,
    /// Two neighbouring bf16.
    Pairs,
}

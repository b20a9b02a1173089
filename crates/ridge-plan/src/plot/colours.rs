//! Colours of series, and the ink that is read on them. Their values are in the style sheet of `figure`.

/// Colours that there are; more series begin again with the first.
pub(super) const COLOURS: usize = 8;

/// Class of text that is read on colour `i`.
pub(super) fn ink(i: usize) -> &'static str {
    if matches!(i % COLOURS, 0 | 2 | 4) { "small dark" } else { "small light" }
}

//! Words of a text, as what compares texts sees them.

use super::order::mix;

/// A hash of each word: letters and digits in a row, in lower case.
pub(super) fn word_hashes(text: &str) -> Vec<u64> {
    text.split(|c: char| !c.is_alphanumeric())
        .filter(|word| !word.is_empty())
        .map(|word| word.chars().flat_map(char::to_lowercase).fold(0, |hash, c| mix(hash ^ u64::from(u32::from(c)))))
        .collect()
}

/// A hash of words in their order.
pub(super) fn sequence_hash(words: &[u64]) -> u64 {
    words.iter().fold(1, |hash: u64, word| mix(hash.rotate_left(7) ^ word))
}

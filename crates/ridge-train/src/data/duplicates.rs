//! Documents that are there already: exactly, or nearly by MinHash (Broder 1997, "On the resemblance and containment of
//! documents") with banding (Leskovec, Rajaraman and Ullman, "Mining of Massive Datasets", section 3.4).

use std::collections::HashMap;

use sha2::{Digest as _, Sha256};

use super::order::mix;
use super::words::{sequence_hash, word_hashes};

/// Which documents count as duplicates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Duplicates {
    /// None.
    Keep,
    /// Those with the same text.
    Exact,
    /// Those with the same text, and those whose sets of five words in a row agree to some four fifths or more.
    Near,
}

/// Hashes of a signature, in bands of so many rows: documents of resemblance `s` share a band with probability `1 - (1 -
/// s^8)^14`, a half at 0.71 and 0.92 at 0.8.
const BANDS: usize = 14;
const ROWS: usize = 8;
/// Words of a shingle.
const WORDS: usize = 5;

/// What a document is recognised by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    exact: u128,
    bands: Vec<u64>,
}

impl Signature {
    /// That of `text`.
    pub fn of(text: &str, duplicates: Duplicates) -> Self {
        let mut exact = 0;
        if duplicates != Duplicates::Keep {
            let digest = Sha256::digest(text.as_bytes());
            exact = digest.iter().take(16).fold(0, |hash, byte| hash << 8 | u128::from(*byte));
        }
        let bands = if duplicates == Duplicates::Near { bands(text) } else { Vec::new() };
        Self { exact, bands }
    }
}

/// A hash of each band of the signature: of the least values of hashes over all shingles.
fn bands(text: &str) -> Vec<u64> {
    let words = word_hashes(text);
    let mut least = [u64::MAX; BANDS * ROWS];
    let count = words.len().saturating_sub(WORDS - 1).max(usize::from(!words.is_empty()));
    for at in 0..count {
        let end = words.len().min(at + WORDS);
        let shingle = sequence_hash(&words[at..end]);
        // Each is another permutation of the hash: a product with an odd number and a sum.
        let mut multiplier = 0x9e37_79b9_7f4a_7c15_u64;
        for least in &mut least {
            multiplier = multiplier.wrapping_mul(0xd134_2543_de82_ef95) | 1;
            let hash = shingle.wrapping_mul(multiplier).wrapping_add(multiplier >> 17);
            *least = (*least).min(hash ^ (hash >> 32));
        }
    }
    least.chunks(ROWS).map(|band| band.iter().fold(0, |hash, value| mix(hash ^ value))).collect()
}

/// The documents so far.
#[derive(Debug, Default)]
pub struct Seen {
    exact: std::collections::HashSet<u128>,
    bands: Vec<HashMap<u64, ()>>,
}

impl Seen {
    /// Remembers a document; false if it is there already.
    pub fn insert(&mut self, signature: &Signature, duplicates: Duplicates) -> bool {
        if duplicates == Duplicates::Keep {
            return true;
        }
        if !self.exact.insert(signature.exact) {
            return false;
        }
        self.bands.resize(signature.bands.len().max(self.bands.len()), HashMap::new());
        let is_near = signature.bands.iter().zip(&self.bands).any(|(band, seen)| seen.contains_key(band));
        if is_near {
            return false;
        }
        for (band, seen) in signature.bands.iter().zip(&mut self.bands) {
            seen.insert(*band, ());
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(seed: u64, words: usize, changed: usize) -> String {
        let word = |i: usize| format!("word{} ", mix(seed ^ mix(i as u64)) % 5000);
        let other = |i: usize| format!("other{} ", mix(seed ^ (i as u64) << 20) % 5000);
        (0..words).map(|i| if changed > 0 && i % (words / changed) == 0 { other(i) } else { word(i) }).collect()
    }

    fn kept(texts: &[String], duplicates: Duplicates) -> Vec<bool> {
        let mut seen = Seen::default();
        texts.iter().map(|text| seen.insert(&Signature::of(text, duplicates), duplicates)).collect()
    }

    #[test]
    fn exact_duplicates_go_and_near_ones_stay_unless_asked() {
        let texts = [text(1, 300, 0), text(2, 300, 0), text(1, 300, 0), text(1, 300, 3), text(1, 300, 150)];
        assert_eq!(kept(&texts, Duplicates::Keep), [true; 5]);
        assert_eq!(kept(&texts, Duplicates::Exact), [true, true, false, true, true]);
        assert_eq!(kept(&texts, Duplicates::Near), [true, true, false, false, true]);
    }

    #[test]
    fn few_unlike_documents_are_taken_for_near_ones() {
        let texts: Vec<String> = (0..300).map(|seed| text(seed, 60, 0)).collect();
        assert!(kept(&texts, Duplicates::Near).iter().all(|kept| *kept));
    }
}

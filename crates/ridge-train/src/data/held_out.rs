//! Texts that models are evaluated on, which training data must not contain: documents that share a sequence of words with
//! one of them are left out (decontamination: Brown et al. 2020, "Language Models are Few-Shot Learners", appendix C).

use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;

use super::documents::{DocumentFile, FileKind, files_of};
use super::words::{sequence_hash, word_hashes};
use crate::error::{Result, TrainError};

/// Words below which a text that is held out is common speech rather than a text of its own.
const MIN_WORDS: usize = 8;

/// Sequences of words of texts that are held out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeldOut {
    /// By number of words: `words`, and that of each text that has fewer.
    sequences: BTreeMap<usize, HashSet<u64>>,
}

impl HeldOut {
    /// Every sequence of `words` words of the texts of these files, in the fields or columns `text_field`; of a text that has
    /// fewer, and 8 or more, all of it.
    ///
    /// # Errors
    /// When a file cannot be read, or no text has 8 words, or `words` is below 8.
    pub fn read(files: &[PathBuf], text_field: &str, words: usize) -> Result<Self> {
        let mut held_out = Self::default();
        for given in files {
            for file in files_of(given)? {
                if FileKind::of(&file) == FileKind::Tokens {
                    return Err(TrainError::path(&file, "it holds tokens, and texts are wanted", "leave it out"));
                }
                DocumentFile::open(&file)?.each(text_field, |text| {
                    held_out.add(text, words);
                    Ok(())
                })?;
            }
            if held_out.sequences.is_empty() {
                let problem = format!("none of its texts has {MIN_WORDS} words to compare with");
                return Err(TrainError::path(given, problem, "leave it out, or check the name of the field"));
            }
        }
        Ok(held_out)
    }

    fn add(&mut self, text: &str, words: usize) {
        let hashes = word_hashes(text);
        let length = words.min(hashes.len());
        if length >= MIN_WORDS {
            self.sequences.entry(length).or_default().extend(hashes.windows(length).map(sequence_hash));
        }
    }

    /// Does `text` share a sequence of words with one of these?
    pub fn overlaps(&self, text: &str) -> bool {
        if self.sequences.is_empty() {
            return false;
        }
        let hashes = word_hashes(text);
        let shares = |(length, known): (&usize, &HashSet<u64>)| {
            hashes.windows(*length).any(|words| known.contains(&sequence_hash(words)))
        };
        self.sequences.iter().any(shares)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_that_share_a_sequence_of_words_overlap_whatever_stands_between_the_words() {
        let mut held_out = HeldOut::default();
        assert!(!held_out.overlaps("what is the capital of France"));
        held_out.add("One two three four five six seven eight nine ten eleven twelve thirteen fourteen.", 10);
        held_out.add("What is the capital of the state of Ohio?", 10);
        held_out.add("Too short a text.", 10);
        for (text, overlaps) in [
            ("before ONE, two-three four five six; seven eight nine ten after", true),
            ("five six seven eight nine ten eleven twelve thirteen fourteen", true),
            ("one two three four five six seven eight nine and ten", false),
            ("Q: what is the capital of the state of Ohio", true),
            ("what is the capital of the state of Utah", false),
            ("Too short a text.", false),
            ("", false),
        ] {
            assert_eq!(held_out.overlaps(text), overlaps, "{text}");
        }
    }
}

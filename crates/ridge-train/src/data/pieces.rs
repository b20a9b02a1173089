//! Byte-level BPE of GPT-2's kind at the rate that shards are made at: texts are cut into the pieces that the tokenizer would
//! merge apart, and the tokens of each piece are remembered.
//!
//! The pieces of ASCII text are found here by the rules of GPT-2's regular expression. Text that is not ASCII is left to the
//! tokenizer, from one boundary that every reading of the expression has to the next: a space between two characters that are
//! none.

use std::collections::HashMap;

use ridge_text::Tokenizer;
use serde_json::Value;

use crate::error::Result;

/// Pieces that are remembered at most.
const REMEMBERED: usize = 1 << 18;
/// Bytes of a piece that is remembered, at most.
const LONGEST: usize = 48;

/// Tokens of texts, by remembered pieces.
pub(super) struct PieceEncoder<'a> {
    tokenizer: &'a Tokenizer,
    known: HashMap<Box<[u8]>, Box<[u32]>>,
}

/// Does the `tokenizer.json` cut texts by GPT-2's rules, and do nothing else with them?
pub(super) fn has_pieces(json: &str) -> bool {
    let Ok(value) = serde_json::from_str::<Value>(json) else { return false };
    let pre = &value["pre_tokenizer"];
    let usual = pre["type"] == "ByteLevel" && pre["use_regex"] != false && pre["add_prefix_space"] != true;
    let specials =
        value["added_tokens"].as_array().is_none_or(|added| added.iter().all(|token| token["special"] == true));
    usual && value["normalizer"].is_null() && value["model"]["type"] == "BPE" && specials
}

impl<'a> PieceEncoder<'a> {
    /// One of a tokenizer that [`has_pieces`].
    pub(super) fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, known: HashMap::new() }
    }

    /// Adds the tokens of `text` to `tokens`.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub(super) fn encode(&mut self, text: &str, tokens: &mut Vec<u32>) -> Result<()> {
        // The spelling of a special token becomes that token.
        if text.contains("<|") {
            tokens.extend(self.tokenizer.encode(text, false)?);
            return Ok(());
        }
        let bytes = text.as_bytes();
        let mut begin = 0;
        while begin < bytes.len() {
            let end = chunk_end(bytes, begin);
            if bytes[begin..end].is_ascii() {
                while begin < end {
                    let piece = piece_end(&bytes[..end], begin);
                    self.piece(&text[begin..piece], tokens)?;
                    begin = piece;
                }
            } else {
                self.piece(&text[begin..end], tokens)?;
                begin = end;
            }
        }
        Ok(())
    }

    fn piece(&mut self, piece: &str, tokens: &mut Vec<u32>) -> Result<()> {
        if let Some(known) = self.known.get(piece.as_bytes()) {
            tokens.extend(&**known);
            return Ok(());
        }
        let ids = self.tokenizer.encode(piece, false)?;
        tokens.extend(&ids);
        if piece.len() <= LONGEST {
            if self.known.len() >= REMEMBERED {
                self.known.clear();
            }
            self.known.insert(piece.as_bytes().into(), ids.into());
        }
        Ok(())
    }
}

/// The next boundary behind `begin` that does not depend on what characters beyond ASCII are.
fn chunk_end(bytes: &[u8], begin: usize) -> usize {
    let is_boundary = |at: &usize| {
        let [before, here, after] = [bytes[at - 1], bytes[*at], bytes.get(at + 1).copied().unwrap_or(b' ')];
        here == b' ' && !is_space(before) && after.is_ascii_graphic()
    };
    (begin + 1..bytes.len()).find(is_boundary).unwrap_or(bytes.len())
}

fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t'..=b'\r')
}

/// The end of the piece at `begin` of ASCII text: `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`.
fn piece_end(bytes: &[u8], begin: usize) -> usize {
    let run = |from: usize, is: fn(u8) -> bool| {
        bytes[from..].iter().position(|byte| !is(*byte)).map_or(bytes.len(), |length| from + length)
    };
    if bytes[begin] == b'\'' {
        let rest = &bytes[begin + 1..];
        for ending in [&b"s"[..], b"t", b"re", b"ve", b"m", b"ll", b"d"] {
            if rest.starts_with(ending) {
                return begin + 1 + ending.len();
            }
        }
    }
    let first = begin + usize::from(bytes[begin] == b' ' && begin + 1 < bytes.len());
    let is_letter = |byte: u8| byte.is_ascii_alphabetic();
    let is_number = |byte: u8| byte.is_ascii_digit();
    let is_other = |byte: u8| !is_space(byte) && !byte.is_ascii_alphanumeric();
    for is in [is_letter as fn(u8) -> bool, is_number, is_other] {
        if is(bytes[first]) {
            return run(first, is);
        }
    }
    // Whitespace: all of it at the end of the text, else all but the last, or the last alone.
    let end = run(begin, is_space);
    if end == bytes.len() || end == begin + 1 { end } else { end - 1 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::vocabulary::Vocabulary;

    #[test]
    fn tokens_are_those_of_the_tokenizer() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/tokenizers/gpt2_reduced.json");
        let vocabulary = Vocabulary::open(std::path::Path::new(folder)).expect("is committed");
        assert!(has_pieces(vocabulary.json()));
        let mut texts: Vec<String> = [
            "It's they're  we've I'll 'tis don't''s 'S",
            "one\n\ntwo \n three\t\t4x5 6.7 (8)  ",
            "a\u{a0}b \u{e9}t\u{e9} na\u{ef}ve\u{3000} \u{65e5}\u{672c}\u{8a9e} text \u{2003} x\u{b2}y 1\u{bd}  \u{1f600}! ",
            " ", "", "  a", "\n", "'", "' ", "x  ", "!?<>|", "a<|endoftext|>b", "\r\n\r\n \u{b}\u{c}x",
        ]
        .map(str::to_owned)
        .to_vec();
        let mut state = 1;
        for _ in 0..300 {
            let mut text = String::new();
            for _ in 0..40 {
                state = crate::data::order::mix(state);
                let parts =
                    ["a", "Z", " ", "  ", "\n", "7", "'", "'s", ".", "\u{e9}", "\u{3000}", "\u{b2}", "the", "\t"];
                text += parts[(state % parts.len() as u64) as usize];
            }
            texts.push(text);
        }
        let mut encoder = PieceEncoder::new(vocabulary.tokenizer());
        for text in &texts {
            for _ in 0..2 {
                let mut tokens = Vec::new();
                encoder.encode(text, &mut tokens).expect("encodes");
                assert_eq!(tokens, vocabulary.tokenizer().encode(text, false).expect("encodes"), "{text:?}");
            }
        }
    }
}

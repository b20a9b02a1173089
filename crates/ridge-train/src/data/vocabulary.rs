//! Texts to tokens: single characters, bytes, or a published tokenizer.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use ridge_text::Tokenizer;
use serde_json::{Map, Value, json};

use crate::error::{Result, TrainError};

/// The token behind each document, where a vocabulary is made here.
const END_OF_TEXT: &str = "<|endoftext|>";

/// Texts to tokens and back, with the `tokenizer.json` that does the same elsewhere.
pub struct Vocabulary {
    kind: VocabularyKind,
    /// The text of `tokenizer.json`.
    json: String,
    tokenizer: Tokenizer,
    /// The token behind each document.
    end_of_text: Option<u32>,
}

enum VocabularyKind {
    /// The id of each character below 128, and of the others in order.
    Characters {
        low: Box<[Option<u32>; 128]>,
        others: Vec<(char, u32)>,
    },
    Bytes,
    Tokenizer,
}

impl Vocabulary {
    /// The characters of `texts`, in ascending order, with a token that ends texts if `has_end`.
    ///
    /// # Errors
    /// When there is no character.
    pub fn characters<'a>(texts: impl Iterator<Item = &'a str>, has_end: bool) -> Result<Self> {
        let mut found = BTreeSet::new();
        for text in texts {
            found.extend(text.chars());
        }
        if found.is_empty() {
            return Err(TrainError::setting("data.vocabulary", "characters", "the training data has no characters"));
        }
        let mut low = Box::new([None; 128]);
        let mut others = Vec::new();
        for (id, c) in (0..).zip(&found) {
            match low.get_mut(*c as usize) {
                Some(place) => *place = Some(id),
                None => others.push((*c, id)),
            }
        }
        let vocab: Map<String, Value> = (0..).zip(&found).map(|(id, c): (u32, _)| (c.to_string(), id.into())).collect();
        let end = has_end.then_some(found.len() as u32);
        let json = tokenizer_json(vocab, end, &Value::Null, &json!({"type": "Fuse"}));
        Self::made(VocabularyKind::Characters { low, others }, json, end)
    }

    /// All bytes, and a token that ends texts.
    ///
    /// # Errors
    /// None that a build which passes its tests has.
    pub fn bytes() -> Result<Self> {
        let level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
        let vocab = (0..=255_u8).map(|byte| (byte_character(byte).to_string(), byte.into())).collect();
        Self::made(VocabularyKind::Bytes, tokenizer_json(vocab, Some(256), &level, &level), Some(256))
    }

    /// That of a `tokenizer.json`, or of the folder that holds one, which may be that of a downloaded model, named as on the Hub.
    ///
    /// # Errors
    /// When there is none, or it cannot be read.
    pub fn open(path: &Path) -> Result<Self> {
        let path = ridge_files::hub::find_model(path)?;
        let file = if path.is_dir() { path.join("tokenizer.json") } else { path };
        let json = ridge_files::read_text(&file, "read the tokenizer")?;
        let mut tokenizer = Tokenizer::from_bytes(&file.display().to_string(), json.as_bytes())?;
        let config = file.with_file_name("tokenizer_config.json");
        if config.is_file() {
            let text = ridge_files::read_text(&config, "read the tokenizer settings")?;
            tokenizer = tokenizer.with_config(&config.display().to_string(), &text)?;
        }
        let end = tokenizer.eos().or_else(|| [END_OF_TEXT, "</s>"].iter().find_map(|end| tokenizer.token_to_id(end)));
        Ok(Self { kind: VocabularyKind::Tokenizer, json, end_of_text: end, tokenizer })
    }

    /// That of a `tokenizer.json` whose text was written by this type.
    ///
    /// # Errors
    /// When it is no tokenizer.
    pub fn from_json(file: &str, json: String) -> Result<Self> {
        let tokenizer = Tokenizer::from_bytes(file, json.as_bytes())?;
        let end = tokenizer.token_to_id(END_OF_TEXT).or_else(|| tokenizer.eos());
        Ok(Self { kind: VocabularyKind::Tokenizer, json, end_of_text: end, tokenizer })
    }

    fn made(kind: VocabularyKind, json: String, end_of_text: Option<u32>) -> Result<Self> {
        let tokenizer = Tokenizer::from_bytes("the vocabulary", json.as_bytes())?;
        Ok(Self { kind, json, tokenizer, end_of_text })
    }

    /// Number of tokens.
    pub fn size(&self) -> usize {
        self.tokenizer.vocab_size()
    }

    /// The token behind each document, if there is one.
    pub fn end_of_text(&self) -> Option<u32> {
        self.end_of_text
    }

    /// The text of `tokenizer.json`.
    pub fn json(&self) -> &str {
        &self.json
    }

    /// The same as a tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The tokens of `text`, added to `tokens`.
    ///
    /// # Errors
    /// When a character has no token. `what` names the text.
    pub fn encode(&self, what: &str, text: &str, tokens: &mut Vec<u32>) -> Result<()> {
        match &self.kind {
            VocabularyKind::Bytes => tokens.extend(text.bytes().map(u32::from)),
            VocabularyKind::Tokenizer => tokens.extend(self.tokenizer.encode(text, false)?),
            VocabularyKind::Characters { low, others } => {
                tokens.reserve(text.len());
                for c in text.chars() {
                    let id = match low.get(c as usize) {
                        Some(id) => *id,
                        None => others.binary_search_by_key(&c, |(c, _)| *c).ok().map(|at| others[at].1),
                    };
                    let unknown = || {
                        let why = "is not in the vocabulary; train with data.vocabulary = bytes, or take the text out";
                        TrainError::setting(what, format!("{c:?}"), why)
                    };
                    tokens.push(id.ok_or_else(unknown)?);
                }
            }
        }
        Ok(())
    }
}

/// What `data.vocabulary` names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VocabularyChoice {
    /// The characters of the training data.
    Characters,
    /// Bytes.
    Bytes,
    /// A file or folder.
    Path(PathBuf),
}

impl VocabularyChoice {
    /// As it is written in settings.
    pub fn parse(text: &str) -> Self {
        match text {
            "characters" | "chars" => Self::Characters,
            "bytes" => Self::Bytes,
            path => Self::Path(path.into()),
        }
    }
}

/// A tokenizer of single tokens, without merges.
fn tokenizer_json(vocab: Map<String, Value>, end: Option<u32>, pre: &Value, decoder: &Value) -> String {
    let added = end.map(|id| {
        json!({"id": id, "content": END_OF_TEXT, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    });
    let mut vocab = vocab;
    if let Some(id) = end {
        vocab.insert(END_OF_TEXT.to_owned(), id.into());
    }
    let added: Vec<Value> = added.into_iter().collect();
    let model = json!({
        "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
        "vocab": vocab, "merges": [],
    });
    let whole = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": pre, "post_processor": null, "decoder": decoder, "model": model,
    });
    format!("{whole:#}\n")
}

/// What stands for a byte in the vocabularies of byte-level tokenizers: itself if it is a visible character of Latin-1, else
/// one from 256 on.
fn byte_character(byte: u8) -> char {
    let is_visible = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if is_visible(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|byte| !is_visible(*byte)).count() as u32;
    char::from_u32(256 + before).unwrap_or(char::REPLACEMENT_CHARACTER)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded(vocabulary: &Vocabulary, text: &str) -> Vec<u32> {
        let mut tokens = Vec::new();
        vocabulary.encode("the text", text, &mut tokens).expect("is known");
        tokens
    }

    #[test]
    fn the_tokenizer_file_of_a_vocabulary_gives_the_same_tokens_and_text() {
        let text = "To be,\n  or not\u{e9} to be\u{2014}!";
        for vocabulary in
            [Vocabulary::characters([text].into_iter(), true).expect("has some"), Vocabulary::bytes().expect("builds")]
        {
            let tokens = encoded(&vocabulary, text);
            assert_eq!(vocabulary.tokenizer().encode(text, false).expect("encodes"), tokens);
            assert_eq!(vocabulary.tokenizer().decode(&tokens, false).expect("decodes"), text);
            let again = Vocabulary::from_json("t", vocabulary.json().to_owned()).expect("reads");
            assert_eq!(encoded(&again, text), tokens);
            assert_eq!((again.size(), again.end_of_text()), (vocabulary.size(), vocabulary.end_of_text()));
        }
    }

    #[test]
    fn characters_are_numbered_in_order_and_an_unknown_one_is_named() {
        let vocabulary = Vocabulary::characters(["ba", "\n\u{e9}"].into_iter(), false).expect("has some");
        assert_eq!(encoded(&vocabulary, "ab\n\u{e9}"), [1, 2, 0, 3]);
        assert_eq!((vocabulary.size(), vocabulary.end_of_text()), (4, None));
        let error = vocabulary.encode("a.txt", "c", &mut Vec::new()).expect_err("is unknown").to_string();
        assert!(error.starts_with("a.txt = 'c': is not in the vocabulary"), "{error}");
    }
}

//! Tokens by longest match: the model of RWKV's vocabularies, which the `tokenizers` crate lacks.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use tokenizers::models::bpe::BpeTrainer;
use tokenizers::{Model, Token};

/// The `type` of such a model in a `tokenizer.json`.
pub(crate) const KIND: &str = "LongestMatch";

/// A vocabulary of which each part of a text is the longest token that the rest of the text begins with.
#[derive(Clone, Debug)]
pub(crate) struct LongestMatch {
    /// By spelling.
    sorted: Vec<(String, u32)>,
    /// Where each id is in `sorted`.
    places: HashMap<u32, usize>,
}

/// Such a model in a `tokenizer.json`.
#[derive(Serialize, Deserialize)]
struct Written {
    #[serde(rename = "type")]
    kind: String,
    vocab: HashMap<String, u32>,
}

impl LongestMatch {
    fn new(vocab: HashMap<String, u32>) -> Result<Self, String> {
        let mut sorted: Vec<(String, u32)> = vocab.into_iter().collect();
        sorted.sort_unstable();
        if sorted.first().is_some_and(|(token, _)| token.is_empty()) {
            return Err("a token is empty".to_owned());
        }
        let places: HashMap<u32, usize> = sorted.iter().enumerate().map(|(place, (_, id))| (*id, place)).collect();
        match places.len() == sorted.len() {
            true => Ok(Self { sorted, places }),
            false => Err("two tokens have one id".to_owned()),
        }
    }

    fn id(&self, token: &str) -> Option<u32> {
        let place = self.sorted.binary_search_by(|(other, _)| other.as_str().cmp(token)).ok()?;
        Some(self.sorted[place].1)
    }

    /// The longest token that `text` begins with.
    fn longest(&self, text: &str) -> Option<&(String, u32)> {
        // Those that begin with the bytes so far.
        let mut among = &self.sorted[..];
        let mut longest = None;
        for (depth, next) in text.bytes().enumerate() {
            let byte = |(token, _): &(String, u32)| token.as_bytes().get(depth).copied();
            let from = among.partition_point(|token| byte(token) < Some(next));
            let len = among[from..].partition_point(|token| byte(token) == Some(next));
            among = &among[from..from + len];
            match among.first() {
                None => break,
                Some(token) if token.0.len() == depth + 1 => longest = Some(token),
                Some(_) => {}
            }
        }
        longest
    }
}

impl<'de> Deserialize<'de> for LongestMatch {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        Self::new(Written::deserialize(from)?.vocab).map_err(D::Error::custom)
    }
}

impl Serialize for LongestMatch {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        Written { kind: KIND.to_owned(), vocab: self.get_vocab() }.serialize(to)
    }
}

impl Model for LongestMatch {
    // The trait asks for one; nothing here trains.
    type Trainer = BpeTrainer;

    fn tokenize(&self, text: &str) -> tokenizers::Result<Vec<Token>> {
        let mut tokens = Vec::new();
        let mut at = 0;
        while let Some(rest) = text.get(at..).filter(|rest| !rest.is_empty()) {
            let Some((token, id)) = self.longest(rest) else {
                return Err(format!("no token begins as {:?} does", rest.chars().take(8).collect::<String>()).into());
            };
            let end = at + token.len();
            tokens.push(Token::new(*id, token.clone(), (at, end)));
            at = end;
        }
        Ok(tokens)
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.id(token)
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        self.places.get(&id).map(|place| self.sorted[*place].0.clone())
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        self.sorted.iter().cloned().collect()
    }

    fn get_vocab_size(&self) -> usize {
        self.sorted.len()
    }

    fn save(&self, _folder: &Path, _prefix: Option<&str>) -> tokenizers::Result<Vec<PathBuf>> {
        Err("a model of longest matches is written as a tokenizer.json".into())
    }

    fn get_trainer(&self) -> BpeTrainer {
        BpeTrainer::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(tokens: &[&str]) -> Result<LongestMatch, String> {
        LongestMatch::new(tokens.iter().zip(10..).map(|(token, id)| ((*token).to_owned(), id)).collect())
    }

    fn ids(model: &LongestMatch, text: &str) -> Option<Vec<u32>> {
        Some(model.tokenize(text).ok()?.iter().map(|token| token.id).collect())
    }

    #[test]
    fn the_longest_token_is_taken_whatever_follows() {
        let model = model(&["a", "ab", "abcd", "b", "c", "é", "éa"]).expect("a vocabulary");
        // "abc" begins as "abcd" does, and "ab" is the longest that is whole.
        assert_eq!(ids(&model, "abcabcd"), Some(vec![11, 14, 12]));
        assert_eq!(ids(&model, "éaéb"), Some(vec![16, 15, 13]));
        assert_eq!(ids(&model, ""), Some(vec![]));
        assert_eq!(ids(&model, "abd"), None);
    }

    #[test]
    fn a_vocabulary_comes_back_from_its_text_and_a_wrong_one_is_refused() {
        let model = model(&["a", "ab"]).expect("a vocabulary");
        let text = serde_json::to_string(&model).expect("writes");
        let back: LongestMatch = serde_json::from_str(&text).expect("reads");
        assert_eq!(back.sorted, model.sorted);
        assert_eq!((back.id_to_token(11), back.token_to_id("ab")), (Some("ab".to_owned()), Some(11)));
        for (vocab, problem) in [(r#"{"": 1}"#, "a token is empty"), (r#"{"a": 1, "b": 1}"#, "two tokens have one id")]
        {
            let text = format!(r#"{{"type": "LongestMatch", "vocab": {vocab}}}"#);
            let refused = serde_json::from_str::<LongestMatch>(&text).expect_err("is refused").to_string();
            assert!(refused.contains(problem), "{refused}");
        }
    }
}

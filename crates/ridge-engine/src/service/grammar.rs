//! Which tokens may come next where an answer must be of some language, by `llguidance`.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory, token_bytes_from_tokenizer_json};
use ridge_text::Tokenizer;

use super::request::Constraint;
use crate::error::{EngineError, Result};

/// Makes grammars over the tokens of one model.
pub(super) struct Grammars {
    factory: ParserFactory,
    vocab: usize,
    ends: Vec<u32>,
}

impl Grammars {
    /// Over the tokens of `tokenizer`, for a model of `vocab` of them, of which `ends` end a text.
    pub(super) fn new(tokenizer: &Tokenizer, vocab: usize, ends: &[u32]) -> Result<Self> {
        let wrong = |why: String| EngineError::Setting {
            name: "tokenizer",
            value: "tokenizer.json".into(),
            why: format!("grammars cannot use its tokens: {why}"),
        };
        let json: serde_json::Value = serde_json::from_str(&tokenizer.to_json()?).map_err(|e| wrong(e.to_string()))?;
        let mut bytes = guarded(|| token_bytes_from_tokenizer_json(&json)).map_err(wrong)?;
        // A model may have rows beyond its tokens: these are never allowed.
        bytes.resize(vocab, Vec::new());
        let info = TokRxInfo::new(vocab as u32, ends.first().copied().unwrap_or(u32::MAX));
        let trie = TokTrie::from(&info, &bytes);
        let trie = if ends.is_empty() { trie } else { trie.with_eos_tokens(ends) };
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory = ParserFactory::new_simple(&env).map_err(|e| wrong(e.to_string()))?;
        factory.quiet();
        factory.limits_mut().verbose_errors = false;
        Ok(Self { factory, vocab, ends: ends.to_vec() })
    }

    /// A grammar at its beginning.
    pub(super) fn start(&self, constraint: &Constraint) -> Result<Grammar> {
        let (name, text) = match constraint {
            Constraint::JsonSchema(schema) => ("json_schema", schema.clone()),
            Constraint::JsonObject => ("json_object", String::new()),
            Constraint::Regex(regex) => ("regex", regex.clone()),
            Constraint::Choice(choices) => ("choice", choices.join("|")),
            Constraint::Lark(lark) => ("grammar", lark.clone()),
        };
        let wrong = |why: String| {
            let value = if text.chars().count() > 80 {
                text.chars().take(80).collect::<String>() + "..."
            } else {
                text.clone()
            };
            EngineError::Setting { name, value, why }
        };
        let grammar = match constraint {
            Constraint::JsonSchema(schema) => TopLevelGrammar::from_json_schema(
                serde_json::from_str(schema).map_err(|e| wrong(format!("is not JSON: {e}")))?,
            ),
            Constraint::JsonObject => TopLevelGrammar::from_json_schema(serde_json::json!({ "type": "object" })),
            Constraint::Regex(regex) => TopLevelGrammar::from_regex(regex),
            Constraint::Choice(choices) if choices.is_empty() => {
                return Err(wrong("names nothing to choose from".into()));
            }
            Constraint::Choice(choices) => {
                let choices: Vec<String> = choices.iter().map(|c| serde_json::json!(c).to_string()).collect();
                TopLevelGrammar::from_lark(format!("start: {}", choices.join(" | ")))
            }
            Constraint::Lark(lark) => TopLevelGrammar::from_lark(lark.clone()),
        };
        let parser = guarded(|| self.factory.create_parser(grammar)).map_err(wrong)?;
        Ok(Grammar { matcher: Matcher::new(Ok(parser)), words: self.vocab.div_ceil(32), ends: self.ends.clone() })
    }
}

/// What `work` gives; a panic of it is an error like others.
fn guarded<T, E: std::fmt::Display>(work: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => result.map_err(|e| e.to_string()),
        Err(_) => Err("the grammar library gave up on it".to_owned()),
    }
}

/// How far an answer has come in its grammar.
pub(super) struct Grammar {
    matcher: Matcher,
    words: usize,
    ends: Vec<u32>,
}

impl Grammar {
    /// Another at the same place.
    pub(super) fn another(&self) -> Self {
        Self { matcher: self.matcher.deep_clone(), words: self.words, ends: self.ends.clone() }
    }

    /// Tokens that may not come next, a bit each, as [`Row::forbidden`](crate::Row::forbidden) has them.
    pub(super) fn forbidden(&mut self) -> Result<Vec<u32>, String> {
        let allowed = self.matcher.compute_mask_or_eos().map_err(|e| e.to_string())?;
        if allowed.is_zero() {
            return Err("no token of the model can go on with it".to_owned());
        }
        let mut forbidden: Vec<u32> = allowed.as_slice().iter().map(|word| !word).collect();
        forbidden.resize(self.words, u32::MAX);
        Ok(forbidden)
    }

    /// Takes a token. Is the answer complete, so that nothing can follow?
    pub(super) fn take(&mut self, token: u32) -> Result<bool, String> {
        self.matcher.consume_token(token).map_err(|e| e.to_string())?;
        Ok(self.matcher.is_stopped())
    }

    /// Does this token end a text?
    pub(super) fn is_end(&self, token: u32) -> bool {
        self.ends.contains(&token)
    }
}

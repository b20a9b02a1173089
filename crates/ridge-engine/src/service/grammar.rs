//! Token masks of grammars and schemas, by `llguidance`.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{
    CancellationHandle, GrammarBuilder, JsonCompileOptions, Matcher, ParserFactory, token_bytes_from_tokenizer_json,
};
use ridge_text::Tokenizer;

use super::request::Constraint;
use crate::error::{EngineError, Result};

/// Derivations that a grammar may follow side by side at a place of the text: the default of `llguidance` is four times
/// as many, with which a single mask of an ambiguous grammar takes seconds.
const MAX_ITEMS: usize = 500;
/// What a mask may take and be computed between two steps: nodes of the vocabulary's trie and items of the parser, each
/// some tenths of a microsecond or more.
const CHEAP: usize = 2_000;

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
            why: format!("its tokenizer cannot be used for grammars: {why}"),
        };
        let mut json: serde_json::Value =
            serde_json::from_str(&tokenizer.to_json()?).map_err(|e| wrong(e.to_string()))?;
        // Tokens that are their own texts, as those of a vocabulary of characters, which `llguidance` knows beside bytes alone.
        if json["decoder"]["type"] == "Fuse" {
            json["decoder"] =
                serde_json::json!({ "type": "Sequence", "decoders": [{ "type": "ByteFallback" }, { "type": "Fuse" }] });
        }
        let mut bytes = guarded(|| token_bytes_from_tokenizer_json(&json)).map_err(wrong)?;
        // A model may have rows beyond its tokens: these are never allowed.
        bytes.resize(vocab, Vec::new());
        Self::over(&bytes, ends)
    }

    /// Over one token for each byte, and one that ends a text.
    fn of_bytes() -> Result<Self> {
        let tokens: Vec<Vec<u8>> = (0..=u8::MAX).map(|byte| vec![byte]).chain([Vec::new()]).collect();
        Self::over(&tokens, &[u32::from(u8::MAX) + 1])
    }

    /// Over tokens of these bytes, of which `ends` end a text.
    fn over(tokens: &[Vec<u8>], ends: &[u32]) -> Result<Self> {
        let wrong = |why: String| EngineError::Setting {
            name: "tokenizer",
            value: "tokenizer.json".into(),
            why: format!("its tokenizer cannot be used for grammars: {why}"),
        };
        let vocab = tokens.len();
        let info = TokRxInfo::new(vocab as u32, ends.first().copied().unwrap_or(u32::MAX));
        let trie = TokTrie::from(&info, tokens);
        let trie = if ends.is_empty() { trie } else { trie.with_eos_tokens(ends) };
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory = ParserFactory::new_simple(&env).map_err(|e| wrong(e.to_string()))?;
        factory.quiet();
        let limits = factory.limits_mut();
        limits.verbose_errors = false;
        // The time of a mask grows with the square of this and more; grammars that are not ambiguous stay far below.
        limits.max_items_in_row = MAX_ITEMS;
        Ok(Self { factory, vocab, ends: ends.to_vec() })
    }

    /// A grammar at its beginning, and the tokens that may not come first, as [`Row::forbidden`](crate::Row::forbidden) has them.
    pub(super) fn begin(&self, constraint: &Constraint) -> Result<(Grammar, Vec<u32>)> {
        let mut first = self.start(constraint)?;
        match first.advance(None) {
            Ok(advanced) => Ok((first, advanced.forbidden)),
            Err(why) if why == NO_TOKEN => {
                // Over bytes it tells whether any text matches.
                let nothing = Self::of_bytes()?.start(constraint)?.advance(None).is_err_and(|why| why == NO_TOKEN);
                Err(constraint.refused(if nothing { NO_TEXT } else { NO_FIRST_TOKEN }.to_owned()))
            }
            Err(why) => Err(constraint.refused(why)),
        }
    }

    /// A grammar before its first mask.
    fn start(&self, constraint: &Constraint) -> Result<Grammar> {
        let wrong = |why: String| constraint.refused(why);
        let grammar = match constraint {
            Constraint::JsonSchema(schema) => TopLevelGrammar::from_json_schema(on_one_line(
                serde_json::from_str(schema).map_err(|e| wrong(format!("is not JSON: {e}")))?,
            )),
            Constraint::JsonObject => {
                TopLevelGrammar::from_json_schema(on_one_line(serde_json::json!({ "type": "object" })))
            }
            Constraint::Regex(regex) => TopLevelGrammar::from_regex(regex),
            Constraint::Choice(choices) if choices.is_empty() => {
                return Err(wrong("has no choices".into()));
            }
            Constraint::Choice(choices) => {
                let choices: Vec<String> = choices.iter().map(|c| serde_json::json!(c).to_string()).collect();
                TopLevelGrammar::from_lark(format!("start: {}", choices.join(" | ")))
            }
            Constraint::Lark(lark) => TopLevelGrammar::from_lark(lark.clone()),
        };
        let parser = guarded(|| self.factory.create_parser(grammar)).map_err(|why| {
            wrong(match constraint {
                Constraint::Lark(lark) => of_grammar(&plain(&why), lark),
                _ => plain(&why),
            })
        })?;
        let matcher = Matcher::new(Ok(parser)).into_cancellable();
        Ok(Grammar { matcher, words: self.vocab.div_ceil(32), ends: self.ends.clone(), costly: false })
    }
}

/// A schema whose JSON has at most one space between its parts: models that may write white space write it without end.
fn on_one_line(mut schema: serde_json::Value) -> serde_json::Value {
    if let serde_json::Value::Object(map) = &mut schema {
        map.insert("x-guidance".to_owned(), serde_json::json!({ "whitespace_pattern": " " }));
    }
    schema
}

/// Why a grammar cannot continue.
fn stuck(why: &str) -> String {
    let said = plain(why);
    match &*said {
        _ if said.contains("too many expressions") => {
            "its regular expressions exceed the limit of automaton states; use fewer nested repetitions or smaller counts"
                .to_owned()
        }
        // The library's names of reasons.
        "NoExtensionBias" => NO_TOKEN.to_owned(),
        "LexerTooComplex" | "ParserTooComplex" => "it is too complex; use fewer nested repetitions or alternatives".to_owned(),
        _ => said,
    }
}

/// Why a grammar cannot continue of which no token of the model is the beginning.
const NO_TOKEN: &str = "no token of the model can continue it: nothing matches it from here, or it requires characters that the \
                        model's tokenizer cannot write";
/// Why a grammar cannot begin that matches no bytes.
const NO_TEXT: &str = "no text matches it";
/// Why a grammar cannot begin that matches texts of which no token of the model is the beginning.
const NO_FIRST_TOKEN: &str =
    "no token of the model can begin it: it requires characters that the model's tokenizer cannot write";

/// What the grammar library says, without what it says of itself: where in a grammar of its own a regular expression stands,
/// and what it was built without.
fn plain(why: &str) -> String {
    let of_regex = why.split_once("(in regex): ").map(|(_, rest)| rest);
    let lines = of_regex.unwrap_or(why).lines().take_while(|line| of_regex.is_none() || !line.contains(" | start: /"));
    let mut text = lines.collect::<Vec<_>>().join("\n");
    for (own, ours) in [
        ("<non-verbose/>", ""),
        (" without 'referencing' feature", ""),
        ("Only absolute $ref's (#/...)", "only references within the schema (#/...)"),
    ] {
        text = text.replace(own, ours);
    }
    text.trim().to_owned()
}

/// What the library says of a grammar, with the place in words.
fn of_grammar(why: &str, lark: &str) -> String {
    let place = |text: &str| -> Option<String> {
        let (line, rest) = text.strip_prefix("at ").unwrap_or(text).split_once('(')?;
        let (column, rest) = rest.split_once("): ")?;
        let (line, column): (usize, usize) = (line.parse().ok()?, column.parse().ok()?);
        Some(format!("line {line}, column {column}: {rest}"))
    };
    let mut said = place(why).unwrap_or_else(|| why.to_owned());
    if said == "no start rule found" {
        said = "it has no rule named start, which texts are derived from".to_owned();
    }
    if lark.contains("::=") {
        said += "\nGrammars are in Lark's syntax, such as start: \"yes\" | \"no\"; EBNF and GBNF with ::= are not supported";
    }
    said
}

/// Can the regular expression be the `pattern` of a schema that answers are held to? Those that look ahead or behind, or
/// refer back to what matched before, cannot.
pub fn is_supported_pattern(pattern: &str) -> bool {
    schema_error(&serde_json::json!({ "type": "string", "pattern": pattern })).is_none()
}

/// Why answers cannot be held to the schema, if they cannot.
pub fn schema_error(schema: &serde_json::Value) -> Option<String> {
    let builder = || GrammarBuilder::new(None, ParserLimits::default());
    guarded(|| JsonCompileOptions::default().json_to_llg(builder(), schema.clone())).err().map(|why| plain(&why))
}

/// What `work` gives; a panic of it is an error like others.
fn guarded<T, E: std::fmt::Display>(work: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => result.map_err(|e| e.to_string()),
        Err(_) => Err("the grammar library failed on it".to_owned()),
    }
}

/// How far an answer has come in its grammar.
pub(super) struct Grammar {
    matcher: Matcher,
    words: usize,
    ends: Vec<u32>,
    /// Did the last mask take long?
    costly: bool,
}

/// What follows the tokens so far.
pub(super) struct Advanced {
    /// Is the text complete, so that nothing can follow?
    pub(super) complete: bool,
    /// Tokens that may not come next, a bit each, as [`Row::forbidden`](crate::Row::forbidden) has them; all if the text
    /// is complete.
    pub(super) forbidden: Vec<u32>,
}

impl Grammar {
    /// Another at the same place.
    pub(super) fn another(&self) -> Self {
        Self { matcher: self.matcher.deep_clone(), words: self.words, ends: self.ends.clone(), costly: self.costly }
    }

    /// What cancels the grammar's work on another thread, for good.
    pub(super) fn cancellation(&self) -> CancellationHandle {
        self.matcher.cancellation_handle().expect("every matcher is made cancellable")
    }

    /// Did the last mask take so long that the next should be computed beside the steps?
    pub(super) fn is_costly(&self) -> bool {
        self.costly
    }

    /// Takes the token that came, if one did, and works out what may follow.
    ///
    /// # Errors
    /// Says why the grammar cannot continue: it allows nothing, is too costly, or was cancelled.
    pub(super) fn advance(&mut self, token: Option<u32>) -> Result<Advanced, String> {
        if let Some(token) = token
            && self.take(token)?
        {
            return Ok(Advanced { complete: true, forbidden: vec![u32::MAX; self.words] });
        }
        self.forbidden().map(|forbidden| Advanced { complete: false, forbidden })
    }

    /// Tokens that may not come next, a bit each, as [`Row::forbidden`](crate::Row::forbidden) has them.
    fn forbidden(&mut self) -> Result<Vec<u32>, String> {
        let allowed = self.matcher.compute_mask_or_eos().map_err(|e| stuck(&e.to_string()))?;
        let stats = self.matcher.last_step_stats().map_err(|e| e.to_string())?;
        self.costly = stats.trie_nodes_walked + stats.all_items > CHEAP;
        if allowed.is_zero() {
            return Err(NO_TOKEN.to_owned());
        }
        let mut forbidden: Vec<u32> = allowed.as_slice().iter().map(|word| !word).collect();
        forbidden.resize(self.words, u32::MAX);
        Ok(forbidden)
    }

    /// Takes a token. Is the answer complete, so that nothing can follow?
    fn take(&mut self, token: u32) -> Result<bool, String> {
        self.matcher.consume_token(token).map_err(|e| stuck(&e.to_string()))?;
        Ok(self.matcher.is_stopped())
    }

    /// Does this token end a text?
    pub(super) fn is_end(&self, token: u32) -> bool {
        self.ends.contains(&token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mistakes_in_grammars_are_told_with_line_and_column() {
        let grammars = Grammars::of_bytes().unwrap();
        for (lark, says) in [
            ("start: a b\na: \"x\"", &["line 1, column 8: unknown name: \"b\""][..]),
            ("start: \"a\" |\n  | ) \"b\"", &["line 2, column 5: "]),
            ("x: \"a\"", &["it has no rule named start"]),
            ("root ::= \"a\" | \"b\"", &["line 1, column 7: ", "Grammars are in Lark's syntax"]),
        ] {
            let refused = grammars.begin(&Constraint::Lark(lark.to_owned())).err().map(|error| error.to_string());
            let refused = refused.unwrap_or_default();
            assert!(says.iter().all(|says| refused.contains(says)), "{lark}: {refused}");
        }
    }

    #[test]
    fn a_grammar_that_matches_nothing_is_told_from_one_that_no_token_begins() {
        let tokens = [b"a".to_vec(), b"ab".to_vec(), Vec::new()];
        let grammars = Grammars::over(&tokens, &[2]).unwrap();
        let (_, forbidden) = grammars.begin(&Constraint::Regex("a[xb]".into())).map_err(|e| e.to_string()).unwrap();
        assert_eq!(forbidden[0] & 0b111, 0b100, "both begin it, and it does not end at once");
        for (constraint, why) in [
            (Constraint::Regex("[xy]".into()), NO_FIRST_TOKEN),
            (Constraint::Regex(r"[^\s\S]".into()), NO_TEXT),
            (Constraint::Lark("start: X\nX: /a/ & /b/".into()), NO_TEXT),
        ] {
            let refused = grammars.begin(&constraint).err().map(|error| error.to_string()).unwrap_or_default();
            assert!(refused.contains(why), "{constraint:?}: {refused}");
        }
    }
}

//! What stands between a stranger's `tokenizer.json` and the `tokenizers` crate.
//!
//! The crate panics on some files that parse. Two that the tests of this crate hold on to: a BPE merge whose result
//! would be longer than every token of the vocabulary (an index out of range), and a `Strip` decoder that is to cut
//! more characters from the end than a text has (a subtraction below zero). So its calls run under
//! [`std::panic::catch_unwind`]. The panic hook still prints its line to standard error. It also builds a `str` from
//! unchecked bytes when a BPE model has a continuation prefix that is no prefix of its merges; [`check`] refuses that
//! before the crate sees it. It also replaces text as often as a file says, each time by as much: [`check`] refuses files
//! that make texts [`MAX_GROWTH`] times longer.

use std::panic::{AssertUnwindSafe, catch_unwind};

use serde::Deserialize;
use serde_json::Value;

/// Why a call into the `tokenizers` crate gave nothing.
pub(crate) enum LibraryFailure {
    Error(String),
    Panic(String),
}

impl LibraryFailure {
    /// One sentence about it that starts with `what`.
    pub(crate) fn in_context(&self, what: &str) -> String {
        match self {
            Self::Error(e) => format!("{what}: {e}"),
            Self::Panic(e) => format!("{what}: the tokenizer library panicked: {e}"),
        }
    }
}

/// Runs a call into the `tokenizers` crate. What it leaves behind in a panic is a tokenizer whose caches may lack an
/// entry, and those are behind locks that the crate treats as misses when they are poisoned.
pub(crate) fn guarded<T>(call: impl FnOnce() -> Result<T, tokenizers::Error>) -> Result<T, LibraryFailure> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(e)) => Err(LibraryFailure::Error(e.to_string())),
        Err(payload) => {
            let text = payload
                .downcast_ref::<&str>()
                .map(|s| (*s).to_owned())
                .or_else(|| payload.downcast_ref::<String>().cloned());
            Err(LibraryFailure::Panic(text.unwrap_or_default()))
        }
    }
}

/// How many times longer the replacements of a file may make a text. Those of published tokenizers make it three times
/// longer, where a space becomes another sign; regular expressions are taken for worse than they are.
const MAX_GROWTH: u64 = 1000;

/// The few parts of the file that are looked at before the crate reads it.
#[derive(Deserialize)]
struct TokenizerHead {
    model: ModelHead,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    decoder: Value,
}

/// How many times longer the replacements in a normalizer or decoder make a text at most.
fn growth(step: &Value) -> u64 {
    let parts = ["normalizers", "decoders"].iter().filter_map(|list| step.get(list)?.as_array()).flatten();
    let product = parts.map(growth).fold(1, u64::saturating_mul);
    let Some(content) = step.get("content").and_then(Value::as_str).filter(|_| step["type"] == "Replace") else {
        return product;
    };
    // What a regular expression or an empty string matches may be empty, which leaves the text beside what is added.
    let pattern = step["pattern"].get("String").and_then(Value::as_str).unwrap_or_default();
    let by = match pattern.len() {
        0 => content.len() + 1,
        length => content.len().div_ceil(length).max(1),
    };
    product.saturating_mul(by as u64)
}

#[derive(Deserialize)]
struct ModelHead {
    #[serde(rename = "type")]
    kind: Option<Value>,
    dropout: Option<f64>,
    continuing_subword_prefix: Option<String>,
}

/// Refuses what the crate would accept and Ridge must not. Returns the type of the model, if the file says it.
pub(crate) fn check(bytes: &[u8]) -> Result<Option<String>, String> {
    let peek: TokenizerHead = serde_json::from_slice(bytes).map_err(|e| format!("it is not a tokenizer: {e}"))?;
    if peek.model.dropout.is_some_and(|p| p != 0.0) {
        return Err("its model.dropout would make the same text give different tokens".to_owned());
    }
    for (name, step) in [("normalizer", &peek.normalizer), ("decoder", &peek.decoder)] {
        let times = growth(step);
        if times > MAX_GROWTH {
            return Err(format!(
                "its {name} could make a text {times} times longer; at most {MAX_GROWTH} times is allowed"
            ));
        }
    }
    // A model without a type may turn out to be BPE.
    let may_be_bpe = peek.model.kind.as_ref().is_none_or(|kind| *kind == "BPE");
    let prefix = peek.model.continuing_subword_prefix.unwrap_or_default();
    if may_be_bpe && !prefix.is_empty() {
        return Err(format!("its BPE model has continuing_subword_prefix = {prefix:?}, which Ridge does not read"));
    }
    Ok(peek.model.kind.as_ref().and_then(Value::as_str).map(str::to_owned))
}

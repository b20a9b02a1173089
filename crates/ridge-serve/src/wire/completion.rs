//! A request of `/v1/completions`.

use serde_json::{Value, json};

use super::fields::{RequestFields, ids, wrong};
use super::sampling::{self, CommonParams, MAX_ANSWERS, MAX_LOGPROBS};
use crate::error::{ApiError, ApiResult};

/// What to continue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PromptInput {
    Text(String),
    Ids(Vec<u32>),
}

/// A request of `/v1/completions`.
#[derive(Clone, Debug)]
pub(crate) struct CompletionRequest {
    pub(crate) common: CommonParams,
    pub(crate) prompts: Vec<PromptInput>,
    /// Answers to choose the best `n` from.
    pub(crate) best_of: usize,
    /// Give the prompt back before the answer.
    pub(crate) echo: bool,
    pub(crate) add_special_tokens: bool,
}

/// Prompts of one request at most.
const MAX_PROMPTS: usize = 256;
/// Tokens of an answer where the request says nothing, as OpenAI has it.
pub(crate) const USUAL_TOKENS: usize = 16;

pub(crate) fn read(body: &[u8]) -> ApiResult<CompletionRequest> {
    let mut fields = RequestFields::body(body)?;
    let mut common = sampling::read(&mut fields, (&["max_tokens"], 0))?;
    let prompt = fields.take("prompt");
    let prompts = prompts(fields.needed("prompt", prompt)?)?;
    let logprobs = fields.whole("logprobs", 0, MAX_LOGPROBS)?;
    common.sampling.logprobs = logprobs.map(|n| n as u32);
    let echo = fields.bool("echo")?.unwrap_or(false);
    let best_of = fields.whole("best_of", 1, MAX_ANSWERS)?.map_or(common.n, |n| n as usize);
    if best_of < common.n {
        return Err(ApiError::param("best_of", format!("{best_of} is less than n = {}", common.n)));
    }
    if best_of > common.n && common.stream {
        return Err(ApiError::unsupported(
            "best_of",
            "cannot be streamed, because the best choice is known only at the end",
        ));
    }
    fields.only("suffix", &[json!("")], "is not supported: this server does not support infilling")?;
    let add_special_tokens = fields.bool("add_special_tokens")?.unwrap_or(true);
    fields.done()?;
    common.usual_tokens = Some(USUAL_TOKENS.max(common.min_tokens));
    Ok(CompletionRequest { common, prompts, best_of, echo, add_special_tokens })
}

/// A text, a list of ids, or a list of these.
pub(crate) fn prompts(value: Value) -> ApiResult<Vec<PromptInput>> {
    let list = match value {
        Value::String(text) => return Ok(vec![PromptInput::Text(text)]),
        Value::Array(list) => list,
        other => return Err(wrong("prompt", &other, "a string, a list of token ids, or a list of these")),
    };
    match list.first() {
        None => return Err(ApiError::param("prompt", "is an empty list; give a string or tokens")),
        Some(Value::Number(_)) => return Ok(vec![PromptInput::Ids(ids("prompt", &list)?)]),
        Some(_) => {}
    }
    if list.len() > MAX_PROMPTS {
        return Err(ApiError::param("prompt", format!("has {} prompts; the maximum is {MAX_PROMPTS}", list.len())));
    }
    let each = |(i, value): (usize, Value)| match value {
        Value::String(text) => Ok(PromptInput::Text(text)),
        Value::Array(list) if !list.is_empty() => Ok(PromptInput::Ids(ids(&format!("prompt[{i}]"), &list)?)),
        other => Err(wrong(&format!("prompt[{i}]"), &other, "a string or a list of token ids")),
    };
    list.into_iter().enumerate().map(each).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_are_texts_or_ids_or_lists_of_them() {
        let read = |text: &str| read(text.as_bytes());
        let prompts = |text: &str| read(text).unwrap().prompts;
        assert_eq!(prompts(r#"{"prompt": "a"}"#), [PromptInput::Text("a".into())]);
        assert_eq!(prompts(r#"{"prompt": [1, 2]}"#), [PromptInput::Ids(vec![1, 2])]);
        assert_eq!(prompts(r#"{"prompt": ["a", [3]]}"#), [PromptInput::Text("a".into()), PromptInput::Ids(vec![3])]);
        for (text, param) in [
            (r#"{}"#, "prompt"),
            (r#"{"prompt": []}"#, "prompt"),
            (r#"{"prompt": {}}"#, "prompt"),
            (r#"{"prompt": [1, "a"]}"#, "prompt[1]"),
            (r#"{"prompt": ["a", []]}"#, "prompt[1]"),
            (r#"{"prompt": [1e20]}"#, "prompt[0]"),
            (r#"{"prompt": "a", "best_of": 1, "n": 2}"#, "best_of"),
            (r#"{"prompt": "a", "best_of": 2, "stream": true}"#, "best_of"),
            (r#"{"prompt": "a", "suffix": "b"}"#, "suffix"),
            (r#"{"prompt": "a", "logprobs": 21}"#, "logprobs"),
            (r#"{"prompt": "a", "messages": []}"#, "messages"),
        ] {
            assert_eq!(read(text).unwrap_err().param.as_deref(), Some(param), "{text}");
        }
    }
}

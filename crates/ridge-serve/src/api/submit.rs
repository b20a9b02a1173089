//! From prompts to answers that run.

use std::sync::Arc;

use serde_json::{Map, Value, json};
use tokio::sync::mpsc;

use super::router::Caller;
use crate::answers::{Answers, Usage};
use crate::app::App;
use crate::choice::{Apart, Choice, Ending, Spelt};
use crate::error::{ApiError, ApiResult};
use crate::wire::sampling::Common;
use crate::worker::{Job, MOST_EVENTS};

/// The tokens of a prompt, cut if the request says so, if they leave room for an answer.
pub(super) fn fitted(app: &App, common: &Common, param: &str, mut ids: Vec<u32>) -> ApiResult<Vec<u32>> {
    if let Some(keep) = common.truncate {
        ids.drain(..ids.len().saturating_sub(keep));
    }
    let too_long =
        |message: String| ApiError { code: Some("context_length_exceeded"), ..ApiError::param(param, message) };
    if ids.len() >= app.context {
        let (prompt, context) = (ids.len(), app.context);
        let message = format!("has {prompt} tokens and the context holds {context}, which leaves none to generate");
        return Err(too_long(message));
    }
    Ok(ids)
}

/// Tokens of an answer to `prompt` at most.
fn max_tokens(app: &App, common: &Common, prompt: usize) -> usize {
    let room = app.context - prompt;
    common.max_tokens.map_or(room, |most| most.min(room))
}

/// Hands the prompts to the engine, each for `n` answers. `apart` says how an answer to a prompt is taken apart.
pub(super) async fn submit(
    app: &Arc<App>,
    caller: &Caller,
    common: &Common,
    prompts: &[Vec<u32>],
    n: usize,
    apart: impl Fn() -> Apart,
) -> ApiResult<Answers> {
    let worker = app.engine()?;
    let (events, received) = mpsc::channel(MOST_EVENTS.max(16 * n * prompts.len()));
    let (mut choices, mut submitted) = (Vec::new(), Vec::new());
    for prompt in prompts {
        let first = choices.len();
        for _ in 0..n {
            let speller = app.speller.clone().with_ids(common.tokens_as_ids);
            choices.push(Choice::new(app.tokenizer.as_ref(), prompt, &common.stops, apart(), speller)?);
        }
        let job = Job {
            prompt: prompt.clone(),
            n,
            first,
            sampling: common.sampling.clone(),
            max_tokens: max_tokens(app, common, prompt.len()),
            min_tokens: common.min_tokens,
            eos: if common.ignore_eos { Vec::new() } else { app.eos.clone() },
            stop_tokens: common.stop_tokens.clone(),
            form: common.form.clone(),
            priority: common.priority,
            holder: caller.holder,
        };
        submitted.push(worker.submit(job, events.clone())?);
    }
    let mut tickets = Vec::with_capacity(submitted.len());
    for job in submitted {
        tickets.push(job.accepted().await?);
    }
    let prompt_tokens = prompts.iter().map(Vec::len).sum();
    let limit = app.options.request_timeout;
    Ok(Answers::new(caller.id.clone(), choices, received, tickets, prompt_tokens, limit))
}

/// What every response and chunk has.
#[derive(Clone, Debug)]
pub(super) struct Head {
    pub(super) id: String,
    pub(super) object: &'static str,
    pub(super) created: u64,
    pub(super) model: String,
}

impl Head {
    pub(super) fn with(&self, choices: Vec<Value>) -> Map<String, Value> {
        let mut map = Map::new();
        map.insert("id".to_owned(), json!(self.id));
        map.insert("object".to_owned(), json!(self.object));
        map.insert("created".to_owned(), json!(self.created));
        map.insert("model".to_owned(), json!(self.model));
        map.insert("system_fingerprint".to_owned(), json!(concat!("ridge-", env!("CARGO_PKG_VERSION"))));
        map.insert("choices".to_owned(), Value::Array(choices));
        map
    }
}

pub(super) fn usage(usage: Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": { "cached_tokens": usage.cached },
    })
}

/// Adds why an answer ended, with null where it has not.
pub(super) fn with_ending(mut choice: Value, ending: Option<&Ending>) -> Value {
    choice["finish_reason"] = ending.map_or(Value::Null, |e| json!(e.reason));
    // vLLM's, which tells a stop string from the end of the text.
    if let Some(ending) = ending {
        choice["stop_reason"] = ending.by.clone();
    }
    choice
}

/// A token beside its log-probability, with its bytes, as chats tell it.
pub(super) fn told(spelt: &Spelt, logprob: f32) -> Value {
    json!({ "token": spelt.text, "logprob": finite(logprob), "bytes": spelt.bytes })
}

/// JSON has no infinities, and OpenAI says -9999 for them.
pub(super) fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { -9999.0 }
}

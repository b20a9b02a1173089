//! Submission of prompts to the engine.

use std::sync::Arc;

use ridge_engine::service::{Constraint, Policy, Request, Targets};
use serde_json::{Map, Value, json};
use tokio::sync::mpsc;

use super::caller::Caller;
use crate::answers::{Answers, TokenUsage};
use crate::app::{App, new_id, unix_now};
use crate::choice::{AnswerChoice, Ending, OutputParsing, Spelt};
use crate::error::{ApiError, ApiResult};
use crate::wire::constraint::Form;
use crate::wire::sampling::CommonParams;
use crate::worker::MAX_PENDING_EVENTS;

/// The tokens of a prompt, truncated if requested, checked to leave room for generation.
pub(super) fn fitted(app: &App, common: &CommonParams, param: &str, mut ids: Vec<u32>) -> ApiResult<Vec<u32>> {
    if let Some(keep) = common.truncate {
        ids.drain(..ids.len().saturating_sub(keep));
    }
    let too_long =
        |message: String| ApiError { code: Some("context_length_exceeded"), ..ApiError::param(param, message) };
    if common.max_tokens == Some(0) && ids.len() == app.model.context {
        return Ok(ids);
    }
    if ids.len() >= app.model.context {
        let (prompt, context) = (ids.len(), app.model.context);
        let message = format!("has {prompt} tokens and the context holds {context}, which leaves no room to generate");
        return Err(too_long(message));
    }
    let room = app.model.context - ids.len();
    let least = (common.min_tokens > 0).then_some(common.min_tokens);
    for (param, asked) in [(common.max_tokens_param, common.max_tokens), ("min_tokens", least)] {
        let Some(asked) = asked.filter(|asked| *asked > room) else { continue };
        let why = format!(
            "{asked} and the {} tokens of the prompt exceed the context of {} tokens; ask for at most {room}, or leave it out",
            ids.len(),
            app.model.context
        );
        return Err(ApiError { code: Some("context_length_exceeded"), ..ApiError::param(param, why) });
    }
    Ok(ids)
}

/// Maximum number of generated tokens for `prompt`.
fn max_tokens(app: &App, common: &CommonParams, prompt: usize) -> usize {
    let room = app.model.context - prompt;
    common.max_tokens.or(common.usual_tokens).map_or(room, |most| most.min(room))
}

/// Maximum number of choices per request, over all of its prompts.
const MAX_ANSWERS: usize = 1024;

/// Submits the prompts to the engine, each for `n` choices. `told` requests log-probabilities, `apart` selects the output
/// parsing for a prompt.
pub(super) async fn submit(
    app: &Arc<App>,
    caller: &Caller,
    common: &CommonParams,
    prompts: &[Vec<u32>],
    n: usize,
    told: bool,
    apart: impl Fn() -> OutputParsing,
) -> ApiResult<Answers> {
    let worker = app.engine()?;
    heeded(app, common)?;
    let answers = n * prompts.len();
    if answers > MAX_ANSWERS {
        let why = format!(
            "{n} for each of {} prompts gives {answers} choices; the maximum per request is {MAX_ANSWERS}",
            prompts.len()
        );
        return Err(ApiError::param("n", why));
    }
    let (events, received) = mpsc::channel(MAX_PENDING_EVENTS.max(16 * answers));
    let (mut choices, mut submitted) = (Vec::new(), Vec::new());
    let eos: &[u32] = if common.ignore_eos { &[] } else { &app.model.eos };
    let stop_tokens: Arc<[u32]> = eos.iter().chain(&common.stop_tokens).copied().collect();
    let tenant = Arc::clone(&caller.holder.0);
    let tokenizer = app.model.tokenizer.as_ref();
    for prompt in prompts {
        let first = choices.len();
        for _ in 0..n {
            let speller = app.speller.clone().with_ids(common.tokens_as_ids);
            let stops = (common.stops.as_slice(), common.min_tokens);
            let choice = AnswerChoice::new(tokenizer, prompt, stops, apart(), speller)?;
            let tells = common.sampling.logprobs.is_some();
            choices.push(if tells { choice.with_logprobs(tokenizer, prompt, told)? } else { choice });
        }
        let job = Request {
            sampling: common.sampling.clone(),
            n,
            min_tokens: common.min_tokens,
            stop_tokens: Arc::clone(&stop_tokens),
            priority: common.priority,
            targets: common.targets,
            tenant: Arc::clone(&tenant),
            salt: app.salt(common.salt, &tenant),
            constraint: common.form.as_ref().map(|asked| constraint(&asked.form)),
            prompt_logprobs: told,
            ..Request::new(prompt.clone(), max_tokens(app, common, prompt.len()))
        };
        submitted.push(worker.submit(job, first, events.clone())?);
    }
    let mut tickets = Vec::with_capacity(submitted.len());
    for job in submitted {
        match job.accepted().await {
            Ok(ticket) => tickets.push(ticket),
            Err(error) => return Err(named(app, error, common).await),
        }
    }
    let prompt_tokens = prompts.iter().map(Vec::len).sum();
    let limit = app.options.request_timeout;
    let own_stops = common.stop_tokens.clone();
    let form = common.form.as_ref().map(|asked| asked.param.clone());
    let (id, counts) = (caller.id.clone(), (prompt_tokens, own_stops, form));
    Ok(Answers::new(id, choices, received, tickets, counts, limit, app.cutting()))
}

/// Rejects scheduling parameters that the policy does not use.
fn heeded(app: &App, common: &CommonParams) -> ApiResult<()> {
    let policy = app.options.policy;
    let refused = |param, name| {
        let why = format!("is not supported by this server; it needs `ridge serve --policy {name}`");
        Err(ApiError::unsupported(param, why))
    };
    if common.priority != 0 && policy != Policy::Priority {
        return refused("priority", "priority");
    }
    if common.targets != Targets::default() && policy != Policy::Deadline {
        return refused("targets", "deadline");
    }
    Ok(())
}

/// Replaces the parameter of an engine error by the client's name of the output constraint.
async fn named(app: &Arc<App>, error: ApiError, common: &CommonParams) -> ApiError {
    const FORMS: [&str; 6] = ["constraint", "json_schema", "json_object", "regex", "choice", "grammar"];
    match (&common.form, &error.param) {
        (Some(asked), Some(engines)) if FORMS.contains(&engines.as_str()) => {
            let own = asked.clone();
            // Parts of the schema are compiled.
            match app.blocking(move |_| Ok(own.explained())).await {
                Ok(Some(explained)) => explained,
                _ => error.of_param(&asked.param),
            }
        }
        _ => error,
    }
}

/// The fields common to all responses and chunks.
#[derive(Clone, Debug)]
pub(super) struct Head {
    pub(super) id: String,
    pub(super) object: &'static str,
    pub(super) created: u64,
    pub(super) model: String,
    /// Warnings, sent once: the parts of a schema that are not enforced.
    pub(super) warnings: Vec<String>,
    /// Names what the result of a request with a seed depends on besides its fields: the version, and the mode.
    pub(super) fingerprint: &'static str,
}

impl Head {
    pub(super) fn new(prefix: &str, object: &'static str, app: &App, common: &CommonParams) -> Self {
        let warnings = common.form.as_ref().map_or_else(Vec::new, |asked| asked.left_out.clone());
        let fingerprint = match app.options.deterministic {
            true => concat!("ridge-", env!("CARGO_PKG_VERSION"), "-deterministic"),
            false => concat!("ridge-", env!("CARGO_PKG_VERSION")),
        };
        let model = app.model.name.clone();
        Self { id: new_id(prefix), object, created: unix_now(), model, warnings, fingerprint }
    }

    pub(super) fn with(&mut self, choices: Vec<Value>) -> Map<String, Value> {
        let mut map = Map::new();
        map.insert("id".to_owned(), json!(self.id));
        map.insert("object".to_owned(), json!(self.object));
        map.insert("created".to_owned(), json!(self.created));
        map.insert("model".to_owned(), json!(self.model));
        map.insert("system_fingerprint".to_owned(), json!(self.fingerprint));
        map.insert("choices".to_owned(), Value::Array(choices));
        if !self.warnings.is_empty() {
            map.insert("warnings".to_owned(), json!(std::mem::take(&mut self.warnings)));
        }
        map
    }
}

pub(super) fn usage(usage: TokenUsage) -> Value {
    json!({
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": { "cached_tokens": usage.cached },
    })
}

/// Adds the finish reason, or null while the choice is running.
pub(super) fn with_ending(mut choice: Value, ending: Option<&Ending>) -> Value {
    choice["finish_reason"] = ending.map_or(Value::Null, |e| json!(e.reason));
    // vLLM's field, which distinguishes a stop string from the end of the text.
    if let Some(ending) = ending {
        choice["stop_reason"] = ending.by.clone();
    }
    choice
}

/// A token with its log-probability and bytes, in the format of chats.
pub(super) fn token_json(spelt: &Spelt, logprob: f32) -> Value {
    json!({ "token": spelt.text, "logprob": finite(logprob), "bytes": spelt.bytes })
}

/// JSON has no infinities; OpenAI uses -9999.
pub(super) fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { -9999.0 }
}

fn constraint(form: &Form) -> Constraint {
    match form {
        Form::Object => Constraint::JsonObject,
        Form::Schema(schema) => Constraint::JsonSchema(schema.to_string()),
        Form::Regex(regex) => Constraint::Regex(regex.clone()),
        Form::Choice(texts) => Constraint::Choice(texts.clone()),
        Form::Grammar(grammar) => Constraint::Lark(grammar.clone()),
    }
}

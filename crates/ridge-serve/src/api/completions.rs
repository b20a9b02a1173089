//! `/v1/completions`.

use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::http::{Response, StatusCode};
use serde_json::{Map, Value, json};

use super::caller::Caller;
use super::submit::{Head, finite, fitted, submit, usage, with_ending};
use crate::answers::{TokenUsage, WholeAnswer};
use crate::app::App;
use crate::choice::{AnswerPiece, OutputParsing, TokenInfo};
use crate::error::{ApiResult, json_response};
use crate::sse::{self, Chunks};
use crate::wire::completion::{self, CompletionRequest, PromptInput};
use crate::wire::sampling::check_model;

/// A request that is ready for the engine: its prompts' tokens, and their texts if `echo` is set.
struct PreparedCompletion {
    request: CompletionRequest,
    prompts: Vec<Vec<u32>>,
    echoes: Vec<String>,
}

fn prepare(app: &App, body: &[u8]) -> ApiResult<PreparedCompletion> {
    let request = completion::read(body)?;
    check_model(request.common.model.as_deref(), &app.model.name)?;
    let (mut prompts, mut echoes) = (Vec::new(), Vec::new());
    for (i, prompt) in request.prompts.iter().enumerate() {
        let param = if request.prompts.len() == 1 { "prompt".to_owned() } else { format!("prompt[{i}]") };
        let ids = match prompt {
            PromptInput::Text(text) => app.encode(&param, text, request.add_special_tokens)?,
            PromptInput::Ids(ids) => ids.clone(),
        };
        let ids = fitted(app, &request.common, &param, ids)?;
        if request.echo {
            echoes.push(match (prompt, &app.model.tokenizer) {
                (PromptInput::Text(text), _) => text.clone(),
                (PromptInput::Ids(_), Some(tokenizer)) => tokenizer.decode(&ids, true)?,
                (PromptInput::Ids(_), None) => ids.iter().map(|id| format!("{id} ")).collect(),
            });
        }
        prompts.push(ids);
    }
    Ok(PreparedCompletion { request, prompts, echoes })
}

pub(super) async fn completions(app: &Arc<App>, caller: &Caller, body: Bytes) -> ApiResult<Response<Body>> {
    app.engine()?;
    let PreparedCompletion { mut request, prompts, echoes } = app.blocking(move |app| prepare(app, &body)).await?;
    caller.log(app, &request.common, prompts.iter().map(Vec::len).sum());
    let (n, best_of) = (request.common.n, request.best_of);
    let tell = request.common.sampling.logprobs.is_some();
    if best_of > n {
        // Selecting the best needs log-probabilities.
        request.common.sampling.logprobs.get_or_insert(0);
    }
    let head = Head::new("cmpl-", "text_completion", app, &request.common);
    let told = request.echo && tell;
    let mut answers = submit(app, caller, &request.common, &prompts, best_of, told, OutputParsing::default).await?;
    let common = request.common;
    let mut writer = CompletionWriter {
        head,
        n,
        echoes,
        tell,
        ids: common.return_token_ids.then_some(prompts),
        include_usage: common.include_usage,
    };
    if common.stream {
        return Ok(sse::response(answers, writer));
    }
    let wholes = answers.whole().await?;
    let mut choices = Vec::with_capacity(wholes.len());
    for (i, mut wholes) in in_chunks(wholes, best_of).enumerate() {
        if best_of > n {
            wholes.sort_by(|a, b| b.mean_logprob().total_cmp(&a.mean_logprob()));
            wholes.truncate(n);
        }
        for (j, whole) in wholes.into_iter().enumerate() {
            let piece = AnswerPiece {
                text: whole.text,
                logprobs: whole.logprobs,
                ids: whole.ids,
                ending: whole.ending,
                ..AnswerPiece::default()
            };
            choices.push(writer.choice(i * n + j, piece, true));
        }
    }
    let mut response = writer.head.with(choices);
    response.insert("usage".to_owned(), usage(answers.usage()));
    Ok(json_response(StatusCode::OK, &Value::Object(response)))
}

/// The choices for each prompt.
fn in_chunks(wholes: Vec<WholeAnswer>, each: usize) -> impl Iterator<Item = Vec<WholeAnswer>> {
    let mut wholes = wholes.into_iter().peekable();
    std::iter::from_fn(move || wholes.peek().is_some().then(|| wholes.by_ref().take(each).collect()))
}

/// Serialises choices as completions, both complete ones and stream chunks.
struct CompletionWriter {
    head: Head,
    /// Choices per prompt.
    n: usize,
    /// The prompts, if `echo` is set.
    echoes: Vec<String>,
    /// Whether log-probabilities were requested.
    tell: bool,
    /// The tokens of the prompts, if `return_token_ids` is set.
    ids: Option<Vec<Vec<u32>>>,
    include_usage: bool,
}

impl CompletionWriter {
    /// Choice `index`, whose `piece` is its `first`.
    fn choice(&mut self, index: usize, piece: AnswerPiece, first: bool) -> Value {
        let echo = self.echoes.get(index / self.n).map_or("", String::as_str);
        let text = if first { format!("{echo}{}", piece.text) } else { piece.text };
        let told = self.tell && !piece.logprobs.is_empty();
        let logprobs = if told { logprobs(&piece.logprobs) } else { Value::Null };
        let mut choice = json!({ "index": index, "text": text, "logprobs": logprobs });
        if let Some(prompts) = &self.ids {
            if first {
                choice["prompt_token_ids"] = json!(prompts[index / self.n]);
            }
            choice["token_ids"] = json!(piece.ids);
        }
        with_ending(choice, piece.ending.as_ref())
    }

    fn chunk(&mut self, choices: Vec<Value>) -> Value {
        let mut map = self.head.with(choices);
        if self.include_usage {
            map.insert("usage".to_owned(), Value::Null);
        }
        Value::Object(map)
    }
}

fn logprobs(told: &[TokenInfo]) -> Value {
    let top = |t: &TokenInfo| {
        let Some(logprob) = t.logprob else { return Value::Null };
        let chosen = (t.token.text.clone(), json!(finite(logprob)));
        let top = t.top.iter().map(|(token, logprob)| (token.text.clone(), json!(finite(*logprob))));
        // The chosen token is among them, as with OpenAI.
        Value::Object(top.chain([chosen]).collect::<Map<String, Value>>())
    };
    json!({
        "tokens": told.iter().map(|t| &t.token.text).collect::<Vec<_>>(),
        "token_logprobs": told.iter().map(|t| t.logprob.map(finite)).collect::<Vec<_>>(),
        "top_logprobs": told.iter().map(top).collect::<Vec<_>>(),
        "text_offset": told.iter().map(|t| t.offset).collect::<Vec<_>>(),
    })
}

impl Chunks for CompletionWriter {
    fn first(&mut self) -> Vec<Value> {
        if self.echoes.is_empty() && self.ids.is_none() {
            return Vec::new();
        }
        let prompts = self.echoes.len().max(self.ids.as_ref().map_or(0, Vec::len));
        let choices = (0..prompts * self.n).map(|i| self.choice(i, AnswerPiece::default(), true)).collect::<Vec<_>>();
        choices.into_iter().map(|choice| self.chunk(vec![choice])).collect()
    }

    fn piece(&mut self, index: usize, piece: AnswerPiece, _: TokenUsage) -> Vec<Value> {
        let choice = self.choice(index, piece, false);
        vec![self.chunk(vec![choice])]
    }

    fn last(&mut self, all: TokenUsage) -> Vec<Value> {
        if !self.include_usage {
            return Vec::new();
        }
        let mut map = self.head.with(Vec::new());
        map.insert("usage".to_owned(), usage(all));
        vec![Value::Object(map)]
    }
}

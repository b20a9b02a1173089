//! `/v1/chat/completions`.

use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::http::{Response, StatusCode};
use ridge_text::ChatInput;
use ridge_text::template::Clock;
use serde_json::{Map, Value, json};

use super::caller::Caller;
use super::submit::{Head, fitted, submit, token_json, usage, with_ending};
use crate::answers::{TokenUsage, WholeAnswer};
use crate::app::{App, new_id};
use crate::choice::{AnswerPiece, OutputParsing, TokenInfo};
use crate::error::{ApiError, ApiResult, json_response};
use crate::reasoning::Reasoning;
use crate::sse::{self, Chunks};
use crate::tools::{Callable, ToolCallParser, ToolCallStyle, ToolOutputPart};
use crate::wire::chat::{self, ChatRequest, ToolChoice};
use crate::wire::messages::Tool;
use crate::wire::sampling::check_model;

/// A request that is ready for the engine.
struct PreparedChat {
    request: ChatRequest,
    prompt: Vec<u32>,
    /// The end of the prompt as text.
    end: String,
    calls: Option<Calls>,
    /// Whether the model emits reasoning.
    thinks: bool,
}

/// The parser of tool calls.
#[derive(Clone)]
struct Calls {
    style: ToolCallStyle,
    tools: Arc<[Callable]>,
    most: Option<usize>,
    /// Whether call ids have Mistral's nine-character form, which its template requires.
    short_ids: bool,
}

/// The rendered prompt, and the chat template's source.
pub(super) fn render(app: &App, request: &ChatRequest) -> ApiResult<(String, String)> {
    if app.model.templates.is_empty() {
        let message = format!(
            "{} has no chat template, as is usual for base models; use /v1/completions, or start the server with \
             --chat-template FILE",
            app.model.name
        );
        return Err(ApiError::not_found("no_chat_template", message));
    }
    let tools = !request.tools.is_empty() && request.choice != ToolChoice::None;
    let mut input = ChatInput::new(request.messages.clone(), Clock::now_utc());
    input.tools = tools.then(|| request.tools.iter().map(|t| t.data.clone()).collect());
    input.documents.clone_from(&request.documents);
    input.variables.clone_from(&request.variables);
    input.add_generation_prompt = request.add_generation_prompt;
    input.continue_final_message = request.continue_final_message.then(|| "content".to_owned());
    let source = app.model.templates.select(None, tools)?.source().to_owned();
    if let Some((name, _)) = request.variables.iter().find(|(name, _)| !source.contains(name.as_str())) {
        let param = if name == "reasoning_effort" { name.clone() } else { format!("chat_template_kwargs.{name}") };
        return Err(ApiError::unsupported(param, "is not a variable of the model's chat template"));
    }
    Ok((app.model.templates.render(None, &input)?.text, source))
}

fn prepare(app: &App, body: &[u8]) -> ApiResult<PreparedChat> {
    let request = chat::read(body)?;
    check_model(request.common.model.as_deref(), &app.model.name)?;
    let (text, source) = render(app, &request)?;
    let ids = app.encode("messages", &text, request.add_special_tokens)?;
    let prompt = fitted(app, &request.common, "messages", ids)?;
    let calls = calls(app, &request, &source)?;
    let forced = matches!(request.choice, ToolChoice::Required | ToolChoice::Named(_));
    let thinks = request.separate_reasoning && !forced && Reasoning::is_known_to(&source);
    let end = text.chars().rev().take(64).collect::<Vec<_>>().into_iter().rev().collect();
    Ok(PreparedChat { request, prompt, end, calls, thinks })
}

/// The parser of tool calls for a request with tools.
fn calls(app: &App, request: &ChatRequest, source: &str) -> ApiResult<Option<Calls>> {
    if request.tools.is_empty() {
        return Ok(None);
    }
    let named = app.options.tool_call_parser.as_deref().and_then(ToolCallStyle::named);
    let of_model = named.or_else(|| ToolCallStyle::of_template(source));
    let short_ids = of_model == Some(ToolCallStyle::Mistral);
    let style = match &request.choice {
        ToolChoice::None => return Ok(None),
        ToolChoice::Required => ToolCallStyle::Array,
        ToolChoice::Named(name) => ToolCallStyle::Arguments(name.clone()),
        ToolChoice::Auto => of_model.ok_or_else(|| {
            let why = "the notation of tool calls cannot be detected from the model's chat template; set tool_choice to none, required or a \
                       tool, or start the server with --tool-call-parser";
            ApiError::unsupported("tools", why)
        })?,
    };
    let callable = |tool: &Tool| Callable { name: tool.name.clone(), parameters: tool.parameters.clone() };
    let tools = request.tools.iter().map(callable).collect();
    let most = (!request.parallel_calls).then_some(1);
    Ok(Some(Calls { style, tools, most, short_ids }))
}

pub(super) async fn chat(app: &Arc<App>, caller: &Caller, body: Bytes) -> ApiResult<Response<Body>> {
    app.engine()?;
    let prepared = app.blocking(move |app| prepare(app, &body)).await?;
    let PreparedChat { request, prompt, end, calls, thinks } = prepared;
    let common = request.common;
    caller.log(app, &common, prompt.len());
    let apart = || OutputParsing {
        reasoning: thinks.then(|| Reasoning::after(&end)),
        parser: calls.as_ref().map(|c| ToolCallParser::new(c.style.clone(), Arc::clone(&c.tools))),
        most_calls: calls.as_ref().and_then(|c| c.most),
        // With a named tool_choice the finish reason is `stop`, as with OpenAI.
        calls_end: calls.as_ref().is_some_and(|c| !matches!(c.style, ToolCallStyle::Arguments(_))),
    };
    let prompts = [prompt];
    let mut answers = submit(app, caller, &common, &prompts, common.n, false, apart).await?;
    let [prompt] = prompts;
    let object = if common.stream { "chat.completion.chunk" } else { "chat.completion" };
    let mut writer = ChatWriter {
        head: Head::new("chatcmpl-", object, app, &common),
        n: common.n,
        tell: common.sampling.logprobs.is_some(),
        ids: common.return_token_ids.then_some(prompt),
        include_usage: common.include_usage,
        short_ids: calls.is_some_and(|c| c.short_ids),
    };
    if common.stream {
        return Ok(sse::response(answers, writer));
    }
    let wholes = answers.whole().await?;
    let choices = wholes.into_iter().enumerate().map(|(i, whole)| writer.whole(i, whole)).collect();
    let mut response = writer.head.with(choices);
    response.insert("usage".to_owned(), usage(answers.usage()));
    if let Some(prompt) = writer.ids.take() {
        response.insert("prompt_token_ids".to_owned(), json!(prompt));
    }
    Ok(json_response(StatusCode::OK, &Value::Object(response)))
}

/// Serialises choices as chat completions.
struct ChatWriter {
    head: Head,
    n: usize,
    tell: bool,
    /// The prompt's tokens, if `return_token_ids` is set.
    ids: Option<Vec<u32>>,
    include_usage: bool,
    short_ids: bool,
}

impl ChatWriter {
    fn call_id(&self) -> String {
        let id = new_id("");
        if self.short_ids { id[..9].to_owned() } else { format!("call_{id}") }
    }

    fn whole(&self, index: usize, whole: WholeAnswer) -> Value {
        let mut message = Map::new();
        message.insert("role".to_owned(), json!("assistant"));
        let content = if whole.text.is_empty() && !whole.calls.is_empty() { Value::Null } else { json!(whole.text) };
        message.insert("content".to_owned(), content);
        message.insert("refusal".to_owned(), Value::Null);
        if !whole.reasoning.is_empty() {
            message.insert("reasoning_content".to_owned(), json!(whole.reasoning));
        }
        if !whole.calls.is_empty() {
            let call = |(name, arguments): &(String, String)| {
                let function = json!({ "name": name, "arguments": arguments });
                json!({ "id": self.call_id(), "type": "function", "function": function })
            };
            message.insert("tool_calls".to_owned(), whole.calls.iter().map(call).collect());
        }
        let logprobs = if self.tell { logprobs(&whole.logprobs) } else { Value::Null };
        let mut choice = json!({ "index": index, "message": message, "logprobs": logprobs });
        if self.ids.is_some() {
            choice["token_ids"] = json!(whole.ids);
        }
        with_ending(choice, whole.ending.as_ref())
    }

    fn chunk(&mut self, choice: Value) -> Value {
        let mut map = self.head.with(vec![choice]);
        if self.include_usage {
            map.insert("usage".to_owned(), Value::Null);
        }
        Value::Object(map)
    }
}

fn logprobs(all: &[TokenInfo]) -> Value {
    let each = |t: &TokenInfo| {
        let mut entry = token_json(&t.token, t.logprob.unwrap_or_default());
        entry["top_logprobs"] = t.top.iter().map(|(token, logprob)| token_json(token, *logprob)).collect();
        entry
    };
    json!({ "content": all.iter().map(each).collect::<Vec<_>>(), "refusal": null })
}

impl Chunks for ChatWriter {
    fn first(&mut self) -> Vec<Value> {
        let n = self.n;
        let first = |index: usize| {
            let delta = json!({ "role": "assistant", "content": "" });
            let choice = json!({ "index": index, "delta": delta, "logprobs": null, "finish_reason": null });
            let mut chunk = self.chunk(choice);
            if let Some(ids) = self.ids.as_ref().filter(|_| index == 0) {
                chunk["prompt_token_ids"] = json!(ids);
            }
            chunk
        };
        (0..n).map(first).collect()
    }

    fn piece(&mut self, index: usize, piece: AnswerPiece, _: TokenUsage) -> Vec<Value> {
        let mut delta = Map::new();
        if !piece.reasoning.is_empty() {
            delta.insert("reasoning_content".to_owned(), json!(piece.reasoning));
        }
        if !piece.text.is_empty() {
            delta.insert("content".to_owned(), json!(piece.text));
        }
        let call = |part: &ToolOutputPart| match part {
            ToolOutputPart::Call { index, name } => {
                let function = json!({ "name": name, "arguments": "" });
                Some(json!({ "index": index, "id": self.call_id(), "type": "function", "function": function }))
            }
            ToolOutputPart::Arguments { index, json } => {
                Some(json!({ "index": index, "function": { "arguments": json } }))
            }
            ToolOutputPart::Text(_) => None,
        };
        let calls: Vec<Value> = piece.calls.iter().filter_map(call).collect();
        if !calls.is_empty() {
            delta.insert("tool_calls".to_owned(), Value::Array(calls));
        }
        let logprobs = if piece.logprobs.is_empty() { Value::Null } else { logprobs(&piece.logprobs) };
        let mut choice = json!({ "index": index, "delta": delta, "logprobs": logprobs });
        if self.ids.is_some() {
            choice["token_ids"] = json!(piece.ids);
        }
        vec![self.chunk(with_ending(choice, piece.ending.as_ref()))]
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

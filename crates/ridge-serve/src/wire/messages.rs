//! The messages and tools of a chat, checked and made ready for a template.

use ridge_text::template::Data;
use serde_json::{Map, Value, json};

use super::constraint::is_schema;
use super::fields::{RequestFields, shown, wrong};
use crate::error::{ApiError, ApiResult};

const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

/// The messages at `messages`, as templates read them: contents in parts become text, and the arguments of calls, which
/// clients send as text, become objects.
pub(crate) fn messages(list: Vec<Value>) -> ApiResult<Vec<Data>> {
    if list.is_empty() {
        return Err(ApiError::param("messages", "must have at least one message"));
    }
    list.into_iter().enumerate().map(|(i, value)| message(&format!("messages[{i}]"), value)).collect()
}

fn message(place: &str, value: Value) -> ApiResult<Data> {
    let mut fields = RequestFields::of(place, value)?;
    let role = fields.one_of("role", &ROLES)?;
    let role = fields.needed("role", role)?;
    let mut message = Map::new();
    message.insert("role".to_owned(), json!(role));
    let content = fields.take("content");
    let content = content.map(|content| text(&fields.name("content"), content)).transpose()?;
    let calls = if role == "assistant" { fields.list("tool_calls")? } else { None };
    if content.is_none() && calls.is_none() {
        return Err(ApiError::param(fields.name("content"), "is missing"));
    }
    if let Some(content) = content {
        message.insert("content".to_owned(), json!(content));
    } else {
        // Templates look at it where there are calls alone, too.
        message.insert("content".to_owned(), json!(""));
    }
    if let Some(name) = fields.text("name")? {
        message.insert("name".to_owned(), json!(name));
    }
    if role == "tool"
        && let Some(id) = fields.text("tool_call_id")?
    {
        message.insert("tool_call_id".to_owned(), json!(id));
    }
    if role == "assistant" {
        let reasoning = fields.text("reasoning_content")?.or(fields.text("reasoning")?);
        if let Some(reasoning) = reasoning {
            message.insert("reasoning_content".to_owned(), json!(reasoning));
        }
        // What clients give back of an answer as they had it.
        fields.take("refusal");
        fields.take("annotations");
        fields.only("audio", &[], "is not supported")?;
        fields.only("function_call", &[], "is not supported; use tool_calls")?;
        if let Some(calls) = calls.filter(|calls| !calls.is_empty()) {
            let place = fields.name("tool_calls");
            let calls = calls.into_iter().enumerate().map(|(i, c)| tool_call(&format!("{place}[{i}]"), c));
            message.insert("tool_calls".to_owned(), Value::Array(calls.collect::<ApiResult<_>>()?));
        }
    }
    fields.take("cache_control");
    fields.done()?;
    Data::from_value(place, &Value::Object(message)).map_err(|error| ApiError::param(place, error))
}

/// A text, or parts that are texts.
fn text(place: &str, content: Value) -> ApiResult<String> {
    let parts = match content {
        Value::String(text) => return Ok(text),
        Value::Array(parts) => parts,
        other => return Err(wrong(place, &other, "a string or a list of parts")),
    };
    let mut texts = Vec::with_capacity(parts.len());
    for (i, part) in parts.into_iter().enumerate() {
        let mut fields = RequestFields::of(&format!("{place}[{i}]"), part)?;
        let kind = fields.text("type")?;
        if let Some(kind) = kind.filter(|kind| kind != "text") {
            let why = format!("{} is not supported: this server accepts text only", shown(&json!(kind)));
            return Err(ApiError::unsupported(fields.name("type"), why));
        }
        let text = fields.text("text")?;
        texts.push(fields.needed("text", text)?);
        // Where a client would have its prefix cached: all prefixes are.
        fields.take("cache_control");
        fields.done()?;
    }
    Ok(texts.join("\n"))
}

fn tool_call(place: &str, value: Value) -> ApiResult<Value> {
    let mut fields = RequestFields::of(place, value)?;
    let id = fields.text("id")?;
    fields.one_of("type", &["function"])?;
    fields.take("index");
    let function = fields.object("function")?;
    let mut function = fields.needed("function", function)?;
    fields.done()?;
    let name = function.text("name")?;
    let name = function.needed("name", name)?;
    let arguments = function.take("arguments");
    let arguments = match arguments {
        None => json!({}),
        Some(Value::String(text)) if text.trim().is_empty() => json!({}),
        Some(Value::String(text)) => serde_json::from_str(&text).map_err(|error| {
            ApiError::param(function.name("arguments"), format!("the string is not valid JSON: {error}"))
        })?,
        Some(object @ Value::Object(_)) => object,
        Some(other) => return Err(wrong(&function.name("arguments"), &other, "JSON in a string")),
    };
    function.done()?;
    let mut call = json!({ "type": "function", "function": { "name": name, "arguments": arguments } });
    if let Some(id) = id {
        call["id"] = json!(id);
    }
    Ok(call)
}

/// A tool that the model may call.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tool {
    pub(crate) name: String,
    /// The schema of its arguments.
    pub(crate) parameters: Value,
    /// Must the whole schema be enforced, where calls are held to it?
    pub(crate) strict: bool,
    /// As the template is given it.
    pub(crate) data: Data,
}

/// Tools of one request at most.
const MAX_TOOLS: usize = 128;

pub(crate) fn tools(list: Vec<Value>) -> ApiResult<Vec<Tool>> {
    if list.len() > MAX_TOOLS {
        return Err(ApiError::param("tools", format!("has {} tools; the maximum is {MAX_TOOLS}", list.len())));
    }
    let mut tools: Vec<Tool> = Vec::with_capacity(list.len());
    for (i, value) in list.into_iter().enumerate() {
        let tool = tool(&format!("tools[{i}]"), value)?;
        if tools.iter().any(|t| t.name == tool.name) {
            return Err(ApiError::param(format!("tools[{i}].function.name"), "is also the name of another tool"));
        }
        tools.push(tool);
    }
    Ok(tools)
}

fn tool(place: &str, value: Value) -> ApiResult<Tool> {
    let mut fields = RequestFields::of(place, value)?;
    let kind = fields.one_of("type", &["function"])?;
    fields.needed("type", kind)?;
    let function = fields.object("function")?;
    let mut function = fields.needed("function", function)?;
    fields.done()?;
    let name = function.text("name")?;
    let name = function.needed("name", name)?;
    let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    if name.is_empty() || name.len() > 64 || !name.chars().all(good) {
        let what = "1 to 64 letters, digits, underscores, dots and dashes";
        return Err(wrong(&function.name("name"), &json!(name), what));
    }
    let description = function.text("description")?;
    let parameters = function.take("parameters").unwrap_or_else(|| json!({ "type": "object", "properties": {} }));
    is_schema(&function.name("parameters"), &parameters)?;
    let strict = function.bool("strict")?.unwrap_or(false);
    function.done()?;
    let mut described = Map::new();
    described.insert("name".to_owned(), json!(name));
    if let Some(description) = description {
        described.insert("description".to_owned(), json!(description));
    }
    described.insert("parameters".to_owned(), parameters.clone());
    let data = json!({ "type": "function", "function": described });
    let data = Data::from_value(place, &data).map_err(|error| ApiError::param(place, error))?;
    Ok(Tool { name, parameters, strict, data })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(value: Value) -> Vec<Value> {
        value.as_array().unwrap().clone()
    }

    #[test]
    fn parts_become_text_and_arguments_objects() {
        let read = messages(list(json!([
            { "role": "user", "content": [{ "type": "text", "text": "a" }, { "type": "text", "text": "b" }] },
            { "role": "assistant", "content": null, "tool_calls": [
                { "id": "1", "type": "function", "function": { "name": "f", "arguments": "{\"x\": 1}" } },
            ] },
            { "role": "tool", "tool_call_id": "1", "content": "7" },
        ])))
        .unwrap();
        assert_eq!(read[0].get("content").and_then(Data::as_str), Some("a\nb"));
        let Some(Data::List(calls)) = read[1].get("tool_calls") else { panic!("{read:?}") };
        let arguments = calls[0].get("function").and_then(|f| f.get("arguments")).unwrap();
        assert_eq!(arguments.get("x"), Some(&Data::Int(1)));
        assert_eq!(read[2].get("tool_call_id").and_then(Data::as_str), Some("1"));
    }

    #[test]
    fn answers_are_accepted_as_clients_store_them() {
        let answer = json!({
            "content": "Hi", "role": "assistant", "refusal": null, "annotations": [], "audio": null,
            "function_call": null, "tool_calls": null,
        });
        let user = json!({ "role": "user", "name": null, "tool_calls": null,
            "content": [{ "type": "text", "text": "a", "cache_control": { "type": "ephemeral" } }] });
        assert_eq!(messages(vec![user, answer]).unwrap().len(), 2);
    }

    #[test]
    fn mistakes_in_messages_are_named() {
        for (value, param) in [
            (json!([]), "messages"),
            (json!([3]), "messages[0]"),
            (json!([{}]), "messages[0].role"),
            (json!([{ "role": "boss", "content": "" }]), "messages[0].role"),
            (json!([{ "role": "user" }]), "messages[0].content"),
            (json!([{ "role": "user", "content": 3 }]), "messages[0].content"),
            (json!([{ "role": "user", "content": [{ "type": "image_url" }] }]), "messages[0].content[0].type"),
            (json!([{ "role": "user", "content": [{ "type": "text" }] }]), "messages[0].content[0].text"),
            (json!([{ "role": "user", "content": "", "tool_calls": [] }]), "messages[0].tool_calls"),
            (
                json!([{ "role": "assistant", "tool_calls": [{ "function": { "name": "f", "arguments": "{" } }] }]),
                "messages[0].tool_calls[0].function.arguments",
            ),
        ] {
            assert_eq!(messages(list(value.clone())).unwrap_err().param.as_deref(), Some(param), "{value}");
        }
    }

    #[test]
    fn mistakes_in_tools_are_named() {
        let named = |name: &str| json!({ "type": "function", "function": { "name": name } });
        assert_eq!(tools(vec![named("f")]).unwrap()[0].name, "f");
        for (value, param) in [
            (json!([{}]), "tools[0].type"),
            (json!([{ "type": "function" }]), "tools[0].function"),
            (json!([{ "type": "function", "function": {} }]), "tools[0].function.name"),
            (json!([named("a b")]), "tools[0].function.name"),
            (json!([named("a"), named("a")]), "tools[1].function.name"),
            (
                json!([{ "type": "function", "function": { "name": "f", "parameters": 3 } }]),
                "tools[0].function.parameters",
            ),
        ] {
            assert_eq!(tools(list(value.clone())).unwrap_err().param.as_deref(), Some(param), "{value}");
        }
    }
}

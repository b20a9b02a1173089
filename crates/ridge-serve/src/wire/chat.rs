//! A request of `/v1/chat/completions`.

use ridge_text::template::Data;
use serde_json::{Map, Value, json};

use super::constraint::{Asked, Form, checked};
use super::fields::{RequestFields, shown, wrong};
use super::messages::{self, Tool};
use super::sampling::{self, CommonParams, MAX_LOGPROBS};
use super::schema::Enforceable;
use crate::error::{ApiError, ApiResult};

/// Whether an answer may, or must, call tools.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ToolChoice {
    None,
    Auto,
    Required,
    Named(String),
}

/// A request of `/v1/chat/completions`.
#[derive(Clone, Debug)]
pub(crate) struct ChatRequest {
    pub(crate) common: CommonParams,
    pub(crate) messages: Vec<Data>,
    pub(crate) tools: Vec<Tool>,
    pub(crate) choice: ToolChoice,
    /// May an answer call more than one tool?
    pub(crate) parallel_calls: bool,
    pub(crate) documents: Option<Vec<Data>>,
    /// More variables for the template.
    pub(crate) variables: Vec<(String, Data)>,
    pub(crate) add_generation_prompt: bool,
    pub(crate) continue_final_message: bool,
    pub(crate) add_special_tokens: bool,
    /// Tell reasoning apart from the answer, where the model thinks aloud.
    pub(crate) separate_reasoning: bool,
}

pub(crate) fn read(body: &[u8]) -> ApiResult<ChatRequest> {
    of_fields(RequestFields::body(body)?)
}

/// The request that an object makes.
pub(crate) fn of_fields(mut fields: RequestFields) -> ApiResult<ChatRequest> {
    let mut common = sampling::read(&mut fields, (&["max_completion_tokens", "max_tokens"], 1))?;
    let told = fields.bool("logprobs")?.unwrap_or(false);
    let top = fields.whole("top_logprobs", 0, MAX_LOGPROBS)?;
    if top.is_some_and(|n| n > 0) && !told {
        return Err(ApiError::param("top_logprobs", "needs logprobs to be true"));
    }
    common.sampling.logprobs = told.then(|| top.unwrap_or(0) as u32);
    let request = ChatRequest {
        messages: conversation(&mut fields)?,
        tools: messages::tools(fields.list("tools")?.unwrap_or_default())?,
        choice: ToolChoice::Auto,
        parallel_calls: fields.bool("parallel_tool_calls")?.unwrap_or(true),
        documents: documents(&mut fields)?,
        variables: variables(&mut fields)?,
        add_generation_prompt: fields.bool("add_generation_prompt")?.unwrap_or(true),
        continue_final_message: fields.bool("continue_final_message")?.unwrap_or(false),
        add_special_tokens: fields.bool("add_special_tokens")?.unwrap_or(false),
        separate_reasoning: fields.bool("separate_reasoning")?.unwrap_or(true),
        common,
    };
    let choice = tool_choice(&mut fields, &request.tools)?;
    fields.only("modalities", &[json!(["text"])], "is not supported: output is text; give [\"text\"]")?;
    fields.done()?;
    request.with_choice(choice)
}

impl ChatRequest {
    /// A call that must be made fixes the form of the answer.
    fn with_choice(mut self, choice: ToolChoice) -> ApiResult<Self> {
        if self.continue_final_message && self.add_generation_prompt {
            let why = "cannot be combined with add_generation_prompt, which defaults to true; set it to false";
            return Err(ApiError::param("continue_final_message", why));
        }
        let is_called = |tool: &Tool| match &choice {
            ToolChoice::None | ToolChoice::Auto => false,
            ToolChoice::Required => true,
            ToolChoice::Named(name) => tool.name == *name,
        };
        let (mut called, mut sent) = (Vec::new(), Vec::new());
        for (i, tool) in self.tools.iter().enumerate().filter(|(_, tool)| is_called(tool)) {
            let place = format!("tools[{i}].function.parameters");
            called.push((tool.name.as_str(), checked(&place, tool.parameters.clone(), tool.strict)?));
            sent.push((place, tool.parameters.clone()));
        }
        if !called.is_empty() {
            if let Some(asked) = &self.common.form {
                return Err(ApiError::param(
                    asked.param.as_str(),
                    "cannot be combined with a tool_choice that requires a tool call",
                ));
            }
            let left_out = called.iter().flat_map(|(_, parameters)| parameters.left_out.clone()).collect();
            let schema = match choice {
                ToolChoice::Named(_) => called.remove(0).1.schema,
                _ => one_or_more_of(&called, self.parallel_calls),
            };
            self.common.form = Some(Asked { param: "tools".to_owned(), form: Form::Schema(schema), left_out, sent });
        }
        self.choice = choice;
        Ok(self)
    }
}

/// The schema of a list of calls.
fn one_or_more_of(tools: &[(&str, Enforceable)], several: bool) -> Value {
    // References within a tool's schema count from its own root, which moves.
    let place = |tool: usize| format!("#/$defs/{tool}");
    let call = |(i, (name, _)): (usize, &(&str, Enforceable))| {
        json!({
            "type": "object",
            "properties": { "name": { "const": name }, "parameters": { "$ref": place(i) } },
            "required": ["name", "parameters"],
            "additionalProperties": false,
        })
    };
    let calls: Vec<Value> = tools.iter().enumerate().map(call).collect();
    let definition = |(i, (_, parameters)): (usize, &(&str, Enforceable))| {
        (i.to_string(), moved(parameters.schema.clone(), &place(i)))
    };
    let definitions: Map<String, Value> = tools.iter().enumerate().map(definition).collect();
    let mut schema = json!({ "type": "array", "minItems": 1, "items": { "anyOf": calls }, "$defs": definitions });
    if !several {
        schema["maxItems"] = json!(1);
    }
    schema
}

/// A schema that is no longer a document of its own but lies at `place` of one: its references follow.
fn moved(schema: Value, place: &str) -> Value {
    /// Keys under which there are values and no schemas.
    const VALUES: [&str; 4] = ["const", "default", "enum", "examples"];
    match schema {
        Value::Object(map) => {
            let each = |(key, value): (String, Value)| match &value {
                Value::String(to) if key == "$ref" => {
                    let to = to.strip_prefix('#').map(|within| json!(format!("{place}{within}")));
                    (key, to.unwrap_or(value))
                }
                _ if VALUES.contains(&key.as_str()) => (key, value),
                _ => (key, moved(value, place)),
            };
            Value::Object(map.into_iter().map(each).collect())
        }
        Value::Array(list) => Value::Array(list.into_iter().map(|value| moved(value, place)).collect()),
        other => other,
    }
}

fn conversation(fields: &mut RequestFields) -> ApiResult<Vec<Data>> {
    let list = fields.list("messages")?;
    messages::messages(fields.needed("messages", list)?)
}

fn documents(fields: &mut RequestFields) -> ApiResult<Option<Vec<Data>>> {
    let Some(list) = fields.list("documents")? else { return Ok(None) };
    let document = |(i, value): (usize, &Value)| {
        let place = format!("documents[{i}]");
        match value {
            Value::Object(_) => Data::from_value(&place, value).map_err(|error| ApiError::param(&place, error)),
            other => Err(wrong(&place, other, "an object")),
        }
    };
    list.iter().enumerate().map(document).collect::<ApiResult<_>>().map(Some)
}

/// `chat_template_kwargs`, and OpenAI's `reasoning_effort` and `verbosity`, which templates know as variables.
fn variables(fields: &mut RequestFields) -> ApiResult<Vec<(String, Data)>> {
    const TAKEN: [&str; 4] = ["messages", "tools", "documents", "add_generation_prompt"];
    let mut variables = Vec::new();
    for (name, value) in
        [("reasoning_effort", fields.text("reasoning_effort")?), ("verbosity", fields.text("verbosity")?)]
    {
        variables.extend(value.map(|value| (name.to_owned(), Data::Text(value))));
    }
    let Some(value) = fields.take("chat_template_kwargs") else { return Ok(variables) };
    let Value::Object(map) = value else { return Err(wrong("chat_template_kwargs", &value, "an object")) };
    for (name, value) in map {
        let place = format!("chat_template_kwargs.{}", name.chars().take(64).collect::<String>());
        if TAKEN.contains(&name.as_str()) {
            return Err(ApiError::param(place, "is a separate request parameter; set it there"));
        }
        let data = Data::from_value(&place, &value).map_err(|error| ApiError::param(&place, error))?;
        variables.push((name, data));
    }
    Ok(variables)
}

fn tool_choice(fields: &mut RequestFields, tools: &[Tool]) -> ApiResult<ToolChoice> {
    let Some(value) = fields.take("tool_choice") else { return Ok(ToolChoice::Auto) };
    let choice = match &value {
        Value::String(text) => match text.as_str() {
            "none" => ToolChoice::None,
            "auto" => ToolChoice::Auto,
            "required" => ToolChoice::Required,
            _ => return Err(wrong("tool_choice", &value, "none, auto, required or an object that names a function")),
        },
        Value::Object(_) => {
            let mut choice = RequestFields::of("tool_choice", value)?;
            let kind = choice.one_of("type", &["function"])?;
            choice.needed("type", kind)?;
            let function = choice.object("function")?;
            let mut function = choice.needed("function", function)?;
            let name = function.text("name")?;
            let name = function.needed("name", name)?;
            function.done()?;
            choice.done()?;
            if !tools.iter().any(|tool| tool.name == name) {
                let why = format!("{} is not the name of one of the tools", shown(&json!(name)));
                return Err(ApiError::param("tool_choice.function.name", why));
            }
            ToolChoice::Named(name)
        }
        other => return Err(wrong("tool_choice", other, "a string or an object")),
    };
    if tools.is_empty() && choice == ToolChoice::Required {
        return Err(ApiError::param("tool_choice", "requires a tool call, but there are no tools"));
    }
    Ok(choice)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chat(more: &str) -> ApiResult<ChatRequest> {
        read(format!(r#"{{"messages": [{{"role": "user", "content": "x"}}]{more}}}"#).as_bytes())
    }

    const TOOLS: &str = r#", "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}]"#;

    #[test]
    fn tools_that_must_be_called_fix_the_form() {
        assert_eq!(chat(TOOLS).unwrap().choice, ToolChoice::Auto);
        let required = chat(&format!(r#"{TOOLS}, "tool_choice": "required""#)).unwrap();
        assert!(
            matches!(required.common.form, Some(Asked { form: Form::Schema(schema), .. }) if schema["minItems"] == 1)
        );
        let named = r#", "tool_choice": {"type": "function", "function": {"name": "f"}}"#;
        let named = chat(&format!("{TOOLS}{named}")).unwrap();
        assert_eq!(named.choice, ToolChoice::Named("f".into()));
        assert_eq!(named.common.form.unwrap().form, Form::Schema(json!({ "a": 1 })));
    }

    #[test]
    fn references_follow_a_schema_that_moves() {
        let schema = json!({
            "$defs": { "A": { "enum": [{ "$ref": "#/no" }] } },
            "properties": { "a": { "$ref": "#/$defs/A" }, "me": { "$ref": "#" }, "$ref": { "type": "string" } },
        });
        let moved = moved(schema, "#/$defs/1");
        assert_eq!(moved["properties"]["a"]["$ref"], "#/$defs/1/$defs/A");
        assert_eq!(moved["properties"]["me"]["$ref"], "#/$defs/1");
        assert_eq!(moved["properties"]["$ref"]["type"], "string");
        assert_eq!(moved["$defs"]["A"]["enum"][0]["$ref"], "#/no");
    }

    #[test]
    fn mistakes_are_named() {
        assert!(chat("").is_ok());
        for (more, param) in [
            (r#", "tool_choice": "required""#, "tool_choice"),
            (r#", "tool_choice": "maybe""#, "tool_choice"),
            (r#", "tool_choice": {"type": "function", "function": {"name": "g"}}"#, "tool_choice.function.name"),
            (r#", "top_logprobs": 2"#, "top_logprobs"),
            (r#", "logprobs": 2"#, "logprobs"),
            (r#", "logprobs": true, "top_logprobs": 21"#, "top_logprobs"),
            (r#", "continue_final_message": true"#, "continue_final_message"),
            (r#", "chat_template_kwargs": {"messages": []}"#, "chat_template_kwargs.messages"),
            (r#", "documents": [3]"#, "documents[0]"),
            (r#", "modalities": ["audio"]"#, "modalities"),
            (r#", "best_of": 2"#, "best_of"),
            (r#", "echo": true"#, "echo"),
            (r#", "prompt": "x""#, "prompt"),
        ] {
            assert_eq!(chat(more).unwrap_err().param.as_deref(), Some(param), "{more}");
        }
        assert_eq!(read(b"{}").unwrap_err().param.as_deref(), Some("messages"));
    }

    /// Where no call must be made, nothing is held to a tool's schema, and none is refused for it.
    #[test]
    fn schemas_of_tools_are_enforced_where_they_must_be_called() {
        let ask = |choice: &str| {
            let parameters = json!({ "type": "array", "uniqueItems": true });
            let function = json!({ "name": "f", "strict": true, "parameters": parameters });
            let tools = json!([{ "type": "function", "function": function }]);
            let messages = json!([{ "role": "user", "content": "x" }]);
            read(json!({ "messages": messages, "tools": tools, "tool_choice": choice }).to_string().as_bytes())
        };
        let auto = ask("auto").unwrap();
        assert!(auto.common.form.is_none() && auto.tools[0].parameters["uniqueItems"] == true);
        assert_eq!(ask("required").unwrap_err().param.as_deref(), Some("tools[0].function.parameters"));
    }
}

//! What an answer is held to: OpenAI's `response_format`, vLLM's `guided_*` and `structured_outputs`.

use serde_json::{Value, json};

use super::fields::{RequestFields, shown, wrong};
use crate::error::{ApiError, ApiResult};

/// The form that an answer must have.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Form {
    /// Any JSON object.
    Object,
    /// JSON of this schema.
    Schema(Value),
    /// What this regular expression matches.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// What this Lark grammar derives.
    Grammar(String),
}

/// Bytes of a form at most: what is made of it takes much more.
const LONGEST: usize = 64 << 10;

impl Form {
    fn bytes(&self) -> usize {
        match self {
            Self::Object => 0,
            Self::Schema(schema) => schema.to_string().len(),
            Self::Regex(text) | Self::Grammar(text) => text.len(),
            Self::Choice(texts) => texts.iter().map(String::len).sum(),
        }
    }
}

/// The form asked for and the parameter that asked for it.
pub(crate) type Asked = Option<(String, Form)>;

/// Reads the parameters that ask for a form; at most one may.
pub(crate) fn read(fields: &mut RequestFields) -> ApiResult<Asked> {
    let mut asked = Vec::new();
    if let Some(format) = fields.object("response_format")? {
        asked.extend(response_format(format)?.map(|form| ("response_format".to_owned(), form)));
    }
    guided(fields, ["guided_json", "guided_regex", "guided_choice", "guided_grammar"], &mut asked)?;
    if let Some(mut inner) = fields.object("structured_outputs")? {
        guided(&mut inner, ["json", "regex", "choice", "grammar"], &mut asked)?;
        if inner.bool("json_object")? == Some(true) {
            asked.push((inner.name("json_object"), Form::Object));
        }
        inner.done()?;
    }
    for (name, form) in &asked {
        let bytes = form.bytes();
        if bytes > LONGEST {
            return Err(ApiError::param(name.as_str(), format!("has {bytes} bytes, and may have {LONGEST}")));
        }
    }
    match asked.as_slice() {
        [(first, _), (second, _), ..] => {
            Err(ApiError::param(second.as_str(), format!("excludes {first}: an answer has one form")))
        }
        _ => Ok(asked.pop()),
    }
}

fn response_format(mut format: RequestFields) -> ApiResult<Option<Form>> {
    let kind = format.one_of("type", &["text", "json_object", "json_schema"])?;
    let form = match format.needed("type", kind)? {
        "text" => None,
        "json_object" => Some(Form::Object),
        _ => {
            let described = format.object("json_schema")?;
            let mut described = format.needed("json_schema", described)?;
            described.text("name")?;
            described.text("description")?;
            // Answers are always held to the schema, to the letter.
            described.bool("strict")?;
            let schema = described.take("schema").unwrap_or_else(|| json!({ "type": "object" }));
            let schema = is_schema(&described.name("schema"), schema)?;
            described.done()?;
            Some(Form::Schema(schema))
        }
    };
    format.done()?;
    Ok(form)
}

fn guided(fields: &mut RequestFields, names: [&'static str; 4], asked: &mut Vec<(String, Form)>) -> ApiResult<()> {
    let [json, regex, choice, grammar] = names;
    if let Some(value) = fields.take(json) {
        let name = fields.name(json);
        // vLLM takes a schema in a string, too.
        let schema = match value {
            Value::String(text) => serde_json::from_str(&text)
                .map_err(|error| ApiError::param(&name, format!("the string is not valid JSON: {error}")))?,
            other => other,
        };
        asked.push((name.clone(), Form::Schema(is_schema(&name, schema)?)));
    }
    if let Some(text) = fields.text(regex)? {
        asked.push((fields.name(regex), Form::Regex(text)));
    }
    if let Some(list) = fields.list(choice)? {
        let name = fields.name(choice);
        let text = |(i, v): (usize, &Value)| match v.as_str() {
            Some(text) if !text.is_empty() => Ok(text.to_owned()),
            _ => Err(wrong(&format!("{name}[{i}]"), v, "a text that is not empty")),
        };
        let texts = list.iter().enumerate().map(text).collect::<ApiResult<Vec<_>>>()?;
        if texts.is_empty() {
            return Err(ApiError::param(name, "must have at least one text"));
        }
        asked.push((name, Form::Choice(texts)));
    }
    if let Some(text) = fields.text(grammar)? {
        asked.push((fields.name(grammar), Form::Grammar(text)));
    }
    Ok(())
}

/// A schema is an object or a truth value; what it says is for the engine to read. Settings of the grammar library are
/// the server's: they are removed.
pub(crate) fn is_schema(place: &str, mut value: Value) -> ApiResult<Value> {
    fn remove_settings(value: &mut Value) {
        match value {
            Value::Object(map) => {
                map.shift_remove("x-guidance");
                map.values_mut().for_each(remove_settings);
            }
            Value::Array(list) => list.iter_mut().for_each(remove_settings),
            _ => {}
        }
    }
    remove_settings(&mut value);
    match value {
        Value::Object(_) | Value::Bool(_) => Ok(value),
        other => Err(ApiError::param(place, format!("must be a JSON schema, and is {}", shown(&other)))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(text: &str) -> ApiResult<Asked> {
        let mut fields = RequestFields::body(text.as_bytes())?;
        let asked = read(&mut fields)?;
        fields.done()?;
        Ok(asked)
    }

    #[test]
    fn forms_are_read() {
        for (text, form) in [
            (r#"{"response_format": {"type": "text"}}"#, None),
            (r#"{"response_format": {"type": "json_object"}}"#, Some(Form::Object)),
            (
                r#"{"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"a": 1}, "strict": true}}}"#,
                Some(Form::Schema(json!({ "a": 1 }))),
            ),
            (r#"{"guided_json": "{\"a\": 1}"}"#, Some(Form::Schema(json!({ "a": 1 })))),
            (r#"{"guided_regex": "a+"}"#, Some(Form::Regex("a+".into()))),
            (r#"{"structured_outputs": {"choice": ["a"]}}"#, Some(Form::Choice(vec!["a".into()]))),
            (r#"{"guided_grammar": "start: \"a\""}"#, Some(Form::Grammar("start: \"a\"".into()))),
        ] {
            assert_eq!(asked(text).unwrap().map(|(_, form)| form), form, "{text}");
        }
    }

    #[test]
    fn settings_of_the_grammar_library_are_the_servers() {
        let text = r#"{"guided_json": {"x-guidance": {"lenient": true}, "properties": {"a": {"x-guidance": {}}}}}"#;
        assert_eq!(
            asked(text).unwrap().map(|(_, form)| form),
            Some(Form::Schema(json!({ "properties": { "a": {} } })))
        );
    }

    #[test]
    fn mistakes_are_named() {
        for (text, param) in [
            (r#"{"response_format": "json"}"#, "response_format"),
            (r#"{"response_format": {"type": "xml"}}"#, "response_format.type"),
            (r#"{"response_format": {"type": "json_schema"}}"#, "response_format.json_schema"),
            (r#"{"response_format": {"type": "json_object", "schema": {}}}"#, "response_format.schema"),
            (r#"{"guided_json": 3}"#, "guided_json"),
            (r#"{"guided_json": "{"}"#, "guided_json"),
            (r#"{"guided_choice": []}"#, "guided_choice"),
            (r#"{"guided_choice": ["a", ""]}"#, "guided_choice[1]"),
            (r#"{"guided_regex": "a", "guided_choice": ["a"]}"#, "guided_choice"),
        ] {
            assert_eq!(asked(text).unwrap_err().param.as_deref(), Some(param), "{text}");
        }
    }
}

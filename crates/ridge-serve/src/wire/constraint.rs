//! Output constraints: OpenAI's `response_format`, vLLM's `guided_*` and `structured_outputs`.

use serde_json::{Value, json};

use super::fields::{RequestFields, shown, wrong};
use super::pattern::open_escape;
use super::schema::{Enforceable, enforceable};
use super::schema_errors::explain;
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

/// The form asked for.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Asked {
    /// The parameter that asked for it.
    pub(crate) param: String,
    pub(crate) form: Form,
    /// What of it is not enforced.
    pub(crate) left_out: Vec<String>,
    /// The schemas that it is made of, as they were sent, each with its place in the request.
    pub(crate) sent: Vec<(String, Value)>,
}

impl Asked {
    fn new(param: String, form: Form) -> Self {
        Self { param, form, left_out: Vec::new(), sent: Vec::new() }
    }

    /// JSON of a schema, to the letter if that is asked for.
    fn of_schema(param: String, place: &str, schema: Value, strict: bool) -> ApiResult<Self> {
        let sent = vec![(place.to_owned(), schema.clone())];
        let Enforceable { schema, left_out, .. } = checked(place, schema, strict)?;
        Ok(Self { param, form: Form::Schema(schema), left_out, sent })
    }

    /// Why the engine refuses the schema, with the place of what is wrong; `None` if nothing is by itself.
    pub(crate) fn explained(&self) -> Option<ApiError> {
        let (place, why) = self.sent.iter().find_map(|(place, sent)| Some((place, explain(sent)?)))?;
        Some(ApiError { param: Some(self.param.clone()), ..ApiError::bad(format!("{place}{why}")) })
    }
}

/// Reads the parameters that ask for a form; at most one may.
pub(crate) fn read(fields: &mut RequestFields) -> ApiResult<Option<Asked>> {
    let mut asked = Vec::new();
    if let Some(format) = fields.object("response_format")? {
        asked.extend(response_format(format)?);
    }
    guided(fields, ["guided_json", "guided_regex", "guided_choice", "guided_grammar"], &mut asked)?;
    if let Some(mut inner) = fields.object("structured_outputs")? {
        guided(&mut inner, ["json", "regex", "choice", "grammar"], &mut asked)?;
        if inner.bool("json_object")? == Some(true) {
            asked.push(Asked::new(inner.name("json_object"), Form::Object));
        }
        inner.done()?;
    }
    for Asked { param, form, .. } in &asked {
        let bytes = form.bytes();
        if bytes > LONGEST {
            return Err(ApiError::param(param.as_str(), format!("has {bytes} bytes; the maximum is {LONGEST}")));
        }
    }
    match asked.as_slice() {
        [Asked { param: first, .. }, Asked { param: second, .. }, ..] => Err(ApiError::param(
            second.as_str(),
            format!("cannot be combined with {first}: only one output constraint is allowed"),
        )),
        _ => Ok(asked.pop()),
    }
}

fn response_format(mut format: RequestFields) -> ApiResult<Option<Asked>> {
    let param = || "response_format".to_owned();
    let kind = format.one_of("type", &["text", "json_object", "json_schema"])?;
    let form = match format.needed("type", kind)? {
        "text" => None,
        "json_object" => Some(Asked::new(param(), Form::Object)),
        _ => {
            let described = format.object("json_schema")?;
            let mut described = format.needed("json_schema", described)?;
            described.text("name")?;
            described.text("description")?;
            let strict = described.bool("strict")?.unwrap_or(false);
            let schema = described.take("schema").unwrap_or_else(|| json!({ "type": "object" }));
            let asked = Asked::of_schema(param(), &described.name("schema"), schema, strict)?;
            described.done()?;
            Some(asked)
        }
    };
    format.done()?;
    Ok(form)
}

fn guided(fields: &mut RequestFields, names: [&'static str; 4], asked: &mut Vec<Asked>) -> ApiResult<()> {
    let [json, regex, choice, grammar] = names;
    if let Some(value) = fields.take(json) {
        let name = fields.name(json);
        // vLLM takes a schema in a string, too.
        let schema = match value {
            Value::String(text) => serde_json::from_str(&text)
                .map_err(|error| ApiError::param(&name, format!("the string is not valid JSON: {error}")))?,
            other => other,
        };
        asked.push(Asked::of_schema(name.clone(), &name, schema, false)?);
    }
    if let Some(text) = fields.text(regex)? {
        if let Some(why) = open_escape(&text) {
            let why = format!("{} is not a regular expression: {why}", json!(text));
            return Err(ApiError::param(fields.name(regex), why));
        }
        asked.push(Asked::new(fields.name(regex), Form::Regex(text)));
    }
    if let Some(list) = fields.list(choice)? {
        let name = fields.name(choice);
        let text = |(i, v): (usize, &Value)| match v.as_str() {
            Some(text) if !text.is_empty() => Ok(text.to_owned()),
            _ => Err(wrong(&format!("{name}[{i}]"), v, "a non-empty string")),
        };
        let texts = list.iter().enumerate().map(text).collect::<ApiResult<Vec<_>>>()?;
        if texts.is_empty() {
            return Err(ApiError::param(name, "must have at least one string"));
        }
        asked.push(Asked::new(name, Form::Choice(texts)));
    }
    if let Some(text) = fields.text(grammar)? {
        asked.push(Asked::new(fields.name(grammar), Form::Grammar(text)));
    }
    Ok(())
}

/// A schema is an object or a truth value.
pub(super) fn is_schema(place: &str, value: &Value) -> ApiResult<()> {
    match value {
        Value::Object(_) | Value::Bool(_) => Ok(()),
        other => Err(ApiError::param(place, format!("must be a JSON schema, but is {}", shown(other)))),
    }
}

/// The schema at `place`, as it can be enforced; with `strict` it must be, wholly.
pub(super) fn checked(place: &str, schema: Value, strict: bool) -> ApiResult<Enforceable> {
    is_schema(place, &schema)?;
    let bytes = schema.to_string().len();
    if bytes > LONGEST {
        return Err(ApiError::param(place, format!("has {bytes} bytes; the maximum is {LONGEST}")));
    }
    let Enforceable { schema, left_out, mistakes } = enforceable(schema);
    if let Some(first) = mistakes.first() {
        return Err(ApiError { param: Some(place.to_owned()), ..ApiError::bad(format!("{place}{first}")) });
    }
    let left_out: Vec<String> = left_out.into_iter().map(|each| format!("{place}{each}")).collect();
    if strict && !left_out.is_empty() {
        let why = format!(
            "cannot be enforced completely, as strict requires: {}; without strict, the other parts are enforced",
            left_out.join("; ")
        );
        return Err(ApiError::param(place, why));
    }
    Ok(Enforceable { schema, left_out, mistakes })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(text: &str) -> ApiResult<Option<Asked>> {
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
            assert_eq!(asked(text).unwrap().map(|asked| asked.form), form, "{text}");
        }
    }

    #[test]
    fn settings_of_the_grammar_library_are_the_servers() {
        let text = r#"{"guided_json": {"x-guidance": {"lenient": true}, "properties": {"a": {"x-guidance": {}}}}}"#;
        assert_eq!(
            asked(text).unwrap().map(|asked| asked.form),
            Some(Form::Schema(json!({ "properties": { "a": {} }, "additionalProperties": false })))
        );
    }

    #[test]
    fn what_is_not_enforced_is_told_or_refused() {
        let asked = |strict: bool| {
            let schema = json!({ "type": "array", "uniqueItems": true });
            let format = json!({ "type": "json_schema", "json_schema": { "schema": schema, "strict": strict } });
            asked(&json!({ "response_format": format }).to_string())
        };
        let told = "response_format.json_schema.schema/uniqueItems: is not enforced";
        assert_eq!(asked(false).unwrap().unwrap().left_out, [told]);
        let refused = asked(true).unwrap_err();
        assert_eq!(refused.param.as_deref(), Some("response_format.json_schema.schema"));
        assert!(refused.message.contains(told), "{}", refused.message);
    }

    #[test]
    fn a_mistaken_pattern_is_refused_where_it_stands() {
        let of = |pattern: &str| {
            let schema = json!({ "type": "object", "properties": { "a": { "type": "string", "pattern": pattern } } });
            asked(&json!({ "guided_json": schema }).to_string())
        };
        let refused = of("a(b").unwrap_err();
        assert_eq!(refused.param.as_deref(), Some("guided_json"));
        let says =
            r#"guided_json/properties/a/pattern: "a(b" is not a regular expression: the ( at byte 1 is not closed"#;
        assert_eq!(refused.message, says);
        let says = |pattern: &str| of(pattern).unwrap_err().message.split_once(": ").unwrap().1.to_owned();
        assert_eq!(
            says("[z-a]"),
            r#""[z-a]" is not a regular expression: the range z-a at byte 1 is in the wrong order"#
        );
        // The grammar library takes it for one that ends before.
        let open = r#""a\\" is not a regular expression: the \ at byte 1 escapes nothing"#;
        assert_eq!(says("a\\"), open);
        let refused = asked(&json!({ "guided_json": { "patternProperties": { "a\\": {} } } }).to_string()).unwrap_err();
        assert_eq!(refused.message, format!("guided_json/patternProperties/a\\: {open}"));
        for (text, param) in [
            (json!({ "guided_regex": "a\\" }), "guided_regex"),
            (json!({ "structured_outputs": { "regex": "a\\" } }), "structured_outputs.regex"),
        ] {
            let refused = asked(&text.to_string()).unwrap_err();
            assert_eq!((refused.param.as_deref(), refused.message), (Some(param), format!("{param}: {open}")));
        }
        assert!(asked(&json!({ "guided_regex": r"a\\" }).to_string()).is_ok());
        // One that is right and cannot be enforced is a warning.
        assert_eq!(of(r"(a)\1").unwrap().unwrap().left_out.len(), 1);
        assert_eq!(of("[0-9]+").unwrap().unwrap().left_out.len(), 0);
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

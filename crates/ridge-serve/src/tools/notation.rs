//! Calls in notations of their own, read whole: DeepSeek's blocks, the XML of Qwen 3 Coder, Gemma's and Python's literals.

use serde_json::{Map, Value};

use super::call::Callable;
use super::style::ToolCallStyle;
use crate::json_types::type_name;

/// A tool's name and its arguments in JSON.
pub(super) type ReadCall = (String, String);

/// Values nest no deeper than this, as in JSON.
const DEEPEST: usize = 128;

/// The calls in `body`, which stands between the mark and the end of a call; `None` if it is no call.
pub(super) fn read(style: &ToolCallStyle, body: &str, tools: &[Callable]) -> Option<Vec<ReadCall>> {
    match style {
        ToolCallStyle::DeepSeek => Some(vec![deepseek(body)?]),
        ToolCallStyle::QwenCoder => qwen_coder(body, tools),
        ToolCallStyle::Gemma => Some(vec![gemma(body)?]),
        ToolCallStyle::Pythonic => pythonic(body),
        _ => None,
    }
}

fn deepseek(body: &str) -> Option<ReadCall> {
    let (head, rest) = body.split_once("<｜tool▁sep｜>")?;
    let (name, arguments) = match rest.split_once("```json") {
        // V3 and R1 give the type first, and the arguments as a block of code.
        Some((name, block)) => (name, block.trim().strip_suffix("```")?),
        None => (head, rest),
    };
    let arguments = arguments.trim();
    let _: Map<String, Value> = serde_json::from_str(arguments).ok()?;
    Some((name.trim().to_owned(), arguments.to_owned()))
}

fn qwen_coder(body: &str, tools: &[Callable]) -> Option<Vec<ReadCall>> {
    let mut calls = Vec::new();
    let mut rest = body.trim();
    while !rest.is_empty() {
        let (name, behind) = rest.strip_prefix("<function=")?.split_once('>')?;
        let (inner, behind) = behind.split_once("</function>")?;
        let tool = tools.iter().find(|tool| tool.name == name);
        let mut arguments = Map::new();
        let mut inner = inner.trim_start();
        while !inner.is_empty() {
            let (key, behind) = inner.strip_prefix("<parameter=")?.split_once('>')?;
            // A value may hold anything but the mark that ends it.
            let (value, behind) = behind.split_once("</parameter>")?;
            let value = value.strip_prefix('\n').unwrap_or(value);
            let value = value.strip_suffix('\n').unwrap_or(value);
            let schema = tool.and_then(|tool| tool.parameters.get("properties")?.get(key));
            arguments.insert(key.to_owned(), typed(value, schema, tool.map(|tool| &tool.parameters)));
            inner = behind.trim_start();
        }
        calls.push((name.to_owned(), Value::Object(arguments).to_string()));
        rest = behind.trim_start();
    }
    (!calls.is_empty()).then_some(calls)
}

/// A value that was written without quotes, of the type that its schema names.
fn typed(text: &str, schema: Option<&Value>, root: Option<&Value>) -> Value {
    let mut types = Vec::new();
    if let Some(schema) = schema {
        collect_types(schema, root.unwrap_or(&Value::Null), 0, &mut types);
    }
    let value = match text.trim() {
        "True" => Some(Value::Bool(true)),
        "False" => Some(Value::Bool(false)),
        "None" => Some(Value::Null),
        text => serde_json::from_str(text).ok(),
    };
    let named = |value: &Value| {
        let is_integer = value.is_i64() || value.is_u64();
        !value.is_string() && types.contains(&type_name(value)) || is_integer && types.contains(&"integer")
    };
    value.filter(named).unwrap_or_else(|| Value::String(text.to_owned()))
}

fn collect_types<'a>(schema: &'a Value, root: &'a Value, depth: usize, types: &mut Vec<&'a str>) {
    if depth > 8 {
        return;
    }
    match schema.get("type") {
        Some(Value::String(one)) => types.push(one),
        Some(Value::Array(list)) => types.extend(list.iter().filter_map(Value::as_str)),
        _ => {}
    }
    let named = schema.get("enum").and_then(Value::as_array).into_iter().flatten().chain(schema.get("const"));
    named.for_each(|value| types.push(type_name(value)));
    for key in ["anyOf", "oneOf", "allOf"] {
        let all = schema.get(key).and_then(Value::as_array).into_iter().flatten();
        all.for_each(|one| collect_types(one, root, depth + 1, types));
    }
    let to = schema.get("$ref").and_then(Value::as_str).and_then(|to| root.pointer(to.strip_prefix('#')?));
    to.into_iter().for_each(|to| collect_types(to, root, depth + 1, types));
}

fn gemma(body: &str) -> Option<ReadCall> {
    let (name, rest) = body.trim().strip_prefix("call:")?.split_once('{')?;
    let mut reader = Literals { rest, notation: Notation::Gemma };
    let arguments = reader.object('}', ':', 0)?;
    reader.rest.trim().is_empty().then(|| (name.trim().to_owned(), Value::Object(arguments).to_string()))
}

/// `[f(a=1), g()]`, or lines of calls.
fn pythonic(body: &str) -> Option<Vec<ReadCall>> {
    let body = body.trim();
    let body = body.strip_prefix('[').and_then(|inner| inner.strip_suffix(']')).unwrap_or(body);
    let mut reader = Literals { rest: body, notation: Notation::Python };
    let mut calls = Vec::new();
    loop {
        let (name, rest) = reader.rest.split_once('(')?;
        reader.rest = rest;
        let arguments = reader.object(')', '=', 0)?;
        calls.push((name.trim().to_owned(), Value::Object(arguments).to_string()));
        // Between calls is a comma, or the end of a line.
        reader.rest = reader.rest.trim_start_matches(|c: char| c == ',' || c.is_whitespace());
        if reader.rest.is_empty() {
            return Some(calls);
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Notation {
    Gemma,
    Python,
}

/// Reads values that are written nearly as in JSON.
struct Literals<'a> {
    rest: &'a str,
    notation: Notation,
}

impl<'a> Literals<'a> {
    fn skip(&mut self) {
        self.rest = self.rest.trim_start();
    }

    fn take(&mut self, text: &str) -> bool {
        self.skip();
        match self.rest.strip_prefix(text) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    /// Keys and values up to `end`.
    fn object(&mut self, end: char, between: char, depth: usize) -> Option<Map<String, Value>> {
        let mut map = Map::new();
        let (mut end_text, mut between_text) = ([0; 4], [0; 4]);
        let (end, between) = (&*end.encode_utf8(&mut end_text), &*between.encode_utf8(&mut between_text));
        loop {
            if self.take(end) {
                return Some(map);
            }
            let key = match self.string()? {
                Some(key) => key,
                None => {
                    let (key, _) = self.rest.split_once(between)?;
                    self.rest = &self.rest[key.len()..];
                    key.trim().to_owned()
                }
            };
            if key.is_empty() || !self.take(between) {
                return None;
            }
            map.insert(key, self.value(depth + 1)?);
            if !self.take(",") {
                return self.take(end).then_some(map);
            }
        }
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        if depth > DEEPEST {
            return None;
        }
        if let Some(text) = self.string()? {
            return Some(Value::String(text));
        }
        if self.take("{") {
            return self.object('}', ':', depth).map(Value::Object);
        }
        for (open, close) in [("[", "]"), ("(", ")")] {
            if !self.take(open) {
                continue;
            }
            let mut list = Vec::new();
            while !self.take(close) {
                list.push(self.value(depth + 1)?);
                if !self.take(",") {
                    return self.take(close).then_some(Value::Array(list));
                }
            }
            return Some(Value::Array(list));
        }
        let end = self.rest.find([',', '}', ']', ')', '\n']).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        match word.trim() {
            "true" | "True" => Some(Value::Bool(true)),
            "false" | "False" => Some(Value::Bool(false)),
            "null" | "None" => Some(Value::Null),
            // Python separates digits by underscores.
            number => serde_json::from_str::<serde_json::Number>(&number.replace('_', "")).ok().map(Value::Number),
        }
    }

    /// A text in quotes, if one is next.
    #[expect(clippy::option_option, reason = "a text that does not end is no value; no text is something else")]
    fn string(&mut self) -> Option<Option<String>> {
        self.skip();
        if self.notation == Notation::Gemma {
            for quote in ["<|\"|>", "<escape>"] {
                if let Some(rest) = self.rest.strip_prefix(quote) {
                    let (text, rest) = rest.split_once(quote)?;
                    self.rest = rest;
                    return Some(Some(text.to_owned()));
                }
            }
        }
        let Some(quote) = self.rest.chars().next().filter(|c| matches!(c, '"' | '\'')) else { return Some(None) };
        let mut text = String::new();
        let mut chars = self.rest[1..].char_indices();
        while let Some((at, c)) = chars.next() {
            match c {
                c if c == quote => {
                    self.rest = &self.rest[1 + at + 1..];
                    return Some(Some(text));
                }
                '\\' => text.push(match chars.next()?.1 {
                    'n' => '\n',
                    't' => '\t',
                    'r' => '\r',
                    'u' => {
                        let code: String = chars.by_ref().take(4).map(|(_, c)| c).collect();
                        u32::from_str_radix(&code, 16).ok().and_then(char::from_u32)?
                    }
                    c => c,
                }),
                c => text.push(c),
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn one(style: &ToolCallStyle, body: &str) -> Option<(String, Value)> {
        let tools = [Callable {
            name: "f".into(),
            parameters: json!({
                "properties": {
                    "n": { "type": "integer" }, "s": { "type": "string" }, "o": { "$ref": "#/$defs/O" },
                    "m": { "anyOf": [{ "type": "number" }, { "type": "null" }] }, "b": { "type": "boolean" },
                },
                "$defs": { "O": { "type": ["object", "array"] } },
            }),
        }];
        let mut calls = read(style, body, &tools)?;
        assert_eq!(calls.len(), 1);
        let (name, arguments) = calls.remove(0);
        Some((name, serde_json::from_str(&arguments).unwrap()))
    }

    #[test]
    fn values_without_quotes_get_the_types_of_their_schema() {
        let call = "<function=f>\n<parameter=n>\n7\n</parameter>\n<parameter=s>\n7\n\nx <b>\n</parameter>\n<parameter=o>\n\
                    {\"a\": [1]}\n</parameter>\n<parameter=m>\nNone\n</parameter>\n<parameter=b>True</parameter>\n\
                    <parameter=other>1</parameter>\n</function>";
        let arguments = json!({ "n": 7, "s": "7\n\nx <b>", "o": { "a": [1] }, "m": null, "b": true, "other": "1" });
        assert_eq!(one(&ToolCallStyle::QwenCoder, call), Some(("f".into(), arguments)));
        let wrong = "<function=f><parameter=n>seven</parameter></function>";
        assert_eq!(one(&ToolCallStyle::QwenCoder, wrong), Some(("f".into(), json!({ "n": "seven" }))));
        for text in ["", "<function=f>", "<function=f>7</function>", "<function=f><parameter=n>7</function>", "f"] {
            assert_eq!(one(&ToolCallStyle::QwenCoder, text), None, "{text}");
        }
    }

    #[test]
    fn literals_of_gemma_are_read() {
        let call = "call:f{n:-1.5e2,s:<|\"|>a, \"b\" {}<|\"|>,l:[1,<|\"|>x<|\"|>,{k:true}],o:{},z:null}";
        let arguments = json!({ "n": -150.0, "s": "a, \"b\" {}", "l": [1, "x", { "k": true }], "o": {}, "z": null });
        assert_eq!(one(&ToolCallStyle::Gemma, call), Some(("f".into(), arguments)));
        let old = "call:f{s:<escape>it's<escape>}";
        assert_eq!(one(&ToolCallStyle::Gemma, old), Some(("f".into(), json!({ "s": "it's" }))));
        assert_eq!(one(&ToolCallStyle::Gemma, "call:f{}"), Some(("f".into(), json!({}))));
        for text in ["call:f{", "call:f{s:<|\"|>x}", "f{}", "call:f{a}", "call:f{a:b}", "call:f{} more", "call:f{:1}"] {
            assert_eq!(one(&ToolCallStyle::Gemma, text), None, "{text}");
        }
        let deep = format!("call:f{{a:{}", "[".repeat(100_000));
        assert_eq!(one(&ToolCallStyle::Gemma, &deep), None);
    }

    #[test]
    fn calls_as_in_python_are_read() {
        let call = "[f(n=1_000, s='it\\'s \\u00e9', l=[1, (2, 'a'),], o={'k': None, \"j\": True})]";
        let arguments = json!({ "n": 1000, "s": "it's é", "l": [1, [2, "a"]], "o": { "k": null, "j": true } });
        assert_eq!(one(&ToolCallStyle::Pythonic, call), Some(("f".into(), arguments)));
        assert_eq!(read(&ToolCallStyle::Pythonic, "f()\ng(a=1)\n", &[]).unwrap().len(), 2);
        assert_eq!(read(&ToolCallStyle::Pythonic, "[f(), g(a=\"b\")]", &[]).unwrap().len(), 2);
        for text in ["", "[f(1)]", "[f(a=)]", "[f(a=1]", "f", "[f(a='x)]", "[f(a=x)]"] {
            assert_eq!(read(&ToolCallStyle::Pythonic, text, &[]), None, "{text}");
        }
    }

    #[test]
    fn blocks_of_deepseek_are_read() {
        let old = "function<｜tool▁sep｜>f\n```json\n{\"n\": 1}\n```";
        assert_eq!(one(&ToolCallStyle::DeepSeek, old), Some(("f".into(), json!({ "n": 1 }))));
        let new = "f<｜tool▁sep｜>{\"n\": 1}";
        assert_eq!(one(&ToolCallStyle::DeepSeek, new), Some(("f".into(), json!({ "n": 1 }))));
        for text in ["f", "f<｜tool▁sep｜>{\"n\": 1", "function<｜tool▁sep｜>f\n```json\n{}\n", "f<｜tool▁sep｜>[1]"]
        {
            assert_eq!(one(&ToolCallStyle::DeepSeek, text), None, "{text}");
        }
    }
}

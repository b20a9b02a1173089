//! `tojson`, which transformers defines as Python's `json.dumps` without the escapes of HTML.

use std::fmt::Write;

use super::args::Args;
use super::fault::{Res, fail};
use super::ops::integer;
use super::renderer::Renderer;
use super::show::float;
use super::value::Value;

struct Style {
    ascii: bool,
    /// The text of one level.
    indent: Option<String>,
    item: String,
    key: String,
    sort: bool,
}

impl Renderer<'_> {
    /// `json.dumps(value, ensure_ascii, indent, separators, sort_keys)`
    pub(crate) fn to_json(&self, value: &Value, args: Args) -> Res<Value> {
        let params = ["ensure_ascii", "indent", "separators", "sort_keys"];
        let mut bound = args.bind("tojson", &params, 0)?;
        let ascii = bound.flag(0, false);
        let indent = match bound.value(1) {
            Value::None => None,
            Value::Str(text) => Some(text.to_string()),
            other => match integer(&other) {
                Some(spaces) => {
                    let spaces = usize::try_from(spaces.max(0)).unwrap_or(usize::MAX);
                    self.charge(spaces)?;
                    Some(" ".repeat(spaces))
                }
                None => return fail(format!("can't multiply sequence by non-int of type '{}'", other.type_name())),
            },
        };
        let (item, key) = match bound.value(2) {
            Value::None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
            pair => match <[Value; 2]>::try_from(self.items(&pair)?) {
                Ok([Value::Str(item), Value::Str(key)]) => (item.to_string(), key.to_string()),
                _ => return fail("separators must be a pair of strings"),
            },
        };
        let style = Style { ascii, indent, item, key, sort: bound.flag(3, false) };
        let mut out = String::new();
        self.dump(&mut out, value, &style, 0)?;
        Ok(Value::str(out))
    }

    fn push(&self, out: &mut String, text: &str) -> Res<()> {
        self.charge(text.len())?;
        out.push_str(text);
        Ok(())
    }

    fn newline(&self, out: &mut String, style: &Style, level: usize) -> Res<()> {
        if let Some(indent) = &style.indent {
            self.push(out, "\n")?;
            for _ in 0..level {
                self.push(out, indent)?;
            }
        }
        Ok(())
    }

    fn dump(&self, out: &mut String, value: &Value, style: &Style, level: usize) -> Res<()> {
        match value {
            Value::Str(text) | Value::Markup(text) => self.quoted(out, text, style.ascii),
            Value::List(items) | Value::Tuple(items) => {
                if items.is_empty() {
                    return self.push(out, "[]");
                }
                self.push(out, "[")?;
                for (at, item) in items.iter().enumerate() {
                    self.push(out, if at == 0 { "" } else { &style.item })?;
                    self.newline(out, style, level + 1)?;
                    self.dump(out, item, style, level + 1)?;
                }
                self.newline(out, style, level)?;
                self.push(out, "]")
            }
            Value::Dict(dict) => {
                let mut entries: Vec<&(Value, Value)> = dict.entries().iter().collect();
                if entries.is_empty() {
                    return self.push(out, "{}");
                }
                if style.sort {
                    self.sort(&mut entries, false, |entry| Ok(entry.0.clone()))?;
                }
                self.push(out, "{")?;
                for (at, (key, value)) in entries.into_iter().enumerate() {
                    self.push(out, if at == 0 { "" } else { &style.item })?;
                    self.newline(out, style, level + 1)?;
                    match key {
                        Value::Str(text) | Value::Markup(text) => self.quoted(out, text, style.ascii)?,
                        Value::None | Value::Bool(_) | Value::Int(_) | Value::Float(_) => {
                            self.quoted(out, &scalar(key), style.ascii)?;
                        }
                        other => {
                            let kind = other.type_name();
                            return fail(format!("keys must be str, int, float, bool or None, not {kind}"));
                        }
                    }
                    self.push(out, &style.key)?;
                    self.dump(out, value, style, level + 1)?;
                }
                self.newline(out, style, level)?;
                self.push(out, "}")
            }
            Value::None | Value::Bool(_) | Value::Int(_) | Value::Float(_) => self.push(out, &scalar(value)),
            other => fail(format!("Object of type {} is not JSON serializable", other.type_name())),
        }
    }

    fn quoted(&self, out: &mut String, text: &str, ascii: bool) -> Res<()> {
        let before = out.len();
        out.push('"');
        for c in text.chars() {
            // Writing to a string cannot fail.
            let _ = match c {
                '"' => write!(out, "\\\""),
                '\\' => write!(out, "\\\\"),
                '\n' => write!(out, "\\n"),
                '\r' => write!(out, "\\r"),
                '\t' => write!(out, "\\t"),
                '\x08' => write!(out, "\\b"),
                '\x0c' => write!(out, "\\f"),
                c if c < ' ' || ascii && c > '~' => {
                    let mut units = [0; 2];
                    c.encode_utf16(&mut units).iter().try_for_each(|unit| write!(out, "\\u{unit:04x}"))
                }
                c => write!(out, "{c}"),
            };
        }
        out.push('"');
        self.charge(out.len() - before)
    }
}

fn scalar(value: &Value) -> String {
    match value {
        Value::Bool(true) => "true".to_owned(),
        Value::Bool(false) => "false".to_owned(),
        Value::Int(i) => i.to_string(),
        Value::Float(x) if x.is_nan() => "NaN".to_owned(),
        Value::Float(x) if x.is_infinite() => if *x > 0.0 { "Infinity" } else { "-Infinity" }.to_owned(),
        Value::Float(x) => float(*x),
        _ => "null".to_owned(),
    }
}

//! Filters of texts.

use std::sync::Arc;

use crate::template::jinja::args::Args;
use crate::template::jinja::fault::{Res, fail, unsupported};
use crate::template::jinja::methods::strip;
use crate::template::jinja::ops::integer;
use crate::template::jinja::renderer::Renderer;
use crate::template::jinja::text::{capitalize, is_space, lines};
use crate::template::jinja::value::Value;

impl Renderer<'_> {
    pub(super) fn text_filter(&self, name: &str, value: Value, args: Args) -> Res<Value> {
        match name {
            "string" => {
                args.none(name)?;
                match value {
                    Value::Str(_) | Value::Markup(_) => Ok(value),
                    other => self.text(&other).map(Value::str),
                }
            }
            "safe" => args.none(name).and_then(|()| Ok(Value::Markup(self.text(&value)?.into()))),
            "e" | "escape" | "forceescape" => {
                args.none(name)?;
                match value {
                    Value::Markup(_) if name != "forceescape" => Ok(value),
                    other => self.escape(&self.text(&other)?),
                }
            }
            "upper" => args.none(name).and_then(|()| self.string(self.soft(&value)?.to_uppercase())),
            "lower" => args.none(name).and_then(|()| self.string(self.soft(&value)?.to_lowercase())),
            "capitalize" => args.none(name).and_then(|()| self.string(capitalize(&self.soft(&value)?)?)),
            "title" => args.none(name).and_then(|()| self.string(title(&self.soft(&value)?))),
            "trim" => {
                let chars = args.bind(name, &["chars"], 0)?.text(0)?;
                self.string(strip(&self.soft(&value)?, chars.as_deref(), true, true).to_owned())
            }
            "center" => {
                let width = args.bind(name, &["width"], 0)?.int(0)?.unwrap_or(80);
                self.pad(&self.soft(&value)?, usize::try_from(width.max(0)).unwrap_or(usize::MAX), " ", "center")
            }
            "replace" => {
                let mut bound = args.bind(name, &["old", "new", "count"], 2)?;
                let (text, old, new) = (self.text(&value)?, self.text(&bound.value(0))?, self.text(&bound.value(1))?);
                let most = bound.int(2)?.and_then(|count| usize::try_from(count).ok());
                self.replace(&text, &old, &new, most)
            }
            "format" => {
                if !args.positional.is_empty() && !args.named.is_empty() {
                    return fail("can't handle positional and keyword arguments at the same time");
                }
                if !args.named.is_empty() {
                    return unsupported("format with keyword arguments is not supported");
                }
                let format = self.soft(&value)?;
                self.percent(&format, &Value::tuple(args.positional)?)
            }
            "indent" => self.indent(&value, args),
            "truncate" => self.truncate(&value, args),
            "wordcount" => {
                args.none(name)?;
                let text = self.soft(&value)?;
                if !text.is_ascii() {
                    return unsupported("wordcount of texts that are not ASCII is not supported");
                }
                let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
                Ok(Value::Int(words.filter(|word| !word.is_empty()).count() as i128))
            }
            "urlencode" => {
                args.none(name)?;
                self.url_encode(&value)
            }
            "pprint" => {
                args.none(name)?;
                let mut shown = String::new();
                self.write_repr(&mut shown, &value)?;
                // What fits on a line is printed as it is, but for dicts, whose keys are sorted.
                let plain = match &value {
                    Value::List(items) | Value::Tuple(items) => items.iter().all(|item| item.depth() == 0),
                    Value::Dict(dict) => dict.len() < 2 && dict.depth() == 1,
                    _ => value.depth() == 0,
                };
                if !plain || shown.chars().count() > 70 {
                    return unsupported("pprint of what is longer than a line is not supported");
                }
                Ok(Value::str(shown))
            }
            "wordwrap" | "striptags" => self.plain_words(name, &value, args),
            _ => unsupported(format!("the filter '{name}' is not supported")),
        }
    }

    fn escape(&self, text: &str) -> Res<Value> {
        Ok(Value::Markup(self.escaped_text(text)?))
    }

    /// The text of a string, escaped unless it is already.
    pub(crate) fn escaped(&self, value: &Value) -> Res<Arc<str>> {
        match value {
            Value::Markup(text) => Ok(text.clone()),
            other => self.escaped_text(&self.text(other)?),
        }
    }

    fn escaped_text(&self, text: &str) -> Res<Arc<str>> {
        let mut out = String::with_capacity(text.len());
        for c in text.chars() {
            match c {
                '&' => out.push_str("&amp;"),
                '<' => out.push_str("&lt;"),
                '>' => out.push_str("&gt;"),
                '"' => out.push_str("&#34;"),
                '\'' => out.push_str("&#39;"),
                c => out.push(c),
            }
        }
        self.charge(out.len())?;
        Ok(out.into())
    }

    fn indent(&self, value: &Value, args: Args) -> Res<Value> {
        let mut bound = args.bind("indent", &["width", "first", "blank"], 0)?;
        let indent = match bound.take(0) {
            None => "    ".to_owned(),
            Some(Value::Str(text)) => text.to_string(),
            Some(other) => match integer(&other) {
                Some(width) => {
                    let width = usize::try_from(width.max(0)).unwrap_or(usize::MAX);
                    self.charge(width)?;
                    " ".repeat(width)
                }
                None => return fail(format!("can't multiply sequence by non-int of type '{}'", other.type_name())),
            },
        };
        let (first, blank) = (bound.flag(1, false), bound.flag(2, false));
        let text = match value {
            Value::Str(text) => text,
            Value::Markup(_) => return unsupported("indent of a string made by escape or safe is not supported"),
            Value::Undefined(message) => return fail(&**message),
            other => return fail(format!("indent needs a string, got {}", other.type_name())),
        };
        // A newline more, as jinja2 does: otherwise the last one would be lost.
        let text = format!("{text}\n");
        let rows = lines(&text, false);
        self.charge(text.len().saturating_add(rows.len().saturating_mul(indent.len())))?;
        let mut out = String::new();
        for (at, row) in rows.iter().enumerate() {
            out.push_str(if at == 0 { "" } else { "\n" });
            if if at == 0 { first } else { blank || !row.is_empty() } {
                out.push_str(&indent);
            }
            out.push_str(row);
        }
        Ok(Value::str(out))
    }

    fn truncate(&self, value: &Value, args: Args) -> Res<Value> {
        let Value::Str(text) = value else {
            return unsupported("truncate of what is no string is not supported");
        };
        let mut bound = args.bind("truncate", &["length", "killwords", "end", "leeway"], 0)?;
        let length = bound.int(0)?.unwrap_or(255);
        let kill = bound.flag(1, false);
        let end = bound.text(2)?.unwrap_or_else(|| "...".into());
        let leeway = bound.int(3)?.unwrap_or(5);
        let shown = length - end.chars().count() as i128;
        if shown < 0 || leeway < 0 {
            return fail("truncate needs a length that is not shorter than its end, and a leeway that is not negative");
        }
        if text.chars().count() as i128 <= length.saturating_add(leeway) {
            return Ok(value.clone());
        }
        let start: String = text.chars().take(usize::try_from(shown).unwrap_or(usize::MAX)).collect();
        let start = if kill { &start } else { start.rsplit_once(' ').map_or(&*start, |(before, _)| before) };
        self.string(format!("{start}{end}"))
    }

    fn url_encode(&self, value: &Value) -> Res<Value> {
        let pairs = match value {
            Value::Dict(dict) => self.pairs(dict)?,
            Value::List(_) | Value::Tuple(_) | Value::View(..) | Value::Iter(..) => self.items(value)?,
            other => return self.string(url_quote(&self.text(other)?, false)),
        };
        let mut parts = Vec::new();
        for pair in pairs {
            match <[Value; 2]>::try_from(self.items(&pair)?) {
                Ok([key, value]) => {
                    parts.push(format!(
                        "{}={}",
                        url_quote(&self.text(&key)?, true),
                        url_quote(&self.text(&value)?, true)
                    ));
                }
                Err(_) => return fail("urlencode needs pairs"),
            }
        }
        self.string(parts.join("&"))
    }

    /// Filters that split texts by rules of their own, here only where those rules do nothing unusual.
    fn plain_words(&self, name: &str, value: &Value, args: Args) -> Res<Value> {
        let Value::Str(text) = value else {
            return unsupported(format!("{name} of what is no plain string is not supported"));
        };
        if name == "striptags" {
            args.none(name)?;
            if text.contains(['&', '<']) {
                return unsupported("striptags of a text with tags or entities is not supported");
            }
            let words: Vec<&str> = text.split(is_space).filter(|word| !word.is_empty()).collect();
            return self.string(words.join(" "));
        }
        let params = ["width", "break_long_words", "wrapstring", "break_on_hyphens"];
        let mut bound = args.bind(name, &params, 0)?;
        let width = usize::try_from(bound.int(0)?.unwrap_or(79).max(0)).unwrap_or(usize::MAX);
        let wrap = bound.text(2)?.unwrap_or_else(|| "\n".into());
        let mut rows: Vec<String> = Vec::new();
        for line in lines(text, false) {
            let simple = line.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, ' ' | '.' | ',' | '\''));
            if !simple || line.contains("  ") || line.starts_with(' ') || line.ends_with(' ') {
                return unsupported("wordwrap of more than plain words is not supported");
            }
            let mut row = String::new();
            for word in line.split(' ') {
                if word.len() > width {
                    return unsupported("wordwrap of words that are longer than a line is not supported");
                }
                if !row.is_empty() && row.len() + 1 + word.len() > width {
                    rows.push(std::mem::take(&mut row));
                }
                row.push_str(if row.is_empty() { "" } else { " " });
                row.push_str(word);
            }
            rows.push(row);
        }
        self.string(rows.join(&wrap))
    }
}

/// jinja2's own title case: capitals at the start and behind hyphens, spaces and brackets.
fn title(text: &str) -> String {
    let splits = |c: char| is_space(c) || "-({[<".contains(c);
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while !rest.is_empty() {
        let at_split = rest.starts_with(splits);
        let end = rest.find(|c| splits(c) != at_split).unwrap_or(rest.len());
        let (part, after) = rest.split_at(end);
        let mut chars = part.chars();
        out.extend(chars.next().into_iter().flat_map(char::to_uppercase));
        out.push_str(&chars.as_str().to_lowercase());
        rest = after;
    }
    out
}

fn url_quote(text: &str, query: bool) -> String {
    let mut out = String::new();
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'.' | b'-' | b'~' => out.push(char::from(byte)),
            b'/' if !query => out.push('/'),
            b' ' if query => out.push('+'),
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

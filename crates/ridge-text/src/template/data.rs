//! What is handed to a template: JSON, with integers kept apart from floats however large they are.

use ridge_files::FilesError;

use crate::error::{Result, TextError};

/// A value for a template, as Python's `json.loads` would make it.
#[derive(Clone, Debug, PartialEq)]
pub enum Data {
    /// None
    Null,
    /// True or False
    Bool(bool),
    /// An int; Python's have no bound, these have 127 bits.
    Int(i128),
    /// A float
    Float(f64),
    /// A str
    Text(String),
    /// A list
    List(Vec<Data>),
    /// A dict with strings as keys, in their order. Of equal keys the last one counts.
    Map(Vec<(String, Data)>),
}

/// Values nest no deeper than this.
const DEEPEST: usize = 100;

impl Data {
    /// Reads JSON as Python does, but for numbers that are not finite. `what` names the text in errors.
    ///
    /// # Errors
    ///
    /// [`TextError::Files`] if the text is not JSON, nests more than 100 deep, or has an integer of more than 127 bits.
    pub fn from_json(what: &str, text: &str) -> Result<Self> {
        let mut reader = Reader { text, at: 0 };
        let read = reader.value(DEEPEST).and_then(|value| {
            reader.space();
            if reader.at == text.len() { Ok(value) } else { Err("unexpected text after the value") }
        });
        read.map_err(|problem| {
            let line = text.as_bytes()[..reader.at].iter().filter(|b| **b == b'\n').count() + 1;
            FilesError::Json { file: what.to_owned(), detail: format!("{problem} at line {line}") }.into()
        })
    }

    /// A value that was read by `serde_json`. `what` names it in errors.
    ///
    /// # Errors
    ///
    /// [`TextError::Value`] if it has a number beyond 64 bits without a fraction: `serde_json` makes floats of large
    /// integers, and templates print those differently. [`from_json`](Self::from_json) can tell them apart.
    /// [`TextError::Files`] if it nests more than 100 deep.
    pub fn from_value(what: &str, value: &serde_json::Value) -> Result<Self> {
        Self::convert(what, value, DEEPEST)
    }

    fn convert(what: &str, value: &serde_json::Value, depth: usize) -> Result<Self> {
        use serde_json::Value;
        let Some(inside) = depth.checked_sub(1) else {
            return Err(FilesError::Json { file: what.to_owned(), detail: too_deep().to_owned() }.into());
        };
        Ok(match value {
            Value::Null => Self::Null,
            Value::Bool(b) => Self::Bool(*b),
            Value::String(text) => Self::Text(text.clone()),
            Value::Array(items) => {
                Self::List(items.iter().map(|item| Self::convert(what, item, inside)).collect::<Result<_>>()?)
            }
            Value::Object(entries) => Self::Map(
                entries
                    .iter()
                    .map(|(key, value)| Ok((key.clone(), Self::convert(what, value, inside)?)))
                    .collect::<Result<_>>()?,
            ),
            Value::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
                (Some(i), _, _) => Self::Int(i.into()),
                (_, Some(i), _) => Self::Int(i.into()),
                (_, _, Some(x)) if x.abs() < 9.2e18 => Self::Float(x),
                _ => {
                    return Err(TextError::Value {
                        file: what.to_owned(),
                        key: "a number".to_owned(),
                        value: number.to_string(),
                        problem: "may be an integer of more than 64 bits".to_owned(),
                        remedy: "write it as a string",
                    });
                }
            },
        })
    }

    /// The value of a key, if this is a map that has it.
    pub fn get(&self, key: &str) -> Option<&Self> {
        match self {
            Self::Map(entries) => entries.iter().rev().find(|(k, _)| k == key).map(|(_, value)| value),
            _ => None,
        }
    }

    /// The text, if this is one.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }
}

impl From<&str> for Data {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for Data {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<bool> for Data {
    fn from(b: bool) -> Self {
        Self::Bool(b)
    }
}

impl From<i64> for Data {
    fn from(i: i64) -> Self {
        Self::Int(i.into())
    }
}

fn too_deep() -> &'static str {
    "values nest more than 100 deep"
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
}

type Read<T> = std::result::Result<T, &'static str>;

impl Reader<'_> {
    fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    fn space(&mut self) {
        let rest = self.rest();
        self.at += rest.len() - rest.trim_start_matches([' ', '\t', '\n', '\r']).len();
    }

    fn take(&mut self, token: &str) -> bool {
        let is = self.rest().starts_with(token);
        self.at += if is { token.len() } else { 0 };
        is
    }

    fn value(&mut self, depth: usize) -> Read<Data> {
        let inside = depth.checked_sub(1).ok_or_else(too_deep)?;
        self.space();
        match self.rest().bytes().next() {
            Some(b'"') => self.string().map(Data::Text),
            Some(b'[') => {
                self.at += 1;
                let mut items = Vec::new();
                self.space();
                if self.take("]") {
                    return Ok(Data::List(items));
                }
                loop {
                    items.push(self.value(inside)?);
                    self.space();
                    if self.take("]") {
                        return Ok(Data::List(items));
                    }
                    if !self.take(",") {
                        return Err("expected ',' or ']'");
                    }
                }
            }
            Some(b'{') => {
                self.at += 1;
                let mut entries = Vec::new();
                self.space();
                if self.take("}") {
                    return Ok(Data::Map(entries));
                }
                loop {
                    self.space();
                    let key = self.string()?;
                    self.space();
                    if !self.take(":") {
                        return Err("expected ':'");
                    }
                    entries.push((key, self.value(inside)?));
                    self.space();
                    if self.take("}") {
                        return Ok(Data::Map(entries));
                    }
                    if !self.take(",") {
                        return Err("expected ',' or '}'");
                    }
                }
            }
            Some(b'-' | b'0'..=b'9') => self.number(),
            _ if self.take("null") => Ok(Data::Null),
            _ if self.take("true") => Ok(Data::Bool(true)),
            _ if self.take("false") => Ok(Data::Bool(false)),
            _ => Err("expected a value"),
        }
    }

    /// Finds where a string ends; `serde_json` reads what is in it.
    fn string(&mut self) -> Read<String> {
        let bytes = self.rest().as_bytes();
        if bytes.first() != Some(&b'"') {
            return Err("expected a string");
        }
        let mut end = 1;
        while bytes.get(end) != Some(&b'"') {
            match bytes.get(end) {
                Some(b'\\') => end += 2,
                Some(_) => end += 1,
                None => return Err("a string is not closed"),
            }
        }
        let text = self.rest().get(..=end).and_then(|text| serde_json::from_str(text).ok());
        let text = text.ok_or("a string has an escape or a character that it may not have")?;
        self.at += end + 1;
        Ok(text)
    }

    fn number(&mut self) -> Read<Data> {
        let rest = self.rest();
        let end = rest.find(|c: char| !matches!(c, '0'..='9' | '+' | '-' | '.' | 'e' | 'E')).unwrap_or(rest.len());
        let text = &rest[..end];
        // Whether it is a number at all is for `serde_json` to say, which knows the grammar.
        let valid: Option<serde_json::Number> = serde_json::from_str(text).ok();
        let float = valid.ok_or("expected a number of finite size")?.as_f64().unwrap_or_default();
        let data = if text.contains(['.', 'e', 'E']) {
            Data::Float(text.parse().unwrap_or(float))
        } else {
            Data::Int(text.parse().map_err(|_| "an integer has more than 127 bits")?)
        };
        self.at += end;
        Ok(data)
    }
}

//! Strict JSON: one object without duplicate keys.
//!
//! `serde_json` keeps the last of two equal keys, and another program might keep the first. Such ambiguous files are rejected.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use crate::error::{FilesError, Result};

/// The object that `text` holds. `file` names it in errors.
///
/// # Errors
///
/// [`FilesError::Json`] if `text` is not JSON, nests more than 128 deep, is not an object, or has a key twice.
pub fn object(file: &str, text: &[u8]) -> Result<Map<String, Value>> {
    let fail = |detail: String| FilesError::Json { file: file.to_owned(), detail };
    let value = match parse(text) {
        Ok(value) => value,
        // Python's writer makes numbers that JSON does not have.
        Err(error) => {
            bare_words_quoted(text).and_then(|text| parse(&text).ok()).ok_or_else(|| fail(error.to_string()))?
        }
    };
    match value {
        Value::Object(map) => Ok(map),
        other => Err(fail(format!("it is {}, not an object", shown(&other)))),
    }
}

fn parse(text: &[u8]) -> serde_json::Result<Value> {
    let mut reader = serde_json::Deserializer::from_slice(text);
    let value = Strict.deserialize(&mut reader)?;
    reader.end().map(|()| value)
}

/// `text` with `NaN`, `Infinity` and `-Infinity` as strings, so that whoever reads the key that has one refuses it by
/// name; `None` where there are none.
fn bare_words_quoted(text: &[u8]) -> Option<Vec<u8>> {
    const WORDS: [&[u8]; 3] = [b"-Infinity", b"Infinity", b"NaN"];
    let mut quoted = Vec::with_capacity(text.len() + 16);
    let (mut in_string, mut found, mut at) = (false, false, 0);
    while let Some(byte) = text.get(at) {
        let word = WORDS.iter().find(|word| !in_string && text[at..].starts_with(word));
        let len = match (word, byte) {
            (Some(word), _) => {
                found = true;
                quoted.push(b'"');
                word.len()
            }
            (None, b'\\') if in_string => 2,
            (None, b'"') => {
                in_string = !in_string;
                1
            }
            _ => 1,
        };
        let end = (at + len).min(text.len());
        quoted.extend(&text[at..end]);
        if word.is_some() {
            quoted.push(b'"');
        }
        at = end;
    }
    found.then_some(quoted)
}

/// `value` as JSON on one line, shortened to some 80 characters.
pub fn shown(value: &Value) -> String {
    const LONGEST: usize = 80;
    let text = value.to_string();
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

/// Builds a [`Value`], refusing an object that has a key twice.
struct Strict;

impl<'de> DeserializeSeed<'de> for Strict {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Strict {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bool<E: Error>(self, v: bool) -> Result<Value, E> {
        Ok(Value::Bool(v))
    }

    fn visit_i64<E: Error>(self, v: i64) -> Result<Value, E> {
        Ok(Value::Number(v.into()))
    }

    fn visit_u64<E: Error>(self, v: u64) -> Result<Value, E> {
        Ok(Value::Number(v.into()))
    }

    fn visit_f64<E: Error>(self, v: f64) -> Result<Value, E> {
        Number::from_f64(v).map(Value::Number).ok_or_else(|| E::custom("number out of range"))
    }

    fn visit_str<E: Error>(self, v: &str) -> Result<Value, E> {
        Ok(Value::String(v.to_owned()))
    }

    fn visit_string<E: Error>(self, v: String) -> Result<Value, E> {
        Ok(Value::String(v))
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(value) = seq.next_element_seed(Self)? {
            list.push(value);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            if map.contains_key(&key) {
                return Err(A::Error::custom(format_args!("the key {key:?} appears twice")));
            }
            let value = entries.next_value_seed(Self)?;
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_json_does_not_have_are_strings() {
        let text = br#"{"a": [0.0, Infinity, -Infinity], "b": "\"NaN", "c": NaN, "Infinity": 1}"#;
        let map = object("f", text).unwrap();
        assert_eq!(
            Value::Object(map),
            serde_json::json!({
                "a": [0.0, "Infinity", "-Infinity"], "b": "\"NaN", "c": "NaN", "Infinity": 1,
            })
        );
        assert!(object("f", b"{\"a\": Infinit}").is_err() && object("f", b"{\"a\": NaN").is_err());
    }

    fn message(text: &str) -> String {
        object("x.json", text.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn every_kind_of_value_is_kept() {
        let text = r#"{"a":[1,-2,3.5,1e5,"x",null,true,{}],"b":{"c":"é"}}"#;
        let strict = object("x.json", text.as_bytes()).unwrap();
        let plain: Value = serde_json::from_str(text).unwrap();
        assert_eq!(Value::Object(strict), plain);
    }

    #[test]
    fn key_named_twice_is_refused_at_any_depth() {
        assert!(message(r#"{"a":1,"a":1}"#).contains(r#"the key "a" appears twice"#));
        assert!(message(r#"{"a":[{"b":1,"b":2}]}"#).contains(r#"the key "b" appears twice"#));
    }

    #[test]
    fn what_is_not_one_object_is_refused() {
        for text in ["", "[]", "3", "{} {}", "{", "{\"a\":Nan}", "\u{feff}{}"] {
            assert!(message(text).starts_with("x.json: it is not valid JSON"));
        }
    }

    #[test]
    fn deep_nesting_is_an_error_and_no_overflow() {
        let text = format!("{{\"a\":{}", "[".repeat(1_000_000));
        assert!(message(&text).contains("recursion limit"));
    }

    #[test]
    fn long_values_are_shortened_between_characters() {
        let value = Value::String("é".repeat(500));
        assert!(shown(&value).chars().count() < 100);
    }
}

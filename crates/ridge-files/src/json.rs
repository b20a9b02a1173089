//! Strict JSON: one object without duplicate keys.
//!
//! `serde_json` keeps the last of two equal keys, and another program might keep the first. Such ambiguous files are rejected.
//!
//! Python writes numbers that JSON does not have: `NaN`, `Infinity` and `-Infinity`. They are read as the objects that
//! transformers writes for them since version 5 (`{"__float__": "Infinity"}`), and [`pretty`] writes them as every version
//! reads them.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use crate::error::{FilesError, Result};

/// Python's words for numbers that JSON does not have.
const WORDS: [&str; 3] = ["-Infinity", "Infinity", "NaN"];

/// The object that `text` holds. `file` names it in errors. A bare `NaN`, `Infinity` or `-Infinity` is the object
/// `{"__float__": "NaN"}` of that word.
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

/// `text` with `NaN`, `Infinity` and `-Infinity` as objects, so that whoever reads the key that has one refuses it by
/// name; `None` where there are none.
fn bare_words_quoted(text: &[u8]) -> Option<Vec<u8>> {
    let mut quoted = Vec::with_capacity(text.len() + 64);
    let (mut in_string, mut found, mut at) = (false, false, 0);
    while let Some(byte) = text.get(at) {
        let word = WORDS.iter().find(|word| !in_string && text[at..].starts_with(word.as_bytes()));
        let len = match (word, byte) {
            (Some(word), _) => {
                found = true;
                quoted.extend(format!("{{\"__float__\": \"{word}\"}}").bytes());
                at += word.len();
                continue;
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
        at = end;
    }
    found.then_some(quoted)
}

/// `text`, which is JSON, with the bare words in place of the objects that stand for them. A quotation mark inside a string
/// is escaped, so the text of such an object occurs nowhere else.
fn bare_words(text: &str) -> String {
    const KEY: &str = "\"__float__\":";
    let mut bare = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once(KEY) {
        let word = after.trim_start().strip_prefix('"').and_then(|after| {
            let (word, after) = after.split_once('"')?;
            let after = after.trim_start().strip_prefix('}')?;
            let before = before.trim_end().strip_suffix('{')?;
            WORDS.contains(&word).then_some((before, word, after))
        });
        rest = match word {
            Some((before, word, after)) => {
                bare.extend([before, word]);
                after
            }
            None => {
                bare.extend([before, KEY]);
                after
            }
        };
    }
    bare + rest
}

/// `value` as the text of a file that Python's `json` and [`object`] read: indented, ending in a newline, with numbers
/// that JSON does not have as bare words.
pub fn pretty(value: &Value) -> String {
    bare_words(&format!("{value:#}\n"))
}

/// `value` as JSON on one line, shortened to some 80 characters.
pub fn shown(value: &Value) -> String {
    const LONGEST: usize = 80;
    let text = bare_words(&value.to_string());
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
    fn numbers_that_json_does_not_have_are_read_and_written_as_python_does() {
        let text = br#"{"a": [0.0, Infinity, -Infinity], "b": "\"NaN", "c": NaN, "Infinity": 1, "d": "Infinity"}"#;
        let value = Value::Object(object("f", text).unwrap());
        let float = |word: &str| serde_json::json!({ "__float__": word });
        assert_eq!(
            value,
            serde_json::json!({
                "a": [0.0, float("Infinity"), float("-Infinity")], "b": "\"NaN", "c": float("NaN"), "Infinity": 1,
                "d": "Infinity",
            })
        );
        let written = pretty(&value);
        assert!(written.contains("    Infinity,\n    -Infinity\n  ]"), "{written}");
        assert!(written.contains("\"c\": NaN,") && written.contains("\"d\": \"Infinity\"\n}\n"), "{written}");
        assert_eq!(Value::Object(object("f", written.as_bytes()).unwrap()), value);
        assert_eq!(shown(&value["a"]), "[0.0,Infinity,-Infinity]");
        assert!(object("f", b"{\"a\": Infinit}").is_err() && object("f", b"{\"a\": NaN").is_err());
    }

    #[test]
    fn objects_that_only_resemble_such_numbers_are_written_as_they_are() {
        for value in [
            serde_json::json!({"a": {"__float__": "1.5"}}),
            serde_json::json!({"a": {"__float__": "NaN", "b": 1}, "c": {"__float__": "NaN"}}),
            serde_json::json!({"a": "{\"__float__\": \"NaN\"}"}),
        ] {
            assert_eq!(Value::Object(object("f", pretty(&value).as_bytes()).unwrap()), value);
        }
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

//! Where a schema is at fault that the grammar library refuses, and what may stand there.
//!
//! The library says what is wrong, but not where: the innermost part that it refuses alike by itself is the place.

use std::time::{Duration, Instant};

use ridge_engine::service::schema_error;
use serde_json::{Map, Value, json};

use super::schema::{enforceable, escaped};

/// Parts that are compiled at most, and for how long: each costs as much as the whole at worst.
const MAX_TRIED: usize = 500;
const MAX_TIME: Duration = Duration::from_millis(500);
/// Keys whose value is an object of schemas.
const MAPS: [&str; 4] = ["$defs", "definitions", "properties", "patternProperties"];
/// Keys whose value is a schema or a list of them.
const SCHEMAS: [&str; 8] =
    ["items", "prefixItems", "additionalItems", "additionalProperties", "anyOf", "oneOf", "allOf", "propertyNames"];

/// What is wrong with the schema that was `sent`, behind the JSON pointer of its place; `None` of one that is right.
pub(crate) fn explain(sent: &Value) -> Option<String> {
    explain_within(sent, MAX_TIME)
}

fn explain_within(sent: &Value, time: Duration) -> Option<String> {
    let schema = enforceable(sent.clone()).schema;
    let why = schema_error(&schema)?;
    let mut search = Search { root: &schema, why: &why, left: MAX_TRIED, until: Instant::now() + time };
    let (pointer, found) = search.innermost(String::new(), &schema);
    let key = search.key(found);
    let pointer = as_sent(&format!("{pointer}{}", key.as_deref().unwrap_or_default()), sent);
    let last = pointer.rsplit('/').next().unwrap_or_default();
    Some(format!("{pointer}: {}", plain(&why, last)))
}

struct Search<'a> {
    root: &'a Value,
    /// What the library says of the whole.
    why: &'a str,
    left: usize,
    until: Instant,
}

impl Search<'_> {
    /// Is this part of the schema refused for the same reason? `None` when enough was tried.
    fn is_refused(&mut self, part: &Value) -> Option<bool> {
        self.left = self.left.checked_sub(1)?;
        if Instant::now() > self.until {
            return None;
        }
        let mut alone = part.clone();
        if let Value::Object(map) = &mut alone {
            for key in ["$defs", "definitions"] {
                if let Some(named) = self.root.get(key)
                    && !map.contains_key(key)
                {
                    map.insert(key.to_owned(), named.clone());
                }
            }
        }
        Some(schema_error(&alone).is_some_and(|why| why == self.why))
    }

    /// The innermost part of `within`, at the JSON pointer `place`, that is refused.
    fn innermost<'s>(&mut self, place: String, within: &'s Value) -> (String, &'s Value) {
        for (step, part) in parts(within) {
            match self.is_refused(part) {
                Some(true) => return self.innermost(format!("{place}{step}"), part),
                Some(false) => {}
                None => break,
            }
        }
        (place, within)
    }

    /// The key of `part`, or of what is under it, without which it would not be refused so, as a JSON pointer; if it is one.
    fn key(&mut self, part: &Value) -> Option<String> {
        let Value::Object(map) = part else { return None };
        let without = |map: &Map<String, Value>, key: &str| {
            let mut map = map.clone();
            map.shift_remove(key);
            map
        };
        let mut needed = Vec::new();
        for key in map.keys() {
            if !self.is_refused(&Value::Object(without(map, key)))? {
                needed.push(key);
            }
        }
        let named = |key: &&String| self.why.contains(&format!("'{key}'")) || self.why.starts_with(&format!("{key} "));
        let key = *match needed.as_slice() {
            [one] => one,
            several => several.iter().find(|key| named(key))?,
        };
        let mut inner = None;
        if let Some(Value::Object(each)) = map.get(key).filter(|_| MAPS.contains(&key.as_str())) {
            for name in each.keys() {
                let mut other = map.clone();
                other.insert(key.clone(), Value::Object(without(each, name)));
                // Where not all could be tried, the key is the place.
                match self.is_refused(&Value::Object(other)) {
                    Some(true) => {}
                    Some(false) => inner = Some(format!("/{}", escaped(name))),
                    None => break,
                }
                if inner.is_some() {
                    break;
                }
            }
        }
        Some(format!("/{}{}", escaped(key), inner.unwrap_or_default()))
    }
}

/// The schemas directly within `schema`, each with the end of its JSON pointer.
fn parts(schema: &Value) -> Vec<(String, &Value)> {
    let mut parts = Vec::new();
    for key in MAPS {
        let each = schema.get(key).and_then(Value::as_object).into_iter().flatten();
        parts.extend(each.map(|(name, part)| (format!("/{key}/{}", escaped(name)), part)));
    }
    for key in SCHEMAS {
        match schema.get(key) {
            Some(Value::Array(list)) => {
                parts.extend(list.iter().enumerate().map(|(i, part)| (format!("/{key}/{i}"), part)));
            }
            Some(one @ Value::Object(_)) => parts.push((format!("/{key}"), one)),
            _ => {}
        }
    }
    parts
}

/// A JSON pointer into a schema that is enforced as one into the schema as it was sent, of which alternatives that exclude each other are
/// enforced as others are; up to where they differ otherwise.
fn as_sent(pointer: &str, sent: &Value) -> String {
    let (mut at, mut done) = (sent, String::new());
    for step in pointer.split('/').skip(1) {
        let key = step.replace("~1", "/").replace("~0", "~");
        let key = if key == "anyOf" && at.get("anyOf").is_none() { "oneOf".to_owned() } else { key };
        let next = match at {
            Value::Array(list) => key.parse::<usize>().ok().and_then(|i| list.get(i)),
            other => other.get(&key),
        };
        let Some(next) = next else { break };
        (at, done) = (next, format!("{done}/{}", escaped(&key)));
    }
    done
}

/// What the library says of the schema or the value under `key`.
fn plain(why: &str, key: &str) -> String {
    if let Some(kind) = why.strip_prefix("Invalid type: ") {
        let types = "array, boolean, integer, null, number, object and string";
        return format!("{} is not a type; types are {types}", json!(kind));
    }
    if let Some(why) = why.strip_prefix("Unsatisfiable schema: ") {
        let named = if ["oneOf", "enum"].contains(&key) { why.replace("anyOf", key) } else { why.to_owned() };
        return format!("no value matches: {named}");
    }
    if let Some(keys) = why.strip_prefix("Unimplemented keys: ") {
        return format!("the keywords {keys} are not supported");
    }
    if let Some((wanted, got)) = why.strip_prefix("Expected ").and_then(|rest| rest.split_once(", got ")) {
        let kind = match wanted.split(" for ").next().unwrap_or_default() {
            "f64" => "a number",
            "object" => "an object",
            "array" => "a list",
            "string" if wanted.ends_with(" item") => "a list of strings",
            "string" => "a string",
            "positive integer" => "a whole number from 0",
            other => other,
        };
        return format!("must be {kind}, but has {got}");
    }
    if let Some((lines, error)) = why.strip_prefix("regex parse error:\n").and_then(|rest| rest.rsplit_once("error: "))
    {
        return format!("is not a regular expression that can be enforced: {error}\n{}", lines.trim_end());
    }
    match why {
        "schema must be an object or boolean" => "must be a schema: an object, true or false".to_owned(),
        "anyOf must be an array" | "allOf must be an array" => "must be a list of schemas".to_owned(),
        "enum must be an array" => "must be a list of values".to_owned(),
        "properties must be an object" => "must be an object of schemas".to_owned(),
        other => other.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without a limit of time, which a busy machine would reach.
    fn explained(sent: &Value) -> String {
        explain_within(sent, Duration::from_secs(3_600)).unwrap_or_default()
    }

    #[test]
    fn mistakes_are_told_with_their_place() {
        for (schema, says) in [
            (json!({ "patternProperties": 3 }), "/patternProperties: must be an object, but has 3"),
            (
                json!({ "patternProperties": { "^a": 3 } }),
                "/patternProperties/^a: must be a schema: an object, true or false",
            ),
            (
                json!({ "properties": { "x": { "patternProperties": { "b": {}, "(?=a)b": { "type": "string" } } } } }),
                "/properties/x/patternProperties/(?=a)b: is not a regular expression that can be enforced: look-around",
            ),
            (json!({ "oneOf": 3 }), "/oneOf: must be a list of schemas"),
            (json!({ "oneOf": [] }), "/oneOf: no value matches: oneOf is empty"),
            (json!({ "enum": [] }), "/enum: no value matches: enum is empty"),
            (json!({ "oneOf": [{}, 3] }), "/oneOf/1: must be a schema: an object, true or false"),
            (
                json!({ "items": { "oneOf": [{ "type": "string" }, { "type": "strng" }] } }),
                "/items/oneOf/1/type: \"strng\" is not a type; types are array, boolean",
            ),
            (
                json!({ "properties": { "a/b": { "minimum": "x" } } }),
                "/properties/a~1b/minimum: must be a number, but has \"x\"",
            ),
            (
                json!({ "properties": { "a": { "$ref": "#/$defs/A" } }, "$defs": { "A": { "type": "array", "minItems": -1 } } }),
                "/$defs/A/minItems: must be a whole number from 0, but has -1",
            ),
            (json!({ "properties": { "a": { "$ref": "#/$defs/B" } } }), "/properties/a/$ref: "),
            (json!({ "required": "a" }), "/required: must be a list, but has \"a\""),
            (
                json!({ "allOf": [{ "type": "string" }, { "type": "integer" }] }),
                "/allOf: no value matches: incompatible types",
            ),
        ] {
            let said = explained(&schema);
            assert!(said.starts_with(says), "{schema}: {said}");
        }
        assert_eq!(explained(&json!({ "type": "object", "properties": { "a": { "type": "integer" } } })), "");
    }

    #[test]
    fn no_wrong_place_is_told_where_there_are_too_many() {
        let mut each: Map<String, Value> =
            (0..1_000).map(|i| (format!("^k{i}$"), json!({ "type": "string" }))).collect();
        each.insert("^z".to_owned(), json!({ "type": "strng" }));
        let said = explained(&json!({ "patternProperties": each }));
        assert!(
            said.starts_with(": ")
                || said.starts_with("/patternProperties: ")
                || said.starts_with("/patternProperties/^z"),
            "{said}"
        );
    }

    #[test]
    fn a_wide_schema_is_searched_no_longer_than_a_narrow_one() {
        let each: Map<String, Value> = (0..5_000).map(|i| (format!("k{i}"), json!({ "type": "string" }))).collect();
        let mut wide = json!({ "properties": each });
        wide["properties"]["z"] = json!({ "type": "strng" });
        assert!(
            explained(&wide).ends_with(
                "\"strng\" is not a type; types are array, boolean, integer, null, number, object and string"
            )
        );
    }
}

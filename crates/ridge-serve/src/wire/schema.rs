//! Rewrites JSON schemas into a form that can be enforced during generation.
//!
//! A mask decides token by token, so that it enforces types, keys, patterns and bounds, but nothing that needs a look at
//! the whole value (`uniqueItems`, `contains`, `if`). What pydantic and zod write otherwise than the grammar library reads
//! it is rewritten with the same meaning; what remains is left out and named.

use ridge_engine::service::is_supported_pattern;
use serde_json::{Map, Value, json};

use super::pattern::{mistake, not_only, open_escape, without_assertions};
use crate::json_types::type_name;

/// A schema that can be enforced, and what of the one it was made from cannot, each as a JSON pointer with its reason.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Enforceable {
    pub(crate) schema: Value,
    pub(crate) left_out: Vec<String>,
    /// What is wrong in any reading, in the same form.
    pub(crate) mistakes: Vec<String>,
}

/// Makes `schema` into one that can be enforced.
///
/// Objects whose properties are named have no others, unless the schema says something of others: models that may continue
/// properties of their own do so without end. Where parts of a schema are joined, each names but some, and none is closed.
pub(crate) fn enforceable(schema: Value) -> Enforceable {
    let closes = !is_joined(&schema);
    let mut rewriting = Rewriting { closes, root: schema.clone(), left_out: Vec::new(), mistakes: Vec::new() };
    let schema = rewriting.schema(schema, "");
    Enforceable { schema, left_out: rewriting.left_out, mistakes: rewriting.mistakes }
}

/// Formats of strings that have a grammar.
const FORMATS: [&str; 10] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];
/// Keywords that a mask cannot enforce.
const UNENFORCEABLE: [&str; 12] = [
    "contains",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "else",
    "if",
    "not",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$recursiveRef",
];
/// Keywords that say nothing by themselves, or only about one that cannot be enforced.
const SILENT: [&str; 5] = ["$dynamicAnchor", "$recursiveAnchor", "maxContains", "minContains", "x-guidance"];
/// References that are followed one behind the other at most.
const LONGEST_CHAIN: usize = 16;
/// Alternatives that are compared with each other at most.
const MAX_COMPARED: usize = 100;

struct Rewriting {
    root: Value,
    /// Are objects closed that do not say whether they are?
    closes: bool,
    left_out: Vec<String>,
    mistakes: Vec<String>,
}

impl Rewriting {
    fn leave_out(&mut self, place: &str, key: &str, why: &str) {
        let said = format!("{place}/{key}: {why}");
        if !self.left_out.contains(&said) {
            self.left_out.push(said);
        }
    }

    /// The schema at the JSON pointer `place`.
    fn schema(&mut self, value: Value, place: &str) -> Value {
        let Value::Object(map) = value else { return value };
        // What zod writes for a value that there cannot be.
        if map.len() == 1 && map.get("not").is_some_and(|not| *not == json!({}) || *not == json!(true)) {
            return json!(false);
        }
        let mut done = Map::new();
        let mut also = Vec::new();
        let has_pattern = map.contains_key("pattern");
        for (key, value) in map {
            let at = format!("{place}/{}", escaped(&key));
            match key.as_str() {
                "properties" | "patternProperties" | "$defs" | "definitions" => {
                    if let (Value::Object(each), "patternProperties") = (&value, key.as_str()) {
                        for pattern in each.keys() {
                            self.is_mistaken(pattern, &format!("{at}/{}", escaped(pattern)));
                        }
                    }
                    done.insert(key, self.of_each_key(value, &at));
                }
                "items" | "prefixItems" | "additionalItems" | "additionalProperties" | "anyOf" | "allOf" => {
                    done.insert(key, self.of_each(value, &at));
                }
                "oneOf" => {
                    if !self.excludes_each_other(&value) {
                        self.leave_out(place, &key, "exclusivity of the alternatives is not enforced");
                    }
                    also.push(json!({ "anyOf": self.of_each(value, &at) }));
                }
                // The grammar's times have a zone; zod's have none, and say so by a pattern.
                "format" if has_pattern && value == json!("time") => {}
                "format" if value.as_str().is_some_and(|format| !FORMATS.contains(&format)) => {
                    let format = value.as_str().unwrap_or_default();
                    // A note on how text is shown or packed rather than a form that it has, or said by the pattern.
                    if !has_pattern && !["binary", "byte", "password", "textarea"].contains(&format) {
                        self.leave_out(place, &key, &format!("the format {format} is not enforced"));
                    }
                }
                "pattern" => also.extend(self.pattern(value, place, &mut done)),
                "uniqueItems" if value == json!(false) => {}
                "uniqueItems" => self.leave_out(place, &key, "is not enforced"),
                // Keys are strings in any case.
                "propertyNames" if value == json!({ "type": "string" }) || value == json!(true) => {}
                "propertyNames" => {
                    done.insert(key, value);
                }
                key if SILENT.contains(&key) => {}
                key if UNENFORCEABLE.contains(&key) => self.leave_out(place, key, "is not enforced"),
                _ => {
                    done.insert(key, value);
                }
            }
        }
        self.property_names(&mut done, place);
        // Alternatives stand by themselves where nothing else claims their key.
        for each in also {
            match each.as_object().and_then(|one| one.iter().next()) {
                Some((key, value)) if !done.contains_key(key) => {
                    done.insert(key.clone(), value.clone());
                }
                _ => {
                    if let Value::Array(list) = done.entry("allOf").or_insert_with(|| json!([])) {
                        list.push(each);
                    }
                }
            }
        }
        let says_so = ["patternProperties", "additionalProperties"].iter().any(|key| done.contains_key(*key));
        if self.closes && !says_so && names_all_required(&done) {
            done.insert("additionalProperties".to_owned(), json!(false));
        }
        self.counted_properties(&mut done, place);
        Value::Object(done)
    }

    fn of_each_key(&mut self, value: Value, place: &str) -> Value {
        let Value::Object(map) = value else { return value };
        let each = |(key, value): (String, Value)| {
            let at = format!("{place}/{}", escaped(&key));
            let value = self.schema(value, &at);
            (key, value)
        };
        Value::Object(map.into_iter().map(each).collect())
    }

    /// A schema, or each of a list.
    fn of_each(&mut self, value: Value, place: &str) -> Value {
        match value {
            Value::Array(list) => {
                let each = |(i, value)| self.schema(value, &format!("{place}/{i}"));
                Value::Array(list.into_iter().enumerate().map(each).collect())
            }
            one => self.schema(one, place),
        }
    }

    /// Puts the pattern into `done` if it can be enforced, or what it is without assertions; gives what it says beside.
    fn pattern(&mut self, value: Value, place: &str, done: &mut Map<String, Value>) -> Option<Value> {
        let at = format!("{place}/pattern");
        let Some(pattern) = value.as_str().filter(|p| self.is_mistaken(p, &at) || !is_supported_pattern(p)) else {
            done.insert("pattern".to_owned(), value);
            return None;
        };
        if !self.mistakes.is_empty() {
            return None;
        }
        let (pattern, also) = match not_only(pattern) {
            Some((class, rest)) => (format!("^{rest}"), Some(json!({ "pattern": format!("[^{class}]") }))),
            None => (pattern.to_owned(), None),
        };
        if is_supported_pattern(&pattern) {
            done.insert("pattern".to_owned(), json!(pattern));
            return also;
        }
        // Without its assertions a pattern matches whatever it does with them.
        match without_assertions(&pattern).filter(|p| is_supported_pattern(p)) {
            Some(pattern) => {
                self.leave_out(place, "pattern", "lookaround assertions are not enforced");
                done.insert("pattern".to_owned(), json!(pattern));
            }
            None => self.leave_out(place, "pattern", "this regular expression is not supported"),
        }
        also
    }

    /// Is the regular expression at the JSON pointer `place` none?
    fn is_mistaken(&mut self, pattern: &str, place: &str) -> bool {
        // The grammar library has extensions that other dialects have not.
        let wrong = open_escape(pattern).or_else(|| mistake(pattern).filter(|_| !is_supported_pattern(pattern)));
        let said = wrong.map(|wrong| format!("{place}: {} is not a regular expression: {wrong}", json!(pattern)));
        let mistaken = said.is_some();
        self.mistakes.extend(said);
        mistaken
    }

    /// Says by properties what `propertyNames` says, where nothing else is said by them.
    fn property_names(&mut self, schema: &mut Map<String, Value>, place: &str) {
        let Some(names) = schema.shift_remove("propertyNames") else { return };
        let of_names = self.followed(&names).clone();
        let values = schema.get("additionalProperties").cloned().unwrap_or_else(|| json!(true));
        let free = !schema.contains_key("properties") && !schema.contains_key("patternProperties");
        let known = of_names.get("enum").or(of_names.get("const")).map(|known| match known {
            Value::Array(list) => list.clone(),
            one => vec![one.clone()],
        });
        let pattern = of_names.get("pattern").and_then(Value::as_str).filter(|p| is_supported_pattern(p));
        let (key, said) = match (known, pattern) {
            (Some(known), _) if free => {
                let each = known.iter().filter_map(Value::as_str).map(|name| (name.to_owned(), values.clone()));
                ("properties", each.collect::<Map<_, _>>())
            }
            (None, Some(pattern)) if free => ("patternProperties", Map::from_iter([(pattern.to_owned(), values)])),
            _ => return self.leave_out(place, "propertyNames", "is not enforced"),
        };
        schema.insert(key.to_owned(), Value::Object(said));
        schema.insert("additionalProperties".to_owned(), json!(false));
    }

    /// Leaves out bounds of the number of properties that cannot be counted: those over optional ones.
    fn counted_properties(&mut self, schema: &mut Map<String, Value>, place: &str) {
        let properties = schema.get("properties").and_then(Value::as_object).map_or(0, Map::len);
        let required = schema.get("required").and_then(Value::as_array).map_or(0, Vec::len);
        let bound = |key: &str| schema.get(key).and_then(Value::as_u64).map(|n| n.saturating_sub(required as u64));
        let (least, most) = (bound("minProperties").unwrap_or(0), bound("maxProperties"));
        if properties <= required || least == 0 && most.is_none() {
            return;
        }
        let closed =
            schema.get("additionalProperties") == Some(&json!(false)) && !schema.contains_key("patternProperties");
        if closed && least <= 1 && most.unwrap_or(1) == 1 {
            return;
        }
        for key in ["minProperties", "maxProperties"] {
            if schema.shift_remove(key).is_some() {
                self.leave_out(place, key, "is not enforced for optional properties");
            }
        }
    }

    /// The schema that `value` refers to, or itself.
    fn followed<'a>(&'a self, value: &'a Value) -> &'a Value {
        let mut value = value;
        for _ in 0..LONGEST_CHAIN {
            let to = value.get("$ref").and_then(Value::as_str).and_then(|to| to.strip_prefix('#'));
            match to.and_then(|to| self.root.pointer(to)) {
                Some(next) => value = next,
                None => break,
            }
        }
        value
    }

    /// Can no value match two of these schemas?
    fn excludes_each_other(&self, list: &Value) -> bool {
        let list: Vec<&Value> = list.as_array().into_iter().flatten().map(|one| self.followed(one)).collect();
        list.len() <= MAX_COMPARED && list.iter().enumerate().all(|(i, a)| list[..i].iter().all(|b| self.exclude(a, b)))
    }

    fn exclude(&self, a: &Value, b: &Value) -> bool {
        if let (Some(a), Some(b)) = (values(a), values(b)) {
            return !a.iter().any(|one| b.contains(one));
        }
        if let (Some(a), Some(b)) = (types(a), types(b))
            && !a.iter().any(|one| b.contains(one))
        {
            return true;
        }
        // Objects with a key in common that tells them apart.
        let property = |of: &'_ Value, key: &str| of.get("properties").and_then(|p| p.get(key)).cloned();
        let required = |of: &Value, key: &str| {
            of.get("required").and_then(Value::as_array).is_some_and(|list| list.iter().any(|k| k == key))
        };
        let (Some("object"), Some("object")) =
            (a.get("type").and_then(Value::as_str), b.get("type").and_then(Value::as_str))
        else {
            return false;
        };
        let keys = a.get("properties").and_then(Value::as_object).into_iter().flat_map(Map::keys);
        keys.into_iter().any(|key| {
            let (Some(of_a), Some(of_b)) = (property(a, key), property(b, key)) else { return false };
            let (of_a, of_b) = (values(self.followed(&of_a)), values(self.followed(&of_b)));
            let told = of_a.zip(of_b).is_some_and(|(a, b)| !a.iter().any(|one| b.contains(one)));
            told && (required(a, key) && required(b, key))
        })
    }
}

/// A key in a JSON pointer.
pub(super) fn escaped(key: &str) -> String {
    key.replace('~', "~0").replace('/', "~1")
}

/// Are parts of the schema joined: by `allOf`, or by alternatives or a reference beside properties?
fn is_joined(schema: &Value) -> bool {
    match schema {
        Value::Object(map) => {
            let has = |keys: &[&str]| keys.iter().any(|key| map.contains_key(*key));
            let beside = ["properties", "required", "patternProperties", "additionalProperties"];
            has(&["allOf"]) || has(&["anyOf", "oneOf", "$ref"]) && has(&beside) || map.values().any(is_joined)
        }
        Value::Array(list) => list.iter().any(is_joined),
        _ => false,
    }
}

/// Does an object name properties, those that it requires among them?
fn names_all_required(schema: &Map<String, Value>) -> bool {
    let Some(properties) = schema.get("properties").and_then(Value::as_object) else { return false };
    let mut required = schema.get("required").and_then(Value::as_array).into_iter().flatten();
    required.all(|name| name.as_str().is_some_and(|name| properties.contains_key(name)))
}

/// The values that a schema names, if it names them.
fn values(schema: &Value) -> Option<Vec<Value>> {
    match (schema.get("const"), schema.get("enum")) {
        (Some(one), _) => Some(vec![one.clone()]),
        (None, Some(Value::Array(list))) => Some(list.clone()),
        _ => None,
    }
}

/// The types that a schema allows, if it says so; a whole number is a number.
fn types(schema: &Value) -> Option<Vec<&str>> {
    let types: Vec<&str> = match (schema.get("type"), values(schema)) {
        (Some(Value::String(one)), _) => vec![one],
        (Some(Value::Array(list)), _) => list.iter().filter_map(Value::as_str).collect(),
        (_, Some(values)) => values.iter().map(type_name).collect(),
        _ => return None,
    };
    Some(types.into_iter().map(|name| if name == "integer" { "number" } else { name }).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(schema: Value, becomes: &Value, left_out: &[&str]) {
        let made = enforceable(schema);
        assert_eq!(
            (&made.schema, made.left_out.iter().map(String::as_str).collect::<Vec<_>>()),
            (becomes, left_out.to_vec())
        );
    }

    #[test]
    fn what_can_be_enforced_stays_as_it_is() {
        for schema in [
            json!(true),
            json!({}),
            json!({ "type": "object", "properties": { "a": { "type": "string", "pattern": "^a+$", "format": "uuid" } },
                "required": ["a"], "additionalProperties": false, "$defs": { "x": { "enum": [{ "not": 1 }] } } }),
            json!({ "type": "array", "prefixItems": [{ "type": "integer" }], "minItems": 1 }),
            json!({ "const": { "uniqueItems": true, "format": "path" } }),
            json!({ "type": "object", "properties": { "not": { "type": "string" }, "format": true }, "additionalProperties": true }),
            json!({ "allOf": [{ "properties": { "a": {} } }, { "properties": { "b": {} } }] }),
            json!({ "properties": { "a": {} }, "anyOf": [{ "required": ["a"] }, { "required": ["b"] }] }),
            json!({ "properties": { "a": {} }, "required": ["b"] }),
            json!({ "properties": { "a": {} }, "anyOf": [{ "properties": { "b": {} } }, { "properties": { "c": {} } }] }),
            json!({ "type": "object", "additionalProperties": { "type": "integer" }, "minProperties": 1 }),
        ] {
            check(schema.clone(), &schema, &[]);
        }
    }

    #[test]
    fn what_cannot_be_enforced_is_left_out_and_named() {
        check(
            json!({ "type": "array", "uniqueItems": true, "contains": {}, "minContains": 2, "items": { "format": "path" } }),
            &json!({ "type": "array", "items": {} }),
            &[
                "/uniqueItems: is not enforced",
                "/contains: is not enforced",
                "/items/format: the format path is not enforced",
            ],
        );
        check(
            json!({ "properties": { "a/b": { "not": { "const": 1 }, "type": "integer" } }, "dependentRequired": {} }),
            &json!({ "properties": { "a/b": { "type": "integer" } }, "additionalProperties": false }),
            &["/properties/a~1b/not: is not enforced", "/dependentRequired: is not enforced"],
        );
        check(json!({ "pattern": r"^(a)\1$" }), &json!({}), &["/pattern: this regular expression is not supported"]);
        check(
            json!({ "properties": { "a": {}, "b": {} }, "minProperties": 1, "additionalProperties": true }),
            &json!({ "properties": { "a": {}, "b": {} }, "additionalProperties": true }),
            &["/minProperties: is not enforced for optional properties"],
        );
        let one = json!({ "properties": { "a": {}, "b": {} }, "minProperties": 1, "additionalProperties": false });
        check(one.clone(), &one, &[]);
        check(json!({ "properties": { "a": {}, "b": {} }, "minProperties": 1 }), &one, &[]);
    }

    #[test]
    fn names_of_properties_become_properties() {
        check(
            json!({ "type": "object", "propertyNames": { "$ref": "#/$defs/C" }, "additionalProperties": { "type": "integer" },
                "$defs": { "C": { "enum": ["red", "blue"] } } }),
            &json!({ "type": "object", "additionalProperties": false, "$defs": { "C": { "enum": ["red", "blue"] } },
                "properties": { "red": { "type": "integer" }, "blue": { "type": "integer" } } }),
            &[],
        );
        check(
            json!({ "propertyNames": { "pattern": "^k" } }),
            &json!({ "patternProperties": { "^k": true }, "additionalProperties": false }),
            &[],
        );
        check(json!({ "propertyNames": { "type": "string" } }), &json!({}), &[]);
        check(json!({ "propertyNames": { "minLength": 2 } }), &json!({}), &["/propertyNames: is not enforced"]);
        check(
            json!({ "properties": { "a": { "not": {} } } }),
            &json!({ "properties": { "a": false }, "additionalProperties": false }),
            &[],
        );
    }

    #[test]
    fn alternatives_that_exclude_each_other_are_enforced() {
        let of = |kind: &str| {
            let properties = json!({ "kind": { "const": kind } });
            json!({ "type": "object", "properties": properties, "required": ["kind"], "additionalProperties": false })
        };
        let overlapping = "/oneOf: exclusivity of the alternatives is not enforced";
        for (list, left_out) in [
            (json!([of("a"), of("b")]), None),
            (json!([{ "type": "integer" }, { "type": "string" }, { "type": ["null", "boolean"] }]), None),
            (json!([{ "const": 1 }, { "enum": [2, 3] }]), None),
            (json!([{ "type": "integer" }, { "type": "number" }]), Some(overlapping)),
            (json!([of("a"), { "type": "object" }]), Some(overlapping)),
            (json!([of("a"), of("a")]), Some(overlapping)),
        ] {
            let becomes = json!({ "anyOf": list });
            check(json!({ "oneOf": list }), &becomes, &left_out.into_iter().collect::<Vec<_>>());
        }
        let both = json!({ "anyOf": [{ "type": "string" }], "oneOf": [{ "const": "a" }, { "const": "b" }] });
        check(
            both,
            &json!({ "anyOf": [{ "type": "string" }], "allOf": [{ "anyOf": [{ "const": "a" }, { "const": "b" }] }] }),
            &[],
        );
    }

    #[test]
    fn patterns_that_look_ahead_are_rewritten_or_widened() {
        check(
            json!({ "type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$" }),
            &json!({ "type": "string", "pattern": r"^[+-]?0*\d*\.?\d*$", "allOf": [{ "pattern": "[^-+.]" }] }),
            &[],
        );
        check(
            json!({ "pattern": r"^(?=.*[0-9)])[a-z\]0-9]{2,}$" }),
            &json!({ "pattern": r"^[a-z\]0-9]{2,}$" }),
            &["/pattern: lookaround assertions are not enforced"],
        );
    }
}

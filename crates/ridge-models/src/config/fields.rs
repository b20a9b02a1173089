//! A JSON object read key by key, which remembers what was read and reports what was not.

use std::collections::BTreeSet;

use ridge_graph::DType;
use ridge_graph::ops::Gelu;
use serde_json::{Map, Value};

use crate::error::{ModelError, Result};
use ridge_files::json;

/// What to do where two keys contradict each other.
pub(crate) const REMEDY: &str = "check that the config belongs to this checkpoint";

/// One JSON object on its way into a configuration. `null` counts as absent, as it does for the libraries that write
/// these files.
pub(crate) struct Fields<'a> {
    file: &'a str,
    /// The keys of the objects around this one, each with a dot behind it.
    prefix: String,
    map: &'a Map<String, Value>,
    taken: BTreeSet<&'static str>,
}

/// A value that a key can have.
pub(crate) trait Field<'a>: Sized {
    /// What it is called in "is not ..." and "must be ...".
    const EXPECTED: &'static str;
    /// `None` if `value` is something else.
    fn from_json(value: &'a Value) -> Option<Self>;
}

impl<'a> Fields<'a> {
    /// The fields of the object `map`, which is the whole of `file`.
    pub(crate) fn new(file: &'a str, map: &'a Map<String, Value>) -> Self {
        Self { file, prefix: String::new(), map, taken: BTreeSet::new() }
    }

    fn take(&mut self, key: &'static str) -> Option<&'a Value> {
        self.taken.insert(key);
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// The value of `key`, or `None` if it is absent or null; an error if it is not a `T`.
    pub(crate) fn optional<T: Field<'a>>(&mut self, key: &'static str) -> Result<Option<T>> {
        let Some(value) = self.take(key) else {
            return Ok(None);
        };
        match T::from_json(value) {
            Some(value) => Ok(Some(value)),
            None => Err(self.wrong(key, format!("is not {}", T::EXPECTED), "mend the file or download it again")),
        }
    }

    /// The value of `key`; an error if it is absent, null or not a `T`.
    pub(crate) fn required<T: Field<'a>>(&mut self, key: &'static str) -> Result<T> {
        match self.optional(key)? {
            Some(value) => Ok(value),
            None => Err(self.missing(key, T::EXPECTED)),
        }
    }

    /// A count or extent in `1..=max`, or `None` if it is absent.
    pub(crate) fn optional_size(&mut self, key: &'static str, max: usize) -> Result<Option<usize>> {
        let Some(Count(size)) = self.optional(key)? else {
            return Ok(None);
        };
        match usize::try_from(size) {
            Ok(size) if (1..=max).contains(&size) => Ok(Some(size)),
            _ => Err(self.wrong(
                key,
                format!("is outside 1..={max}"),
                "check that the file is a model's configuration and is not damaged",
            )),
        }
    }

    /// A count or extent in `1..=max`.
    pub(crate) fn size(&mut self, key: &'static str, max: usize) -> Result<usize> {
        match self.optional_size(key, max)? {
            Some(size) => Ok(size),
            None => Err(self.missing(key, Count::EXPECTED)),
        }
    }

    /// A number above 0, or `None` if it is absent.
    pub(crate) fn optional_positive(&mut self, key: &'static str) -> Result<Option<f64>> {
        let value: Option<f64> = self.optional(key)?;
        if value.is_some_and(|v| !(v.is_finite() && v > 0.0)) {
            return Err(self.wrong(key, "is not above 0", "check that the file is not damaged"));
        }
        Ok(value)
    }

    /// A number above 0.
    pub(crate) fn positive(&mut self, key: &'static str) -> Result<f64> {
        match self.optional_positive(key)? {
            Some(value) => Ok(value),
            None => self.required(key), // absent, so this names what is missing
        }
    }

    /// The object under `key`, or `None` if it is absent.
    pub(crate) fn object(&mut self, key: &'static str) -> Result<Option<Self>> {
        let map: Option<&Map<String, Value>> = self.optional(key)?;
        Ok(map.map(|map| Self {
            file: self.file,
            prefix: format!("{}{key}.", self.prefix),
            map,
            taken: BTreeSet::new(),
        }))
    }

    /// The object under `key`.
    pub(crate) fn required_object(&mut self, key: &'static str) -> Result<Self> {
        match self.object(key)? {
            Some(object) => Ok(object),
            None => Err(self.missing(key, <&Map<String, Value>>::EXPECTED)),
        }
    }

    /// A count without limits, or `None` if it is absent.
    pub(crate) fn count(&mut self, key: &'static str) -> Result<Option<u64>> {
        Ok(self.optional(key)?.map(|Count(count)| count))
    }

    /// The GELU that `key` names, or `default` if it is absent.
    pub(crate) fn gelu(&mut self, key: &'static str, default: Gelu) -> Result<Gelu> {
        match self.optional(key)? {
            None => Ok(default),
            Some("gelu") => Ok(Gelu::Erf),
            Some("gelu_new" | "gelu_fast" | "gelu_pytorch_tanh") => Ok(Gelu::Tanh),
            Some(_) => Err(self.wrong(
                key,
                "is not supported",
                "Ridge runs models of this family with \"gelu\", \"gelu_new\", \"gelu_fast\" or \"gelu_pytorch_tanh\"",
            )),
        }
    }

    /// Refuses a model that is not a `class`, if the file says what it is: `MPTForCausalLM` is `MptForCausalLM`.
    pub(crate) fn architecture(&mut self, class: &str) -> Result<()> {
        self.architecture_of(&[class])
    }

    /// Refuses a model that is none of `classes`, if the file says what it is.
    pub(crate) fn architecture_of(&mut self, classes: &[&str]) -> Result<()> {
        let names: Option<Vec<&str>> = self.optional("architectures")?;
        let known = |name: &str| classes.iter().any(|class| name.eq_ignore_ascii_case(class));
        if names.is_none_or(|names| matches!(names[..], [name] if known(name))) {
            return Ok(());
        }
        Err(self.wrong(
            "architectures",
            "is not what Ridge reads",
            format!("choose a checkpoint with architectures = [{:?}]", classes.join(" or ")),
        ))
    }

    /// The value of `key`, whatever it is.
    pub(crate) fn raw(&mut self, key: &'static str) -> Option<&'a Value> {
        self.take(key)
    }

    /// Refuses any value of `key` but `only`, which is also what its absence means. Numbers compare by value: 0 is 0.0.
    pub(crate) fn must_be(&mut self, key: &'static str, only: impl Into<Value>) -> Result<()> {
        let only = only.into();
        match self.take(key) {
            None => Ok(()),
            Some(value) if *value == only => Ok(()),
            Some(value) if value.as_f64().is_some() && value.as_f64() == only.as_f64() => Ok(()),
            Some(_) => Err(self.wrong(key, "is not supported", format!("Ridge runs models with {key} = {only} only"))),
        }
    }

    /// Refuses a file without one of `keys`, for which its family has a default that Ridge does not guess.
    pub(crate) fn needs(&self, keys: &[&'static str]) -> Result<()> {
        match keys.iter().find(|key| self.map.get(**key).is_none_or(Value::is_null)) {
            None => Ok(()),
            Some(key) => Err(self.missing(key, Count::EXPECTED)),
        }
    }

    /// Is there a list under `key`?
    pub(crate) fn is_list(&self, key: &str) -> bool {
        self.map.get(key).is_some_and(Value::is_array)
    }

    /// Is there a text under `key`?
    pub(crate) fn is_text(&self, key: &str) -> bool {
        self.map.get(key).is_some_and(Value::is_string)
    }

    /// Is there an object under `key`?
    pub(crate) fn is_object(&self, key: &str) -> bool {
        self.map.get(key).is_some_and(Value::is_object)
    }

    /// Is there such a key, if only with null?
    pub(crate) fn has(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    /// Are there no keys?
    pub(crate) fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// Marks keys that cannot change what the model computes, whatever they say.
    pub(crate) fn harmless(&mut self, keys: &[&'static str]) {
        self.taken.extend(keys);
    }

    /// The error that `key`'s value has a `problem`.
    pub(crate) fn wrong(&self, key: &str, problem: impl Into<String>, remedy: impl Into<String>) -> ModelError {
        ModelError::Value {
            file: self.file.to_owned(),
            key: self.path(key),
            value: json::shown(self.map.get(key).unwrap_or(&Value::Null)),
            problem: problem.into(),
            remedy: remedy.into(),
        }
    }

    fn missing(&self, key: &str, expected: &'static str) -> ModelError {
        ModelError::Missing { file: self.file.to_owned(), key: self.path(key), expected }
    }

    /// Ends the reading: an error that lists every key which was neither read nor marked harmless.
    pub(crate) fn finish(self) -> Result<()> {
        let keys: Vec<(String, String)> = self
            .map
            .iter()
            .filter(|(key, _)| !self.taken.contains(key.as_str()))
            .map(|(key, value)| (self.path(key), json::shown(value)))
            .collect();
        if keys.is_empty() {
            return Ok(());
        }
        Err(ModelError::UnknownKeys { file: self.file.to_owned(), keys })
    }

    fn path(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }
}

/// A whole number of things, not yet held against a limit.
struct Count(u64);

impl Field<'_> for Count {
    const EXPECTED: &'static str = "a whole number, without quotes or decimal point";
    fn from_json(value: &Value) -> Option<Self> {
        value.as_u64().map(Self)
    }
}

/// A token id.
impl Field<'_> for u32 {
    const EXPECTED: &'static str = "a token id (a whole number from 0 to 4294967295)";
    fn from_json(value: &Value) -> Option<Self> {
        value.as_u64()?.try_into().ok()
    }
}

/// One token id or a list of them.
pub(crate) struct TokenIds(pub(crate) Vec<u32>);

impl Field<'_> for TokenIds {
    const EXPECTED: &'static str = "a token id or a list of token ids";
    fn from_json(value: &Value) -> Option<Self> {
        match value {
            Value::Array(list) => list.iter().map(u32::from_json).collect(),
            one => u32::from_json(one).map(|id| vec![id]),
        }
        .map(Self)
    }
}

impl Field<'_> for f64 {
    const EXPECTED: &'static str = "a number, without quotes";
    fn from_json(value: &Value) -> Option<Self> {
        value.as_f64()
    }
}

impl Field<'_> for bool {
    const EXPECTED: &'static str = "true or false";
    fn from_json(value: &Value) -> Option<Self> {
        value.as_bool()
    }
}

impl<'a> Field<'a> for &'a str {
    const EXPECTED: &'static str = "a text in quotes";
    fn from_json(value: &'a Value) -> Option<Self> {
        value.as_str()
    }
}

impl<'a> Field<'a> for &'a Map<String, Value> {
    const EXPECTED: &'static str = "an object in braces";
    fn from_json(value: &'a Value) -> Option<Self> {
        value.as_object()
    }
}

/// Names in the sense of PyTorch.
impl Field<'_> for DType {
    const EXPECTED: &'static str = "one of \"float32\", \"bfloat16\", \"float16\", \"float8_e4m3fn\", \"float8_e5m2\"";
    fn from_json(value: &Value) -> Option<Self> {
        Some(match value.as_str()? {
            "float32" => Self::F32,
            "bfloat16" => Self::BF16,
            "float16" => Self::F16,
            "float8_e4m3fn" => Self::F8E4M3,
            "float8_e5m2" => Self::F8E5M2,
            _ => return None,
        })
    }
}

/// A list of numbers.
impl Field<'_> for Vec<f64> {
    const EXPECTED: &'static str = "a list of numbers, without quotes";
    fn from_json(value: &Value) -> Option<Self> {
        value.as_array()?.iter().map(Value::as_f64).collect()
    }
}

/// A list of whole numbers.
impl Field<'_> for Vec<u64> {
    const EXPECTED: &'static str = "a list of whole numbers";
    fn from_json(value: &Value) -> Option<Self> {
        value.as_array()?.iter().map(Value::as_u64).collect()
    }
}

/// A list of texts.
impl<'a> Field<'a> for Vec<&'a str> {
    const EXPECTED: &'static str = "a list of texts in quotes";
    fn from_json(value: &'a Value) -> Option<Self> {
        value.as_array()?.iter().map(Value::as_str).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(text: &str) -> Map<String, Value> {
        json::object("config.json", text.as_bytes()).unwrap()
    }

    #[test]
    fn leftovers_are_reported_with_their_values() {
        let map = map(r#"{"read": 1, "harmless": 2, "a": {"b": [1]}, "c": null}"#);
        let mut fields = Fields::new("config.json", &map);
        fields.size("read", 10).unwrap();
        fields.harmless(&["harmless", "absent"]);
        assert_eq!(
            fields.finish().unwrap_err().to_string(),
            "config.json: unknown keys a = {\"b\":[1]}, c = null; Ridge cannot tell whether that changes what the \
             model computes: remove what certainly does not, or choose a checkpoint without it"
        );
    }

    #[test]
    fn nested_keys_are_named_in_full() {
        let map = map(r#"{"outer": {"inner": {"factor": -1}}}"#);
        let mut outer = Fields::new("config.json", &map);
        let mut inner = outer.object("outer").unwrap().unwrap();
        let mut inner = inner.object("inner").unwrap().unwrap();
        assert_eq!(
            inner.positive("factor").unwrap_err().to_string(),
            "config.json: outer.inner.factor = -1 is not above 0; check that the file is not damaged"
        );
    }

    #[test]
    fn whole_numbers_are_not_read_from_floats_or_texts() {
        let map = map(r#"{"float": 64.0, "text": "64", "negative": -1, "huge": 1e30, "zero": 0}"#);
        let mut fields = Fields::new("config.json", &map);
        for key in ["float", "text", "negative", "huge"] {
            let message = fields.size(key, 100).unwrap_err().to_string();
            assert!(
                message.starts_with(&format!("config.json: {key} = ")) && message.contains("is not a whole number"),
                "{message}"
            );
        }
        let message = fields.size("zero", 100).unwrap_err().to_string();
        assert!(message.contains("zero = 0 is outside 1..=100"), "{message}");
    }

    #[test]
    fn null_counts_as_absent() {
        let map = map(r#"{"n": null}"#);
        let mut fields = Fields::new("config.json", &map);
        assert_eq!(fields.optional::<bool>("n").unwrap(), None);
        fields.must_be("n", 3).unwrap();
        assert!(matches!(fields.positive("n"), Err(ModelError::Missing { .. })));
    }

    #[test]
    fn required_values_compare_by_number_not_by_spelling() {
        let map = map(r#"{"zero": 0.0, "one": 1}"#);
        let mut fields = Fields::new("config.json", &map);
        fields.must_be("zero", 0).unwrap();
        fields.must_be("one", 1.0).unwrap();
        let message = fields.must_be("one", false).unwrap_err().to_string();
        assert!(message.contains("one = 1 is not supported"), "{message}");
    }
}

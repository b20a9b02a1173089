//! Filters: what may stand behind `|`. Texts are in `texts.rs`, lists in `lists.rs`, numbers in `numbers.rs`.

mod lists;
mod numbers;
mod texts;

use std::sync::Arc;

use super::args::Args;
use super::fault::{Res, fail, unsupported};
use super::renderer::Renderer;
use super::value::{Dict, Value};

/// Is there a filter of this name?
pub(crate) fn exists(name: &str) -> bool {
    matches!(
        name,
        "abs"
            | "attr"
            | "batch"
            | "capitalize"
            | "center"
            | "count"
            | "d"
            | "default"
            | "dictsort"
            | "e"
            | "escape"
            | "filesizeformat"
            | "first"
            | "float"
            | "forceescape"
            | "format"
            | "groupby"
            | "indent"
            | "int"
            | "join"
            | "last"
            | "length"
            | "list"
            | "lower"
            | "items"
            | "map"
            | "min"
            | "max"
            | "pprint"
            | "random"
            | "reject"
            | "rejectattr"
            | "replace"
            | "reverse"
            | "round"
            | "safe"
            | "select"
            | "selectattr"
            | "slice"
            | "sort"
            | "string"
            | "striptags"
            | "sum"
            | "title"
            | "trim"
            | "truncate"
            | "unique"
            | "upper"
            | "urlencode"
            | "urlize"
            | "wordcount"
            | "wordwrap"
            | "xmlattr"
            | "tojson"
    )
}

impl Renderer<'_> {
    /// `value|name(args)`
    pub(crate) fn filter(&self, name: &str, value: Value, args: Args) -> Res<Value> {
        self.work(value.as_str().map_or(0, str::len))?;
        match name {
            "d" | "default" => {
                let mut bound = args.bind(name, &["default_value", "boolean"], 0)?;
                let boolean = bound.flag(1, false);
                let missing = value.is_undefined() || boolean && !value.truthy();
                Ok(if missing { bound.take(0).unwrap_or_else(|| Value::str("")) } else { value })
            }
            "tojson" => self.to_json(&value, args),
            "attr" => {
                let Some(attribute) = args.bind(name, &["name"], 1)?.text(0)? else {
                    return fail("attribute name must be string, not 'NoneType'");
                };
                if let Value::Undefined(message) = &value {
                    return fail(&**message);
                }
                let found = Self::known_attribute(&value, &attribute)?;
                Ok(found.unwrap_or_else(|| super::index::no_attribute(&value, &attribute)))
            }
            "count" | "length" => {
                args.none("len")?;
                match value.len() {
                    Some(length) => {
                        self.work(length)?;
                        Ok(Value::Int(length as i128))
                    }
                    None => fail(format!("object of type '{}' has no len()", value.type_name())),
                }
            }
            "random" | "urlize" | "xmlattr" => unsupported(format!("the filter '{name}' is not supported")),
            "abs" | "filesizeformat" | "float" | "int" | "round" => Self::number_filter(name, &value, args),
            "batch" | "dictsort" | "first" | "groupby" | "items" | "join" | "last" | "list" | "map" | "max" | "min"
            | "reject" | "rejectattr" | "reverse" | "select" | "selectattr" | "slice" | "sort" | "sum" | "unique" => {
                self.list_filter(name, value, args)
            }
            _ if exists(name) => self.text_filter(name, value, args),
            _ => fail(format!("No filter named '{name}' found.")),
        }
    }

    /// What `a.b.0` names in an item: each part as an item or an attribute.
    pub(super) fn path(&self, item: &Value, path: &Value, default: Option<&Value>) -> Res<Value> {
        let mut value = item.clone();
        let mut follow = |part: &Value| -> Res<()> {
            value = self.item(&value, part)?;
            if value.is_undefined()
                && let Some(default) = default
            {
                value = default.clone();
            }
            Ok(())
        };
        match path {
            Value::None => {}
            Value::Str(text) => {
                for part in text.split('.') {
                    let digits = !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
                    match part.parse() {
                        Ok(index) if digits => follow(&Value::Int(index))?,
                        _ => follow(&Value::str(part))?,
                    }
                }
            }
            other => follow(other)?,
        }
        Ok(value)
    }

    /// The small letters of a text, anything else as it is.
    pub(super) fn ignoring_case(&self, value: Value) -> Res<Value> {
        match value.as_str() {
            Some(text) => self.string(text.to_lowercase()),
            None => Ok(value),
        }
    }

    /// The arguments behind the first ones.
    pub(super) fn rest_of(args: &Args, skip: usize) -> Args {
        Args { positional: args.positional.iter().skip(skip).cloned().collect(), named: args.named.clone() }
    }

    /// The value's text, for filters that call `soft_str`.
    pub(super) fn soft(&self, value: &Value) -> Res<Arc<str>> {
        match value {
            Value::Str(text) => Ok(text.clone()),
            Value::Markup(_) => unsupported("changing a string made by escape or safe is not supported"),
            other => Ok(self.text(other)?.into()),
        }
    }

    /// `dict` as a list of pairs.
    pub(super) fn pairs(&self, dict: &Dict) -> Res<Vec<Value>> {
        self.charge(32 * dict.len())?;
        dict.entries().iter().map(|(key, value)| Value::tuple(vec![key.clone(), value.clone()])).collect()
    }
}

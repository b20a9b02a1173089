//! The types of JSON, as schemas call them.

use serde_json::Value;

/// What a schema calls the type of `value`: of whole numbers, too, `number`.
pub(crate) fn type_name(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

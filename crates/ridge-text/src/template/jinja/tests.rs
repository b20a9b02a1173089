//! Tests: what may stand behind `is`.

use std::cmp::Ordering;
use std::rc::Rc;

use super::args::Args;
use super::ast::Op;
use super::fault::{Res, fail, unsupported};
use super::ops::Num;
use super::renderer::Renderer;
use super::text::all_of_case;
use super::value::Value;

/// Is there a test of this name?
pub(crate) fn exists(name: &str) -> bool {
    matches!(
        name,
        "odd"
            | "even"
            | "divisibleby"
            | "defined"
            | "undefined"
            | "filter"
            | "test"
            | "none"
            | "boolean"
            | "false"
            | "true"
            | "integer"
            | "float"
            | "lower"
            | "upper"
            | "string"
            | "mapping"
            | "number"
            | "sequence"
            | "iterable"
            | "callable"
            | "sameas"
            | "escaped"
            | "in"
            | "=="
            | "eq"
            | "equalto"
            | "!="
            | "ne"
            | ">"
            | "gt"
            | "greaterthan"
            | "ge"
            | ">="
            | "<"
            | "lt"
            | "lessthan"
            | "<="
            | "le"
    )
}

impl Renderer<'_> {
    /// `value is name(args)`
    pub(crate) fn test(&self, name: &str, value: &Value, args: Args) -> Res<bool> {
        self.step()?;
        let operands = match name {
            "divisibleby" | "sameas" | "in" | "==" | "eq" | "equalto" | "!=" | "ne" | ">" | "gt" | "greaterthan"
            | "ge" | ">=" | "<" | "lt" | "lessthan" | "<=" | "le" => 1,
            _ => 0,
        };
        let params = match name {
            "divisibleby" => "num",
            "sameas" => "other",
            "in" => "seq",
            _ => "/other",
        };
        let other = args.bind(name, &[params][..operands], operands)?.0.into_iter().next().flatten();
        let other = other.unwrap_or(Value::None);
        let ordered = |op: &str, ok: fn(Ordering) -> bool| Ok(self.compare(op, value, &other)?.is_some_and(ok));
        match name {
            "defined" => Ok(!value.is_undefined()),
            "undefined" => Ok(value.is_undefined()),
            "none" => Ok(matches!(value, Value::None)),
            "boolean" => Ok(matches!(value, Value::Bool(_))),
            "true" => Ok(matches!(value, Value::Bool(true))),
            "false" => Ok(matches!(value, Value::Bool(false))),
            "integer" => Ok(matches!(value, Value::Int(_))),
            "float" => Ok(matches!(value, Value::Float(_))),
            "number" => Ok(Num::of(value).is_some()),
            "string" => Ok(value.as_str().is_some()),
            "mapping" => Ok(matches!(value, Value::Dict(_))),
            "iterable" => Ok(value.has_len() || matches!(value, Value::Iter(..))),
            "sequence" => match value {
                Value::View(..) | Value::Loop(_) | Value::Undefined(_) => Ok(value.is_undefined()),
                _ => Ok(value.has_len()),
            },
            "callable" => Ok(matches!(
                value,
                Value::Function(_)
                    | Value::Method(_)
                    | Value::Macro(_)
                    | Value::Loop(_)
                    | Value::Joiner(_)
                    | Value::Undefined(_)
            )),
            "escaped" => Ok(matches!(value, Value::Markup(_))),
            "lower" => Ok(all_of_case(&self.text(value)?, true)),
            "upper" => Ok(all_of_case(&self.text(value)?, false)),
            "odd" => self.rest_is(value, &Value::Int(2), 1),
            "even" => self.rest_is(value, &Value::Int(2), 0),
            "divisibleby" => self.rest_is(value, &other, 0),
            "filter" | "test" => {
                // They are looked up in a dict, which not every value can be.
                super::value::Dict::default().get(value)?;
                let known = if name == "test" { exists } else { super::filters::exists };
                Ok(value.as_str().is_some_and(known))
            }
            "sameas" => same(value, &other),
            "in" => self.contains(&other, value),
            "==" | "eq" | "equalto" => self.equal(value, &other),
            "!=" | "ne" => Ok(!self.equal(value, &other)?),
            ">" | "gt" | "greaterthan" => ordered(">", Ordering::is_gt),
            ">=" | "ge" => ordered(">=", Ordering::is_ge),
            "<" | "lt" | "lessthan" => ordered("<", Ordering::is_lt),
            "<=" | "le" => ordered("<=", Ordering::is_le),
            _ => fail(format!("No test named '{name}'.")),
        }
    }

    fn rest_is(&self, value: &Value, divisor: &Value, rest: i128) -> Res<bool> {
        let found = self.binary(Op::Mod, value, divisor)?;
        self.equal(&found, &Value::Int(rest))
    }
}

/// Python's `is`. Of numbers and texts that depends on what the interpreter keeps only one of.
fn same(a: &Value, b: &Value) -> Res<bool> {
    Ok(match (a, b) {
        (Value::None, Value::None) => true,
        (Value::Bool(a), Value::Bool(b)) => a == b,
        (Value::List(a), Value::List(b)) => Rc::ptr_eq(a, b),
        (Value::Dict(a), Value::Dict(b)) => Rc::ptr_eq(a, b),
        (Value::Namespace(a), Value::Namespace(b)) => Rc::ptr_eq(a, b),
        _ if std::mem::discriminant(a) == std::mem::discriminant(b) => {
            return unsupported(format!("'is sameas' of values of type {} is not supported", a.type_name()));
        }
        _ => false,
    })
}

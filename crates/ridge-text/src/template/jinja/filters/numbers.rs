//! Filters of numbers.

use crate::template::jinja::args::Args;
use crate::template::jinja::fault::{Res, fail, unsupported};
use crate::template::jinja::ops::{Num, integer};
use crate::template::jinja::renderer::Renderer;
use crate::template::jinja::text::is_space;
use crate::template::jinja::value::Value;

impl Renderer<'_> {
    pub(super) fn number_filter(name: &str, value: &Value, args: Args) -> Res<Value> {
        match name {
            "abs" => {
                args.none(name)?;
                match Num::of(value) {
                    Some(Num::Int(i)) => i.checked_abs().map_or_else(
                        || unsupported("integers of more than 127 bits are not supported"),
                        |i| Ok(Value::Int(i)),
                    ),
                    Some(Num::Float(x)) => Ok(Value::Float(x.abs())),
                    None => fail(format!("bad operand type for abs(): '{}'", value.type_name())),
                }
            }
            "int" => {
                let mut bound = args.bind(name, &["default", "base"], 0)?;
                let default = bound.take(0).unwrap_or(Value::Int(0));
                let base = bound.int(1)?.unwrap_or(10);
                to_int(value, default, base)
            }
            "float" => {
                let default = args.bind(name, &["default"], 0)?.take(0).unwrap_or(Value::Float(0.0));
                match value {
                    Value::Undefined(message) => fail(&**message),
                    _ => match (Num::of(value), value.as_str()) {
                        (Some(number), _) => Ok(Value::Float(number.float())),
                        (None, Some(text)) => Ok(parse_float(text)?.map_or(default, Value::Float)),
                        (None, None) => Ok(default),
                    },
                }
            }
            "round" => {
                let mut bound = args.bind(name, &["precision", "method"], 0)?;
                let precision = bound.int(0)?.unwrap_or(0);
                let method = bound.text(1)?.unwrap_or_else(|| "common".into());
                round(value, precision, &method)
            }
            _ => {
                let binary = args.bind(name, &["binary"], 0)?.flag(0, false);
                let Some(number) = Num::of(value) else {
                    return unsupported("filesizeformat of what is no number is not supported");
                };
                Ok(Value::str(file_size(number.float(), binary)))
            }
        }
    }
}

/// Python's `int(text, base)` where it is a plain number, else its `int(float(text))`, else the default.
fn to_int(value: &Value, default: Value, base: i128) -> Res<Value> {
    let from_float = |x: f64| match x {
        x if x.is_nan() || x.is_infinite() => Ok(default.clone()),
        x if x.abs() < 1e38 => Ok(Value::Int(x.trunc() as i128)),
        _ => unsupported("integers of more than 127 bits are not supported"),
    };
    match value {
        Value::Undefined(message) => fail(&**message),
        Value::Float(x) if x.is_infinite() => fail("cannot convert float infinity to integer"),
        Value::Float(x) => from_float(*x),
        Value::Str(text) => {
            if !matches!(base, 2..=36) {
                return unsupported("a base of 0 or beyond 36 is not supported");
            }
            if !text.is_ascii() && text.contains(char::is_numeric) {
                return unsupported("digits that are not ASCII are not supported");
            }
            let trimmed = text.trim_matches(is_space);
            let (negative, digits) = match trimmed.strip_prefix(['+', '-']) {
                Some(digits) => (trimmed.starts_with('-'), digits),
                None => (false, trimmed),
            };
            let prefix = match base {
                2 => ["0b", "0B"],
                8 => ["0o", "0O"],
                16 => ["0x", "0X"],
                _ => ["", ""],
            };
            let digits = match prefix.iter().find_map(|p| digits.strip_prefix(*p)) {
                // An underscore may stand behind the prefix.
                Some(digits) if base != 10 => digits.strip_prefix('_').unwrap_or(digits),
                _ => digits,
            };
            let underscored = digits.starts_with('_') || digits.ends_with('_') || digits.contains("__");
            let plain = digits.replace('_', "");
            let valid = !plain.is_empty() && !underscored && plain.chars().all(|c| c.is_digit(base as u32));
            if valid {
                return match i128::from_str_radix(&plain, base as u32) {
                    Ok(i) => Ok(Value::Int(if negative { -i } else { i })),
                    Err(_) => unsupported("integers of more than 127 bits are not supported"),
                };
            }
            parse_float(text)?.map_or_else(|| Ok(default.clone()), from_float)
        }
        Value::Markup(_) => unsupported("numbers in a string made by escape or safe are not supported"),
        other => Ok(integer(other).map_or(default, Value::Int)),
    }
}

/// Python's `float(text)`.
fn parse_float(text: &str) -> Res<Option<f64>> {
    if !text.is_ascii() && text.contains(char::is_numeric) {
        return unsupported("digits that are not ASCII are not supported");
    }
    let text = text.trim_matches(is_space);
    let bytes = text.as_bytes();
    // An underscore may stand between two digits only.
    let digit = |at: Option<usize>| at.and_then(|at| bytes.get(at)).is_some_and(u8::is_ascii_digit);
    let misplaced = |at: usize| bytes[at] == b'_' && !(digit(at.checked_sub(1)) && digit(at.checked_add(1)));
    if (0..bytes.len()).any(misplaced) {
        return Ok(None);
    }
    // Rust reads what Python reads: signs, exponents, inf, infinity and nan in any case.
    Ok(text.replace('_', "").parse().ok())
}

fn round(value: &Value, precision: i128, method: &str) -> Res<Value> {
    if !matches!(method, "common" | "ceil" | "floor") {
        return fail("method must be common, ceil or floor");
    }
    let Some(number) = Num::of(value) else {
        return match value {
            Value::Undefined(message) => fail(&**message),
            other => fail(format!("type {} doesn't define __round__ method", other.type_name())),
        };
    };
    if !(0..=300).contains(&precision) {
        return unsupported("rounding to tens or to more than 300 digits is not supported");
    }
    let (digits, power) = (precision as usize, 10f64.powi(precision as i32));
    match (method, number) {
        ("common", Num::Int(i)) => Ok(Value::Int(i)),
        ("common", Num::Float(x)) if !x.is_finite() => Ok(Value::Float(x)),
        // The decimal digits that are nearest; printing finds them.
        ("common", Num::Float(x)) => Ok(Value::Float(format!("{x:.digits$}").parse().unwrap_or(x))),
        (_, Num::Int(i)) if precision == 0 && i.unsigned_abs() < 1 << 53 => Ok(Value::Float(i as f64)),
        (_, Num::Int(_)) => unsupported("rounding integers up or down is not supported"),
        (_, Num::Float(x)) if precision > 22 || !x.is_finite() => {
            unsupported("rounding up or down to more than 22 digits is not supported")
        }
        (method, Num::Float(x)) => {
            let scaled = x * power;
            let whole = if method == "ceil" { scaled.ceil() } else { scaled.floor() };
            if whole.abs() >= 9e15 {
                return unsupported("rounding numbers this large up or down is not supported");
            }
            // `math.ceil` gives an integer, which has no negative zero.
            Ok(Value::Float((whole + 0.0) / power))
        }
    }
}

fn file_size(bytes: f64, binary: bool) -> String {
    let base: f64 = if binary { 1024.0 } else { 1000.0 };
    if bytes == 1.0 {
        return "1 Byte".to_owned();
    }
    if bytes < base {
        return format!("{} Bytes", bytes as i128);
    }
    let prefixes = ["k", "M", "G", "T", "P", "E", "Z", "Y"];
    let mut shown = String::new();
    for (at, prefix) in prefixes.iter().enumerate() {
        let unit = base.powi(at as i32 + 2);
        let name = if binary { format!("{}iB", prefix.to_uppercase()) } else { format!("{prefix}B") };
        shown = format!("{:.1} {name}", base * bytes / unit);
        if bytes < unit {
            break;
        }
    }
    shown
}

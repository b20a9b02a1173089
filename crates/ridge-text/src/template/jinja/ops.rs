//! Operators: arithmetic, comparison, membership.

use std::cmp::Ordering;
use std::rc::Rc;

use super::ast::Op;
use super::fault::{Res, fail, unsupported};
use super::renderer::Renderer;
use super::value::{Value, range_len};

/// A number; `True` and `False` are 1 and 0.
#[derive(Clone, Copy)]
pub(crate) enum Num {
    Int(i128),
    Float(f64),
}

impl Num {
    pub(crate) fn of(value: &Value) -> Option<Self> {
        match value {
            Value::Bool(b) => Some(Self::Int(i128::from(*b))),
            Value::Int(i) => Some(Self::Int(*i)),
            Value::Float(x) => Some(Self::Float(*x)),
            _ => None,
        }
    }

    pub(crate) fn float(self) -> f64 {
        match self {
            Self::Int(i) => i as f64,
            Self::Float(x) => x,
        }
    }
}

/// An integer, if the value is one for Python.
pub(crate) fn integer(value: &Value) -> Option<i128> {
    match Num::of(value)? {
        Num::Int(i) => Some(i),
        Num::Float(_) => None,
    }
}

fn too_big<T>() -> Res<T> {
    unsupported("integers of more than 127 bits are not supported")
}

fn int(result: Option<i128>) -> Res<Value> {
    result.map_or_else(too_big, |i| Ok(Value::Int(i)))
}

fn symbol(op: Op) -> &'static str {
    match op {
        Op::Add => "+",
        Op::Sub => "-",
        Op::Mul => "*",
        Op::Div => "/",
        Op::FloorDiv => "//",
        Op::Mod => "%",
        Op::Pow => "** or pow()",
    }
}

impl Renderer<'_> {
    /// `a op b`
    pub(crate) fn binary(&self, op: Op, a: &Value, b: &Value) -> Res<Value> {
        if let (Value::Undefined(message), _) | (_, Value::Undefined(message)) = (a, b)
            // Formatting asks the undefined value for its text only.
            && !(op == Op::Mod && matches!(a, Value::Str(_) | Value::Markup(_)))
        {
            return fail(&**message);
        }
        if let (Some(a), Some(b)) = (Num::of(a), Num::of(b)) {
            return arithmetic(op, a, b);
        }
        match (op, a, b) {
            (Op::Add, Value::Markup(_), Value::Str(_) | Value::Markup(_))
            | (Op::Add, Value::Str(_), Value::Markup(_)) => {
                let (a, b) = (self.escaped(a)?, self.escaped(b)?);
                self.charge(a.len() + b.len())?;
                Ok(Value::Markup([&*a, &*b].concat().into()))
            }
            (Op::Mod, Value::Markup(_), _) | (Op::Mod, _, Value::Markup(_)) => {
                unsupported("'%' with a string that escape or safe made is not supported")
            }
            (Op::Add, Value::Str(a), Value::Str(b)) => {
                self.charge(a.len() + b.len())?;
                Ok(Value::str([&**a, &**b].concat()))
            }
            (Op::Add, Value::Str(_), b) => fail(format!("can only concatenate str (not \"{}\") to str", b.type_name())),
            (Op::Add, Value::List(a), Value::List(b)) => {
                self.charge(16 * (a.len() + b.len()))?;
                Value::list([&a[..], &b[..]].concat())
            }
            (Op::Add, Value::Tuple(a), Value::Tuple(b)) => {
                self.charge(16 * (a.len() + b.len()))?;
                Value::tuple([&a[..], &b[..]].concat())
            }
            (Op::Mod, Value::Str(format), _) => self.percent(format, b),
            (Op::Mul, sequence, count) if integer(count).is_some() => self.repeat(sequence, count),
            (Op::Mul, count, sequence) if integer(count).is_some() => self.repeat(sequence, count),
            (Op::Sub, view, _) if ["dict_items", "dict_keys"].contains(&view.type_name()) => {
                unsupported("'-' of keys or items, which makes a set, is not supported")
            }
            _ => fail(format!(
                "unsupported operand type(s) for {}: '{}' and '{}'",
                symbol(op),
                a.type_name(),
                b.type_name()
            )),
        }
    }

    fn repeat(&self, sequence: &Value, count: &Value) -> Res<Value> {
        let count = integer(count).unwrap_or(0);
        if i64::try_from(count).is_err() {
            return fail("cannot fit 'int' into an index-sized integer");
        }
        let count = usize::try_from(count.max(0)).unwrap_or(usize::MAX);
        let charge = |size: usize| self.charge(size.saturating_mul(count));
        match sequence {
            Value::Str(text) | Value::Markup(text) => {
                charge(text.len())?;
                let repeated = text.repeat(if text.is_empty() { 0 } else { count });
                Ok(if matches!(sequence, Value::Str(_)) {
                    Value::str(repeated)
                } else {
                    Value::Markup(repeated.into())
                })
            }
            Value::List(items) | Value::Tuple(items) => {
                charge(16 * items.len())?;
                let times = if items.is_empty() { 0 } else { count };
                let items: Vec<Value> = (0..times).flat_map(|_| items.iter().cloned()).collect();
                if matches!(sequence, Value::List(_)) { Value::list(items) } else { Value::tuple(items) }
            }
            other => fail(format!("can't multiply a {} by an integer", other.type_name())),
        }
    }

    /// `a == b`
    pub(crate) fn equal(&self, a: &Value, b: &Value) -> Res<bool> {
        self.step()?;
        if let (Some(a), Some(b)) = (Num::of(a), Num::of(b)) {
            return Ok(order(a, b) == Some(Ordering::Equal));
        }
        match (a, b) {
            (Value::Undefined(_), Value::Undefined(_)) | (Value::None, Value::None) => Ok(true),
            (Value::Str(a) | Value::Markup(a), Value::Str(b) | Value::Markup(b)) => {
                self.work(a.len().min(b.len()))?;
                Ok(a == b)
            }
            (Value::List(a), Value::List(b)) | (Value::Tuple(a), Value::Tuple(b)) => {
                if a.len() != b.len() {
                    return Ok(false);
                }
                for (a, b) in a.iter().zip(b.iter()) {
                    if !self.equal(a, b)? {
                        return Ok(false);
                    }
                }
                Ok(true)
            }
            (Value::Dict(a), Value::Dict(b)) => {
                if a.len() != b.len() {
                    return Ok(false);
                }
                for (key, value) in a.entries() {
                    match b.get(key)? {
                        Some(other) if self.equal(value, other)? => {}
                        _ => return Ok(false),
                    }
                }
                Ok(true)
            }
            (Value::Function(a), Value::Function(b)) => Ok(a == b),
            (Value::Macro(a), Value::Macro(b)) => Ok(Rc::ptr_eq(a, b)),
            (Value::Namespace(a), Value::Namespace(b)) => Ok(Rc::ptr_eq(a, b)),
            (Value::Loop(a), Value::Loop(b)) => Ok(Rc::ptr_eq(a, b)),
            (Value::Iter(_, a), Value::Iter(_, b)) => Ok(Rc::ptr_eq(a, b)),
            (Value::View(..), Value::View(..))
            | (Value::Range(..), Value::Range(..))
            | (Value::Method(_), Value::Method(_)) => {
                unsupported(format!("comparing values of type {} is not supported", a.type_name()))
            }
            _ => Ok(false),
        }
    }

    /// The order of two values; nothing where one is not a number (NaN). `op` is for the message.
    pub(crate) fn compare(&self, op: &str, a: &Value, b: &Value) -> Res<Option<Ordering>> {
        self.step()?;
        if let (Some(a), Some(b)) = (Num::of(a), Num::of(b)) {
            return Ok(order(a, b));
        }
        match (a, b) {
            (Value::Undefined(message), _) | (_, Value::Undefined(message)) => fail(&**message),
            (Value::Str(a) | Value::Markup(a), Value::Str(b) | Value::Markup(b)) => {
                self.work(a.len().min(b.len()))?;
                Ok(Some(a.cmp(b)))
            }
            (Value::List(a), Value::List(b)) | (Value::Tuple(a), Value::Tuple(b)) => {
                for (a, b) in a.iter().zip(b.iter()) {
                    if !self.equal(a, b)? {
                        return self.compare(op, a, b);
                    }
                }
                Ok(Some(a.len().cmp(&b.len())))
            }
            _ => fail(format!("'{op}' not supported between instances of '{}' and '{}'", a.type_name(), b.type_name())),
        }
    }

    /// `item in container`
    pub(crate) fn contains(&self, container: &Value, item: &Value) -> Res<bool> {
        self.work(item.as_str().map_or(0, str::len))?;
        match container {
            Value::Str(text) | Value::Markup(text) => match item.as_str() {
                Some(part) => {
                    self.work(text.len())?;
                    Ok(text.contains(part))
                }
                None => fail(format!("'in <string>' requires string as left operand, not {}", item.type_name())),
            },
            Value::Dict(dict) | Value::View(super::value::View::Keys, dict) => Ok(dict.get(item)?.is_some()),
            Value::View(view, dict) => {
                for entry in dict.entries() {
                    if self.equal(&view.item(entry)?, item)? {
                        return Ok(true);
                    }
                }
                Ok(false)
            }
            Value::List(items) | Value::Tuple(items) => {
                for each in items.iter() {
                    if self.equal(each, item)? {
                        return Ok(true);
                    }
                }
                Ok(false)
            }
            Value::Range(start, _, step) => match Num::of(item) {
                Some(Num::Int(i)) => Ok(i.checked_sub(*start).is_some_and(|from_start| {
                    let at = from_start / step;
                    from_start % step == 0 && at >= 0 && at < range_len(container) as i128
                })),
                Some(Num::Float(_)) => unsupported("a float in a range is not supported"),
                None => Ok(false),
            },
            Value::Iter(_, items) => loop {
                // Taken before it is compared: what was looked at is gone.
                let next = items.borrow_mut().pop_front();
                match next {
                    None => return Ok(false),
                    Some(each) => {
                        if self.equal(&each?, item)? {
                            return Ok(true);
                        }
                    }
                }
            },
            Value::Undefined(_) => Ok(false),
            Value::Loop(_) => unsupported("'in' of the loop variable is not supported"),
            other => fail(format!("argument of type '{}' is not iterable", other.type_name())),
        }
    }
}

/// The order of two numbers, exact also where an integer has no float of its own.
fn order(a: Num, b: Num) -> Option<Ordering> {
    let mixed = |i: i128, x: f64| {
        if x.is_nan() {
            return None;
        }
        if x.abs() >= 1.7e38 {
            return Some(if x > 0.0 { Ordering::Less } else { Ordering::Greater });
        }
        let whole = x.trunc();
        Some(i.cmp(&(whole as i128)).then(whole.total_cmp(&x)))
    };
    match (a, b) {
        (Num::Int(a), Num::Int(b)) => Some(a.cmp(&b)),
        (Num::Float(a), Num::Float(b)) => a.partial_cmp(&b),
        (Num::Int(a), Num::Float(b)) => mixed(a, if b == 0.0 { 0.0 } else { b }),
        (Num::Float(a), Num::Int(b)) => mixed(b, if a == 0.0 { 0.0 } else { a }).map(Ordering::reverse),
    }
}

fn arithmetic(op: Op, a: Num, b: Num) -> Res<Value> {
    let zero = || fail("division by zero");
    if let (Num::Int(a), Num::Int(b)) = (a, b) {
        return match op {
            Op::Add => int(a.checked_add(b)),
            Op::Sub => int(a.checked_sub(b)),
            Op::Mul => int(a.checked_mul(b)),
            Op::Div | Op::FloorDiv | Op::Mod if b == 0 => zero(),
            // Beyond 53 bits the quotient of the rounded is not the rounded quotient.
            Op::Div if a.unsigned_abs().max(b.unsigned_abs()) > 1 << 53 => {
                unsupported("'/' of integers of more than 53 bits is not supported")
            }
            Op::Div => Ok(Value::Float(a as f64 / b as f64)),
            Op::FloorDiv => int(a.checked_div_euclid(b).map(|q| if b < 0 && a.rem_euclid(b) != 0 { q - 1 } else { q })),
            Op::Mod => int(a.checked_rem_euclid(b).map(|r| if b < 0 && r != 0 { r + b } else { r })),
            Op::Pow if b < 0 && a == 0 => fail("0.0 cannot be raised to a negative power"),
            Op::Pow if b < 0 => power(a as f64, b as f64),
            Op::Pow => match (a, u32::try_from(b)) {
                (0 | 1, _) if b > 0 => Ok(Value::Int(a)),
                (-1, _) => Ok(Value::Int(if b % 2 == 0 { 1 } else { -1 })),
                (_, Ok(b)) => int(a.checked_pow(b)),
                _ => too_big(),
            },
        };
    }
    let (a, b) = (a.float(), b.float());
    match op {
        Op::Add => Ok(Value::Float(a + b)),
        Op::Sub => Ok(Value::Float(a - b)),
        Op::Mul => Ok(Value::Float(a * b)),
        Op::Div | Op::FloorDiv | Op::Mod if b == 0.0 => zero(),
        Op::Div => Ok(Value::Float(a / b)),
        Op::FloorDiv => Ok(Value::Float(floor_mod(a, b).0)),
        Op::Mod => Ok(Value::Float(floor_mod(a, b).1)),
        Op::Pow if a == 0.0 && b < 0.0 => fail("0.0 cannot be raised to a negative power"),
        Op::Pow => power(a, b),
    }
}

fn power(a: f64, b: f64) -> Res<Value> {
    if a < 0.0 && b.fract() != 0.0 && b.is_finite() {
        return unsupported("complex numbers are not supported");
    }
    let result = a.powf(b);
    if result.is_infinite() && a.is_finite() && b.is_finite() {
        return fail("(34, 'Numerical result out of range')");
    }
    Ok(Value::Float(result))
}

/// Quotient and remainder of floats, rounded as CPython's `float_divmod` does.
fn floor_mod(a: f64, b: f64) -> (f64, f64) {
    let mut rest = a % b;
    let mut quotient = (a - rest) / b;
    if rest == 0.0 {
        rest = 0.0f64.copysign(b);
    } else if (b < 0.0) != (rest < 0.0) {
        rest += b;
        quotient -= 1.0;
    }
    if quotient == 0.0 {
        return (0.0f64.copysign(a / b), rest);
    }
    let floor = quotient.floor();
    (if quotient - floor > 0.5 { floor + 1.0 } else { floor }, rest)
}

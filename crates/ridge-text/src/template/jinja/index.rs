//! Attributes, items and slices. jinja2 tries the attribute first for `a.b` and the item first for `a['b']`, so that
//! `schema.items` is the method of a dict and `schema['items']` its entry.

use std::rc::Rc;
use std::sync::Arc;

use super::builtins::Function;
use super::fault::{Res, fail, unsupported};
use super::ops::integer;
use super::renderer::Renderer;
use super::value::{Loop, Value, range_len};

/// What an attribute of a value is.
enum Attribute {
    Is(Value),
    /// It exists and the sandbox keeps it away.
    Unsafe,
    /// It exists in Python and not here.
    Unsupported,
    None,
}

/// Attributes that every object has, or every dict.
const DUNDERS: &[&str] = &[
    "class",
    "class_getitem",
    "contains",
    "delattr",
    "delitem",
    "dir",
    "doc",
    "eq",
    "format",
    "ge",
    "getattribute",
    "getitem",
    "getstate",
    "gt",
    "hash",
    "init",
    "init_subclass",
    "ior",
    "iter",
    "le",
    "len",
    "lt",
    "ne",
    "new",
    "or",
    "reduce",
    "reduce_ex",
    "repr",
    "reversed",
    "ror",
    "setattr",
    "setitem",
    "sizeof",
    "str",
    "subclasshook",
];

const STR_METHODS: &[&str] = &[
    "capitalize",
    "center",
    "count",
    "endswith",
    "expandtabs",
    "find",
    "format",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdigit",
    "islower",
    "isspace",
    "istitle",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "swapcase",
    "title",
    "upper",
    "zfill",
];
const STR_OTHER: &[&str] = &[
    "casefold",
    "encode",
    "format_map",
    "isdecimal",
    "isidentifier",
    "isnumeric",
    "isprintable",
    "maketrans",
    "translate",
];
const DICT_METHODS: &[&str] = &["copy", "get", "items", "keys", "values"];
const DICT_CHANGES: &[&str] = &["clear", "pop", "popitem", "setdefault", "update"];
const LIST_CHANGES: &[&str] = &["append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"];
const NUMBER_OTHER: &[&str] = &[
    "as_integer_ratio",
    "bit_count",
    "bit_length",
    "conjugate",
    "denominator",
    "from_bytes",
    "fromhex",
    "hex",
    "imag",
    "is_integer",
    "numerator",
    "real",
    "to_bytes",
];
const MACRO_OTHER: &[&str] = &["arguments", "caller", "catch_kwargs", "catch_varargs", "explicit_caller", "name"];

/// Is this an attribute that every object has, or every dict?
fn is_dunder(name: &str) -> bool {
    name.strip_prefix("__").and_then(|name| name.strip_suffix("__")).is_some_and(|name| DUNDERS.contains(&name))
}

impl Renderer<'_> {
    /// `value.name`
    pub(crate) fn attribute(value: &Value, name: &Arc<str>) -> Res<Value> {
        if let Value::Undefined(message) = value
            && !is_dunder(name)
        {
            return fail(&**message);
        }
        if let Some(found) = Self::known_attribute(value, name)? {
            return Ok(found);
        }
        match value {
            Value::Dict(dict) => Ok(dict.get_str(name).cloned().unwrap_or_else(|| no_attribute(value, name))),
            Value::Undefined(message) => fail(&**message),
            _ => Ok(no_attribute(value, name)),
        }
    }

    /// `value[index]`
    pub(crate) fn item(&self, value: &Value, index: &Value) -> Res<Value> {
        self.charge(index.as_str().map_or(0, str::len))?;
        let at = |length: usize| {
            let i = integer(index)?;
            let i = if i < 0 { i.checked_add(length as i128)? } else { i };
            usize::try_from(i).ok().filter(|i| *i < length)
        };
        let found = match value {
            Value::Undefined(message) => return fail(&**message),
            Value::Dict(dict) => dict.get(index).ok().flatten().cloned(),
            Value::List(items) | Value::Tuple(items) => at(items.len()).map(|i| items[i].clone()),
            Value::Str(text) | Value::Markup(text) if integer(index).is_some() => {
                self.work(text.len())?;
                at(text.chars().count()).and_then(|i| text.chars().nth(i)).map(|c| value.of_its_kind(c.to_string()))
            }
            Value::Range(start, _, step) => at(range_len(value)).map(|i| Value::Int(start + i as i128 * step)),
            _ => None,
        };
        if let Some(found) = found {
            return Ok(found);
        }
        if let Some(name) = index.as_str() {
            if let Some(found) = Self::known_attribute(value, &name.into())? {
                return Ok(found);
            }
            return Ok(no_attribute(value, name));
        }
        let mut shown = String::new();
        self.write_repr(&mut shown, index)?;
        Ok(Value::undefined(format!("{} has no element {shown}", object(value))))
    }

    /// An attribute of the type, whether or not there is an item of that name.
    pub(crate) fn known_attribute(value: &Value, name: &Arc<str>) -> Res<Option<Value>> {
        let attribute = if is_dunder(name) { Attribute::Unsafe } else { Self::type_attribute(value, name)? };
        match attribute {
            Attribute::Is(found) => Ok(Some(found)),
            Attribute::None => Ok(None),
            Attribute::Unsafe => Ok(Some(Value::undefined(format!(
                "access to attribute '{name}' of '{}' object is unsafe.",
                value.type_name()
            )))),
            Attribute::Unsupported => {
                unsupported(format!("attribute '{name}' of a {} is not supported", value.type_name()))
            }
        }
    }

    fn type_attribute(value: &Value, name: &Arc<str>) -> Res<Attribute> {
        let plain: &str = name;
        let method = || Attribute::Is(Value::Method(Rc::new((value.clone(), name.clone()))));
        let other = |is: bool| if is { Attribute::Unsupported } else { Attribute::None };
        Ok(match value {
            Value::Str(_) if STR_METHODS.contains(&plain) => method(),
            Value::Str(_) => other(STR_OTHER.contains(&plain)),
            Value::Markup(_) if STR_METHODS.contains(&plain) && plain != "format" => method(),
            Value::Markup(_) => {
                other(STR_OTHER.contains(&plain) || matches!(plain, "format" | "striptags" | "unescape" | "escape"))
            }
            Value::Dict(_) if DICT_METHODS.contains(&plain) => method(),
            Value::Dict(_) if DICT_CHANGES.contains(&plain) => Attribute::Unsafe,
            Value::Dict(_) => other(plain == "fromkeys"),
            Value::List(_) if matches!(plain, "index" | "count" | "copy") => method(),
            Value::List(_) if LIST_CHANGES.contains(&plain) => Attribute::Unsafe,
            Value::Tuple(_) if matches!(plain, "index" | "count") => method(),
            // What `groupby` gives has these names, and other tuples have not.
            Value::Tuple(_) => other(matches!(plain, "grouper" | "list")),
            Value::Int(_) | Value::Float(_) | Value::Bool(_) => other(NUMBER_OTHER.contains(&plain)),
            Value::Range(start, stop, step) => match plain {
                "start" => Attribute::Is(Value::Int(*start)),
                "stop" => Attribute::Is(Value::Int(*stop)),
                "step" => Attribute::Is(Value::Int(*step)),
                _ => other(matches!(plain, "count" | "index")),
            },
            Value::View(..) => other(matches!(plain, "mapping" | "isdisjoint")),
            Value::Iter(..) => other(matches!(plain, "send" | "throw" | "close") || plain.starts_with("gi_")),
            Value::Namespace(namespace) => {
                namespace.borrow().get_str(plain).cloned().map_or(Attribute::None, Attribute::Is)
            }
            Value::Loop(state) => loop_attribute(value, state, name)?,
            Value::Cycler(_, cycler) => match plain {
                "current" => Attribute::Is(cycler.0[cycler.1.get()].clone()),
                "next" | "reset" => method(),
                _ => other(matches!(plain, "items" | "pos")),
            },
            Value::Joiner(_) => other(matches!(plain, "sep" | "used")),
            Value::Macro(_) => other(MACRO_OTHER.contains(&plain)),
            // The class, whose methods these are.
            Value::Function(Function::Dict) => other(DICT_METHODS.contains(&plain) || DICT_CHANGES.contains(&plain)),
            Value::Function(Function::Cycler) => other(matches!(plain, "current" | "next" | "reset")),
            Value::Function(_) | Value::Method(_) | Value::List(_) | Value::None | Value::Undefined(_) => {
                Attribute::None
            }
        })
    }

    /// `value[start:stop:step]`
    pub(crate) fn slice(&self, value: &Value, parts: [Option<Value>; 3]) -> Res<Value> {
        let mut bounds = [None; 3];
        for (bound, part) in bounds.iter_mut().zip(&parts) {
            *bound = match part {
                None | Some(Value::None) => None,
                Some(part) => match integer(part) {
                    Some(i) => Some(i),
                    None => return fail("slice indices must be integers or None or have an __index__ method"),
                },
            };
        }
        if bounds[2] == Some(0) {
            return fail("slice step cannot be zero");
        }
        match value {
            Value::Str(text) | Value::Markup(text) => {
                self.charge(text.len())?;
                let chars: Vec<char> = text.chars().collect();
                Ok(value.of_its_kind(Positions::new(chars.len(), bounds).iter().map(|i| chars[i]).collect()))
            }
            Value::List(items) => {
                self.charge(16 * items.len())?;
                Value::list(Positions::new(items.len(), bounds).iter().map(|i| items[i].clone()).collect())
            }
            Value::Tuple(items) => {
                self.charge(16 * items.len())?;
                Value::tuple(Positions::new(items.len(), bounds).iter().map(|i| items[i].clone()).collect())
            }
            Value::Undefined(message) => fail(&**message),
            Value::Range(start, _, step) => {
                let part = Positions::new(range_len(value), bounds);
                let at = |position: i128| start + position * step;
                match part.step.checked_mul(*step) {
                    Some(product) => Ok(Value::Range(at(part.start), at(part.stop), product)),
                    None => unsupported("a range with such steps is not supported"),
                }
            }
            Value::Dict(_) => fail("unhashable type: 'slice'"),
            other => fail(format!("'{}' object is not subscriptable", other.type_name())),
        }
    }
}

/// The positions that a slice takes.
struct Positions {
    start: i128,
    stop: i128,
    step: i128,
}

impl Positions {
    /// Those of `length` items.
    fn new(length: usize, [start, stop, step]: [Option<i128>; 3]) -> Self {
        let length = length as i128;
        let step = step.unwrap_or(1);
        // Where a bound may lie: going down, one before the first item is the end.
        let (low, high) = if step < 0 { (-1, length - 1) } else { (0, length) };
        let clamp = |bound: i128| {
            let from_start = if bound < 0 { bound.saturating_add(length) } else { bound };
            from_start.clamp(low, high.max(low))
        };
        let (first, last) = if step < 0 { (high, low) } else { (low, high) };
        Self { start: start.map_or(first, clamp), stop: stop.map_or(last, clamp), step }
    }

    fn iter(&self) -> impl Iterator<Item = usize> + use<> {
        let &Self { start, stop, step } = self;
        let span = if step < 0 { start - stop } else { stop - start };
        let count = if span <= 0 { 0 } else { (span - 1) / step.saturating_abs() + 1 };
        (0..count).map(move |i| (start + i * step) as usize)
    }
}

fn loop_attribute(value: &Value, state: &Rc<Loop>, name: &Arc<str>) -> Res<Attribute> {
    let int = |i: usize| Attribute::Is(Value::Int(i as i128));
    let index0 = state.index0.get();
    // Looking ahead may meet the error of a generator.
    let ahead = || match state.rest.borrow().front() {
        Some(Ok(next)) => Ok(Some(next.clone())),
        Some(Err(fault)) => Err(fault.clone()),
        None => Ok(None),
    };
    let length = || match state.rest.borrow().iter().find_map(|item| item.as_ref().err()) {
        Some(fault) => Err(fault.clone()),
        None => Ok(state.length()),
    };
    Ok(match &**name {
        "index" => int(index0 + 1),
        "index0" => int(index0),
        "length" => int(length()?),
        // A generator's length may be wrong once its items were taken elsewhere.
        "revindex" => Attribute::Is(Value::Int(length()? as i128 - index0 as i128)),
        "revindex0" => Attribute::Is(Value::Int(length()? as i128 - index0 as i128 - 1)),
        "first" => Attribute::Is(Value::Bool(index0 == 0)),
        "last" => Attribute::Is(Value::Bool(ahead()?.is_none())),
        "depth" => int(state.depth0 + 1),
        "depth0" => int(state.depth0),
        "previtem" => {
            let before = if index0 == 0 { None } else { state.before.borrow().clone() };
            Attribute::Is(before.unwrap_or_else(|| Value::undefined("there is no previous item")))
        }
        "nextitem" => Attribute::Is(ahead()?.unwrap_or_else(|| Value::undefined("there is no next item"))),
        "cycle" | "changed" => Attribute::Is(Value::Method(Rc::new((value.clone(), name.clone())))),
        _ => Attribute::None,
    })
}

/// jinja2's name for an object in messages.
fn object(value: &Value) -> String {
    match value {
        Value::None => "None".to_owned(),
        other => format!("{} object", other.type_name()),
    }
}

pub(crate) fn no_attribute(value: &Value, name: &str) -> Value {
    Value::undefined(format!("'{}' has no attribute '{name}'", object(value)))
}

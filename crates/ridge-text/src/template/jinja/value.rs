//! The values of a template: Python's, as far as templates see them, with its dict.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

use super::ast::{For, MacroDef};
use super::builtins::Function;
use super::fault::{Res, fail, limit};
use super::frame::VariableFrame;

/// Containers nest no deeper than this, so that walking one cannot overflow the stack.
pub(crate) const MAX_NESTING: u16 = 200;

/// A value. Cloning is cheap: whatever has a size is shared.
#[derive(Clone)]
pub(crate) enum Value {
    /// jinja2's `Undefined`, with what it says when it is used.
    Undefined(Arc<str>),
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(Arc<str>),
    /// A string that `escape` or `safe` made: it prints as a string, and what is added to it is escaped.
    Markup(Arc<str>),
    List(Rc<Seq>),
    Tuple(Rc<Seq>),
    Dict(Rc<Dict>),
    /// What `keys()`, `values()` or `items()` gives.
    View(View, Rc<Dict>),
    /// Start, stop, step.
    Range(i128, i128, i128),
    /// A generator or iterator: what is taken from it is gone. An error waits at its place. With its depth.
    Iter(u16, Rc<RefCell<VecDeque<Res<Value>>>>),
    Namespace(Rc<RefCell<Dict>>),
    Function(Function),
    /// A method with its object.
    Method(Rc<(Value, Arc<str>)>),
    Macro(Rc<Macro>),
    Loop(Rc<Loop>),
    /// The values and which one is next, with their depth.
    Cycler(u16, Rc<(Vec<Value>, Cell<usize>)>),
    Joiner(Rc<(Value, Cell<bool>)>),
}

/// The variables of one scope.
pub(crate) type Frame = VariableFrame<Value>;

/// Which view of a dict.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum View {
    Keys,
    Values,
    Items,
}

impl View {
    /// The item that `entry`, a key and its value, is in this view.
    pub(crate) fn item(self, entry: &(Value, Value)) -> Res<Value> {
        match self {
            Self::Keys => Ok(entry.0.clone()),
            Self::Values => Ok(entry.1.clone()),
            Self::Items => Value::tuple(vec![entry.0.clone(), entry.1.clone()]),
        }
    }
}

/// The items of a list or tuple.
pub(crate) struct Seq {
    pub(crate) items: Vec<Value>,
    depth: u16,
}

impl std::ops::Deref for Seq {
    type Target = [Value];
    fn deref(&self) -> &[Value] {
        &self.items
    }
}

/// A macro, or the body of a call block, with the scope it was defined in.
pub(crate) struct Macro {
    pub(crate) def: Arc<MacroDef>,
    pub(crate) scope: Rc<Frame>,
}

/// The state behind `loop`.
pub(crate) struct Loop {
    /// What is left; shared with the generator that the loop runs over, if it is one.
    pub(crate) rest: Rc<RefCell<VecDeque<Res<Value>>>>,
    /// The length: of what has one from the start, of a generator once it was asked for.
    pub(crate) known_length: Cell<Option<usize>>,
    pub(crate) index0: Cell<usize>,
    pub(crate) before: RefCell<Option<Value>>,
    pub(crate) current: RefCell<Option<Value>>,
    pub(crate) last_changed: RefCell<Option<Value>>,
    pub(crate) depth0: usize,
    /// What to call `loop(...)` with, if the loop is recursive.
    pub(crate) recursive: Option<(Arc<For>, Rc<Frame>)>,
}

impl Value {
    pub(crate) fn str(text: impl Into<Arc<str>>) -> Self {
        Self::Str(text.into())
    }

    /// A string, escaped if this one is.
    pub(crate) fn of_its_kind(&self, text: String) -> Self {
        match self {
            Self::Markup(_) => Self::Markup(text.into()),
            _ => Self::str(text),
        }
    }

    pub(crate) fn list(items: Vec<Value>) -> Res<Self> {
        Ok(Self::List(Rc::new(Seq::new(items)?)))
    }

    pub(crate) fn tuple(items: Vec<Value>) -> Res<Self> {
        Ok(Self::Tuple(Rc::new(Seq::new(items)?)))
    }

    pub(crate) fn dict(dict: Dict) -> Self {
        Self::Dict(Rc::new(dict))
    }

    pub(crate) fn iter(items: impl IntoIterator<Item = Res<Value>>) -> Self {
        let items: VecDeque<Res<Self>> = items.into_iter().collect();
        let depth = items.iter().flatten().map(Self::depth).max().unwrap_or(0).saturating_add(1);
        Self::Iter(depth, Rc::new(RefCell::new(items)))
    }

    /// `'name' is undefined`
    pub(crate) fn undefined_name(name: &str) -> Self {
        Self::Undefined(format!("'{name}' is undefined").into())
    }

    pub(crate) fn undefined(message: impl Into<Arc<str>>) -> Self {
        Self::Undefined(message.into())
    }

    /// Python's name for the type.
    pub(crate) fn type_name(&self) -> &'static str {
        match self {
            Self::Undefined(_) => "Undefined",
            Self::None => "NoneType",
            Self::Bool(_) => "bool",
            Self::Int(_) => "int",
            Self::Float(_) => "float",
            Self::Str(_) => "str",
            Self::Markup(_) => "Markup",
            Self::List(_) => "list",
            Self::Tuple(_) => "tuple",
            Self::Dict(_) => "dict",
            Self::View(View::Keys, _) => "dict_keys",
            Self::View(View::Values, _) => "dict_values",
            Self::View(View::Items, _) => "dict_items",
            Self::Range(..) => "range",
            Self::Iter(..) => "generator",
            Self::Namespace(_) => "Namespace",
            Self::Function(_) => "function",
            Self::Method(_) => "builtin_function_or_method",
            Self::Macro(_) => "Macro",
            Self::Loop(_) => "LoopContext",
            Self::Cycler(..) => "Cycler",
            Self::Joiner(_) => "Joiner",
        }
    }

    pub(crate) fn is_undefined(&self) -> bool {
        matches!(self, Self::Undefined(_))
    }

    /// The text of a string of either kind.
    pub(crate) fn as_str(&self) -> Option<&str> {
        match self {
            Self::Str(text) | Self::Markup(text) => Some(text),
            _ => None,
        }
    }

    pub(crate) fn truthy(&self) -> bool {
        match self {
            Self::Undefined(_) | Self::None => false,
            Self::Bool(b) => *b,
            Self::Int(i) => *i != 0,
            Self::Float(x) => *x != 0.0,
            Self::Str(s) | Self::Markup(s) => !s.is_empty(),
            Self::List(s) | Self::Tuple(s) => !s.is_empty(),
            Self::Dict(d) | Self::View(_, d) => d.len() != 0,
            Self::Range(..) => range_len(self) != 0,
            // An object with a length is true if that is not 0, and the loop variable has one.
            Self::Loop(l) => l.length() != 0,
            _ => true,
        }
    }

    /// Python's `len()`, where the type has one; of a string in characters.
    pub(crate) fn len(&self) -> Option<usize> {
        match self {
            Self::Undefined(_) => Some(0),
            Self::Str(s) | Self::Markup(s) => Some(s.chars().count()),
            Self::List(s) | Self::Tuple(s) => Some(s.len()),
            Self::Dict(d) | Self::View(_, d) => Some(d.len()),
            Self::Range(..) => Some(range_len(self)),
            Self::Loop(l) => Some(l.length()),
            _ => None,
        }
    }

    /// Does the type have a `len()`?
    pub(crate) fn has_len(&self) -> bool {
        self.as_str().is_some() || self.len().is_some()
    }

    /// How deep containers nest in this value.
    pub(crate) fn depth(&self) -> u16 {
        match self {
            Self::List(s) | Self::Tuple(s) => s.depth,
            Self::Dict(d) | Self::View(_, d) => d.depth(),
            Self::Iter(depth, _) | Self::Cycler(depth, _) => *depth,
            Self::Method(m) => m.0.depth() + 1,
            Self::Joiner(j) => j.0.depth() + 1,
            _ => 0,
        }
    }
}

impl Seq {
    fn new(items: Vec<Value>) -> Res<Self> {
        let depth = nested(items.iter())?;
        Ok(Self { items, depth })
    }
}

/// The depth of a container of `items`.
pub(crate) fn nested<'a>(items: impl Iterator<Item = &'a Value>) -> Res<u16> {
    let depth = 1 + items.map(Value::depth).max().unwrap_or(0);
    if depth > MAX_NESTING {
        return limit(format!("values nest more than {MAX_NESTING} deep"));
    }
    Ok(depth)
}

impl Loop {
    /// The number of iterations.
    pub(crate) fn length(&self) -> usize {
        let length = self.known_length.get().unwrap_or_else(|| self.index0.get() + 1 + self.rest.borrow().len());
        self.known_length.set(Some(length));
        length
    }
}

/// The length of a range, whose bounds are small enough not to overflow.
pub(crate) fn range_len(range: &Value) -> usize {
    let &Value::Range(start, stop, step) = range else { return 0 };
    let span = if step > 0 { stop - start } else { start - stop };
    if span <= 0 { 0 } else { ((span - 1) / step.abs() + 1) as usize }
}

/// From this many entries on, keys are looked up by hash.
const MIN_INDEXED: usize = 9;

/// Python's dict: insertion order, and keys that are equal across kinds of numbers.
#[derive(Clone, Default)]
pub(crate) struct Dict {
    entries: Vec<(Value, Value)>,
    /// Complete once there are [`MIN_INDEXED`] entries, empty before.
    index: HashMap<DictKey, usize>,
    depth: u16,
}

/// What makes two keys the same.
#[derive(Clone, PartialEq, Eq, Hash)]
enum DictKey {
    None,
    Int(i128),
    /// A float that is no integer, by its bits.
    Float(u64),
    Str(Arc<str>),
    Tuple(Vec<DictKey>),
    /// Its length, first item and step.
    Range(usize, i128, i128),
    /// Functions, macros and other things that are equal to themselves alone.
    Object(usize),
    Undefined,
}

/// Tuples as keys have no more parts than this, those in them included: a tuple may be in another many times.
const MAX_KEY_PARTS: usize = 10_000;

impl DictKey {
    fn of(value: &Value) -> Res<Self> {
        Self::part(value, &mut 0)
    }

    fn part(value: &Value, parts: &mut usize) -> Res<Self> {
        *parts += 1;
        if *parts > MAX_KEY_PARTS {
            return limit(format!("a key has more than {MAX_KEY_PARTS} parts"));
        }
        Ok(match value {
            Value::None => Self::None,
            Value::Bool(b) => Self::Int(i128::from(*b)),
            Value::Int(i) => Self::Int(*i),
            Value::Float(x) if x.fract() == 0.0 && x.abs() < 1e38 => Self::Int(*x as i128),
            Value::Float(x) => Self::Float(x.to_bits()),
            Value::Str(s) | Value::Markup(s) => Self::Str(s.clone()),
            Value::Tuple(items) => Self::Tuple(items.iter().map(|item| Self::part(item, parts)).collect::<Res<_>>()?),
            Value::Undefined(_) => Self::Undefined,
            Value::Macro(m) => Self::Object(Rc::as_ptr(m) as usize),
            Value::Namespace(n) => Self::Object(Rc::as_ptr(n) as usize),
            // Equal ranges have equal items.
            Value::Range(start, _, step) => match range_len(value) {
                0 => Self::Range(0, 0, 0),
                1 => Self::Range(1, *start, 0),
                length => Self::Range(length, *start, *step),
            },
            other => return fail(format!("unhashable type: '{}'", other.type_name())),
        })
    }
}

impl Dict {
    pub(crate) fn from_entries(entries: impl IntoIterator<Item = (Value, Value)>) -> Res<Self> {
        let mut dict = Self::default();
        for (key, value) in entries {
            dict.insert(key, value)?;
        }
        Ok(dict)
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn depth(&self) -> u16 {
        self.depth.max(1)
    }

    pub(crate) fn entries(&self) -> &[(Value, Value)] {
        &self.entries
    }

    pub(crate) fn keys(&self) -> impl DoubleEndedIterator<Item = &Value> + ExactSizeIterator {
        self.entries.iter().map(|(key, _)| key)
    }

    fn position(&self, key: &DictKey) -> Option<usize> {
        if self.entries.len() < MIN_INDEXED {
            self.entries.iter().position(|(k, _)| DictKey::of(k).is_ok_and(|k| k == *key))
        } else {
            self.index.get(key).copied()
        }
    }

    /// The value of `key`; an error if that is of a kind that cannot be a key.
    pub(crate) fn get(&self, key: &Value) -> Res<Option<&Value>> {
        let key = DictKey::of(key)?;
        Ok(self.position(&key).map(|at| &self.entries[at].1))
    }

    pub(crate) fn get_str(&self, key: &str) -> Option<&Value> {
        if self.entries.len() < MIN_INDEXED {
            return self.entries.iter().find(|(k, _)| k.as_str() == Some(key)).map(|(_, value)| value);
        }
        self.index.get(&DictKey::Str(key.into())).map(|&at| &self.entries[at].1)
    }

    /// Sets a key; one that is there keeps its place and its spelling.
    pub(crate) fn insert(&mut self, key: Value, value: Value) -> Res<()> {
        let hash = DictKey::of(&key)?;
        self.depth = self.depth.max(nested([&key, &value].into_iter())?);
        if let Some(at) = self.position(&hash) {
            self.entries[at].1 = value;
            return Ok(());
        }
        self.entries.push((key, value));
        if self.entries.len() == MIN_INDEXED {
            for (at, (key, _)) in self.entries.iter().enumerate() {
                self.index.insert(DictKey::of(key)?, at);
            }
        } else if self.entries.len() > MIN_INDEXED {
            self.index.insert(hash, self.entries.len() - 1);
        }
        Ok(())
    }

    pub(crate) fn insert_str(&mut self, key: &str, value: Value) -> Res<()> {
        self.insert(Value::str(key), value)
    }
}

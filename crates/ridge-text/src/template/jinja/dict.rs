//! Python's dict: insertion order, and keys that are equal across kinds of numbers.

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use super::fault::{Res, fail, limit};
use super::value::{Value, nested};

/// From this many entries on, keys are looked up by hash.
const INDEXED: usize = 9;

/// A dict.
#[derive(Clone, Default)]
pub(crate) struct Dict {
    entries: Vec<(Value, Value)>,
    /// Complete once there are [`INDEXED`] entries, empty before.
    index: HashMap<Key, usize>,
    depth: u16,
}

/// What makes two keys the same.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Key {
    None,
    Int(i128),
    /// A float that is no integer, by its bits.
    Float(u64),
    Str(Arc<str>),
    Tuple(Vec<Key>),
    /// Functions, macros and other things that are equal to themselves alone.
    Object(usize),
    Undefined,
}

/// Tuples as keys have no more parts than this, those in them included: a tuple may be in another many times.
const MOST_PARTS: usize = 10_000;

impl Key {
    fn of(value: &Value) -> Res<Self> {
        Self::part(value, &mut 0)
    }

    fn part(value: &Value, parts: &mut usize) -> Res<Self> {
        *parts += 1;
        if *parts > MOST_PARTS {
            return limit(format!("a key has more than {MOST_PARTS} parts"));
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

    fn position(&self, key: &Key) -> Option<usize> {
        if self.entries.len() < INDEXED {
            self.entries.iter().position(|(k, _)| Key::of(k).is_ok_and(|k| k == *key))
        } else {
            self.index.get(key).copied()
        }
    }

    /// The value of `key`; an error if that is of a kind that cannot be a key.
    pub(crate) fn get(&self, key: &Value) -> Res<Option<&Value>> {
        let key = Key::of(key)?;
        Ok(self.position(&key).map(|at| &self.entries[at].1))
    }

    pub(crate) fn get_str(&self, key: &str) -> Option<&Value> {
        if self.entries.len() < INDEXED {
            return self.entries.iter().find(|(k, _)| k.as_str() == Some(key)).map(|(_, value)| value);
        }
        self.index.get(&Key::Str(key.into())).map(|&at| &self.entries[at].1)
    }

    /// Sets a key; one that is there keeps its place and its spelling.
    pub(crate) fn insert(&mut self, key: Value, value: Value) -> Res<()> {
        let hash = Key::of(&key)?;
        self.depth = self.depth.max(nested([&key, &value].into_iter())?);
        if let Some(at) = self.position(&hash) {
            self.entries[at].1 = value;
            return Ok(());
        }
        self.entries.push((key, value));
        if self.entries.len() == INDEXED {
            for (at, (key, _)) in self.entries.iter().enumerate() {
                self.index.insert(Key::of(key)?, at);
            }
        } else if self.entries.len() > INDEXED {
            self.index.insert(hash, self.entries.len() - 1);
        }
        Ok(())
    }

    pub(crate) fn insert_str(&mut self, key: &str, value: Value) -> Res<()> {
        self.insert(Value::str(key), value)
    }
}

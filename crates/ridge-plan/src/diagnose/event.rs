//! One event of a trace, read leniently: fields of an unexpected kind are as if they were not there, since traces come
//! from many programs. What is not needed is skipped without being kept.

use std::fmt;

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// An event with what diagnosis needs of it. Times are microseconds.
#[derive(Debug, Default)]
pub(super) struct TraceEvent {
    pub(super) phase: String,
    pub(super) category: String,
    pub(super) name: String,
    pub(super) start: Option<f64>,
    pub(super) duration: Option<f64>,
    pub(super) process: u64,
    pub(super) thread: u64,
    pub(super) args: TraceArgs,
}

/// Its arguments.
#[derive(Debug, Default)]
pub(super) struct TraceArgs {
    pub(super) device: Option<f64>,
    pub(super) correlation: Option<f64>,
    pub(super) flops: Option<f64>,
    pub(super) bytes: Option<f64>,
    /// Extents of inputs (`Input Dims`).
    pub(super) dims: Vec<Vec<f64>>,
}

/// Characters of a name that are kept: kernels' names are long, and their beginnings tell them apart.
const NAME: usize = 200;
/// Inputs, and extents of each, that are kept.
const DIMS: usize = 8;

/// Any value, of which a number, a text or lists of numbers are kept.
enum TraceValue {
    Number(f64),
    Text(String),
    List(Vec<Self>),
    Other,
}

impl TraceValue {
    fn number(self) -> Option<f64> {
        match self {
            Self::Number(n) => Some(n),
            Self::Text(text) => text.parse().ok(),
            Self::List(_) | Self::Other => None,
        }
    }

    /// Something to tell threads and processes apart by; they are numbers or names.
    fn identity(self) -> u64 {
        match self {
            Self::Number(n) => n.to_bits(),
            // FNV-1a.
            Self::Text(text) => {
                text.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3))
            }
            Self::List(_) | Self::Other => 0,
        }
    }

    fn text(self) -> String {
        if let Self::Text(text) = self { text } else { String::new() }
    }

    fn dims(self) -> Vec<Vec<f64>> {
        let Self::List(inputs) = self else { return Vec::new() };
        let of = |input: Self| match input {
            Self::List(extents) => extents.into_iter().filter_map(Self::number).collect(),
            _ => Vec::new(),
        };
        inputs.into_iter().map(of).collect()
    }
}

impl<'de> Deserialize<'de> for TraceValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ValueVisitor)
    }
}

struct ValueVisitor;

impl<'de> Visitor<'de> for ValueVisitor {
    type Value = TraceValue;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_bool<E>(self, _: bool) -> Result<TraceValue, E> {
        Ok(TraceValue::Other)
    }

    fn visit_i64<E>(self, n: i64) -> Result<TraceValue, E> {
        Ok(TraceValue::Number(n as f64))
    }

    fn visit_u64<E>(self, n: u64) -> Result<TraceValue, E> {
        Ok(TraceValue::Number(n as f64))
    }

    fn visit_f64<E>(self, n: f64) -> Result<TraceValue, E> {
        Ok(TraceValue::Number(n))
    }

    fn visit_str<E>(self, text: &str) -> Result<TraceValue, E> {
        Ok(TraceValue::Text(text.chars().take(NAME).collect()))
    }

    fn visit_unit<E>(self) -> Result<TraceValue, E> {
        Ok(TraceValue::Other)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<TraceValue, A::Error> {
        let mut kept = Vec::new();
        while kept.len() < DIMS {
            let Some(value) = list.next_element()? else { return Ok(TraceValue::List(kept)) };
            kept.push(value);
        }
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(TraceValue::List(kept))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<TraceValue, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(TraceValue::Other)
    }
}

impl<'de> Deserialize<'de> for TraceArgs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(FieldsVisitor::<Self>::new(|args, key, value| match key {
            "device" => args.device = value.number(),
            "correlation" => args.correlation = value.number(),
            "flops" => args.flops = value.number(),
            "bytes" => args.bytes = value.number(),
            "Input Dims" => args.dims = value.dims(),
            _ => {}
        }))
    }
}

/// A map whose entries are set on a value by name, or anything else, which sets nothing.
pub(super) struct FieldsVisitor<T> {
    set: fn(&mut T, &str, FieldValue),
}

/// What an entry holds.
pub(super) struct FieldValue(TraceValue);

impl FieldValue {
    pub(super) fn number(self) -> Option<f64> {
        self.0.number().filter(|n| n.is_finite())
    }

    pub(super) fn text(self) -> String {
        self.0.text()
    }

    fn dims(self) -> Vec<Vec<f64>> {
        self.0.dims()
    }
}

impl<T> FieldsVisitor<T> {
    pub(super) fn new(set: fn(&mut T, &str, FieldValue)) -> Self {
        Self { set }
    }
}

macro_rules! nothing {
    ($($visit:ident: $kind:ty),*) => { $(fn $visit<E>(self, _: $kind) -> Result<T, E> { Ok(T::default()) })* };
}

impl<'de, T: Default> Visitor<'de> for FieldsVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    nothing!(visit_bool: bool, visit_i64: i64, visit_u64: u64, visit_f64: f64, visit_str: &str);

    fn visit_unit<E>(self) -> Result<T, E> {
        Ok(T::default())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<T, A::Error> {
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(T::default())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<T, A::Error> {
        let mut made = T::default();
        while let Some(key) = map.next_key::<String>()? {
            let value = FieldValue(map.next_value()?);
            (self.set)(&mut made, &key, value);
        }
        Ok(made)
    }
}

impl<'de> Deserialize<'de> for TraceEvent {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TraceEventVisitor)
    }
}

struct TraceEventVisitor;

impl<'de> Visitor<'de> for TraceEventVisitor {
    type Value = TraceEvent;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an event, which is an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<TraceEvent, A::Error> {
        let mut event = TraceEvent::default();
        while let Some(key) = map.next_key::<String>()? {
            match &*key {
                "args" => event.args = map.next_value()?,
                "ph" => event.phase = map.next_value::<TraceValue>()?.text(),
                "cat" => event.category = map.next_value::<TraceValue>()?.text(),
                "name" => event.name = map.next_value::<TraceValue>()?.text(),
                "ts" => event.start = map.next_value::<TraceValue>()?.number(),
                "dur" => event.duration = map.next_value::<TraceValue>()?.number(),
                "pid" => event.process = map.next_value::<TraceValue>()?.identity(),
                "tid" => event.thread = map.next_value::<TraceValue>()?.identity(),
                _ => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(event)
    }
}

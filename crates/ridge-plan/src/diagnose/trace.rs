//! A trace read in one pass: of each event some 40 bytes are kept, of each name one copy.

use std::collections::HashMap;
use std::fmt;
use std::io::Read;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::event::{FieldsVisitor, TraceEvent};
use crate::error::PlanError;

/// Maximum number of events kept: hours of a step's kernels in 1 GB of memory.
const MAX_EVENTS: usize = 20_000_000;
/// Names that are kept; what comes behind is all one.
const MAX_NAMES: usize = 200_000;
/// Microseconds beyond which a time is none: thousands of years.
const MAX_TIME: f64 = 1e17;

/// An event that takes time, in seconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct TraceSpan {
    pub(super) start: f64,
    pub(super) end: f64,
    pub(super) name: u32,
    /// The device of a kernel, the thread of what the host does.
    pub(super) on: u64,
}

/// What the device did.
#[derive(Clone, Copy, Debug)]
pub(super) struct TraceKernel {
    pub(super) span: TraceSpan,
    pub(super) copy: bool,
    pub(super) correlation: Option<u64>,
    pub(super) flops: f64,
    pub(super) bytes: f64,
}

/// A matrix product that the host asked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct TraceProduct {
    pub(super) flops: f64,
    /// Elements of both factors and of the result.
    pub(super) elements: f64,
}

/// What is kept of a trace.
#[derive(Debug, Default)]
pub(super) struct Trace {
    pub(super) names: Vec<String>,
    pub(super) kernels: Vec<TraceKernel>,
    pub(super) host: Vec<TraceSpan>,
    /// Operators of the host alone: what a trace without a device has in place of kernels.
    pub(super) ops: Vec<TraceSpan>,
    /// When the host asked, by correlation.
    pub(super) launches: HashMap<u64, f64>,
    /// Seconds in which it asked.
    pub(super) launching: f64,
    pub(super) products: Vec<TraceProduct>,
    /// Device by its driver's name.
    pub(super) device: Option<String>,
    /// Rates by Ridge's own profile: FLOP/s and bytes per second.
    pub(super) rates: Option<(f64, f64)>,
    /// EventListSeed with times that cannot be.
    pub(super) ignored: usize,
    known: HashMap<String, u32>,
    events: usize,
}

impl Trace {
    /// Reads the JSON of a Chrome trace: an object with `traceEvents`, or a list of events.
    ///
    /// # Errors
    /// [`PlanError::Trace`] where it is no such thing.
    pub(super) fn read(reader: impl Read) -> Result<Self, PlanError> {
        let mut trace = Self::default();
        let mut json = serde_json::Deserializer::from_reader(reader);
        let read = (TraceSeed { trace: &mut trace }).deserialize(&mut json).and_then(|()| json.end());
        match read {
            Ok(()) => Ok(trace),
            Err(why) => {
                let remedy = match why.classify() {
                    serde_json::error::Category::Eof => {
                        "the file is truncated: export the trace again, and wait for its completion"
                    }
                    _ => {
                        "give the JSON written by torch.profiler's export_chrome_trace, Perfetto or ridge bench --trace"
                    }
                };
                let problem = format!("{why}, after {} events", trace.events);
                Err(PlanError::Trace { problem, remedy: remedy.to_owned() })
            }
        }
    }

    fn name(&mut self, name: String) -> u32 {
        if let Some(&known) = self.known.get(&name) {
            return known;
        }
        let (name, number) = if self.names.len() >= MAX_NAMES {
            ("(other)".to_owned(), self.names.len() as u32)
        } else {
            (name, self.names.len() as u32)
        };
        if let Some(&known) = self.known.get(&name) {
            return known;
        }
        self.names.push(name.clone());
        self.known.insert(name, number);
        number
    }

    /// Keeps what is needed of an event; false once there are too many.
    fn take(&mut self, event: TraceEvent) -> bool {
        self.events += 1;
        if event.phase != "X" {
            return true;
        }
        let (Some(start), Some(duration)) = (event.start, event.duration) else {
            self.ignored += 1;
            return true;
        };
        if !(start.abs() <= MAX_TIME && (0.0..=MAX_TIME).contains(&duration)) {
            self.ignored += 1;
            return true;
        }
        if self.kernels.len() + self.host.len() >= MAX_EVENTS {
            return false;
        }
        let category = event.category.to_ascii_lowercase();
        let args = event.args;
        let amount = |n: Option<f64>| n.filter(|n| n.is_finite() && *n >= 0.0).unwrap_or(0.0);
        let correlation = args.correlation.filter(|c| *c >= 0.0).map(|c| c as u64);
        let kernel = matches!(&*category, "kernel" | "gpu_memcpy" | "gpu_memset");
        if !kernel && matches!(&*category, "gpu_user_annotation" | "trace" | "overhead" | "ac2g" | "step") {
            return true;
        }
        if category == "cpu_op" {
            self.products.extend(product(&event.name, &args.dims));
        }
        let launches = event.name.contains("Launch") || event.name.contains("cudaMemcpy");
        let name = self.name(event.name);
        let on = if kernel { args.device.map_or(event.process, f64::to_bits) } else { event.thread };
        let span = TraceSpan { start: start * 1e-6, end: (start + duration) * 1e-6, name, on };
        if kernel {
            let (flops, bytes) = (amount(args.flops), amount(args.bytes));
            self.kernels.push(TraceKernel { span, copy: category != "kernel", correlation, flops, bytes });
            return true;
        }
        if matches!(&*category, "cuda_runtime" | "cuda_driver") && launches {
            self.launching += span.end - span.start;
            self.launches.extend(correlation.map(|c| (c, span.start)));
        }
        if category == "cpu_op" {
            self.ops.push(span);
        }
        self.host.push(span);
        true
    }
}

/// FLOPs and elements of a matrix product of torch, by the extents of its inputs.
fn product(name: &str, dims: &[Vec<f64>]) -> Option<TraceProduct> {
    let first = match name {
        "aten::mm" | "aten::bmm" | "aten::_scaled_mm" => 0,
        "aten::addmm" | "aten::baddbmm" => 1,
        _ => return None,
    };
    let (a, b) = (dims.get(first)?, dims.get(first + 1)?);
    let (batch, m, k, n) = match (&a[..], &b[..]) {
        ([m, k], [_, n]) => (1.0, *m, *k, *n),
        ([batch, m, k], [_, _, n]) => (*batch, *m, *k, *n),
        _ => return None,
    };
    let made = TraceProduct { flops: 2.0 * batch * m * k * n, elements: batch * (m * k + k * n + m * n) };
    (made.flops.is_finite() && made.flops >= 0.0).then_some(made)
}

struct TraceSeed<'a> {
    trace: &'a mut Trace,
}

impl<'de> DeserializeSeed<'de> for TraceSeed<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for TraceSeed<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a trace: an object with traceEvents, or a list of events")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut found = false;
        while let Some(key) = map.next_key::<String>()? {
            match &*key {
                "traceEvents" => {
                    map.next_value_seed(EventListSeed { trace: &mut *self.trace })?;
                    found = true;
                }
                "deviceProperties" => {
                    let of = map.next_value::<Properties>()?;
                    self.trace.device = of.0.filter(|name| !name.is_empty());
                }
                "ridge" => {
                    let own = map.next_value::<RidgeMetadata>()?;
                    self.trace.rates = own.flops.zip(own.bytes).filter(|(f, b)| *f > 0.0 && *b > 0.0);
                    self.trace.device = Some(own.device).filter(|name| !name.is_empty());
                }
                _ => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        if found { Ok(()) } else { Err(serde::de::Error::custom("the object has no traceEvents")) }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<(), A::Error> {
        EventListSeed { trace: self.trace }.visit_seq(list)
    }
}

struct EventListSeed<'a> {
    trace: &'a mut Trace,
}

impl<'de> DeserializeSeed<'de> for EventListSeed<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for EventListSeed<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of events")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        while let Some(event) = list.next_element::<TraceEvent>()? {
            if !self.trace.take(event) {
                let why = format!("more than {MAX_EVENTS} events with a duration: record fewer steps");
                return Err(serde::de::Error::custom(why));
            }
        }
        Ok(())
    }
}

/// `deviceProperties` of torch: the first one's name.
struct Properties(Option<String>);

#[derive(Default)]
struct Property {
    name: String,
}

impl<'de> serde::Deserialize<'de> for Properties {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Self(Vec::<Property>::deserialize(deserializer)?.into_iter().next().map(|p| p.name)))
    }
}

impl<'de> serde::Deserialize<'de> for Property {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(FieldsVisitor::<Self>::new(|property, key, value| {
            if key == "name" {
                property.name = value.text();
            }
        }))
    }
}

/// What Ridge says of the machine in its own traces.
#[derive(Default)]
struct RidgeMetadata {
    flops: Option<f64>,
    bytes: Option<f64>,
    device: String,
}

impl<'de> serde::Deserialize<'de> for RidgeMetadata {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(FieldsVisitor::<Self>::new(|own, key, value| match key {
            "flops_per_second" => own.flops = value.number(),
            "bytes_per_second" => own.bytes = value.number(),
            "device" => own.device = value.text(),
            _ => {}
        }))
    }
}

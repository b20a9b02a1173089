//! Time over size by algorithm, and a backward pass beside its communication, as a chart and a Chrome trace.

use serde_json::{Value, json};

use super::collective::{Collective, CollectiveAlgorithm};
use super::fabric::{Fabric, RankGroup};
use super::overlap::Overlap;
use crate::plot::{Axis, Chart, Series, Style, Unit};

/// Sizes of the sweep: 1 KiB to 16 GiB, two to a doubling.
fn sizes() -> impl Iterator<Item = f64> {
    (20..=68).map(|half| 2f64.powf(f64::from(half) / 2.0))
}

/// Seconds over bytes of each algorithm that there is, both logarithmic.
pub fn chart(fabric: &Fabric, collective: Collective, group: RankGroup, title: &str) -> Chart {
    let axes = [("bytes of a rank's larger buffer", Unit::Bytes), ("time", Unit::Seconds)];
    let [x, y] = axes.map(|(label, unit)| Axis::log(label, unit));
    let curve = |a: CollectiveAlgorithm| {
        let point = |bytes: f64| Some((bytes, fabric.best(collective, bytes, group, &[a])?.seconds));
        Series::new(a.to_string(), Style::Line, sizes().filter_map(point))
    };
    let series = CollectiveAlgorithm::ALL.into_iter().map(curve).filter(|s| !s.points.is_empty());
    Chart { series: series.collect(), height: 340.0, ..Chart::new(title, x, y) }
}

impl Overlap {
    /// Events for `chrome://tracing` and Perfetto: compute on one thread, communication on another.
    pub fn chrome_trace(&self) -> Value {
        let name = |tid: usize, name: &str| json!({ "name": "thread_name", "ph": "M", "pid": 0, "tid": tid, "args": { "name": name } });
        let mut events = vec![name(0, "compute"), name(1, "communication")];
        let mut from = 0.0;
        for (i, b) in self.buckets.iter().enumerate() {
            let event = |tid: usize, start: f64, end: f64| json!({ "name": format!("bucket {i}"), "ph": "X", "pid": 0, "tid": tid, "ts": start * 1e6, "dur": (end - start) * 1e6 });
            events.push(event(0, from, b.ready));
            events.push(event(1, b.start, b.end));
            from = b.ready;
        }
        json!({ "displayTimeUnit": "ms", "traceEvents": events })
    }
}

//! Timelines as text, charts and Chrome traces.

use std::fmt::Write as _;

use ridge_hw::units::Seconds;
use serde_json::{Value, json};

use super::stages::PassKind;
use super::timeline::{PassEvent, Timeline};
use crate::plot::{Gantt, GanttSpan, SpanHalf};

fn name(kind: PassKind) -> &'static str {
    match kind {
        PassKind::Forward => "forward",
        PassKind::Backward => "backward",
        PassKind::Input => "input gradient",
        PassKind::Weight => "weight gradient",
    }
}

impl Timeline {
    /// A row a device and `columns` columns of time: `F`, `B`, `I`, `W` begin a forward pass, a backward pass, a gradient
    /// of inputs or of weights, whose micro-batch follows where there is room; dots are idle.
    pub fn text(&self, columns: usize) -> String {
        let at = |time: f64| (time / self.makespan.max(f64::MIN_POSITIVE) * columns as f64).round() as usize;
        let mut text = String::new();
        for d in 0..self.devices.len() {
            let mut row = vec![b'.'; columns];
            for e in self.events.iter().filter(|e| e.device == d) {
                let (from, to) = (at(e.start).min(columns), at(e.end).min(columns));
                let letter = match e.pass.kind {
                    PassKind::Forward => 'F',
                    PassKind::Backward => 'B',
                    PassKind::Input => 'I',
                    PassKind::Weight => 'W',
                };
                let label = format!("{letter}{}", e.pass.micro);
                let fill = letter.to_ascii_lowercase() as u8;
                for (i, cell) in row[from..to].iter_mut().enumerate() {
                    *cell = if label.len() <= to - from { *label.as_bytes().get(i).unwrap_or(&fill) } else { fill };
                    if i == 0 {
                        *cell = letter as u8;
                    }
                }
            }
            let row: String = row.into_iter().map(char::from).collect();
            let _ = writeln!(text, "{d:>4} {row}");
        }
        text
    }

    /// A row a device and a span a pass.
    pub fn chart(&self, title: &str) -> Gantt {
        let kinds = [PassKind::Forward, PassKind::Backward, PassKind::Input, PassKind::Weight];
        let span = |e: &PassEvent| GanttSpan {
            row: e.device,
            // Of a pair the forward pass has the upper half.
            half: match (self.paired(e), e.pass.kind) {
                (false, _) => SpanHalf::Whole,
                (true, PassKind::Forward) => SpanHalf::Upper,
                (true, _) => SpanHalf::Lower,
            },
            start: e.start,
            end: e.end,
            kind: kinds.iter().position(|k| *k == e.pass.kind).unwrap_or(0),
            label: e.pass.micro.to_string(),
            tip: format!(
                "{} of micro-batch {}, stage {}: {} to {}",
                name(e.pass.kind),
                e.pass.micro,
                e.pass.stage,
                Seconds(e.start),
                Seconds(e.end)
            ),
        };
        Gantt {
            title: title.to_owned(),
            rows: (0..self.devices.len()).map(|d| format!("device {d}")).collect(),
            kinds: kinds.map(|k| name(k).to_owned()).to_vec(),
            spans: self.events.iter().map(span).collect(),
        }
    }

    fn paired(&self, event: &PassEvent) -> bool {
        let from = self.events.partition_point(|e| (e.device, e.start) < (event.device, event.start));
        self.events[from..]
            .iter()
            .take_while(|e| e.device == event.device && e.start == event.start)
            .filter(|e| e.end == event.end && e.end > e.start)
            .count()
            > 1
    }

    /// Events for `chrome://tracing` and Perfetto: a thread a device, microseconds.
    pub fn chrome_trace(&self) -> Value {
        let names = (0..self.devices.len()).map(|d| {
            json!({ "name": "thread_name", "ph": "M", "pid": 0, "tid": d, "args": { "name": format!("device {d}") } })
        });
        let events = self.events.iter().map(|e| {
            json!({
                "name": format!("{} {}", name(e.pass.kind), e.pass.micro), "cat": name(e.pass.kind), "ph": "X", "pid": 0,
                "tid": e.device, "ts": e.start * 1e6, "dur": (e.end - e.start) * 1e6,
                "args": { "micro_batch": e.pass.micro, "stage": e.pass.stage },
            })
        });
        json!({ "displayTimeUnit": "ms", "traceEvents": names.chain(events).collect::<Vec<_>>() })
    }
}

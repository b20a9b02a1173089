//! Timelines as text, SVG and Chrome trace.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::{Event, Kind, Timeline};

/// Columns and pixels of a label.
const LABEL: f64 = 70.0;
/// Pixels of a device's row.
const ROW: f64 = 26.0;

fn colour(kind: Kind) -> &'static str {
    match kind {
        Kind::Forward => "#4e79a7",
        Kind::Backward => "#59a14f",
        Kind::Input => "#8cd17d",
        Kind::Weight => "#b6992d",
    }
}

fn name(kind: Kind) -> &'static str {
    match kind {
        Kind::Forward => "forward",
        Kind::Backward => "backward",
        Kind::Input => "input gradient",
        Kind::Weight => "weight gradient",
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
                    Kind::Forward => 'F',
                    Kind::Backward => 'B',
                    Kind::Input => 'I',
                    Kind::Weight => 'W',
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

    /// A picture with a bar a pass, its legend and a scale in `unit`s of `seconds`.
    pub fn svg(&self, title: &str) -> String {
        let width = 1100.0;
        let height = 60.0 + ROW * self.devices.len() as f64 + 40.0;
        let x = |time: f64| LABEL + time / self.makespan.max(f64::MIN_POSITIVE) * (width - LABEL - 20.0);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" \
             font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"{LABEL}\" y=\"18\" \
             font-size=\"14\">{}</text>\n",
            escaped(title)
        );
        for (i, kind) in [Kind::Forward, Kind::Backward, Kind::Input, Kind::Weight].into_iter().enumerate() {
            let left = LABEL + 140.0 * i as f64;
            let _ = writeln!(
                svg,
                "<rect x=\"{left}\" y=\"28\" width=\"10\" height=\"10\" fill=\"{}\"/><text x=\"{}\" y=\"37\">{}</text>",
                colour(kind),
                left + 15.0,
                name(kind)
            );
        }
        for d in 0..self.devices.len() {
            let y = 50.0 + ROW * d as f64;
            let _ = writeln!(svg, "<text x=\"8\" y=\"{}\">device {d}</text>", y + 15.0);
        }
        for e in &self.events {
            let y = 50.0 + ROW * e.device as f64;
            let (left, bar) = (x(e.start), (x(e.end) - x(e.start)).max(0.2));
            // Of a pair the forward pass has the upper half.
            let (top, high) = match (self.paired(e), e.pass.kind) {
                (false, _) => (y, ROW - 4.0),
                (true, Kind::Forward) => (y, ROW / 2.0 - 2.0),
                (true, _) => (y + ROW / 2.0 - 2.0, ROW / 2.0 - 2.0),
            };
            let _ = write!(
                svg,
                "<rect x=\"{left:.2}\" y=\"{top:.1}\" width=\"{bar:.2}\" height=\"{high:.1}\" fill=\"{}\" stroke=\"white\" \
                 stroke-width=\"0.5\"><title>{} of micro-batch {}, stage {}: {:.6e} s to {:.6e} s</title></rect>",
                colour(e.pass.kind),
                name(e.pass.kind),
                e.pass.micro,
                e.pass.stage,
                e.start,
                e.end
            );
            if bar > 14.0 {
                let _ = write!(
                    svg,
                    "<text x=\"{:.2}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"white\" font-size=\"9\">{}</text>",
                    left + bar / 2.0,
                    top + high / 2.0 + 3.0,
                    e.pass.micro
                );
            }
            svg.push('\n');
        }
        let bottom = 50.0 + ROW * self.devices.len() as f64 + 14.0;
        for i in 0..=5 {
            let time = self.makespan * f64::from(i) / 5.0;
            let label = ridge_hw::units::Seconds(time);
            let _ = writeln!(svg, "<text x=\"{:.1}\" y=\"{bottom}\" text-anchor=\"middle\">{label}</text>", x(time));
        }
        svg + "</svg>\n"
    }

    fn paired(&self, event: &Event) -> bool {
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

/// Text for XML.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

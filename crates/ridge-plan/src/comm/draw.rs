//! Time over size by algorithm, and a backward pass beside its communication, as SVG and Chrome trace.

use std::fmt::Write as _;

use ridge_hw::units::{Bytes, Seconds};
use serde_json::{Value, json};

use super::{Algorithm, Collective, Fabric, Group, Overlap};

const COLOURS: [&str; 7] = ["#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#9c755f", "#76b7b2"];

/// Sizes of the sweep: 1 KiB to 16 GiB, four to a doubling of doublings.
fn sizes() -> impl Iterator<Item = f64> {
    (20..=68).map(|half| 2f64.powf(f64::from(half) / 2.0))
}

/// Seconds over bytes of each algorithm that there is, both logarithmic.
pub fn svg(fabric: &Fabric, collective: Collective, group: Group, title: &str) -> String {
    let curves: Vec<(Algorithm, Vec<(f64, f64)>)> = Algorithm::ALL
        .into_iter()
        .filter_map(|a| {
            let point = |bytes: f64| Some((bytes, fabric.best(collective, bytes, group, &[a])?.seconds));
            let points: Vec<_> = sizes().filter_map(point).collect();
            (!points.is_empty()).then_some((a, points))
        })
        .collect();
    let times = || curves.iter().flat_map(|c| c.1.iter().map(|p| p.1)).filter(|t| *t > 0.0);
    let (low, high) = (times().fold(1.0, f64::min).log10().floor(), times().fold(1e-6, f64::max).log10().ceil());
    let x = |bytes: f64| 80.0 + (bytes.log2() - 10.0) / 24.0 * 640.0;
    let y = |seconds: f64| 420.0 - (seconds.log10() - low) / (high - low).max(1.0) * 370.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 900 470\" font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"80\" y=\"24\" font-size=\"14\">{}</text>\n",
        title.replace('&', "&amp;").replace('<', "&lt;")
    );
    for power in (10..=34).step_by(4) {
        let (at, label) = (x(2f64.powi(power)), Bytes(1 << power));
        let _ = writeln!(
            svg,
            "<path d=\"M{at:.1} 50V420\" stroke=\"#ddd\"/><text x=\"{at:.1}\" y=\"436\" text-anchor=\"middle\">{label}</text>"
        );
    }
    for power in low as i32..=high as i32 {
        let at = y(10f64.powi(power));
        let _ = writeln!(
            svg,
            "<path d=\"M80 {at:.1}H720\" stroke=\"#ddd\"/><text x=\"74\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            at + 4.0,
            Seconds(10f64.powi(power))
        );
    }
    for (i, (algorithm, points)) in curves.iter().enumerate() {
        let path: Vec<String> = points.iter().map(|p| format!("{:.1},{:.1}", x(p.0), y(p.1))).collect();
        let at = 60.0 + 18.0 * i as f64;
        let colour = COLOURS[i % COLOURS.len()];
        let _ = writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/><rect x=\"735\" y=\"{}\" \
             width=\"12\" height=\"3\" fill=\"{colour}\"/><text x=\"752\" y=\"{at}\">{algorithm}</text>",
            path.join(" "),
            at - 5.0
        );
    }
    svg + "<text x=\"400\" y=\"458\" text-anchor=\"middle\">bytes of a rank's larger buffer</text>\n</svg>\n"
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

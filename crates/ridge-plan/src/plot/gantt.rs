//! Rows of spans over time.

use super::axis::{Axis, Unit};
use super::canvas::{Anchor, Area, Canvas, SIDE, WIDTH, cut, width};
use super::colours::{COLOURS, ink};

/// Which part of its row's height a span has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpanHalf {
    /// All of it.
    Whole,
    /// The upper half: something else runs at the same time.
    Upper,
    /// The lower half.
    Lower,
}

/// Something that takes time.
#[derive(Clone, Debug)]
pub struct GanttSpan {
    /// Its row.
    pub row: usize,
    /// Its part of the row.
    pub half: SpanHalf,
    /// Seconds at which it begins.
    pub start: f64,
    /// Seconds at which it ends.
    pub end: f64,
    /// Its kind.
    pub kind: usize,
    /// What is written in it where there is room.
    pub label: String,
    /// What is shown when it is pointed at.
    pub tip: String,
}

/// A timeline.
#[derive(Clone, Debug)]
pub struct Gantt {
    /// What stands above it.
    pub title: String,
    /// Names of the rows, from the top.
    pub rows: Vec<String>,
    /// Names of kinds, each with a colour.
    pub kinds: Vec<String>,
    /// What happens.
    pub spans: Vec<GanttSpan>,
}

/// Height of a row.
const ROW: f64 = 26.0;

impl Gantt {
    pub(super) fn draw(&self, canvas: &mut Canvas, top: f64) -> f64 {
        let used = |kind: usize| self.spans.iter().any(|s| s.kind == kind);
        let kinds = self.kinds.iter().enumerate().filter(|(i, _)| used(*i));
        let legend: Vec<_> = kinds.map(|(i, name)| (i, name.as_str(), false)).collect();
        let top = canvas.head(top, &self.title, &legend);
        let names = self.rows.iter().map(|r| width(r, "")).fold(0.0, f64::max).min(200.0);
        let bottom = top + ROW * self.rows.len() as f64;
        let plot = Area { left: SIDE + names + 8.0, top, right: WIDTH - SIDE - 4.0, bottom };
        let last = self.spans.iter().map(|s| s.end).fold(0.0, f64::max);
        let axis = Axis::linear("time", Unit::Seconds).place([last].into_iter(), 9);
        let across = |v: f64| axis.at(v).map_or(plot.left, |share| plot.left + share * (plot.right - plot.left));
        for (value, label) in &axis.ticks {
            let at = across(*value);
            canvas.line("grid", (at, plot.top), (at, plot.bottom));
            canvas.text(at, plot.bottom + 16.0, Anchor::Middle, "", label);
        }
        for (i, name) in self.rows.iter().enumerate() {
            canvas.text(plot.left - 8.0, top + ROW * i as f64 + 17.0, Anchor::End, "", &cut(name, "", names));
        }
        for span in &self.spans {
            let y = top + ROW * span.row as f64;
            let (from, to) = match span.half {
                SpanHalf::Whole => (y + 2.0, y + ROW - 2.0),
                SpanHalf::Upper => (y + 2.0, y + 0.5 * ROW),
                SpanHalf::Lower => (y + 0.5 * ROW, y + ROW - 2.0),
            };
            let left = across(span.start);
            let at = Area { left, top: from, right: across(span.end).max(left + 0.2), bottom: to };
            canvas.rect(&format!("f{} edge", span.kind % COLOURS), &at, &span.tip);
            if !span.label.is_empty() && width(&span.label, "small") + 3.0 < at.right - at.left {
                canvas.text(
                    0.5 * (at.left + at.right),
                    0.5 * (from + to) + 3.5,
                    Anchor::Middle,
                    ink(span.kind),
                    &span.label,
                );
            }
        }
        canvas.text(0.5 * (plot.left + plot.right), plot.bottom + 34.0, Anchor::Middle, "", &axis.label);
        plot.bottom + 46.0
    }
}

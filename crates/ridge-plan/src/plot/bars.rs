//! Stacked bars: what a whole is made of, for several wholes, beside a limit.

use super::axis::Axis;
use super::canvas::{Anchor, Area, Canvas, SIDE, WIDTH, area, cut, width};
use super::colours::{COLOURS, ink};

/// One bar.
#[derive(Clone, Debug)]
pub struct Bar {
    /// What stands at its left.
    pub name: String,
    /// Its parts, from left to right, by their names; parts of one name have one colour in all bars.
    pub parts: Vec<(String, f64)>,
}

/// Bars over one axis.
#[derive(Clone, Debug)]
pub struct Bars {
    /// What stands above them.
    pub title: String,
    /// The axis below.
    pub axis: Axis,
    /// The bars, from the top.
    pub bars: Vec<Bar>,
    /// Something that they are compared with, and its name.
    pub limit: Option<(String, f64)>,
}

/// Height of a row.
const ROW: f64 = 28.0;

impl Bars {
    pub(super) fn draw(&self, canvas: &mut Canvas, top: f64) -> f64 {
        let mut keys: Vec<&str> = Vec::new();
        for (name, _) in self.bars.iter().flat_map(|b| &b.parts) {
            if !keys.contains(&name.as_str()) {
                keys.push(name);
            }
        }
        let legend: Vec<_> = keys.iter().enumerate().map(|(i, k)| (i, *k, false)).collect();
        let top = canvas.head(top, &self.title, &legend) + if self.limit.is_some() { 12.0 } else { 0.0 };
        let names = self.bars.iter().map(|b| width(&b.name, "small")).fold(0.0, f64::max).min(290.0);
        let total = |b: &Bar| b.parts.iter().map(|p| p.1.max(0.0)).sum::<f64>();
        let totals = self.bars.iter().map(|b| width(&self.axis.unit.show(total(b)), "")).fold(0.0, f64::max);
        let bottom = top + ROW * self.bars.len() as f64;
        let plot = Area { left: SIDE + names + 8.0, top, right: WIDTH - SIDE - totals - 8.0, bottom };
        let values = self.bars.iter().map(total).chain(self.limit.iter().map(|l| l.1));
        let axis = self.axis.place(values, 8);
        let across = |v: f64| axis.at(v).map_or(plot.left, |share| plot.left + share * (plot.right - plot.left));
        for (value, label) in &axis.ticks {
            let at = across(*value);
            canvas.line("grid", (at, plot.top), (at, plot.bottom));
            canvas.text(at, plot.bottom + 16.0, Anchor::Middle, "", label);
        }
        for (i, bar) in self.bars.iter().enumerate() {
            let y = top + ROW * i as f64;
            canvas.text(plot.left - 8.0, y + 17.5, Anchor::End, "small", &cut(&bar.name, "small", names));
            let mut from = 0.0;
            for (name, value) in bar.parts.iter().filter(|p| p.1 > 0.0) {
                let colour = keys.iter().position(|k| k == name).unwrap_or(0);
                let at = Area { left: across(from), top: y + 4.0, right: across(from + value), bottom: y + ROW - 4.0 };
                let shown = self.axis.unit.show(*value);
                canvas.rect(&format!("f{} edge", colour % COLOURS), &at, &format!("{name}: {shown}"));
                if width(&shown, "small") + 6.0 < at.right - at.left {
                    canvas.text(0.5 * (at.left + at.right), y + 17.5, Anchor::Middle, ink(colour), &shown);
                }
                from += value;
            }
            let shown = self.axis.unit.show(from);
            let beside = across(from) + 5.0;
            // The name of the sum must not stand on the limit's line.
            let on_limit = self.limit.as_ref().is_some_and(|l| {
                let text = area(beside, y, Anchor::Start, "", &shown);
                (text.left - 3.0..text.right + 3.0).contains(&across(l.1))
            });
            let beside = if on_limit { self.limit.as_ref().map_or(beside, |l| across(l.1) + 5.0) } else { beside };
            canvas.text(beside, y + 18.0, Anchor::Start, "", &shown);
        }
        if let Some((name, value)) = &self.limit {
            let at = across(*value);
            canvas.line("mark", (at, plot.top - 4.0), (at, plot.bottom));
            let name = format!("{name}: {}", self.axis.unit.show(*value));
            let places = [(at, plot.top - 8.0, Anchor::Middle), (WIDTH - SIDE, plot.top - 8.0, Anchor::End)];
            let all = Area { left: 0.0, top: 0.0, right: WIDTH, bottom: f64::INFINITY };
            canvas.text_where_free(&places, &all, "small", &name);
        }
        canvas.text(0.5 * (plot.left + plot.right), plot.bottom + 34.0, Anchor::Middle, "", &axis.label);
        plot.bottom + 46.0
    }
}

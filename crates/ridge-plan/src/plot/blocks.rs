//! Rectangles over two linear axes, such as values in memory over the launches of a step.

use super::axis::Axis;
use super::canvas::{Anchor, Area, Canvas, SIDE, WIDTH, width};
use super::chart::Mark;
use super::colours::COLOURS;

/// A rectangle.
#[derive(Clone, Debug)]
pub struct Block {
    /// From where to where it lies along x.
    pub x: (f64, f64),
    /// From where to where it lies along y.
    pub y: (f64, f64),
    /// Its kind.
    pub kind: usize,
    /// What is shown when it is pointed at.
    pub tip: String,
}

/// Rectangles over two axes that begin at 0.
#[derive(Clone, Debug)]
pub struct Blocks {
    /// What stands above it.
    pub title: String,
    /// The horizontal axis.
    pub x: Axis,
    /// The vertical axis.
    pub y: Axis,
    /// Names of kinds, each with a colour.
    pub kinds: Vec<String>,
    /// The rectangles.
    pub blocks: Vec<Block>,
    /// Vertical lines with a name.
    pub marks: Vec<Mark>,
}

/// Height of the area between the axes.
const HEIGHT: f64 = 340.0;

impl Blocks {
    pub(super) fn draw(&self, canvas: &mut Canvas, top: f64) -> f64 {
        let legend: Vec<_> = self.kinds.iter().enumerate().map(|(i, name)| (i, name.as_str(), false)).collect();
        let top = canvas.head(top, &self.title, &legend);
        let y = self.y.place(self.blocks.iter().map(|b| b.y.1), 10);
        let labels = y.ticks.iter().map(|t| width(&t.1, "")).fold(0.0, f64::max);
        let plot = Area { left: SIDE + 22.0 + labels, top, right: WIDTH - SIDE - 6.0, bottom: top + HEIGHT };
        let x = self.x.place(self.blocks.iter().map(|b| b.x.1).chain(self.marks.iter().map(|m| m.x)), 9);
        let across = |v: f64| x.at(v).map_or(plot.left, |share| plot.left + share * (plot.right - plot.left));
        let up = |v: f64| y.at(v).map_or(plot.bottom, |share| plot.bottom - share * (plot.bottom - plot.top));
        for (value, label) in &x.ticks {
            canvas.line("grid", (across(*value), plot.top), (across(*value), plot.bottom));
            canvas.text(across(*value), plot.bottom + 16.0, Anchor::Middle, "", label);
        }
        for (value, label) in &y.ticks {
            canvas.line("grid", (plot.left, up(*value)), (plot.right, up(*value)));
            canvas.text(plot.left - 6.0, up(*value) + 4.0, Anchor::End, "", label);
        }
        for block in &self.blocks {
            let (left, bottom) = (across(block.x.0), up(block.y.0));
            let (right, top) = (across(block.x.1).max(left + 0.2), up(block.y.1).min(bottom - 0.2));
            canvas.rect(&format!("f{}", block.kind % COLOURS), &Area { left, top, right, bottom }, &block.tip);
        }
        for mark in &self.marks {
            let at = across(mark.x);
            canvas.line("mark", (at, plot.top), (at, plot.bottom));
            let rows = (0..6).map(|i| plot.top + 14.0 + 15.0 * f64::from(i));
            let places: Vec<_> =
                rows.flat_map(|y| [(at + 4.0, y, Anchor::Start), (at - 4.0, y, Anchor::End)]).collect();
            canvas.text_where_free(&places, &plot, "halo", &mark.name);
        }
        canvas.text(0.5 * (plot.left + plot.right), plot.bottom + 34.0, Anchor::Middle, "", &x.label);
        canvas.turned(SIDE - 2.0, 0.5 * (plot.top + plot.bottom), -90.0, "", &y.label);
        plot.bottom + 46.0
    }
}

//! Figures as SVG that a paper could print: charts with linear and logarithmic axes, stacked bars and timelines, one below
//! another. The only writer of pictures in Ridge, here because plans draw most and the binary, which draws what it
//! measured, is above.
//!
//! The same figure gives the same text on every machine. Colours are those of Okabe and Ito ("Color Universal Design",
//! 2008), told apart with every kind of colour vision; points differ in shape too. It follows the reader's light or dark
//! setting on a screen and is light on paper. Text is set where nothing else stands, or not at all: what finds no place
//! is still told when pointed at.

mod axis;
mod bars;
mod blocks;
mod canvas;
mod chart;
mod colours;
mod figure;
mod gantt;
#[cfg(test)]
mod tests;

pub use axis::{Axis, Scale, Unit};
pub use bars::{Bar, Bars};
pub use blocks::{Block, Blocks};
pub use chart::{Chart, ChartPoint, Mark, Series, Style};
pub use figure::{Panel, draw};
pub use gantt::{Gantt, GanttSpan, SpanHalf};

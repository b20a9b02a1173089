//! Panels below one another as one SVG document.

use super::bars::Bars;
use super::blocks::Blocks;
use super::canvas::{self, Canvas, WIDTH};
use super::chart::Chart;
use super::gantt::Gantt;

/// A part of a figure.
#[derive(Clone, Debug)]
pub enum Panel {
    /// Points and lines over two axes.
    Chart(Chart),
    /// Stacked bars.
    Bars(Bars),
    /// Rows of spans over time.
    Gantt(Gantt),
    /// Rectangles over two axes.
    Blocks(Blocks),
}

impl Panel {
    fn title(&self) -> &str {
        match self {
            Self::Chart(c) => &c.title,
            Self::Bars(b) => &b.title,
            Self::Gantt(g) => &g.title,
            Self::Blocks(b) => &b.title,
        }
    }

    /// Draws it from `top` on; the result is where it ends.
    fn draw(&self, canvas: &mut Canvas, top: f64) -> f64 {
        match self {
            Self::Chart(c) => c.draw(canvas, top),
            Self::Bars(b) => b.draw(canvas, top),
            Self::Gantt(g) => g.draw(canvas, top),
            Self::Blocks(b) => b.draw(canvas, top),
        }
    }
}

impl From<Chart> for Panel {
    fn from(chart: Chart) -> Self {
        Self::Chart(chart)
    }
}

impl From<Bars> for Panel {
    fn from(bars: Bars) -> Self {
        Self::Bars(bars)
    }
}

impl From<Blocks> for Panel {
    fn from(blocks: Blocks) -> Self {
        Self::Blocks(blocks)
    }
}

impl From<Gantt> for Panel {
    fn from(gantt: Gantt) -> Self {
        Self::Gantt(gantt)
    }
}

const STYLE: &str = "\
.fig{font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;font-size:12px;color:#1b1f24}\
.fig .paper{fill:#fff}.fig text{fill:currentColor}.fig .title{font-weight:600;font-size:14px}.fig .small{font-size:10px}\
.fig .halo{paint-order:stroke;stroke:#fff;stroke-width:3px;stroke-linejoin:round}\
.fig .grid{stroke:#8885;stroke-width:1}.fig .minor{stroke:#8882;stroke-width:1}.fig .frame{fill:none;stroke:#888}\
.fig .ceiling{fill:none;stroke:currentColor;stroke-width:1.4}.fig .mark{stroke:#888;stroke-dasharray:5 3;fill:none}.fig .line{fill:none;stroke-width:2}.fig .edge{stroke:#fff;stroke-width:.6}\
.fig .dark{fill:#fff}.fig .light{fill:#111}\
.fig .f0{fill:#0072b2}.fig .f1{fill:#e69f00}.fig .f2{fill:#009e73}.fig .f3{fill:#cc79a7}.fig .f4{fill:#d55e00}\
.fig .f5{fill:#56b4e9}.fig .f6{fill:#8a8a8a}.fig .f7{fill:#cfc43a}\
.fig .s0{stroke:#0072b2}.fig .s1{stroke:#e69f00}.fig .s2{stroke:#009e73}.fig .s3{stroke:#cc79a7}.fig .s4{stroke:#d55e00}\
.fig .s5{stroke:#56b4e9}.fig .s6{stroke:#8a8a8a}.fig .s7{stroke:#cfc43a}\
@media screen and (prefers-color-scheme:dark){.fig{color:#e6e8eb}.fig .paper{fill:#15181d}.fig .halo{stroke:#15181d}\
.fig .edge{stroke:#15181d}.fig .f0{fill:#3b9fdc}.fig .s0{stroke:#3b9fdc}}";

/// The panels below one another, as one SVG document.
pub fn draw(panels: &[Panel]) -> String {
    let mut canvas = Canvas::default();
    let mut top = 0.0;
    for panel in panels {
        top = panel.draw(&mut canvas, top);
    }
    let height = canvas::number(top.max(1.0));
    let title = canvas::escaped(panels.first().map_or("", Panel::title));
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"fig\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
         height=\"{height}\" role=\"img\" aria-label=\"{title}\"><style>{STYLE}</style>\n<rect class=\"paper\" \
         width=\"{WIDTH}\" height=\"{height}\"/>\n{}</svg>\n",
        canvas.svg
    )
}

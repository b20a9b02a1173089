//! Line charts as SVG, light or dark as whoever looks at them.

use std::fmt::Write as _;

/// One line of a chart.
#[derive(Clone, Debug)]
pub struct Series {
    /// What it is called.
    pub name: String,
    /// Its points, from left to right.
    pub points: Vec<(f64, f64)>,
    /// Draw a line from point to point.
    pub line: bool,
    /// Draw the points.
    pub dots: bool,
}

/// A chart.
#[derive(Clone, Debug)]
pub struct Chart {
    /// What stands above it.
    pub title: String,
    /// What the axis below says, with its unit.
    pub x: String,
    /// What the axis at the left says, with its unit.
    pub y: String,
    /// The lines, at most six.
    pub series: Vec<Series>,
    /// Vertical lines with their names.
    pub marks: Vec<(String, f64)>,
}

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 260.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 34.0;
const BOTTOM: f64 = 44.0;

const STYLE: &str = "\
svg{font:12px system-ui,sans-serif;background:#fff;color:#1b1f24}text{fill:currentColor}\
.grid{stroke:#8884;stroke-width:1}.mark{stroke:#c2410c;stroke-dasharray:4 3}.title{font-weight:600;font-size:14px}\
.line{fill:none;stroke-width:2}.c0{stroke:#2563eb}.c1{stroke:#d97706}.c2{stroke:#059669}.c3{stroke:#9333ea}\
.c4{stroke:#dc2626}.c5{stroke:#0891b2}.d0{fill:#2563eb}.d1{fill:#d97706}.d2{fill:#059669}.d3{fill:#9333ea}\
.d4{fill:#dc2626}.d5{fill:#0891b2}@media(prefers-color-scheme:dark){svg{background:#15181d;color:#e6e8eb}}";

/// The charts below one another, as one SVG document.
pub fn draw(charts: &[Chart]) -> String {
    let height = HEIGHT * charts.len() as f64;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\"><style>{STYLE}</style>\n"
    );
    for (i, chart) in charts.iter().enumerate() {
        let _ = writeln!(svg, "<g transform=\"translate(0 {})\">", HEIGHT * i as f64);
        chart.draw(&mut svg);
        svg += "</g>\n";
    }
    svg + "</svg>\n"
}

impl Chart {
    fn draw(&self, svg: &mut String) {
        let finite = |v: &f64| v.is_finite();
        let points = || self.series.iter().flat_map(|s| &s.points);
        let most = |values: &mut dyn Iterator<Item = f64>| values.filter(finite).fold(0.0, f64::max);
        let x_axis = ticks(most(&mut points().map(|p| p.0).chain(self.marks.iter().map(|m| m.1))));
        let y_axis = ticks(most(&mut points().map(|p| p.1)));
        let (x_most, y_most) = (x_axis.last().copied().unwrap_or(1.0), y_axis.last().copied().unwrap_or(1.0));
        let x = |v: f64| LEFT + v / x_most * (WIDTH - LEFT - RIGHT);
        let y = |v: f64| HEIGHT - BOTTOM - v / y_most * (HEIGHT - TOP - BOTTOM);
        let (bottom, right) = (HEIGHT - BOTTOM, WIDTH - RIGHT);
        let _ = writeln!(svg, "<text class=\"title\" x=\"{LEFT}\" y=\"18\">{}</text>", escaped(&self.title));
        for tick in &y_axis {
            let at = y(*tick);
            let _ = writeln!(svg, "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>");
            let (to, at) = (LEFT - 6.0, at + 4.0);
            let _ = writeln!(svg, "<text x=\"{to}\" y=\"{at:.1}\" text-anchor=\"end\">{}</text>", shown(*tick));
        }
        for tick in &x_axis {
            let (at, below) = (x(*tick), bottom + 16.0);
            let _ = writeln!(svg, "<text x=\"{at:.1}\" y=\"{below}\" text-anchor=\"middle\">{}</text>", shown(*tick));
        }
        let (middle, below) = (f64::midpoint(LEFT, right), bottom + 34.0);
        let _ = writeln!(svg, "<text x=\"{middle}\" y=\"{below}\" text-anchor=\"middle\">{}</text>", escaped(&self.x));
        let turned = f64::midpoint(TOP, bottom);
        let _ = writeln!(
            svg,
            "<text transform=\"translate(14 {turned}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
            escaped(&self.y)
        );
        for (name, at) in self.marks.iter().filter(|m| m.1.is_finite()) {
            let at = x(*at);
            let _ = writeln!(svg, "<line class=\"mark\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{TOP}\" y2=\"{bottom}\"/>");
            // Its name stands where there is room.
            let (at, anchor) = if at > 0.8 * right { (at - 4.0, "end") } else { (at + 4.0, "start") };
            let low = bottom - 6.0;
            let _ = writeln!(svg, "<text x=\"{at:.1}\" y=\"{low}\" text-anchor=\"{anchor}\">{}</text>", escaped(name));
        }
        let mut legend = right;
        for (i, series) in self.series.iter().enumerate().rev() {
            let color = i % 6;
            let drawn: Vec<(f64, f64)> = series
                .points
                .iter()
                .filter(|(a, b)| a.is_finite() && b.is_finite())
                .map(|(a, b)| (x(*a), y(*b)))
                .collect();
            let path: String = drawn.iter().map(|(a, b)| format!("{a:.1},{b:.1} ")).collect();
            if series.line {
                let _ = writeln!(svg, "<polyline class=\"line c{color}\" points=\"{}\"/>", path.trim_end());
            }
            if series.dots {
                for (a, b) in &drawn {
                    let _ = writeln!(svg, "<circle class=\"d{color}\" cx=\"{a:.1}\" cy=\"{b:.1}\" r=\"3\"/>");
                }
            }
            legend -= 8.0 * series.name.chars().count() as f64;
            let _ = writeln!(svg, "<text x=\"{legend:.0}\" y=\"18\">{}</text>", escaped(&series.name));
            legend -= 12.0;
            let _ = writeln!(svg, "<circle class=\"d{color}\" cx=\"{legend:.0}\" cy=\"14\" r=\"4\"/>");
            legend -= 12.0;
        }
    }
}

/// Round numbers from 0 to at least `most`, 4 to 8 of them.
fn ticks(most: f64) -> Vec<f64> {
    let most = if most > 0.0 { most } else { 1.0 };
    let power = 10f64.powf((most / 5.0).log10().floor());
    let step =
        [1.0, 2.0, 2.5, 5.0, 10.0].map(|s| s * power).into_iter().find(|s| most / s <= 6.0).unwrap_or(10.0 * power);
    (0..=(most / step - 1e-9).ceil() as usize).map(|i| i as f64 * step).collect()
}

/// A tick without needless digits.
fn shown(value: f64) -> String {
    let text = format!("{value:.6}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_reach_the_largest_value() {
        for (most, expected) in [
            (1.0, &[0.0, 0.2, 0.4, 0.6, 0.8, 1.0][..]),
            (0.0, &[0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
            (7.3, &[0.0, 2.0, 4.0, 6.0, 8.0]),
            (120.0, &[0.0, 20.0, 40.0, 60.0, 80.0, 100.0, 120.0]),
        ] {
            let ticks = ticks(most);
            assert_eq!(ticks.len(), expected.len(), "{most}: {ticks:?}");
            assert!(ticks.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-9), "{most}: {ticks:?}");
        }
    }

    #[test]
    fn points_stand_where_the_axes_say_and_names_are_text() {
        let series = vec![Series {
            name: "<a> & b".to_owned(),
            points: vec![(0.0, 0.0), (10.0, 1.0), (f64::NAN, 1.0)],
            line: true,
            dots: true,
        }];
        let chart = Chart {
            title: "t".to_owned(),
            x: "x, s".to_owned(),
            y: "y".to_owned(),
            series,
            marks: vec![("limit".to_owned(), 5.0)],
        };
        let svg = draw(&[chart.clone(), chart]);
        assert_eq!(svg.matches("points=\"64.0,216.0 704.0,34.0\"").count(), 2, "{svg}");
        assert!(svg.contains("&lt;a&gt; &amp; b") && svg.contains("viewBox=\"0 0 720 520\""));
        assert!(svg.contains("class=\"mark\" x1=\"384.0\""));
        assert!(!svg.contains("NaN"));
    }
}

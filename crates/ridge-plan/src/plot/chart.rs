//! Points and lines over two axes: measurements, sweeps, Pareto fronts and rooflines.

use super::axis::{Axis, Placed, Unit};
use super::canvas::{self, Anchor, Area, Canvas, SIDE, WIDTH, area, width};
use super::colours::COLOURS;

/// A point of a series.
#[derive(Clone, Debug, PartialEq)]
pub struct ChartPoint {
    /// Where it lies on the axis below.
    pub x: f64,
    /// Where it lies on the axis at the left.
    pub y: f64,
    /// What is written beside it where there is room, and shown when it is pointed at.
    pub label: String,
}

impl From<(f64, f64)> for ChartPoint {
    fn from((x, y): (f64, f64)) -> Self {
        Self { x, y, label: String::new() }
    }
}

/// How a series is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// A line through its points.
    Line,
    /// Its points alone.
    Points,
    /// Both.
    Both,
    /// A thin line with its name on it rather than in the legend: what nothing goes beyond.
    Ceiling,
}

/// What belongs together.
#[derive(Clone, Debug)]
pub struct Series {
    /// What it is called.
    pub name: String,
    /// Its points; those without a place on the axes are left out.
    pub points: Vec<ChartPoint>,
    /// How it is drawn.
    pub style: Style,
}

impl Series {
    /// A series of points without labels.
    pub fn new(name: impl Into<String>, style: Style, points: impl IntoIterator<Item = (f64, f64)>) -> Self {
        Self { name: name.into(), style, points: points.into_iter().map(ChartPoint::from).collect() }
    }
}

/// A vertical line with a name.
#[derive(Clone, Debug)]
pub struct Mark {
    /// Its name.
    pub name: String,
    /// Where it stands.
    pub x: f64,
}

/// A chart.
#[derive(Clone, Debug)]
pub struct Chart {
    /// What stands above it.
    pub title: String,
    /// The axis below.
    pub x: Axis,
    /// The axis at the left.
    pub y: Axis,
    /// What it shows.
    pub series: Vec<Series>,
    /// Vertical lines.
    pub marks: Vec<Mark>,
    /// Height of the area between the axes, of a width of some 680.
    pub height: f64,
}

impl Chart {
    /// A chart without series yet.
    pub fn new(title: impl Into<String>, x: Axis, y: Axis) -> Self {
        Self { title: title.into(), x, y, series: Vec::new(), marks: Vec::new(), height: 240.0 }
    }

    /// With one series more.
    #[must_use]
    pub fn with(mut self, series: Series) -> Self {
        self.series.push(series);
        self
    }

    pub(super) fn draw(&self, canvas: &mut Canvas, top: f64) -> f64 {
        let named = self.series.iter().enumerate().filter(|(_, s)| s.style != Style::Ceiling && !s.name.is_empty());
        let legend: Vec<_> = named.map(|(i, s)| (i, s.name.as_str(), s.style != Style::Line)).collect();
        // The only one needs no key.
        let legend = if legend.len() > 1 { &legend[..] } else { &[] };
        let top = canvas.head(top, &self.title, legend);
        let counts = |p: &&ChartPoint| self.x.takes(p.x) && self.y.takes(p.y);
        let points = || self.series.iter().flat_map(|s| &s.points).filter(counts);
        let y = self.y.place(points().map(|p| p.y), (self.height / 34.0) as usize);
        let labels = y.ticks.iter().map(|t| width(&t.1, "")).fold(0.0, f64::max);
        let left = SIDE + 22.0 + labels;
        let plot = Area { left, top, right: WIDTH - SIDE - 6.0, bottom: top + self.height };
        let x_values = points().map(|p| p.x).chain(self.marks.iter().map(|m| m.x));
        let most = if self.x.unit == Unit::Number { 9 } else { 8 };
        let x = self.x.place(x_values, most);
        draw_axes(canvas, &plot, &x, &y);
        let at = |p: &ChartPoint| {
            let (x, y) = (x.at(p.x)?, y.at(p.y)?);
            Some((plot.left + x * (plot.right - plot.left), plot.bottom - y * (plot.bottom - plot.top)))
        };
        for (i, series) in self.series.iter().enumerate() {
            let places: Vec<(f64, f64)> = series.points.iter().filter(counts).filter_map(at).collect();
            let colour = i % COLOURS;
            match series.style {
                Style::Line | Style::Both => canvas.polyline(&format!("line s{colour}"), &places),
                Style::Ceiling => canvas.polyline("ceiling", &places),
                Style::Points => {}
            }
        }
        // Names of ceilings and marks first: labels of points give way.
        for series in self.series.iter().filter(|s| s.style == Style::Ceiling) {
            let places: Vec<(f64, f64)> = series.points.iter().filter_map(at).collect();
            name_ceiling(canvas, &plot, &places, &series.name);
        }
        for (i, series) in
            self.series.iter().enumerate().filter(|(_, s)| matches!(s.style, Style::Points | Style::Both))
        {
            for point in &series.points {
                let Some((x, y)) = at(point) else { continue };
                canvas.taken.push(Area { left: x - 4.0, top: y - 4.0, right: x + 4.0, bottom: y + 4.0 });
                let what = if point.label.is_empty() { &series.name } else { &point.label };
                let tip = format!("{what}: {}, {}", self.x.unit.show(point.x), self.y.unit.show(point.y));
                canvas.point(i, x, y, &tip);
            }
        }
        for mark in &self.marks {
            let Some(share) = x.at(mark.x) else { continue };
            let at = plot.left + share * (plot.right - plot.left);
            canvas.line("mark", (at, plot.top), (at, plot.bottom));
            let rows = (0..6).map(|i| plot.bottom - 8.0 - 15.0 * f64::from(i));
            let places: Vec<_> =
                rows.flat_map(|y| [(at + 4.0, y, Anchor::Start), (at - 4.0, y, Anchor::End)]).collect();
            canvas.text_where_free(&places, &plot, "halo", &mark.name);
        }
        for series in &self.series {
            for point in series.points.iter().filter(|p| !p.label.is_empty()) {
                let Some((x, y)) = at(point) else { continue };
                canvas.text_where_free(&around(x, y), &plot, "small halo", &point.label);
            }
        }
        plot.bottom + 50.0
    }
}

/// Where a label may stand beside its point, best first.
fn around(x: f64, y: f64) -> [(f64, f64, Anchor); 8] {
    [
        (x + 7.0, y + 3.5, Anchor::Start),
        (x - 7.0, y + 3.5, Anchor::End),
        (x, y - 7.5, Anchor::Middle),
        (x, y + 14.5, Anchor::Middle),
        (x + 6.0, y - 6.0, Anchor::Start),
        (x + 6.0, y + 13.0, Anchor::Start),
        (x - 6.0, y - 6.0, Anchor::End),
        (x - 6.0, y + 13.0, Anchor::End),
    ]
}

fn draw_axes(canvas: &mut Canvas, plot: &Area, x: &Placed, y: &Placed) {
    let (wide, high) = (plot.right - plot.left, plot.bottom - plot.top);
    let across = |v: f64| x.at(v).map(|share| plot.left + share * wide);
    let up = |v: f64| y.at(v).map(|share| plot.bottom - share * high);
    for at in x.minor.iter().filter_map(|v| across(*v)) {
        canvas.line("minor", (at, plot.top), (at, plot.bottom));
    }
    for at in y.minor.iter().filter_map(|v| up(*v)) {
        canvas.line("minor", (plot.left, at), (plot.right, at));
    }
    for (value, label) in &y.ticks {
        let Some(at) = up(*value) else { continue };
        canvas.line("grid", (plot.left, at), (plot.right, at));
        canvas.text(plot.left - 6.0, at + 4.0, Anchor::End, "", label);
    }
    for (value, label) in &x.ticks {
        let Some(at) = across(*value) else { continue };
        canvas.line("grid", (at, plot.top), (at, plot.bottom));
        let anchor = if at + 0.5 * width(label, "") > WIDTH - 4.0 { Anchor::End } else { Anchor::Middle };
        let text = area(at, plot.bottom + 18.0, anchor, "", label);
        if canvas.is_free(&text) {
            canvas.text(at, plot.bottom + 18.0, anchor, "", label);
        }
    }
    canvas.text(plot.left + 0.5 * wide, plot.bottom + 37.0, Anchor::Middle, "", &x.label);
    canvas.turned(SIDE + 4.0, plot.top + 0.5 * high, -90.0, "", &canvas::cut(&y.label, "", high + 20.0));
    canvas.rect("frame", plot, "");
}

/// The name of a ceiling along its longest part.
fn name_ceiling(canvas: &mut Canvas, plot: &Area, places: &[(f64, f64)], name: &str) {
    let length = |p: &[(f64, f64)]| (p[1].0 - p[0].0).hypot(p[1].1 - p[0].1);
    let Some(part) = places.windows(2).max_by(|a, b| length(a).total_cmp(&length(b))) else { return };
    let (from, to) = (part[0], part[1]);
    let angle = (to.1 - from.1).atan2(to.0 - from.0);
    if angle.abs() < 0.02 {
        let places = [0.0, 0.25, 0.5].map(|back| (to.0 - 5.0 - back * (to.0 - from.0), to.1 - 5.0, Anchor::End));
        canvas.text_where_free(&places, plot, "small halo", name);
        return;
    }
    // Just above the line, where boxes along it are free.
    let (wide, class) = (width(name, "small"), "small halo");
    let (right, up) = ((angle.cos(), angle.sin()), (angle.sin(), -angle.cos()));
    for share in [0.5, 0.35, 0.65, 0.2, 0.8] {
        let at = (from.0 + share * (to.0 - from.0) + 5.0 * up.0, from.1 + share * (to.1 - from.1) + 5.0 * up.1);
        let steps = (wide / 8.0).ceil() as i32;
        let boxes: Vec<Area> = (-steps / 2..=steps / 2)
            .map(|i| {
                let along = 8.0 * f64::from(i);
                let (x, y) = (at.0 + along * right.0 + 4.0 * up.0, at.1 + along * right.1 + 4.0 * up.1);
                Area { left: x - 5.0, top: y - 5.0, right: x + 5.0, bottom: y + 5.0 }
            })
            .collect();
        if boxes.iter().all(|b| plot.holds(b) && canvas.is_free(b)) {
            canvas.turned(at.0, at.1, angle.to_degrees(), class, name);
            canvas.taken.extend(boxes);
            return;
        }
    }
}

//! What panels draw on: elements of SVG, and which places text has taken.

use std::fmt::Write as _;

use super::colours::COLOURS;

/// Width of a figure.
pub(super) const WIDTH: f64 = 760.0;
/// Room at the left and right.
pub(super) const SIDE: f64 = 16.0;

/// Where something stands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Area {
    pub(super) left: f64,
    pub(super) top: f64,
    pub(super) right: f64,
    pub(super) bottom: f64,
}

impl Area {
    pub(super) fn meets(&self, other: &Self) -> bool {
        self.left < other.right && other.left < self.right && self.top < other.bottom && other.top < self.bottom
    }

    pub(super) fn holds(&self, other: &Self) -> bool {
        self.left <= other.left && other.right <= self.right && self.top <= other.top && other.bottom <= self.bottom
    }
}

/// Which end of a text its place is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

/// Elements so far, and the places of text.
#[derive(Debug, Default)]
pub(super) struct Canvas {
    pub(super) svg: String,
    pub(super) taken: Vec<Area>,
}

/// Height of a class of text.
pub(super) fn size(class: &str) -> f64 {
    match class {
        c if c.contains("title") => 14.0,
        c if c.contains("small") => 10.0,
        _ => 12.0,
    }
}

/// Width of a text: fonts differ, and this is what a wide one takes.
pub(super) fn width(text: &str, class: &str) -> f64 {
    text.chars().count() as f64 * size(class) * 0.58
}

/// The area of a text set on the baseline `y`.
pub(super) fn area(x: f64, y: f64, anchor: Anchor, class: &str, text: &str) -> Area {
    let (wide, high) = (width(text, class), size(class));
    let left = match anchor {
        Anchor::Start => x,
        Anchor::Middle => x - 0.5 * wide,
        Anchor::End => x - wide,
    };
    Area { left, top: y - 0.8 * high, right: left + wide, bottom: y + 0.25 * high }
}

/// A coordinate: tenths are as fine as anybody sees.
pub(super) fn number(value: f64) -> String {
    let text = format!("{value:.1}");
    let text = text.strip_suffix(".0").unwrap_or(&text);
    if text == "-0" { "0".to_owned() } else { text.to_owned() }
}

/// Text for XML. Characters that XML does not have are left out.
pub(super) fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\t' | '\n' => out.push(' '),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => {}
            c => out.push(c),
        }
    }
    out
}

/// `text` in lines of at most `room`.
fn wrapped(text: &str, class: &str, room: f64) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if width(line, class) + width(word, class) + 5.0 <= room => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// `text`, or what of it `room` holds.
pub(super) fn cut(text: &str, class: &str, room: f64) -> String {
    if width(text, class) <= room {
        return text.to_owned();
    }
    let most = (room / (size(class) * 0.58)).floor().max(2.0) as usize - 1;
    text.chars().take(most).chain(['…']).collect()
}

impl Canvas {
    pub(super) fn text(&mut self, x: f64, y: f64, anchor: Anchor, class: &str, text: &str) {
        self.taken.push(area(x, y, anchor, class, text));
        let anchor = match anchor {
            Anchor::Start => "",
            Anchor::Middle => " text-anchor=\"middle\"",
            Anchor::End => " text-anchor=\"end\"",
        };
        let class = if class.is_empty() { String::new() } else { format!(" class=\"{class}\"") };
        let (x, y) = (number(x), number(y));
        let _ = writeln!(self.svg, "<text x=\"{x}\" y=\"{y}\"{anchor}{class}>{}</text>", escaped(text));
    }

    /// Text around `(x, y)`, turned by `degrees`.
    pub(super) fn turned(&mut self, x: f64, y: f64, degrees: f64, class: &str, text: &str) {
        let _ = writeln!(
            self.svg,
            "<text transform=\"translate({} {}) rotate({})\" text-anchor=\"middle\" class=\"{class}\">{}</text>",
            number(x),
            number(y),
            number(degrees),
            escaped(text)
        );
    }

    /// Text in the first of the `places` that is within `bounds` and free. Is there one?
    pub(super) fn text_where_free(
        &mut self,
        places: &[(f64, f64, Anchor)],
        bounds: &Area,
        class: &str,
        text: &str,
    ) -> bool {
        for &(x, y, anchor) in places {
            let at = area(x, y, anchor, class, text);
            if bounds.holds(&at) && self.is_free(&at) {
                self.text(x, y, anchor, class, text);
                return true;
            }
        }
        false
    }

    pub(super) fn is_free(&self, area: &Area) -> bool {
        !self.taken.iter().any(|t| t.meets(area))
    }

    pub(super) fn line(&mut self, class: &str, from: (f64, f64), to: (f64, f64)) {
        let path = format!("M{} {}L{} {}", number(from.0), number(from.1), number(to.0), number(to.1));
        let _ = writeln!(self.svg, "<path class=\"{class}\" d=\"{path}\"/>");
    }

    pub(super) fn polyline(&mut self, class: &str, points: &[(f64, f64)]) {
        let points: Vec<String> = points.iter().map(|p| format!("{},{}", number(p.0), number(p.1))).collect();
        let _ = writeln!(self.svg, "<polyline class=\"{class}\" points=\"{}\"/>", points.join(" "));
    }

    pub(super) fn rect(&mut self, class: &str, at: &Area, tip: &str) {
        let _ = write!(
            self.svg,
            "<rect class=\"{class}\" x=\"{:.2}\" y=\"{}\" width=\"{:.2}\" height=\"{}\"",
            at.left,
            number(at.top),
            at.right - at.left,
            number(at.bottom - at.top)
        );
        self.close("rect", tip);
    }

    /// A point in the shape of series `i`.
    pub(super) fn point(&mut self, i: usize, x: f64, y: f64, tip: &str) {
        let n = number;
        let class = format!("f{} edge", i % COLOURS);
        let shape = match i % 4 {
            0 => {
                let _ = write!(self.svg, "<circle class=\"{class}\" cx=\"{}\" cy=\"{}\" r=\"3.6\"", n(x), n(y));
                self.close("circle", tip);
                return;
            }
            1 => format!("M{} {}h6.4v6.4h-6.4z", n(x - 3.2), n(y - 3.2)),
            2 => format!("M{} {}l4.4 4.4l-4.4 4.4l-4.4-4.4z", n(x), n(y - 4.4)),
            _ => format!("M{} {}l4.2 7.2h-8.4z", n(x), n(y - 4.4)),
        };
        let _ = write!(self.svg, "<path class=\"{class}\" d=\"{shape}\"");
        self.close("path", tip);
    }

    fn close(&mut self, element: &str, tip: &str) {
        if tip.is_empty() {
            self.svg += "/>\n";
        } else {
            let _ = writeln!(self.svg, "><title>{}</title></{element}>", escaped(tip));
        }
    }

    /// Title and legend of a panel. What is below begins at the result.
    pub(super) fn head(&mut self, top: f64, title: &str, legend: &[(usize, &str, bool)]) -> f64 {
        let mut y = top + 8.0;
        for line in wrapped(title, "title", WIDTH - 2.0 * SIDE) {
            y += 16.0;
            self.text(SIDE, y, Anchor::Start, "title", &line);
        }
        if !legend.is_empty() {
            y += 20.0;
        }
        let mut x = SIDE;
        for &(i, name, point) in legend {
            let name = cut(name, "", WIDTH - 2.0 * SIDE - 18.0);
            let wide = 18.0 + width(&name, "");
            if x > SIDE && x + wide > WIDTH - SIDE {
                (x, y) = (SIDE, y + 18.0);
            }
            if point {
                self.point(i, x + 5.0, y - 4.0, "");
            } else {
                let swatch = Area { left: x, top: y - 9.0, right: x + 11.0, bottom: y + 1.0 };
                self.rect(&format!("f{}", i % COLOURS), &swatch, "");
            }
            self.text(x + 16.0, y, Anchor::Start, "", &name);
            x += wide + 16.0;
        }
        y + 14.0
    }
}

//! Figures are well-formed, the same every time, and nothing that is written stands on something else.

use super::canvas::{Anchor, area};
use super::*;

fn chart() -> Chart {
    let (x, y) = (Axis::log("intensity", Unit::FlopsPerByte), Axis::log("rate", Unit::FlopsPerSecond));
    let mut chart = Chart::new("A roofline of <a> & \"b\"", x, y)
        .with(Series::new("memory 3.35 TB/s", Style::Ceiling, [(1.0, 3.35e12), (295.0, 989e12)]))
        .with(Series::new("bf16 989 TFLOP/s", Style::Ceiling, [(295.0, 989e12), (10_000.0, 989e12)]))
        .with(Series::new("found", Style::Both, [(f64::NAN, 1.0), (0.0, 1.0)]));
    // Five points in one place: their labels cannot all be written.
    let label = |i: usize| ChartPoint { x: 500.0, y: 600e12, label: format!("point number {i}") };
    chart.series.push(Series { name: "at once".into(), style: Style::Points, points: (0..9).map(label).collect() });
    chart.marks.push(Mark { name: "ridge point".into(), x: 295.0 });
    chart
}

fn bars() -> Bars {
    let bar = |name: &str, scale: f64| Bar {
        name: name.into(),
        parts: [("weights", 20e9), ("optimiser states", 30e9), ("logits", 0.4e9)]
            .map(|(n, v)| (n.to_owned(), v * scale))
            .to_vec(),
    };
    Bars {
        title: "Memory of the fullest GPU".into(),
        axis: Axis::linear("memory", Unit::Bytes),
        bars: vec![bar("tp1", 1.0), bar("a name that is longer than the room there is for the names of bars", 0.3)],
        limit: Some(("H100".into(), 52e9)),
    }
}

fn gantt() -> Gantt {
    let span = |row, kind, start: f64| GanttSpan {
        row,
        half: if row == 0 { SpanHalf::Whole } else { SpanHalf::Upper },
        start,
        end: start + 0.01,
        kind,
        label: kind.to_string(),
        tip: "a pass".into(),
    };
    Gantt {
        title: "Two devices".into(),
        rows: vec!["device 0".into(), "device 1".into()],
        kinds: vec!["forward".into(), "backward".into()],
        spans: vec![span(0, 0, 0.0), span(1, 0, 0.01), span(1, 1, 0.02), span(0, 1, 0.03)],
    }
}

/// Areas of all texts that are not turned.
fn texts(svg: &str) -> Vec<(String, canvas::Area)> {
    let document = roxmltree::Document::parse(svg).unwrap();
    let nodes = document.descendants().filter(|n| n.has_tag_name("text") && n.attribute("transform").is_none());
    let of = |n: roxmltree::Node<'_, '_>| {
        let number = |name| n.attribute(name).unwrap().parse::<f64>().unwrap();
        let anchor = match n.attribute("text-anchor") {
            Some("middle") => Anchor::Middle,
            Some("end") => Anchor::End,
            _ => Anchor::Start,
        };
        let text = n.text().unwrap_or_default().to_owned();
        (text.clone(), area(number("x"), number("y"), anchor, n.attribute("class").unwrap_or(""), &text))
    };
    nodes.map(of).collect()
}

#[test]
fn nothing_written_stands_on_something_else_or_outside() {
    let svg = draw(&[chart().into(), bars().into(), gantt().into()]);
    let texts = texts(&svg);
    assert!(texts.len() > 40, "{}", texts.len());
    let paper = canvas::Area { left: 0.0, top: 0.0, right: canvas::WIDTH, bottom: 5_000.0 };
    for (i, (text, at)) in texts.iter().enumerate() {
        assert!(paper.holds(at), "{text} is at {at:?}");
        for (other, there) in &texts[..i] {
            assert!(!at.meets(there), "{text:?} stands on {other:?}: {at:?}, {there:?}");
        }
    }
}

#[test]
fn a_figure_is_well_formed_and_the_same_every_time() {
    let panels = || [chart().into(), bars().into(), gantt().into()];
    let svg = draw(&panels());
    assert_eq!(svg, draw(&panels()));
    assert!(!svg.contains("NaN") && !svg.contains("inf\""), "{svg}");
    let document = roxmltree::Document::parse(&svg).unwrap();
    assert_eq!(document.root_element().tag_name().name(), "svg");
    assert!(document.descendants().any(|n| n.text() == Some("A roofline of <a> & \"b\"")));
    insta::assert_snapshot!(svg);
}

#[test]
fn empty_panels_are_drawn() {
    let axis = || Axis::log("", Unit::Seconds);
    let nothing = Chart::new("", axis(), axis());
    let bars = Bars { title: String::new(), axis: axis(), bars: Vec::new(), limit: None };
    let gantt = Gantt { title: String::new(), rows: Vec::new(), kinds: Vec::new(), spans: Vec::new() };
    roxmltree::Document::parse(&draw(&[nothing.into(), bars.into(), gantt.into()])).unwrap();
    roxmltree::Document::parse(&draw(&[])).unwrap();
}

#[test]
fn a_point_stands_where_its_axes_say() {
    let axis = || Axis::linear("", Unit::Number);
    let svg =
        draw(&[Chart::new("t", axis(), axis()).with(Series::new("", Style::Line, [(0.0, 0.0), (10.0, 8.0)])).into()]);
    let document = roxmltree::Document::parse(&svg).unwrap();
    let frame = document.descendants().find(|n| n.attribute("class") == Some("frame")).unwrap();
    let number = |name| frame.attribute(name).unwrap().parse::<f64>().unwrap();
    let line = document.descendants().find(|n| n.has_tag_name("polyline")).unwrap().attribute("points").unwrap();
    let places: Vec<f64> = line.split([' ', ',']).map(|v| v.parse().unwrap()).collect();
    // From the lower left corner of the area to its upper right one.
    let (right, bottom) = (number("x") + number("width"), number("y") + number("height"));
    for (found, expected) in places.iter().zip([number("x"), bottom, right, number("y")]) {
        assert!((found - expected).abs() < 0.11, "{places:?}, {frame:?}");
    }
}

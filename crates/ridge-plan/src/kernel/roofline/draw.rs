//! RooflineWork below the ceilings of a device, as a chart.

use ridge_hw::units::{BytesPerSecond, FlopsPerSecond};

use super::roof::{Roof, RooflineRow};
use crate::plot::{Axis, Chart, ChartPoint, Mark, Series, Style, Unit};
use crate::reading::Class;

impl Roof {
    /// `rows` below the ceilings of the sheet: memory and shared memory, every dense rate, arithmetic outside products.
    pub fn chart(&self, title: &str, rows: &[&RooflineRow]) -> Chart {
        let shown: Vec<&&RooflineRow> = rows.iter().filter(|r| r.flops.0 > 0.0).collect();
        let bandwidth = self.device.memory_bandwidth.value;
        let peak = self.device.dense_rates.values().map(|r| r.value.0).fold(0.0, f64::max);
        let intensities = || shown.iter().map(|r| r.intensity.0);
        let low = 10f64.powf(intensities().fold(1.0, f64::min).log10().floor());
        let high = 10f64.powf(intensities().fold(peak / bandwidth.0 * 2.0, f64::max).log10().ceil());
        let axes = (Axis::log("arithmetic intensity", Unit::FlopsPerByte), Axis::log("rate", Unit::FlopsPerSecond));
        let mut chart = Chart { height: 400.0, ..Chart::new(title, axes.0, axes.1) };
        let shared = self.shared_bandwidth().map(|rate| ("shared memory", BytesPerSecond(rate)));
        for (name, rate) in [("memory", bandwidth)].into_iter().chain(shared) {
            let line = [(low, low * rate.0), (peak / rate.0, peak)];
            chart.series.push(Series::new(format!("{name}, {rate}"), Style::Ceiling, line));
        }
        let mut rates: Vec<(String, FlopsPerSecond)> = Vec::new();
        for (precision, rate) in &self.device.dense_rates {
            match rates.iter_mut().find(|r| r.1 == rate.value) {
                Some((names, _)) => *names += &format!(", {precision}"),
                None => rates.push((precision.to_string(), rate.value)),
            }
        }
        rates.extend(self.device.vector_f32.as_ref().map(|rate| ("f32 vector".to_owned(), rate.value)));
        for (name, rate) in rates {
            let line = [(rate.0 / bandwidth.0, rate.0), (high, rate.0)];
            chart.series.push(Series::new(format!("{name}, {rate}"), Style::Ceiling, line));
        }
        let classes = [
            (Some(Class::Matmul), "products"),
            (Some(Class::Experts), "grouped products"),
            (Some(Class::Attention), "attention"),
            (Some(Class::Memory), "others"),
            (None, "sums"),
        ];
        // Colours begin with the classes, whatever the number of ceilings.
        let mut series: Vec<Series> = Vec::new();
        for (class, name) in classes {
            let of = shown.iter().copied().filter(|r| r.class == class);
            let point = |r: &&RooflineRow| ChartPoint {
                x: r.intensity.0,
                y: r.flops.0 / r.expected.0,
                label: if r.op.is_empty() || r.scope.ends_with(&r.op) || r.class == Some(Class::Matmul) {
                    r.scope.clone()
                } else {
                    format!("{} {}", r.scope, r.op)
                },
            };
            let points: Vec<ChartPoint> = of.map(point).collect();
            if !points.is_empty() {
                series.push(Series { name: format!("{name}, expected"), points, style: Style::Points });
            }
        }
        series.append(&mut chart.series);
        chart.series = series;
        chart.marks.push(Mark { name: format!("ridge point {}", self.ridge_point()), x: self.ridge_point().0 });
        chart
    }
}

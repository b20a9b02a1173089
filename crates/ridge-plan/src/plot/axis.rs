//! Axes: what they measure, from where to where, and their ticks.

use ridge_hw::units::{Bytes, BytesPerSecond, FlopsPerByte, FlopsPerSecond, Seconds};

/// What an axis counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// A number without a unit, or with one that the label names.
    Number,
    /// Bytes; a logarithmic axis has powers of 2.
    Bytes,
    /// Bytes per second.
    BytesPerSecond,
    /// FLOP/s.
    FlopsPerSecond,
    /// FLOPs per byte.
    FlopsPerByte,
    /// Seconds.
    Seconds,
}

impl Unit {
    /// The unit that people would write `value` in: what one is worth, and its name.
    fn of(self, value: f64) -> (f64, &'static str) {
        match self {
            Self::Number => (1.0, ""),
            Self::Bytes => Bytes(value as u64).unit(),
            Self::BytesPerSecond => BytesPerSecond(value).unit(),
            Self::FlopsPerSecond => FlopsPerSecond(value).unit(),
            Self::FlopsPerByte => FlopsPerByte(value).unit(),
            Self::Seconds => Seconds(value).unit(),
        }
    }

    /// `value` for people.
    pub fn show(self, value: f64) -> String {
        match self {
            Self::Number => {
                let (one, suffix) = match value.abs() {
                    v if v >= 1e12 => (1e12, "T"),
                    v if v >= 1e9 => (1e9, "G"),
                    v if v >= 1e6 => (1e6, "M"),
                    v if v >= 1e4 => (1e3, "k"),
                    _ => (1.0, ""),
                };
                format!("{}{suffix}", plain(value / one))
            }
            Self::Bytes => Bytes(value as u64).to_string(),
            Self::BytesPerSecond => BytesPerSecond(value).to_string(),
            Self::FlopsPerSecond => FlopsPerSecond(value).to_string(),
            Self::FlopsPerByte => FlopsPerByte(value).to_string(),
            Self::Seconds => Seconds(value).to_string(),
        }
    }
}

/// How values lie on an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// From 0 on, evenly.
    Linear,
    /// By their logarithms. Values that have none are left out.
    Log,
}

/// An axis.
#[derive(Clone, Debug)]
pub struct Axis {
    /// What it says. The unit is added.
    pub label: String,
    /// What it counts.
    pub unit: Unit,
    /// How values lie on it.
    pub scale: Scale,
}

impl Axis {
    /// A linear axis.
    pub fn linear(label: impl Into<String>, unit: Unit) -> Self {
        Self { label: label.into(), unit, scale: Scale::Linear }
    }

    /// A logarithmic axis.
    pub fn log(label: impl Into<String>, unit: Unit) -> Self {
        Self { label: label.into(), unit, scale: Scale::Log }
    }

    /// Has `value` a place on it?
    pub(super) fn takes(&self, value: f64) -> bool {
        value.is_finite() && (self.scale == Scale::Linear || value > 0.0)
    }

    /// The axis for `values`, with at most `most` labels.
    pub(super) fn place(&self, values: impl Iterator<Item = f64>, most: usize) -> Placed {
        let range = values.filter(|v| self.takes(*v)).fold(None, |range: Option<(f64, f64)>, v| {
            Some(range.map_or((v, v), |(low, high)| (low.min(v), high.max(v))))
        });
        let most = most.max(2);
        match (self.scale, range) {
            (Scale::Linear, range) => self.linear_ticks(range.unwrap_or((0.0, 1.0)), most),
            (Scale::Log, range) => self.log_ticks(range.unwrap_or((1.0, 10.0)), most),
        }
    }

    fn linear_ticks(&self, (low, high): (f64, f64), most: usize) -> Placed {
        let (low, mut high) = (low.min(0.0), high.max(0.0));
        if high - low <= 0.0 {
            high = 1.0;
        }
        let (one, suffix) = self.unit.of(high.max(-low));
        let step = round_step((high - low) / one, most - 1);
        let (first, last) = ((low / one / step + 1e-9).floor(), (high / one / step - 1e-9).ceil());
        let count = (last - first) as usize;
        let ticks = (0..=count).map(|i| (first + i as f64) * step);
        let label = match (self.label.is_empty(), suffix.is_empty()) {
            (_, true) => self.label.clone(),
            (true, false) => suffix.to_owned(),
            (false, false) => format!("{}, {suffix}", self.label),
        };
        Placed {
            low: first * step * one,
            high: last * step * one,
            log: false,
            ticks: ticks
                .map(|t| (t * one, if self.unit == Unit::Number { self.unit.show(t) } else { plain(t) }))
                .collect(),
            minor: Vec::new(),
            label,
        }
    }

    fn log_ticks(&self, (low, high): (f64, f64), most: usize) -> Placed {
        let base: f64 = if self.unit == Unit::Bytes { 2.0 } else { 10.0 };
        let power = |v: f64| v.ln() / base.ln();
        let (mut first, mut last) = ((power(low) + 1e-9).floor() as i32, (power(high) - 1e-9).ceil() as i32);
        if last <= first {
            (first, last) = (first - i32::from(last < first), first + 1);
        }
        let label = self.label.clone();
        // Within two decades each has three labels, and the axis ends at one of them.
        if base > 2.0 && last - first <= 2 {
            let all: Vec<f64> = (first..=last).flat_map(|p| [1.0, 2.0, 5.0].map(|f| f * 10f64.powi(p))).collect();
            let from = all.iter().rposition(|t| *t <= low * (1.0 + 1e-9)).unwrap_or(0);
            let to = all.iter().position(|t| *t >= high * (1.0 - 1e-9)).unwrap_or(all.len() - 1).max(from + 1);
            let ticks = all[from..=to].iter().map(|t| (*t, self.unit.show(*t))).collect();
            return Placed { low: all[from], high: all[to], log: true, ticks, minor: Vec::new(), label };
        }
        let step = [1, 2, 5, 10, 20, 50].into_iter().find(|s| (last - first) / s < most as i32).unwrap_or(100);
        let ticks = (first..=last).filter(|p| p.rem_euclid(step) == 0).map(|p| base.powi(p));
        let ticks = ticks.map(|t| (t, self.unit.show(t))).collect();
        let minor = if base > 2.0 && last - first <= 7 {
            (first..last).flat_map(|p| (2..10).map(move |f| f64::from(f) * 10f64.powi(p))).collect()
        } else {
            Vec::new()
        };
        Placed { low: base.powi(first), high: base.powi(last), log: true, ticks, minor, label }
    }
}

/// An axis with its range and ticks.
#[derive(Debug)]
pub(super) struct Placed {
    low: f64,
    high: f64,
    log: bool,
    pub(super) ticks: Vec<(f64, String)>,
    pub(super) minor: Vec<f64>,
    pub(super) label: String,
}

impl Placed {
    /// Where `value` lies, 0 at the beginning of the axis and 1 at its end.
    pub(super) fn at(&self, value: f64) -> Option<f64> {
        let share = if self.log {
            (value / self.low).ln() / (self.high / self.low).ln()
        } else {
            (value - self.low) / (self.high - self.low)
        };
        share.is_finite().then_some(share)
    }
}

/// A step of 1, 2, 2.5 or 5 times a power of ten, of which `most` at most reach over `range`.
fn round_step(range: f64, most: usize) -> f64 {
    let power = 10f64.powf((range / most as f64).log10().floor());
    let steps = [1.0, 2.0, 2.5, 5.0, 10.0, 20.0];
    steps.into_iter().map(|s| s * power).find(|s| range / s <= most as f64 + 1e-9).unwrap_or(20.0 * power)
}

/// A number without needless digits.
fn plain(value: f64) -> String {
    if value != 0.0 && value.abs() < 1e-3 {
        return format!("{value:e}");
    }
    let decimals = if value.abs() >= 100.0 { 1 } else { 4 };
    let text = format!("{value:.decimals$}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "-0" { "0".to_owned() } else { text.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(axis: &Axis, low: f64, high: f64, most: usize) -> (Vec<String>, String) {
        let placed = axis.place([low, high].into_iter(), most);
        (placed.ticks.into_iter().map(|t| t.1).collect(), placed.label)
    }

    #[test]
    fn linear_ticks_are_round_in_the_unit_of_the_largest() {
        let (ticks, label) = labels(&Axis::linear("time", Unit::Seconds), 0.0, 7.3e-3, 6);
        assert_eq!((ticks.join(" ").as_str(), label.as_str()), ("0 2 4 6 8", "time, ms"));
        let (ticks, label) = labels(&Axis::linear("memory", Unit::Bytes), 0.0, 60.0 * 1_073_741_824.0, 7);
        assert_eq!((ticks.join(" ").as_str(), label.as_str()), ("0 10 20 30 40 50 60", "memory, GiB"));
        let (ticks, _) = labels(&Axis::linear("share", Unit::Number), 0.0, 1.0, 6);
        assert_eq!(ticks.join(" "), "0 0.2 0.4 0.6 0.8 1");
        assert_eq!(labels(&Axis::linear("", Unit::Number), 0.0, 0.0, 3).0.join(" "), "0 0.5 1");
    }

    #[test]
    fn logarithmic_ticks_are_decades_powers_of_two_for_bytes_and_finer_where_there_are_few() {
        let (ticks, _) = labels(&Axis::log("time", Unit::Seconds), 3e-6, 0.4, 9);
        assert_eq!(ticks.join(" "), "1 µs 10 µs 100 µs 1 ms 10 ms 100 ms 1 s");
        let (ticks, _) = labels(&Axis::log("size", Unit::Bytes), 1024.0, 16.0 * 1_073_741_824.0, 7);
        assert_eq!(ticks.join(" "), "1 KiB 32 KiB 1 MiB 32 MiB 1 GiB");
        let (ticks, _) = labels(&Axis::log("rate", Unit::Number), 30.0, 400.0, 9);
        assert_eq!(ticks.join(" "), "20 50 100 200 500");
    }

    #[test]
    fn what_has_no_place_has_none() {
        let placed = Axis::log("", Unit::Number).place([1.0, f64::NAN, -4.0, 1e6].into_iter(), 5);
        assert!(placed.at(0.0).is_none() && placed.at(-1.0).is_none());
        assert!((placed.at(1e3).unwrap() - 0.5).abs() < 1e-12);
    }
}

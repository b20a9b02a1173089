//! Distributions in a few numbers.

use serde_json::{Value, json};

/// What many measurements come to, in their unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleSummary {
    /// How many there are, at least 1.
    pub count: usize,
    /// Their mean.
    pub mean: f64,
    /// The smallest.
    pub min: f64,
    /// Half are at most this.
    pub p50: f64,
    /// 90% are at most this.
    pub p90: f64,
    /// 95% are at most this.
    pub p95: f64,
    /// 99% are at most this.
    pub p99: f64,
    /// The largest.
    pub max: f64,
}

impl SampleSummary {
    /// `None` for no values.
    pub fn of(mut values: Vec<f64>) -> Option<Self> {
        values.sort_by(f64::total_cmp);
        let max = *values.last()?;
        let at = |q| quantile(&values, q);
        Some(Self {
            count: values.len(),
            mean: values.iter().sum::<f64>() / values.len() as f64,
            min: values[0],
            p50: at(0.5),
            p90: at(0.9),
            p95: at(0.95),
            p99: at(0.99),
            max,
        })
    }

    /// As JSON, the values as they are.
    pub fn object(&self) -> Value {
        let Self { count, mean, min, p50, p90, p95, p99, max } = self;
        json!({ "count": count, "mean": mean, "min": min, "p50": p50, "p90": p90, "p95": p95, "p99": p99, "max": max })
    }
}

/// The quantile `q` of sorted values, at least one, between two of them by linear interpolation (Hyndman and Fan 1996,
/// definition 7).
pub(super) fn quantile(sorted: &[f64], q: f64) -> f64 {
    let at = q * (sorted.len() - 1) as f64;
    let (low, share) = (at.floor() as usize, at.fract());
    let high = (low + 1).min(sorted.len() - 1);
    sorted[low] + share * (sorted[high] - sorted[low])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ramp_has_the_quantiles_of_its_closed_form() {
        // Of 0, 1, .., n the quantile q is qn.
        for n in [1usize, 2, 10, 99, 1000] {
            let values: Vec<f64> = (0..=n).rev().map(|i| i as f64).collect();
            let s = SampleSummary::of(values).unwrap();
            for (q, is) in [(0.5, s.p50), (0.9, s.p90), (0.95, s.p95), (0.99, s.p99), (1.0, s.max), (0.5, s.mean)] {
                assert!((is - q * n as f64).abs() < 1e-9, "{n} {q}: {is}");
            }
            assert_eq!(s.count, n + 1);
        }
    }

    #[test]
    fn exponential_values_have_the_quantiles_of_their_closed_form() {
        let n = 100_000;
        let values = (0..n).map(|i| -(1.0 - (f64::from(i) + 0.5) / f64::from(n)).ln()).collect();
        let s = SampleSummary::of(values).unwrap();
        for (q, is) in [(0.5f64, s.p50), (0.9, s.p90), (0.95, s.p95), (0.99, s.p99)] {
            assert!((is + (1.0 - q).ln()).abs() < 1e-3, "{q}: {is}");
        }
        assert!((s.mean - 1.0).abs() < 1e-3);
    }

    #[test]
    fn none_and_one_are_what_they_are() {
        assert_eq!(SampleSummary::of(Vec::new()), None);
        let one = SampleSummary::of(vec![3.0]).unwrap();
        assert_eq!((one.mean, one.p50, one.p99, one.max, one.count), (3.0, 3.0, 3.0, 3.0, 1));
    }
}

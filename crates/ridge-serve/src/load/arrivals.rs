//! When requests come in an open loop.

use ridge_graph::sample::Rng;

/// Seconds from the start at which requests come, without end: the gaps between them are independent and of a gamma
/// distribution with mean `1 / rate` and coefficient of variation `cv`. 1 is a Poisson process, more comes in bursts, 0
/// at even distances.
#[derive(Clone, Debug)]
pub struct Arrivals {
    rng: Rng,
    rate: f64,
    cv: f64,
    at: f64,
}

impl Arrivals {
    /// `rate` in requests a second, above 0. The same seed gives the same times, stretched by the rate.
    pub fn new(rate: f64, cv: f64, seed: u64) -> Self {
        Self { rng: Rng::new(seed ^ 0x6172_7269_7661_6c73), rate, cv, at: 0.0 }
    }

    /// A gap of mean 1.
    fn gap(&mut self) -> f64 {
        if self.cv == 0.0 {
            return 1.0;
        }
        let shape = 1.0 / (self.cv * self.cv);
        gamma(&mut self.rng, shape) / shape
    }
}

impl Iterator for Arrivals {
    type Item = f64;

    fn next(&mut self) -> Option<f64> {
        self.at += self.gap() / self.rate;
        Some(self.at)
    }
}

/// A number of the gamma distribution with this shape and scale 1 (Marsaglia and Tsang 2000).
fn gamma(rng: &mut Rng, shape: f64) -> f64 {
    if shape == 1.0 {
        return -(1.0 - rng.unit()).ln();
    }
    if shape < 1.0 {
        // Section 6 of the paper: from the shape that is one larger.
        let power = (1.0 - rng.unit()).powf(1.0 / shape);
        return gamma(rng, shape + 1.0) * power;
    }
    let d = shape - 1.0 / 3.0;
    let c = 1.0 / (9.0 * d).sqrt();
    loop {
        let x = rng.gauss();
        let v = (1.0 + c * x).powi(3);
        if v > 0.0 && (1.0 - rng.unit()).ln() < 0.5 * x * x + d - d * v + d * v.ln() {
            return d * v;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_have_the_mean_and_the_variation_that_were_asked_for() {
        let n = 40_000;
        for (rate, cv) in [(1.0, 1.0), (20.0, 0.5), (5.0, 2.0), (0.25, 3.0), (8.0, 0.0)] {
            let times: Vec<f64> = Arrivals::new(rate, cv, 7).take(n).collect();
            let gaps: Vec<f64> = std::iter::once(times[0]).chain(times.windows(2).map(|w| w[1] - w[0])).collect();
            assert!(gaps.iter().all(|g| *g >= 0.0 && g.is_finite()));
            let mean = gaps.iter().sum::<f64>() / n as f64;
            let variance = gaps.iter().map(|g| (g - mean).powi(2)).sum::<f64>() / n as f64;
            assert!((mean * rate - 1.0).abs() < 5.0 * cv / (n as f64).sqrt() + 1e-9, "{rate} {cv}: {mean}");
            assert!((variance.sqrt() / mean - cv).abs() < 0.05 * cv + 1e-9, "{rate} {cv}: {variance}");
        }
    }

    #[test]
    fn poisson_gaps_are_exponential() {
        let times: Vec<f64> = Arrivals::new(2.0, 1.0, 3).take(20_000).collect();
        for t in [0.1, 0.5, 1.0, 2.0] {
            let longer = times.windows(2).filter(|w| w[1] - w[0] > t).count() as f64 / 19_999.0;
            assert!((longer - (-2.0 * t).exp()).abs() < 0.015, "{t}: {longer}");
        }
    }

    #[test]
    fn a_seed_gives_the_same_times_stretched_by_the_rate() {
        let of = |rate, seed| Arrivals::new(rate, 2.0, seed).take(50).collect::<Vec<f64>>();
        assert_eq!(of(1.0, 1), of(1.0, 1));
        assert_ne!(of(1.0, 1), of(1.0, 2));
        for (one, four) in of(1.0, 1).iter().zip(of(4.0, 1)) {
            assert!((one / 4.0 - four).abs() < 1e-9);
        }
    }
}

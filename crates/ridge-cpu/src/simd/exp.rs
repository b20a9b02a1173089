//! The exponential in f32, and what is made of it.

use super::{LANES, fma, sum_lanes, vectorised};

/// `e^x` within 1.1 units in the last place where multiplication and addition fuse, 1.5 elsewhere; 0 for minus
/// infinity, and NaN for NaN.
///
/// `x = n ln 2 + r` with `|r| <= ln 2 / 2` (reduction in two steps after Cody and Waite 1980, "Software Manual for the
/// Elementary Functions", chapter 6), `e^r` by its Taylor series to `r^7`, whose remainder is below 6e-9, and `2^n` in
/// two factors, so that results may be subnormal or overflow.
#[inline(always)]
pub(crate) fn exp<const FMA: bool>(x: f32) -> f32 {
    // Beyond these the result is 0 or infinite. As comparisons, which leave NaN as it is.
    let x = if x < -104.0 { -104.0 } else { x };
    let x = if x > 89.0 { 89.0 } else { x };
    // Adding 1.5 * 2^23 rounds to an integer, which is then in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 with few enough bits that n times it is exact, and what is missing.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let shifted = fma::<FMA>(x, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = fma::<FMA>(n, -LN2_HIGH, x);
    let r = fma::<FMA>(n, -LN2_LOW, r);
    let mut p = 1.0 / 5040.0;
    for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = fma::<FMA>(p, r, c);
    }
    let n = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let power = |n: i32| f32::from_bits((n.wrapping_add(127) as u32) << 23);
    let half = n >> 1;
    p * power(half) * power(n.wrapping_sub(half))
}

vectorised! {
    /// `x = e^(x - shift)`; gives the sum.
    pub(crate) fn exp_sum(x: &mut [f32], shift: f32) -> f32 {
        let mut sums = [0f32; LANES];
        let (chunks, rest) = x.as_chunks_mut::<LANES>();
        for chunk in chunks {
            for i in 0..LANES {
                chunk[i] = exp::<FMA>(chunk[i] - shift);
                sums[i] += chunk[i];
            }
        }
        for (i, x) in rest.iter_mut().enumerate() {
            *x = exp::<FMA>(*x - shift);
            sums[i] += *x;
        }
        sum_lanes(sums)
    }
}

vectorised! {
    /// The sum of `e^(x - shift)`.
    pub(crate) fn sum_exp(x: &[f32], shift: f32) -> f32 {
        let mut sums = [0f32; LANES];
        let (chunks, rest) = x.as_chunks::<LANES>();
        for chunk in chunks {
            for i in 0..LANES {
                sums[i] += exp::<FMA>(chunk[i] - shift);
            }
        }
        for (i, x) in rest.iter().enumerate() {
            sums[i] += exp::<FMA>(*x - shift);
        }
        sum_lanes(sums)
    }
}

vectorised! {
    /// `out = e^(x - shift) * factor`.
    pub(crate) fn exp_scaled(x: &[f32], shift: f32, factor: f32, out: &mut [f32]) {
        for (o, x) in out.iter_mut().zip(x) {
            *o = exp::<FMA>(*x - shift) * factor;
        }
    }
}

vectorised! {
    /// `gate = gate * sigmoid(gate) * up`.
    pub(crate) fn swiglu(gate: &mut [f32], up: &[f32]) {
        for (g, u) in gate.iter_mut().zip(up) {
            *g = *g / (1.0 + exp::<FMA>(-*g)) * u;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worst<const FMA: bool>() -> f64 {
        // Every 1,000th float between -104 and 89, and both ends.
        let mut worst = 0f64;
        for (from, to) in [(0f32, 89f32), (-0.0, -104.0)] {
            for bits in (from.to_bits()..=to.to_bits()).step_by(997) {
                let x = f32::from_bits(bits);
                let exact = f64::from(x).exp();
                if exact > f64::from(f32::MAX) {
                    continue;
                }
                let ulp = f64::from(f32::MIN_POSITIVE).max(2f64.powi(exact.log2().floor() as i32)) * 2f64.powi(-23);
                worst = worst.max((f64::from(exp::<FMA>(x)) - exact).abs() / ulp);
            }
        }
        worst
    }

    #[test]
    fn exp_is_as_accurate_as_it_says() {
        let (fused, plain) = (worst::<true>(), worst::<false>());
        assert!(fused < 1.1, "{fused}");
        assert!(plain < 1.5, "{plain}");
    }

    #[test]
    fn exp_has_its_limits() {
        for exp in [exp::<true>, exp::<false>] {
            assert_eq!(exp(0.0), 1.0);
            assert_eq!(exp(f32::NEG_INFINITY), 0.0);
            assert_eq!(exp(-200.0), 0.0);
            assert_eq!(exp(f32::INFINITY), f32::INFINITY);
            assert_eq!(exp(88.8), f32::INFINITY);
            assert!(exp(88.7).is_finite());
            assert!(exp(f32::NAN).is_nan());
        }
    }

    #[test]
    fn sums_are_of_the_values_given() {
        let mut x: Vec<f32> = (0..37).map(|i| i as f32 * 0.1).collect();
        let sum = exp_sum(&mut x, 3.0);
        let exact: f64 = (0..37).map(|i| (f64::from(i as f32 * 0.1) - 3.0).exp()).sum();
        assert!((f64::from(sum) - exact).abs() < 1e-5 * exact);
        assert!((f64::from(x[30]) - 1.0).abs() < 1e-6);
    }
}

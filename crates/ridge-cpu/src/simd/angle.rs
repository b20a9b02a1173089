//! Sine and cosine of rotary angles.

use super::vectorised;

/// Parts of pi / 2, of 33 bits each but for the last (the reduction of Cody and Waite 1980).
const HALF_PI: [f64; 3] = [1.570_796_326_734_125_6, 6.077_100_506_303_966e-11, 2.022_266_248_795_950_6e-21];

/// Sine over `-pi / 4` to `pi / 4` is `x + x^3 P(x^2)`, cosine `1 - x^2 / 2 + x^4 P(x^2)`: Taylor's coefficients from the
/// highest on, whose remainders are below 1e-12, far below the rounding to f32.
const SINE: [f64; 6] =
    [1.0 / 6_227_020_800.0, -1.0 / 39_916_800.0, 1.0 / 362_880.0, -1.0 / 5040.0, 1.0 / 120.0, -1.0 / 6.0];
const COSINE: [f64; 5] = [1.0 / 479_001_600.0, -1.0 / 3_628_800.0, 1.0 / 40320.0, -1.0 / 720.0, 1.0 / 24.0];

/// `a * b + c`, in one rounding where the machine does that.
#[inline(always)]
fn fma<const FMA: bool>(a: f64, b: f64, c: f64) -> f64 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// Sine and cosine of an angle of up to 2^31 turns: as exact as the angle itself, whose last bit counts for large ones.
#[inline(always)]
fn sin_cos<const FMA: bool>(x: f64) -> (f64, f64) {
    // Adding 1.5 * 2^52 rounds to an integer, which is then in the low bits.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    let shifted = fma::<FMA>(x, std::f64::consts::FRAC_2_PI, ROUND);
    let (n, quarter) = (shifted - ROUND, shifted.to_bits());
    let r = HALF_PI.iter().fold(x, |r, part| fma::<FMA>(-n, *part, r));
    let z = r * r;
    let sum = |of: &[f64]| of[1..].iter().fold(of[0], |p, c| fma::<FMA>(p, z, *c));
    let sin = fma::<FMA>(r * z, sum(&SINE), r);
    let cos = fma::<FMA>(z, fma::<FMA>(z, sum(&COSINE), -0.5), 1.0);
    let (sin, cos) = if quarter & 1 == 0 { (sin, cos) } else { (cos, sin) };
    // Bit 1 of the quarter is the sign of the sine, that of the next quarter the sign of the cosine.
    let signed = |y: f64, quarter: u64| f64::from_bits(y.to_bits() ^ (quarter & 2) << 62);
    (signed(sin, quarter), signed(cos, quarter.wrapping_add(1)))
}

vectorised! {
    /// Cosine and sine of `position` times each frequency, times `scale`.
    pub(crate) fn angles(position: f64, frequencies: &[f64], scale: f64, cos: &mut [f32], sin: &mut [f32]) {
        for ((frequency, cos), sin) in frequencies.iter().zip(cos).zip(sin) {
            let (s, c) = sin_cos::<FMA>(position * frequency);
            (*cos, *sin) = ((c * scale) as f32, (s * scale) as f32);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::sin_cos;

    fn worst<const FMA: bool>() -> f64 {
        let positions = (0..4000).chain((0..31).flat_map(|bit| [(1 << bit) - 1, 1 << bit, (1 << bit) / 3 * 2]));
        let angles = positions.flat_map(|p| [1.0, 0.7, 0.1, 1e-3, 1e-6].map(|frequency| f64::from(p) * frequency));
        let error = |x: f64| {
            let ((s, c), (sin, cos)) = (sin_cos::<FMA>(x), x.sin_cos());
            // What is lost without fused operations is less than the angle's own rounding.
            (s - sin).abs().max((c - cos).abs()) - x.abs() * f64::EPSILON
        };
        angles.flat_map(|x| [x, -x]).map(error).fold(0.0, f64::max)
    }

    #[test]
    fn sines_are_exact_far_beyond_single_precision() {
        let (fused, plain) = (worst::<true>(), worst::<false>());
        assert!(fused < 1e-11 && plain < 1e-11, "{fused} {plain}");
    }
}

//! Scales that leave little weighted squared error: candidates around the range of the values, and for the codes of
//! each candidate the scale (and offset) of least squares.

/// The value of largest magnitude, the first of equals.
pub(super) fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0f32, |most, v| if v.abs() > most.abs() { *v } else { most })
}

/// `1 / scale`, and 0 for a scale that stands for nothing.
pub(super) fn inverse(scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}

/// The scale of codes `0..=most` between the least and the greatest value, and the least value.
pub(super) fn range(values: &[f32], most: u8) -> (f32, f32) {
    let (low, high) =
        values.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(low, high), v| (low.min(*v), high.max(*v)));
    ((high - low) / f32::from(most), low)
}

/// How much each error counts where importances are known: large values and important ones count more.
pub(super) fn beside(values: &[f32], importance: &[f32]) -> Vec<f32> {
    let mean = mean_square(values);
    values.iter().zip(importance).map(|(v, w)| w * (mean + v * v).sqrt()).collect()
}

/// How much each error counts where nothing is known: the values' squares.
pub(super) fn squares(values: &[f32]) -> Vec<f32> {
    values.iter().map(|v| v * v).collect()
}

/// How much each error counts where nothing is known and codes have an offset: magnitudes, and no value nothing.
pub(super) fn magnitudes(values: &[f32]) -> Vec<f32> {
    let typical = mean_square(values).sqrt();
    values.iter().map(|v| typical + v.abs()).collect()
}

/// The mean of the squares.
pub(super) fn mean_square(values: &[f32]) -> f32 {
    values.iter().map(|v| v * v).sum::<f32>() / values.len() as f32
}

/// The one of `others` whose error is less than that of `first` and all others, or `first`.
pub(super) fn least<T>(first: T, others: impl Iterator<Item = T>, error: impl Fn(&T) -> f32) -> T {
    let (mut best, mut least) = (error(&first), first);
    for other in others {
        let now = error(&other);
        if now < best {
            (best, least) = (now, other);
        }
    }
    least
}

/// A code from `-below` to `above`.
pub(super) fn code(scaled: f32, below: i32, above: i32) -> i32 {
    (scaled.round_ties_even() as i32).clamp(-below, above)
}

/// The scale that leaves least error when values are codes from `-below` to `above` times it.
pub(super) fn symmetric(values: &[f32], weights: &[f32], below: i32, above: i32) -> f32 {
    by_candidates(values, weights, below as f32, |scaled| code(scaled, below, above) as f32)
}

/// The best scale among candidates that bring the largest value to about `-reach`; `near` gives the code's value that is
/// nearest to a scaled one. The scale for given codes is that of least squares.
pub(super) fn by_candidates(values: &[f32], weights: &[f32], reach: f32, near: impl Fn(f32) -> f32) -> f32 {
    let largest = largest(values);
    // Values whose inverse is no number are as good as none.
    if largest.abs() < 1e-30 || !largest.is_finite() {
        return 0.0;
    }
    let (mut best, mut gain) = (-largest / reach, f32::NEG_INFINITY);
    for step in -9i8..=9 {
        let inverse = -(reach + 0.1 * f32::from(step)) / largest;
        let (mut with_values, mut with_codes) = (0f32, 0f32);
        for (v, w) in values.iter().zip(weights) {
            let q = near(v * inverse);
            with_values += w * v * q;
            with_codes += w * q * q;
        }
        // The error that a scale takes away, at its best.
        if with_codes > 0.0 && with_values * with_values > gain * with_codes {
            gain = with_values * with_values / with_codes;
            best = with_values / with_codes;
        }
    }
    best
}

/// The scale and offset that leave least error when values are codes `0..=most` times the scale plus the offset, which
/// is at most 0 if `negative`.
pub(super) fn affine(values: &[f32], weights: &[f32], most: u8, negative: bool) -> (f32, f32) {
    let (mut low, mut high) =
        values.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(low, high), v| (low.min(*v), high.max(*v)));
    if negative {
        (low, high) = (low.min(0.0), high.max(low.min(0.0)));
    }
    let span = high - low;
    if span.is_nan() || span < 1e-30 || !span.is_finite() {
        return (0.0, if low.is_finite() { low } else { 0.0 });
    }
    let top = f32::from(most);
    let error = |scale: f32, offset: f32| -> f32 {
        let inverse = inverse(scale);
        let each = |(v, w): (&f32, &f32)| {
            let q = ((v - offset) * inverse).round_ties_even().clamp(0.0, top);
            w * (scale * q + offset - v).powi(2)
        };
        values.iter().zip(weights).map(each).sum()
    };
    let mut best = (span / top, low);
    let mut least = error(best.0, best.1);
    for step in 0..=20u8 {
        let inverse = (top - 1.0 + 0.1 * f32::from(step)) / span;
        let [mut sum_w, mut sum_q, mut sum_qq, mut sum_v, mut sum_vq] = [0f32; 5];
        for (v, w) in values.iter().zip(weights) {
            let q = ((v - low) * inverse).round_ties_even().clamp(0.0, top);
            sum_w += w;
            sum_q += w * q;
            sum_qq += w * q * q;
            sum_v += w * v;
            sum_vq += w * v * q;
        }
        let determinant = sum_w * sum_qq - sum_q * sum_q;
        if determinant <= 0.0 {
            continue;
        }
        let mut scale = (sum_w * sum_vq - sum_v * sum_q) / determinant;
        let mut offset = (sum_qq * sum_v - sum_q * sum_vq) / determinant;
        if negative && offset > 0.0 {
            (scale, offset) = (sum_vq / sum_qq, 0.0);
        }
        let now = error(scale, offset);
        if scale > 0.0 && now < least {
            (best, least) = ((scale, offset), now);
        }
    }
    best
}

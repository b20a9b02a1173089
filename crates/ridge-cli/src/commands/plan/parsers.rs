//! Parsers of values for several plans.

use ridge_plan::PlanError;
use ridge_plan::ledger::Quantisation;

/// A format of weights.
pub(crate) fn quantisation(typed: &str) -> Result<Quantisation, String> {
    Quantisation::find(typed).map_err(|e| match e {
        PlanError::Setting { problem, remedy, .. } => format!("{problem}; {remedy}"),
        other => other.to_string(),
    })
}

/// A number above 0 and at most `MAX`, such as `2.5` or `15e12`, with an optional suffix K, M, B or T for 1e3 to 1e12.
pub(crate) fn amount<const MAX: u64>(typed: &str) -> Result<f64, String> {
    let (digits, unit) = match typed.char_indices().last() {
        Some((at, 'K' | 'k')) => (&typed[..at], 1e3),
        Some((at, 'M')) => (&typed[..at], 1e6),
        Some((at, 'B' | 'G')) => (&typed[..at], 1e9),
        Some((at, 'T')) => (&typed[..at], 1e12),
        _ => (typed, 1.0),
    };
    let value = digits.parse::<f64>().ok().map(|v| v * unit).filter(|v| *v > 0.0 && *v <= MAX as f64);
    value.ok_or_else(|| {
        format!("must be a number above 0 and at most {:e}, such as 2.5, 12e3 or 15T (K, M, B, T)", MAX as f64)
    })
}

/// One of `all` by its name.
pub(crate) fn named<T: Copy>(typed: &str, all: &[T], name: fn(T) -> &'static str) -> Result<T, String> {
    let found = all.iter().copied().find(|one| name(*one).eq_ignore_ascii_case(typed));
    let names = || all.iter().map(|one| name(*one)).collect::<Vec<_>>().join(", ");
    found.ok_or_else(|| format!("must be one of {}", names()))
}

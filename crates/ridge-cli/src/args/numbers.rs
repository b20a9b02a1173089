//! Parsers of numbers.

/// Maximum of counts and seeds: that of the type.
pub(crate) const MAX_COUNT: u64 = u64::MAX;
/// Maximum number of threads.
pub(crate) const MAX_THREADS: u64 = 1024;

/// A hint for an abbreviation such as `128k`: the numbers that it may mean.
fn written_out(typed: &str) -> String {
    let thousands = typed.strip_suffix(['k', 'K']).and_then(|n| n.parse::<u32>().ok());
    thousands.map_or(String::new(), |n| {
        let n = u64::from(n);
        format!("; write {typed} out: {} or {}", n * 1000, n * 1024)
    })
}

/// Parses a whole number from `MIN` to `MAX`.
pub(crate) fn whole<T: TryFrom<u64>, const MIN: u64, const MAX: u64>(typed: &str) -> Result<T, String> {
    let value = typed.parse().ok().filter(|value| (MIN..=MAX).contains(value));
    value
        .and_then(|value: u64| T::try_from(value).ok())
        .ok_or_else(|| format!("must be a whole number from {MIN} to {MAX}{}", written_out(typed)))
}

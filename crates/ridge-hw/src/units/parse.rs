//! Quantities that people type: a number and its unit, which is never guessed. `GB` is 10^9 bytes, `GiB` 2^30, `Gb` bits.

use std::str::FromStr;

use super::quantity::{Bytes, BytesPerSecond, Seconds};

/// Why a text is no quantity: what was typed and what would be one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{problem}; {remedy}")]
pub struct UnitError {
    problem: String,
    remedy: String,
}

fn error(problem: impl Into<String>, remedy: impl Into<String>) -> UnitError {
    UnitError { problem: problem.into(), remedy: remedy.into() }
}

/// Units by name, with what one is worth.
type Units = &'static [(&'static str, f64)];

const BYTES: Units = &[
    ("B", 1.0),
    ("kB", 1e3),
    ("MB", 1e6),
    ("GB", 1e9),
    ("TB", 1e12),
    ("KiB", 1024.0),
    ("MiB", 1_048_576.0),
    ("GiB", 1_073_741_824.0),
    ("TiB", 1_099_511_627_776.0),
];

const RATES: Units = &[
    ("B/s", 1.0),
    ("kB/s", 1e3),
    ("MB/s", 1e6),
    ("GB/s", 1e9),
    ("TB/s", 1e12),
    ("MiB/s", 1_048_576.0),
    ("GiB/s", 1_073_741_824.0),
    ("b/s", 0.125),
    ("Mb/s", 0.125e6),
    ("Gb/s", 0.125e9),
    ("Tb/s", 0.125e12),
];

const TIMES: Units =
    &[("ns", 1e-9), ("us", 1e-6), ("µs", 1e-6), ("ms", 1e-3), ("s", 1.0), ("min", 60.0), ("h", 3600.0)];

/// The number that `typed` begins with, in the unit that it ends with.
fn quantity(typed: &str, units: Units, example: &str) -> Result<f64, UnitError> {
    let typed = typed.trim();
    // The longest part that is a number: an `e` belongs to it where an exponent follows.
    let at = (1..=typed.len()).rev().find(|&i| typed.is_char_boundary(i) && typed[..i].trim().parse::<f64>().is_ok());
    let Some(at) = at else { return Err(error("is not a number with a unit", format!("write it as in {example}"))) };
    let (number, unit) = (typed[..at].trim().parse::<f64>().unwrap_or(f64::NAN), typed[at..].trim());
    if !(number.is_finite() && number >= 0.0) {
        return Err(error("is not a valid amount", format!("give a number of 0 or more, as in {example}")));
    }
    if let Some((_, one)) = units.iter().find(|(name, _)| *name == unit) {
        return Ok(number * one);
    }
    let names: Vec<&str> = units.iter().map(|(name, _)| *name).collect();
    let remedy = match names.iter().find(|name| name.eq_ignore_ascii_case(unit)) {
        _ if unit.is_empty() => format!("add its unit, as in {example}"),
        _ if names.contains(&format!("{unit}/s").as_str()) => format!("did you mean {unit}/s?"),
        _ if unit.ends_with('b') && units == BYTES && !unit.starts_with(['m', 'g', 't']) => {
            format!("b means bits; convert {unit:?} to bytes (divide by 8) and write B")
        }
        _ if unit.ends_with("bps") => format!("write {}b/s for bits, {0}B/s for bytes", unit.trim_end_matches("bps")),
        Some(near) => {
            format!("did you mean {near}? b means bits, B means bytes; prefixes are k, M, G, T or Ki, Mi, Gi, Ti")
        }
        None => format!("units are {}", names.join(", ")),
    };
    let problem = if unit.is_empty() { "has no unit".to_owned() } else { format!("has the unknown unit {unit:?}") };
    Err(error(problem, remedy))
}

impl FromStr for Bytes {
    type Err = UnitError;
    fn from_str(typed: &str) -> Result<Self, UnitError> {
        quantity(typed, BYTES, "64MiB or 1.5GB").map(Self::from_f64)
    }
}

impl FromStr for BytesPerSecond {
    type Err = UnitError;
    fn from_str(typed: &str) -> Result<Self, UnitError> {
        quantity(typed, RATES, "450GB/s or 400Gb/s").map(Self)
    }
}

impl FromStr for Seconds {
    type Err = UnitError;
    fn from_str(typed: &str) -> Result<Self, UnitError> {
        quantity(typed, TIMES, "2.5ms or 30s").map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decimal_binary_and_bit_units_are_kept_apart() {
        assert_eq!("1GB".parse(), Ok(Bytes(1_000_000_000)));
        assert_eq!("1 GiB".parse(), Ok(Bytes(1 << 30)));
        assert_eq!("1.5e3kB".parse(), Ok(Bytes(1_500_000)));
        assert_eq!("400Gb/s".parse(), Ok(BytesPerSecond(50e9)));
        assert_eq!("400GB/s".parse(), Ok(BytesPerSecond(400e9)));
        assert_eq!("250us".parse::<Seconds>().map(|s| (s.0 * 1e9).round()), Ok(250e3));
        assert_eq!("2h".parse(), Ok(Seconds(7200.0)));
    }

    #[test]
    fn a_mistaken_unit_names_the_right_one() {
        let said = |typed: &str| typed.parse::<Bytes>().unwrap_err().to_string();
        assert!(said("64").contains("has no unit; add its unit, as in 64MiB"), "{}", said("64"));
        assert!(said("8Gb").contains("b means bits"), "{}", said("8Gb"));
        assert!(said("8gb").contains("b means bits"), "{}", said("8gb"));
        assert!(said("8mib").contains("b means bits") || said("8MIB").contains("did you mean MiB"), "{}", said("8MIB"));
        assert!(said("8KB").contains("did you mean kB"), "{}", said("8KB"));
        assert!(said("eight").contains("not a number"));
        assert!(said("-1GB").contains("0 or more") && said("infGB").contains("0 or more"));
        let rate = |typed: &str| typed.parse::<BytesPerSecond>().unwrap_err().to_string();
        assert!(rate("400Gbps").contains("write Gb/s for bits, GB/s for bytes"), "{}", rate("400Gbps"));
        assert!(rate("400").contains("as in 450GB/s"));
        assert!("".parse::<Seconds>().is_err() && "5 apples".parse::<Seconds>().is_err());
    }
}

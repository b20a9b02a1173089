//! Numbers for people: a unit that fits and three significant digits.

use std::fmt;

/// One unit of a ladder: used from `from` upwards, and worth `one`, both in the quantity's own unit.
pub(super) struct Rung {
    from: f64,
    one: f64,
    suffix: &'static str,
}

const fn rung(from: f64, one: f64, suffix: &'static str) -> Rung {
    Rung { from, one, suffix }
}

const KI: f64 = 1024.0;

pub(super) const BYTES: &[Rung] = &[
    rung(0.0, 1.0, "B"),
    rung(KI, KI, "KiB"),
    rung(KI * KI, KI * KI, "MiB"),
    rung(KI * KI * KI, KI * KI * KI, "GiB"),
    rung(KI * KI * KI * KI, KI * KI * KI * KI, "TiB"),
    rung(KI * KI * KI * KI * KI, KI * KI * KI * KI * KI, "PiB"),
];

pub(super) const BYTES_PER_SECOND: &[Rung] = &[
    rung(0.0, 1.0, "B/s"),
    rung(1e3, 1e3, "kB/s"),
    rung(1e6, 1e6, "MB/s"),
    rung(1e9, 1e9, "GB/s"),
    rung(1e12, 1e12, "TB/s"),
    rung(1e15, 1e15, "PB/s"),
];

pub(super) const FLOPS: &[Rung] = &[
    rung(0.0, 1.0, "FLOP"),
    rung(1e3, 1e3, "kFLOP"),
    rung(1e6, 1e6, "MFLOP"),
    rung(1e9, 1e9, "GFLOP"),
    rung(1e12, 1e12, "TFLOP"),
    rung(1e15, 1e15, "PFLOP"),
    rung(1e18, 1e18, "EFLOP"),
    rung(1e21, 1e21, "ZFLOP"),
    rung(1e24, 1e24, "YFLOP"),
];

pub(super) const FLOPS_PER_SECOND: &[Rung] = &[
    rung(0.0, 1.0, "FLOP/s"),
    rung(1e3, 1e3, "kFLOP/s"),
    rung(1e6, 1e6, "MFLOP/s"),
    rung(1e9, 1e9, "GFLOP/s"),
    rung(1e12, 1e12, "TFLOP/s"),
    rung(1e15, 1e15, "PFLOP/s"),
    rung(1e18, 1e18, "EFLOP/s"),
];

pub(super) const FLOPS_PER_BYTE: &[Rung] = &[rung(0.0, 1.0, "FLOP/B")];

/// Minutes, hours and days begin at two, for `90 s` says more than `1.5 min`.
pub(super) const SECONDS: &[Rung] = &[
    rung(0.0, 1e-9, "ns"),
    rung(1e-6, 1e-6, "µs"),
    rung(1e-3, 1e-3, "ms"),
    rung(1.0, 1.0, "s"),
    rung(120.0, 60.0, "min"),
    rung(7_200.0, 3_600.0, "h"),
    rung(172_800.0, 86_400.0, "d"),
];

/// The highest rung that `value` reaches once rounded, so that 999.96 µs reads `1 ms`: what one is worth, and its name.
pub(super) fn unit(value: f64, ladder: &[Rung]) -> (f64, &'static str) {
    let on = |rung: &Rung| three_digits(value.abs() / rung.one) * rung.one;
    // Zero belongs to the base unit: `0 s`, not `0 ns`.
    let reached = if value == 0.0 {
        ladder.iter().find(|rung| rung.one == 1.0)
    } else {
        // The rung below decides: its own rounding is what would be shown there.
        (1..ladder.len()).rev().find(|&i| on(&ladder[i - 1]) >= ladder[i].from).map(|i| &ladder[i])
    };
    let Rung { one, suffix, .. } = reached.unwrap_or(&ladder[0]);
    (*one, suffix)
}

/// Writes `value` in the unit that fits.
pub(super) fn write(f: &mut fmt::Formatter<'_>, value: f64, ladder: &[Rung]) -> fmt::Result {
    let (one, suffix) = unit(value, ladder);
    let scaled = value / one;
    let text = match f.precision() {
        Some(decimals) => format!("{scaled:.decimals$} {suffix}"),
        None => format!("{} {suffix}", three_digits(scaled)),
    };
    // `Formatter::pad` would take the precision for a maximum width.
    let width = f.width().unwrap_or(0);
    match f.align() {
        Some(fmt::Alignment::Right) => write!(f, "{text:>width$}"),
        Some(fmt::Alignment::Center) => write!(f, "{text:^width$}"),
        Some(fmt::Alignment::Left) | None => write!(f, "{text:<width$}"),
    }
}

/// Rounds to three significant digits, or to an integer from 1000 upwards.
fn three_digits(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return value;
    }
    let decimals = 2 - value.abs().log10().floor() as i32;
    if decimals <= 0 {
        return value.round();
    }
    let scale = 10f64.powi(decimals);
    (value * scale).round() / scale
}

#[cfg(test)]
mod tests {
    use crate::units::{Bytes, BytesPerSecond, Flops, FlopsPerByte, FlopsPerSecond, Seconds};

    #[test]
    fn quantities_read_as_people_write_them() {
        assert_eq!(Bytes(1_309_965_025).to_string(), "1.22 GiB");
        assert_eq!(Bytes(0).to_string(), "0 B");
        assert_eq!(Bytes(1023).to_string(), "1023 B");
        assert_eq!(Bytes::from_kib(48).to_string(), "48 KiB");
        assert_eq!(BytesPerSecond(31.24e9).to_string(), "31.2 GB/s");
        assert_eq!(FlopsPerSecond(3.1e12).to_string(), "3.1 TFLOP/s");
        assert_eq!(Flops(3.8e25).to_string(), "38 YFLOP");
        assert_eq!(FlopsPerByte(295.22).to_string(), "295 FLOP/B");
    }

    #[test]
    fn time_reads_from_nanoseconds_to_days() {
        let read = |seconds: f64| Seconds(seconds).to_string();
        assert_eq!(read(0.0), "0 s");
        assert_eq!(read(3.2e-9), "3.2 ns");
        assert_eq!(read(4.85e-3), "4.85 ms");
        assert_eq!(read(90.0), "90 s");
        assert_eq!(read(600.0), "10 min");
        assert_eq!(read(1e6), "11.6 d");
        assert_eq!(read(-2e-3), "-2 ms");
    }

    #[test]
    fn each_unit_begins_at_one_of_itself() {
        for (seconds, text) in [(1e-9, "1 ns"), (1e-6, "1 µs"), (1e-3, "1 ms"), (1.0, "1 s"), (120.0, "2 min")] {
            assert_eq!(Seconds(seconds).to_string(), text);
        }
        let rates = ["B/s", "kB/s", "MB/s", "GB/s", "TB/s", "PB/s"];
        for (power, unit) in (0..).step_by(3).zip(rates) {
            assert_eq!(BytesPerSecond(10f64.powi(power)).to_string(), format!("1 {unit}"));
        }
    }

    #[test]
    fn rounding_up_to_the_next_unit_changes_the_unit() {
        assert_eq!(Seconds(999.96e-6).to_string(), "1 ms");
        assert_eq!(BytesPerSecond(999.6e9).to_string(), "1 TB/s");
        assert_eq!(Bytes(1024 * 1024 - 1).to_string(), "1 MiB");
        assert_eq!(Bytes(1_047_000).to_string(), "1022 KiB");
    }

    #[test]
    fn precision_and_width_are_honoured() {
        assert_eq!(format!("{:.1}", Seconds(4.851e-3)), "4.9 ms");
        assert_eq!(format!("[{:>9}]", Bytes::from_mib(2)), "[    2 MiB]");
        assert_eq!(format!("[{:9.2}]", Seconds(2.0)), "[2.00 s   ]");
    }
}

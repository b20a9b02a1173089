//! The types: bytes, FLOPs, seconds and their quotients.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, Sub};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::human;

/// An amount of memory or of data moved, in bytes. Shown with binary prefixes.
///
/// Sums and products saturate at [`u64::MAX`], 16 EiB, which no machine has, so that an overflow shows as an absurd
/// amount and never as a small one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Bytes(pub u64);

impl Bytes {
    /// `n` KiB (2^10 bytes).
    pub const fn from_kib(n: u64) -> Self {
        Self(n.saturating_mul(1 << 10))
    }

    /// `n` MiB (2^20 bytes).
    pub const fn from_mib(n: u64) -> Self {
        Self(n.saturating_mul(1 << 20))
    }

    /// `n` GiB (2^30 bytes).
    pub const fn from_gib(n: u64) -> Self {
        Self(n.saturating_mul(1 << 30))
    }

    /// The number of bytes as a float, exact up to 8 PiB.
    pub const fn as_f64(self) -> f64 {
        self.0 as f64
    }

    /// What is left after taking `other`; `None` when `other` is larger.
    pub const fn checked_sub(self, other: Self) -> Option<Self> {
        match self.0.checked_sub(other.0) {
            Some(rest) => Some(Self(rest)),
            None => None,
        }
    }

    /// What is left after taking `other`; zero when `other` is larger.
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// The unit that it is shown in: what one is worth, and its name.
    pub fn unit(self) -> (f64, &'static str) {
        human::unit(self.as_f64(), human::BYTES)
    }

    /// Rounds to the nearest byte; negative amounts and NaN give zero.
    pub(super) fn from_f64(bytes: f64) -> Self {
        Self(bytes.round() as u64)
    }
}

impl Add for Bytes {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl AddAssign for Bytes {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(amounts: I) -> Self {
        amounts.fold(Self(0), Add::add)
    }
}

impl Mul<u64> for Bytes {
    type Output = Self;
    fn mul(self, times: u64) -> Self {
        Self(self.0.saturating_mul(times))
    }
}

/// The ratio of two amounts, without unit.
impl Div for Bytes {
    type Output = f64;
    fn div(self, other: Self) -> f64 {
        self.as_f64() / other.as_f64()
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        human::write(f, self.as_f64(), human::BYTES)
    }
}

/// Declares a quantity held as an `f64`, with the arithmetic that keeps its unit.
macro_rules! quantity {
    ($(#[$doc:meta])* $name:ident, $ladder:expr) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub f64);

        impl $name {
            /// The number, in the unit of the type.
            pub const fn as_f64(self) -> f64 {
                self.0
            }

            /// The larger of the two.
            pub const fn max(self, other: Self) -> Self {
                Self(self.0.max(other.0))
            }

            /// The smaller of the two.
            pub const fn min(self, other: Self) -> Self {
                Self(self.0.min(other.0))
            }

            /// The unit that it is shown in: what one is worth, and its name.
            pub fn unit(self) -> (f64, &'static str) {
                human::unit(self.0, $ladder)
            }

            pub(super) const fn from_f64(value: f64) -> Self {
                Self(value)
            }
        }

        impl Add for $name {
            type Output = Self;
            fn add(self, other: Self) -> Self {
                Self(self.0 + other.0)
            }
        }

        impl AddAssign for $name {
            fn add_assign(&mut self, other: Self) {
                self.0 += other.0;
            }
        }

        impl Sub for $name {
            type Output = Self;
            fn sub(self, other: Self) -> Self {
                Self(self.0 - other.0)
            }
        }

        impl Sum for $name {
            fn sum<I: Iterator<Item = Self>>(values: I) -> Self {
                values.fold(Self(0.0), Add::add)
            }
        }

        impl Mul<f64> for $name {
            type Output = Self;
            fn mul(self, factor: f64) -> Self {
                Self(self.0 * factor)
            }
        }

        impl Div<f64> for $name {
            type Output = Self;
            fn div(self, divisor: f64) -> Self {
                Self(self.0 / divisor)
            }
        }

        /// The ratio of two values, without unit.
        impl Div for $name {
            type Output = f64;
            fn div(self, other: Self) -> f64 {
                self.0 / other.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                human::write(f, self.0, $ladder)
            }
        }
    };
}

quantity! {
    /// A rate of data, in bytes per second. Shown with decimal prefixes, as data sheets do.
    BytesPerSecond, human::BYTES_PER_SECOND
}
quantity! {
    /// An amount of arithmetic, in floating-point operations; a multiply-add is two. Integer matrix arithmetic
    /// (int8) counts the same way.
    Flops, human::FLOPS
}
quantity! {
    /// A rate of arithmetic, in floating-point operations per second.
    FlopsPerSecond, human::FLOPS_PER_SECOND
}
quantity! {
    /// Arithmetic intensity, in floating-point operations per byte moved.
    FlopsPerByte, human::FLOPS_PER_BYTE
}
quantity! {
    /// A length of time, in seconds. Shown from nanoseconds to days.
    Seconds, human::SECONDS
}

impl From<Duration> for Seconds {
    fn from(duration: Duration) -> Self {
        Self(duration.as_secs_f64())
    }
}

/// From one product, both orders of it and the two quotients it implies.
macro_rules! product {
    ($a:ident * $b:ident = $product:ident) => {
        product!(@ $a, mul, Mul, $b, *, $product);
        product!(@ $b, mul, Mul, $a, *, $product);
        product!(@ $product, div, Div, $a, /, $b);
        product!(@ $product, div, Div, $b, /, $a);
    };
    (@ $left:ident, $method:ident, $trait:ident, $right:ident, $op:tt, $result:ident) => {
        impl $trait<$right> for $left {
            type Output = $result;
            fn $method(self, right: $right) -> $result {
                $result::from_f64(self.as_f64() $op right.as_f64())
            }
        }
    };
}

product!(BytesPerSecond * Seconds = Bytes);
product!(FlopsPerSecond * Seconds = Flops);
product!(FlopsPerByte * Bytes = Flops);
product!(FlopsPerByte * BytesPerSecond = FlopsPerSecond);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_over_bandwidth_is_time() {
        assert_eq!(Bytes(3_350_000_000) / BytesPerSecond(3.35e12), Seconds(1e-3));
        assert_eq!(Bytes(1000) / Seconds(0.5), BytesPerSecond(2000.0));
        assert_eq!(BytesPerSecond(2000.0) * Seconds(0.5), Bytes(1000));
    }

    #[test]
    fn peak_over_bandwidth_is_intensity() {
        assert_eq!(FlopsPerSecond(989e12) / BytesPerSecond(3.35e12), FlopsPerByte(989.0 / 3.35));
        assert_eq!(Flops(600.0) / Bytes(300), FlopsPerByte(2.0));
    }

    #[test]
    fn an_overflowing_sum_of_bytes_saturates() {
        assert_eq!(Bytes(u64::MAX) + Bytes(1), Bytes(u64::MAX));
        assert_eq!(Bytes::from_gib(1 << 40) * 8, Bytes(u64::MAX));
        assert_eq!([Bytes(u64::MAX), Bytes(7)].into_iter().sum::<Bytes>(), Bytes(u64::MAX));
    }

    #[test]
    fn more_cannot_be_taken_than_there_is() {
        assert_eq!(Bytes(5).checked_sub(Bytes(6)), None);
        assert_eq!(Bytes(5).saturating_sub(Bytes(6)), Bytes(0));
        assert_eq!(Bytes(6).checked_sub(Bytes(5)), Some(Bytes(1)));
    }

    #[test]
    fn a_negative_rate_moves_no_bytes() {
        assert_eq!(BytesPerSecond(-5.0) * Seconds(1.0), Bytes(0));
    }
}

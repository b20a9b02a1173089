//! The roofline model: the least time that a piece of work can take on a machine.
//!
//! Source: S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model for multicore
//! architectures", Communications of the ACM 52(4), 2009.

use std::fmt;

use serde::Serialize;

use crate::units::{Bytes, BytesPerSecond, Flops, FlopsPerByte, FlopsPerSecond, Seconds};

/// A machine seen as one memory and one arithmetic unit, which overlap perfectly.
///
/// ```
/// use ridge_hw::roofline::{Bound, Roofline};
/// use ridge_hw::units::{Bytes, BytesPerSecond, Flops, FlopsPerSecond};
///
/// let h100 = Roofline { bandwidth: BytesPerSecond(3.35e12), peak: FlopsPerSecond(989e12) };
/// // One token through an 8-billion-parameter model in bf16 reads every weight for two operations.
/// let (flops, bytes) = (Flops(16e9), Bytes(16_000_000_000));
/// assert_eq!(h100.bound(flops, bytes), Bound::Memory);
/// assert_eq!(h100.floor(flops, bytes).to_string(), "4.78 ms");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Roofline {
    /// Rate at which the memory moves data.
    pub bandwidth: BytesPerSecond,
    /// Rate of arithmetic when no data is waited for.
    pub peak: FlopsPerSecond,
}

/// What limits a piece of work on a roofline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    /// Moving the bytes takes longer than the arithmetic.
    Memory,
    /// The arithmetic takes at least as long as moving the bytes.
    Compute,
    /// Bytes in memory of the host take longest to cross the link to it.
    HostLink,
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Memory => "memory",
            Self::Compute => "compute",
            Self::HostLink => "host link",
        })
    }
}

impl Roofline {
    /// The least arithmetic intensity that reaches the peak: where memory stops being the limit.
    pub fn ridge_point(&self) -> FlopsPerByte {
        self.peak / self.bandwidth
    }

    /// The least time for `flops` of arithmetic over `bytes` of traffic: the longer of the two alone.
    pub fn floor(&self, flops: Flops, bytes: Bytes) -> Seconds {
        (flops / self.peak).max(bytes / self.bandwidth)
    }

    /// The rate of arithmetic within reach at an intensity: `min(peak, intensity * bandwidth)`.
    pub fn attainable(&self, intensity: FlopsPerByte) -> FlopsPerSecond {
        self.peak.min(intensity * self.bandwidth)
    }

    /// Which of the two takes longer; at the ridge point itself, compute.
    pub fn bound(&self, flops: Flops, bytes: Bytes) -> Bound {
        if bytes / self.bandwidth > flops / self.peak { Bound::Memory } else { Bound::Compute }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ridge point at 10 FLOP/B.
    const MACHINE: Roofline = Roofline { bandwidth: BytesPerSecond(100.0), peak: FlopsPerSecond(1000.0) };

    #[test]
    fn below_the_ridge_point_memory_sets_the_floor() {
        assert_eq!(MACHINE.ridge_point(), FlopsPerByte(10.0));
        assert_eq!(MACHINE.bound(Flops(900.0), Bytes(100)), Bound::Memory);
        assert_eq!(MACHINE.floor(Flops(900.0), Bytes(100)), Seconds(1.0));
    }

    #[test]
    fn above_the_ridge_point_compute_sets_the_floor() {
        assert_eq!(MACHINE.bound(Flops(2000.0), Bytes(100)), Bound::Compute);
        assert_eq!(MACHINE.floor(Flops(2000.0), Bytes(100)), Seconds(2.0));
    }

    #[test]
    fn the_ridge_point_reaches_the_peak() {
        assert_eq!(MACHINE.bound(Flops(1000.0), Bytes(100)), Bound::Compute);
        assert_eq!(MACHINE.attainable(MACHINE.ridge_point()), MACHINE.peak);
        assert_eq!(MACHINE.attainable(FlopsPerByte(1.0)), FlopsPerSecond(100.0));
        assert_eq!(MACHINE.attainable(FlopsPerByte(1e9)), MACHINE.peak);
    }
}

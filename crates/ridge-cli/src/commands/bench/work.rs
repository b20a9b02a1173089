//! What the steps of a test cost, and their times together.

use ridge::DeviceRates;
use ridge_hw::roofline::Bound;
use ridge_hw::units::{Bytes, Flops};

/// The costs of a test's steps, and the sum of their floors.
#[derive(Default)]
pub(super) struct StepWork {
    pub(super) flops: f64,
    pub(super) bytes: Bytes,
    /// Bytes read from memory of the host.
    pub(super) host: Bytes,
    pub(super) floor: f64,
}

impl StepWork {
    pub(super) fn add(&mut self, rates: &DeviceRates, flops: Flops, bytes: Bytes, host: Bytes) {
        self.flops += flops.0;
        self.bytes += bytes;
        self.host += host;
        self.floor += rates.floor(flops, bytes, host).as_f64();
    }

    pub(super) fn bound(&self, rates: &DeviceRates) -> Bound {
        rates.bound(Flops(self.flops), self.bytes, self.host)
    }
}

/// The median of one time or more.
pub(super) fn median(times: &[f64]) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    let half = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[half] } else { f64::midpoint(sorted[half - 1], sorted[half]) }
}

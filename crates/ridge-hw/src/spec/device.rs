//! One device as its sheet describes it.

use std::collections::BTreeMap;

use serde::Serialize;

use super::precision::Precision;
use crate::error::HwError;
use crate::figure::Figure;
use crate::roofline::Roofline;
use crate::units::{Bytes, BytesPerSecond, FlopsPerSecond};

/// What is stated of one device: a GPU, or one GPU of a larger machine.
///
/// A figure that no trustworthy source states is absent, never guessed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DeviceSpec {
    /// Its name in Ridge, such as `H100-SXM`.
    pub name: String,
    /// Its maker.
    pub vendor: String,
    /// Other names for it, the driver's among them.
    pub aliases: Vec<String>,
    /// CUDA's compute capability, of NVIDIA's devices: NVIDIA's list "CUDA GPUs - Compute Capability".
    pub compute_capability: Option<String>,
    /// Capacity of its memory: what the driver reports, where that is known.
    pub memory: Figure<Bytes>,
    /// Peak rate of its memory.
    pub memory_bandwidth: Figure<BytesPerSecond>,
    /// Peak matrix rate without sparsity, by precision.
    pub dense_rates: BTreeMap<Precision, Figure<FlopsPerSecond>>,
    /// Peak rate of f32 arithmetic outside the matrix units.
    pub vector_f32: Option<Figure<FlopsPerSecond>>,
    /// Streaming multiprocessors or compute units, as enabled in the product.
    pub compute_units: Option<Figure<u64>>,
    /// First-level cache and shared memory together, per compute unit.
    pub l1_per_unit: Option<Figure<Bytes>>,
    /// Second-level cache of the whole device.
    pub l2: Option<Figure<Bytes>>,
    /// Rate of its link to its peers in a machine (NVLink, Infinity Fabric, else PCIe), one way.
    pub interconnect: Option<Figure<BytesPerSecond>>,
    /// Rate of its link to memory of the host (PCIe of all lanes), one way.
    pub host_link: Option<Figure<BytesPerSecond>>,
}

impl DeviceSpec {
    /// The roofline of the device's memory and of its matrix units in `precision`.
    ///
    /// # Errors
    ///
    /// [`HwError::NoRate`] when the sheet has no rate for it.
    pub fn roofline(&self, precision: Precision) -> Result<Roofline, HwError> {
        let rate = self.dense_rates.get(&precision).ok_or_else(|| HwError::NoRate {
            device: self.name.clone(),
            precision,
            known: self.dense_rates.keys().copied().collect(),
        })?;
        Ok(Roofline { bandwidth: self.memory_bandwidth.value, peak: rate.value })
    }
}

//! Specification sheets: what the makers say of their devices, as data (`specs/*.toml`).

mod names;
mod sheet;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

use crate::error::HwError;
use crate::figure::Figure;
use crate::roofline::Roofline;
use crate::units::{Bytes, BytesPerSecond, FlopsPerSecond};

/// Embeds sheets with their file names.
macro_rules! sheets {
    ($($file:literal),* $(,)?) => {
        &[$(($file, include_str!(concat!("../specs/", $file)))),*]
    };
}

const SHEETS: &[(&str, &str)] = sheets![
    "a100-sxm.toml",
    "h100-sxm.toml",
    "h100-pcie.toml",
    "h200.toml",
    "b200.toml",
    "gb200-nvl72.toml",
    "mi300x.toml",
    "l4.toml",
    "l40s.toml",
    "rtx4090.toml",
];

static DEVICES: LazyLock<Vec<DeviceSpec>> = LazyLock::new(|| {
    let parse = |&(file, text)| DeviceSpec::parse(file, text).unwrap_or_else(|error| panic!("embedded sheet: {error}"));
    SHEETS.iter().map(parse).collect()
});

/// The format of the numbers that a matrix unit multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Precision {
    /// IEEE half precision, accumulated in f32.
    F16,
    /// bfloat16, accumulated in f32.
    Bf16,
    /// 8-bit floats (E4M3 or E5M2), accumulated in f32.
    Fp8,
    /// 8-bit integers, accumulated in 32-bit integers.
    Int8,
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
            Self::Int8 => "int8",
        })
    }
}

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
}

impl DeviceSpec {
    /// The sheets that come with Ridge.
    pub fn all() -> &'static [Self] {
        &DEVICES
    }

    /// The sheet of the device called `name`, by its own name or an alias. Case, punctuation and a leading maker's
    /// name do not count, so the driver's `NVIDIA H100 80GB HBM3` finds `H100-SXM`.
    ///
    /// # Errors
    ///
    /// [`HwError::UnknownDevice`], with the nearest known name.
    pub fn find(name: &str) -> Result<&'static Self, HwError> {
        names::find(name, Self::all())
    }

    /// Reads a sheet from the text of its file; `file` is its name, for messages.
    ///
    /// # Errors
    ///
    /// [`HwError::Sheet`], [`HwError::SheetValue`] or [`HwError::SheetSource`], naming the file and the key.
    pub fn parse(file: &str, text: &str) -> Result<Self, HwError> {
        sheet::parse(file, text)
    }

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sheet_parses_and_every_file_is_listed() {
        for (file, text) in SHEETS {
            DeviceSpec::parse(file, text).unwrap_or_else(|error| panic!("{error}"));
        }
        let folder = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/specs")).unwrap();
        assert_eq!(folder.count(), SHEETS.len());
    }

    #[test]
    fn every_sheet_has_a_plausible_bf16_ridge_point() {
        for device in DeviceSpec::all() {
            let ridge = device.roofline(Precision::Bf16).unwrap().ridge_point().as_f64();
            assert!((100.0..500.0).contains(&ridge), "{}: {ridge} FLOP/B", device.name);
        }
    }

    #[test]
    fn an_eight_bit_rate_is_never_below_the_sixteen_bit_one() {
        for device in DeviceSpec::all() {
            let bf16 = device.dense_rates[&Precision::Bf16].value;
            for precision in [Precision::Fp8, Precision::Int8] {
                if let Some(rate) = device.dense_rates.get(&precision) {
                    assert!(rate.value / bf16 > 1.9, "{} {precision}: {}", device.name, rate.value);
                }
            }
        }
    }

    #[test]
    fn a_missing_rate_names_the_rates_there_are() {
        let a100 = DeviceSpec::find("A100-SXM").unwrap();
        let message = a100.roofline(Precision::Fp8).unwrap_err().to_string();
        assert!(message.starts_with("A100-SXM: ") && message.contains("f16, bf16, int8"), "{message}");
    }
}

//! The sheets that are compiled in, and how one is found.

use std::sync::LazyLock;

use super::device::DeviceSpec;
use super::{names, sheet};
use crate::error::HwError;

/// Embeds sheets with their file names.
macro_rules! sheets {
    ($($file:literal),* $(,)?) => {
        &[$(($file, include_str!(concat!("../../specs/", $file)))),*]
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
    "a10.toml",
    "l4.toml",
    "l40s.toml",
    "rtx3090.toml",
    "rtx4090.toml",
    "rtx5090.toml",
    "m2-ultra.toml",
    "m3-max.toml",
    "m4-max.toml",
];

static DEVICES: LazyLock<Vec<DeviceSpec>> = LazyLock::new(|| {
    let parse = |&(file, text)| DeviceSpec::parse(file, text).unwrap_or_else(|error| panic!("embedded sheet: {error}"));
    SHEETS.iter().map(parse).collect()
});

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
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::Precision;

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
            // With matrix units, and without.
            let plausible = if device.vendor == "Apple" { 20.0..60.0 } else { 70.0..500.0 };
            assert!(plausible.contains(&ridge), "{}: {ridge} FLOP/B", device.name);
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

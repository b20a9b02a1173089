//! Finding a device by what people and drivers call it.

use super::device::DeviceSpec;
use crate::error::HwError;

pub(super) fn find<'a>(name: &str, devices: &'a [DeviceSpec]) -> Result<&'a DeviceSpec, HwError> {
    let wanted = key(name);
    devices.iter().find(|device| known_names(device).any(|known| key(known) == wanted)).ok_or_else(|| {
        // A part of a name counts for more than letters in common.
        let distance = |known: &&str| {
            let known = key(known);
            (wanted.is_empty() || !known.contains(&wanted), edit_distance(&known, &wanted))
        };
        let nearest = devices.iter().flat_map(known_names).min_by_key(distance).unwrap_or_default();
        HwError::UnknownDevice {
            name: name.to_owned(),
            nearest: nearest.to_owned(),
            known: devices.iter().map(|device| device.name.clone()).collect(),
        }
    })
}

fn known_names(device: &DeviceSpec) -> impl Iterator<Item = &str> {
    std::iter::once(device.name.as_str()).chain(device.aliases.iter().map(String::as_str))
}

/// Lower case, letters and digits alone, without the maker.
pub(super) fn key(name: &str) -> String {
    let bare: String = name.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect();
    ["nvidia", "amd"].iter().find_map(|maker| bare.strip_prefix(maker)).unwrap_or(&bare).to_owned()
}

/// Insertions, deletions and substitutions of bytes that turn `a` into `b` (Levenshtein), one row at a time.
fn edit_distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.bytes().enumerate() {
            let substituted = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn the_names_that_drivers_report_find_their_sheets() {
        for (reported, sheet) in [
            ("NVIDIA A100-SXM4-80GB", "A100-SXM"),
            ("NVIDIA H100 80GB HBM3", "H100-SXM"),
            ("NVIDIA H100 PCIe", "H100-PCIe"),
            ("NVIDIA H200", "H200"),
            ("NVIDIA L4", "L4"),
            ("NVIDIA L40S", "L40S"),
            ("NVIDIA GeForce RTX 4090", "RTX4090"),
            ("AMD Instinct MI300X", "MI300X"),
        ] {
            assert_eq!(DeviceSpec::find(reported).unwrap().name, sheet);
        }
    }

    #[test]
    fn case_and_punctuation_do_not_count() {
        assert_eq!(DeviceSpec::find("h100 sxm").unwrap().name, "H100-SXM");
        assert_eq!(DeviceSpec::find("a100_80gb").unwrap().name, "A100-SXM");
    }

    #[test]
    fn a_device_of_another_memory_is_not_mistaken_for_its_sibling() {
        // Their bandwidths differ.
        assert!(DeviceSpec::find("NVIDIA A100-SXM4-40GB").is_err());
        assert!(DeviceSpec::find("NVIDIA H100 NVL").is_err());
    }

    #[test]
    fn an_unknown_name_suggests_the_nearest() {
        let message = DeviceSpec::find("H20O").unwrap_err().to_string();
        assert!(message.contains("\"H20O\"; did you mean \"H200\"?"), "{message}");
        assert!(message.contains("MI300X"), "{message}");
        let message = DeviceSpec::find("80gb").unwrap_err().to_string();
        assert!(message.contains("did you mean \"A100-80GB\"?"), "{message}");
    }

    #[test]
    fn no_name_means_two_devices() {
        let mut owners = BTreeMap::new();
        for device in DeviceSpec::all() {
            for name in known_names(device) {
                let other = owners.insert(key(name), &device.name);
                assert!(other.is_none_or(|other| *other == device.name), "{name}: {other:?} and {}", device.name);
            }
        }
    }

    #[test]
    fn edit_distance_counts_single_edits() {
        assert_eq!(edit_distance("h100", "h100"), 0);
        assert_eq!(edit_distance("h100", "h10"), 1);
        assert_eq!(edit_distance("", "abc"), 3);
        assert_eq!(edit_distance("kitten", "sitting"), 3);
    }
}

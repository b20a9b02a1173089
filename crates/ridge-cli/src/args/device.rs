//! The argument of `--device`.

use crate::model::DeviceChoice;

/// Parses `cpu`, `cuda`, `cuda:N` or `auto`.
pub(crate) fn device(typed: &str) -> Result<DeviceChoice, String> {
    let number = |text: &str| text.parse().map(DeviceChoice::Cuda).ok();
    match typed {
        "cpu" => Some(DeviceChoice::Cpu),
        "cuda" => Some(DeviceChoice::Cuda(0)),
        "auto" => Some(DeviceChoice::Auto),
        other => other.strip_prefix("cuda:").and_then(number),
    }
    .ok_or_else(|| "must be cpu, cuda, cuda:N or auto".to_owned())
}

//! Specification sheets: what the makers say of their devices, as data (`specs/*.toml`).

mod catalog;
mod device;
mod names;
mod precision;
mod sheet;

pub use device::DeviceSpec;
pub use precision::Precision;

//! Arguments shared by several commands, and parsers of their values. Arguments of a single command are in the command's files.

mod device;
mod model_numbers;
mod numbers;
mod sampling;
mod speculate;

pub(crate) use device::{DeviceArgs, LimitedDeviceArgs, ParallelArgs, gpu_memory};
pub(crate) use model_numbers::{FLOATS, ModelSettings, NumberArgs, formats};
pub(crate) use numbers::{MAX_COUNT, MAX_THREADS, whole};
pub(crate) use sampling::{SamplingArgs, SamplingSettings, change_setting, decimal, settings_json};
pub(crate) use speculate::{Speculate, speculate};

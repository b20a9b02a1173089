//! The settings of a run, read from a TOML file and from flags of the same names.
//!
//! `keys` lists every key with its help, `read` makes [`Settings`] of a file and flags, `sections` are what they say.

mod experts;
mod keys;
mod read;
mod sections;

pub use experts::{ExpertsSettings, RoutingName};
pub use keys::{KEYS, Key, KeyKind};
pub use read::{read_settings, shown_settings};

pub use sections::{
    CheckpointSettings, DataSettings, Fp8, Fp8Gradients, GroupSettings, Guard, Initialization, LogSettings,
    ModelSettings, Offload, OptimizerName, OptimizerSettings, Packing, Precision, Recomputation, SampleSettings,
    ScheduleName, Settings, TrainSettings, ValidationSettings,
};

//! Models made ready to run: which model in which number formats (`settings`), on which device (`placement`), whether it
//! fits into the device's memory (`admission`), its weights brought there (`load`), and the rates that its speed is
//! compared with (`rates`). Nothing here knows of the command line but by the names of flags in messages.

mod admission;
mod load;
mod placement;
mod rates;
mod settings;

pub(crate) use admission::{CacheSize, EnginePrograms, StepExtents, engine_bytes, scorer_bytes};
pub(crate) use load::{
    LoadedEngine, LoadedModel, LoadedNetwork, RunSettings, build_network, estimate_memory, load_engine, load_model,
    load_network, round_network_for_cpu,
};
pub(crate) use placement::{DeviceChoice, OpenDevice};
pub(crate) use rates::DeviceRates;
pub(crate) use settings::{ActivationMode, ModelSettings};

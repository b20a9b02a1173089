//! Ridge as a library: open a model, place it on a device, run it.
//!
//! ```
//! use std::ops::ControlFlow;
//!
//! use ridge::{Device, Model, Sampling};
//!
//! let mut writer = Model::embedded()?.on(Device::Cpu).writer()?;
//! let (story, _) = writer.write("Once upon a time", Sampling::GREEDY, 20, |piece| {
//!     print!("{piece}");
//!     ControlFlow::Continue(())
//! })?;
//! assert!(story.starts_with(", there was a little girl"));
//! # Ok::<(), ridge::Error>(())
//! ```
//!
//! [`Model::open`] takes a folder in the layout of Hugging Face or a GGUF file. [`Model::on`] says where it runs: a
//! [`Device`], or a [`Placement`] that cuts its layers over ranks. What runs it is an [`Engine`] for one sequence, a
//! [`Service`](service::Service) for many, or an [`Embedder`]:
//!
//! ```
//! use ridge::{Device, Model, Placement, Request, Sampling, TensorParallel};
//!
//! let two_ranks = Placement { tensor_parallel: TensorParallel::Here(2), ..Device::Cpu.into() };
//! let mut answers = Vec::new();
//! for placement in [Device::Cpu.into(), two_ranks] {
//!     let model = Model::embedded()?.with_context(64);
//!     let prompt = model.tokenizer()?.encode("Lily and Tim", true)?;
//!     let mut engine = model.on(placement).engine()?;
//!     let request = Request { prompt, sampling: Sampling::GREEDY, max_tokens: 8, stop_tokens: vec![] };
//!     answers.push(engine.generate(&request, |_| std::ops::ControlFlow::Continue(()))?.tokens);
//! }
//! assert_eq!(answers[0], answers[1]);
//! # Ok::<(), ridge::Error>(())
//! ```
//!
//! Behind these stand the functions that `ridge` the command uses, with every setting: `load` brings a model to a device,
//! `admission` says what it allocates there before it does, `placement` opens devices, `rates` measures what a model's
//! speed is compared with. [`train::Trainer`] trains one. `host_weights` chooses weights that leave a GPU. Read them in the order `settings`, `placement`, `admission`, `host_weights`, `load`, `model`,
//! `trainer`.

mod admission;
mod error;
mod experts;
mod host_plan;
mod host_weights;
mod load;
mod model;
mod placement;
mod rates;
mod settings;
mod trainer;

/// Training.
pub mod train {
    pub use crate::trainer::{TrainPlan, Trainer};
    pub use ridge_train::LayerUse;
    pub use ridge_train::log::{StepReport, TrainEvent};
    pub use ridge_train::settings::{Fp8, Offload, Precision, Recomputation, Settings};
    pub use ridge_train::{RunEnd, StepChoice, TrainError, step_choices};
}

pub use admission::{CacheSize, EnginePrograms, StepExtents, cache_bytes, engine_bytes, scorer_bytes};
pub use error::{Error, Result, Smaller};
pub use experts::{DispatchTime, ExpertBench, ExpertBenchSettings};
pub use host_plan::{HostPlan, HostPlanSettings};
pub use host_weights::HostWeights;
pub use load::{
    LoadNote, LoadObserver, LoadedEngine, LoadedModel, LoadedNetwork, MemoryEstimate, RunSettings, build_network,
    estimate_memory, left_out, load_embedder, load_engine, load_model, load_network, round_network,
    summarize_prediction,
};
pub use model::{Model, PlacedModel, Writer};
pub use placement::{Device, FoundDevice, OpenDevice, Placement, TensorParallel};
pub use rates::DeviceRates;
pub use settings::{ActivationMode, NumberSettings};

pub use ridge_comm::{Cluster, JoinSettings, Transport, variables};
pub use ridge_engine::scoring::{Question, Scorer};
pub use ridge_engine::{
    EmbedOptions, Embedder, Engine, EngineOptions, Finish, Generated, Request, Sampling, TextStream, service,
};
pub use ridge_graph::{DType, FormatRef};
pub use ridge_models::{ModelFiles, SentenceConfig};
pub use ridge_runtime::CollectiveError;
pub use ridge_text::Tokenizer;

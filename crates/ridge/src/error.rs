//! Errors of opening, placing and running a model.

use ridge_comm::CommError;
use ridge_engine::EngineError;
use ridge_files::FilesError;
use ridge_graph::GraphError;
use ridge_hw::units::Bytes;
use ridge_models::ModelError;
use ridge_runtime::RuntimeError;
use ridge_text::TextError;
use ridge_train::TrainError;

/// The result of what the library does.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a model could not be opened, placed or run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// What a model allocates does not fit into what this process may take.
    #[error(
        "{what} need {needed}, but only {available} is available to this process; {}{}", smaller.remedy(), other(*or_on_host)
    )]
    Memory {
        /// What needs it.
        what: &'static str,
        /// How much all of it is.
        needed: Bytes,
        /// What there is.
        available: Bytes,
        /// What would need less.
        smaller: Smaller,
        /// Can weights be kept in memory of the host instead, for which [`Placement::gpu_memory`](crate::Placement) asks? Whether
        /// the rest would then fit is not known.
        or_on_host: bool,
    },

    /// A model of another kind than the one asked for.
    #[error("{model} is not a {wanted}")]
    Kind {
        /// Where the model comes from.
        model: String,
        /// What was asked for.
        wanted: &'static str,
    },

    /// A model that does not predict further tokens, where drafts of its own were asked for.
    #[error(
        "the {family} model has no module that predicts further tokens: config.json has no num_nextn_predict_layers above 0, or \
         Ridge does not run the family's module"
    )]
    NoPredictions {
        /// Its family.
        family: &'static str,
    },

    /// A device that a model cannot be placed on as it was asked.
    #[error("{device}: {why}")]
    Device {
        /// The device as it was asked for.
        device: String,
        /// Why, and what to do.
        why: String,
    },

    /// See [`CommError`].
    #[error(transparent)]
    Comm(#[from] CommError),

    /// See [`ModelError`].
    #[error(transparent)]
    Model(#[from] ModelError),

    /// See [`FilesError`].
    #[error(transparent)]
    Files(#[from] FilesError),

    /// See [`TextError`].
    #[error(transparent)]
    Text(#[from] TextError),

    /// See [`EngineError`].
    #[error(transparent)]
    Engine(#[from] EngineError),

    /// See [`RuntimeError`].
    #[error(transparent)]
    Runtime(#[from] RuntimeError),

    /// See [`TrainError`].
    #[error(transparent)]
    Train(Box<TrainError>),
}

/// What would need less memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Smaller {
    /// A model of fewer or smaller weights.
    Model,
    /// A smaller cache: a shorter context, or keys and values of fewer bytes.
    Cache,
    /// Steps of fewer tokens.
    Chunk,
    /// Nothing but a higher limit of the GPU's memory, or less than weights: all of those that may be are on the host already.
    Limit,
    /// More weights on the GPU, since the host lacks memory for them.
    Host,
}

/// The other way out.
fn other(on_host: bool) -> &'static str {
    if on_host { ", or limit the GPU's memory, so that weights are kept in memory of the host" } else { "" }
}

impl Smaller {
    fn remedy(self) -> &'static str {
        match self {
            Self::Model => "use a smaller model, or store its matrices in q8_0",
            Self::Cache => "shorten the context, or store the cache in bf16",
            Self::Chunk => "process fewer prompt tokens per step",
            Self::Limit => "raise the limit, shorten the context, or process fewer prompt tokens per step",
            Self::Host => "raise the limit of the GPU's memory, or use a smaller model",
        }
    }
}

impl From<GraphError> for Error {
    fn from(error: GraphError) -> Self {
        Self::Runtime(error.into())
    }
}

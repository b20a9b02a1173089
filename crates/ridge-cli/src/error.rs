//! Why a command failed, and with which exit code.

use std::io;
use std::process::ExitCode;

use ridge::Smaller;
use ridge_engine::EngineError;
use ridge_files::FilesError;
use ridge_graph::GraphError;
use ridge_hub::HubError;
use ridge_hw::units::Bytes;
use ridge_image::ImageError;
use ridge_models::ModelError;
use ridge_plan::PlanError;
use ridge_runtime::RuntimeError;
use ridge_serve::ServeError;
use ridge_serve::load::LoadError;
use ridge_text::TextError;
use ridge_train::TrainError;

/// The result of a command.
pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;

/// An argument that is well formed and cannot be used: `flag` with `value`, and why.
pub(crate) fn refused(flag: &str, value: impl ToString, why: &str) -> Error {
    Error::Setting { flag: flag.to_owned(), value: value.to_string(), why: why.to_owned() }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// An argument that is well formed and has no meaning. A mistake of use: exit code 2.
    #[error("{flag} {value}: {why}")]
    Setting { flag: String, value: String, why: String },

    #[error("a prompt needs a tokenizer; --prompt-tokens N needs none")]
    PromptWithoutTokenizer(#[source] ModelError),

    #[error("--stop needs a tokenizer: without one there is no text to look for a string in")]
    StopWithoutTokenizer,

    #[error("the model has no token that begins a text; give a prompt")]
    NoBeginToken,

    #[error(
        "the model has no token that begins a text, and there is no tokenizer.json to read a prompt with; \
         give --prompt-tokens N"
    )]
    NothingToBeginWith,

    #[error(
        "the prompt has {prompt} tokens and the context holds {context}, which leaves none to generate; \
         shorten the prompt or raise --context"
    )]
    PromptBeyondContext { prompt: usize, context: usize },

    #[error(
        "the prompt has {prompt} tokens and the model was made for {most} at most, prompt and answer together; \
         shorten the prompt"
    )]
    PromptBeyondModel { prompt: usize, most: usize },

    #[error("{what} need {needed}, and this process can take {available}; {remedy}")]
    Memory { what: &'static str, needed: Bytes, available: Bytes, remedy: &'static str },

    #[error("the ranks cannot continue: {why}")]
    Ranks { why: String },

    #[error("cannot start {program} as a rank")]
    Launch {
        program: String,
        #[source]
        cause: io::Error,
    },

    #[error(transparent)]
    Ridge(ridge::Error),

    #[error("cannot read the prompt from standard input")]
    Stdin(#[source] io::Error),

    #[error("standard input is not UTF-8 at byte {at}; convert it first, for example with iconv -f LATIN1 -t UTF-8")]
    StdinNotText { at: usize },

    #[error("standard input holds more than {most}, the most that a prompt may have; shorten it")]
    StdinTooLong { most: Bytes },

    #[error("cannot read {path}; check the path and its permissions")]
    Read {
        path: String,
        #[source]
        cause: io::Error,
    },

    #[error("cannot write {path}; check the path and its permissions")]
    Write {
        path: String,
        #[source]
        cause: io::Error,
    },

    #[error("{path} is not UTF-8 at byte {at}; save it as UTF-8")]
    FileNotText { path: String, at: usize },

    #[error("{path} holds more than {most}, the most that is read; shorten it")]
    FileTooLong { path: String, most: Bytes },

    #[error(
        "{model} has no chat template, as is usual for base models: `ridge generate` continues a text, and \
             --template-file FILE gives a template"
    )]
    NoChatTemplate { model: String },

    #[error(
        "{what} is not a conversation: {problem}; give a JSON list of messages, each with a text as role and as \
             content"
    )]
    Conversation { what: String, problem: String },

    #[error(
        "the last message and what must go with it have {tokens} tokens, and the context holds {context}; shorten \
             the message, or raise --context"
    )]
    TurnBeyondContext { tokens: usize, context: usize },

    #[error("token {id} is not in the vocabulary of {tokens} tokens; check that the ids belong to this model")]
    NoSuchToken { id: u32, tokens: usize },

    /// A file, or a line of one, that cannot be used.
    #[error("{place}: {problem}")]
    Data { place: String, problem: String },

    #[error("a message is empty; type one, or give --message TEXT")]
    EmptyMessage,

    #[error("the line editor failed")]
    Editor(#[source] rustyline::error::ReadlineError),

    #[error("cannot watch for Ctrl-C")]
    Signal(#[source] io::Error),

    /// Ended by the user. Exit code 130, as shells tell it.
    #[error("interrupted")]
    Interrupted,

    #[error("cannot write to standard output")]
    Stdout(#[source] io::Error),

    #[error(transparent)]
    Plan(#[from] PlanError),

    /// What was asked does not fit, as the answer has said. Exit code 3.
    #[error("it does not fit")]
    DoesNotFit,

    #[error(transparent)]
    Serve(#[from] ServeError),

    #[error(transparent)]
    Load(#[from] LoadError),

    #[error("none of {requests} was answered; the report says why")]
    NothingAnswered { requests: String },

    #[error(transparent)]
    Model(#[from] ModelError),

    #[error(transparent)]
    Hub(#[from] HubError),

    #[error(transparent)]
    Files(#[from] FilesError),

    #[error(transparent)]
    Image(#[from] ImageError),

    #[error(transparent)]
    Text(#[from] TextError),

    #[error(transparent)]
    Engine(#[from] EngineError),

    #[error(transparent)]
    Runtime(#[from] RuntimeError),

    #[error(transparent)]
    Train(Box<TrainError>),
}

impl Error {
    /// Did whoever reads the output stop reading? Then there is nothing to say and nothing failed.
    pub(crate) fn reader_left(&self) -> bool {
        matches!(self, Self::Stdout(cause) if cause.kind() == io::ErrorKind::BrokenPipe)
    }

    /// Has the command said so itself, as its answer?
    pub(crate) fn is_reported(&self) -> bool {
        matches!(self, Self::DoesNotFit)
    }

    pub(crate) fn exit_code(&self) -> ExitCode {
        match self {
            Self::Train(error) if matches!(**error, TrainError::Setting { .. } | TrainError::UnknownKey { .. }) => {
                ExitCode::from(2)
            }
            Self::Setting { .. }
            | Self::Load(LoadError::Url { .. })
            | Self::Hub(HubError::Setting { .. })
            | Self::Plan(PlanError::Setting { .. } | PlanError::Hardware(_)) => ExitCode::from(2),
            Self::DoesNotFit => ExitCode::from(3),
            Self::Interrupted => ExitCode::from(130),
            _ => ExitCode::FAILURE,
        }
    }
}

impl From<TrainError> for Error {
    fn from(error: TrainError) -> Self {
        Self::Train(Box::new(error))
    }
}

impl From<GraphError> for Error {
    fn from(error: GraphError) -> Self {
        Self::Runtime(error.into())
    }
}

/// The library's errors by the names of the command line.
impl From<ridge::Error> for Error {
    fn from(error: ridge::Error) -> Self {
        match error {
            ridge::Error::Memory { what, needed, available, smaller } => {
                let remedy = match smaller {
                    Smaller::Model => "choose a smaller model, or --format q8_0",
                    Smaller::Cache => "lower --context, or use --cache-dtype bf16",
                    Smaller::Chunk => "lower --chunk",
                };
                Self::Memory { what, needed, available, remedy }
            }
            ridge::Error::Planned { model, family } => {
                refused("--model", model, &format!("is of the family {family}, which can be planned and not run yet"))
            }
            ridge::Error::Kind { model, wanted } => refused("--model", model, &format!("is no {wanted}")),
            ridge::Error::Device { device, why } => refused("--device", device, &why),
            ridge::Error::Model(error) => Self::Model(error),
            ridge::Error::Files(error) => Self::Files(error),
            ridge::Error::Text(error) => Self::Text(error),
            ridge::Error::Engine(error) => Self::Engine(error),
            ridge::Error::Runtime(error) => Self::Runtime(error),
            ridge::Error::Train(error) => Self::Train(error),
            error => Self::Ridge(error),
        }
    }
}

//! Errors of commands and their exit codes.

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

/// An error for an argument that is well formed but invalid: `flag` with `value`, and why.
pub(crate) fn refused(flag: &str, value: impl ToString, why: &str) -> Error {
    Error::Setting { flag: flag.to_owned(), value: value.to_string(), why: why.to_owned() }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// An argument that is well formed but invalid. A usage error: exit code 2.
    #[error("{flag} {value}: {why}")]
    Setting { flag: String, value: String, why: String },

    #[error("a prompt needs a tokenizer; --prompt-tokens N needs none")]
    PromptWithoutTokenizer(#[source] ModelError),

    #[error("--stop needs a tokenizer, because it searches the text for a string")]
    StopWithoutTokenizer,

    #[error("the model has no begin token; give a prompt")]
    NoBeginToken,

    #[error(
        "the model has no begin token, and there is no tokenizer.json to tokenise a prompt; \
         give --prompt-tokens N"
    )]
    NothingToBeginWith,

    #[error(
        "the prompt has {prompt} tokens and the context holds {context}, which leaves no room to generate; \
         shorten the prompt or raise --context"
    )]
    PromptBeyondContext { prompt: usize, context: usize },

    #[error(
        "the prompt has {prompt} tokens, but the model supports at most {most}, prompt plus generated text; \
         shorten the prompt"
    )]
    PromptBeyondModel { prompt: usize, most: usize },

    #[error("{what} need {needed}, but only {available} is available to this process; {remedy}")]
    Memory { what: &'static str, needed: Bytes, available: Bytes, remedy: String },

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

    #[error("standard input exceeds {most}, the maximum size of a prompt; shorten it")]
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

    #[error("{path} exceeds {most}, the maximum size of an input; shorten it")]
    FileTooLong { path: String, most: Bytes },

    #[error(
        "{model} has no chat template, as is usual for base models; use `ridge generate` to continue a text, or \
             supply a template with --template-file FILE"
    )]
    NoChatTemplate { model: String },

    #[error(
        "{what} is not a conversation: {problem}; give a JSON list of messages, each with a text as role and as \
             content"
    )]
    Conversation { what: String, problem: String },

    #[error(
        "the last message with the template and system prompt has {tokens} tokens, but the context holds {context}; shorten \
             the message, or raise --context"
    )]
    TurnBeyondContext { tokens: usize, context: usize },

    #[error("token {id} is not in the vocabulary of {tokens} tokens; check that the ids belong to this model")]
    NoSuchToken { id: u32, tokens: usize },

    /// An unusable file, or line of a file.
    #[error("{place}: {problem}")]
    Data { place: String, problem: String },

    #[error("a message is empty; type one, or give --message TEXT")]
    EmptyMessage,

    #[error("the line editor failed")]
    Editor(#[source] rustyline::error::ReadlineError),

    #[error("cannot watch for Ctrl-C")]
    Signal(#[source] io::Error),

    /// Interrupted by the user. Exit code 130, the shell convention for SIGINT.
    #[error("interrupted")]
    Interrupted,

    #[error("cannot write to standard output")]
    Stdout(#[source] io::Error),

    #[error(transparent)]
    Plan(#[from] PlanError),

    /// The plan does not fit, as already printed. Exit code 3.
    #[error("it does not fit")]
    DoesNotFit,

    #[error(transparent)]
    Serve(#[from] ServeError),

    #[error(transparent)]
    Load(#[from] LoadError),

    #[error("none of {requests} succeeded; see the report for the reasons")]
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
    /// Whether the reader of standard output closed it, which is not an error.
    pub(crate) fn reader_left(&self) -> bool {
        matches!(self, Self::Stdout(cause) if cause.kind() == io::ErrorKind::BrokenPipe)
    }

    /// Whether the command has already reported this as its result.
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

/// Translates the library's errors to the names of the command line.
impl From<ridge::Error> for Error {
    fn from(error: ridge::Error) -> Self {
        match error {
            ridge::Error::Memory { what, needed, available, smaller, or_on_host } => {
                let remedy = match smaller {
                    Smaller::Model => "use a smaller model, or --format q8_0",
                    Smaller::Cache => "lower --context, or use --cache-dtype bf16 or int8",
                    Smaller::Chunk => "lower --chunk",
                    Smaller::Limit => "raise --gpu-memory, lower --context, or lower --chunk",
                    Smaller::Host => "raise --gpu-memory, or use a smaller model",
                };
                let remedy = match available.0 >> 30 {
                    gib @ 1.. if or_on_host => {
                        format!("{remedy}, keep weights in host memory with --gpu-memory {gib}GiB, or use --device cpu")
                    }
                    _ => remedy.to_owned(),
                };
                Self::Memory { what, needed, available, remedy }
            }
            ridge::Error::Kind { model, wanted } => refused("--model", model, &format!("is not a {wanted}")),
            error @ ridge::Error::NoPredictions { .. } => refused("--speculate", "mtp", &format!("{error}")),
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

#[cfg(test)]
mod tests {
    use ridge_hw::units::Bytes;

    use super::*;

    #[test]
    fn a_limit_of_gpu_memory_is_suggested_in_whole_gibibytes() {
        let said = |available: u64, or_on_host: bool| {
            let (what, needed) = ("the weights", Bytes(1 << 40));
            let smaller = Smaller::Model;
            Error::from(ridge::Error::Memory { what, needed, available: Bytes(available), smaller, or_on_host })
                .to_string()
        };
        assert!(said(5 << 29, true).contains("--gpu-memory 2GiB"), "{}", said(5 << 29, true));
        for other in [said((1 << 30) - 1, true), said(5 << 29, false)] {
            assert!(other.contains("--format q8_0") && !other.contains("--gpu-memory"), "{other}");
        }
    }
}

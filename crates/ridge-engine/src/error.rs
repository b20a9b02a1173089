//! The crate's error.

use ridge_runtime::RuntimeError;
use ridge_text::TextError;

/// Why a request, or the engine, cannot continue.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// A setting out of range.
    #[error("{name} = {value}: {why}")]
    Setting {
        /// The setting.
        name: &'static str,
        /// Its value.
        value: String,
        /// What it must be.
        why: String,
    },
    /// A prompt without tokens.
    #[error("the prompt has no tokens, and the model has no begin token; give a prompt")]
    EmptyPrompt,
    /// A token that the model does not have.
    #[error(
        "token {token} of the prompt is outside the model's vocabulary of {vocab}; check that the tokenizer belongs to this model"
    )]
    UnknownToken {
        /// The token.
        token: u32,
        /// Rows of the model's output.
        vocab: usize,
    },
    /// A prompt that leaves no room.
    #[error(
        "the prompt has {prompt} tokens and the context holds {context}, which leaves no room to generate; shorten the prompt or raise the context"
    )]
    PromptTooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens of the context.
        context: usize,
    },
    /// No free cache blocks.
    #[error(
        "the cache has no free block for another {tokens} tokens of the sequence; raise the context or run fewer sequences"
    )]
    CacheFull {
        /// Tokens that were to be stored.
        tokens: usize,
    },
    /// Logits that no token can be chosen from.
    #[error(
        "the model's output is not finite after {position} tokens; the weights are damaged, or values overflow in this dtype: \
         download them again, or compute in a wider one"
    )]
    NotFinite {
        /// Tokens of the sequence that they follow.
        position: usize,
    },
    /// The device or a graph.
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    /// The tokenizer.
    #[error(transparent)]
    Text(#[from] TextError),
}

/// Results of this crate.
pub type Result<T, E = EngineError> = std::result::Result<T, E>;

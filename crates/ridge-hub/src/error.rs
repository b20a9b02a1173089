//! The errors of downloads.

use std::path::PathBuf;

/// The result of asking the Hub.
pub type Result<T, E = HubError> = std::result::Result<T, E>;

/// Why a model could not be downloaded. Files that arrived whole are kept, and so is the beginning of others.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// A setting of the environment cannot be used.
    #[error("{name} = {value:?}: {why}")]
    Setting {
        /// The variable.
        name: &'static str,
        /// Its value.
        value: String,
        /// What is wrong, and what to do.
        why: String,
    },

    /// The server does not have the model, or does not show it.
    #[error("{model}: {endpoint} has no such model, or it is not visible {}; check the name", if *.with_token {
        "to the owner of this token"
    } else {
        "without a token (HF_TOKEN)"
    })]
    NoModel {
        /// The model.
        model: String,
        /// The server.
        endpoint: String,
        /// Was a token sent?
        with_token: bool,
    },

    /// The model has no such branch, tag or commit.
    #[error("{model}: there is no revision {revision}; the model's page lists branches and tags: {endpoint}/{model}")]
    NoRevision {
        /// The model.
        model: String,
        /// What was asked for.
        revision: String,
        /// The server.
        endpoint: String,
    },

    /// The owner of the model decides who may download it.
    #[error(
        "{model}: access is restricted; request it at {endpoint}/{model}, then set HF_TOKEN to a token of your account"
    )]
    Gated {
        /// The model.
        model: String,
        /// The server.
        endpoint: String,
    },

    /// The server refuses the token.
    #[error(
        "{endpoint} rejects the token in HF_TOKEN or in the token file; create a new one at {endpoint}/settings/tokens"
    )]
    Token {
        /// The server.
        endpoint: String,
    },

    /// Offline, and the model is not in the cache.
    #[error("{model}: not in the cache {}, and HF_HUB_OFFLINE is set; unset it to download the model", cache.display())]
    Offline {
        /// The model.
        model: String,
        /// The folder of downloaded models.
        cache: PathBuf,
    },

    /// Offline, and the file is on a server.
    #[error("{url}: it is on a server, and HF_HUB_OFFLINE is set; unset it, or download the file and give its path")]
    OfflineFile {
        /// What was to be read.
        url: String,
    },

    /// The file at a URL is another than at first.
    #[error(
        "{url}: the file changed on the server while it was read; read it again from the beginning, or download it first"
    )]
    Changed {
        /// What was read.
        url: String,
    },

    /// None of the model's files is chosen, or too many are.
    #[error("{model}: {problem}")]
    Selection {
        /// The model.
        model: String,
        /// What is wrong, and what to do.
        problem: String,
    },

    /// A request failed, several times where another attempt may help.
    #[error("{url}: {problem}; run the command again to resume")]
    Request {
        /// What was asked for.
        url: String,
        /// What the server or the network said.
        problem: String,
    },

    /// The server's answer makes no sense.
    #[error("{url}: this is not a response of the Hugging Face Hub: {problem}; check HF_ENDPOINT")]
    Answer {
        /// What was asked for.
        url: String,
        /// What is wrong with it.
        problem: String,
    },

    /// What arrived is not what the server promised.
    #[error("{file}: the checksum is {is} but should be {should}; the download was deleted, run the command again")]
    Checksum {
        /// The file of the model.
        file: String,
        /// Of what arrived.
        is: String,
        /// What the Hub names.
        should: String,
    },

    /// The operating system refused an operation.
    #[error("{}: cannot {action}: {cause}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was tried, continuing "cannot".
        action: &'static str,
        /// The operating system's answer.
        cause: std::io::Error,
    },

    /// Another file failed first.
    #[error("cancelled because another file failed")]
    GivenUp,
}

//! Downloads models from the Hugging Face Hub, or from a server that speaks as it does, into the cache that
//! `huggingface_hub` and other tools share.
//!
//! [`pull`] asks which files a revision has (`listing`), chooses those that Ridge reads (`selection`), and downloads several at
//! a time (`download`): each to `blobs/CHECKSUM.incomplete`, continued where an earlier attempt ended, and renamed once its
//! checksum is right. The reference to the revision is written last, so a model that is found by name is complete. `client`
//! makes requests, `settings` reads the environment.
//!
//! ```no_run
//! use ridge_hub::{HubSettings, PullRequest, pull};
//!
//! let request = PullRequest::new("Qwen/Qwen3-0.6B".parse()?);
//! let pulled = pull(&request, &HubSettings::from_environment()?, &mut ())?;
//! println!("{}", pulled.folder.display());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod client;
mod download;
mod error;
mod listing;
mod pull;
mod selection;
mod settings;

pub use error::{HubError, Result};
pub use pull::{PullObserver, PullRequest, Pulled, pull};
pub use settings::HubSettings;

pub use ridge_files::hub::{HubCache, HubModel};

//! Downloads models from the Hugging Face Hub, or a compatible server, into the cache that `huggingface_hub` and other tools share.
//!
//! [`pull`] lists the files of a revision (`listing`), selects those that Ridge reads (`selection`), and downloads several in
//! parallel (`download`): each to `blobs/CHECKSUM.incomplete`, resumed where an earlier attempt stopped, and renamed once its
//! checksum is verified. The reference to the revision is written last, so a model that is found by name is complete. `client` sends
//! requests, `ranges` reads parts of a file at any URL, `settings` reads the environment. `json` talks JSON with any other server: those
//! that training runs are reported to.
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
mod json;
mod listing;
mod pull;
mod ranges;
mod selection;
mod settings;

pub use error::{HubError, Result};
pub use json::{Credentials, JsonClient, JsonError, host_of, path_segment};
pub use pull::{PullObserver, PullRequest, Pulled, pull};
pub use ranges::{RangedFile, RangedStream};
pub use settings::HubSettings;

pub use ridge_files::hub::{HubCache, HubModel};

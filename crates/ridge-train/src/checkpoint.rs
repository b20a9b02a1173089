//! Checkpoints: folders `step-00001000` that are complete or not there.
//!
//! A checkpoint is written to a hidden folder beside the others, every file and then the folder synchronised with the disk, and
//! renamed. `write` does so on a thread of its own; `read` finds and verifies one; `retain` removes those that no rule keeps.

mod info;
mod read;
mod retain;
mod tensors;
mod write;

pub use info::{CheckpointInfo, INFO_FILE, STATE_FILE};
pub use read::{SavedState, latest, numbered, open};
pub use retain::retain;
pub(crate) use tensors::tensor_bytes;
pub use tensors::{SavedTensor, TensorFile, write_tensors};
pub use write::{CheckpointWriter, Snapshot, write_checkpoint};
pub(crate) use write::{sync_folder, write_text};

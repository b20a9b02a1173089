//! What happens in a run, and the files it is logged to.

mod event;
mod files;
mod jsonl;
mod tensorboard;

pub use event::{StepReport, TrainEvent};
pub use files::Logs;
pub use jsonl::JsonLines;
pub use tensorboard::{EventFile, crc32c};

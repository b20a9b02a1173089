//! What happens in a run, the files it is logged to, and the servers it is reported to.

mod event;
mod files;
mod jsonl;
mod mlflow;
mod numbers;
mod protobuf;
mod remote;
mod tensorboard;
mod wandb;

pub use event::{RunEnded, StepReport, TrainEvent};
pub(crate) use files::LOG;
pub use files::Logs;
pub use jsonl::JsonLines;
pub use mlflow::MlflowRun;
pub use protobuf::crc32c;
pub use tensorboard::EventFile;
pub use wandb::WandbRun;

//! What happens in a run, and the files it is logged to.

mod event;
mod files;
mod jsonl;
mod mlflow;
mod numbers;
mod protobuf;
mod tensorboard;
mod wandb;

pub use event::{RunEnded, StepReport, TrainEvent};
pub use files::Logs;
pub use jsonl::JsonLines;
pub use mlflow::MlflowRun;
pub use protobuf::crc32c;
pub use tensorboard::EventFile;
pub use wandb::WandbRun;

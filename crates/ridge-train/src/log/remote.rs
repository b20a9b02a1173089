//! Servers that a run is reported to while it lasts: `queue` sends behind the back of training, `mlflow` and `wandb` are what
//! is sent, `credentials` finds on whose behalf.

mod credentials;
mod mlflow;
mod queue;
mod wandb;

pub(super) use credentials::Environment;
pub(super) use mlflow::MlflowServer;
pub(super) use queue::{Delivery, Pace, Row};
pub(super) use wandb::{WandbMode, WandbServer};

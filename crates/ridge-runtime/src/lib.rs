//! Backends and compiled programs: the traits every device implements, memory and the compile pipeline.
//!
//! Read `backend` first (what a device is), then `lower` (graph to groups that kernels run), `plan` (groups to
//! launches at places in memory) and `session` (weights, states and programs of one model on one device).
//! `late` is a backend for tests that completes as late as the contract allows.

mod backend;
mod error;
pub mod late;
mod lower;
mod mesh;
mod plan;
mod session;

pub use backend::{Backend, Buffer, LaunchTime, Program, Run, WeightData};
pub use error::{Result, RuntimeError};
pub use lower::{lower, lower_for};
pub use mesh::Collectives;
pub use plan::{Place, Plan, PlannedKernel, PlannedLaunch, Region, component_offsets, plan};
pub use session::{Bucket, Compiled, Session};

//! Backends and compiled programs: the traits every device implements, memory and the compile pipeline.
//!
//! Read `backend` first (what a device is), then `lower` (graph to groups that kernels run), `alias` (values that share
//! memory), `launches` and `plan` (groups to launches at places in memory), `lanes` (launches that communicate while others compute), `param` (memory that outlives a step), `layout` (how it
//! lies), `steps` (steps of one bucket in
//! flight) and `order` (steps of a device), `program` (a graph bound to parameters), `program_cache` (graphs that were compiled, and why) and `session` (parameters and programs of
//! models on one device). `mesh` is how ranks communicate and `ranks` several of them as one backend. `memory` is the ledger of what a backend allocates, `snapshot` what a step has in memory.
//! `late` is a backend for tests that completes as late as the contract allows.

mod alias;
mod backend;
mod error;
mod lanes;
pub mod late;
mod launches;
mod layout;
mod lower;
mod memory;
mod mesh;
mod order;
mod param;
mod plan;
mod program;
mod program_cache;
mod ranks;
mod schedule;
mod session;
mod snapshot;
mod steps;

pub use backend::{Backend, Buffer, LaunchTime, Program, Run, SLOTS, Staged, WeightData};
pub use error::{Result, RuntimeError};
pub use launches::{Place, Plan, PlannedKernel, PlannedLaunch, Region, component_offsets};
pub use lower::{lower, lower_for};
pub use memory::{MemoryBytes, MemoryCharge, MemoryLedger, MemoryOwner, MemoryUse};
pub use mesh::{CollectiveError, Collectives};
pub use order::StepOrder;
pub use param::{ParamVersions, Refresh};
pub use plan::plan;
pub use program::{Bucket, Compiled};
pub use program_cache::{CachedProgram, CompileReason, ProgramCache};
pub use ranks::Ranks;
pub use schedule::{BoundSchedule, Schedule, ScheduleDriver, Stage, StageInputs, StageOutputs, Times};
pub use session::{Recipe, Session};
pub use snapshot::{LiveValue, MemorySnapshot, NamedBytes, memory_snapshot};
pub use steps::{Slot, Steps, Ticket};

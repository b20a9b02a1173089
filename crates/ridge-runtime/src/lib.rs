//! Backends and compiled programs: the traits that every device implements, memory, and the compile pipeline.
//!
//! Read `backend` first (the device interface), then `lower` (from the graph to groups that kernels run), `alias` (values that share
//! memory), `launches` and `plan` (from groups to launches with memory offsets), `lanes` (collectives that overlap with
//! computation), `param` (memory that outlives a step), `layout` (parameter layouts), `steps` (steps of one bucket in flight),
//! `order` (steps of a device), `program` (a graph bound to parameters), `program_cache` (compiled graphs) and `session` (parameters
//! and programs of models on one device). `mesh` has the communication between ranks, `ranks` several ranks as one backend. `memory`
//! is the ledger of a backend's allocations, `snapshot` lists the memory contents of a step. `late` is a backend for tests that
//! completes as late as the contract allows.

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

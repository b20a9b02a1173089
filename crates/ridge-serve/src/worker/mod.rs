//! The one thread that owns the engine, and how requests reach it.
//!
//! The thread never waits for a client: requests come by a channel that it looks into between steps, and tokens leave by
//! a bounded channel for each request. A request whose channel is full is cut. If the thread panics, every channel is
//! dropped, so that every request that waits is told, and [`Worker::health`] says so from then on.

mod activity;
mod handle;
mod live;
mod masks;
mod protocol;
mod runner;
mod shared;

pub(crate) use handle::{EngineHealth, JobTicket, Worker, stopped};
pub use protocol::Floor;
pub(crate) use protocol::{JobEvent, MAX_PENDING_EVENTS};

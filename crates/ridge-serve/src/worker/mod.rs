//! The one thread that owns the engine, and how requests reach it.
//!
//! The thread never waits for a client: it polls a request channel between steps and sends tokens to a bounded channel per
//! request. A request whose channel is full is aborted. If the thread panics, every channel is dropped, so every waiting
//! request fails, and [`Worker::health`] reports it from then on.

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

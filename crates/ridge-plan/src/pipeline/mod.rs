//! Pipeline schedules, event by event: who computes what when, how much of the time is lost, and what is kept alive.
//!
//! A [`Pipeline`] has stages (of equal or of different times), micro-batches and a [`Schedule`]. [`Pipeline::simulate`]
//! gives each pass its start and end; [`Timeline`] sums them up and draws them. [`bubble`] has the closed forms that a
//! search can afford, each held against the simulation by a test.

mod bubble;
mod draw;
mod greedy;
mod in_order;
mod orders;
mod schedule;
mod simulate;
mod stages;
#[cfg(test)]
mod tests;
mod timeline;

pub use bubble::bubble;
pub use schedule::Schedule;
pub use stages::{Pass, PassKind, Pipeline, Stage};
pub use timeline::{DeviceUse, PassEvent, Timeline};

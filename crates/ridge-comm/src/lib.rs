//! Ranks of a mesh that communicate over the memory of hosts, and how a lost rank is found.
//!
//! Read in this order:
//!
//! ```text
//! health              what is known of a group; waiting
//! loopback            ranks within one process
//! link                byte streams between ranks, and exchanges over them
//! shared_memory, tcp  the streams
//! lines, watch        signs of life between processes, and who is lost
//! settings, cluster   how ranks that are processes meet and part
//! ```

mod cluster;
mod error;
mod health;
mod lines;
mod link;
mod loopback;
mod settings;
mod shared_memory;
mod tcp;
mod watch;

pub use cluster::Cluster;
pub use error::CommError;
pub use loopback::Loopback;
pub use settings::{JoinSettings, Transport, variables};

//! Why ranks could not meet.

use std::io;
use std::time::Duration;

/// Why a rank could not join the others.
#[derive(Debug, thiserror::Error)]
pub enum CommError {
    /// A setting that makes no sense.
    #[error("{name} = {value:?}: {why}")]
    Setting {
        /// Which one.
        name: &'static str,
        /// Its value.
        value: String,
        /// What is wrong with it.
        why: String,
    },
    /// Rank 0 cannot listen where the ranks meet.
    #[error("rank 0 cannot listen on the rendezvous address {address}; choose a free port of this machine")]
    Listen {
        /// The address.
        address: String,
        /// What the system says.
        #[source]
        cause: io::Error,
    },
    /// Rank 0 was not found where the ranks meet.
    #[error("rank {rank} could not reach rank 0 at {address} within {} s; check that it runs and that the address is reachable", waited.as_secs())]
    NoMeeting {
        /// This rank.
        rank: usize,
        /// The address.
        address: String,
        /// How long it tried.
        waited: Duration,
        /// What the system says.
        #[source]
        cause: io::Error,
    },
    /// Some ranks did not come.
    #[error("of {ranks} ranks, {} did not join within {} s; check that they were started with the same address", list(absent), waited.as_secs())]
    Absent {
        /// How many ranks there are to be.
        ranks: usize,
        /// Those that did not come.
        absent: Vec<usize>,
        /// How long they were waited for.
        waited: Duration,
    },
    /// Rank 0 does not take this rank.
    #[error("rank 0 rejects rank {rank}: {why}")]
    Refused {
        /// This rank.
        rank: usize,
        /// Why.
        why: String,
    },
    /// A connection between ranks failed while they met.
    #[error("rank {rank} cannot {what}")]
    Connection {
        /// This rank.
        rank: usize,
        /// What it was about to do.
        what: String,
        /// What the system says.
        #[source]
        cause: io::Error,
    },
}

fn list(ranks: &[usize]) -> String {
    let numbers: Vec<String> = ranks.iter().map(ToString::to_string).collect();
    format!("{} {}", if ranks.len() == 1 { "rank" } else { "ranks" }, numbers.join(", "))
}

//! Communication between the ranks of a mesh axis over the memory of hosts, as backends use it.

/// One rank's end of a group of ranks. Every rank makes the same exchanges in the same order, from one thread at a time.
pub trait Collectives: Send + Sync {
    /// Number of ranks.
    fn ranks(&self) -> usize;

    /// This rank.
    fn rank(&self) -> usize;

    /// Sends `send[r]` to rank `r` and receives `receive[r]` from it, this rank's own included. All collectives are made
    /// of exchanges. `what` says what the exchange is for, such as `all_reduce(f32[24, 64])`: ranks whose exchanges of
    /// the same number are for different things learn of it instead of exchanging.
    ///
    /// # Errors
    /// When ranks exchange different things, a rank was lost or gave up, or the group was aborted. The group is of no
    /// use afterwards: what the ranks have exchanged is not known.
    ///
    /// # Panics
    /// When `send` or `receive` has not one slice for each rank.
    fn exchange(&self, what: &str, send: &[&[u8]], receive: &mut [&mut [u8]]) -> Result<(), CollectiveError>;

    /// Fails what ranks are exchanging and will exchange, with this reason.
    fn abort(&self, why: &str);

    /// Why the group is of no use any more, if that is known: for those who communicate by other ways too.
    fn failure(&self) -> Option<CollectiveError> {
        None
    }
}

/// Why ranks could not exchange.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CollectiveError {
    /// Ranks do different things.
    #[error(
        "collective {number} differs between ranks: rank {rank} calls {mine}, and rank {other} {theirs}; every rank \
         must call the same collectives in the same order"
    )]
    Mismatch {
        /// Which exchange it is, from 1.
        number: u64,
        /// The rank that found it.
        rank: usize,
        /// What that rank calls.
        mine: String,
        /// The other rank.
        other: usize,
        /// What the other rank calls.
        theirs: String,
    },
    /// A rank is gone or does not answer.
    #[error("rank {rank} was lost: {why}")]
    Lost {
        /// The rank.
        rank: usize,
        /// How that is known.
        why: String,
    },
    /// Somebody gave the group up.
    #[error("{why}")]
    Aborted {
        /// Why.
        why: String,
    },
}

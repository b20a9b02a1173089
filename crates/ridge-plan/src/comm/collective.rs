//! Collectives, their algorithms, and the time of one.

use std::fmt;

use serde::Serialize;

use super::link::Protocol;

/// What is communicated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Collective {
    /// Each rank gets the sum of all ranks' buffers.
    AllReduce,
    /// Each rank gets all ranks' parts.
    AllGather,
    /// Each rank gets its part of the sum.
    ReduceScatter,
    /// Each rank gets its part of each rank's buffer.
    AllToAll,
    /// Each rank gets one rank's buffer.
    Broadcast,
    /// One rank gets another's buffer.
    SendRecv,
}

impl Collective {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::AllReduce, Self::AllGather, Self::ReduceScatter, Self::AllToAll, Self::Broadcast, Self::SendRecv];

    /// The name that is typed.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all-reduce",
            Self::AllGather => "all-gather",
            Self::ReduceScatter => "reduce-scatter",
            Self::AllToAll => "all-to-all",
            Self::Broadcast => "broadcast",
            Self::SendRecv => "send-recv",
        }
    }

    /// Bus bytes of a byte of buffer: what nccl-tests multiplies its bandwidth by.
    pub fn bus_factor(self, ranks: usize) -> f64 {
        let n = ranks as f64;
        match self {
            Self::AllReduce => 2.0 * (n - 1.0) / n,
            Self::AllGather | Self::ReduceScatter | Self::AllToAll => (n - 1.0) / n,
            Self::Broadcast | Self::SendRecv => 1.0,
        }
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// By which ways.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CollectiveAlgorithm {
    /// Round a ring, each link carrying as little as can be (Patarasu and Yuan 2009).
    Ring,
    /// Up and down a binary tree: few hops, an inner rank's link carries three buffers.
    Tree,
    /// Two trees, the inner ranks of one being the leaves of the other (Sanders, Speck and Traeff 2009).
    DoubleTree,
    /// With partners at distances 1, 2, 4 ... (Thakur, Rabenseifner and Gropp 2005).
    HalvingDoubling,
    /// Every rank to every rank at once; as an all-reduce, each rank sums all buffers.
    OneShot,
    /// The switch adds and copies (NVLink SHARP).
    InNetwork,
    /// Scattered in nodes, summed between them, gathered in nodes.
    Hierarchical,
}

impl CollectiveAlgorithm {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Ring,
        Self::Tree,
        Self::DoubleTree,
        Self::HalvingDoubling,
        Self::OneShot,
        Self::InNetwork,
        Self::Hierarchical,
    ];

    /// Those of NCCL where switches do not add.
    pub const NCCL: [Self; 3] = [Self::Ring, Self::DoubleTree, Self::OneShot];

    /// The name that is typed.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ring => "ring",
            Self::Tree => "tree",
            Self::DoubleTree => "double-tree",
            Self::HalvingDoubling => "halving-doubling",
            Self::OneShot => "one-shot",
            Self::InNetwork => "in-network",
            Self::Hierarchical => "hierarchical",
        }
    }
}

impl fmt::Display for CollectiveAlgorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The time of one collective.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CollectiveEstimate {
    /// By which ways.
    pub algorithm: CollectiveAlgorithm,
    /// In which protocol.
    pub protocol: Protocol,
    /// Seconds of the GPU.
    pub seconds: f64,
    /// Of these, launch and hops.
    pub latency: f64,
    /// Hops that follow one another.
    pub steps: usize,
    /// Bytes that the busiest link carries one way.
    pub wire: f64,
    /// Bytes per second of that link.
    pub rate: f64,
}

impl CollectiveEstimate {
    /// Bus bandwidth as nccl-tests defines it, in bytes per second.
    pub fn bus_bandwidth(&self, collective: Collective, bytes: f64, ranks: usize) -> f64 {
        if self.seconds > 0.0 { collective.bus_factor(ranks) * bytes / self.seconds } else { 0.0 }
    }
}

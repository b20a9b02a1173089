//! Nodes of GPUs and the network between them, and the time of a collective over a group of their ranks.

use serde::Serialize;

use super::collective::{Collective, CollectiveAlgorithm, CollectiveEstimate};
use super::link::{Link, Protocol, TABLE};

/// Links in a node and between nodes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fabric {
    /// Between GPUs of a node.
    pub inside: Link,
    /// GPUs of a node.
    pub node: usize,
    /// Each GPU's port to other nodes.
    pub outside: Link,
    /// Do the switches of a node add?
    pub in_network: bool,
}

/// Ranks that communicate, `stride` apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RankGroup {
    /// How many.
    pub ranks: usize,
    /// From one to the next.
    pub stride: usize,
}

impl RankGroup {
    /// Neighbours.
    pub fn of(ranks: usize) -> Self {
        Self { ranks, stride: 1 }
    }
}

/// A path with the hops and bytes of one algorithm.
struct Path {
    base: f64,
    /// Hops in a node and between nodes.
    hops: [usize; 2],
    wire: f64,
    /// Bytes per second, protocols aside.
    rate: f64,
    /// Is the slowest link between nodes?
    outside: bool,
}

/// Steps of a tree over `n`.
fn depth(n: usize) -> usize {
    n.max(1).next_power_of_two().trailing_zeros() as usize
}

impl Fabric {
    /// Ranks of a group in one node, and nodes that it touches.
    fn split(&self, group: RankGroup) -> (usize, usize) {
        let local = (self.node / group.stride.max(1)).clamp(1, group.ranks.max(1));
        (local, group.ranks.div_ceil(local))
    }

    /// Rate of the busiest link where all ranks of a node have ports of their own and share their node's traffic, and
    /// whether it is one between nodes.
    fn rate(&self, local: usize, nodes: usize) -> (f64, bool) {
        let ports = self.outside.rate * local as f64;
        if nodes > 1 && (ports < self.inside.rate || local == 1) { (ports, true) } else { (self.inside.rate, false) }
    }

    /// `collective` of `bytes` over `group` by `algorithm` in `protocol`; `None` where there is no such thing. One rank
    /// takes no time.
    pub fn estimate(
        &self,
        collective: Collective,
        bytes: f64,
        group: RankGroup,
        algorithm: CollectiveAlgorithm,
        protocol: Protocol,
    ) -> Option<CollectiveEstimate> {
        if group.ranks <= 1 {
            return Some(CollectiveEstimate {
                algorithm,
                protocol,
                seconds: 0.0,
                latency: 0.0,
                steps: 0,
                wire: 0.0,
                rate: self.inside.rate,
            });
        }
        if algorithm == CollectiveAlgorithm::Hierarchical {
            return self.hierarchical(collective, bytes, group, protocol);
        }
        let path = self.path(collective, bytes, group, algorithm)?;
        let p = protocol as usize;
        if algorithm == CollectiveAlgorithm::InNetwork && protocol != Protocol::Simple {
            return None;
        }
        let base = if path.base > 0.0 { path.base } else { TABLE.base[p] };
        let latency = base + path.hops[0] as f64 * self.inside.hop[p] + path.hops[1] as f64 * self.outside.hop[p];
        let share = match algorithm {
            CollectiveAlgorithm::InNetwork => TABLE.in_network.1,
            _ if path.outside => self.outside.share[p],
            _ => self.inside.share[p],
        };
        let rate = path.rate * share;
        let steps = path.hops[0] + path.hops[1];
        let seconds = latency + path.wire / rate;
        Some(CollectiveEstimate { algorithm, protocol, seconds, latency, steps, wire: path.wire, rate })
    }

    fn path(
        &self,
        collective: Collective,
        bytes: f64,
        group: RankGroup,
        algorithm: CollectiveAlgorithm,
    ) -> Option<Path> {
        let (local, nodes) = self.split(group);
        let (ranks, n) = (group.ranks, group.ranks as f64);
        let (rate, outside) = self.rate(local, nodes);
        let of = |hops: [usize; 2], wire: f64| Path { base: 0.0, hops, wire, rate, outside };
        let part = (n - 1.0) / n * bytes;
        // Once round a ring, a chain in each node and a tree over nodes, and partners at growing distances.
        let round = if nodes > 1 { [ranks - nodes, nodes - 1] } else { [ranks - 1, 0] };
        let tree = if nodes > 1 { [depth(local), depth(nodes)] } else { [depth(ranks), 0] };
        let twice = |h: [usize; 2]| [2 * h[0], 2 * h[1]];
        let whole = ranks.is_power_of_two();
        Some(match (collective, algorithm) {
            (Collective::AllReduce, CollectiveAlgorithm::Ring) => of(twice(round), 2.0 * part),
            (Collective::AllGather | Collective::ReduceScatter, CollectiveAlgorithm::Ring) => of(round, part),
            (Collective::Broadcast, CollectiveAlgorithm::Ring) => of(round, bytes),
            // An inner rank takes two children's sums and its parent's total.
            (Collective::AllReduce, CollectiveAlgorithm::Tree) => {
                of(twice(tree), if ranks == 2 { bytes } else { 3.0 * bytes })
            }
            (Collective::Broadcast, CollectiveAlgorithm::Tree) => {
                of(tree, if ranks == 2 { bytes } else { 2.0 * bytes })
            }
            (Collective::AllReduce, CollectiveAlgorithm::DoubleTree) => of(twice(tree), 2.0 * bytes),
            (Collective::Broadcast, CollectiveAlgorithm::DoubleTree) => of(tree, bytes),
            (Collective::AllReduce, CollectiveAlgorithm::HalvingDoubling) if nodes > 1 => {
                self.halving(2.0 * bytes, group).map(|p| Path { hops: twice(p.hops), ..p })?
            }
            (Collective::AllGather | Collective::ReduceScatter, CollectiveAlgorithm::HalvingDoubling) if nodes > 1 => {
                self.halving(bytes, group)?
            }
            (Collective::AllReduce, CollectiveAlgorithm::HalvingDoubling) => {
                // Ranks beyond a power of two give their buffers to others before, and get the sums behind.
                let power = if whole { ranks } else { ranks.next_power_of_two() / 2 };
                let p = power as f64;
                let (steps, wire) = (2 * depth(power), 2.0 * (p - 1.0) / p * bytes);
                if whole { of([steps, 0], wire) } else { of([steps + 2, 0], wire + 2.0 * bytes) }
            }
            (Collective::AllGather | Collective::ReduceScatter, CollectiveAlgorithm::HalvingDoubling) if whole => {
                of(tree, part)
            }
            (Collective::AllReduce, CollectiveAlgorithm::OneShot) => {
                let path = self.direct((n - 1.0) * bytes, group);
                Path { base: TABLE.one_shot, ..path }
            }
            (
                Collective::AllToAll | Collective::AllGather | Collective::ReduceScatter,
                CollectiveAlgorithm::OneShot,
            ) => self.direct(part, group),
            (Collective::SendRecv, CollectiveAlgorithm::OneShot) => {
                let away = usize::from(nodes > 1);
                let rate = if nodes > 1 { self.outside.rate } else { self.inside.rate };
                Path { base: 0.0, hops: [1 - away, away], wire: bytes, rate, outside: nodes > 1 }
            }
            (Collective::AllReduce, CollectiveAlgorithm::InNetwork) if self.in_network && nodes == 1 => {
                Path { base: TABLE.in_network.0, ..of([2, 0], (n + 1.0) / n * bytes) }
            }
            (Collective::AllGather | Collective::ReduceScatter, CollectiveAlgorithm::InNetwork)
                if self.in_network && nodes == 1 =>
            {
                // The switch copies what a rank sends once, or adds what a rank gets once: the other way carries all.
                Path { base: TABLE.in_network.0, ..of([1, 0], bytes) }
            }
            _ => return None,
        })
    }

    /// Halving of `bytes` in a node and then between nodes, or doubling the other way: one link waits for the other.
    fn halving(&self, bytes: f64, group: RankGroup) -> Option<Path> {
        let (local, nodes) = self.split(group);
        if !(local.is_power_of_two() && nodes.is_power_of_two() && local * nodes == group.ranks) {
            return None;
        }
        let inner = bytes * (1.0 - 1.0 / local as f64);
        let outer = bytes / local as f64 * (1.0 - 1.0 / nodes as f64);
        let rate = (inner + outer) / (inner / self.inside.rate + outer / self.outside.rate);
        Some(Path { base: 0.0, hops: [depth(local), depth(nodes)], wire: inner + outer, rate, outside: true })
    }

    /// All ranks to all, `sent` bytes of each: what stays in the node and what leaves it go at once.
    fn direct(&self, sent: f64, group: RankGroup) -> Path {
        let (local, nodes) = self.split(group);
        let others = (group.ranks - 1) as f64;
        let inner = sent * (local - 1) as f64 / others;
        let outer = sent - inner;
        let outside = nodes > 1 && outer / self.outside.rate > inner / self.inside.rate;
        let (wire, rate) = if outside { (outer, self.outside.rate) } else { (inner, self.inside.rate) };
        Path { base: 0.0, hops: if nodes > 1 { [0, 1] } else { [1, 0] }, wire, rate, outside }
    }

    /// A reduce-scatter in each node, the collective between nodes on a part, an all-gather in each node.
    fn hierarchical(
        &self,
        collective: Collective,
        bytes: f64,
        group: RankGroup,
        protocol: Protocol,
    ) -> Option<CollectiveEstimate> {
        let (local, nodes) = self.split(group);
        if nodes < 2 || local < 2 || local * nodes != group.ranks {
            return None;
        }
        let inner = RankGroup { ranks: local, stride: group.stride };
        let outer = RankGroup { ranks: nodes, stride: self.node };
        let part = bytes / local as f64;
        let ring = |c, bytes, group| self.estimate(c, bytes, group, CollectiveAlgorithm::Ring, protocol);
        let parts = match collective {
            Collective::AllReduce => {
                let across = [CollectiveAlgorithm::Ring, CollectiveAlgorithm::DoubleTree]
                    .into_iter()
                    .filter_map(|a| self.estimate(collective, part, outer, a, protocol))
                    .min_by(|a, b| a.seconds.total_cmp(&b.seconds));
                let scattered = ring(Collective::ReduceScatter, bytes, inner);
                vec![scattered?, across?, ring(Collective::AllGather, bytes, inner)?]
            }
            Collective::AllGather => vec![ring(collective, part, outer)?, ring(collective, bytes, inner)?],
            Collective::ReduceScatter => vec![ring(collective, bytes, inner)?, ring(collective, part, outer)?],
            Collective::AllToAll => {
                // First to the rank of the node that has the same place as the one it is for, then across.
                let direct = |b, g| self.estimate(collective, b, g, CollectiveAlgorithm::OneShot, protocol);
                vec![direct(bytes, inner)?, direct(bytes, outer)?]
            }
            Collective::Broadcast => vec![ring(collective, bytes, outer)?, ring(collective, bytes, inner)?],
            Collective::SendRecv => return None,
        };
        // One launch: parts follow one another in one kernel.
        let launches = (parts.len() - 1) as f64 * TABLE.base[protocol as usize];
        let sum = |of: fn(&CollectiveEstimate) -> f64| parts.iter().map(of).sum::<f64>();
        let busiest = parts.iter().max_by(|a, b| (a.seconds - a.latency).total_cmp(&(b.seconds - b.latency)))?;
        Some(CollectiveEstimate {
            algorithm: CollectiveAlgorithm::Hierarchical,
            protocol,
            seconds: sum(|p| p.seconds) - launches,
            latency: sum(|p| p.latency) - launches,
            steps: parts.iter().map(|p| p.steps).sum(),
            wire: busiest.wire,
            rate: busiest.rate,
        })
    }

    /// The quickest of `algorithms` in any protocol; `None` if none of them does `collective`.
    pub fn best(
        &self,
        collective: Collective,
        bytes: f64,
        group: RankGroup,
        algorithms: &[CollectiveAlgorithm],
    ) -> Option<CollectiveEstimate> {
        let mut best: Option<CollectiveEstimate> = None;
        for &algorithm in algorithms {
            for protocol in Protocol::ALL {
                if let Some(e) = self.estimate(collective, bytes, group, algorithm, protocol)
                    && best.is_none_or(|b| e.seconds < b.seconds)
                {
                    best = Some(e);
                }
            }
        }
        best
    }

    /// What NCCL would choose: in a node rings, between nodes double trees too, direct sends where nothing is summed.
    pub fn nccl(&self, collective: Collective, bytes: f64, group: RankGroup) -> Option<CollectiveEstimate> {
        let algorithms: &[CollectiveAlgorithm] = match collective {
            Collective::AllToAll | Collective::SendRecv => &[CollectiveAlgorithm::OneShot],
            Collective::AllReduce if self.split(group).1 > 1 => {
                &[CollectiveAlgorithm::Ring, CollectiveAlgorithm::DoubleTree]
            }
            _ => &[CollectiveAlgorithm::Ring],
        };
        let plain = self.best(collective, bytes, group, algorithms)?;
        if !self.in_network {
            return Some(plain);
        }
        let switch = self.estimate(collective, bytes, group, CollectiveAlgorithm::InNetwork, Protocol::Simple);
        Some(switch.filter(|s| s.seconds < plain.seconds).unwrap_or(plain))
    }

    /// Seconds a call takes in a loop of calls: the GPU's, or the host's where that is slower.
    pub fn called(&self, gpu_seconds: f64) -> f64 {
        gpu_seconds.max(TABLE.host)
    }

    /// The formula of an estimate with its numbers.
    pub fn explain(&self, e: &CollectiveEstimate) -> String {
        format!(
            "{:.1} us base and {} hops + {:.4e} B on the busiest link / {:.1} GB/s",
            e.latency * 1e6,
            e.steps,
            e.wire,
            e.rate / 1e9
        )
    }
}

//! The search for places, and what each axis has at given ones.

use std::cmp::Ordering;

use ridge_hw::topology::{Matrix, PathType};
use serde::Serialize;

use super::degrees::{Degrees, ParallelAxis};
use super::links::Rates;

/// A rank's place in its node.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Seat {
    /// Rank, counted from the node's first.
    pub rank: usize,
    /// Label of its GPU.
    pub gpu: String,
    /// NUMA node to run and to allocate on.
    pub numa: Option<usize>,
    /// CPUs to run on.
    pub cpus: Option<String>,
    /// Device of the network card that it sends through, if the matrix has any.
    pub nic: Option<String>,
    /// The way to that card.
    pub to_nic: Option<PathType>,
    /// Bytes per second to other nodes, one way.
    pub port: f64,
}

/// What an axis has.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AxisUse {
    /// Which.
    pub axis: ParallelAxis,
    /// Ranks of a group.
    pub degree: usize,
    /// Ranks of a group that share a node.
    pub in_node: usize,
    /// The longest way between ranks of a group in a node; `None` where none share one.
    pub way: Option<PathType>,
    /// Groups of a node that send between NUMA nodes at a time, and share that link.
    pub sharing: usize,
    /// Bytes per second of the slowest group, one way.
    pub rate: f64,
    /// Do the ranks of a group have the same place in all nodes, so that they send along one rail?
    pub rail: bool,
}

/// Ranks at their places.
#[derive(Clone, Debug, Serialize)]
pub struct RankPlacement {
    /// Placement within a node, by rank.
    pub seats: Vec<Seat>,
    /// What each axis above one has, the busiest first.
    pub axes: Vec<AxisUse>,
}

/// Up to so many ranks all rings are tried; beyond, each continues to the nearest that is left.
const ALL_RINGS: usize = 8;

/// Up to so many GPUs all orders are tried.
const ALL_ORDERS: usize = 8;

/// Are all ways between GPUs the same?
fn alike(matrix: &Matrix) -> bool {
    let mut ways = matrix.between.iter().flatten().filter(|w| **w != PathType::X);
    ways.next().is_none_or(|first| ways.all(|w| w == first))
}

/// A layout and a machine, before GPUs are chosen.
pub(super) struct PlacementSearch<'a> {
    pub(super) matrix: &'a Matrix,
    pub(super) rates: &'a Rates,
    pub(super) degrees: Degrees,
    /// Ranks of a node.
    pub(super) local: usize,
    pub(super) nodes: usize,
}

/// Ranks between neighbours, by the order of [`ParallelAxis::ALL`].
type Strides = [usize; 5];

/// The slowest group's rate, then the sum of all groups' times of a byte.
type Score = Vec<(f64, f64)>;

fn compare(a: &Score, b: &Score) -> Ordering {
    let differ = |x: f64, y: f64| (x - y).abs() > 1e-9 * x.abs().max(y.abs());
    for (&(rate, time), &(other_rate, other_time)) in a.iter().zip(b) {
        if differ(rate, other_rate) {
            return rate.total_cmp(&other_rate);
        }
        if differ(time, other_time) {
            return other_time.total_cmp(&time);
        }
    }
    Ordering::Equal
}

impl PlacementSearch<'_> {
    fn strides(&self) -> Strides {
        ParallelAxis::ALL.map(|axis| self.degrees.stride(axis))
    }

    fn strides_reversed(&self) -> Strides {
        let Degrees { pp, dp, cp, .. } = self.degrees;
        // tp, ep, cp, dp, pp.
        [pp * dp * cp, pp, pp * dp, pp, 1]
    }

    /// The GPUs that serve the axes best, the busiest first; of equals those with lower numbers.
    pub(super) fn best(&self) -> RankPlacement {
        let strides = self.strides();
        let mut best: Vec<usize> = (0..self.matrix.gpus.len()).collect();
        let mut score = self.score(&best, &strides);
        let mut consider = |gpus: &[usize]| {
            let found = self.score(gpus, &strides);
            if compare(&found, &score).is_gt() {
                (best, score) = (gpus.to_vec(), found);
            }
        };
        if alike(self.matrix) || self.matrix.gpus.len() > ALL_ORDERS {
            let all = (0..self.matrix.gpus.len()).collect();
            consider(&self.improved(all, &strides, Ordering::Greater));
            for first in 0..self.matrix.gpus.len() {
                consider(&self.improved(self.greedy(first), &strides, Ordering::Greater));
            }
        } else {
            let mut order: Vec<usize> = (0..self.matrix.gpus.len()).collect();
            self.orders(&mut order, 0, &mut consider);
        }
        self.placement(&best, &strides)
    }

    /// Visits all choices of GPUs for the places from `from` on, lower numbers first.
    fn orders(&self, order: &mut Vec<usize>, from: usize, visit: &mut impl FnMut(&[usize])) {
        if from == self.local {
            return visit(order);
        }
        for i in from..order.len() {
            let gpu = order.remove(i);
            order.insert(from, gpu);
            self.orders(order, from + 1, visit);
            let gpu = order.remove(from);
            order.insert(i, gpu);
        }
    }

    /// The best places of ranks that are numbered from the quietest axis.
    pub(super) fn reversed(&self) -> RankPlacement {
        let strides = self.strides_reversed();
        let all = (0..self.matrix.gpus.len()).collect();
        self.placement(&self.improved(all, &strides, Ordering::Greater), &strides)
    }

    /// The worst places.
    pub(super) fn shuffled(&self) -> RankPlacement {
        let strides = self.strides();
        let all = (0..self.matrix.gpus.len()).collect();
        self.placement(&self.improved(all, &strides, Ordering::Less), &strides)
    }

    /// GPUs in an order in which each is as near as can be to the ranks of its tp group, then of larger blocks.
    fn greedy(&self, first: usize) -> Vec<usize> {
        let Degrees { tp, cp, dp, .. } = self.degrees;
        let blocks = [tp, tp * cp, tp * cp * dp];
        let mut order = vec![first];
        let mut left: Vec<usize> = (0..self.matrix.gpus.len()).filter(|g| *g != first).collect();
        while !left.is_empty() {
            let seat = order.len();
            let near = |gpu: usize| -> [f64; 3] {
                blocks.map(|block| {
                    let begin = (seat / block * block).min(seat);
                    order[begin..seat].iter().map(|&other| self.rates.of(self.matrix.between[gpu][other])).sum()
                })
            };
            // The first of equals, so that what is alike keeps its order.
            let mut chosen = 0;
            for i in 1..left.len() {
                let (a, b) = (near(left[i]), near(left[chosen]));
                if a.iter().zip(&b).map(|(x, y)| x.total_cmp(y)).find(|o| o.is_ne()) == Some(Ordering::Greater) {
                    chosen = i;
                }
            }
            order.push(left.remove(chosen));
        }
        order
    }

    /// Swaps places, and GPUs in use for those that are not, while that is `wanted`.
    fn improved(&self, mut gpus: Vec<usize>, strides: &Strides, wanted: Ordering) -> Vec<usize> {
        let mut score = self.score(&gpus, strides);
        loop {
            let mut changed = false;
            for i in 0..self.local {
                for j in i + 1..gpus.len() {
                    gpus.swap(i, j);
                    let found = self.score(&gpus, strides);
                    if compare(&found, &score) == wanted {
                        (score, changed) = (found, true);
                    } else {
                        gpus.swap(i, j);
                    }
                }
            }
            if !changed {
                return gpus;
            }
        }
    }

    /// Is `a` better for the axes than `b`?
    #[cfg(test)]
    pub(super) fn better(&self, a: &[usize], b: &[usize]) -> bool {
        let strides = self.strides();
        compare(&self.score(a, &strides), &self.score(b, &strides)).is_gt()
    }

    fn score(&self, gpus: &[usize], strides: &Strides) -> Score {
        let ports = self.ports(gpus);
        let axes = ParallelAxis::ALL.into_iter().zip(strides).filter(|(axis, _)| self.degrees.of(*axis) > 1);
        axes.map(|(axis, &stride)| self.axis(axis, stride, gpus, &ports).1).collect()
    }

    fn placement(&self, gpus: &[usize], strides: &Strides) -> RankPlacement {
        let ports = self.ports(gpus);
        let axes = ParallelAxis::ALL.into_iter().zip(strides).filter(|(axis, _)| self.degrees.of(*axis) > 1);
        let axes = axes.map(|(axis, &stride)| self.axis(axis, stride, gpus, &ports).0).collect();
        let seat = |(rank, (&gpu, port)): (usize, (&usize, &Port))| {
            let of = &self.matrix.gpus[gpu];
            Seat {
                rank,
                gpu: of.label.clone(),
                numa: of.numa,
                cpus: of.cpus.clone(),
                nic: port.nic.map(|n| self.matrix.nics[n].device.clone()),
                to_nic: port.nic.map(|n| self.matrix.to_nic[gpu][n]),
                port: port.rate,
            }
        };
        RankPlacement { seats: gpus[..self.local].iter().zip(&ports).enumerate().map(seat).collect(), axes }
    }

    /// The card of each place: the nearest, and of those the one that fewest have.
    fn ports(&self, gpus: &[usize]) -> Vec<Port> {
        let mut users = vec![0_usize; self.matrix.nics.len()];
        let mut chosen = Vec::with_capacity(self.local);
        for &gpu in &gpus[..self.local] {
            let nearest = (0..users.len()).min_by_key(|&n| (self.matrix.to_nic[gpu][n], users[n], n));
            nearest.into_iter().for_each(|n| users[n] += 1);
            chosen.push(nearest);
        }
        let port = |(nic, &gpu): (Option<usize>, &usize)| match nic {
            Some(n) => {
                let way = self.rates.of(self.matrix.to_nic[gpu][n]);
                Port { nic, rate: (self.rates.nic / users[n] as f64).min(way) }
            }
            // A machine that lists no card has one somewhere, which all share.
            None => Port { nic, rate: self.rates.nic / self.local as f64 },
        };
        chosen.into_iter().zip(gpus).map(port).collect()
    }

    /// What an axis has, and its score.
    fn axis(&self, axis: ParallelAxis, stride: usize, gpus: &[usize], ports: &[Port]) -> (AxisUse, (f64, f64)) {
        let (degree, ranks) = (self.degrees.of(axis), self.local * self.nodes);
        // Groups that begin in the first node stand for all: nodes are alike. Of several that have the same places there
        // one is enough.
        let mut groups: Vec<Vec<usize>> = Vec::new();
        for first in (0..ranks).filter(|rank| (rank / stride).is_multiple_of(degree)) {
            let members: Vec<usize> = (0..degree).map(|k| first + k * stride).collect();
            if members[0] / self.local == 0 || !members[0].is_multiple_of(self.local) {
                groups.push(members);
            }
            if groups.len() >= 4 * self.local {
                break;
            }
        }
        let node_of = |rank: usize| rank / self.local;
        let mut inside: Vec<(f64, Option<PathType>)> = Vec::new();
        for group in &groups {
            // The part of it that lies in its first node.
            let here: Vec<usize> =
                group.iter().filter(|r| node_of(**r) == node_of(group[0])).map(|r| gpus[r % self.local]).collect();
            inside.push(self.ring(axis, &here));
        }
        let across = |way: &Option<PathType>| *way == Some(PathType::Sys);
        let of_first = |i: usize| node_of(groups[i][0]) == 0;
        let sharing = (0..groups.len()).filter(|&i| of_first(i) && across(&inside[i].1)).count();
        let (mut worst, mut time): (f64, f64) = (f64::INFINITY, 0.0);
        let (mut way, mut in_node, mut rail) = (None, 0, true);
        for (group, (rate, longest)) in groups.iter().zip(&inside) {
            let here = group.iter().filter(|r| node_of(**r) == node_of(group[0])).count();
            let mut rate = if across(longest) { rate.min(self.rates.sys / sharing.max(1) as f64) } else { *rate };
            if here < group.len() {
                let port = |r: &usize| ports[r % self.local].rate;
                let slowest = group.iter().map(port).fold(f64::INFINITY, f64::min);
                // Each rank of a node has its card and sends a part of what the node sends; a stage has one neighbour.
                let senders = if axis == ParallelAxis::Pp { 1 } else { here };
                rate = rate.min(slowest * senders as f64);
                rail &= stride.is_multiple_of(self.local) || self.local.is_multiple_of(stride * here);
            }
            if rate < worst {
                (worst, in_node) = (rate, here);
            }
            way = way.max(*longest);
            time += 1.0 / rate;
        }
        (AxisUse { axis, degree, in_node, way, sharing, rate: worst, rail }, (worst, time))
    }

    /// Rate and longest way of a ring over these GPUs, the best there is; of all pairs if each sends to each.
    fn ring(&self, axis: ParallelAxis, gpus: &[usize]) -> (f64, Option<PathType>) {
        if gpus.len() < 2 {
            return (f64::INFINITY, None);
        }
        let way = |a: usize, b: usize| self.matrix.between[a][b];
        let rate = |w: PathType| self.rates.of(w);
        let slower = |a: PathType, b: PathType| if rate(b) < rate(a) { b } else { a };
        let neighbours = gpus.windows(2).map(|w| way(w[0], w[1])).reduce(slower);
        let longest = match axis {
            // Each to each.
            ParallelAxis::Ep => {
                let pairs = (0..gpus.len()).flat_map(|i| (0..i).map(move |j| (i, j)));
                pairs.map(|(i, j)| way(gpus[i], gpus[j])).reduce(slower)
            }
            // Stages stand in their order.
            ParallelAxis::Pp => neighbours,
            _ if gpus.len() == 2 => neighbours,
            _ if gpus.len() <= ALL_RINGS => {
                let mut rates: Vec<PathType> =
                    gpus.iter().flat_map(|&a| gpus.iter().map(move |&b| way(a, b))).collect();
                rates.retain(|w| *w != PathType::X);
                rates.sort_by(|a, b| rate(*b).total_cmp(&rate(*a)));
                rates.dedup();
                rates.into_iter().find(|least| {
                    let mut used = vec![false; gpus.len()];
                    used[0] = true;
                    self.closes(gpus, &mut used, 0, 1, rate(*least))
                })
            }
            _ => {
                let (mut left, mut at, mut longest) = (gpus[1..].to_vec(), gpus[0], None);
                while !left.is_empty() {
                    let next = (0..left.len())
                        .max_by(|&i, &j| rate(way(at, left[i])).total_cmp(&rate(way(at, left[j]))).then(j.cmp(&i)));
                    let gpu = left.remove(next.unwrap_or(0));
                    longest = Some(longest.map_or(way(at, gpu), |l| slower(l, way(at, gpu))));
                    at = gpu;
                }
                longest.map(|l| slower(l, way(at, gpus[0])))
            }
        };
        (longest.map_or(f64::INFINITY, rate), longest)
    }

    /// Does the path that ends at `gpus[at]` continue through all that are left and close, on ways of at least `least`?
    fn closes(&self, gpus: &[usize], used: &mut [bool], at: usize, count: usize, least: f64) -> bool {
        let fits = |a: usize, b: usize| self.rates.of(self.matrix.between[gpus[a]][gpus[b]]) >= least;
        if count == gpus.len() {
            return fits(at, 0);
        }
        for next in 0..gpus.len() {
            if !used[next] && fits(at, next) {
                used[next] = true;
                if self.closes(gpus, used, next, count + 1, least) {
                    return true;
                }
                used[next] = false;
            }
        }
        false
    }
}

/// The card of a place, and what it has of it.
struct Port {
    nic: Option<usize>,
    rate: f64,
}

//! Traffic against its closed forms, choice by size and distance, and what compute hides.

use super::*;

fn fabric() -> Fabric {
    Fabric { inside: Link::nvlink(360e9), node: 8, outside: Link::network(50e9), in_network: true }
}

fn wire(collective: Collective, algorithm: CollectiveAlgorithm, ranks: usize) -> f64 {
    let fabric = Fabric { node: 1024, ..fabric() };
    fabric.estimate(collective, 1.0, RankGroup::of(ranks), algorithm, Protocol::Simple).unwrap().wire
}

fn steps(collective: Collective, algorithm: CollectiveAlgorithm, ranks: usize) -> usize {
    let fabric = Fabric { node: 1024, ..fabric() };
    fabric.estimate(collective, 1.0, RankGroup::of(ranks), algorithm, Protocol::Simple).unwrap().steps
}

/// Sends each part of a buffer round a ring of `n` ranks as the algorithm does, and counts.
fn ring_by_hand(n: usize) -> (f64, usize) {
    let (mut sent, mut steps) = (vec![0.0; n], 0);
    // A reduce-scatter, then an all-gather: in each step every rank sends one part of 1 / n.
    for _phase in 0..2 {
        for _step in 0..n - 1 {
            sent.iter_mut().for_each(|s| *s += 1.0 / n as f64);
            steps += 1;
        }
    }
    (sent.iter().copied().fold(0.0, f64::max), steps)
}

/// Halves and doubles over `n = 2^k` ranks, and counts.
fn halving_by_hand(n: usize) -> (f64, usize) {
    let (mut sent, mut steps, mut part) = (0.0, 0, 1.0);
    while part > 1.0 / n as f64 + 1e-12 {
        part /= 2.0;
        sent += 2.0 * part;
        steps += 2;
    }
    (sent, steps)
}

#[test]
fn traffic_is_that_of_the_closed_forms() {
    for n in [2usize, 3, 4, 7, 8, 16, 64] {
        let nf = n as f64;
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-9, "{n}: {a} {b}");
        near(wire(Collective::AllReduce, CollectiveAlgorithm::Ring, n), 2.0 * (nf - 1.0) / nf);
        near(wire(Collective::AllReduce, CollectiveAlgorithm::Ring, n), ring_by_hand(n).0);
        assert_eq!(steps(Collective::AllReduce, CollectiveAlgorithm::Ring, n), ring_by_hand(n).1);
        near(wire(Collective::AllGather, CollectiveAlgorithm::Ring, n), (nf - 1.0) / nf);
        near(wire(Collective::ReduceScatter, CollectiveAlgorithm::Ring, n), (nf - 1.0) / nf);
        near(wire(Collective::AllToAll, CollectiveAlgorithm::OneShot, n), (nf - 1.0) / nf);
        near(wire(Collective::AllReduce, CollectiveAlgorithm::OneShot, n), nf - 1.0);
        near(wire(Collective::AllReduce, CollectiveAlgorithm::DoubleTree, n), 2.0);
        near(wire(Collective::AllReduce, CollectiveAlgorithm::InNetwork, n), (nf + 1.0) / nf);
        near(wire(Collective::Broadcast, CollectiveAlgorithm::Ring, n), 1.0);
        if n.is_power_of_two() {
            let (sent, hops) = halving_by_hand(n);
            near(wire(Collective::AllReduce, CollectiveAlgorithm::HalvingDoubling, n), sent);
            assert_eq!(steps(Collective::AllReduce, CollectiveAlgorithm::HalvingDoubling, n), hops);
        }
        assert_eq!(
            steps(Collective::AllReduce, CollectiveAlgorithm::DoubleTree, n),
            2 * (nf.log2().ceil() as usize),
            "{n}"
        );
    }
    assert_eq!(wire(Collective::AllReduce, CollectiveAlgorithm::Tree, 8), 3.0);
    // A power of two of six ranks is four: two buffers go there before and back behind.
    assert_eq!(wire(Collective::AllReduce, CollectiveAlgorithm::HalvingDoubling, 6), 1.5 + 2.0);
    assert_eq!(steps(Collective::AllReduce, CollectiveAlgorithm::HalvingDoubling, 6), 6);
}

#[test]
fn small_messages_take_ll_and_large_ones_simple() {
    let f = fabric();
    let best = |bytes| f.best(Collective::AllReduce, bytes, RankGroup::of(8), &[CollectiveAlgorithm::Ring]).unwrap();
    assert_eq!(best(1024.0).protocol, Protocol::Ll);
    let large = best(1e9);
    assert_eq!(large.protocol, Protocol::Simple);
    let bus = large.bus_bandwidth(Collective::AllReduce, 1e9, 8);
    assert!((0.98..1.0).contains(&(bus / 360e9)), "{bus}");
    // Time never falls with size, and what is best never loses to one of its kinds.
    let mut last = 0.0;
    for power in 0..34 {
        let bytes = f64::from(1u32 << power.min(31)) * if power > 31 { f64::from(1 << (power - 31)) } else { 1.0 };
        let e = f.best(Collective::AllReduce, bytes, RankGroup::of(8), &CollectiveAlgorithm::ALL).unwrap();
        assert!(e.seconds >= last);
        last = e.seconds;
    }
}

#[test]
fn between_nodes_a_tree_saves_hops_and_a_hierarchy_ports() {
    let f = Fabric { in_network: false, ..fabric() };
    let group = RankGroup::of(1024);
    let of = |a, bytes| f.best(Collective::AllReduce, bytes, group, &[a]).unwrap();
    assert!(of(CollectiveAlgorithm::DoubleTree, 1e4).seconds < 0.1 * of(CollectiveAlgorithm::Ring, 1e4).seconds);
    let fewer = |a| f.best(Collective::AllReduce, 1e10, RankGroup::of(64), &[a]).unwrap().seconds;
    assert!(fewer(CollectiveAlgorithm::Ring) < fewer(CollectiveAlgorithm::DoubleTree));
    // Eight ports of a node carry an eighth each: the ring over all is bound by the link in the node.
    let hierarchical = of(CollectiveAlgorithm::Hierarchical, 1e9);
    assert!(hierarchical.steps < of(CollectiveAlgorithm::Ring, 1e9).steps);
    // One rank a node has one port.
    let apart = RankGroup { ranks: 8, stride: 8 };
    let one = f.best(Collective::AllReduce, 1e9, apart, &[CollectiveAlgorithm::Ring]).unwrap();
    assert!((one.rate - 45e9).abs() < 1.0, "{one:?}");
    // Of an all-to-all over 16 ranks, 8 / 15 of what is sent leaves the node, by one port.
    let a2a = f.nccl(Collective::AllToAll, 1.5e9, RankGroup::of(16)).unwrap();
    assert!((a2a.wire - 1.5e9 * 8.0 / 16.0).abs() < 1.0 && (a2a.rate - 45e9).abs() < 1.0, "{a2a:?}");
    // What does not divide into nodes has no hierarchy, and a group in a node none either.
    for group in [RankGroup::of(12), RankGroup::of(8)] {
        assert!(f.best(Collective::AllReduce, 1e6, group, &[CollectiveAlgorithm::Hierarchical]).is_none());
    }
}

#[test]
fn every_collective_has_a_way_and_one_rank_takes_no_time() {
    let f = fabric();
    for collective in Collective::ALL {
        for ranks in [2, 3, 8, 16, 24, 1000] {
            let group = RankGroup { ranks: if collective == Collective::SendRecv { 2 } else { ranks }, stride: 1 };
            let e = f.nccl(collective, 1e6, group).unwrap();
            assert!(e.seconds.is_finite() && e.seconds > e.latency && e.latency > 0.0, "{collective}: {e:?}");
        }
        assert_eq!(f.nccl(collective, 1e9, RankGroup::of(1)).unwrap().seconds, 0.0);
    }
}

#[test]
fn buckets_expose_the_last_and_what_does_not_fit() {
    // Little communication: the last bucket alone is exposed. Much: all but what ran beside compute.
    for (compute, n, each) in [(1.0, 4, 0.1), (1.0, 4, 0.5), (2.0, 25, 0.01), (1.0, 1, 0.3), (0.0, 3, 1.0)] {
        let o = overlap(compute, n, each);
        let nf = n as f64;
        let closed = exposed(compute, n, each);
        assert!((o.exposed - closed).abs() < 1e-12, "{compute} {n} {each}: {} {closed}", o.exposed);
        assert!((o.exposed + o.hidden - nf * each).abs() < 1e-12);
        assert!(o.buckets.iter().all(|b| b.start >= b.ready) && o.buckets.windows(2).all(|b| b[1].start >= b[0].end));
    }
}

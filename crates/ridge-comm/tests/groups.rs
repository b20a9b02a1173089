//! Groups of ranks over every transport: what is exchanged, and what is said when ranks do not fit together or are lost.
//! Each rank is a thread here; tests of the command have processes.

use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use ridge_comm::{Cluster, CommError, JoinSettings, Loopback, Transport};
use ridge_runtime::{CollectiveError, Collectives};

/// An address at which nobody listens now.
fn free_address() -> String {
    TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a port is free").to_string()
}

fn settings(transport: Transport, rank: usize, ranks: usize, meet: &str) -> JoinSettings {
    JoinSettings {
        local: 0,
        rank,
        ranks,
        meet: meet.to_owned(),
        token: "a test".to_owned(),
        transport,
        wait: Duration::from_secs(20),
        patience: Duration::from_secs(600),
    }
}

/// Runs `rank` on a thread for each rank, over each transport. Gives what each rank gave.
fn on_ranks<T: Send>(ranks: usize, rank: impl Fn(&dyn Collectives) -> T + Sync) -> Vec<Vec<T>> {
    let rank = &rank;
    let mut all = Vec::new();
    all.push(std::thread::scope(|scope| {
        let threads: Vec<_> =
            Loopback::group(ranks).into_iter().map(|group| scope.spawn(move || rank(&*group))).collect();
        threads.into_iter().map(|t| t.join().expect("no panic")).collect()
    }));
    for transport in [Transport::SharedMemory, Transport::Tcp] {
        let meet = free_address();
        all.push(std::thread::scope(|scope| {
            let start = |number| {
                let meet = &meet;
                scope.spawn(move || {
                    let cluster = Cluster::join(&settings(transport, number, ranks, meet)).expect("joins");
                    let given = rank(&*cluster.group());
                    cluster.leave();
                    given
                })
            };
            let threads: Vec<_> = (0..ranks).map(start).collect();
            threads.into_iter().map(|t| t.join().expect("no panic")).collect()
        }));
    }
    all
}

/// What rank `from` sends rank `to` in round `round`: `len` bytes.
fn message(from: usize, to: usize, round: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (from * 31 + to * 7 + round * 3 + i) as u8).collect()
}

fn exchange(
    group: &dyn Collectives,
    what: &str,
    round: usize,
    len: &dyn Fn(usize, usize) -> usize,
) -> Result<(), CollectiveError> {
    let (me, ranks) = (group.rank(), group.ranks());
    let send: Vec<Vec<u8>> = (0..ranks).map(|to| message(me, to, round, len(me, to))).collect();
    let mut received: Vec<Vec<u8>> = (0..ranks).map(|from| vec![0; len(from, me)]).collect();
    let send: Vec<&[u8]> = send.iter().map(Vec::as_slice).collect();
    group.exchange(what, &send, &mut received.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>())?;
    for (from, got) in received.iter().enumerate() {
        assert_eq!(*got, message(from, me, round, len(from, me)), "from rank {from} to rank {me} in round {round}");
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 6, ..ProptestConfig::default() })]

    #[test]
    fn every_rank_gets_what_was_sent_to_it(
        ranks in 1usize..5,
        sizes in prop::collection::vec(prop_oneof![Just(0usize), 1usize..100, 200_000usize..700_000], 1..6),
    ) {
        on_ranks(ranks, |group| {
            for (round, size) in sizes.iter().enumerate() {
                // Every pair has a size of its own.
                exchange(group, "test", round, &|from, to| size * (1 + from) / (1 + to)).expect("exchanges");
            }
        });
    }
}

#[test]
fn many_small_exchanges_keep_their_order() {
    on_ranks(3, |group| {
        for round in 0..500 {
            exchange(group, "test", round, &|from, to| (from + to + round) % 40).expect("exchanges");
        }
    });
}

#[test]
fn ranks_that_do_different_things_are_named_with_what_they_do() {
    for outcomes in on_ranks(2, |group| {
        exchange(group, "all_reduce(f32[8])", 0, &|_, _| 8).expect("the first fits");
        let what = ["all_reduce(f32[8])", "all_gather(f32[8])"][group.rank()];
        exchange(group, what, 1, &|_, _| 8)
    }) {
        let said = outcomes.iter().map(|o| o.as_ref().unwrap_err().to_string()).collect::<Vec<_>>().join("\n");
        assert!(said.contains("collective 2 differs between ranks"), "{said}");
        assert!(said.contains("all_reduce(f32[8])") && said.contains("all_gather(f32[8])"), "{said}");
    }
    // Of equal names and other sizes.
    for outcomes in on_ranks(2, |group| exchange(group, "send", 0, &|_, _| 8 + group.rank())) {
        assert!(outcomes.iter().all(|o| matches!(o, Err(CollectiveError::Mismatch { .. }))), "{outcomes:?}");
    }
}

#[test]
fn an_aborted_group_fails_those_who_wait() {
    for outcomes in on_ranks(3, |group| {
        if group.rank() == 2 {
            std::thread::sleep(Duration::from_millis(50));
            group.abort("rank 2 has no memory left");
            return Err(CollectiveError::Aborted { why: "itself".into() });
        }
        exchange(group, "all_reduce", 0, &|_, _| 8)
    })
    .into_iter()
    .take(1)
    {
        for outcome in &outcomes[..2] {
            assert_eq!(outcome.as_ref().unwrap_err().to_string(), "rank 2 has no memory left");
        }
    }
}

/// Ranks of which the last does something else after a first exchange. Gives what the others then learn, and how fast.
fn with_a_last_one(
    transport: Transport,
    ranks: usize,
    patience: Duration,
    last: impl Fn(Cluster) + Sync,
) -> Vec<(String, Duration)> {
    let (meet, last) = (free_address(), &last);
    std::thread::scope(|scope| {
        let start = |rank: usize| {
            let settings = JoinSettings { patience, ..settings(transport, rank, ranks, &meet) };
            scope.spawn(move || {
                let cluster = Cluster::join(&settings).expect("joins");
                exchange(&*cluster.group(), "first", 0, &|_, _| 8).expect("exchanges");
                if rank == ranks - 1 {
                    last(cluster);
                    return None;
                }
                let start = Instant::now();
                let outcome = exchange(&*cluster.group(), "second", 1, &|_, _| 8);
                Some((outcome.unwrap_err().to_string(), start.elapsed()))
            })
        };
        let threads: Vec<_> = (0..ranks).map(start).collect();
        threads.into_iter().filter_map(|t| t.join().expect("no panic")).collect()
    })
}

#[test]
fn a_rank_that_fails_or_ends_early_or_never_comes_is_named_by_all_others() {
    for transport in [Transport::SharedMemory, Transport::Tcp] {
        let long = Duration::from_secs(600);
        // It fails: the cluster is dropped.
        for (said, took) in with_a_last_one(transport, 3, long, drop) {
            assert!(said.starts_with("rank 2 was lost: it aborted"), "{said}");
            assert!(took < Duration::from_secs(5), "{took:?}");
        }
        // It ends in peace, and the others continue.
        for (said, took) in with_a_last_one(transport, 3, long, |cluster| cluster.leave()) {
            let wanted = "rank 2 was lost: it exited after 1 collectives, while rank";
            assert!(said.starts_with(wanted) || said.contains("connection ended"), "{said}");
            assert!(said.starts_with("rank 2 was lost") && took < Duration::from_secs(5), "{said} {took:?}");
        }
        // It lives, and does not come.
        let outcomes = with_a_last_one(transport, 3, Duration::from_millis(700), |cluster| {
            std::thread::sleep(Duration::from_secs(3));
            drop(cluster);
        });
        for (said, took) in outcomes {
            assert!(said.starts_with("rank 2 was lost: it has not reached collective 2"), "{said}");
            assert!(took < Duration::from_secs(3), "{took:?}");
        }
    }
}

#[test]
fn ranks_that_do_not_fit_are_refused_and_those_that_do_not_come_are_named() {
    let meet = free_address();
    let short =
        |rank, ranks| JoinSettings { wait: Duration::from_millis(600), ..settings(Transport::Tcp, rank, ranks, &meet) };
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| Cluster::join(&short(0, 3)).err().expect("two are missing"));
        let one = scope.spawn(|| Cluster::join(&short(1, 3)).err().expect("one is missing"));
        let other = scope.spawn(|| Cluster::join(&short(1, 2)).err().expect("of another number"));
        let by = scope.spawn(|| {
            let settings = JoinSettings { transport: Transport::SharedMemory, ..short(2, 3) };
            Cluster::join(&settings).err().expect("by another transport")
        });
        let stranger = scope.spawn(|| {
            Cluster::join(&JoinSettings { token: "guessed".into(), ..short(2, 3) }).err().expect("a stranger")
        });
        let said = other.join().expect("no panic").to_string();
        assert_eq!(said, "rank 0 rejects rank 1: it expects 2 ranks, but rank 0 expects 3");
        let said = by.join().expect("no panic").to_string();
        assert_eq!(said, "rank 0 rejects rank 2: it uses the transport shm, but rank 0 uses tcp");
        assert!(stranger.join().expect("no panic").to_string().contains("it closed the connection"));
        let said = zero.join().expect("no panic").to_string();
        assert!(said.starts_with("of 3 ranks, rank 2 did not join within"), "{said}");
        assert!(matches!(one.join().expect("no panic"), CommError::Refused { .. } | CommError::Connection { .. }));
    });
    let error = Cluster::join(&short(1, 2)).err().expect("nobody is there");
    assert!(matches!(error, CommError::NoMeeting { rank: 1, .. }), "{error}");
}

#[test]
fn a_group_is_shared_by_threads() {
    fn shared<T: Send + Sync>(_: &T) {}
    shared(&(Arc::clone(&Loopback::group(1)[0])));
}

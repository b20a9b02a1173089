//! Ranks that are processes, of which one is killed, stopped or goes astray while all of them exchange without end: the
//! others must name it and end with an error. `RIDGE_TRIALS` says how often each is tried, on a machine that does nothing
//! else, and then it must be within five seconds.

#![cfg(unix)]

use std::io::Read as _;
use std::net::TcpListener;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use ridge_comm::{Cluster, JoinSettings, Transport, variables};

const RANKS: usize = 3;
/// The rank that goes astray, and after how many exchanges.
const ASTRAY: &str = "RIDGE_TEST_ASTRAY";
const TEST: &str = "a_rank_that_is_killed_or_stopped_or_goes_astray_is_named_by_all_others_which_end";

/// How a rank is lost.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    Killed,
    Stopped,
    /// It calls another collective than the others.
    Astray,
    /// It fails by itself.
    Failed,
}

/// Exchanges until that fails, as one of the ranks.
#[expect(clippy::exit, reason = "it is a process of its own, whose exit code is looked at")]
fn be_a_rank(settings: &JoinSettings) -> ! {
    let cluster = Cluster::join(settings).expect("all come");
    let group = cluster.group();
    let astray: Option<(String, u64)> = std::env::var(ASTRAY).ok().map(|said| {
        let (how, after) = said.split_once(' ').expect("how and when");
        (how.to_owned(), after.parse().expect("a number"))
    });
    for number in 0.. {
        let mine = vec![settings.rank as u8; 4000];
        let mut received = vec![vec![0; 4000]; RANKS];
        let what = match &astray {
            Some((how, after)) if number >= *after && how == "other" => "all_gather(f32[1000])",
            Some((_, after)) if number >= *after => {
                cluster.fail("out of memory");
                std::process::exit(1);
            }
            _ => "all_reduce(f32[1000])",
        };
        let mut receive: Vec<&mut [u8]> = received.iter_mut().map(Vec::as_mut_slice).collect();
        if let Err(error) = group.exchange(what, &[&mine[..]; RANKS], &mut receive) {
            eprintln!("error: {error}");
            drop(cluster);
            std::process::exit(1);
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    unreachable!("it exchanges without end")
}

/// What a process left: its status, and what it said.
struct Ended {
    status: ExitStatus,
    said: String,
    took: Duration,
}

fn wait(mut child: Child, since: Instant) -> Ended {
    let status = loop {
        if let Some(status) = child.try_wait().expect("is waited for") {
            break status;
        }
        if since.elapsed() > Duration::from_secs(30) {
            child.kill().expect("is killed");
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let took = since.elapsed();
    let mut said = String::new();
    child.stderr.take().expect("is piped").read_to_string(&mut said).expect("is text");
    Ended { status, said, took }
}

fn signal(child: &Child, name: &str) {
    let sent = Command::new("kill").args([name, &child.id().to_string()]).status().expect("kill runs");
    assert!(sent.success(), "kill {name}");
}

fn trial(number: usize, transport: Transport, fate: Fate, on_its_own: bool) {
    let meet = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a port is free").to_string();
    // Each rank in turn is lost, at another time.
    let lost = number % RANKS;
    let after = 20 + 37 * (number as u64 % 11);
    let start = |rank: usize| {
        let mut command = Command::new(std::env::current_exe().expect("is known"));
        command.args([TEST, "--exact", "--nocapture"]).stdout(Stdio::null()).stderr(Stdio::piped());
        command.env(variables::RANK, rank.to_string()).env(variables::RANKS, RANKS.to_string());
        command.env(variables::MEET, &meet).env(variables::TRANSPORT, transport.name());
        match fate {
            Fate::Astray if rank == lost => command.env(ASTRAY, format!("other {after}")),
            Fate::Failed if rank == lost => command.env(ASTRAY, format!("fails {after}")),
            _ => &mut command,
        };
        command.spawn().expect("starts")
    };
    let mut ranks: Vec<Child> = (0..RANKS).map(start).collect();
    let mut since = Instant::now();
    if matches!(fate, Fate::Killed | Fate::Stopped) {
        // Sometimes while they meet or have just met, sometimes long after.
        std::thread::sleep(Duration::from_millis(150 + 23 * (number as u64 % 13)));
        since = Instant::now();
        signal(&ranks[lost], if fate == Fate::Killed { "-KILL" } else { "-STOP" });
    }
    let mut stopped = ranks.remove(lost);
    let others: Vec<Ended> = ranks.into_iter().map(|rank| wait(rank, since)).collect();
    let what = format!("trial {number}: rank {lost} {fate:?} over {}", transport.name());
    for other in &others {
        let Ended { status, said, took } = other;
        assert_eq!(status.code(), Some(1), "{what}: {said}");
        let names = said.contains(&format!("rank {lost} was lost"))
            || said.contains(&format!("rank {lost} calls"))
            || said.contains(&format!("and rank {lost} "));
        // Of two that differ, each names the other: those who see the mismatch first.
        assert!(names || fate == Fate::Astray && said.contains("differs between ranks"), "{what}: {said}");
        // A machine that does much else may take longer.
        let limit = if !on_its_own {
            20.0
        } else if matches!(fate, Fate::Killed | Fate::Stopped) {
            5.0
        } else {
            8.0
        };
        assert!(took.as_secs_f64() < limit, "{what}: after {took:?}: {said}");
        assert!(!said.contains("panicked"), "{what}: {said}");
    }
    if fate == Fate::Stopped {
        // It learns that the others continued without it.
        signal(&stopped, "-CONT");
        let Ended { status, said, .. } = wait(stopped, Instant::now());
        assert_eq!(status.code(), Some(1), "{what}: the stopped one: {said}");
    } else {
        stopped.wait().expect("has ended");
    }
}

#[test]
fn a_rank_that_is_killed_or_stopped_or_goes_astray_is_named_by_all_others_which_end() {
    if let Some(settings) = JoinSettings::from_environment().expect("makes sense") {
        be_a_rank(&settings);
    }
    let trials: Option<usize> = std::env::var("RIDGE_TRIALS").ok().and_then(|n| n.parse().ok());
    let (trials, on_its_own) = (trials.unwrap_or(1), trials.is_some());
    for fate in [Fate::Killed, Fate::Astray, Fate::Failed, Fate::Stopped] {
        let started = Instant::now();
        for number in 0..trials {
            for transport in [Transport::SharedMemory, Transport::Tcp] {
                trial(number, transport, fate, on_its_own);
            }
        }
        println!("{fate:?}: {} of {} trials, in {:.0} s", 2 * trials, 2 * trials, started.elapsed().as_secs_f64());
    }
}

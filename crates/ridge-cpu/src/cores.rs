//! How many threads a machine has cores for.
//!
//! Two hardware threads of a core share its multipliers and caches: a second thread there adds little and makes all others
//! wait for it at the end of every launch. So there is one thread to a core. Virtual machines often present each hardware
//! thread as a core of its own. Then CPUs that share a core are found by timing: two of them multiply at half the rate each.

use std::hint::black_box;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ridge_hw::cpu::Cpu;
use ridge_hw::environment::Environment;
use ridge_hw::topology;

use crate::affinity::{stay_on, usable_cpus};

/// With fewer CPUs than these nothing is timed: what may be won does not pay for the risk of a wrong finding.
const LEAST_CPUS: usize = 16;

/// Pairs are timed so often, and the shortest time counts, since other programs lengthen the others.
const TRIALS: usize = 7;

/// How CPUs that share a core are numbered, where the system does not tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shared {
    /// `2 i` and `2 i + 1`.
    Neighbours,
    /// `i` and `i + CPUs / 2`.
    Halves,
}

/// How many threads the CPU backend has by default: one for each core that this process may use, and no more than a
/// container's quota. At least one.
pub fn default_threads() -> usize {
    let told = Cpu::detect().usable_cores();
    hidden_cores().map_or(told, |cores| told.min(cores.len()))
}

/// The CPUs of each core, where the system says that each CPU is one and timing says that two are. Timed once a process, in some
/// milliseconds.
pub(crate) fn hidden_cores() -> Option<&'static [Vec<usize>]> {
    static FOUND: OnceLock<Option<Vec<Vec<usize>>>> = OnceLock::new();
    FOUND.get_or_init(find).as_deref()
}

fn find() -> Option<Vec<Vec<usize>>> {
    let usable = usable_cpus()?;
    let told = topology::cores(&Environment::host());
    // CPUs that are numbered with gaps are a part of a machine, of whose pairs little is known.
    let whole = usable.iter().copied().eq(0..usable.len());
    if !whole || usable.len() < LEAST_CPUS || usable.len() % 2 == 1 || told.iter().any(|core| core.len() > 1) {
        return None;
    }
    let half = usable.len() / 2;
    // At both ends of the machine, which have to agree.
    let [one, other] = [0, half / 2 * 2 - 2].map(|first| {
        let alone = shortest(&[first]);
        sharing(alone, shortest(&[first, first + 1]), shortest(&[first, first + half]))
    });
    one.filter(|_| one == other).map(|shared| pairs(shared, usable.len()))
}

/// The CPUs of each core.
fn pairs(shared: Shared, cpus: usize) -> Vec<Vec<usize>> {
    let pair = |nth: usize| match shared {
        Shared::Neighbours => vec![2 * nth, 2 * nth + 1],
        Shared::Halves => vec![nth, nth + cpus / 2],
    };
    (0..cpus / 2).map(pair).collect()
}

/// What times say of a CPU alone, beside its neighbour, and beside that of the other half: a pair shares a core when it takes
/// nearly twice as long as one CPU does and the other pair does not.
fn sharing(alone: Duration, neighbours: Duration, halves: Duration) -> Option<Shared> {
    let slowed = |pair: Duration| pair.as_secs_f64() / alone.as_secs_f64().max(1e-9);
    match (slowed(neighbours), slowed(halves)) {
        (near, far) if near > 1.6 && far < 1.25 => Some(Shared::Neighbours),
        (near, far) if far > 1.6 && near < 1.25 => Some(Shared::Halves),
        _ => None,
    }
}

/// The shortest time in which threads on `cpus` do a piece of work each at the same time.
fn shortest(cpus: &[usize]) -> Duration {
    let trial = || {
        let ready = AtomicUsize::new(0);
        let run = |cpu: usize| {
            stay_on(&[cpu]);
            ready.fetch_add(1, Ordering::AcqRel);
            while ready.load(Ordering::Acquire) < cpus.len() {
                std::hint::spin_loop();
            }
            let began = Instant::now();
            black_box(multiply(black_box(3)));
            began.elapsed()
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = cpus.iter().map(|cpu| scope.spawn(move || run(*cpu))).collect();
            threads.into_iter().filter_map(|thread| thread.join().ok()).max()
        })
    };
    (0..TRIALS).filter_map(|_| trial()).min().unwrap_or_default()
}

/// Some 100 us of integer products in eight chains, which keep a core's multiplier busy in every cycle.
#[inline(never)]
fn multiply(seed: u64) -> u64 {
    let mut chains: [u64; 8] = std::array::from_fn(|nth| seed + 2 * nth as u64);
    for _ in 0..40_000 {
        chains.iter_mut().for_each(|x| *x = x.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    }
    chains.iter().fold(0, |sum, x| sum ^ x)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_that_slow_each_other_share_a_core() {
        let us = Duration::from_micros;
        assert_eq!(sharing(us(100), us(198), us(101)), Some(Shared::Neighbours));
        assert_eq!(sharing(us(100), us(103), us(187)), Some(Shared::Halves));
        // A core each, a machine so busy that all wait, a clock that stands still.
        assert_eq!(sharing(us(100), us(101), us(99)), None);
        assert_eq!(sharing(us(100), us(190), us(170)), None);
        assert_eq!(sharing(us(0), us(0), us(0)), None);
    }

    #[test]
    fn every_cpu_is_of_one_core() {
        for shared in [Shared::Neighbours, Shared::Halves] {
            let cores = pairs(shared, 16);
            assert_eq!(cores.len(), 8);
            let mut all = cores.concat();
            all.sort_unstable();
            assert!(all.into_iter().eq(0..16));
        }
        assert_eq!(pairs(Shared::Neighbours, 16)[3], [6, 7]);
        assert_eq!(pairs(Shared::Halves, 16)[3], [3, 11]);
    }

    #[test]
    fn work_is_timed() {
        let cpu = usable_cpus().map_or(0, |usable| usable[0]);
        assert!(shortest(&[cpu]) > Duration::from_micros(5));
    }

    #[test]
    fn there_is_a_thread_at_least() {
        assert!((1..=Cpu::detect().usable_cores()).contains(&default_threads()));
    }
}

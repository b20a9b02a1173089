//! The CPUs that a thread may run on, as the operating system keeps them.

/// The CPUs that this process may use, ascending.
#[cfg(target_os = "linux")]
pub(crate) fn usable_cpus() -> Option<Vec<usize>> {
    use rustix::thread::{CpuSet, sched_getaffinity};

    let set = sched_getaffinity(None).ok()?;
    Some((0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect())
}

/// Keeps the calling thread on `cpus`, if there are some and the system lets it.
#[cfg(target_os = "linux")]
pub(crate) fn stay_on(cpus: &[usize]) {
    use rustix::thread::{CpuSet, sched_setaffinity};

    if !cpus.is_empty() {
        let mut set = CpuSet::new();
        cpus.iter().filter(|cpu| **cpu < CpuSet::MAX_CPU).for_each(|cpu| set.set(*cpu));
        let _ = sched_setaffinity(None, &set);
    }
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn usable_cpus() -> Option<Vec<usize>> {
    None
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn stay_on(_cpus: &[usize]) {}

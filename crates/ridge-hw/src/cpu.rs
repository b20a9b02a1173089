//! The CPU of this machine: its make, cores, caches, instructions and memory, and what a container leaves of them.

mod allowance;
mod cache;
mod cpuinfo;
mod feature;

use serde::Serialize;

pub use allowance::Allowance;
pub use cache::{Cache, CacheKind};
pub use cpuinfo::{CpuInfo, parse_cpuinfo};
pub use feature::{Feature, Features};

use crate::environment::Environment;
use crate::topology::{self, NumaNode};
use crate::units::Bytes;

/// What could be found out about the machine's CPU. What the system does not tell is `None`, as most is outside Linux.
#[derive(Clone, Debug, Serialize)]
pub struct Cpu {
    /// Maker, such as `GenuineIntel` or `ARM`.
    pub vendor: Option<String>,
    /// Model, as the maker writes it.
    pub model: Option<String>,
    /// Instruction set that this program was built for, such as `x86_64`.
    pub architecture: &'static str,
    /// Hardware threads online in the whole machine.
    pub logical_cores: Option<usize>,
    /// Cores in the whole machine.
    pub physical_cores: Option<usize>,
    /// Processor packages in the whole machine.
    pub sockets: Option<usize>,
    /// NUMA nodes with their logical CPUs.
    pub numa_nodes: Option<Vec<NumaNode>>,
    /// Data and unified caches, by level, the most numerous first; empty where the system does not tell.
    pub caches: Vec<Cache>,
    /// Instruction sets that this process may use.
    pub features: Features,
    /// Memory of the whole machine.
    pub memory: Option<Memory>,
    /// CPUs that the operating system lets this process run on ([`std::thread::available_parallelism`]).
    pub affinity: Option<usize>,
    /// Cores of which this process may use a CPU at least.
    pub allowed_cores: Option<usize>,
    /// What control groups (a container's limits) leave.
    pub allowance: Allowance,
}

/// Memory of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// All memory that the kernel manages.
    pub total: Bytes,
    /// What new programs can take without swapping, by the kernel's estimate.
    pub available: Bytes,
}

impl Cpu {
    /// Looks at this machine. Never fails.
    pub fn detect() -> Self {
        let affinity = std::thread::available_parallelism().ok().map(usize::from);
        Self::detect_in(&Environment::host(), affinity)
    }

    /// Reads the files of `environment`; `affinity` is what the operating system allows. Instruction sets are always
    /// those of the machine that runs this.
    pub fn detect_in(environment: &Environment, affinity: Option<usize>) -> Self {
        let info = parse_cpuinfo(&environment.read("/proc/cpuinfo").unwrap_or_default());
        let counts = topology::core_counts(environment);
        Self {
            architecture: std::env::consts::ARCH,
            logical_cores: counts.map(|counts| counts.logical).or(info.logical_cores),
            physical_cores: counts.map(|counts| counts.physical).or(info.physical_cores),
            sockets: counts.map(|counts| counts.sockets).or(info.sockets),
            numa_nodes: topology::numa_nodes(environment),
            caches: cache::detect(environment),
            features: Features::detect(&info.flags),
            memory: environment.read("/proc/meminfo").and_then(|text| parse_meminfo(&text)),
            affinity,
            allowed_cores: environment
                .read("/proc/thread-self/status")
                .and_then(|status| {
                    topology::parse_cpu_list(status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?)
                })
                .map(|allowed| {
                    topology::cores(environment)
                        .iter()
                        .filter(|core| core.iter().any(|cpu| allowed.contains(cpu)))
                        .count()
                })
                .filter(|cores| *cores > 0),
            allowance: Allowance::detect(environment),
            vendor: info.vendor,
            model: info.model,
        }
    }

    /// How many threads can run at once, each on a core of its own: the least of the CPUs and cores that the process may use
    /// and the container's quota, at least one.
    ///
    /// A quota of 2.5 cores gives 2: a third thread would be throttled half of the time, and its siblings would wait
    /// for it at every barrier.
    pub fn usable_cores(&self) -> usize {
        self.usable_threads().min(self.allowed_cores.unwrap_or(usize::MAX))
    }

    /// As [`Cpu::usable_cores`], for work that is not bound by what the hardware threads of a core share.
    pub fn usable_threads(&self) -> usize {
        let affinity = self.affinity.or(self.logical_cores).unwrap_or(1);
        let quota = self.allowance.cores.map_or(usize::MAX, |cores| cores.floor() as usize);
        affinity.min(quota).max(1)
    }

    /// Memory that this process may ever hold: the machine's, or the container's limit if that is less.
    pub fn usable_memory(&self) -> Option<Bytes> {
        least(self.memory.map(|memory| memory.total), self.allowance.memory)
    }

    /// Memory that this process can take now.
    pub fn available_memory(&self) -> Option<Bytes> {
        least(self.memory.map(|memory| memory.available), self.allowance.memory_left)
    }

    /// First-level data cache; on a hybrid CPU, that of the most numerous cores.
    pub fn l1d(&self) -> Option<&Cache> {
        self.caches.iter().find(|cache| cache.level == 1)
    }

    /// Second-level cache; on a hybrid CPU, that of the most numerous cores.
    pub fn l2(&self) -> Option<&Cache> {
        self.caches.iter().find(|cache| cache.level == 2)
    }

    /// Third-level cache.
    pub fn l3(&self) -> Option<&Cache> {
        self.caches.iter().find(|cache| cache.level == 3)
    }
}

/// The lesser of those that are known.
fn least<T: Ord>(a: Option<T>, b: Option<T>) -> Option<T> {
    a.into_iter().chain(b).min()
}

/// Reads the text of `/proc/meminfo`; `None` when it lacks the total or the kernel's estimate.
pub fn parse_meminfo(text: &str) -> Option<Memory> {
    let amount = |key: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
        line.trim().strip_suffix(" kB")?.trim().parse().ok().map(Bytes::from_kib)
    };
    Some(Memory { total: amount("MemTotal")?, available: amount("MemAvailable")? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::fake::Tree;

    const MEMINFO: &str = "MemTotal:       24731708 kB\nMemFree:        24495864 kB\nMemAvailable:   24431240 kB\n";

    fn machine(files: &[(&str, &str)], affinity: Option<usize>) -> Cpu {
        let tree = Tree::new(files.iter().copied());
        tree.file("/proc/meminfo", MEMINFO);
        Cpu::detect_in(&tree.environment([]), affinity)
    }

    const CGROUP: &[(&str, &str)] = &[
        ("/proc/self/cgroup", "0::/\n"),
        ("/proc/self/mountinfo", "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"),
    ];

    fn limited(cpu_max: &str) -> Cpu {
        machine(&[CGROUP, &[("/sys/fs/cgroup/cpu.max", cpu_max)]].concat(), Some(8))
    }

    #[test]
    fn a_container_quota_lowers_usable_cores() {
        assert_eq!(limited("400000 100000\n").usable_cores(), 4);
        assert_eq!(limited("max 100000\n").usable_cores(), 8);
        assert_eq!(limited("1600000 100000\n").usable_cores(), 8);
    }

    #[test]
    fn cpus_of_one_core_have_one_thread() {
        let tree =
            Tree::new([("/proc/thread-self/status", "Name:\tridge\nCpus_allowed:\t7\nCpus_allowed_list:\t0-2\n")]);
        for cpu in 0..8 {
            let folder = format!("/sys/devices/system/cpu/cpu{cpu}/topology");
            tree.file(&format!("{folder}/core_cpus_list"), &format!("{}-{}\n", cpu / 2 * 2, cpu / 2 * 2 + 1));
        }
        // CPUs 0 and 1 are of one core, CPU 2 of another.
        let cpu = Cpu::detect_in(&tree.environment([]), Some(3));
        assert_eq!((cpu.allowed_cores, cpu.usable_cores()), (Some(2), 2));
    }

    #[test]
    fn a_fractional_quota_rounds_down_but_never_to_zero() {
        assert_eq!(limited("250000 100000\n").usable_cores(), 2);
        assert_eq!(limited("20000 100000\n").usable_cores(), 1);
    }

    #[test]
    fn a_container_limit_lowers_usable_and_available_memory() {
        let files = [("/sys/fs/cgroup/memory.max", "4294967296\n"), ("/sys/fs/cgroup/memory.current", "1073741824\n")];
        let cpu = machine(&[CGROUP, &files].concat(), Some(8));
        assert_eq!(cpu.usable_memory(), Some(Bytes::from_gib(4)));
        assert_eq!(cpu.available_memory(), Some(Bytes::from_gib(3)));
    }

    #[test]
    fn without_a_container_the_machine_is_the_limit() {
        let cpu = machine(&[], Some(3));
        assert_eq!(cpu.usable_cores(), 3);
        assert_eq!(cpu.usable_memory(), Some(Bytes::from_kib(24_731_708)));
        assert_eq!(cpu.available_memory(), Some(Bytes::from_kib(24_431_240)));
    }

    #[test]
    fn a_system_that_tells_nothing_still_has_one_core() {
        let tree = Tree::new([]);
        let cpu = Cpu::detect_in(&tree.environment([]), None);
        assert_eq!(cpu.usable_cores(), 1);
        assert_eq!((cpu.memory, cpu.l1d(), &cpu.model), (None, None, &None));
    }

    #[test]
    fn memory_without_its_unit_is_not_guessed() {
        assert_eq!(parse_meminfo("MemTotal: 100\nMemAvailable: 50\n"), None);
        assert_eq!(parse_meminfo("MemTotal: 100 kB\n"), None);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn this_machine_tells_its_cores_and_memory() {
        let cpu = Cpu::detect();
        assert!(cpu.usable_cores() >= 1);
        assert!(cpu.usable_memory().unwrap() > Bytes::from_mib(64));
        assert!(cpu.available_memory().unwrap() <= cpu.memory.unwrap().total);
    }
}

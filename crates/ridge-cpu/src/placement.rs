//! Where threads run, and so where the pages are that they touch first.
//!
//! On a machine of several NUMA nodes each thread stays on the CPUs of one node. Threads are numbered node after node, chunks
//! of a launch are taken in that order (`pool/chunks.rs`), and so are the parts of a weight written when it is loaded. The
//! threads that read a part of a weight are then those of the node that has its pages. On one node nothing is bound, so that
//! the system may move threads away from CPUs that others use.

use std::ops::Range;

use ridge_hw::environment::Environment;
use ridge_hw::topology;

/// Names the environment variable that says what threads are bound to.
const VARIABLE: &str = "RIDGE_CPU_PLACEMENT";

/// What threads are bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Binding {
    Nothing,
    /// The CPUs of their node, where there are several.
    Nodes,
    /// A CPU each, of a core each while there are such.
    Cpus,
}

/// Threads of one node, and what they are bound to.
#[derive(Clone, Debug, PartialEq, Eq)]
struct NodeThreads {
    threads: Range<usize>,
    /// The CPUs that the process may use of the node, those that share a core with an earlier one last.
    cpus: Vec<usize>,
}

/// Where the threads of a pool run.
#[derive(Clone, Debug)]
pub(crate) struct Placement {
    binding: Binding,
    nodes: Vec<NodeThreads>,
}

impl Placement {
    /// Of `threads` threads that go where the system moves them.
    pub(crate) fn anywhere(threads: usize) -> Self {
        Self { binding: Binding::Nothing, nodes: vec![NodeThreads { threads: 0..threads, cpus: Vec::new() }] }
    }

    /// Of `threads` threads on this machine.
    ///
    /// # Errors
    /// When [`VARIABLE`] has a value that means nothing.
    pub(crate) fn detect(threads: usize) -> Result<Self, String> {
        let binding = match std::env::var(VARIABLE).as_deref() {
            Err(_) | Ok("" | "nodes") => Binding::Nodes,
            Ok("none") => Binding::Nothing,
            Ok("cpus") => Binding::Cpus,
            Ok(other) => return Err(format!("{VARIABLE}={other} means nothing; it is `none`, `nodes` or `cpus`")),
        };
        Ok(Self::on(&Environment::host(), usable_cpus().as_deref(), binding, threads))
    }

    /// On the machine of `environment`, of whose CPUs the process may use `usable`, if that is known.
    fn on(environment: &Environment, usable: Option<&[usize]>, binding: Binding, threads: usize) -> Self {
        let Some(usable) = usable.filter(|usable| !usable.is_empty() && binding != Binding::Nothing) else {
            return Self::anywhere(threads);
        };
        let mut nodes: Vec<Vec<usize>> = topology::numa_nodes(environment)
            .unwrap_or_default()
            .into_iter()
            .map(|node| node.cpus.into_iter().filter(|cpu| usable.contains(cpu)).collect())
            .filter(|cpus: &Vec<usize>| !cpus.is_empty())
            .collect();
        // Fewer threads than nodes are those of one of several pools, of which each would choose the same node.
        if binding == Binding::Nodes && (nodes.len() < 2 || threads < nodes.len()) {
            return Self::anywhere(threads);
        }
        if nodes.len() < 2 {
            nodes = vec![usable.to_vec()];
        }
        let cores = topology::cores(environment);
        // How many of a core's CPUs come before it.
        let sibling = |cpu: &usize| cores.iter().find_map(|core| core.iter().position(|of| of == cpu)).unwrap_or(0);
        nodes.iter_mut().for_each(|cpus| cpus.sort_by_key(|cpu| (sibling(cpu), *cpu)));
        let all: usize = nodes.iter().map(Vec::len).sum();
        let mut before = 0;
        let place = |cpus: Vec<usize>| {
            // Each node has a share of the threads like its share of the CPUs.
            let first = threads * before / all;
            before += cpus.len();
            NodeThreads { threads: first..threads * before / all, cpus }
        };
        Self { binding, nodes: nodes.into_iter().map(place).filter(|node| !node.threads.is_empty()).collect() }
    }

    /// How many threads there are.
    pub(crate) fn threads(&self) -> usize {
        self.nodes.last().map_or(0, |node| node.threads.end)
    }

    /// The threads of each node, in order.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        self.nodes.iter().map(|node| node.threads.clone())
    }

    /// The CPUs that a thread stays on; none where it goes anywhere.
    fn cpus_of(&self, thread: usize) -> &[usize] {
        let node = self.nodes.iter().find(|node| node.threads.contains(&thread));
        let Some(NodeThreads { threads, cpus }) = node else { return &[] };
        match self.binding {
            Binding::Nothing => &[],
            Binding::Nodes => cpus,
            Binding::Cpus => {
                let nth = (thread - threads.start) % cpus.len();
                &cpus[nth..=nth]
            }
        }
    }

    /// Makes the calling thread stay where thread `thread` does, if the system lets it: without, it is slower and nothing
    /// else.
    pub(crate) fn bind(&self, thread: usize) {
        stay_on(self.cpus_of(thread));
    }

    /// Calls `work` for each of `parts`, of which there are at most as many as threads, each on a thread of the node whose
    /// threads take that part of a launch's chunks.
    pub(crate) fn for_each_part<T: Send>(
        &self,
        parts: impl ExactSizeIterator<Item = T>,
        work: impl Fn(usize, T) + Sync,
    ) {
        let (count, work) = (parts.len(), &work);
        std::thread::scope(|scope| {
            let mut here = None;
            for (nth, part) in parts.enumerate() {
                if nth == 0 && self.nodes.len() < 2 {
                    here = Some(part);
                } else {
                    scope.spawn(move || {
                        if self.nodes.len() > 1 {
                            self.bind(nth * self.threads() / count);
                        }
                        work(nth, part);
                    });
                }
            }
            if let Some(part) = here {
                work(0, part);
            }
        });
    }
}

/// The CPUs that this process may use, ascending.
#[cfg(target_os = "linux")]
fn usable_cpus() -> Option<Vec<usize>> {
    use rustix::thread::{CpuSet, sched_getaffinity};

    let set = sched_getaffinity(None).ok()?;
    Some((0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect())
}

#[cfg(target_os = "linux")]
fn stay_on(cpus: &[usize]) {
    use rustix::thread::{CpuSet, sched_setaffinity};

    if !cpus.is_empty() {
        let mut set = CpuSet::new();
        cpus.iter().filter(|cpu| **cpu < CpuSet::MAX_CPU).for_each(|cpu| set.set(*cpu));
        let _ = sched_setaffinity(None, &set);
    }
}

#[cfg(not(target_os = "linux"))]
fn usable_cpus() -> Option<Vec<usize>> {
    None
}

#[cfg(not(target_os = "linux"))]
fn stay_on(_cpus: &[usize]) {}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine of cores of two CPUs, `i` and `i + cores`, in nodes of as many neighbouring cores.
    fn machine(nodes: usize, cores: usize) -> (tempfile::TempDir, Environment) {
        let root = tempfile::tempdir().unwrap();
        let file = |path: String, text: String| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        for node in 0..nodes {
            let [first, end] = [node, node + 1].map(|n| n * cores / nodes);
            let list = format!("{first}-{},{}-{}\n", end - 1, first + cores, end + cores - 1);
            file(format!("sys/devices/system/node/node{node}/cpulist"), list);
        }
        for cpu in 0..2 * cores {
            let folder = format!("sys/devices/system/cpu/cpu{cpu}/topology");
            file(format!("{folder}/core_cpus_list"), format!("{},{}\n", cpu % cores, cpu % cores + cores));
        }
        let environment = Environment::under(root.path(), []);
        (root, environment)
    }

    fn on(nodes: usize, usable: Range<usize>, binding: Binding, threads: usize) -> Placement {
        let (_root, environment) = machine(nodes, 8);
        Placement::on(&environment, Some(&usable.collect::<Vec<_>>()), binding, threads)
    }

    #[test]
    fn threads_of_two_nodes_stay_on_theirs_in_equal_numbers() {
        let placement = on(2, 0..16, Binding::Nodes, 6);
        assert_eq!(placement.nodes().collect::<Vec<_>>(), [0..3, 3..6]);
        for thread in 0..6 {
            let first = if thread < 3 { 0 } else { 4 };
            let cpus: Vec<usize> = (first..first + 4).chain(first + 8..first + 12).collect();
            assert_eq!(placement.cpus_of(thread), cpus);
        }
    }

    #[test]
    fn nodes_have_threads_for_the_cpus_that_may_be_used() {
        // Six CPUs of node 0, two of node 1.
        let (_root, environment) = machine(2, 8);
        let usable = [0, 1, 2, 3, 8, 9, 4, 5];
        let placement = Placement::on(&environment, Some(&usable), Binding::Nodes, 8);
        assert_eq!(placement.nodes().collect::<Vec<_>>(), [0..6, 6..8]);
        assert_eq!(placement.cpus_of(7), [4, 5]);
        // A node that the process may not use, or that gets no thread, is none.
        assert!(on(2, 0..4, Binding::Nodes, 4).nodes().eq(std::iter::once(0..4)));
        assert!(Placement::on(&environment, Some(&usable), Binding::Nodes, 1).cpus_of(0).is_empty());
    }

    #[test]
    fn on_one_node_nothing_is_bound_unless_asked_for() {
        for placement in [on(1, 0..16, Binding::Nodes, 4), on(2, 0..16, Binding::Nothing, 4), Placement::anywhere(4)] {
            assert!(placement.nodes().eq(std::iter::once(0..4)));
            assert!((0..4).all(|thread| placement.cpus_of(thread).is_empty()));
        }
        let (_root, environment) = machine(2, 8);
        assert!(Placement::on(&environment, None, Binding::Nodes, 4).cpus_of(3).is_empty(), "what is not known");
    }

    #[test]
    fn threads_are_bound_to_cores_first_and_then_to_what_shares_them() {
        let placement = on(1, 0..16, Binding::Cpus, 16);
        assert!((0..16).all(|thread| placement.cpus_of(thread) == [thread]));
        let placement = on(2, 0..16, Binding::Cpus, 10);
        assert_eq!((0..10).map(|t| placement.cpus_of(t)[0]).collect::<Vec<_>>(), [0, 1, 2, 3, 8, 4, 5, 6, 7, 12]);
        // More threads than CPUs share them.
        assert_eq!(on(1, 0..2, Binding::Cpus, 3).cpus_of(2), [0]);
    }

    #[test]
    fn parts_are_written_by_threads_of_the_node_that_reads_them() {
        let placement = on(2, 0..16, Binding::Nodes, 6);
        let mut parts = [0usize; 4];
        placement.for_each_part(parts.iter_mut(), |nth, part| *part = nth + 1);
        assert_eq!(parts, [1, 2, 3, 4]);
        // Half of the parts, half of the threads.
        assert!((0..4).all(|nth| placement.nodes().position(|node| node.contains(&(nth * 6 / 4))) == Some(nth / 2)));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_bound_thread_runs_where_it_should() {
        let usable = usable_cpus().unwrap();
        let nodes = vec![NodeThreads { threads: 0..1, cpus: vec![*usable.last().unwrap()] }];
        let placement = Placement { binding: Binding::Nodes, nodes };
        let found = std::thread::spawn(move || {
            placement.bind(0);
            usable_cpus().unwrap()
        });
        assert_eq!(found.join().unwrap(), [*usable.last().unwrap()]);
        assert_eq!(usable_cpus().unwrap(), usable, "other threads are not");
    }
}

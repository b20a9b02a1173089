//! Cores, sockets and NUMA nodes, as sysfs states them.

use std::collections::BTreeSet;
use std::path::Path;

use serde::Serialize;

use crate::environment::{Environment, numbered, read_value};

/// A NUMA node: memory and the logical CPUs nearest to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NumaNode {
    /// The kernel's number of the node.
    pub id: usize,
    /// Numbers of its logical CPUs, ascending; none for a node of memory alone (CXL, a GPU's memory).
    pub cpus: Vec<usize>,
}

/// The machine's NUMA nodes; `None` where the kernel does not tell.
pub fn numa_nodes(environment: &Environment) -> Option<Vec<NumaNode>> {
    let nodes: Vec<NumaNode> = numbered(&environment.locate("/sys/devices/system/node"), "node")
        .into_iter()
        .filter_map(|(id, folder)| {
            let cpus = parse_cpu_list(&read_value(&folder.join("cpulist"))?)?;
            Some(NumaNode { id, cpus })
        })
        .collect();
    (!nodes.is_empty()).then_some(nodes)
}

/// How many of each there are among the online CPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CoreCounts {
    pub(crate) logical: usize,
    pub(crate) physical: usize,
    pub(crate) sockets: usize,
}

/// Counts cores by the sets of CPUs that share one; `None` where the kernel does not tell.
pub(crate) fn core_counts(environment: &Environment) -> Option<CoreCounts> {
    let (mut logical, mut cores, mut sockets) = (0, BTreeSet::new(), BTreeSet::new());
    for (_, cpu) in numbered(&environment.locate("/sys/devices/system/cpu"), "cpu") {
        let topology = cpu.join("topology");
        let socket = read_value(&topology.join("physical_package_id"));
        let (Some(siblings), Some(socket)) = (siblings(&topology), socket) else {
            continue;
        };
        logical += 1;
        cores.insert(siblings);
        sockets.insert(socket);
    }
    (logical > 0).then_some(CoreCounts { logical, physical: cores.len(), sockets: sockets.len() })
}

/// The logical CPUs of each core, both ascending; empty where the kernel does not tell.
pub fn cores(environment: &Environment) -> Vec<Vec<usize>> {
    let cores = numbered(&environment.locate("/sys/devices/system/cpu"), "cpu")
        .into_iter()
        .filter_map(|(_, cpu)| parse_cpu_list(&siblings(&cpu.join("topology"))?));
    // Each core is stated once by each of its CPUs.
    cores.collect::<BTreeSet<_>>().into_iter().collect()
}

/// The CPUs that share the core of a CPU, given its folder `topology`. One that is offline has none.
fn siblings(topology: &Path) -> Option<String> {
    // Kernels before 5.2 know the second name alone.
    read_value(&topology.join("core_cpus_list")).or_else(|| read_value(&topology.join("thread_siblings_list")))
}

/// The CPUs of a kernel list such as `0-3,8`; an empty list has none. `None` when the text is no such list.
pub(crate) fn parse_cpu_list(text: &str) -> Option<Vec<usize>> {
    let mut cpus = BTreeSet::new();
    for range in text.trim().split(',').filter(|range| !range.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        cpus.extend(first.parse::<usize>().ok()?..=last.parse().ok()?);
    }
    Some(cpus.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::fake::Tree;

    #[test]
    fn a_cpu_list_may_have_gaps() {
        assert_eq!(parse_cpu_list("0-3,8\n"), Some(vec![0, 1, 2, 3, 8]));
        assert_eq!(parse_cpu_list("\n"), Some(vec![]));
        assert_eq!(parse_cpu_list("0-x"), None);
    }

    #[test]
    fn numa_nodes_list_their_cpus_and_memory_alone_has_none() {
        let tree = Tree::new([
            ("/sys/devices/system/node/node0/cpulist", "0-1\n"),
            ("/sys/devices/system/node/node1/cpulist", "2-3\n"),
            ("/sys/devices/system/node/node10/cpulist", "\n"),
            ("/sys/devices/system/node/online", "0-1,10\n"),
        ]);
        let node = |id, cpus: &[usize]| NumaNode { id, cpus: cpus.to_vec() };
        let expected = vec![node(0, &[0, 1]), node(1, &[2, 3]), node(10, &[])];
        assert_eq!(numa_nodes(&tree.environment([])), Some(expected));
    }

    #[test]
    fn threads_of_one_core_count_once() {
        let tree = Tree::new([]);
        for (cpu, siblings, socket) in [(0, "0,2", "0"), (1, "1,3", "1"), (2, "0,2", "0"), (3, "1,3", "1")] {
            let folder = format!("/sys/devices/system/cpu/cpu{cpu}/topology");
            tree.file(&format!("{folder}/thread_siblings_list"), siblings);
            tree.file(&format!("{folder}/physical_package_id"), socket);
        }
        tree.file("/sys/devices/system/cpu/cpu4/online", "0\n");
        let counts = core_counts(&tree.environment([])).unwrap();
        assert_eq!(counts, CoreCounts { logical: 4, physical: 2, sockets: 2 });
        assert_eq!(cores(&tree.environment([])), [[0, 2], [1, 3]]);
    }

    #[test]
    fn a_machine_that_does_not_tell_gives_none() {
        let tree = Tree::new([]);
        assert_eq!(numa_nodes(&tree.environment([])), None);
        assert_eq!(core_counts(&tree.environment([])), None);
        assert!(cores(&tree.environment([])).is_empty());
    }
}

//! Caches, from `/sys/devices/system/cpu/cpu*/cache/index*`.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::Serialize;

use crate::environment::{Environment, numbered, read_value};
use crate::topology::parse_cpu_list;
use crate::units::Bytes;

/// One kind of cache of the machine, with how many there are of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Cache {
    /// 1 is nearest to the core.
    pub level: u32,
    /// What it holds.
    pub kind: CacheKind,
    /// Capacity of one instance.
    pub size: Bytes,
    /// Size of a line; `None` where the kernel does not tell.
    pub line: Option<Bytes>,
    /// Logical CPUs that share one instance.
    pub shared_by: usize,
    /// Instances in the machine.
    pub instances: usize,
}

/// What a cache holds. Instruction caches are left out, for no kernel is sized by them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CacheKind {
    /// Data alone.
    Data,
    /// Data and instructions.
    Unified,
}

/// All properties by which one cache is the like of another.
type Description = (u32, CacheKind, Bytes, Option<Bytes>, usize);

/// The caches by level; within a level, as on hybrid CPUs, the most numerous first.
pub(super) fn detect(environment: &Environment) -> Vec<Cache> {
    // Each CPU lists the caches that it sees, so one instance is listed by all CPUs that share it.
    let mut sharers: BTreeMap<Description, BTreeSet<Vec<usize>>> = BTreeMap::new();
    for (_, cpu) in numbered(&environment.locate("/sys/devices/system/cpu"), "cpu") {
        for (_, index) in numbered(&cpu.join("cache"), "index") {
            if let Some((description, cpus)) = read(&index) {
                sharers.entry(description).or_default().insert(cpus);
            }
        }
    }
    let mut caches: Vec<Cache> = sharers
        .into_iter()
        .map(|((level, kind, size, line, shared_by), instances)| Cache {
            level,
            kind,
            size,
            line,
            shared_by,
            instances: instances.len(),
        })
        .collect();
    caches.sort_by_key(|cache| (cache.level, Reverse(cache.instances)));
    caches
}

fn read(index: &Path) -> Option<(Description, Vec<usize>)> {
    let value = |name: &str| read_value(&index.join(name));
    let kind = match value("type")?.as_str() {
        "Data" => CacheKind::Data,
        "Unified" => CacheKind::Unified,
        _ => return None,
    };
    let level = value("level")?.parse().ok()?;
    let size = Bytes::from_kib(value("size")?.strip_suffix('K')?.parse().ok()?);
    let line = value("coherency_line_size").and_then(|line| line.parse().ok()).map(Bytes);
    let cpus = parse_cpu_list(&value("shared_cpu_list")?)?;
    Some(((level, kind, size, line, cpus.len()), cpus))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::fake::Tree;

    fn add(tree: &Tree, cpu: usize, index: usize, level: &str, kind: &str, size: &str, shared: &str) {
        let file = |name| format!("/sys/devices/system/cpu/cpu{cpu}/cache/index{index}/{name}");
        tree.file(&file("level"), level);
        tree.file(&file("type"), kind);
        tree.file(&file("size"), size);
        tree.file(&file("shared_cpu_list"), shared);
        tree.file(&file("coherency_line_size"), "64\n");
    }

    #[test]
    fn a_shared_cache_is_one_instance() {
        let tree = Tree::new([]);
        for cpu in 0..4 {
            let own = format!("{cpu}\n");
            add(&tree, cpu, 0, "1\n", "Data\n", "48K\n", &own);
            add(&tree, cpu, 1, "1\n", "Instruction\n", "32K\n", &own);
            add(&tree, cpu, 2, "2\n", "Unified\n", "2048K\n", if cpu < 2 { "0-1\n" } else { "2-3\n" });
            add(&tree, cpu, 3, "3\n", "Unified\n", "307200K\n", "0-3\n");
        }
        let cache = |level, kind, size, shared_by, instances| Cache {
            level,
            kind,
            size,
            line: Some(Bytes(64)),
            shared_by,
            instances,
        };
        let expected = [
            cache(1, CacheKind::Data, Bytes::from_kib(48), 1, 4),
            cache(2, CacheKind::Unified, Bytes::from_mib(2), 2, 2),
            cache(3, CacheKind::Unified, Bytes::from_mib(300), 4, 1),
        ];
        assert_eq!(detect(&tree.environment([])), expected);
    }

    #[test]
    fn on_a_hybrid_cpu_the_most_numerous_cores_come_first() {
        let tree = Tree::new([]);
        add(&tree, 0, 0, "1", "Data", "32K", "0");
        add(&tree, 1, 0, "1", "Data", "48K", "1");
        add(&tree, 2, 0, "1", "Data", "48K", "2");
        let sizes: Vec<Bytes> = detect(&tree.environment([])).iter().map(|cache| cache.size).collect();
        assert_eq!(sizes, [Bytes::from_kib(48), Bytes::from_kib(32)]);
    }

    #[test]
    fn a_size_that_cannot_be_read_leaves_the_cache_out() {
        let tree = Tree::new([]);
        add(&tree, 0, 0, "1", "Data", "48 furlongs", "0");
        assert_eq!(detect(&tree.environment([])), []);
    }
}

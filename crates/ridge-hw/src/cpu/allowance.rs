//! What control groups leave to this process: the real size of a container.
//!
//! A limit holds for a group and all below it, so the least along the path from the process's group to the root of
//! the mount counts. Source: the Linux documentation, `admin-guide/cgroup-v2.rst` and `admin-guide/cgroup-v1`.

use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::environment::{Environment, read_value};
use crate::units::Bytes;

/// Limits set by control groups, version 1 or 2. `None` is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Allowance {
    /// CPU time per time, in cores; may be fractional.
    pub cores: Option<f64>,
    /// Memory limit.
    pub memory: Option<Bytes>,
    /// What the limit leaves now: the limit less what is in use and cannot be reclaimed cheaply.
    pub memory_left: Option<Bytes>,
}

impl Allowance {
    pub(super) fn detect(environment: &Environment) -> Self {
        let mounts = environment.read("/proc/self/mountinfo").unwrap_or_default();
        let groups = environment.read("/proc/self/cgroup").unwrap_or_default();
        let folders = |controller| folders(controller, &mounts, &groups, environment);

        let quotas = folders("cpu").into_iter().filter_map(|folder| quota(&folder));
        let memory: Vec<(Bytes, Bytes)> = folders("memory").iter().filter_map(|folder| memory(folder)).collect();
        Self {
            cores: quotas.min_by(f64::total_cmp),
            memory: memory.iter().map(|(limit, _)| *limit).min(),
            memory_left: memory.iter().map(|(limit, used)| limit.saturating_sub(*used)).min(),
        }
    }
}

/// The folders of the groups that bind this process for a controller, in both versions' hierarchies.
fn folders(controller: &str, mounts: &str, groups: &str, environment: &Environment) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for mount in mounts.lines().filter_map(parse_mount) {
        let group = groups.lines().find_map(|line| {
            // `hierarchy:controllers:path`; version 2 is hierarchy 0 and names no controllers.
            let mut fields = line.splitn(3, ':');
            let (hierarchy, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
            let ours = match mount.kind {
                "cgroup2" => hierarchy == "0" && controllers.is_empty(),
                "cgroup" => has(controllers, controller) && has(mount.options, controller),
                _ => false,
            };
            ours.then_some(path)
        });
        let Some(group) = group else { continue };
        // A container often sees its own group mounted as the root; a path outside the mount is out of sight.
        let inside = Path::new(group).strip_prefix(mount.root).unwrap_or(Path::new(""));
        found.extend(inside.ancestors().map(|group| environment.locate(mount.point).join(group)));
    }
    found
}

fn has(list: &str, item: &str) -> bool {
    list.split(',').any(|entry| entry == item)
}

/// A line of `/proc/self/mountinfo` (proc(5)): `id parent dev root point options [tags] - kind source options`.
struct Mount<'a> {
    root: &'a str,
    point: &'a str,
    kind: &'a str,
    options: &'a str,
}

fn parse_mount(line: &str) -> Option<Mount<'_>> {
    let (place, system) = line.split_once(" - ")?;
    let mut place = place.split(' ').skip(3);
    let mut system = system.split(' ');
    Some(Mount { root: place.next()?, point: place.next()?, kind: system.next()?, options: system.nth(1)? })
}

/// The quota of one group, in cores.
fn quota(folder: &Path) -> Option<f64> {
    let (quota, period) = match read_value(&folder.join("cpu.max")) {
        Some(text) => text.split_once(' ').map(|(quota, period)| (quota.to_owned(), period.to_owned()))?,
        None => (read_value(&folder.join("cpu.cfs_quota_us"))?, read_value(&folder.join("cpu.cfs_period_us"))?),
    };
    // "max" in version 2 and -1 in version 1 mean no limit.
    let (quota, period): (u64, u64) = (quota.parse().ok()?, period.parse().ok()?);
    (quota > 0 && period > 0).then(|| quota as f64 / period as f64)
}

/// The limit of one group and what it uses that the kernel cannot take back: files that it caches do not count.
fn memory(folder: &Path) -> Option<(Bytes, Bytes)> {
    // Version 1 writes "no limit" as the largest multiple of a page; pages are at most 64 KiB.
    const NONE: u64 = i64::MAX as u64 & !0xffff;
    let (limit, usage, cached) = match read_value(&folder.join("memory.max")) {
        Some(limit) => (limit, "memory.current", ["inactive_file", "active_file", "slab_reclaimable"]),
        None => (
            read_value(&folder.join("memory.limit_in_bytes"))?,
            "memory.usage_in_bytes",
            ["total_inactive_file", "total_active_file", "total_slab_reclaimable"],
        ),
    };
    let limit = limit.parse().ok().filter(|&limit| limit < NONE)?;
    let used = read_value(&folder.join(usage)).and_then(|text| text.parse().ok()).unwrap_or(0);
    let stat = read_value(&folder.join("memory.stat")).unwrap_or_default();
    let of =
        |name: &str| stat.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok()).unwrap_or(0);
    let reclaimable = cached.into_iter().map(of).sum();
    Some((Bytes(limit), Bytes(used).saturating_sub(Bytes(reclaimable))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::fake::Tree;

    const V2: &str = "30 24 0:27 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";
    const V1: &str = "\
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 /docker/c0 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory
36 31 0:33 / /tmp rw - tmpfs tmpfs rw
";

    fn detect(mounts: &str, groups: &str, files: &[(&str, &str)]) -> Allowance {
        let tree = Tree::new(files.iter().copied());
        tree.file("/proc/self/mountinfo", mounts);
        tree.file("/proc/self/cgroup", groups);
        Allowance::detect(&tree.environment([]))
    }

    #[test]
    fn a_parent_groups_limit_binds_its_children() {
        let files = [
            ("/sys/fs/cgroup/pod/cpu.max", "200000 100000\n"),
            ("/sys/fs/cgroup/pod/job/cpu.max", "max 100000\n"),
            ("/sys/fs/cgroup/pod/memory.max", "1000000\n"),
            ("/sys/fs/cgroup/pod/job/memory.max", "3000000\n"),
        ];
        let allowance = detect(V2, "0::/pod/job\n", &files);
        assert_eq!(allowance.cores, Some(2.0));
        assert_eq!(allowance.memory, Some(Bytes(1_000_000)));
    }

    #[test]
    fn page_cache_does_not_count_as_used() {
        let files = [
            ("/sys/fs/cgroup/memory.max", "1000\n"),
            ("/sys/fs/cgroup/memory.current", "900\n"),
            ("/sys/fs/cgroup/memory.stat", "anon 200\nfile 700\ninactive_file 600\n"),
        ];
        assert_eq!(detect(V2, "0::/\n", &files).memory_left, Some(Bytes(700)));
    }

    #[test]
    fn version_one_limits_are_read_below_the_mounts_root() {
        let files = [
            ("/sys/fs/cgroup/cpu,cpuacct/docker/c0/cpu.cfs_quota_us", "150000\n"),
            ("/sys/fs/cgroup/cpu,cpuacct/docker/c0/cpu.cfs_period_us", "100000\n"),
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "2000\n"),
            ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "500\n"),
        ];
        let allowance = detect(V1, "4:memory:/docker/c0\n1:cpu,cpuacct:/docker/c0\n0::/\n", &files);
        let expected = Allowance { cores: Some(1.5), memory: Some(Bytes(2000)), memory_left: Some(Bytes(1500)) };
        assert_eq!(allowance, expected);
    }

    #[test]
    fn no_limit_is_none_in_both_versions() {
        let v2 = [("/sys/fs/cgroup/cpu.max", "max 100000\n"), ("/sys/fs/cgroup/memory.max", "max\n")];
        assert_eq!(detect(V2, "0::/\n", &v2), Allowance::default());
        let v1 = [
            ("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n"),
            ("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n"),
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
        ];
        assert_eq!(detect(V1, "4:memory:/docker/c0\n1:cpu,cpuacct:/\n", &v1), Allowance::default());
    }

    #[test]
    fn a_machine_without_control_groups_has_no_limits() {
        assert_eq!(detect("", "", &[]), Allowance::default());
    }
}

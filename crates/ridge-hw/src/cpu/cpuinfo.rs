//! The text of `/proc/cpuinfo`, whose keys differ between architectures.

use std::collections::BTreeSet;

/// What `/proc/cpuinfo` states. Absent keys are `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuInfo {
    /// Maker, as written on x86 (`GenuineIntel`), by name on Arm (`Ampere`).
    pub vendor: Option<String>,
    /// `model name`; on Arm, where there is none, the maker's part number (`ARM part 0xd4f`).
    pub model: Option<String>,
    /// Hardware threads listed.
    pub logical_cores: Option<usize>,
    /// Distinct pairs of package and core.
    pub physical_cores: Option<usize>,
    /// Distinct packages.
    pub sockets: Option<usize>,
    /// The first CPU's `flags` (x86) or `Features` (Arm).
    pub flags: BTreeSet<String>,
}

/// Reads the text of `/proc/cpuinfo`. Text in another form gives an empty result.
pub fn parse_cpuinfo(text: &str) -> CpuInfo {
    let mut info = CpuInfo::default();
    let (mut logical, mut cores, mut sockets) = (0, BTreeSet::new(), BTreeSet::new());
    let (mut implementer, mut part) = (None, None);
    for cpu in text.split("\n\n") {
        let (mut package, mut core) = (None, None);
        for (key, value) in cpu.lines().filter_map(|line| line.split_once(':')) {
            let value = value.trim();
            match key.trim() {
                "processor" => logical += usize::from(value.parse::<usize>().is_ok()),
                "physical id" => package = Some(value),
                "core id" => core = Some(value),
                "vendor_id" => drop(info.vendor.get_or_insert_with(|| value.to_owned())),
                "model name" => drop(info.model.get_or_insert_with(|| value.to_owned())),
                "CPU implementer" => implementer = implementer.or(Some(value)),
                "CPU part" => part = part.or(Some(value)),
                "flags" | "Features" if info.flags.is_empty() => {
                    info.flags = value.split_whitespace().map(str::to_owned).collect();
                }
                _ => {}
            }
        }
        sockets.extend(package);
        cores.extend(package.zip(core));
    }
    if let Some(code) = implementer {
        let maker = arm_implementer(code).map_or_else(|| format!("Arm implementer {code}"), str::to_owned);
        info.model = info.model.or_else(|| part.map(|part| format!("{maker} part {part}")));
        info.vendor.get_or_insert(maker);
    }
    let known = |count: usize| (count > 0).then_some(count);
    info.logical_cores = known(logical);
    info.physical_cores = known(cores.len());
    info.sockets = known(sockets.len());
    info
}

/// Implementer codes of the `MIDR_EL1` register (Arm Architecture Reference Manual, and Linux `cputype.h`).
fn arm_implementer(code: &str) -> Option<&'static str> {
    Some(match code {
        "0x41" => "ARM",
        "0x46" => "Fujitsu",
        "0x48" => "HiSilicon",
        "0x4e" => "NVIDIA",
        "0x51" => "Qualcomm",
        "0x61" => "Apple",
        "0xc0" => "Ampere",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO_CORES_FOUR_THREADS: &str = "\
processor\t: 0
vendor_id\t: AuthenticAMD
model name\t: AMD EPYC 9654 96-Core Processor
physical id\t: 0
core id\t\t: 0
flags\t\t: fpu sse4_2 avx2 avx512_bf16

processor\t: 1
physical id\t: 0
core id\t\t: 1

processor\t: 2
physical id\t: 0
core id\t\t: 0

processor\t: 3
physical id\t: 0
core id\t\t: 1
";

    const ARM_SERVER: &str = "\
processor\t: 0
BogoMIPS\t: 2000.00
Features\t: fp asimd asimddp sve bf16 i8mm
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x0
CPU part\t: 0xd4f

processor\t: 1
CPU implementer\t: 0x41
CPU part\t: 0xd4f
";

    #[test]
    fn threads_of_one_core_are_counted_once() {
        let info = parse_cpuinfo(TWO_CORES_FOUR_THREADS);
        assert_eq!((info.logical_cores, info.physical_cores, info.sockets), (Some(4), Some(2), Some(1)));
        assert_eq!(info.vendor.as_deref(), Some("AuthenticAMD"));
        assert_eq!(info.model.as_deref(), Some("AMD EPYC 9654 96-Core Processor"));
        assert!(info.flags.contains("avx512_bf16") && !info.flags.contains("avx512f"));
    }

    #[test]
    fn core_numbers_that_repeat_across_sockets_are_different_cores() {
        let text =
            TWO_CORES_FOUR_THREADS.replacen("physical id\t: 0\ncore id\t\t: 1", "physical id\t: 1\ncore id\t\t: 0", 2);
        let info = parse_cpuinfo(&text);
        assert_eq!((info.physical_cores, info.sockets), (Some(2), Some(2)));
    }

    #[test]
    fn an_arm_cpu_is_named_by_maker_and_part() {
        let info = parse_cpuinfo(ARM_SERVER);
        assert_eq!(info.vendor.as_deref(), Some("ARM"));
        assert_eq!(info.model.as_deref(), Some("ARM part 0xd4f"));
        assert_eq!((info.logical_cores, info.physical_cores), (Some(2), None));
        assert!(info.flags.contains("i8mm"));
    }

    #[test]
    fn text_of_another_form_states_nothing() {
        assert_eq!(parse_cpuinfo("no such file"), CpuInfo::default());
    }
}

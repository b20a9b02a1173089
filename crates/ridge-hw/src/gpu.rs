//! NVIDIA GPUs, their driver and the libraries that drive them, found as files: nothing is loaded and nothing run.

mod library;
mod search;

use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;

pub use library::{Library, LibraryFile, LibrarySearch};

use crate::environment::{Environment, entries, read_value};
use crate::spec::DeviceSpec;

/// A GPU that the machine has; whether it can be used is for its driver to say.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Gpu {
    /// PCI address, such as `0000:18:00.0`.
    pub address: String,
    /// Name that the driver gives, such as `NVIDIA H200`; `None` when the driver does not know the GPU.
    pub model: Option<String>,
    /// Identifier that the driver gives, such as `GPU-6f…`.
    pub uuid: Option<String>,
    /// PCI device number, such as `0x2335`; `None` when sysfs does not list the GPU.
    pub pci_device: Option<u16>,
    /// NUMA node that it is attached to; `None` where the kernel does not tell.
    pub numa_node: Option<usize>,
}

impl Gpu {
    /// The specification sheet of its model, if there is one.
    pub fn spec(&self) -> Option<&'static DeviceSpec> {
        DeviceSpec::find(self.model.as_deref()?).ok()
    }
}

/// All that the files of a machine say of NVIDIA.
#[derive(Clone, Debug, Serialize)]
pub struct Nvidia {
    /// GPUs, by PCI address.
    pub gpus: Vec<Gpu>,
    /// Version of the driver's kernel module, if it is loaded, such as `580.65.06`.
    pub kernel_module: Option<String>,
    /// Where each library is, in the order of [`Library::ALL`].
    pub libraries: Vec<LibrarySearch>,
}

impl Nvidia {
    /// Looks at this machine. Never fails.
    pub fn detect() -> Self {
        Self::detect_in(&Environment::host())
    }

    /// Looks at the files and variables of `environment`.
    pub fn detect_in(environment: &Environment) -> Self {
        Self {
            gpus: gpus(environment),
            kernel_module: kernel_module(environment),
            libraries: library::find_all(environment),
        }
    }

    /// Where `library` is.
    pub fn library(&self, library: Library) -> Option<&LibrarySearch> {
        self.libraries.iter().find(|search| search.library() == library)
    }
}

/// The GPUs that the driver or the PCI bus lists, by address.
fn gpus(environment: &Environment) -> Vec<Gpu> {
    let mut found: BTreeMap<String, Gpu> = BTreeMap::new();
    for folder in entries(&environment.locate("/sys/bus/pci/devices")) {
        if let Some(gpu) = pci_gpu(&folder) {
            found.insert(gpu.address.clone(), gpu);
        }
    }
    for folder in entries(&environment.locate("/proc/driver/nvidia/gpus")) {
        let Some(text) = read_value(&folder.join("information")) else { continue };
        let Some(address) = file_name(&folder) else { continue };
        let gpu = found.entry(address.clone()).or_insert(Gpu {
            address,
            model: None,
            uuid: None,
            pci_device: None,
            numa_node: None,
        });
        (gpu.model, gpu.uuid) = parse_information(&text);
    }
    found.into_values().collect()
}

/// A device of the PCI bus, if it is NVIDIA's and a display controller (class 03: VGA or 3D).
fn pci_gpu(folder: &Path) -> Option<Gpu> {
    let value = |name: &str| read_value(&folder.join(name));
    if value("vendor")? != "0x10de" || !value("class")?.starts_with("0x03") {
        return None;
    }
    Some(Gpu {
        address: file_name(folder)?,
        model: None,
        uuid: None,
        pci_device: value("device").and_then(|id| u16::from_str_radix(id.strip_prefix("0x")?, 16).ok()),
        // -1 on machines of a single node.
        numa_node: value("numa_node").and_then(|node| node.parse().ok()),
    })
}

fn file_name(path: &Path) -> Option<String> {
    Some(path.file_name()?.to_str()?.to_owned())
}

/// Model and UUID in the text of `/proc/driver/nvidia/gpus/*/information`.
pub(crate) fn parse_information(text: &str) -> (Option<String>, Option<String>) {
    let value = |key: &str| {
        let mut pairs = text.lines().filter_map(|line| line.split_once(':'));
        let (_, value) = pairs.find(|(name, _)| name.trim() == key)?;
        let value = value.trim();
        // Where the driver withholds it, it writes question marks.
        (!value.is_empty() && !value.contains('?')).then(|| value.to_owned())
    };
    (value("Model"), value("GPU UUID"))
}

fn kernel_module(environment: &Environment) -> Option<String> {
    parse_driver_version(&environment.read("/proc/driver/nvidia/version")?)
}

/// The version in the text of `/proc/driver/nvidia/version`, of the open or the closed module.
pub(crate) fn parse_driver_version(text: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with("NVRM version:"))?;
    let is_version = |word: &&str| word.contains('.') && word.split('.').all(|part| part.parse::<u32>().is_ok());
    line.split_whitespace().find(is_version).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::fake::Tree;

    const INFORMATION: &str = "\
Model: \t\t NVIDIA H200
IRQ:   \t\t 0
GPU UUID: \t GPU-11111111-2222-3333-4444-555555555555
Video BIOS: \t 96.00.bc.00.03
Bus Type: \t PCIe
Bus Location: \t 0000:18:00.0
GPU Excluded:\t No
";

    fn pci(tree: &Tree, address: &str, vendor: &str, class: &str) {
        let file = |name| format!("/sys/bus/pci/devices/{address}/{name}");
        tree.file(&file("vendor"), vendor);
        tree.file(&file("class"), class);
        tree.file(&file("device"), "0x2335\n");
        tree.file(&file("numa_node"), "1\n");
    }

    #[test]
    fn the_bus_and_the_driver_describe_one_gpu() {
        let tree = Tree::new([("/proc/driver/nvidia/gpus/0000:18:00.0/information", INFORMATION)]);
        pci(&tree, "0000:18:00.0", "0x10de\n", "0x030200\n");
        let gpus = Nvidia::detect_in(&tree.environment([])).gpus;
        let expected = Gpu {
            address: "0000:18:00.0".to_owned(),
            model: Some("NVIDIA H200".to_owned()),
            uuid: Some("GPU-11111111-2222-3333-4444-555555555555".to_owned()),
            pci_device: Some(0x2335),
            numa_node: Some(1),
        };
        assert_eq!(gpus, [expected]);
        assert_eq!(gpus[0].spec().unwrap().name, "H200");
    }

    #[test]
    fn a_gpu_without_a_driver_is_still_seen() {
        let tree = Tree::new([]);
        pci(&tree, "0000:01:00.0", "0x10de\n", "0x030000\n");
        let gpus = Nvidia::detect_in(&tree.environment([])).gpus;
        assert_eq!((gpus.len(), gpus[0].model.as_deref(), gpus[0].spec()), (1, None, None));
    }

    #[test]
    fn other_devices_of_the_bus_are_not_gpus() {
        let tree = Tree::new([]);
        pci(&tree, "0000:01:00.1", "0x10de\n", "0x040300\n"); // its sound
        pci(&tree, "0000:02:00.0", "0x10de\n", "0x068000\n"); // an NVSwitch
        pci(&tree, "0000:03:00.0", "0x1002\n", "0x030000\n"); // AMD
        assert_eq!(Nvidia::detect_in(&tree.environment([])).gpus, []);
    }

    #[test]
    fn a_uuid_that_the_driver_withholds_is_none() {
        let (model, uuid) =
            parse_information("Model: \t NVIDIA L4\nGPU UUID: \t GPU-????????-????-????-????-????????????\n");
        assert_eq!((model.as_deref(), uuid), (Some("NVIDIA L4"), None));
    }

    #[test]
    fn both_kernel_modules_state_their_version() {
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39 UTC 2023\n";
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs)\n\
                    GCC version:  gcc version 13.3.0\n";
        assert_eq!(parse_driver_version(closed).as_deref(), Some("535.54.03"));
        assert_eq!(parse_driver_version(open).as_deref(), Some("580.65.06"));
        assert_eq!(parse_driver_version("GCC version:  gcc version 13.3.0\n"), None);
    }
}

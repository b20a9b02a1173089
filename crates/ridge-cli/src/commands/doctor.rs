//! `ridge doctor`: the machine's hardware and measured rates.

use std::time::Duration;

use clap::Args;
use ridge_cpu::measure::{MemoryProbe, matmul};
use ridge_graph::DType;
use ridge_graph::passes::Activations;
use ridge_hw::cpu::{CacheKind, Cpu};
use ridge_hw::figure::Figure;
use ridge_hw::gpu::{LibrarySearch, Nvidia};
use ridge_hw::units::{Bytes, BytesPerSecond, FlopsPerSecond};
use serde_json::json;

use crate::error::Result;
use crate::output::{Spinner, columns, count, print, print_json};

/// Show the hardware and its measured rates
///
/// Detects the CPU, memory, NVIDIA GPUs and their libraries, and measures memory bandwidth and matrix-product throughput
/// for about two seconds.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ridge doctor
  ridge doctor --json | jq .measured")]
pub(crate) struct DoctorArgs {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Duration of each of the four measurements, without preparation.
const BUDGET: Duration = Duration::from_millis(300);
/// Minimum size of the memory that is read: far larger than the caches of most machines.
const MIN_READ: Bytes = Bytes::from_mib(256);
/// Maximum size of the memory that is read, to limit the time for filling it.
const MAX_READ: Bytes = Bytes::from_gib(2);

pub(crate) fn run(args: &DoctorArgs) -> Result<()> {
    let (cpu, nvidia) = (Cpu::detect(), Nvidia::detect());
    let measured = measure(&cpu)?;
    if args.json { print_json(&object(&cpu, &nvidia, &measured)) } else { print(&text(&cpu, &nvidia, &measured)) }
}

/// Measured rates, with one thread and with all usable cores.
struct DoctorRates {
    threads: usize,
    memory_read: [Figure<BytesPerSecond>; 2],
    f32_matmul: [Figure<FlopsPerSecond>; 2],
}

fn measure(cpu: &Cpu) -> Result<DoctorRates> {
    let threads = cpu.usable_cores();
    let spinner = Spinner::new();
    spinner.now("filling memory to read");
    let probe = MemoryProbe::new(bytes_to_read(cpu), threads)?;
    spinner.now("measuring memory with one thread");
    let one = probe.read(1, BUDGET);
    spinner.now("measuring memory with all threads");
    let memory_read = [one, probe.read(threads, BUDGET)];
    drop(probe);
    spinner.now("measuring matrix products with one thread");
    let product = |threads| matmul(DType::F32, Activations::Exact, threads, BUDGET);
    let one = product(1)?;
    spinner.now("measuring matrix products with all threads");
    let f32_matmul = [one, product(threads)?];
    Ok(DoctorRates { threads, memory_read, f32_matmul })
}

/// Four times the last-level caches, within limits and at most a quarter of the available memory.
fn bytes_to_read(cpu: &Cpu) -> Bytes {
    let last = cpu.caches.iter().map(|c| c.level).max();
    let caches: Bytes = cpu.caches.iter().filter(|c| Some(c.level) == last).map(|c| c.size * c.instances as u64).sum();
    let left = cpu.available_memory().map_or(MIN_READ, |memory| Bytes(memory.0 / 4));
    (caches * 4).clamp(MIN_READ, MAX_READ).min(left)
}

fn object(cpu: &Cpu, nvidia: &Nvidia, measured: &DoctorRates) -> serde_json::Value {
    json!({
        "ridge": env!("CARGO_PKG_VERSION"),
        "cpu": cpu,
        "usable_cores": cpu.usable_cores(),
        "usable_memory": cpu.usable_memory(),
        "available_memory": cpu.available_memory(),
        "measured": {
            "threads": measured.threads,
            "memory_read_one_thread": measured.memory_read[0],
            "memory_read_all_threads": measured.memory_read[1],
            "f32_matmul_one_thread": measured.f32_matmul[0],
            "f32_matmul_all_threads": measured.f32_matmul[1],
        },
        "nvidia": nvidia,
        "remedies": remedies(nvidia),
    })
}

fn text(cpu: &Cpu, nvidia: &Nvidia, measured: &DoctorRates) -> String {
    let mut text = format!("ridge {}\n\nCPU\n", env!("CARGO_PKG_VERSION"));
    text += &block(cpu_rows(cpu));
    let mut rows = rates("memory read", &measured.memory_read, measured.threads);
    rows.extend(rates("f32 matmul by Ridge's kernels", &measured.f32_matmul, measured.threads));
    text += "\nReached\n";
    text += &block(rows);
    text += "\nNVIDIA\n";
    text += &block(nvidia_rows(nvidia));
    for remedy in remedies(nvidia) {
        text += &format!("\nTo fix it: {remedy}\n");
    }
    text
}

fn rates<T: std::fmt::Display>(what: &str, [one, all]: &[Figure<T>; 2], threads: usize) -> Vec<Vec<String>> {
    let row = |threads, figure: &Figure<T>| {
        let (name, value) = (format!("{what}, {}", count(threads, "thread")), figure.value.to_string());
        vec![name, value, format!("{}: {}", figure.provenance, figure.source)]
    };
    vec![row(1, one), row(threads, all)]
}

fn block(rows: Vec<Vec<String>>) -> String {
    columns(&rows).lines().map(|line| format!("  {line}\n")).collect()
}

fn cpu_rows(cpu: &Cpu) -> Vec<Vec<String>> {
    let unknown = || "unknown".to_owned();
    let number = |n: Option<usize>, noun: &str| n.map_or_else(|| format!("unknown {noun}s"), |n| count(n, noun));
    let memory = |b: Option<Bytes>| b.map_or_else(unknown, |b| b.to_string());
    let row = |name: &str, value: String| vec![name.to_owned(), value];
    let mut rows = vec![
        row("model", cpu.model.clone().unwrap_or_else(unknown)),
        row("instructions", format!("{}: {}", cpu.architecture, cpu.features)),
        row(
            "cores",
            format!(
                "{} usable by this process; machine: {}, {}, {}, {}",
                cpu.usable_cores(),
                number(cpu.physical_cores, "core"),
                number(cpu.logical_cores, "thread"),
                number(cpu.sockets, "socket"),
                number(cpu.numa_nodes.as_ref().map(Vec::len), "NUMA node"),
            ),
        ),
    ];
    for cache in &cpu.caches {
        let kind = if cache.kind == CacheKind::Data { "d" } else { "" };
        let sharing = count(cache.shared_by, "thread");
        let value = format!("{} each, {} in total, each shared by {sharing}", cache.size, cache.instances);
        rows.push(row(&format!("L{}{kind} cache", cache.level), value));
    }
    let value = format!("{} usable, {} available", memory(cpu.usable_memory()), memory(cpu.available_memory()));
    rows.push(row("memory", value));
    rows
}

fn nvidia_rows(nvidia: &Nvidia) -> Vec<Vec<String>> {
    let mut rows = Vec::new();
    if nvidia.gpus.is_empty() {
        rows.push(vec!["GPUs".to_owned(), "none found".to_owned()]);
    }
    for gpu in &nvidia.gpus {
        let model = gpu.model.clone().unwrap_or_else(|| "unknown to the driver".to_owned());
        let spec = gpu.spec().map_or(String::new(), |s| format!("; {} of memory, {}", s.memory, s.memory_bandwidth));
        rows.push(vec![format!("GPU {}", gpu.address), format!("{model}{spec}")]);
    }
    let module = nvidia.kernel_module.clone().unwrap_or_else(|| "not loaded".to_owned());
    rows.push(vec!["kernel module".to_owned(), module]);
    for search in &nvidia.libraries {
        let value = match search {
            LibrarySearch::Found { file, .. } => format!("{} at {}", file.version, file.path.display()),
            LibrarySearch::Missing { searched, .. } => {
                format!("missing; looked in {}", count(searched.len(), "folder"))
            }
        };
        rows.push(vec![search.library().to_string(), value]);
    }
    rows
}

/// Commands that install missing libraries, each once; none without a GPU.
fn remedies(nvidia: &Nvidia) -> Vec<&str> {
    let mut remedies = Vec::new();
    if nvidia.gpus.is_empty() && nvidia.kernel_module.is_none() {
        return remedies;
    }
    for search in &nvidia.libraries {
        if let LibrarySearch::Missing { remedy, .. } = search
            && !remedies.contains(&remedy.as_str())
        {
            remedies.push(remedy);
        }
    }
    remedies
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use ridge_hw::gpu::{Gpu, Library, LibraryFile};

    use super::*;

    fn machine(gpus: usize) -> Nvidia {
        let gpu = |i| Gpu {
            address: format!("0000:0{i}:00.0"),
            model: Some("NVIDIA H200".to_owned()),
            uuid: None,
            pci_device: None,
            numa_node: None,
        };
        let file = LibraryFile { path: PathBuf::from("/usr/lib/libcuda.so.1"), version: "580.65.06".to_owned() };
        let missing = |library| LibrarySearch::Missing {
            library,
            searched: vec![PathBuf::from("/usr/lib")],
            remedy: "pip install them".to_owned(),
        };
        Nvidia {
            gpus: (0..gpus).map(gpu).collect(),
            kernel_module: None,
            libraries: vec![
                LibrarySearch::Found { library: Library::Driver, file, others: Vec::new() },
                missing(Library::Nvrtc),
                missing(Library::Nccl),
            ],
        }
    }

    #[test]
    fn one_command_mends_what_is_missing() {
        assert_eq!(remedies(&machine(1)), ["pip install them"]);
    }

    #[test]
    fn nothing_is_to_be_mended_where_there_is_no_gpu() {
        assert!(remedies(&machine(0)).is_empty());
    }

    #[test]
    fn a_gpu_is_shown_with_what_its_maker_specifies() {
        let text = block(nvidia_rows(&machine(2)));
        assert!(text.contains("GPU 0000:01:00.0  NVIDIA H200; 140 GiB (specified) of memory"), "{text}");
        assert!(text.contains("4.8 TB/s (specified)"), "{text}");
        assert!(text.contains("libcuda.so.1      580.65.06 at /usr/lib/libcuda.so.1"), "{text}");
        assert!(text.contains("libnccl.so.2      missing; looked in 1 folder"), "{text}");
    }

    #[test]
    fn four_times_the_caches_are_read_within_limits() {
        let mut cpu = Cpu::detect();
        cpu.memory = None;
        cpu.allowance.memory_left = None;
        let l3 = |mib, instances| ridge_hw::cpu::Cache {
            level: 3,
            kind: CacheKind::Unified,
            size: Bytes::from_mib(mib),
            line: None,
            shared_by: 8,
            instances,
        };
        for (cache, bytes) in [(l3(8, 1), 256), (l3(32, 4), 512), (l3(384, 2), 2048)] {
            cpu.caches = vec![cache];
            // If the available memory is unknown, the minimum size is read.
            assert_eq!(bytes_to_read(&cpu), Bytes::from_mib(bytes).min(MIN_READ));
            cpu.memory = Some(ridge_hw::cpu::Memory { total: Bytes::from_gib(64), available: Bytes::from_gib(64) });
            assert_eq!(bytes_to_read(&cpu), Bytes::from_mib(bytes));
            cpu.memory = None;
        }
    }
}

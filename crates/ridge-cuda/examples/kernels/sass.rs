//! What kernels claim of their machine code: instructions that a hot loop must have, read from nvdisasm's listing.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use ridge_cuda::CudaSource;

/// What the machine code of a kernel must have.
struct SassClaim {
    entry: &'static str,
    /// The architectures by their common prefix.
    arch: &'static str,
    /// Instructions, each of which is in a loop of this depth.
    needs: &'static [&'static str],
    depth: usize,
    /// Instructions that are nowhere.
    lacks: &'static [&'static str],
}

/// Kernels for Hopper copy by the copy engine and multiply by whole warpgroups, in the loop over the slices or tiles of each
/// item; the others copy to shared memory without registers between and multiply on tensor cores. Codes of a cache become floats
/// in registers, on their way to the shared memory of tiles: such kernels need no copies of those kinds.
const CLAIMS: [SassClaim; 13] = [
    SassClaim { entry: "attention_sm90", arch: "sm_90", needs: &["HGMMA", "UTMALDG"], depth: 2, lacks: &["HMMA"] },
    SassClaim {
        entry: "attention_latent_sm90",
        arch: "sm_90",
        needs: &["HGMMA", "LDGSTS"],
        depth: 1,
        lacks: &["HMMA"],
    },
    SassClaim { entry: "gemm_sm90", arch: "sm_90", needs: &["HGMMA", "UTMALDG"], depth: 2, lacks: &["HMMA"] },
    SassClaim {
        entry: "grouped_sm90",
        arch: "sm_90",
        needs: &["HGMMA", "UTMALDG", "LDGSTS"],
        depth: 2,
        lacks: &["HMMA"],
    },
    SassClaim { entry: "grouped_blocks_sm90", arch: "sm_90", needs: &["HGMMA", "LDGSTS"], depth: 2, lacks: &["HMMA"] },
    SassClaim { entry: "grouped_codes_sm90", arch: "sm_90", needs: &["HGMMA", "LDGSTS"], depth: 2, lacks: &["HMMA"] },
    SassClaim { entry: "recurrence_chunks", arch: "sm_", needs: &["HMMA", "LDGSTS"], depth: 1, lacks: &[] },
    SassClaim { entry: "gated_states", arch: "sm_", needs: &["HMMA", "LDSM", "LDGSTS"], depth: 1, lacks: &[] },
    SassClaim { entry: "gated_outputs", arch: "sm_", needs: &["HMMA", "LDSM", "LDGSTS"], depth: 1, lacks: &[] },
    SassClaim { entry: "recurrence_outputs", arch: "sm_", needs: &["HMMA", "LDSM"], depth: 1, lacks: &[] },
    SassClaim { entry: "attention_decode", arch: "sm_", needs: &["HMMA", "LDGSTS"], depth: 2, lacks: &[] },
    SassClaim { entry: "attention_tiles", arch: "sm_", needs: &["HMMA", "LDGSTS"], depth: 2, lacks: &[] },
    SassClaim { entry: "linear_rows", arch: "sm_", needs: &["HMMA", "LDGSTS"], depth: 2, lacks: &[] },
];

/// Copies to shared memory without registers between.
const COPIES: [&str; 2] = ["LDGSTS", "UTMALDG"];

/// nvdisasm, from `PATH`, CUDA_HOME, or the Python environment that is active.
pub(crate) fn disassembler() -> Option<PathBuf> {
    let folders = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let mut places: Vec<PathBuf> = std::env::var_os("PATH").iter().flat_map(std::env::split_paths).collect();
    places.extend(["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(folders).map(|home| home.join("bin")));
    places.push("/usr/local/cuda/bin".into());
    for environment in ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(folders) {
        let pythons = std::fs::read_dir(environment.join("lib")).into_iter().flatten().flatten();
        let packages = pythons.flat_map(|python| {
            let kinds = std::fs::read_dir(python.path().join("site-packages/nvidia")).into_iter().flatten().flatten();
            kinds.map(|kind| kind.path().join("bin")).collect::<Vec<_>>()
        });
        places.extend(packages);
    }
    places.into_iter().map(|folder| folder.join("nvdisasm")).find(|path| path.is_file())
}

/// Holds the machine code of `kernel` to what it claims, if anything; says what is missing.
pub(crate) fn check(
    disassembler: &Path,
    kernel: &CudaSource,
    arch: &str,
    nth: usize,
    cubin: &[u8],
) -> Result<(), String> {
    let entry = &*kernel.entry;
    let through_registers =
        matches!(entry, "attention_tiles" | "attention_sm90") && kernel.text.contains("#define CODED 1\n");
    let Some(claim) = CLAIMS.iter().find(|claim| claim.entry == entry && arch.starts_with(claim.arch)) else {
        return Ok(());
    };
    let file = std::env::temp_dir().join(format!("ridge-kernel-{}-{nth}.cubin", std::process::id()));
    std::fs::write(&file, cubin).map_err(|e| format!("cannot write {}: {e}", file.display()))?;
    let listed = Command::new(disassembler).arg("-c").arg(&file).output();
    let _ = std::fs::remove_file(&file);
    let listed = listed.map_err(|e| format!("cannot run {}: {e}", disassembler.display()))?;
    if !listed.status.success() {
        return Err(format!("{} failed: {}", disassembler.display(), String::from_utf8_lossy(&listed.stderr)));
    }
    let listing = String::from_utf8_lossy(&listed.stdout);
    let depths = depths(&listing);
    for needed in claim.needs.iter().filter(|needed| !(through_registers && COPIES.contains(needed))) {
        let deepest = depths.iter().filter(|(name, _)| is(name, needed)).map(|(_, depth)| *depth).max();
        if deepest.is_none_or(|depth| depth < claim.depth) {
            return Err(format!("{entry} for {arch}: no {needed} in a loop of depth {}, but {deepest:?}", claim.depth));
        }
    }
    match depths.iter().find(|(name, _)| claim.lacks.iter().any(|lacked| name.starts_with(lacked))) {
        Some((name, _)) => Err(format!("{entry} for {arch}: has {name}")),
        None => Ok(()),
    }
}

/// Is the instruction `name` what is needed? Products of 8-bit floats and of integers by whole warpgroups have names of their own.
fn is(name: &str, needed: &str) -> bool {
    let others: &[&str] = match needed {
        "HGMMA" => &["QGMMA", "IGMMA"],
        "HMMA" => &["IMMA"],
        _ => &[],
    };
    others.iter().chain([&needed]).any(|needed| name.starts_with(needed))
}

/// The instructions of a listing, each with the number of loops that it is in: ranges from a label to a branch back to it.
fn depths(listing: &str) -> Vec<(&str, usize)> {
    let mut labels: HashMap<&str, usize> = HashMap::new();
    let mut instructions = Vec::new();
    let mut loops = Vec::new();
    for line in listing.lines() {
        if let Some(label) = line.strip_suffix(':').filter(|label| label.starts_with(".L")) {
            labels.insert(label, instructions.len());
            continue;
        }
        let Some((_, text)) = line.trim_start().strip_prefix("/*").and_then(|rest| rest.split_once("*/")) else {
            continue;
        };
        let name = text.split_whitespace().find(|word| !word.starts_with('@')).unwrap_or("");
        let target = text.split_once("`(").and_then(|(_, rest)| rest.split_once(')')).map(|(label, _)| label);
        if let Some(start) = target.and_then(|label| labels.get(label)).filter(|_| name.starts_with("BRA")) {
            loops.push(*start..=instructions.len());
        }
        instructions.push(name);
    }
    let depth = |at: usize| loops.iter().filter(|range| range.contains(&at)).count();
    instructions.into_iter().enumerate().map(|(at, name)| (name, depth(at))).collect()
}

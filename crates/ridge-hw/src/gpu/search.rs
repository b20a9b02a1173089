//! The folders that may hold NVIDIA's libraries, in the order in which they are looked through.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::environment::{Environment, entries};

/// Where the dynamic loader would look: `LD_LIBRARY_PATH`, the loader's configuration, the usual folders.
pub(super) fn system(environment: &Environment) -> Vec<PathBuf> {
    let arch = std::env::consts::ARCH;
    let mut folders = environment.var_paths("LD_LIBRARY_PATH");
    for file in entries(&environment.locate("/etc/ld.so.conf.d")) {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        let lines = text.lines().map(str::trim).filter(|line| line.starts_with('/'));
        folders.extend(lines.map(|line| environment.locate(line)));
    }
    let usual = [
        format!("/usr/lib/{arch}-linux-gnu"),
        format!("/lib/{arch}-linux-gnu"),
        "/usr/lib64".to_owned(),
        "/lib64".to_owned(),
        "/usr/lib".to_owned(),
        "/lib".to_owned(),
        "/usr/local/lib".to_owned(),
        "/usr/local/nvidia/lib64".to_owned(), // Kubernetes device plugins
        "/usr/lib/wsl/lib".to_owned(),        // Windows Subsystem for Linux
        "/run/opengl-driver/lib".to_owned(),  // NixOS
    ];
    folders.extend(usual.map(|folder| environment.locate(folder)));
    without_repeats(folders)
}

/// CUDA toolkits: `CUDA_HOME`, `CUDA_PATH`, the usual folder, and a Conda environment's.
pub(super) fn toolkit(environment: &Environment) -> Vec<PathBuf> {
    let named = ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(|name| environment.var_path(name));
    let homes = named.chain([environment.locate("/usr/local/cuda")]);
    // NVIDIA calls 64-bit Arm servers `sbsa`.
    let target = match std::env::consts::ARCH {
        "aarch64" => "targets/sbsa-linux/lib",
        _ => "targets/x86_64-linux/lib",
    };
    let mut folders: Vec<PathBuf> = homes.flat_map(|home| ["lib64", "lib", target].map(|lib| home.join(lib))).collect();
    folders.extend(environment.var_path("CONDA_PREFIX").map(|prefix| prefix.join("lib")));
    without_repeats(folders)
}

/// The `nvidia-*` wheels of Python environments: `nvidia/<part>/lib` in each `site-packages`. An environment that has
/// no such wheel counts with its `nvidia` folder, so that a report can say where they would be.
pub(super) fn python(environment: &Environment) -> Vec<PathBuf> {
    let packages = python_prefixes(environment).into_iter().flat_map(|prefix| site_packages(&prefix));
    let folders = packages.flat_map(|packages| {
        let nvidia = packages.join("nvidia");
        let mut parts = entries(&nvidia);
        // Since CUDA 13 one folder (`cu13`) holds what were many (`cublas`, `cuda_nvrtc`), which may be left over.
        parts.sort_by_key(|part| Reverse(cuda_major(part)));
        let libs: Vec<PathBuf> = parts.iter().map(|part| part.join("lib")).filter(|lib| lib.is_dir()).collect();
        if libs.is_empty() { vec![nvidia] } else { libs }
    });
    without_repeats(folders.collect())
}

/// 13 for a folder named `cu13`.
fn cuda_major(part: &Path) -> Option<u32> {
    part.file_name()?.to_str()?.strip_prefix("cu")?.parse().ok()
}

/// The prefixes of the Python environments in sight, the active ones first.
fn python_prefixes(environment: &Environment) -> Vec<PathBuf> {
    let mut prefixes: Vec<PathBuf> =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(|name| environment.var_path(name)).collect();
    for name in ["python3", "python"] {
        let mut candidates = environment.var_paths("PATH").into_iter().map(|folder| folder.join(name));
        let Some(interpreter) = candidates.find(|path| path.is_file()) else { continue };
        // `<prefix>/bin/python3`. In a virtual environment that is a link, whose target belongs to the base.
        let target = interpreter.canonicalize().ok();
        let interpreters = [Some(interpreter), target].into_iter().flatten();
        prefixes.extend(interpreters.filter_map(|path| Some(path.parent()?.parent()?.to_owned())));
    }
    // Where pip installs for root on Debian, and for a user without root.
    prefixes.push(environment.locate("/usr/local"));
    prefixes.extend(environment.var_path("HOME").map(|home| home.join(".local")));
    without_repeats(prefixes)
}

/// The package folders under a prefix, the newest Python first.
fn site_packages(prefix: &Path) -> Vec<PathBuf> {
    let mut pythons: Vec<(Reverse<Option<u32>>, PathBuf)> = ["lib", "lib64"]
        .iter()
        .flat_map(|lib| entries(&prefix.join(lib)))
        .filter_map(|path| {
            let version = path.file_name()?.to_str()?.strip_prefix("python3")?;
            Some((Reverse(version.trim_start_matches('.').parse().ok()), path))
        })
        .collect();
    pythons.sort();
    let packages =
        pythons.into_iter().flat_map(|(_, path)| ["site-packages", "dist-packages"].map(|name| path.join(name)));
    packages.filter(|path| path.is_dir()).collect()
}

/// Keeps the first of each folder, by whatever way it is reached: `/lib` is often a link to `/usr/lib`.
fn without_repeats(mut folders: Vec<PathBuf>) -> Vec<PathBuf> {
    let mut seen = BTreeSet::new();
    folders.retain(|folder| seen.insert(folder.canonicalize().unwrap_or_else(|_| folder.clone())));
    folders
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::fake::Tree;

    #[test]
    fn the_library_path_comes_before_the_usual_folders() {
        let tree = Tree::new([("/etc/ld.so.conf.d/cuda.conf", "# CUDA\n/usr/local/cuda-13/lib64\n")]);
        let folders = system(&tree.environment([("LD_LIBRARY_PATH", "/opt/a:relative::/opt/b")]));
        let first = ["/opt/a", "/opt/b", "/usr/local/cuda-13/lib64"].map(|path| tree.path(path));
        assert_eq!(folders[..3], first);
        assert!(folders.contains(&tree.path("/usr/lib64")));
    }

    #[test]
    fn a_named_toolkit_comes_before_the_usual_one() {
        let tree = Tree::new([]);
        let folders = toolkit(&tree.environment([("CUDA_HOME", "/opt/cuda")]));
        let place = |path: &str| folders.iter().position(|folder| *folder == tree.path(path)).unwrap();
        assert!(place("/opt/cuda/lib64") < place("/usr/local/cuda/lib64"));
    }

    #[test]
    fn the_newest_cuda_of_an_environment_comes_first() {
        let tree = Tree::new([
            ("/venv/lib/python3.12/site-packages/nvidia/cublas/lib/x", ""),
            ("/venv/lib/python3.12/site-packages/nvidia/cu9/lib/x", ""),
            ("/venv/lib/python3.12/site-packages/nvidia/cu13/lib/x", ""),
        ]);
        let site = "/venv/lib/python3.12/site-packages/nvidia";
        let expected = ["cu13", "cu9", "cublas"].map(|part| tree.path(&format!("{site}/{part}/lib")));
        assert_eq!(python(&tree.environment([("VIRTUAL_ENV", "/venv")])), expected);
    }

    #[test]
    fn an_environment_without_wheels_is_still_named() {
        let tree =
            Tree::new([("/venv/lib/python3.9/site-packages/x", ""), ("/venv/lib/python3.12/site-packages/x", "")]);
        let expected = ["3.12", "3.9"].map(|v| tree.path(&format!("/venv/lib/python{v}/site-packages/nvidia")));
        assert_eq!(python(&tree.environment([("VIRTUAL_ENV", "/venv")])), expected);
    }

    #[test]
    #[cfg(unix)]
    fn a_virtual_environment_on_the_path_and_its_base_are_both_searched() {
        let tree = Tree::new([
            ("/base/bin/python3.12", "interpreter"),
            ("/base/lib/python3.12/site-packages/x", ""),
            ("/venv/lib/python3.12/site-packages/x", ""),
        ]);
        tree.link("/venv/bin/python3", tree.path("/base/bin/python3.12"));
        let folders = python(&tree.environment([("PATH", "/nowhere:/venv/bin:/usr/bin")]));
        let base = tree.path("/base").canonicalize().unwrap();
        let expected = [tree.path("/venv"), base].map(|prefix| prefix.join("lib/python3.12/site-packages/nvidia"));
        assert_eq!(folders, expected);
    }

    #[test]
    fn debian_and_user_packages_are_searched() {
        let tree = Tree::new([
            ("/usr/lib/python3/dist-packages/x", ""),
            ("/usr/bin/python3", "interpreter"),
            ("/usr/local/lib/python3.12/dist-packages/x", ""),
            ("/users/me/.local/lib/python3.12/site-packages/x", ""),
        ]);
        let folders = python(&tree.environment([("PATH", "/usr/bin"), ("HOME", "/users/me")]));
        for place in ["/usr/lib/python3/dist", "/usr/local/lib/python3.12/dist", "/users/me/.local/lib/python3.12/site"]
        {
            assert!(folders.contains(&tree.path(&format!("{place}-packages/nvidia"))), "{place} in {folders:?}");
        }
    }
}

//! NVIDIA's libraries as files: which there are, where they are, and what to do when one is missing.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::search;
use crate::environment::Environment;

/// A library of NVIDIA's that Ridge opens at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Library {
    /// The driver, `libcuda.so.1`.
    Driver,
    /// The run-time compiler, `libnvrtc.so.*`.
    Nvrtc,
    /// Matrix products, `libcublasLt.so.*`.
    CublasLt,
    /// Collectives, `libnccl.so.2`.
    Nccl,
}

impl Library {
    /// All of them, the driver first.
    pub const ALL: &[Self] = &[Self::Driver, Self::Nvrtc, Self::CublasLt, Self::Nccl];

    /// Its file name before the version.
    const fn stem(self) -> &'static str {
        match self {
            Self::Driver => "libcuda.so",
            Self::Nvrtc => "libnvrtc.so",
            Self::CublasLt => "libcublasLt.so",
            Self::Nccl => "libnccl.so",
        }
    }

    /// The only version of its interface that Ridge speaks; `None` when versions follow the CUDA toolkit's.
    const fn interface(self) -> Option<u32> {
        match self {
            Self::Driver => Some(1),
            Self::Nccl => Some(2),
            Self::Nvrtc | Self::CublasLt => None,
        }
    }
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.interface() {
            Some(version) => f.pad(&format!("{}.{version}", self.stem())),
            None => f.pad(&format!("{}.*", self.stem())),
        }
    }
}

/// A library's file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LibraryFile {
    /// Path to open it by; its name is the versioned soname where there is one.
    pub path: PathBuf,
    /// Version, as precise as file names tell: `13.0.88` when the path links to such a file, else `13`.
    pub version: String,
}

/// The outcome of looking for one library.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LibrarySearch {
    /// It is there.
    Found {
        /// What was looked for.
        library: Library,
        /// The first file in search order.
        file: LibraryFile,
        /// Further files, in search order: other versions, or other copies.
        others: Vec<LibraryFile>,
    },
    /// It is nowhere.
    Missing {
        /// What was looked for.
        library: Library,
        /// The folders that were looked through, in order, whether they exist or not.
        searched: Vec<PathBuf>,
        /// What mends it: a command, where one can.
        remedy: String,
    },
}

impl LibrarySearch {
    /// What was looked for.
    pub const fn library(&self) -> Library {
        match self {
            Self::Found { library, .. } | Self::Missing { library, .. } => *library,
        }
    }

    /// The path to open it by, if it is there.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Found { file, .. } => Some(&file.path),
            Self::Missing { .. } => None,
        }
    }
}

/// Looks for every library: in the system's folders, then in CUDA toolkits, then in Python environments. The driver is
/// looked for in the system alone: what toolkits carry is a stub to link against.
pub(super) fn find_all(environment: &Environment) -> Vec<LibrarySearch> {
    let system = search::system(environment);
    let everywhere = [system.clone(), search::toolkit(environment), search::python(environment)].concat();
    let find = |&library: &Library| {
        let folders = if library == Library::Driver { &system } else { &everywhere };
        let mut seen = Vec::new();
        let mut files = folders.iter().flat_map(|folder| files_in(folder, library)).filter(|file| {
            // A driver is often linked into a second folder.
            let real = file.path.canonicalize().ok();
            let new = !seen.contains(&real);
            seen.push(real);
            new
        });
        match files.next() {
            Some(file) => LibrarySearch::Found { library, file, others: files.collect() },
            None => LibrarySearch::Missing { library, searched: folders.clone(), remedy: remedy(library, environment) },
        }
    };
    Library::ALL.iter().map(find).collect()
}

fn remedy(library: Library, environment: &Environment) -> String {
    let module_is_loaded = environment.locate("/proc/driver/nvidia/version").exists();
    match library {
        Library::Driver if module_is_loaded => {
            "the machine has the NVIDIA driver but this container does not see it: start the container with `--gpus all`"
        }
        Library::Driver => "install the NVIDIA driver",
        Library::Nvrtc | Library::CublasLt | Library::Nccl => {
            "pip install nvidia-cuda-nvrtc nvidia-cublas nvidia-nccl-cu13"
        }
    }
    .to_owned()
}

/// The library's files in one folder, one for each major version, the newest first.
fn files_in(folder: &Path, library: Library) -> Vec<LibraryFile> {
    let mut by_major: BTreeMap<u32, (String, PathBuf)> = BTreeMap::new();
    // Not `entries`, which sorts: a system's folder may hold thousands of files.
    for path in fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()) {
        // A link that leads nowhere is no file.
        let Some(version) = version_of(&path, library).filter(|_| path.is_file()) else { continue };
        let Some(major) = major(&version).filter(|&major| library.interface().is_none_or(|only| only == major)) else {
            continue;
        };
        // The soname is the shortest name of a version; the longer ones are what it links to.
        let precise = |version: &str| (version.len(), Reverse(version.to_owned()));
        let chosen = by_major.entry(major).or_insert_with(|| (version.clone(), path.clone()));
        if precise(&version) < precise(&chosen.0) {
            *chosen = (version, path);
        }
    }
    let file = |(version, path): (String, PathBuf)| {
        let target = path.canonicalize().ok().and_then(|real| version_of(&real, library));
        LibraryFile { path, version: target.unwrap_or(version) }
    };
    by_major.into_values().rev().map(file).collect()
}

/// `12.6.85` for `libnvrtc.so.12.6.85`.
fn version_of(path: &Path, library: Library) -> Option<String> {
    let version = path.file_name()?.to_str()?.strip_prefix(library.stem())?.strip_prefix('.')?;
    version.split('.').all(|part| part.parse::<u32>().is_ok()).then(|| version.to_owned())
}

fn major(version: &str) -> Option<u32> {
    version.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::fake::Tree;

    fn find(tree: &Tree, library: Library, vars: &[(&str, &str)]) -> LibrarySearch {
        let all = find_all(&tree.environment(vars.iter().copied()));
        all.into_iter().find(|search| search.library() == library).unwrap()
    }

    fn found(search: LibrarySearch) -> (LibraryFile, Vec<LibraryFile>) {
        match search {
            LibrarySearch::Found { file, others, .. } => (file, others),
            LibrarySearch::Missing { searched, .. } => panic!("not in {searched:?}"),
        }
    }

    const SITE: &str = "/venv/lib/python3.12/site-packages/nvidia";

    #[test]
    fn wheels_of_a_virtual_environment_are_found() {
        let nccl = format!("{SITE}/nccl/lib/libnccl.so.2");
        let nvrtc = format!("{SITE}/cu13/lib/libnvrtc.so.13");
        let alternative = format!("{SITE}/cu13/lib/libnvrtc.alt.so.13");
        let tree = Tree::new([(&*nccl, ""), (&*nvrtc, ""), (&*alternative, "")]);
        for (library, path, version) in [(Library::Nccl, nccl, "2"), (Library::Nvrtc, nvrtc, "13")] {
            let (file, others) = found(find(&tree, library, &[("VIRTUAL_ENV", "/venv")]));
            assert_eq!(file, LibraryFile { path: tree.path(&path), version: version.to_owned() });
            assert_eq!(others, []);
        }
    }

    #[test]
    #[cfg(unix)]
    fn a_soname_tells_the_version_of_the_file_that_it_links_to() {
        let tree = Tree::new([("/usr/lib64/libcuda.so.580.65.06", "")]);
        tree.link("/usr/lib64/libcuda.so.1", "libcuda.so.580.65.06");
        tree.link("/lib64", "usr/lib64");
        tree.link("/usr/local/nvidia/lib64/libcuda.so.1", "../../../lib64/libcuda.so.1");
        let (file, others) = found(find(&tree, Library::Driver, &[]));
        assert_eq!(file, LibraryFile { path: tree.path("/usr/lib64/libcuda.so.1"), version: "580.65.06".to_owned() });
        assert_eq!(others, [], "the same file by another way is no second one");
    }

    #[test]
    #[cfg(unix)]
    fn a_link_that_leads_nowhere_is_not_a_library() {
        let tree = Tree::new([]);
        tree.link("/usr/lib64/libnccl.so.2", "libnccl.so.2.28.3");
        assert_eq!(find(&tree, Library::Nccl, &[]).path(), None);
    }

    #[test]
    fn the_newest_version_of_a_folder_wins_by_number() {
        let tree = Tree::new([
            ("/opt/cuda/lib64/libcublasLt.so.9", ""),
            ("/opt/cuda/lib64/libcublasLt.so.12", ""),
            ("/opt/cuda/lib64/libcublasLt.so", ""),
        ]);
        let (file, others) = found(find(&tree, Library::CublasLt, &[("CUDA_HOME", "/opt/cuda")]));
        assert_eq!((&*file.version, &*others[0].version, others.len()), ("12", "9", 1));
    }

    #[test]
    fn the_system_comes_before_toolkits_and_these_before_wheels() {
        let wheel = format!("{SITE}/cu13/lib/libnvrtc.so.13");
        let tree =
            Tree::new([("/opt/x/libnvrtc.so.11.2", ""), ("/usr/local/cuda/lib64/libnvrtc.so.12", ""), (&wheel, "")]);
        let (file, others) =
            found(find(&tree, Library::Nvrtc, &[("LD_LIBRARY_PATH", "/opt/x"), ("VIRTUAL_ENV", "/venv")]));
        assert_eq!([&file, &others[0], &others[1]].map(|file| &*file.version), ["11.2", "12", "13"]);
    }

    #[test]
    fn the_driver_is_not_taken_from_a_toolkit() {
        let tree = Tree::new([("/usr/local/cuda/lib64/libcuda.so.1", "a stub")]);
        assert_eq!(find(&tree, Library::Driver, &[]).path(), None);
    }

    #[test]
    fn another_interface_of_nccl_is_not_taken() {
        let tree = Tree::new([("/usr/lib64/libnccl.so.1", ""), ("/usr/lib64/libnccl.so.3", "")]);
        assert_eq!(find(&tree, Library::Nccl, &[]).path(), None);
    }

    #[test]
    fn a_missing_library_says_where_it_was_sought_and_what_mends_it() {
        let tree = Tree::new([("/venv/lib/python3.12/site-packages/x", "")]);
        let LibrarySearch::Missing { searched, remedy, .. } =
            find(&tree, Library::CublasLt, &[("VIRTUAL_ENV", "/venv")])
        else {
            panic!("found where there is none");
        };
        assert!(searched.contains(&tree.path(SITE)) && searched.contains(&tree.path("/usr/local/cuda/lib64")));
        assert_eq!(remedy, "pip install nvidia-cuda-nvrtc nvidia-cublas nvidia-nccl-cu13");
    }

    #[test]
    fn a_container_without_its_driver_is_told_so() {
        let remedy = |tree: &Tree| match find(tree, Library::Driver, &[]) {
            LibrarySearch::Missing { remedy, .. } => remedy,
            LibrarySearch::Found { file, .. } => panic!("found {file:?}"),
        };
        assert_eq!(remedy(&Tree::new([])), "install the NVIDIA driver");
        let container = Tree::new([("/proc/driver/nvidia/version", "NVRM version: ...")]);
        assert!(remedy(&container).contains("--gpus all"));
    }
}

//! What detection may look at: environment variables and one file system root.
//!
//! Nothing else in this crate reads the process's variables or an absolute path, so a test that builds a small tree
//! in a temporary folder sees exactly that tree.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};

/// The variables and files of a machine, real or made for a test.
#[derive(Clone, Debug)]
pub struct Environment {
    vars: BTreeMap<OsString, OsString>,
    root: PathBuf,
}

impl Environment {
    /// This process's variables and the machine's own files.
    pub fn host() -> Self {
        Self { vars: std::env::vars_os().collect(), root: PathBuf::from("/") }
    }

    /// The tree under `root`, with `vars` and no others. Absolute paths, those in `vars` too, are taken inside it.
    pub fn under<'a>(root: impl Into<PathBuf>, vars: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        Self { vars: vars.into_iter().map(|(name, value)| (name.into(), value.into())).collect(), root: root.into() }
    }

    /// A variable that is set and not empty.
    pub fn var(&self, name: &str) -> Option<&OsStr> {
        self.vars.get(OsStr::new(name)).map(OsString::as_os_str).filter(|value| !value.is_empty())
    }

    /// A variable that holds one path, as a real path.
    pub(crate) fn var_path(&self, name: &str) -> Option<PathBuf> {
        self.var(name).map(|value| self.locate(Path::new(value)))
    }

    /// A variable that holds a list of paths, as real paths; empty items are left out.
    pub(crate) fn var_paths(&self, name: &str) -> Vec<PathBuf> {
        let list = self.var(name).unwrap_or_default();
        std::env::split_paths(list).filter(|path| path.is_absolute()).map(|path| self.locate(&path)).collect()
    }

    /// The real place of an absolute path of this environment.
    pub(crate) fn locate(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        path.strip_prefix("/").map_or_else(|_| path.to_owned(), |inside| self.root.join(inside))
    }

    /// The text at an absolute path of this environment; `None` when it is absent, unreadable or not UTF-8.
    pub(crate) fn read(&self, path: impl AsRef<Path>) -> Option<String> {
        fs::read_to_string(self.locate(path)).ok()
    }
}

/// The trimmed text of a file at a real path, as sysfs writes single values.
pub(crate) fn read_value(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// The entries of a folder at a real path, in the order of their names; none when it cannot be read.
pub(crate) fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> =
        fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    found.sort();
    found
}

/// The numbered entries of a folder at a real path (`cpu0`, `cpu1` ... for the prefix `cpu`), in numeric order.
pub(crate) fn numbered(folder: &Path, prefix: &str) -> Vec<(usize, PathBuf)> {
    let number = |path: &Path| path.file_name()?.to_str()?.strip_prefix(prefix)?.parse().ok();
    let mut found: Vec<(usize, PathBuf)> =
        entries(folder).into_iter().filter_map(|path| Some((number(&path)?, path))).collect();
    found.sort();
    found
}

/// A fake file system for tests.
#[cfg(test)]
pub(crate) mod fake {
    use super::{Environment, Path, PathBuf, fs};

    pub(crate) struct Tree(tempfile::TempDir);

    impl Tree {
        /// Each file with its text; folders are made as needed.
        pub(crate) fn new<'a>(files: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
            let tree = Self(tempfile::tempdir().unwrap());
            for (path, text) in files {
                tree.file(path, text);
            }
            tree
        }

        pub(crate) fn file(&self, path: &str, text: &str) {
            let path = self.path(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        #[cfg(unix)]
        pub(crate) fn link(&self, path: &str, target: impl AsRef<Path>) {
            let path = self.path(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::os::unix::fs::symlink(target, path).unwrap();
        }

        /// The real place of a path in the tree.
        pub(crate) fn path(&self, path: &str) -> PathBuf {
            self.0.path().join(path.trim_start_matches('/'))
        }

        pub(crate) fn root(&self) -> &Path {
            self.0.path()
        }

        pub(crate) fn environment<'a>(&self, vars: impl IntoIterator<Item = (&'a str, &'a str)>) -> Environment {
            Environment::under(self.root(), vars)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::fake::Tree;
    use super::*;

    #[test]
    fn absolute_paths_stay_inside_the_root() {
        let tree = Tree::new([("/proc/version", "fake\n")]);
        let environment = tree.environment([("HOME", "/users/me")]);
        assert_eq!(environment.read("/proc/version").as_deref(), Some("fake\n"));
        assert_eq!(environment.var_path("HOME"), Some(tree.path("/users/me")));
        assert_eq!(environment.read("/proc/none"), None);
    }

    #[test]
    fn an_empty_variable_counts_as_unset() {
        let environment = Environment::under("/", [("CUDA_HOME", "")]);
        assert_eq!(environment.var("CUDA_HOME"), None);
        assert_eq!(environment.var_path("CUDA_HOME"), None);
    }

    #[test]
    fn numbered_entries_come_in_numeric_order() {
        let tree = Tree::new([("/c/cpu10/x", ""), ("/c/cpu9/x", ""), ("/c/cpufreq/x", ""), ("/c/cpu0/x", "")]);
        let numbers: Vec<usize> = numbered(&tree.path("/c"), "cpu").into_iter().map(|(n, _)| n).collect();
        assert_eq!(numbers, [0, 9, 10]);
    }
}

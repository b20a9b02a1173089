//! `cargo xtask gpu-bundle`: the GPU tests as one folder for a machine without Rust.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command as Process;

use crate::error::XtaskError;
use crate::run::{cargo, finish};
use crate::task::{Task, TaskOutcome, TaskRun};

/// Where it is put.
const FOLDER: &str = "target/gpu-bundle";
/// Maximum size of the bundle.
const MAX_BYTES: u64 = 80_000_000;

pub(crate) const TASK: Task = Task {
    name: "gpu-bundle",
    summary: "Put the GPU tests and the ridge binary into one folder",
    help: "\
Build the ridge binary and the tests that need an NVIDIA GPU, and put them, stripped and with their fixtures, into
target/gpu-bundle: less than 80 MB, about a third of that compressed.

Usage: cargo xtask gpu-bundle

Copy that folder to a machine with a GPU, which does not need Rust, and run `run.sh` there: it prints the number of passed tests.
`run.sh memcheck` (or racecheck, initcheck) runs ops and kernels under the compute-sanitizer tool of that name.
",
    run: TaskRun::Plain(run),
};

/// The name of each test program in the bundle, cargo's arguments for it, and the source file by which the line of
/// cargo's output is found that names its executable. `gpu_bundle.sh` selects their tests by name.
const TESTS: [(&str, &[&str], &str); 3] = [
    ("unit", &["--package", "ridge-cuda", "--lib"], "src/lib.rs"),
    ("cuda", &["--package", "ridge-cuda", "--test", "integration"], "tests/integration/main.rs"),
    ("models", &["--package", "ridge-models", "--test", "integration"], "tests/integration/main.rs"),
];

fn run(root: &Path) -> Result<TaskOutcome, XtaskError> {
    let bundle = root.join(FOLDER);
    if bundle.exists() {
        fs::remove_dir_all(&bundle).map_err(|source| XtaskError::Write { path: bundle.clone(), source })?;
    }
    make_folder(&bundle)?;
    let built = cargo(root, &["build", "--package", "ridge-cli"])?;
    if built.code != Some(0) {
        return Ok(TaskOutcome { report: built.stderr, passed: false });
    }
    let mut binaries = vec![("ridge", root.join("target/debug/ridge"))];
    for (name, args, line) in TESTS {
        let built = cargo(root, &[&["test", "--no-run"][..], args].concat())?;
        match executable(&built.stderr, line) {
            Some(path) if built.code == Some(0) => binaries.push((name, root.join(path))),
            _ => return Ok(TaskOutcome { report: built.stderr, passed: false }),
        }
    }
    for (name, from) in binaries {
        let stripped = finish(Process::new("strip").arg("-o").arg(bundle.join(name)).arg(&from))?;
        if stripped.code != Some(0) {
            return Ok(TaskOutcome { report: stripped.stderr, passed: false });
        }
    }
    for kind in ["llama", "families", "training"] {
        copy_all(&root.join("fixtures").join(kind), &bundle.join("fixtures").join(kind))?;
    }
    let script = bundle.join("run.sh");
    fs::write(&script, include_str!("gpu_bundle.sh"))
        .map_err(|source| XtaskError::Write { path: script.clone(), source })?;
    executable_by_all(&script)?;
    let bytes = size(&bundle)?;
    let passed = bytes < MAX_BYTES;
    let report = format!("gpu-bundle: {:.1} MB in {FOLDER}, the limit is {:.0}\n", mb(bytes), mb(MAX_BYTES));
    Ok(TaskOutcome { report, passed })
}

fn mb(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}

/// The file in cargo's line `Executable tests/integration/main.rs (target/debug/deps/integration-0123)`.
fn executable<'a>(said: &'a str, of: &str) -> Option<&'a str> {
    let line = said.lines().find(|l| l.trim_start().starts_with("Executable") && l.contains(of))?;
    line.rsplit_once('(')?.1.strip_suffix(')')
}

fn make_folder(path: &Path) -> Result<(), XtaskError> {
    fs::create_dir_all(path).map_err(|source| XtaskError::Write { path: path.into(), source })
}

#[cfg(unix)]
fn executable_by_all(path: &Path) -> Result<(), XtaskError> {
    use std::os::unix::fs::PermissionsExt as _;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))
        .map_err(|source| XtaskError::Write { path: path.into(), source })
}

#[cfg(not(unix))]
fn executable_by_all(_path: &Path) -> Result<(), XtaskError> {
    Ok(())
}

/// The files and folders in a folder.
fn entries(folder: &Path) -> Result<Vec<PathBuf>, XtaskError> {
    let read = |source| XtaskError::Read { path: folder.into(), source };
    fs::read_dir(folder).map_err(read)?.map(|entry| Ok(entry.map_err(read)?.path())).collect()
}

fn copy_all(from: &Path, to: &Path) -> Result<(), XtaskError> {
    make_folder(to)?;
    for path in entries(from)? {
        let target = to.join(path.file_name().unwrap_or_default());
        if path.is_dir() {
            copy_all(&path, &target)?;
        } else {
            fs::copy(&path, &target).map_err(|source| XtaskError::Write { path: target.clone(), source })?;
        }
    }
    Ok(())
}

fn size(folder: &Path) -> Result<u64, XtaskError> {
    let of = |path: PathBuf| {
        if path.is_dir() {
            return size(&path);
        }
        path.metadata().map(|m| m.len()).map_err(|source| XtaskError::Read { path: path.clone(), source })
    };
    entries(folder)?.into_iter().map(of).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cargos_line_tells_the_file_of_a_test_program() {
        let said = "    Finished `test` profile in 2s\n\
                    \x20 Executable unittests src/lib.rs (target/debug/deps/ridge_cuda-7b4d)\n\
                    \x20 Executable tests/integration/main.rs (target/debug/deps/integration-e1be)\n";
        assert_eq!(executable(said, "tests/integration/main.rs"), Some("target/debug/deps/integration-e1be"));
        assert_eq!(executable(said, "src/lib.rs"), Some("target/debug/deps/ridge_cuda-7b4d"));
        assert_eq!(executable(said, "tests/cuda.rs"), None);
    }

    #[test]
    fn a_folder_is_copied_whole() {
        let root = std::env::temp_dir().join(format!("xtask-bundle-{}", std::process::id()));
        fs::create_dir_all(root.join("a/b")).unwrap();
        fs::write(root.join("a/b/c"), "four").unwrap();
        copy_all(&root.join("a"), &root.join("d")).unwrap();
        let copied = size(&root.join("d")).unwrap();
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(copied, 4);
    }
}

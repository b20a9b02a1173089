//! `cargo xtask dist`: builds a release in `target/dist`.
//!
//! [`target`] says which targets this machine can build, [`archive`] writes the archives, [`image`] the container image.

mod archive;
mod files;
mod image;
mod target;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use archive::{Entry, tar_gz};
use files::{checksums, files, mb, named_size, read, write};
use image::Image;
use target::{TARGETS, Target, Tools};

use crate::error::XtaskError;
use crate::run::{cargo, finish, output};
use crate::task::{Task, TaskOutcome, TaskRun};

/// Where everything is put.
const FOLDER: &str = "target/dist";
/// Maximum size of the container image, unpacked.
const MAX_IMAGE_BYTES: u64 = 80_000_000;

pub(crate) const TASK: Task = Task {
    name: "dist",
    summary: "Build release archives, a container image and the Python wheel",
    help: "\
Build a release in target/dist:

  ridge-VERSION-TARGET.tar.gz   the binary, completions, man pages and licences
  ridge-VERSION-TARGET.oci.tar  a container image of less than 80 MB, for docker load, podman load and skopeo
  ridge_lm-*.whl                the Python wheel
  SHA256SUMS                    their checksums, for sha256sum -c

Usage: cargo xtask dist

Targets are Linux and macOS on x86-64 and 64-bit Arm. Those whose standard library or linker is missing are skipped, and
the report says what to install. The container image is built on Linux, for this machine's target; the wheel needs maturin.
File times are those of the commit, so the same compiler and commit give the same bytes.
",
    run: TaskRun::Plain(run),
};

fn run(root: &Path) -> Result<TaskOutcome, XtaskError> {
    let folder = root.join(FOLDER);
    if folder.exists() {
        fs::remove_dir_all(&folder).map_err(|source| XtaskError::Write { path: folder.clone(), source })?;
    }
    fs::create_dir_all(&folder).map_err(|source| XtaskError::Write { path: folder.clone(), source })?;
    match build_all(root, &folder)? {
        Ok(report) => Ok(TaskOutcome { report, passed: true }),
        Err(report) => Ok(TaskOutcome { report, passed: false }),
    }
}

/// Builds everything that can be built here. The inner error is what a program that failed printed.
fn build_all(root: &Path, folder: &Path) -> Result<Result<String, String>, XtaskError> {
    let version = env!("CARGO_PKG_VERSION");
    let tools = Tools::detect()?;
    let time = commit_time(root)?;
    let mut report = format!("dist: {FOLDER}\n");
    let mut skipped = String::new();

    // The host's binary is always built, because it writes the completions and man pages of every archive.
    let host = match build(root, &tools.host, None)? {
        Ok(binary) => binary,
        Err(stderr) => return Ok(Err(stderr)),
    };
    let shared = shared_entries(root, &host)?;
    for target in TARGETS {
        let name = format!("ridge-{version}-{}", target.triple);
        let binary = if target.triple == tools.host {
            host.clone()
        } else {
            match target.linker(&tools) {
                Err(reason) => {
                    skipped += &format!("  {name}.tar.gz: skipped, {reason}\n");
                    continue;
                }
                Ok(linker) => match build(root, target.triple, Some((target, linker)))? {
                    Ok(binary) => binary,
                    Err(stderr) => return Ok(Err(stderr)),
                },
            }
        };
        let bytes = read(&binary)?;
        let needs = target::needed_glibc(&bytes).map_or_else(String::new, |glibc| format!(", needs glibc {glibc}"));
        let mut entries = shared.clone();
        entries.push(Entry::executable("ridge", bytes));
        let written = write(folder, &format!("{name}.tar.gz"), &tar_gz(&name, &entries, time)?)?;
        report += &format!("  {written}{needs}\n");
    }

    if cfg!(target_os = "linux") {
        let image = Image::of(&host, version, time)?;
        if image.unpacked_bytes >= MAX_IMAGE_BYTES {
            let limit = MAX_IMAGE_BYTES / 1_000_000;
            return Ok(Err(format!("dist: the image has {}, the limit is {limit} MB\n", mb(image.unpacked_bytes))));
        }
        let written = write(folder, &format!("ridge-{version}-{}.oci.tar", tools.host), &image.archive)?;
        report += &format!("  {written}, {} unpacked\n", mb(image.unpacked_bytes));
    } else {
        skipped += "  container image: skipped, it is built on Linux\n";
    }
    match wheel(root, folder)? {
        Ok(text) => report += &text,
        Err(Skipped::Failed(stderr)) => return Ok(Err(stderr)),
        Err(Skipped::Missing) => skipped += "  Python wheel: skipped, maturin is not installed (pip install maturin)\n",
    }
    write(folder, "SHA256SUMS", checksums(folder)?.as_bytes())?;
    report += "  SHA256SUMS\n";
    Ok(Ok(report + &skipped))
}

/// The release binary for a target, or what cargo printed when it failed.
fn build(
    root: &Path,
    triple: &str,
    cross: Option<(&Target, Option<String>)>,
) -> Result<Result<PathBuf, String>, XtaskError> {
    let strip = "profile.release.strip=\"symbols\"";
    let mut args = vec!["build", "--release", "--locked", "--package", "ridge-cli", "--config", strip];
    let mut folder = target_folder(root);
    let linker;
    if let Some((target, found)) = cross {
        args.extend(["--target", target.triple]);
        folder.push(triple);
        if let Some(found) = found {
            linker = format!("target.{triple}.linker=\"{found}\"");
            args.extend(["--config", &linker]);
        }
    }
    let built = cargo(root, &args)?;
    Ok(if built.code == Some(0) { Ok(folder.join("release/ridge")) } else { Err(built.stderr) })
}

/// Cargo's target folder.
fn target_folder(root: &Path) -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), |folder| root.join(folder))
}

/// What every archive holds beside the binary.
fn shared_entries(root: &Path, ridge: &Path) -> Result<Vec<Entry>, XtaskError> {
    let mut entries = Vec::new();
    for name in ["README.md", "CHANGELOG.md", "LICENSE-MIT", "LICENSE-APACHE"] {
        entries.push(Entry::file(name, read(&root.join(name))?));
    }
    for (shell, file) in [
        ("bash", "ridge.bash"),
        ("elvish", "ridge.elv"),
        ("fish", "ridge.fish"),
        ("powershell", "_ridge.ps1"),
        ("zsh", "_ridge"),
    ] {
        let printed = output(Command::new(ridge).args(["completions", shell]))?;
        entries.push(Entry::file(&format!("completions/{file}"), printed.into_bytes()));
    }
    let pages = tempfile::tempdir().map_err(|source| XtaskError::Write { path: std::env::temp_dir(), source })?;
    output(Command::new(ridge).args(["man", "--folder"]).arg(pages.path()))?;
    for page in files(pages.path())? {
        let name = page.file_name().unwrap_or_default().to_string_lossy().into_owned();
        entries.push(Entry::file(&format!("man/man1/{name}"), read(&page)?));
    }
    Ok(entries)
}

/// Why there is no wheel.
enum Skipped {
    Missing,
    Failed(String),
}

/// Builds the wheel where maturin is installed. Its line of the report.
fn wheel(root: &Path, folder: &Path) -> Result<Result<String, Skipped>, XtaskError> {
    let mut maturin = Command::new("maturin");
    maturin.current_dir(root).args(["build", "--release", "--strip", "--manifest-path", "python/Cargo.toml", "--out"]);
    let built = match finish(maturin.arg(folder)) {
        Err(XtaskError::Start { .. }) => return Ok(Err(Skipped::Missing)),
        built => built?,
    };
    if built.code != Some(0) {
        return Ok(Err(Skipped::Failed(built.stderr)));
    }
    let mut report = String::new();
    for path in files(folder)?.iter().filter(|path| path.extension().is_some_and(|end| end == "whl")) {
        report += &format!("  {}\n", named_size(path, read(path)?.len()));
    }
    Ok(Ok(report))
}

/// Seconds since 1970 of the commit that is checked out, which files in archives have as their time.
fn commit_time(root: &Path) -> Result<u64, XtaskError> {
    let printed = output(Command::new("git").current_dir(root).args(["log", "-1", "--format=%ct"]))?;
    printed.trim().parse().map_err(|_| XtaskError::NoReport(format!("git log printed {printed:?} as a time")))
}

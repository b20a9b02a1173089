//! Running the real binary, and models for it to run on.
#![allow(unreachable_pub)] // of a test binary nothing is reachable

pub mod server;
pub mod tools;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What a run of `ridge` left.
pub struct Ran {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

/// The binary, which takes the CPU where nothing else is asked for, whatever this machine has.
pub fn binary() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ridge"));
    command.env("RIDGE_DEVICE", "cpu");
    command
}

pub fn command(args: &[&str]) -> Command {
    let mut command = binary();
    command.args(args).stdin(Stdio::null());
    command
}

pub fn ridge(args: &[&str]) -> Ran {
    ran(command(args).output().unwrap())
}

pub fn ridge_reading(stdin: &str, args: &[&str]) -> Ran {
    ridge_reading_bytes(stdin.as_bytes(), args)
}

pub fn ridge_reading_bytes(stdin: &[u8], args: &[&str]) -> Ran {
    let mut child = command(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(stdin).unwrap();
    ran(child.wait_with_output().unwrap())
}

/// What a finished run left, which must not have panicked.
pub fn ran(output: std::process::Output) -> Ran {
    let text = |bytes| String::from_utf8(bytes).expect("output is UTF-8");
    let ran =
        Ran { code: output.status.code().unwrap_or(-1), stdout: text(output.stdout), stderr: text(output.stderr) };
    assert!(!ran.stderr.contains("panicked"), "{}", ran.stderr);
    ran
}

/// Standard output of a run that must succeed.
pub fn stdout(args: &[&str]) -> String {
    let ran = ridge(args);
    assert_eq!(ran.code, 0, "{args:?}: {}", ran.stderr);
    ran.stdout
}

/// The one JSON value that a successful run prints.
pub fn json(args: &[&str]) -> serde_json::Value {
    serde_json::from_str(&stdout(args)).unwrap()
}

pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Copies the files and folders of a folder into another.
pub fn copy_folder(from: &Path, to: &Path) {
    for entry in from.read_dir().expect("is there") {
        let (path, to) = entry.map(|entry| (entry.path(), to.join(entry.file_name()))).expect("is listed");
        if path.is_dir() {
            std::fs::create_dir_all(&to).expect("makes the folder");
            copy_folder(&path, &to);
        } else {
            std::fs::copy(&path, &to).expect("copies");
        }
    }
}

/// A fixture of a random Llama without tokenizer.
pub fn fixture(name: &str) -> String {
    repository().join("fixtures/llama").join(name).display().to_string()
}

/// A folder that a test may spoil, with the files of `from`.
pub struct Folder(tempfile::TempDir);

impl Folder {
    pub fn copy_of(from: impl AsRef<Path>) -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        for file in from.as_ref().read_dir().unwrap() {
            let file = file.unwrap();
            std::fs::copy(file.path(), folder.0.path().join(file.file_name())).unwrap();
        }
        folder
    }

    pub fn stories() -> Self {
        Self::copy_of(repository().join("models/stories260K"))
    }

    /// With a configuration alone.
    pub fn of_config(text: &str) -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        folder.write("config.json", text);
        folder
    }

    pub fn path(&self) -> &str {
        self.0.path().to_str().unwrap()
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) {
        std::fs::write(self.file(name), bytes).unwrap();
    }

    pub fn edit(&self, name: &str, edit: impl FnOnce(String) -> String) {
        let text = std::fs::read_to_string(self.file(name)).unwrap();
        self.write(name, edit(text));
    }
}

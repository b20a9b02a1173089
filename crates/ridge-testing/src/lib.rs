//! What the tests of several crates share: reporting a test that this machine cannot run, [`HubServer`], a server like
//! the Hugging Face Hub, and [`JsonServer`], which answers as a test says.
//!
//! The standard test harness knows skipped tests only when they are compiled, and a missing GPU, instruction set or
//! Python package is found when they run. [`skip!`] ends such a test early and reports it, so that it is not counted
//! among those that passed: on standard error, where the harness does not capture it, and as a line of the file that
//! the environment variable `RIDGE_SKIPPED_TESTS` names, which `.ci/run` reads for its summary.

mod hub_server;
mod json_server;

pub use hub_server::{HubFaults, HubServer, SeenRequest};
pub use json_server::{JsonReply, JsonRequest, JsonServer};

use std::fmt::{Arguments, Display};
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::Path;

/// The environment variable that names the file to which skipped tests are appended, one line each.
pub const SKIPPED_TESTS: &str = "RIDGE_SKIPPED_TESTS";

/// Reports the running test as skipped, with a formatted reason, and returns from it.
///
/// ```
/// fn needs_a_gpu(gpu: Result<(), String>) {
///     if let Err(why) = gpu {
///         ridge_testing::skip!("no NVIDIA GPU: {why}");
///     }
///     unreachable!("there is none");
/// }
/// needs_a_gpu(Err("the driver is not installed".to_owned()));
/// ```
#[macro_export]
macro_rules! skip {
    ($($reason:tt)+) => {{
        $crate::report_skipped(format_args!($($reason)+));
        return;
    }};
}

/// What [`skip!`] does before it returns.
///
/// # Panics
///
/// When the file that `RIDGE_SKIPPED_TESTS` names cannot be written: a test that silently counted as passed would be
/// worse.
pub fn report_skipped(reason: Arguments<'_>) {
    let line = line(&program(), &std::thread::current(), &reason);
    let _ = std::io::stderr().write_all(line.as_bytes()); // a closed standard error does not fail a test
    if let Some(path) = std::env::var_os(SKIPPED_TESTS) {
        append(Path::new(&path), &line);
    }
}

/// The name of the test binary, which differs between crates.
fn program() -> String {
    let path = std::env::current_exe().unwrap_or_default();
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

/// The harness names the thread that runs a test after the test.
fn line(program: &str, thread: &std::thread::Thread, reason: &dyn Display) -> String {
    let reason = reason.to_string().replace('\n', " ");
    format!("{program}: test {} ... skipped: {reason}\n", thread.name().unwrap_or("without a name"))
}

/// Tests of several processes append to one file; a short line written at once stays whole.
fn append(path: &Path, line: &str) {
    let file = OpenOptions::new().create(true).append(true).open(path);
    let written = file.and_then(|mut file| file.write_all(line.as_bytes()));
    if let Err(error) = written {
        panic!("{SKIPPED_TESTS}: {}: {error}; name a file that can be written", path.display());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_names_the_test_and_the_reason() {
        let thread = std::thread::Builder::new().name("a::b".to_owned());
        let line = thread.spawn(|| line("p", &std::thread::current(), &"no GPU:\nnone")).unwrap().join().unwrap();
        assert_eq!(line, "p: test a::b ... skipped: no GPU: none\n");
    }

    #[test]
    fn lines_are_appended() {
        let path = std::env::temp_dir().join(format!("ridge-testing-{}", std::process::id()));
        append(&path, "first\n");
        append(&path, "second\n");
        let content = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(content, "first\nsecond\n");
    }
}

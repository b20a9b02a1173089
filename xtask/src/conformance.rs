//! `cargo xtask conformance OP`: all checks that apply to every op in the registry, for one op.

use std::path::Path;
use std::process;

use crate::error::XtaskError;
use crate::task::{Task, TaskOutcome, TaskRun};

pub(crate) const TASK: Task = Task {
    name: "conformance",
    summary: "Check one op: semantics on every backend, gradient and sharding",
    help: "\
Check one op, given by its registry name: its samples on every backend, in every dtype and with every instruction set of this
machine, against the f64 semantics; its gradient against finite differences; its sharding rules against the unsharded result.
Prints the output of the tests.

Usage: cargo xtask conformance OP

Example: cargo xtask conformance rms_norm
",
    run: TaskRun::Of("OP", run),
};

/// The packages that have the suite.
const PACKAGES: [&str; 3] = ["ridge-graph", "ridge-cpu", "ridge-cuda"];
/// Its tests, by parts of their names.
const TESTS: [&str; 5] = [
    "conformance::every_op",
    "on_every_sample",
    "grad_ops::",
    "shard_rules::every_rule_of_every_composite",
    "decompositions_shard",
];

fn run(root: &Path, op: &str) -> Result<TaskOutcome, XtaskError> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = process::Command::new(cargo);
    command.current_dir(root).env("RIDGE_CONFORMANCE_OP", op).args(["test", "--no-fail-fast", "--test", "integration"]);
    command.args(PACKAGES.iter().flat_map(|package| ["-p", package])).arg("--").args(TESTS);
    let status = command.status().map_err(XtaskError::CargoStart)?;
    let report = format!("conformance of {op}: {}\n", if status.success() { "passed" } else { "FAILED" });
    Ok(TaskOutcome { report, passed: status.success() })
}

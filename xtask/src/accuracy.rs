//! `cargo xtask accuracy`: errors of plans against published measurements.

use std::path::Path;
use std::process;

use crate::error::XtaskError;
use crate::task::{Task, TaskOutcome, TaskRun};

pub(crate) const TASK: Task = Task {
    name: "accuracy",
    summary: "Compare plans with published measurements, row by row",
    help: "\
Compare the plans of ridge-plan with the measurements in fixtures/planner: training time and memory from four sources, and
latencies of some thousand serving runs. Prints each row's error; mean, median and worst error of the fitted half (used to choose
efficiencies) and of the held-out half; and which targets are reached.

Usage: cargo xtask accuracy

Serving rows are only summarised; list them with
  cargo run --release -p ridge-plan --example accuracy -- --rows
",
    run: TaskRun::Plain(run),
};

fn run(root: &Path) -> Result<TaskOutcome, XtaskError> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = process::Command::new(cargo);
    command.current_dir(root).args(["run", "--quiet", "--release", "-p", "ridge-plan", "--example", "accuracy"]);
    let output = command.output().map_err(XtaskError::CargoStart)?;
    if !output.status.success() {
        return Err(XtaskError::NoReport(String::from_utf8_lossy(&output.stderr).into_owned()));
    }
    Ok(TaskOutcome { report: String::from_utf8_lossy(&output.stdout).into_owned(), passed: true })
}

//! `cargo xtask accuracy`: how near plans come to published measurements.

use std::path::Path;
use std::process;

use crate::error::XtaskError;
use crate::task::{Task, TaskOutcome, TaskRun};

pub(crate) const TASK: Task = Task {
    name: "accuracy",
    summary: "Hold plans against published measurements, row by row",
    help: "\
Hold the plans of ridge-plan against the measurements in fixtures/planner: training time and memory of four sources, and
latencies of some thousand serving runs. Prints each row's error, mean, median and worst by half (the one that was in
view when efficiencies were chosen, and the one held out), and which targets are reached.

Usage: cargo xtask accuracy

Serving rows are many, and only summed up: see each with
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

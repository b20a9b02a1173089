//! Running cargo and other programs.

use std::path::Path;
use std::process::Command;

use crate::error::XtaskError;

/// What a program printed, and how it ended.
pub(crate) struct ProgramOutput {
    /// `None` when a signal ended it.
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Runs the cargo that runs this, in the repository.
pub(crate) fn cargo(root: &Path, args: &[&str]) -> Result<ProgramOutput, XtaskError> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    finish(Command::new(cargo).current_dir(root).args(args))
}

/// Runs a program to its end.
pub(crate) fn finish(command: &mut Command) -> Result<ProgramOutput, XtaskError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|source| XtaskError::Start { program, source })?;
    Ok(ProgramOutput {
        code: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    })
}

/// What a program that must succeed prints.
pub(crate) fn output(command: &mut Command) -> Result<String, XtaskError> {
    let ran = finish(command)?;
    if ran.code == Some(0) {
        return Ok(ran.stdout);
    }
    let program = command.get_program().to_string_lossy();
    Err(XtaskError::NoReport(format!("{program} failed: {}", ran.stderr.trim())))
}

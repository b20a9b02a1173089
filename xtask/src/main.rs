//! Checks and chores of the repository, run as `cargo xtask`.
//!
//! One file per command: [`tidy`] checks the house rules, [`kernels`] compiles the GPU kernels, [`conformance`] checks one op,
//! [`accuracy`] compares plans with published measurements, [`compare`] measures Ridge and
//! llama.cpp, [`gpu_bundle`] packs the GPU tests for another machine, [`dist`] builds a release. A new command needs only a file and a line in [`TASKS`].

mod accuracy;
mod compare;
mod conformance;
mod dist;
mod error;
mod gpu_bundle;
mod kernels;
mod run;
mod task;
mod tidy;

use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;

use error::XtaskError;
use task::{Task, TaskOutcome, TaskRun};

const TASKS: &[Task] =
    &[tidy::TASK, kernels::TASK, conformance::TASK, accuracy::TASK, compare::TASK, gpu_bundle::TASK, dist::TASK];

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let result = dispatch(&args, repository_root());
    match result.and_then(|outcome| print(&outcome)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("xtask: {error}");
            ExitCode::from(2)
        }
    }
}

/// The folder that holds `xtask/`, so that commands work from any directory.
fn repository_root() -> &'static Path {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().unwrap_or(xtask)
}

fn dispatch(args: &[&str], root: &Path) -> Result<TaskOutcome, XtaskError> {
    let shown = |report: String| Ok(TaskOutcome { report, passed: true });
    match args {
        [] | ["help" | "--help" | "-h"] => shown(overview()),
        ["help", name] | [name, "--help" | "-h"] => shown(find(name)?.help.to_owned()),
        [name, rest @ ..] => match (&find(name)?.run, rest) {
            (TaskRun::Plain(run), []) => run(root),
            (TaskRun::Of(_, run), [argument]) => run(root, argument),
            (TaskRun::All(run), arguments) => run(root, arguments),
            (TaskRun::Of(argument, _), []) => {
                Err(XtaskError::MissingArgument { command: (*name).to_owned(), argument })
            }
            (TaskRun::Plain(_), [extra, ..]) | (TaskRun::Of(..), [_, extra, ..]) => {
                Err(XtaskError::UnexpectedArgument { command: (*name).to_owned(), argument: (*extra).to_owned() })
            }
        },
    }
}

fn find(name: &str) -> Result<&'static Task, XtaskError> {
    TASKS.iter().find(|command| command.name == name).ok_or_else(|| XtaskError::UnknownCommand {
        name: name.to_owned(),
        known: TASKS.iter().map(|command| command.name).collect(),
    })
}

fn overview() -> String {
    let mut text = "Checks and chores of the repository.\n\nUsage: cargo xtask <command>\n\nCommands:\n".to_owned();
    for command in TASKS {
        text += &format!("  {:<12}{}\n", command.name, command.summary);
    }
    text += "  help        Print this text, or the help of a command\n";
    text += "\nExit code: 0 when the tree passes, 1 when it does not, 2 when the command could not run.\n";
    text += "The whole gate (tests, fmt, clippy, doc and these checks) is .ci/run.\n";
    text
}

/// Prints the report and hands on whether the tree passed.
fn print(outcome: &TaskOutcome) -> Result<bool, XtaskError> {
    std::io::stdout().write_all(outcome.report.as_bytes()).map_err(XtaskError::Print)?;
    Ok(outcome.passed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error_of(args: &[&str]) -> String {
        match dispatch(args, repository_root()) {
            Ok(_) => panic!("{args:?} must be refused"),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn help_names_every_command_and_each_command_has_help_of_its_own() {
        let overview = overview();
        for command in TASKS {
            assert!(overview.contains(command.name), "{overview}");
            let by_flag = dispatch(&[command.name, "--help"], repository_root());
            let by_word = dispatch(&["help", command.name], repository_root());
            assert_eq!(by_flag.unwrap().report, command.help);
            assert_eq!(by_word.unwrap().report, command.help);
        }
    }

    #[test]
    fn unknown_command_is_refused_with_the_known_ones() {
        let message = error_of(&["tidyy"]);
        assert!(message.contains("tidyy") && message.contains("tidy, kernels, conformance, accuracy"), "{message}");
    }

    #[test]
    fn argument_that_no_command_takes_is_refused() {
        let message = error_of(&["tidy", "--fix"]);
        assert!(message.contains("--fix"), "{message}");
        assert!(error_of(&["conformance"]).contains("OP"));
        assert!(error_of(&["conformance", "rms_norm", "linear"]).contains("linear"));
    }
}

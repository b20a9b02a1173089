//! The `ridge` command: parses arguments, resolves them into settings, and calls the crates that do the work.
//!
//! The modules form layers, each of which uses only those below it:
//!
//! 1. `main`: the process, its exit code.
//! 2. `cli`: the command line as a whole. It lists the arguments of every command and dispatches.
//! 3. `commands`: a file or folder for each, with its arguments, the settings that they resolve to, and its output.
//! 4. `args`: arguments that several commands share, and parsers of their values. Beside it `conversation` (messages and
//!    chat templates) and `target_file` (files that are written).
//! 5. `input` and `output`: the terminal, standard streams and files of text.
//! 6. `error`: errors and exit codes.
//!
//! The library, the crate `ridge`, opens models and creates engines on devices.

mod args;
mod cli;
mod commands;
mod conversation;
mod error;
mod input;
mod output;
mod snapshot;
mod target_file;

use std::io::Write as _;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser as _};

use cli::{Cli, with_model_named};
use error::Error;

fn main() -> ExitCode {
    let cli = match Cli::try_parse_from(with_model_named(std::env::args_os(), &Cli::command())) {
        Ok(cli) => cli,
        Err(refusal) => {
            // clap also returns help and version as errors; they fail only if they cannot be written.
            let printed = refusal.print().and_then(|()| std::io::stdout().flush());
            return match printed.map_err(Error::Stdout) {
                Err(error) if !refusal.use_stderr() => failure(&error),
                _ => ExitCode::from(refusal.exit_code() as u8),
            };
        }
    };
    match cli.command.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failure(&error),
    }
}

/// Prints the error. A closed standard output (SIGPIPE) is not an error.
fn failure(error: &Error) -> ExitCode {
    if error.reader_left() {
        return ExitCode::SUCCESS;
    }
    if !error.is_reported() {
        output::report(error);
    }
    error.exit_code()
}

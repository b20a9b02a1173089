//! The `ridge` command: what was typed, resolved into settings, handed to the crates that do the work.
//!
//! `args` is what can be typed and its help; `settings` is what it means, complete before anything runs. Each command
//! is one file (`shell` is completions and manual pages) or, where it is longer, a folder: `chat`, `eval`, `plan`. Newer
//! commands keep their arguments with them. `model` opens a model for any of them, `input` reads texts, `output` is how things are
//! shown, `error` what can go wrong.

mod args;
mod bench;
mod chat;
mod convert;
mod doctor;
mod embed;
mod error;
mod eval;
mod generate;
mod input;
mod inspect;
mod model;
mod output;
mod plan;
mod quantize;
mod serve;
mod settings;
mod shell;
mod tokenize;

use std::io::Write as _;
use std::process::ExitCode;

use clap::Parser as _;

use args::{Cli, Command};
use error::{Error, Result};

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(refusal) => {
            // Help and version are such, too, and are no failure unless they cannot be written.
            let printed = refusal.print().and_then(|()| std::io::stdout().flush());
            return match printed.map_err(Error::Stdout) {
                Err(error) if !refusal.use_stderr() => failure(&error),
                _ => ExitCode::from(refusal.exit_code() as u8),
            };
        }
    };
    match run(cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failure(&error),
    }
}

/// Says what went wrong. A reader that left is no failure.
fn failure(error: &Error) -> ExitCode {
    if error.reader_left() {
        return ExitCode::SUCCESS;
    }
    output::report(error);
    error.exit_code()
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Generate(args) => generate::run(&args.resolve()?),
        Command::Chat(args) => chat::run(args.resolve()?),
        Command::Convert(args) => convert::run(&args),
        Command::Quantize(args) => quantize::run(&args),
        Command::Embed(args) => embed::run(args),
        Command::Serve(args) => serve::run(args),
        Command::Tokenize(args) => tokenize::run(&args),
        Command::Bench(args) => args.run(),
        Command::Eval(args) => eval::run(&args.resolve()?),
        Command::Inspect(args) => inspect::run(&args.resolve()?),
        Command::Doctor(args) => doctor::run(&args.resolve()),
        Command::Completions(args) => shell::completions(&args),
        Command::Man(args) => shell::man(&args),
        Command::Plan(args) => plan::run(&args.command),
    }
}

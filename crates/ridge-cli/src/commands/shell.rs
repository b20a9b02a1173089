//! `ridge completions` and `ridge man`: both are generated from the argument definitions.

use std::path::{Path, PathBuf};

use clap::{Args, Command};
use clap_complete::Shell;
use clap_mangen::Man;

use crate::error::{Error, Result, refused};
use crate::output::print;

/// Print a shell completion script
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  source <(ridge completions bash)                             current shell
  ridge completions zsh > ~/.zfunc/_ridge                      a folder in fpath
  ridge completions fish > ~/.config/fish/completions/ridge.fish")]
pub(crate) struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

/// Print a man page, or write all of them to a folder
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ridge man | man -l -
  ridge man generate > ridge-generate.1
  ridge man plan serve | man -l -
  ridge man --folder ~/.local/share/man/man1")]
pub(crate) struct ManArgs {
    /// The command to document [default: the page that lists all commands]
    #[arg(value_name = "COMMAND")]
    command: Vec<String>,

    /// Write one file per command to this folder, which is created if necessary
    #[arg(long, value_name = "DIR", conflicts_with = "command")]
    folder: Option<PathBuf>,
}

/// Prints a completion script for `ridge`.
///
/// # Errors
/// When standard output cannot be written.
pub(crate) fn completions(args: &CompletionsArgs, mut ridge: Command) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut ridge, "ridge", &mut script);
    print(&String::from_utf8_lossy(&script))
}

/// Prints or writes man pages of `ridge`.
///
/// # Errors
/// When there is no such command, or a page cannot be written.
pub(crate) fn man(args: &ManArgs, ridge: Command) -> Result<()> {
    let mut ridge = ridge.disable_help_subcommand(true);
    // Assigns page names such as `ridge-generate`.
    ridge.build();
    if let Some(folder) = &args.folder {
        let fail = |path: &Path| {
            let path = path.display().to_string();
            move |cause| Error::Write { path, cause }
        };
        std::fs::create_dir_all(folder).map_err(fail(folder))?;
        let mut pages = vec![&ridge];
        while let Some(page) = pages.pop() {
            let path = folder.join(format!("{}.1", page.get_display_name().unwrap_or("ridge")));
            std::fs::write(&path, rendered(page)).map_err(fail(&path))?;
            pages.extend(page.get_subcommands());
        }
        return Ok(());
    }
    let mut page = &ridge;
    for name in &args.command {
        let names: Vec<&str> = page.get_subcommands().map(Command::get_name).collect();
        let why = match names[..] {
            [] => format!("{} has no subcommands", page.get_name()),
            _ => format!("there is no such command; choose one of: {}", names.join(", ")),
        };
        page = page.find_subcommand(name).ok_or_else(|| refused("man", name, &why))?;
    }
    print(&rendered(page))
}

fn rendered(command: &Command) -> String {
    let mut page = Vec::new();
    // Writing to a vector cannot fail.
    let _ = Man::new(command.clone())
        .source(concat!("ridge ", env!("CARGO_PKG_VERSION")))
        .manual("Ridge")
        .render(&mut page);
    String::from_utf8_lossy(&page).into_owned()
}

//! Reading lines from a terminal, with editing, completion of commands and a history.

use std::path::PathBuf;

use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::DefaultHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{Behavior, Config, Context, Editor as Lines, Helper};

use super::commands::{COMMANDS, unfinished};
use crate::error::{Error, Result};

/// What the user did.
pub(super) enum EditorInput {
    Text(String),
    /// Ctrl-C.
    Interrupt,
    /// Ctrl-D.
    End,
}

/// Maximum number of lines in the history.
const MAX_HISTORY: usize = 1000;

pub(super) struct ChatEditor {
    lines: Lines<Commands, DefaultHistory>,
    history: Option<PathBuf>,
}

impl ChatEditor {
    /// With the history of former conversations, unless it is not wanted.
    pub(super) fn new(history: bool) -> Result<Self> {
        let config = Config::builder()
            .max_history_size(MAX_HISTORY)
            .map_err(Error::Editor)?
            .auto_add_history(true)
            // Standard output may be a file.
            .behavior(Behavior::PreferTerm)
            .build();
        let mut lines = Lines::with_config(config).map_err(Error::Editor)?;
        lines.set_helper(Some(Commands));
        let history = history.then(history_file).flatten();
        if let Some(file) = &history {
            // There is none the first time.
            let _ = lines.load_history(file);
        }
        Ok(Self { lines, history })
    }

    pub(super) fn read(&mut self) -> Result<EditorInput> {
        match self.lines.readline(">>> ") {
            Ok(text) => Ok(EditorInput::Text(text)),
            Err(ReadlineError::Interrupted) => Ok(EditorInput::Interrupt),
            Err(ReadlineError::Eof) => Ok(EditorInput::End),
            Err(error) => Err(Error::Editor(error)),
        }
    }
}

impl Drop for ChatEditor {
    /// Keeps the history. Where that fails there is nobody to tell who could mend it.
    fn drop(&mut self) {
        if let Some(file) = &self.history
            && let Some(folder) = file.parent()
            && std::fs::create_dir_all(folder).is_ok()
        {
            let _ = self.lines.append_history(file);
        }
    }
}

/// Where the XDG base directory specification wants it.
fn history_file() -> Option<PathBuf> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let state = absolute("XDG_STATE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".local/state")))?;
    Some(state.join("ridge/chat_history"))
}

/// Completes commands, and says which messages go on.
struct Commands;

impl Helper for Commands {}
impl Hinter for Commands {
    type Hint = String;
}
impl Highlighter for Commands {}

impl Completer for Commands {
    type Candidate = String;

    fn complete(&self, line: &str, at: usize, _: &Context<'_>) -> rustyline::Result<(usize, Vec<String>)> {
        let typed = &line[..at];
        let fitting = COMMANDS.iter().filter(|(name, ..)| typed.starts_with('/') && name.starts_with(typed));
        Ok((
            0,
            fitting
                .map(|(name, argument, _)| format!("{name}{}", if argument.is_empty() { "" } else { " " }))
                .collect(),
        ))
    }
}

impl Validator for Commands {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        let goes_on = unfinished(context.input());
        Ok(if goes_on { ValidationResult::Incomplete } else { ValidationResult::Valid(None) })
    }
}

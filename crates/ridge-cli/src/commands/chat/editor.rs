//! Line input from a terminal, with editing, command completion and a history.

use std::path::PathBuf;

use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::DefaultHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{Behavior, Config, Context, Editor as Lines, Helper};

use super::commands::{COMMANDS, unfinished};
use super::keys::TypedAhead;
use crate::error::{Error, Result};
use crate::output::note;

/// The user's input.
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
    /// Keys typed during a reply.
    typed: TypedAhead,
}

impl ChatEditor {
    /// Loads the input history, unless it is disabled.
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
        let history = history.then(state_folder).flatten().map(|folder| folder.join("chat_history"));
        if let Some(file) = &history {
            // The file does not exist the first time.
            let _ = lines.load_history(file);
        }
        Ok(Self { lines, history, typed: TypedAhead::default() })
    }

    /// Takes keys that were typed during a reply.
    pub(super) fn take_keys(&mut self, keys: &str) {
        self.typed.read(keys);
    }

    pub(super) fn read(&mut self) -> Result<EditorInput> {
        const PROMPT: &str = ">>> ";
        if !self.typed.messages.is_empty() {
            let message = self.typed.messages.remove(0);
            note(&format!("{PROMPT}{message}"));
            // Failing to add to the history is not an error.
            let _ = self.lines.add_history_entry(&message);
            return Ok(EditorInput::Text(message));
        }
        if std::mem::take(&mut self.typed.ends) {
            return Ok(EditorInput::End);
        }
        let begun = std::mem::take(&mut self.typed.line);
        match self.lines.readline_with_initial(PROMPT, (&begun, "")) {
            Ok(text) => Ok(EditorInput::Text(text)),
            Err(ReadlineError::Interrupted) => Ok(EditorInput::Interrupt),
            Err(ReadlineError::Eof) => Ok(EditorInput::End),
            Err(error) => Err(Error::Editor(error)),
        }
    }
}

impl Drop for ChatEditor {
    /// Writes the history. A failure is ignored.
    fn drop(&mut self) {
        if let Some(file) = &self.history
            && let Some(folder) = file.parent()
            && std::fs::create_dir_all(folder).is_ok()
        {
            let _ = self.lines.append_history(file);
        }
    }
}

/// The state directory of the XDG base directory specification.
pub(super) fn state_folder() -> Option<PathBuf> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let state = absolute("XDG_STATE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".local/state")))?;
    Some(state.join("ridge"))
}

/// Completes commands, and detects messages that continue on the next line.
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

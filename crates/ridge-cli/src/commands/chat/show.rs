//! Printing of replies and of notes about them.

use ridge_engine::Finish;

use super::args::ChatSettings;
use super::turn::{AnswerObserver, ChatAnswer, ChatModel};
use crate::error::Result;
use crate::output::{Progress, count, note, print};

/// Prints notes about a reply.
pub(super) fn remark(settings: &ChatSettings, limits: ChatLimits, answer: &ChatAnswer, left_out_before: usize) {
    if settings.json || !settings.notes {
        return;
    }
    let context = count(limits.context, "token");
    let remedy = if limits.context < limits.max_context { "; --context N raises the limit" } else { "" };
    if answer.left_out > left_out_before {
        let left_out = count(answer.left_out, "message");
        note(&format!("(the context of {context} is full: the oldest {left_out} are omitted{remedy})"));
    }
    if answer.finish == Finish::Context {
        note(&format!("(cut off: the context of {context} is full{remedy})"));
    }
    if answer.finish == Finish::Length {
        let max = count(limits.max_tokens, "token");
        note(&format!("(cut off after {max}; --max-tokens N or /set max_tokens N raises the limit)"));
    }
    if settings.verbose {
        note(&format!("({})", answer.line()));
    }
}

/// The limits that can cut off a reply.
#[derive(Clone, Copy)]
pub(super) struct ChatLimits {
    pub(super) context: usize,
    /// The longest context that the model supports.
    max_context: usize,
    max_tokens: usize,
}

impl ChatModel {
    pub(super) fn limits(&self) -> ChatLimits {
        ChatLimits { context: self.context, max_context: self.max_context, max_tokens: self.max_tokens }
    }
}

/// Streams a reply; before it, on a terminal, shows the progress of the prompt.
pub(super) struct ShowAnswer<'a> {
    settings: &'a ChatSettings,
    progress: Option<Progress>,
}

impl<'a> ShowAnswer<'a> {
    pub(super) fn new(settings: &'a ChatSettings) -> Self {
        Self { settings, progress: None }
    }
}

impl AnswerObserver for ShowAnswer<'_> {
    fn reading(&mut self, done: usize, total: usize) {
        if self.settings.notes && total > 0 {
            let start = || Progress::of_tokens("reading", total as u64);
            self.progress.get_or_insert_with(start).at(done as u64);
        }
    }

    fn text(&mut self, text: &str) -> Result<()> {
        self.progress = None;
        if self.settings.json || text.is_empty() { Ok(()) } else { print(text) }
    }
}

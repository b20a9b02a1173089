//! Chat templates: messages to the text that a model was trained on.
//!
//! A template is a program of its maker in the language of jinja2, run by transformers in a sandbox. Here it is run by
//! an interpreter of our own (`jinja/`), whose claim is transformers' text or an error, never another text, and within
//! [`Limits`], since the maker is a stranger. `data.rs` is what goes in, `chat.rs` prepares it as transformers does,
//! `set.rs` finds the templates among a model's files.

mod chat;
mod data;
mod jinja;
mod set;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::error::{ModelError, Result};
pub use chat::ChatInput;
pub use data::Data;
pub use jinja::Clock;
use jinja::{Bounds, Fault, FaultKind};
pub use set::ChatTemplates;

/// A compiled chat template. Cheap to clone, and usable from several threads at once.
#[derive(Clone)]
pub struct ChatTemplate {
    /// The file, for errors.
    file: Arc<str>,
    source: Arc<str>,
    compiled: Arc<jinja::Template>,
}

/// What rendering gave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RenderedChat {
    /// The prompt.
    pub text: String,
    /// Where the text of `{% generation %}` blocks is, in bytes of `text`: what the assistant says, to be trained on.
    /// In order, and empty if the template has no such blocks. Nothing if one is inside of a macro or of another block
    /// whose text is collected first: its place in the whole is not known, and that which transformers gives is wrong.
    pub generations: Option<Vec<Range<usize>>>,
}

/// What one rendering may use. The defaults render conversations of megabytes in well under a second, and stop a
/// template that would run forever within a few.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Steps: expressions evaluated and items walked over, and one for every 64 bytes read or written.
    pub steps: u64,
    /// Bytes of text and lists that are made, the intermediate ones included: also a bound on the memory used.
    pub bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { steps: 20_000_000, bytes: 512 << 20 }
    }
}

/// How deep statements, expressions and macros may be in one another; enough stack is there for it on any thread.
const DEEPEST: u32 = 400;

impl ChatTemplate {
    /// Compiles a template. `file` names it in errors.
    ///
    /// # Errors
    ///
    /// [`ModelError::Template`] if jinja2 would not compile it, or if it needs something that is not implemented.
    pub fn new(file: &str, source: &str) -> Result<Self> {
        let compiled = jinja::parse(source).map_err(|fault| error(file, &fault))?;
        Ok(Self { file: file.into(), source: source.into(), compiled: Arc::new(compiled) })
    }

    /// The template's source.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders a conversation, as `apply_chat_template(tokenize=False)` of transformers does.
    ///
    /// # Errors
    ///
    /// [`ModelError::TemplateRefusal`] if the template itself refuses the conversation, which is a message for whoever
    /// sent it; [`ModelError::Template`] if the template fails, does what is not implemented, or exceeds the limits.
    pub fn render(&self, input: &ChatInput) -> Result<RenderedChat> {
        let fail = |fault: Box<Fault>| error(&self.file, &fault);
        let prepared = chat::prepare(input, &self.source).map_err(fail)?;
        let bounds = Bounds { steps: input.limits.steps, bytes: input.limits.bytes, depth: DEEPEST };
        let rendered = jinja::render(&self.compiled, prepared.variables, &input.clock, bounds).map_err(fail)?;
        let text = match prepared.tagged {
            Some(tagged) => tagged.cut(rendered.text).map_err(fail)?,
            None => rendered.text,
        };
        Ok(RenderedChat { text, generations: rendered.generations })
    }
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate").field("file", &self.file).finish_non_exhaustive()
    }
}

fn error(file: &str, fault: &Fault) -> ModelError {
    let file = file.to_owned();
    let line = (fault.line > 0).then_some(fault.line);
    let message = fault.message.clone();
    let remedy = match fault.kind {
        FaultKind::Raised => return ModelError::TemplateRefusal { file, line, message },
        FaultKind::Template => "check that the template is meant for such messages, or give another one",
        FaultKind::Unsupported => "change the template there, or give another one",
        FaultKind::Limit => "shorten the conversation, or give another template",
    };
    ModelError::Template { file, line, problem: message, remedy: remedy.to_owned() }
}

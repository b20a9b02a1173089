//! A compiled chat template.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::chat::{self, ChatInput};
use super::jinja::{self, Bounds, Fault, FaultKind};
use crate::error::{Result, TextError};

/// A compiled chat template. Cheap to clone, and usable from several threads at once.
#[derive(Clone)]
pub struct ChatTemplate {
    /// The file, for errors.
    pub(super) file: Arc<str>,
    pub(super) source: Arc<str>,
    pub(super) compiled: Arc<jinja::Template>,
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

/// How deep statements, expressions and macros may be in one another; enough stack is there for it on any thread.
const MAX_DEPTH: u32 = 400;

impl ChatTemplate {
    /// Compiles a template. `file` names it in errors.
    ///
    /// # Errors
    ///
    /// [`TextError::Template`] if jinja2 would not compile it, or if it needs something that is not implemented.
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
    /// [`TextError::TemplateRefusal`] if the template itself refuses the conversation, which is a message for whoever
    /// sent it; [`TextError::Template`] if the template fails, does what is not implemented, or exceeds the limits.
    pub fn render(&self, input: &ChatInput) -> Result<RenderedChat> {
        let fail = |fault: Box<Fault>| error(&self.file, &fault);
        let prepared = chat::prepare(input, &self.source).map_err(fail)?;
        let bounds = Bounds { steps: input.limits.steps, bytes: input.limits.bytes, depth: MAX_DEPTH };
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

/// The error for a `fault` in the template of `file`.
pub(super) fn error(file: &str, fault: &Fault) -> TextError {
    let file = file.to_owned();
    let line = (fault.line > 0).then_some(fault.line);
    let message = fault.message.clone();
    let remedy = match fault.kind {
        FaultKind::Raised => return TextError::TemplateRefusal { file, line, message },
        FaultKind::Template => "check that the template supports such messages, or use another one",
        FaultKind::Unsupported => "change the template, or use another one",
        FaultKind::Limit => "shorten the conversation, or use another template",
    };
    TextError::Template { file, line, problem: message, remedy: remedy.to_owned() }
}

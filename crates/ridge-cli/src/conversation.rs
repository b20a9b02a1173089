//! Conversations: messages, as JSON, and the chat templates that render them as text.

use std::path::Path;

use ridge_models::ModelFiles;
use ridge_text::ChatTemplates;
use ridge_text::template::Data;
use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::input;

/// The model's chat templates, or the one in `file`.
///
/// # Errors
/// When there is no template, or it does not parse.
pub(crate) fn chat_templates(files: &ModelFiles, file: Option<&Path>) -> Result<ChatTemplates> {
    let templates = files.chat_templates()?;
    if let Some(file) = file {
        let template = ("default".to_owned(), file.display().to_string(), input::file(file)?);
        return Ok(templates.with_files(vec![template]));
    }
    match templates.is_empty() {
        true if files.is_embedded() => Ok(templates.with_files(vec![story_template()])),
        true => Err(Error::NoChatTemplate { model: files.to_string() }),
        false => Ok(templates),
    }
}

/// The template of the embedded model, as name, file and text. The model was not trained on conversations: messages are
/// concatenated to one story, which it continues.
pub(crate) fn story_template() -> (String, String, String) {
    const STORY: &str = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}";
    ("default".to_owned(), "the template of the embedded model".to_owned(), STORY.to_owned())
}

/// A system prompt and the following messages.
#[derive(Clone, Debug, Default)]
pub(crate) struct Conversation {
    pub(crate) system: Option<String>,
    messages: Vec<Value>,
    /// Messages before this index are omitted from the prompt, because they do not fit the context.
    first: usize,
}

fn role(message: &Value) -> &str {
    message["role"].as_str().unwrap_or_default()
}

impl Conversation {
    /// Reads the conversation in a file, as [`Conversation::from_json`].
    pub(crate) fn from_file(path: &Path) -> Result<Self> {
        Self::from_json(&path.display().to_string(), &input::file(path)?)
    }

    /// Reads a JSON list of messages, or an object that has one as `messages`. `what` names the text in errors. A
    /// system message at its beginning becomes the system prompt.
    pub(crate) fn from_json(what: &str, text: &str) -> Result<Self> {
        let fail = |problem: String| Error::Conversation { what: what.to_owned(), problem };
        let mut value: Value = serde_json::from_str(text).map_err(|error| fail(error.to_string()))?;
        if value.is_object() {
            value = value["messages"].take();
        }
        let Value::Array(mut messages) = value else { return Err(fail("it is not a list".to_owned())) };
        for (index, message) in messages.iter().enumerate() {
            if !message["role"].is_string() {
                return Err(fail(format!("message {} has no role", index + 1)));
            }
            // A tool call has no content; content parts are handled by the template.
            if message["content"].is_null() && message["tool_calls"].is_null() {
                return Err(fail(format!("message {} has no content", index + 1)));
            }
            Data::from_value(what, message)?;
        }
        let first = messages.first().filter(|m| role(m) == "system");
        let system = first.and_then(|m| m["content"].as_str()).map(str::to_owned);
        if system.is_some() {
            messages.remove(0);
        }
        Ok(Self { system, messages, first: 0 })
    }

    /// All messages, the system prompt first.
    pub(crate) fn to_json(&self) -> Value {
        let system = self.system.iter().map(|text| json!({"role": "system", "content": text}));
        system.chain(self.messages.iter().cloned()).collect()
    }

    /// The messages of the prompt.
    pub(crate) fn read(&self) -> Result<Vec<Data>> {
        let system = self.system.iter().map(|text| json!({"role": "system", "content": text}));
        let messages = system.chain(self.messages[self.first..].iter().cloned());
        messages.map(|message| Ok(Data::from_value("a message", &message)?)).collect()
    }

    pub(crate) fn say(&mut self, role: &str, text: &str) {
        self.messages.push(json!({"role": role, "content": text}));
    }

    /// Number of messages, without the system prompt.
    pub(crate) fn len(&self) -> usize {
        self.messages.len()
    }

    /// Omits this many of the oldest messages.
    pub(crate) fn leave_out(&mut self, messages: usize) {
        self.first = messages.min(self.messages.len().saturating_sub(1));
    }

    /// The number of omitted messages.
    pub(crate) fn left_out(&self) -> usize {
        self.first
    }

    /// Omits one more turn, the oldest, unless it is the last one.
    pub(crate) fn leave_out_a_turn(&mut self) -> bool {
        let next = (self.first + 1..self.messages.len()).find(|i| role(&self.messages[*i]) == "user");
        self.first = next.unwrap_or(self.first);
        next.is_some()
    }

    /// Removes a trailing user message, whose reply was interrupted before it started.
    pub(crate) fn forget_unanswered(&mut self) {
        if self.messages.last().is_some_and(|m| role(m) == "user") {
            self.undo();
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    pub(crate) fn clear(&mut self) {
        self.keep(0);
    }

    /// Removes the last user message and everything after it. False if there is none.
    pub(crate) fn undo(&mut self) -> bool {
        let last = self.last_of_user();
        last.map(|at| self.keep(at)).is_some()
    }

    /// Removes everything after the last user message. False if there is none.
    pub(crate) fn take_back_answer(&mut self) -> bool {
        let last = self.last_of_user();
        last.map(|at| self.keep(at + 1)).is_some()
    }

    fn last_of_user(&self) -> Option<usize> {
        self.messages.iter().rposition(|m| role(m) == "user")
    }

    fn keep(&mut self, messages: usize) {
        self.messages.truncate(messages);
        if self.first >= messages {
            self.first = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contents(conversation: &Conversation) -> Vec<String> {
        let read = conversation.read().unwrap();
        read.iter().map(|m| m.get("content").unwrap().as_str().unwrap().to_owned()).collect()
    }

    fn three_turns() -> Conversation {
        let mut c = Conversation { system: Some("s".into()), ..Conversation::default() };
        for (role, text) in [("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "4"), ("user", "5")] {
            c.say(role, text);
        }
        c
    }

    #[test]
    fn oldest_turns_are_left_out_whole_and_the_system_prompt_stays() {
        let mut c = three_turns();
        assert!(c.leave_out_a_turn());
        assert_eq!(contents(&c), ["s", "3", "4", "5"]);
        assert!(c.leave_out_a_turn());
        assert_eq!(contents(&c), ["s", "5"]);
        assert!(!c.leave_out_a_turn());
        assert_eq!((contents(&c), c.left_out()), (vec!["s".to_owned(), "5".to_owned()], 4));
        // Omitted messages are still saved, and return when later messages are removed.
        assert_eq!(c.to_json().as_array().unwrap().len(), 6);
        assert!(c.undo());
        assert_eq!(contents(&c), ["s", "1", "2", "3", "4"]);
    }

    #[test]
    fn undo_takes_a_turn_back_and_retry_its_answer() {
        let mut c = three_turns();
        assert!(c.undo() && c.undo());
        assert_eq!(contents(&c), ["s", "1", "2"]);
        assert!(c.take_back_answer());
        assert_eq!(contents(&c), ["s", "1"]);
        assert!(c.undo());
        assert!(!c.undo() && !c.take_back_answer());
    }

    #[test]
    fn what_is_saved_is_loaded() {
        let c = three_turns();
        let again = Conversation::from_json("x", &c.to_json().to_string()).unwrap();
        assert_eq!((again.to_json(), again.system), (c.to_json(), Some("s".to_owned())));
        let wrapped = json!({"messages": c.to_json()}).to_string();
        assert_eq!(Conversation::from_json("x", &wrapped).unwrap().to_json(), c.to_json());
    }

    #[test]
    fn what_is_no_conversation_says_where() {
        for (text, said) in [
            ("[", "EOF"),
            ("7", "it is not a list"),
            ("{}", "it is not a list"),
            (r#"[{"role": "user", "content": "a"}, 3]"#, "message 2 has no role"),
            (r#"[{"role": "user"}]"#, "message 1 has no content"),
        ] {
            let error = Conversation::from_json("talk.json", text).unwrap_err().to_string();
            assert!(error.starts_with("talk.json is not a conversation: ") && error.contains(said), "{error}");
        }
    }
}

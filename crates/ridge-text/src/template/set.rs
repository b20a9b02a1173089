//! The templates of a model: where they are, and which one is meant.

use ridge_files::json;
use serde_json::Value;

use super::chat::ChatInput;
use super::compiled::{ChatTemplate, RenderedChat, error};
use super::data::Data;
use super::jinja::{self, Fault};
use crate::error::{Result, TextError};
use crate::tokenizer::Tokenizer;

/// The chat templates of a model, by name, and the special tokens that they are given.
#[derive(Debug, Default)]
pub struct ChatTemplates {
    /// Name, file, and the template or why it is none: a broken template matters when it is asked for.
    templates: Vec<(String, String, Result<ChatTemplate, Box<Fault>>)>,
    special_tokens: Vec<(String, String)>,
}

/// The tokens that every tokenizer may have, in the order of transformers.
const TOKENS: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

impl ChatTemplates {
    /// Reads the texts of a model's files, where they are there: `tokenizer_config.json`, `special_tokens_map.json` and
    /// `chat_template.json`, each with the name that errors call it.
    ///
    /// # Errors
    ///
    /// [`TextError::Files`] or [`TextError::Value`] if a file is not what it should be.
    pub fn from_json(
        config: Option<(&str, &str)>,
        tokens_map: Option<(&str, &str)>,
        legacy: Option<(&str, &str)>,
    ) -> Result<Self> {
        let mut set = Self::default();
        let mut has_added_tokens = false;
        if let Some((file, text)) = config {
            let config = json::object(file, text.as_bytes())?;
            has_added_tokens = config.contains_key("added_tokens_decoder");
            set.read_tokens(&config);
            if let Some(Value::Object(extra)) = config.get("extra_special_tokens") {
                set.read_all_tokens(extra);
            }
            if let Some(template) = config.get("chat_template") {
                set.read_templates(file, template)?;
            }
        }
        if let Some((file, text)) = tokens_map.filter(|_| !has_added_tokens) {
            set.read_tokens(&json::object(file, text.as_bytes())?);
        }
        if let Some((file, text)) = legacy.filter(|_| set.templates.is_empty())
            && let Some(template) = json::object(file, text.as_bytes())?.get("chat_template")
        {
            set.read_templates(file, template)?;
        }
        Ok(set)
    }

    /// Takes files of their own in place of all templates that were read so far: `chat_template.jinja` as the default
    /// one, and others by name. Each is a name, the file for errors, and the source.
    #[must_use]
    pub fn with_files(mut self, files: Vec<(String, String, String)>) -> Self {
        if !files.is_empty() {
            self.templates.clear();
        }
        for (name, file, source) in files {
            self.insert(name, file, &source);
        }
        self
    }

    /// These templates with special tokens besides or in place of those that were read.
    #[must_use]
    pub fn with_special_tokens(mut self, tokens: impl IntoIterator<Item = (String, String)>) -> Self {
        tokens.into_iter().for_each(|(name, token)| self.token(&name, &token));
        self
    }

    /// Are there none?
    pub fn is_empty(&self) -> bool {
        self.templates.is_empty()
    }

    /// The names of the templates; a single one without a name is `default`.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.templates.iter().map(|(name, ..)| name.as_str())
    }

    /// The special tokens that the templates are given, by name (`bos_token`).
    pub fn special_tokens(&self) -> &[(String, String)] {
        &self.special_tokens
    }

    /// The template of this name; without a name `tool_use` if there are tools and such a template, else `default`.
    ///
    /// # Errors
    ///
    /// [`TextError::Template`] if there is none, or if it does not compile.
    pub fn select(&self, name: Option<&str>, tools: bool) -> Result<&ChatTemplate> {
        let find = |name: &str| self.templates.iter().find(|(n, ..)| n == name);
        let found = match name {
            Some(name) => find(name),
            None => find("tool_use").filter(|_| tools).or_else(|| find("default")),
        };
        let fail = |problem: String, remedy: &str| TextError::Template {
            file: "chat template".to_owned(),
            line: None,
            problem,
            remedy: remedy.to_owned(),
        };
        match found {
            Some((_, _, Ok(template))) => Ok(template),
            Some((_, file, Err(fault))) => Err(error(file, fault)),
            None if self.is_empty() => {
                Err(fail("the model has none".to_owned(), "give one, or use a model that is made for conversations"))
            }
            None => {
                let names: Vec<&str> = self.names().collect();
                let wanted = name.unwrap_or("default");
                Err(fail(format!("there is none named {wanted}"), &format!("choose one of: {}", names.join(", "))))
            }
        }
    }

    /// Renders with the template that [`select`](Self::select) chooses, with the special tokens as variables that those
    /// of the input replace.
    ///
    /// # Errors
    ///
    /// As for [`select`](Self::select) and [`ChatTemplate::render`].
    pub fn render(&self, name: Option<&str>, input: &ChatInput) -> Result<RenderedChat> {
        let template = self.select(name, input.tools.is_some())?;
        let tokens = self.special_tokens.iter().map(|(name, token)| (name.clone(), Data::Text(token.clone())));
        let mut input = input.clone();
        input.variables = tokens.chain(std::mem::take(&mut input.variables)).collect();
        template.render(&input)
    }

    /// The special token that a template puts behind an answer, if it does: not every model names it among those that end
    /// a text. `input` has the tools and variables to render with; its messages are replaced.
    pub fn end_of_turn(&self, name: Option<&str>, input: &ChatInput, tokenizer: &Tokenizer) -> Option<u32> {
        const ANSWER: &str = "ANSWER";
        let message = |role: &str, text: &str| {
            Data::Map(vec![("role".to_owned(), role.into()), ("content".to_owned(), text.into())])
        };
        let mut input = input.clone();
        input.messages = vec![message("user", "QUESTION"), message("assistant", ANSWER)];
        input.add_generation_prompt = false;
        let text = self.render(name, &input).ok()?.text;
        let behind = text.rsplit_once(ANSWER)?.1.trim_start();
        let first = *tokenizer.encode(behind, false).ok()?.first()?;
        tokenizer.is_special(first).then_some(first)
    }

    fn insert(&mut self, name: String, file: String, source: &str) {
        let template = jinja::parse(source).map(|compiled| ChatTemplate {
            file: file.as_str().into(),
            source: source.into(),
            compiled: compiled.into(),
        });
        self.templates.retain(|(n, ..)| *n != name);
        self.templates.push((name, file, template));
    }

    /// `chat_template`: one, or a list of several with their names.
    fn read_templates(&mut self, file: &str, value: &Value) -> Result<()> {
        let wrong = || TextError::Value {
            file: file.to_owned(),
            key: "chat_template".to_owned(),
            value: json::shown(value),
            problem: "is neither a template nor a list of templates with their names".to_owned(),
            remedy: "download the file again",
        };
        match value {
            Value::Null => {}
            Value::String(source) => self.insert("default".to_owned(), file.to_owned(), source),
            Value::Array(list) => {
                for entry in list {
                    let text = |key: &str| entry.get(key).and_then(Value::as_str).ok_or_else(wrong);
                    let (name, source) = (text("name")?, text("template")?);
                    self.insert(name.to_owned(), format!("{file} (chat_template {name})"), source);
                }
            }
            Value::Object(named) => {
                for (name, source) in named {
                    let source = source.as_str().ok_or_else(wrong)?;
                    self.insert(name.clone(), format!("{file} (chat_template {name})"), source);
                }
            }
            _ => return Err(wrong()),
        }
        Ok(())
    }

    /// The tokens among the keys of a file: the usual ones first, then those that only this model has.
    fn read_tokens(&mut self, map: &serde_json::Map<String, Value>) {
        let usual = TOKENS.iter().filter_map(|name| Some((*name, map.get(*name)?)));
        let own = map.iter().filter(|(name, _)| name.ends_with("_token") && !TOKENS.contains(&name.as_str()));
        for (name, value) in usual.chain(own.map(|(name, value)| (name.as_str(), value))) {
            if let Some(token) = token_text(value) {
                self.token(name, token);
            }
        }
    }

    fn read_all_tokens(&mut self, map: &serde_json::Map<String, Value>) {
        for (name, value) in map {
            if let Some(token) = token_text(value) {
                self.token(name, token);
            }
        }
    }

    fn token(&mut self, name: &str, token: &str) {
        match self.special_tokens.iter_mut().find(|(n, _)| n == name) {
            Some(entry) => token.clone_into(&mut entry.1),
            None => self.special_tokens.push((name.to_owned(), token.to_owned())),
        }
    }
}

/// The text of a token: a string, or an object with one as its content.
fn token_text(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value.get("content")?.as_str())
}

//! A conversation on its way into a template: what `apply_chat_template` of transformers does around the rendering.

use std::collections::HashMap;
use std::sync::Arc;

use super::data::Data;
use super::jinja::{Clock, Dict, Fault, FaultKind, Value, is_space};
use super::limits::Limits;

/// What a template is given.
#[derive(Clone, Debug)]
pub struct ChatInput {
    /// The messages, each a map with a role and what else the template reads. Keys whose value is null are left out
    /// before the template sees them; reasoning is given under each name that templates know it by.
    pub messages: Vec<Data>,
    /// The tools that the model may call, each a map: a JSON schema.
    pub tools: Option<Vec<Data>>,
    /// Documents to answer from, each a map.
    pub documents: Option<Vec<Data>>,
    /// Should the text end with what begins an answer?
    pub add_generation_prompt: bool,
    /// The field of the last message that the model is to continue, `content` as a rule: the text ends in it.
    pub continue_final_message: Option<String>,
    /// More variables for the template, such as `enable_thinking`, and the special tokens, such as `bos_token`. Later
    /// ones replace earlier ones of the same name.
    pub variables: Vec<(String, Data)>,
    /// What `strftime_now` takes for the present.
    pub clock: Clock,
    /// What the rendering may use.
    pub limits: Limits,
}

impl ChatInput {
    /// Messages alone, at this time.
    pub fn new(messages: Vec<Data>, clock: Clock) -> Self {
        Self {
            messages,
            tools: None,
            documents: None,
            add_generation_prompt: false,
            continue_final_message: None,
            variables: Vec::new(),
            clock,
            limits: Limits::default(),
        }
    }
}

/// A conversation that is ready to render.
pub(super) struct Prepared {
    pub(super) variables: HashMap<Arc<str>, Value>,
    pub(super) tagged: Option<Tagged>,
}

type Res<T> = Result<T, Box<Fault>>;

fn refuse<T>(message: impl Into<String>) -> Res<T> {
    Err(Fault::new(FaultKind::Template, message))
}

/// The names of reasoning in messages.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];
/// What stands behind the message that is to be continued while the template runs.
const TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// Makes the variables of a template whose source is given.
pub(super) fn prepare(input: &ChatInput, source: &str) -> Res<Prepared> {
    if input.messages.is_empty() {
        return refuse("a chat template needs at least one message");
    }
    if input.continue_final_message.is_some() && input.add_generation_prompt {
        return refuse("continue_final_message and add_generation_prompt exclude each other");
    }
    let mut messages = input.messages.iter().map(message).collect::<Res<Vec<Entries>>>()?;
    let mut tagged = None;
    if let (Some(field), Some(last)) = (&input.continue_final_message, messages.last_mut()) {
        tagged = Some(tag(last, field, source)?);
    }
    let maps = |what: &str, items: &Option<Vec<Data>>| -> Res<Value> {
        let Some(items) = items else { return Ok(Value::None) };
        if !items.iter().all(|item| matches!(item, Data::Map(_))) {
            return refuse(format!("every one of the {what} must be a map"));
        }
        Value::list(items.iter().map(value).collect::<Res<_>>()?)
    };
    let mut variables = HashMap::new();
    for (name, data) in &input.variables {
        if matches!(name.as_str(), "messages" | "tools" | "documents" | "add_generation_prompt") {
            return refuse(format!("the variable {name} is reserved"));
        }
        variables.insert(name.as_str().into(), value(data)?);
    }
    let messages = messages.into_iter().map(|entries| map(&entries)).collect::<Res<_>>()?;
    variables.insert("messages".into(), Value::list(messages)?);
    variables.insert("tools".into(), maps("tools", &input.tools)?);
    variables.insert("documents".into(), maps("documents", &input.documents)?);
    variables.insert("add_generation_prompt".into(), Value::Bool(input.add_generation_prompt));
    Ok(Prepared { variables, tagged })
}

type Entries = Vec<(String, Data)>;

/// The entries of a message without nulls, with its reasoning under the names that templates read.
fn message(data: &Data) -> Res<Entries> {
    let Data::Map(entries) = data else {
        return refuse("every message must be a map");
    };
    let mut entries: Entries = entries.iter().filter(|(_, value)| *value != Data::Null).cloned().collect();
    let find = |name: &str| entries.iter().rev().find(|(key, _)| key == name).map(|(_, value)| value.clone());
    if let Some(reasoning) = REASONING.iter().find_map(|name| find(name)) {
        entries.insert(0, ("thinking".to_owned(), reasoning.clone()));
        entries.push(("reasoning_content".to_owned(), reasoning));
    }
    Ok(entries)
}

fn map(entries: &[(String, Data)]) -> Res<Value> {
    let mut dict = Dict::default();
    for (key, data) in entries {
        dict.insert_str(key, value(data)?)?;
    }
    Ok(Value::dict(dict))
}

fn value(data: &Data) -> Res<Value> {
    match data {
        Data::Null => Ok(Value::None),
        Data::Bool(b) => Ok(Value::Bool(*b)),
        Data::Int(i) => Ok(Value::Int(*i)),
        Data::Float(x) => Ok(Value::Float(*x)),
        Data::Text(text) => Ok(Value::str(text.as_str())),
        Data::List(items) => Value::list(items.iter().map(value).collect::<Res<_>>()?),
        Data::Map(entries) => map(entries),
    }
}

/// The message that is to be continued, and where it ends.
pub(super) struct Tagged {
    text: String,
}

/// Marks the end of the last message's `field`.
fn tag(last: &mut Entries, field: &str, source: &str) -> Res<Tagged> {
    let get = |name: &str| last.iter().rev().find(|(key, _)| key == name).map(|(_, value)| value.clone());
    let Some(wanted) = get(field) else {
        return refuse(format!("continue_final_message is set but the last message has no \"{field}\" to continue"));
    };
    // Reasoning is there under several names, and the template may read any of them.
    let fields: Vec<&str> = if REASONING.contains(&field) {
        REASONING.into_iter().filter(|name| get(name).as_ref() == Some(&wanted)).collect()
    } else {
        vec![field]
    };
    if !fields.iter().any(|field| source.contains(field)) {
        return refuse(format!("continue_final_message is set to \"{field}\", which the template does not read"));
    }
    let (text, marked) = match wanted {
        Data::Text(text) => (text.clone(), Data::Text(text + TAG)),
        Data::List(mut blocks) => {
            let mut found = None;
            for block in blocks.iter_mut().rev() {
                match block {
                    Data::Map(entries) => {
                        if let Some((_, part)) = entries.iter_mut().rev().find(|(key, _)| key == "text") {
                            let Data::Text(text) = part else {
                                return refuse("the text of the last message is not a string");
                            };
                            found = Some(text.clone());
                            text.push_str(TAG);
                            break;
                        }
                    }
                    // Python would look for "text" in whatever the block is.
                    _ => return refuse("continue_final_message needs blocks that are maps"),
                }
            }
            match found {
                Some(text) => (text, Data::List(blocks)),
                None => return refuse("continue_final_message is set but the last message has no text"),
            }
        }
        _ => return refuse("continue_final_message needs a last message of text"),
    };
    for (key, value) in last.iter_mut() {
        if fields.contains(&key.as_str()) {
            value.clone_from(&marked);
        }
    }
    Ok(Tagged { text })
}

impl Tagged {
    /// The rendered text up to the end of the message.
    pub(super) fn cut(&self, mut rendered: String) -> Res<String> {
        let message = self.text.trim_matches(is_space);
        let bare = TAG.trim_end();
        let found = rendered.rfind(bare).filter(|_| rendered.contains(message));
        let Some(at) = found else {
            return refuse(
                "continue_final_message is set but the last message is not in the rendered text: the template changes \
                 or omits the text to be continued",
            );
        };
        // A template that trims messages has trimmed the mark, too, and then what is before it is to be trimmed.
        let trimmed = !rendered[at..].starts_with(TAG);
        rendered.truncate(at);
        if trimmed {
            rendered.truncate(rendered.trim_end_matches(is_space).len());
        }
        Ok(rendered)
    }
}

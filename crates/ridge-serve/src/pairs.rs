//! The prompt by which a decoder ranks a document: a chat template renders a query and a document, which are messages with
//! these roles, behind an instruction, which is that of the system.

use ridge_text::template::{ChatInput, Clock, Data};
use ridge_text::{ChatTemplates, TextError};

/// The text of `document` as an answer to `query`, by the default template of `templates`.
///
/// # Errors
/// When there is no such template, or it fails.
pub fn render_pair(
    templates: &ChatTemplates,
    instruction: Option<&str>,
    query: &str,
    document: &str,
) -> Result<String, TextError> {
    let system = instruction.map(|text| ("system", text));
    render(templates, system.into_iter().chain([("query", query), ("document", document)]))
}

/// The text of messages of these roles and contents, ahead of an answer.
fn render<'a>(
    templates: &ChatTemplates,
    messages: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> Result<String, TextError> {
    let message = |(role, text): (&str, &str)| {
        Data::Map(vec![("role".to_owned(), role.into()), ("content".to_owned(), text.into())])
    };
    let messages = messages.into_iter().map(message).collect();
    let input = ChatInput { add_generation_prompt: true, ..ChatInput::new(messages, Clock::now_utc()) };
    Ok(templates.render(None, &input)?.text)
}

/// Texts that no template has of its own.
const TEXTS: [&str; 3] = ["QUERY-3141592653", "DOCUMENT-2718281828", "INSTRUCTION-1618033988"];

/// Has the default template of `templates` places for a query and for a document? Templates of chats, which show messages of any
/// role, have none.
pub fn renders_pairs(templates: &ChatTemplates) -> bool {
    let [query, document, _] = TEXTS;
    let shows = |text: &str, part: &str| text.contains(part);
    let pair = render_pair(templates, None, query, document);
    // A template may refuse other roles, or leave them out.
    let others = render(templates, [("role-1414213562", query), ("role-1732050807", document)]);
    pair.is_ok_and(|text| shows(&text, query) && shows(&text, document))
        && !others.is_ok_and(|text| shows(&text, query) || shows(&text, document))
}

/// Has the default template of `templates` a place for an instruction?
pub fn renders_instructions(templates: &ChatTemplates) -> bool {
    let [query, document, instruction] = TEXTS;
    render_pair(templates, Some(instruction), query, document).is_ok_and(|text| text.contains(instruction))
}

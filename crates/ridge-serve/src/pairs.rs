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
    let message =
        |role: &str, text: &str| Data::Map(vec![("role".to_owned(), role.into()), ("content".to_owned(), text.into())]);
    let system = instruction.map(|text| message("system", text));
    let messages = system.into_iter().chain([message("query", query), message("document", document)]).collect();
    let input = ChatInput { add_generation_prompt: true, ..ChatInput::new(messages, Clock::now_utc()) };
    Ok(templates.render(None, &input)?.text)
}

/// Has the default template of `templates` a place for a query and for a document?
pub fn renders_pairs(templates: &ChatTemplates) -> bool {
    const TEXTS: [&str; 2] = ["QUERY-3141592653", "DOCUMENT-2718281828"];
    let [query, document] = TEXTS;
    render_pair(templates, None, query, document).is_ok_and(|text| TEXTS.iter().all(|part| text.contains(part)))
}

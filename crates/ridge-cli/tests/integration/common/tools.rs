//! A server whose template knows tools, and what the tests of tools and of forms ask it.

use serde_json::{Value, json};

use super::server::Server;

/// A server whose chat template knows tools, in few tokens: the embedded model's context is short.
pub fn with_tools(marks: &str) -> (tempfile::TempDir, Server) {
    let template = "{{ bos_token }}{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}\
        {{ m.content }}{% for c in m.tool_calls or [] %}MARKS{{ c.function | tojson }}{% endfor %}{% endfor %}";
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("template.jinja");
    std::fs::write(&file, template.replace("MARKS", marks)).unwrap();
    let server = Server::start(&["--chat-template", file.to_str().unwrap()]);
    (folder, server)
}

pub fn ask(more: &Value) -> Value {
    let mut body = json!({
        "messages": [{ "role": "user", "content": "Once upon a time" }], "temperature": 1, "seed": 4, "max_tokens": 300,
    });
    for (key, value) in more.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

pub fn tools() -> Value {
    let parameters = json!({
        "type": "object", "properties": { "colour": { "enum": ["red", "blue"] }, "twice": { "type": "boolean" } },
        "required": ["colour", "twice"], "additionalProperties": false,
    });
    let tool = |name: &str| json!({ "type": "function", "function": { "name": name, "parameters": parameters } });
    json!([tool("paint"), tool("mix")])
}

pub fn content(answer: &Value) -> &str {
    answer["choices"][0]["message"]["content"].as_str().unwrap_or_else(|| panic!("{answer}"))
}

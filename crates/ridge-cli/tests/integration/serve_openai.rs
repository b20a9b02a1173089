//! `ridge serve` and the official `openai` client, where Python with it is found: `RIDGE_PYTHON`, or python3 on the path.

use std::process::Command;

use crate::common::repository;
use crate::common::server::Server;

/// Knows tools and the calls of Hermes, in few tokens: the embedded model's context is short.
const TEMPLATE: &str = "{{ bos_token }}{% if tools %}{% for t in tools %}{{ t.function.name }} {% endfor %}{% endif %}\
    {% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>\
    {% endfor %}{% endfor %}";

#[test]
fn the_official_client_is_content() {
    let python = std::env::var("RIDGE_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let found = Command::new(&python).args(["-c", "import openai"]).output();
    if !found.is_ok_and(|o| o.status.success()) {
        ridge_testing::skip!(
            "{python} has no package openai; pip install openai, or set RIDGE_PYTHON to a Python that has it"
        );
    }
    let folder = tempfile::tempdir().unwrap();
    let template = folder.path().join("template.jinja");
    std::fs::write(&template, TEMPLATE).unwrap();
    let server = Server::start_with(&["--chat-template", template.to_str().unwrap()], &[("RIDGE_API_KEY", "sk-test")]);
    let bert = repository().join("fixtures/families/bert").display().to_string();
    let encoder = Server::start(&["--model", &bert]);
    let script = repository().join("crates/ridge-cli/tests/integration/openai_client.py");
    let urls = [&server, &encoder].map(|s| format!("http://{}", s.address));
    let ran = Command::new(python).arg(script).args(urls).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(ran.status.success(), "{}{}", text(&ran.stdout), text(&ran.stderr));
    assert!(text(&ran.stdout).ends_with("all held\n"), "{}", text(&ran.stdout));
}

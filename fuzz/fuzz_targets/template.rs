//! Any text as a chat template over a conversation with all kinds of values: text or an error, within small limits.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ridge_text::template::{ChatInput, ChatTemplate, Clock, Data, Limits};

fuzz_target!(|source: &str| {
    let Ok(template) = ChatTemplate::new("template", source) else {
        return;
    };
    let Ok(Data::List(messages)) = Data::from_json(
        "messages",
        r#"[{"role": "system", "content": " é\n😀 "}, {"role": "user", "content": "a,b"},
            {"role": "assistant", "content": [{"type": "text", "text": "x"}], "tool_calls": [{"a": [1, -2.5, null]}]}]"#,
    ) else {
        return;
    };
    let mut input = ChatInput::new(messages, Clock::from_unix(1_720_278_249));
    input.limits = Limits { steps: 20_000, bytes: 1 << 20 };
    input.tools = Some(vec![Data::Map(vec![("name".into(), "f".into()), ("n".into(), Data::Int(i128::MAX))])]);
    input.variables = vec![("bos_token".into(), "<s>".into()), ("x".into(), Data::Float(-0.0))];
    if let Ok(chat) = template.render(&input) {
        for range in chat.generations.into_iter().flatten() {
            assert!(chat.text.get(range).is_some());
        }
    }
});

//! Any text as `tokenizer_config.json`: the special tokens of a tokenizer and the chat templates it may hold.
#![no_main]

use std::cell::OnceCell;

use libfuzzer_sys::fuzz_target;
use ridge_models::ModelFiles;
use ridge_text::Tokenizer;
use ridge_text::template::{ChatInput, ChatTemplates, Clock, Data, Limits};

thread_local! {
    static TOKENIZER: OnceCell<Tokenizer> = const { OnceCell::new() };
}

fuzz_target!(|text: &str| {
    let tokenizer = TOKENIZER.with(|cell| {
        cell.get_or_init(|| ModelFiles::open(None).and_then(|files| files.tokenizer()).expect("embedded")).clone()
    });
    if let Ok(tokenizer) = tokenizer.with_config("tokenizer_config.json", text) {
        let ids = tokenizer.encode("Once upon", true).expect("the vocabulary spells it");
        assert!(ids.iter().all(|id| tokenizer.id_to_token(*id).is_some()));
    }
    let Ok(templates) = ChatTemplates::from_json(Some(("tokenizer_config.json", text)), None, None) else {
        return;
    };
    let Ok(Data::List(messages)) = Data::from_json("messages", r#"[{"role": "user", "content": "a"}]"#) else {
        return;
    };
    let mut input = ChatInput::new(messages, Clock::from_unix(1_720_278_249));
    input.limits = Limits { steps: 20_000, bytes: 1 << 20 };
    for name in templates.names() {
        let _ = templates.render(Some(name), &input);
    }
});

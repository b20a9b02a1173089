//! Tokenizers in GGUF files beside the Python library (`fixtures/gguf_tokenizers.py`).

use ridge_files::Gguf;
use ridge_files::gguf::GgufWriter;
use ridge_text::Tokenizer;
use ridge_text::gguf::{end_tokens, tokenizer_json};
use ridge_text::template::{ChatInput, ChatTemplate, Clock, Data};
use serde_json::Value as Json;

use crate::common::fixtures;

#[test]
fn tokenizers_of_every_kind_give_the_ids_of_the_python_library() {
    let folder = fixtures().join("tokenizers/gguf");
    let cases: Json =
        serde_json::from_str(&std::fs::read_to_string(folder.join("cases.json")).expect("is there")).expect("JSON");
    for (kind, cases) in cases.as_object().expect("kinds") {
        let gguf = Gguf::open(folder.join(format!("{kind}.gguf"))).expect("opens");
        let (tokenizer, config) = tokenizer_json(&gguf).expect("a tokenizer");
        let tokenizer = Tokenizer::from_bytes(kind, tokenizer.as_bytes()).expect("reads");
        let tokenizer = tokenizer.with_config(kind, &config).expect("reads");
        let cases = cases.as_array().expect("cases");
        assert!(cases.len() > 3, "{kind}");
        for case in cases {
            let text = case["text"].as_str().expect("a text");
            for (special, ids) in [(true, &case["ids"]), (false, &case["bare"])] {
                let is = tokenizer.encode(text, special).expect("encodes");
                assert_eq!(serde_json::json!(is), *ids, "{kind}: {text:?}");
            }
        }
        let config: Json = serde_json::from_str(&config).expect("JSON");
        assert!(config["chat_template"].as_str().is_some_and(|t| t.ends_with(&format!("({kind})"))), "{kind}");
    }
}

#[test]
fn tokenizers_of_sentencepiece_give_its_ids() {
    let folder = fixtures().join("tokenizers/gguf");
    let text = std::fs::read_to_string(folder.join("sentencepiece.json")).expect("is there");
    let kinds: Json = serde_json::from_str(&text).expect("JSON");
    let mut wrong = Vec::new();
    for (kind, cases) in kinds.as_object().expect("kinds") {
        let gguf = Gguf::open(folder.join(format!("{kind}.gguf"))).expect("opens");
        let (tokenizer, config) = tokenizer_json(&gguf).expect("a tokenizer");
        let tokenizer = Tokenizer::from_bytes(kind, tokenizer.as_bytes()).expect("reads");
        let tokenizer = tokenizer.with_config(kind, &config).expect("reads");
        for case in cases.as_array().expect("cases") {
            let is = tokenizer.encode(case["text"].as_str().expect("a text"), false).expect("encodes");
            if serde_json::json!(is) != case["ids"] {
                wrong.push(format!("{kind}: {}: {is:?} and not {}", case["text"], case["ids"]));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_vocabulary_of_bytes_gives_the_longest_tokens_and_its_text_back() {
    let folder = fixtures().join("tokenizers/gguf");
    let text = std::fs::read_to_string(folder.join("world.json")).expect("is there");
    let expected: Json = serde_json::from_str(&text).expect("JSON");
    let gguf = Gguf::open(folder.join("longest_match.gguf")).expect("opens");
    let (json, config) = tokenizer_json(&gguf).expect("a tokenizer");
    let tokenizer = Tokenizer::from_bytes("world", json.as_bytes()).expect("reads");
    let tokenizer = tokenizer.with_config("world", &config).expect("reads");
    // What it writes is read again.
    let again = Tokenizer::from_bytes("again", tokenizer.to_json().expect("writes").as_bytes()).expect("reads");
    for case in expected["cases"].as_array().expect("cases") {
        let text = case["text"].as_str().expect("a text");
        for tokenizer in [&tokenizer, &again] {
            let ids = tokenizer.encode(text, true).expect("encodes");
            assert_eq!(serde_json::json!(ids), case["ids"], "{text:?}");
            assert_eq!(tokenizer.decode(&ids, true).expect("decodes"), text);
        }
        let placed = tokenizer.encode_with_offsets(text, false).expect("encodes");
        let ends: Vec<usize> = placed.iter().map(|(_, range)| range.end).collect();
        assert!(ends.is_sorted() && ends.last().copied().unwrap_or(0) == text.len(), "{text:?}: {ends:?}");
    }
    // A marker is one token, and stands for no text.
    assert_eq!(tokenizer.encode("<s>", false).expect("encodes"), [0]);
    assert!(tokenizer.is_special(0) && !tokenizer.is_special(1));
    assert_eq!(end_tokens(&gguf).expect("reads"), [0, expected["eot"].as_u64().expect("an id")]);
}

#[test]
fn an_older_name_of_a_template_is_that_template() {
    let gguf = Gguf::open(fixtures().join("tokenizers/gguf/longest_match.gguf")).expect("opens");
    let (_, config) = tokenizer_json(&gguf).expect("a tokenizer");
    let config: Json = serde_json::from_str(&config).expect("JSON");
    let source = config["chat_template"].as_str().expect("a template");
    let message = |(role, content): (&str, &str)| {
        Data::Map(vec![("role".to_owned(), role.into()), ("content".to_owned(), content.into())])
    };
    let messages = [("system", "Be brief."), ("user", " Hi\n"), ("assistant", "Hello."), ("user", "Bye")].map(message);
    let mut input = ChatInput::new(messages.into(), Clock::from_unix(0));
    input.add_generation_prompt = true;
    let chat = ChatTemplate::new("world", source).and_then(|template| template.render(&input)).expect("renders");
    assert_eq!(chat.text, "System: Be brief.\n\nUser: Hi\n\nAssistant: Hello.\n\nUser: Bye\n\nAssistant:");
}

#[test]
fn turns_of_gemma_4_end_an_answer_where_they_are_markers() {
    let folder = tempfile::tempdir().expect("can be made");
    let path = folder.path().join("x.gguf");
    // Markers, and the same spellings as ordinary tokens.
    for (kinds, ends) in [([3, 3, 3, 4, 1], vec![1, 2, 3]), ([3, 3, 1, 1, 1], vec![1])] {
        let mut writer = GgufWriter::default();
        writer.text("general.architecture", "gemma4");
        writer.text("tokenizer.ggml.model", "gemma4");
        writer.texts("tokenizer.ggml.tokens", ["<bos>", "<eos>", "<turn|>", "<|tool_response>", "a"].into_iter());
        writer.i32s("tokenizer.ggml.token_type", &kinds);
        writer.u32("tokenizer.ggml.eos_token_id", 1);
        let mut out = std::fs::File::create(&path).expect("can be made");
        writer.write::<std::io::Error>(&mut out, |_| Ok(Vec::new())).expect("writes");
        assert_eq!(end_tokens(&Gguf::open(&path).expect("opens")).expect("reads"), ends);
    }
}

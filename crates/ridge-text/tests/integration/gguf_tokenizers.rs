//! Tokenizers in GGUF files beside the Python library (`fixtures/gguf_tokenizers.py`).

use ridge_files::Gguf;
use ridge_text::Tokenizer;
use ridge_text::gguf::tokenizer_json;
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

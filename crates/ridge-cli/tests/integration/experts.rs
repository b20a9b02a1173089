//! Models with experts: generated from, served and inspected as the others are.

use serde_json::json;

use crate::common::server::Server;
use crate::common::{Folder, json, repository, stdout};

/// A small model with experts and a tokenizer of words.
fn with_words(family: &str) -> Folder {
    let folder = Folder::copy_of(repository().join("fixtures/families").join(family));
    let kind = std::fs::read_to_string(repository().join("fixtures/tokenizers/kinds/word_level.json")).unwrap();
    let mut kind: serde_json::Value = serde_json::from_str(&kind).unwrap();
    // Servers know the bytes of each token, for grammars.
    kind["tokenizer"]["decoder"] =
        json!({"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]});
    folder.write("tokenizer.json", kind["tokenizer"].to_string());
    folder
}

#[test]
fn models_with_experts_generate_serve_and_are_inspected() {
    for (family, experts) in [("mixtral", "4"), ("qwen3_moe", "5")] {
        let folder = with_words(family);
        let args = ["--model", folder.path(), "--greedy", "-n", "12", "the cat sat on the mat"];
        let generate = |more: &[&str]| stdout(&[&["generate"], more, &args].concat());
        let text = generate(&[]);
        assert!(text.trim_end() != "", "{family}: {text}");
        // A step of several chunks of the prompt has the same text.
        assert_eq!(generate(&["--chunk", "3"]), text, "{family}");
        // Experts in blocks of 32: a text, if another one.
        assert!(generate(&["--format", "q8_0"]).trim_end() != "", "{family}");

        let server = Server::start(&["--model", folder.path()]);
        let body = json!({"prompt": "the cat sat on the mat", "max_tokens": 12, "temperature": 0});
        let answers: Vec<_> = std::thread::scope(|scope| {
            let ask = || scope.spawn(|| server.post("/v1/completions", &body).json());
            let running: Vec<_> = (0..4).map(|_| ask()).collect();
            running.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        for answer in answers {
            assert_eq!(answer["choices"][0]["text"], text.trim_end_matches('\n'), "{family}: {answer}");
        }

        let shown = stdout(&["inspect", folder.path()]);
        assert!(shown.contains("experts") && shown.contains(&format!("[{experts}, ")), "{family}: {shown}");
        let said = json(&["inspect", folder.path(), "--json"]);
        assert!(said["summary"]["token"]["bytes_read"].as_u64().is_some_and(|bytes| bytes > 0), "{family}: {said}");
    }
}

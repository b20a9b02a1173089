//! `ridge serve` with encoders that say how well texts go together: `/v1/rerank` and `/v1/score`.

use serde_json::{Value, json};

use crate::common::server::Server;
use crate::common::{repository, ridge};

/// A tensor of a fixture, of elements of `N` bytes.
pub(crate) fn tensor<const N: usize>(bytes: &[u8], name: &str) -> Vec<[u8; N]> {
    let header = u64::from_le_bytes(bytes[..8].try_into().expect("a length")) as usize;
    let json: Value = serde_json::from_slice(&bytes[8..8 + header]).expect("JSON");
    let at = |i: usize| 8 + header + json[name]["data_offsets"][i].as_u64().expect("an offset") as usize;
    bytes[at(0)..at(1)].as_chunks().0.to_vec()
}

/// The tokens of the words that rerankers answer.
const YES: usize = 40;
const NO: usize = 41;

/// The word of a token: `w` and its number, or an answer.
pub(crate) fn word(id: usize) -> String {
    match id {
        YES => "yes".to_owned(),
        NO => "no".to_owned(),
        id => format!("w{id}"),
    }
}

/// A copy of the model `name` of the fixtures with a tokenizer of such words. It adds no special tokens, and the second of two
/// texts is of segment 1.
pub(crate) fn with_words(name: &str) -> tempfile::TempDir {
    let (from, folder) = (repository().join("fixtures/families").join(name), tempfile::tempdir().expect("a folder"));
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(from.join(file), folder.path().join(file)).expect("copies");
    }
    let config: Value =
        serde_json::from_slice(&std::fs::read(from.join("config.json")).expect("a file")).expect("JSON");
    let size = config["vocab_size"].as_u64().expect("a size") as usize;
    let vocab: serde_json::Map<String, Value> = (0..size).map(|id| (word(id), id.into())).collect();
    let sequence = |id: &str, segment: u32| json!({ "Sequence": { "id": id, "type_id": segment } });
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": { "type": "Whitespace" },
        "post_processor": {
            "type": "TemplateProcessing", "special_tokens": {},
            "single": [sequence("A", 0)], "pair": [sequence("A", 0), sequence("B", 1)],
        },
        "decoder": null,
        "model": { "type": "WordLevel", "vocab": vocab, "unk_token": "w0" },
    });
    std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).expect("writes");
    folder
}

/// The text of these tokens.
fn text(ids: &[i64]) -> String {
    ids.iter().map(|id| word(*id as usize)).collect::<Vec<_>>().join(" ")
}

/// The pairs of texts of the fixture's batch, and the scores that transformers gives them.
fn pairs() -> (Vec<[String; 2]>, Vec<f64>) {
    let path = repository().join("fixtures/families/bert_reranker/expected.safetensors");
    let bytes = std::fs::read(path).expect("a fixture");
    let ids: Vec<i64> = tensor(&bytes, "batch_ids").into_iter().map(i64::from_le_bytes).collect();
    let words = |ids: &[i64]| text(ids);
    // 13 and 7 tokens, of which the second half is of segment 1.
    let pairs = [(0, 6, 13), (13, 16, 20)].map(|(a, b, c)| [words(&ids[a..b]), words(&ids[b..c])]);
    let logits = tensor(&bytes, "batch_class_logits_f64").into_iter().map(f64::from_le_bytes);
    (pairs.to_vec(), logits.map(|logit| 1.0 / (1.0 + (-logit).exp())).collect())
}

fn start(folder: &tempfile::TempDir) -> Server {
    Server::start(&["--model", &folder.path().display().to_string(), "--served-model-name", "ranker"])
}

#[test]
fn a_cross_encoder_scores_pairs_as_transformers_does() {
    let folder = with_words("bert_reranker");
    let server = start(&folder);
    let (pairs, wanted) = pairs();
    let side = |i: usize| pairs.iter().map(|pair| pair[i].clone()).collect::<Vec<_>>();
    let answer = server.post("/v1/score", &json!({ "text_1": side(0), "text_2": side(1) })).json();
    for (i, wanted) in wanted.iter().enumerate() {
        let score = answer["data"][i]["score"].as_f64().expect("a score");
        assert!((score - wanted).abs() < 1e-5, "{score} is not {wanted}");
        assert_eq!(answer["data"][i]["index"], i);
    }
    assert_eq!((&answer["object"], &answer["usage"]["prompt_tokens"]), (&json!("list"), &json!(20)));
    // One text against several.
    let one = server.post("/score", &json!({ "text_1": pairs[0][0], "text_2": side(1) })).json();
    assert_eq!(one["data"][0]["score"], answer["data"][0]["score"]);
    server.post("/v1/score", &json!({ "text_1": side(0), "text_2": pairs[0][1] })).refused(400);
    server.post("/v1/embeddings", &json!({ "input": "w3" })).refused(404);
}

#[test]
fn documents_come_best_first() {
    let folder = with_words("bert_reranker");
    let server = start(&folder);
    let (pairs, wanted) = pairs();
    let documents = json!([pairs[0][1], { "text": "w9 w9" }, "w39", "w31 w8 w4"]);
    let ask = |more: Value| {
        let mut body = json!({ "model": "ranker", "query": pairs[0][0], "documents": documents });
        for (key, value) in more.as_object().expect("an object") {
            body[key] = value.clone();
        }
        server.post("/v1/rerank", &body)
    };
    let answer = ask(json!({})).json();
    let results = answer["results"].as_array().expect("results");
    let scores: Vec<f64> = results.iter().map(|r| r["relevance_score"].as_f64().expect("a score")).collect();
    assert!(results.len() == 4 && scores.is_sorted_by(|a, b| a >= b), "{answer}");
    let first = results.iter().find(|result| result["index"] == 0).expect("is ranked");
    assert_eq!(first["document"]["text"], documents[0]);
    assert!((first["relevance_score"].as_f64().expect("a score") - wanted[0]).abs() < 1e-5, "{answer}");
    let two = ask(json!({ "top_n": 2, "return_documents": false })).json();
    assert_eq!(two["results"].as_array().expect("results").len(), 2);
    assert_eq!(two["results"][0], json!({ "index": results[0]["index"], "relevance_score": scores[0] }));
    // A document that is too long is cut.
    let long = vec!["w5"; 200].join(" ");
    let cut = ask(json!({ "documents": [long] })).json();
    assert_eq!(cut["usage"]["total_tokens"], 40);
    for (more, param) in [
        (json!({ "documents": [] }), "documents"),
        (json!({ "documents": ["w3", 4] }), "documents[1]"),
        (json!({ "query": 3 }), "query"),
        (json!({ "top_n": 0 }), "top_n"),
        (json!({ "model": "other" }), "model"),
        (json!({ "more": 1 }), "more"),
    ] {
        let answer = ask(more.clone());
        let status = if param == "model" { 404 } else { 400 };
        assert_eq!(answer.refused(status), param, "{more}");
    }
}

#[test]
fn an_encoder_of_embeddings_compares_vectors() {
    let folder = with_words("bert_reranker");
    // Without the class of a classifier it is an encoder.
    let path = folder.path().join("config.json");
    let mut config: Value = serde_json::from_str(&std::fs::read_to_string(&path).expect("a file")).expect("JSON");
    config["architectures"] = json!(["BertModel"]);
    std::fs::write(&path, config.to_string()).expect("writes");
    let server = start(&folder);
    let answer = server.post("/v1/rerank", &json!({ "query": "w5 w6", "documents": ["w9", "w5 w6"] })).json();
    assert_eq!(answer["results"][0]["index"], 1, "{answer}");
    let score = answer["results"][0]["relevance_score"].as_f64().expect("a score");
    assert!((score - 1.0).abs() < 1e-6, "{answer}");
    let vectors = server.post("/v1/embeddings", &json!({ "input": ["w5 w6", "w9"] })).json();
    let vector = |i: usize| -> Vec<f64> {
        vectors["data"][i]["embedding"].as_array().expect("a vector").iter().filter_map(Value::as_f64).collect()
    };
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let (a, b) = (vector(0), vector(1));
    let cosine = dot(&a, &b) / (dot(&a, &a) * dot(&b, &b)).sqrt();
    let other = answer["results"][1]["relevance_score"].as_f64().expect("a score");
    assert!((other - cosine).abs() < 1e-6, "{other} is not {cosine}");
}

/// A template that joins the contents of messages with these roles.
fn joining(roles: &[&str]) -> String {
    format!("{{% for m in messages if m.role in {roles:?} %}}{{{{ m.content }}}} {{% endfor %}}")
}

/// A decoder of the fixtures whose template joins query and document, and the pairs of texts of its batch with their tokens.
fn decoder(name: &str) -> (tempfile::TempDir, Vec<[String; 2]>) {
    let folder = with_words(name);
    let template = joining(&["system", "query", "document"]);
    std::fs::write(folder.path().join("chat_template.jinja"), template).expect("writes");
    let path = repository().join("fixtures/families").join(name).join("expected.safetensors");
    let bytes = std::fs::read(path).expect("a fixture");
    let [ids, lengths] = ["batch_ids", "batch_lens"]
        .map(|name| -> Vec<i64> { tensor(&bytes, name).into_iter().map(i64::from_le_bytes).collect() });
    let mut rest = &ids[..];
    let pairs = lengths.iter().map(|n| {
        let (pair, others) = rest.split_at(*n as usize);
        rest = others;
        [text(&pair[..3]), text(&pair[3..])]
    });
    (folder, pairs.collect())
}

/// Posts the pairs to `/v1/score` of a server with these arguments, and holds the scores to those wanted.
fn scores_are(folder: &tempfile::TempDir, flags: &[&str], pairs: &[[String; 2]], wanted: &[f64]) -> Server {
    let path = folder.path().display().to_string();
    let server = Server::start(&[&["--model", &path], flags].concat());
    let side = |i: usize| pairs.iter().map(|pair| pair[i].clone()).collect::<Vec<_>>();
    let answer = server.post("/v1/score", &json!({ "text_1": side(0), "text_2": side(1) })).json();
    for (i, wanted) in wanted.iter().enumerate() {
        let score = answer["data"][i]["score"].as_f64().expect("a score");
        assert!((score - wanted).abs() < 1e-5, "{score} is not {wanted}");
    }
    server
}

#[test]
fn a_decoder_with_a_classifier_scores_pairs_as_transformers_does() {
    let (folder, pairs) = decoder("qwen3_reranker");
    let bytes =
        std::fs::read(repository().join("fixtures/families/qwen3_reranker/expected.safetensors")).expect("a fixture");
    let logits = tensor(&bytes, "batch_class_logits_f64").into_iter().map(f64::from_le_bytes);
    let wanted: Vec<f64> = logits.map(|logit| 1.0 / (1.0 + (-logit).exp())).collect();
    let server = scores_are(&folder, &[], &pairs, &wanted);
    // An instruction is a message of the system, ahead of the query.
    let ask = |more: Value| {
        let mut body = json!({ "query": pairs[0][0], "documents": [pairs[0][1]] });
        more.as_object().expect("an object").iter().for_each(|(key, value)| body[key] = value.clone());
        server.post("/v1/rerank", &body).json()["results"][0]["relevance_score"].as_f64().expect("a score")
    };
    assert!((ask(json!({})) - wanted[0]).abs() < 1e-5);
    assert!((ask(json!({ "instruction": "w9 w5" })) - wanted[0]).abs() > 1e-4);
    // Documents are cut to what the prompt leaves of them.
    assert!((ask(json!({ "truncate_prompt_tokens": 5 })) - wanted[0]).abs() > 1e-4);
    server.post("/v1/embeddings", &json!({ "input": "w3" })).refused(404);
    // What leaves no room for a document is named.
    let refused = |query: &str, instruction: &str, document: &str| {
        let body = json!({ "query": query, "documents": [document], "instruction": instruction });
        server.post("/v1/rerank", &body).refused(400)
    };
    let (long, longest) = (vec!["w5"; 200].join(" "), "w5 ".repeat(1 << 16));
    assert_eq!(refused("w3", &long, "w4"), "instruction");
    assert_eq!(refused(&long, "w3", "w4"), "query");
    assert_eq!(refused("w3", &longest, "w4"), "instruction");
    assert_eq!(refused("w3", "w4", &longest), "documents[0]");
}

/// The score of the pair that a server with these arguments gives, and the server.
fn score_of(folder: &tempfile::TempDir, flags: &[&str], [query, document]: &[String; 2]) -> (f64, Server) {
    let path = folder.path().display().to_string();
    let server = Server::start(&[&["--model", &path], flags].concat());
    let answer = server.post("/v1/score", &json!({ "text_1": query, "text_2": document })).json();
    (answer["data"][0]["score"].as_f64().expect("a score"), server)
}

#[test]
fn a_template_of_chats_is_not_that_of_pairs() {
    const CHATML: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}";
    let (folder, pairs) = decoder("qwen3_reranker");
    let put = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).expect("writes");
        path.display().to_string()
    };
    put("chat_template.jinja", CHATML);
    let (score, _) = score_of(&folder, &[], &pairs[0]);
    let qwen3 = repository().join("crates/ridge-cli/src/commands/serve/qwen3_reranker.jinja").display().to_string();
    let (wanted, _) = score_of(&folder, &["--chat-template", &qwen3], &pairs[0]);
    assert_eq!(score, wanted);
    let labels = put("labels.jinja", "{% for m in messages %}{{ m.role | upper }}: {{ m.content }} {% endfor %}");
    let model = folder.path().display().to_string();
    let ran = ridge(&["serve", "--model", &model, "--port", "0", "--chat-template", &labels]);
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    assert!(ran.stderr.contains("--chat-template") && ran.stderr.contains("role"), "{}", ran.stderr);
}

#[test]
fn a_template_without_a_place_for_instructions_takes_none() {
    let (folder, pairs) = decoder("qwen3_reranker");
    let template = folder.path().join("chat_template.jinja");
    std::fs::write(&template, joining(&["query", "document"])).expect("writes");
    let (_, server) = score_of(&folder, &[], &pairs[0]);
    let body = json!({ "query": "w3", "documents": ["w4"], "instruction": "w5" });
    assert_eq!(server.post("/v1/rerank", &body).refused(400), "instruction");
    // Nor can it show the prompt that the model's files ask for.
    let put = |name: &str, text: Value| std::fs::write(folder.path().join(name), text.to_string()).expect("writes");
    put("modules.json", json!([{ "path": "", "type": "x.Transformer" }]));
    let prompts = json!({ "prompts": { "search": "w9 w5" }, "default_prompt_name": "search" });
    put("config_sentence_transformers.json", prompts);
    let model = folder.path().display().to_string();
    let ran = ridge(&["serve", "--model", &model, "--port", "0"]);
    assert!(ran.code == 2 && ran.stderr.contains("default_prompt_name"), "{}", ran.stderr);
    // Where it can, that is the instruction of requests without one.
    std::fs::write(&template, joining(&["system", "query", "document"])).expect("writes");
    let (score, server) = score_of(&folder, &[], &pairs[0]);
    let [query, document] = &pairs[0];
    let body = json!({ "text_1": query, "text_2": document, "instruction": "w9 w5" });
    assert_eq!(server.post("/v1/score", &body).json()["data"][0]["score"], score);
    let other = json!({ "text_1": query, "text_2": document, "instruction": "w7" });
    assert_ne!(server.post("/v1/score", &other).json()["data"][0]["score"], score);
}

#[test]
fn a_classifier_needs_no_rerank_flag() {
    let folder = with_words("bert_reranker");
    let (pairs, wanted) = pairs();
    scores_are(&folder, &["--rerank"], &pairs, &wanted);
}

#[test]
fn a_decoder_ranks_by_the_words_of_its_answers() {
    let (folder, pairs) = decoder("starcoder2");
    let bytes =
        std::fs::read(repository().join("fixtures/families/starcoder2/expected.safetensors")).expect("a fixture");
    let logits: Vec<f64> = tensor(&bytes, "batch_logits_f64").into_iter().map(f64::from_le_bytes).collect();
    let vocab = logits.len() / 33;
    let wanted = [23, 32].map(|row| {
        let logit = |word: usize| logits[row * vocab + word];
        1.0 / (1.0 + (logit(NO) - logit(YES)).exp())
    });
    scores_are(&folder, &["--rerank"], &pairs, &wanted);
    // The same by a module that names the tokens.
    std::fs::create_dir(folder.path().join("1_LogitScore")).expect("makes the folder");
    let put = |name: &str, text: Value| std::fs::write(folder.path().join(name), text.to_string()).expect("writes");
    let modules = json!([{ "path": "", "type": "x.Transformer" }, { "path": "1_LogitScore", "type": "x.LogitScore" }]);
    put("modules.json", modules);
    put("1_LogitScore/config.json", json!({ "true_token_id": YES, "false_token_id": NO }));
    scores_are(&folder, &[], &pairs, &wanted);
}

#[test]
fn instructions_need_a_template() {
    let folder = with_words("bert_reranker");
    let server = start(&folder);
    let answer = server.post("/v1/rerank", &json!({ "query": "w3", "documents": ["w4"], "instruction": "w5" }));
    assert_eq!(answer.refused(400), "instruction");
}

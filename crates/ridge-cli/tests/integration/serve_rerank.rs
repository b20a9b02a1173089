//! `ridge serve` with encoders that say how well texts go together: `/v1/rerank` and `/v1/score`.

use serde_json::{Value, json};

use crate::common::repository;
use crate::common::server::Server;

/// A tensor of a fixture, of elements of `N` bytes.
fn tensor<const N: usize>(bytes: &[u8], name: &str) -> Vec<[u8; N]> {
    let header = u64::from_le_bytes(bytes[..8].try_into().expect("a length")) as usize;
    let json: Value = serde_json::from_slice(&bytes[8..8 + header]).expect("JSON");
    let at = |i: usize| 8 + header + json[name]["data_offsets"][i].as_u64().expect("an offset") as usize;
    bytes[at(0)..at(1)].as_chunks().0.to_vec()
}

/// A copy of the encoder `name` of the fixtures with a tokenizer whose words are `w` and a token's number. It adds no
/// special tokens, and the second of two texts is of segment 1.
fn with_words(name: &str) -> tempfile::TempDir {
    let (from, folder) = (repository().join("fixtures/families").join(name), tempfile::tempdir().expect("a folder"));
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(from.join(file), folder.path().join(file)).expect("copies");
    }
    let vocab: serde_json::Map<String, Value> = (0..48).map(|id| (format!("w{id}"), id.into())).collect();
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

/// The pairs of texts of the fixture's batch, and the scores that transformers gives them.
fn pairs() -> (Vec<[String; 2]>, Vec<f64>) {
    let path = repository().join("fixtures/families/bert_reranker/expected.safetensors");
    let bytes = std::fs::read(path).expect("a fixture");
    let ids: Vec<i64> = tensor(&bytes, "batch_ids").into_iter().map(i64::from_le_bytes).collect();
    let words = |ids: &[i64]| ids.iter().map(|id| format!("w{id}")).collect::<Vec<_>>().join(" ");
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
    let documents = json!([pairs[0][1], { "text": "w9 w9" }, "w40", "w31 w8 w4"]);
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

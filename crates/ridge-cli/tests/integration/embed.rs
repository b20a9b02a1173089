//! `ridge embed`, as a user types it.

use crate::common::server::Server;
use crate::common::{repository, ridge};

fn json(args: &[&str]) -> serde_json::Value {
    let ran = ridge(&[&["embed", "--json"], args].concat());
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    serde_json::from_str(&ran.stdout).expect("one JSON object")
}

fn vector(of: &serde_json::Value, i: usize) -> Vec<f64> {
    let numbers = of["embeddings"][i]["embedding"].as_array().expect("a list");
    numbers.iter().map(|x| x.as_f64().expect("a number")).collect()
}

#[test]
fn a_decoder_gives_a_line_of_numbers_for_each_text() {
    let ran = ridge(&["embed", "Once upon a time", "Lily"]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let lines: Vec<Vec<f64>> =
        ran.stdout.lines().map(|line| line.split(' ').map(|x| x.parse().expect("a number")).collect()).collect();
    assert_eq!(lines.iter().map(Vec::len).collect::<Vec<_>>(), [64, 64]);
    assert!(ran.stderr.contains("--pooling"), "{}", ran.stderr);
    // The same in JSON, and in a batch or not.
    let alone = json(&["Once upon a time"]);
    assert_eq!((alone["dimensions"].as_u64(), alone["pooling"].as_str()), (Some(64), Some("mean")));
    let printed = vector(&alone, 0);
    assert!(lines[0].iter().zip(&printed).all(|(a, b)| (a - b).abs() < 1e-6));
    let small = json(&["--batch-tokens", "1", "Once upon a time", "Lily"]);
    assert_eq!(small["embeddings"], json(&["Once upon a time", "Lily"])["embeddings"]);
}

#[test]
fn normalized_vectors_have_length_one_and_are_alike_to_themselves() {
    let made = json(&["--normalize", "--similarity", "--pooling", "last", "a dog", "a dog", "the sun"]);
    assert_eq!((made["normalized"].as_bool(), made["pooling"].as_str()), (Some(true), Some("last")));
    for i in 0..3 {
        let length: f64 = vector(&made, i).iter().map(|x| x * x).sum();
        assert!((length - 1.0).abs() < 1e-5, "{length}");
    }
    let cosine = |i: usize, j: usize| made["similarity"][i][j].as_f64().expect("a number");
    assert!((cosine(0, 1) - 1.0).abs() < 1e-9 && cosine(0, 2) < 0.999 && cosine(0, 2) == cosine(2, 0));
    assert_eq!(json(&["--normalize", "--no-normalize", "a"])["normalized"], false);
}

#[test]
fn what_cannot_be_is_refused_with_a_way_out() {
    let long = "Once upon a time there was a little girl. ".repeat(100);
    let refused = ridge(&["embed", &long]);
    let said = refused.stderr;
    assert_eq!(refused.code, 2, "{said}");
    assert!(said.contains("the model's maximum is 512") && said.contains("--truncate"), "{said}");
    let cut = json(&["--truncate", &long]);
    assert_eq!(cut["embeddings"][0]["tokens"], 512);
    assert_eq!(ridge(&["embed"]).code, 2);
}

/// A model of the fixtures with its modules of sentence-transformers.
fn with_modules(name: &str) -> tempfile::TempDir {
    let folder = crate::serve_rerank::with_words(name);
    crate::common::copy_folder(&repository().join("fixtures/sentences").join(name), folder.path());
    folder
}

/// A model of the fixtures with its modules of sentence-transformers, whose vectors are those of the library.
#[test]
fn vectors_go_through_the_modules_of_the_model() {
    let (name, width) = ("gemma3_encoder", 16);
    let (folder, fixtures) = (with_modules(name), repository().join("fixtures"));
    let read = |path: String| std::fs::read(fixtures.join(path)).expect("a fixture");
    let texts = read(format!("families/{name}/expected.safetensors"));
    let texts = crate::serve_rerank::tensor(&texts, "batch_ids").into_iter().map(i64::from_le_bytes);
    let text: Vec<String> = texts.map(|id| crate::serve_rerank::word(id as usize)).collect();
    let wanted = read(format!("sentences/{name}/expected.safetensors"));
    let wanted = crate::serve_rerank::tensor(&wanted, "sentence_f64").into_iter().map(f64::from_le_bytes);
    let wanted: Vec<f64> = wanted.collect();
    let model = folder.path().display().to_string();
    let made = json(&["--model", &model, &text[..13].join(" "), &text[13..].join(" ")]);
    assert_eq!(made["dimensions"], width, "{name}");
    for (i, row) in wanted[width..].chunks(width).enumerate() {
        let off = vector(&made, i).iter().zip(row).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(off < 1e-5, "{name} {i}: off by {off:e}");
    }
    // Another pooling than that of the files has the same modules behind it.
    let max = json(&["--model", &model, "--pooling", "max", "w5"]);
    assert_eq!((&max["dimensions"], &max["normalized"]), (&width.into(), &true.into()));
    let [mean, last] = ["mean", "last"].map(|pooling| json(&["--model", &model, "--pooling", pooling, "w5 w6"]));
    assert_eq!(vector(&mean, 0), vector(&json(&["--model", &model, "w5 w6"]), 0));
    assert_ne!(vector(&mean, 0), vector(&last, 0));
    // They are left out where they cannot be read.
    std::fs::write(folder.path().join("1_Pooling/config.json"), r#"{"pooling_mode": "weightedmean"}"#).expect("writes");
    let ran = ridge(&["embed", "--model", &model, "--pooling", "max", "w5"]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(ran.stderr.contains("replaces all modules") && ran.stderr.contains("pooling_mode"), "{}", ran.stderr);
    assert_ne!(ran.stdout.split(' ').count(), width);
}

#[test]
fn texts_stand_behind_the_default_prompt() {
    let folder = with_modules("gemma3_encoder");
    let model = folder.path().display().to_string();
    let plain = json(&["--model", &model, "w5 w6 w7", "w7"]);
    let prompts = r#"{"prompts": {"query": "w5 w6 "}, "default_prompt_name": "query"}"#;
    std::fs::write(folder.path().join("config_sentence_transformers.json"), prompts).expect("writes");
    let prompted = json(&["--model", &model, "w7"]);
    assert_eq!((&prompted["embeddings"][0]["text"], &prompted["embeddings"][0]["tokens"]), (&"w7".into(), &3.into()));
    assert_eq!(vector(&prompted, 0), vector(&plain, 0));
    // The server's too, and not in front of tokens that are given.
    let server = Server::start(&["--model", &model]);
    let ask = |input: serde_json::Value| -> Vec<f64> {
        let answer = server.post("/v1/embeddings", &serde_json::json!({ "input": input })).json();
        let numbers = answer["data"][0]["embedding"].as_array().expect("a vector");
        numbers.iter().filter_map(serde_json::Value::as_f64).collect()
    };
    let near = |a: &[f64], b: &[f64]| a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-6);
    assert!(near(&ask("w7".into()), &vector(&plain, 0)));
    assert!(near(&ask(serde_json::json!([7])), &vector(&plain, 1)));
}

#[test]
fn a_model_that_scores_texts_makes_vectors_only_by_a_pooling_that_is_given() {
    let folder = crate::serve_rerank::with_words("starcoder2");
    std::fs::create_dir(folder.path().join("1_LogitScore")).expect("makes the folder");
    let put = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).expect("writes");
    put("modules.json", r#"[{"path": "", "type": "x.Transformer"}, {"path": "1_LogitScore", "type": "x.LogitScore"}]"#);
    put("1_LogitScore/config.json", r#"{"true_token_id": 40, "false_token_id": 41}"#);
    let model = folder.path().display().to_string();
    let ran = ridge(&["embed", "--model", &model, "w5"]);
    assert!(ran.code == 2 && ran.stderr.contains("LogitScore"), "{}", ran.stderr);
    assert_eq!(json(&["--model", &model, "--pooling", "last", "w5"])["pooling"], "last");
}

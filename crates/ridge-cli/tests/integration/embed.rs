//! `ridge embed`, as a user types it.

use crate::common::ridge;

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

/// A model of the fixtures with its modules of sentence-transformers, whose vectors are those of the library.
#[test]
fn vectors_go_through_the_modules_of_the_model() {
    let (name, width) = ("gemma3_encoder", 16);
    let folder = crate::serve_rerank::with_words(name);
    let fixtures = crate::common::repository().join("fixtures");
    crate::common::copy_folder(&fixtures.join("sentences").join(name), folder.path());
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
    // Another pooling than that of the files has nothing behind it.
    let plain = json(&["--model", &model, "--pooling", "max", "w5"]);
    assert_ne!(plain["dimensions"], width, "{name}");
}

//! `ridge eval`, run as users run it, against torch in float64 (`fixtures/perplexity.py`, `fixtures/evaluation.py`).

use crate::common::{Folder, json, repository, ridge, stdout};
use serde_json::Value;

fn fixture(name: &str) -> String {
    repository().join("fixtures").join(name).display().to_string()
}

fn expected(name: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(fixture(name)).unwrap()).unwrap()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is not a number"))
}

/// The same to five digits and beyond: f32 arithmetic moves the sixth, or that of a logit.
fn near(got: &Value, wanted: &Value) {
    let (got, wanted) = (number(got), number(wanted));
    assert!((got - wanted).abs() <= 2e-6 * wanted.abs().max(1.0), "{got} instead of {wanted}");
}

#[test]
fn perplexities_are_those_of_torch() {
    let expected = expected("perplexity.json");
    for (name, more) in [("disjoint", &[][..]), ("sliding", &["--chunk", "100"]), ("rolling", &["--threads", "1"])] {
        let wanted = &expected["settings"][name];
        let (window, stride) = (wanted["window"].to_string(), wanted["stride"].to_string());
        let file = fixture("perplexity.txt");
        let args = ["eval", "--json", "--perplexity", &file, "--context", &window, "--stride", &stride];
        let got = json(&[&args[..], more].concat());
        assert_eq!(got["predicted_tokens"], wanted["predicted_tokens"], "{name}");
        assert_eq!(got["bytes"], expected["bytes"]);
        for figure in ["log_likelihood", "perplexity", "bits_per_byte"] {
            near(&got[figure], &wanted[figure]);
        }
    }
}

#[test]
fn a_cache_of_int8_costs_less_than_half_a_percent() {
    let file = fixture("perplexity.txt");
    let perplexity = |cache| {
        let args = ["eval", "--json", "--perplexity", &file, "--context", "512", "--cache-dtype", cache];
        number(&json(&args)["perplexity"])
    };
    let (exact, rounded) = (perplexity("f32"), perplexity("int8"));
    assert!(rounded != exact && (rounded / exact - 1.0).abs() < 0.005, "{rounded} instead of {exact}");
}

#[test]
fn rolling_is_that_of_the_harness() {
    let wanted = &expected("evaluation.json")["rolling"];
    let context = wanted["context"].to_string();
    let got = json(&["eval", "--json", "--perplexity", &fixture("perplexity.txt"), "--rolling", "--context", &context]);
    assert_eq!(got["predicted_tokens"], wanted["predicted_tokens"]);
    near(&got["log_likelihood"], &wanted["log_likelihood"]);
    near(&got["perplexity"], &wanted["perplexity"]);
}

#[test]
fn the_default_windows_are_told() {
    let text = stdout(&["eval", "--perplexity", &fixture("perplexity.txt")]);
    assert!(text.contains("1,893 predicted") && text.contains("in 7 windows of 512, stride 256"), "{text}");
    assert!(text.contains("perplexity      5") && text.contains("bits per byte   3."), "{text}");
}

#[test]
fn answers_have_the_scores_of_torch_however_they_are_batched() {
    let expected = expected("evaluation.json");
    for chunk in ["7", "512"] {
        let got = json(&["eval", "--json", "--choices", &fixture("evaluation.jsonl"), "--chunk", chunk]);
        let items = expected["items"].as_array().unwrap();
        assert_eq!(got["items"].as_array().unwrap().len(), items.len());
        for (got, wanted) in got["items"].as_array().unwrap().iter().zip(items) {
            assert_eq!(got["tokens"], wanted["tokens"], "{got}");
            for (got, wanted) in
                got["log_likelihoods"].as_array().unwrap().iter().zip(wanted["log_likelihoods"].as_array().unwrap())
            {
                near(got, wanted);
            }
        }
        for figure in ["acc", "acc_norm", "acc_bytes", "acc_stderr", "acc_norm_stderr", "acc_bytes_stderr"] {
            near(&got[figure], &expected[figure]);
        }
    }
    let text = stdout(&["eval", "--choices", &fixture("evaluation.jsonl")]);
    assert!(text.contains("10 questions\n") && text.contains("acc        0.7000 ± 0.1528\n"), "{text}");
}

#[test]
fn texts_beyond_the_context_lose_their_beginning() {
    let folder = Folder::stories();
    let line =
        |text: &str| format!("{{\"context\": \"{text}\", \"choices\": [\"blue.\", \"very big.\"], \"answer\": 0}}\n");
    folder.write("long", line("One day the sun was hot and the sky was so"));
    let file = folder.file("long").display().to_string();
    let ran = ridge(&["eval", "--choices", &file, "--context", "12"]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert_eq!(ran.stderr, "1 question truncated at the beginning to fit the context of 12\n");
    let cut = json(&["eval", "--json", "--choices", &file, "--context", "12"]);
    let whole = json(&["eval", "--json", "--choices", &file]);
    assert_eq!((&cut["truncated_questions"], &whole["truncated_questions"]), (&1.into(), &0.into()));
    assert_ne!(cut["items"][0]["log_likelihoods"], whole["items"][0]["log_likelihoods"]);
}

#[test]
fn mistakes_are_named_with_file_and_line() {
    let folder = Folder::stories();
    folder.write("empty", "");
    folder.write("lines", "{\"prompt\": \"a\", \"choices\": [\"x\", \"y\"], \"answer\": 1}\n\n{\"prompt\": \"a\"\n");
    folder.write("few", "{\"prompt\": \"a\", \"choices\": [\"x\", \"y\"], \"answer\": 7}\n");
    folder.write("latin", b"caf\xe9");
    let path = |name: &str| folder.file(name).display().to_string();
    for (args, code, said) in [
        (["--perplexity", &path("empty")], 1, "empty: is empty"),
        (["--choices", &path("empty")], 1, "empty: is empty"),
        (["--choices", &path("lines")], 1, "lines:3: is not JSON"),
        (["--choices", &path("few")], 1, "few:1: `answer` is 7, but the answers are 0 to 1"),
        (["--perplexity", &path("latin")], 1, "is not UTF-8 at byte 3"),
        (["--perplexity", &path("none")], 1, "cannot read"),
    ] {
        let ran = ridge(&[&["eval"], &args[..]].concat());
        assert_eq!(ran.code, code, "{}", ran.stderr);
        assert!(ran.stderr.contains(said), "{}", ran.stderr);
    }
    folder.write("short", "a");
    let ran = ridge(&["eval", "--perplexity", &path("short"), "--stride", "9", "--context", "8"]);
    assert!(ran.code == 2 && ran.stderr.contains("--stride 9: exceeds the window of 8"), "{}", ran.stderr);
    let ran = ridge(&["eval", "--perplexity", &path("empty"), "--no-special", "--context", "5000"]);
    assert!(ran.code == 2 && ran.stderr.contains("supports at most 512 tokens"), "{}", ran.stderr);
}

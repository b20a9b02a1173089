//! `--tp` and `ridge launch`: several ranks say what one says.

use serde_json::{Value, json};

use crate::common::server::Server;
use crate::common::{Folder, Ran, fixture, json, ridge, ridge_reading, stdout};

const PROMPT: &str = "Lily and Tim";

#[test]
fn ranks_within_the_process_say_what_one_says() {
    let said = |tp: &str, more: &[&str]| stdout(&[&["generate", "-n", "40", "--tp", tp][..], more, &[PROMPT]].concat());
    let sampled = ["--seed", "7", "--temperature", "0.8", "--top-p", "0.9"];
    for settings in [&["--greedy"][..], &sampled, &["--greedy", "--chunk", "3"], &["--greedy", "--threads", "1"]] {
        let alone = said("1", settings);
        assert!(alone.len() > 60, "{alone}");
        for tp in ["2", "4"] {
            assert_eq!(said(tp, settings), alone, "--tp {tp} {settings:?}");
        }
    }
}

#[test]
fn every_small_llama_that_divides_says_what_one_rank_says_in_every_format() {
    for (model, more) in [
        ("mha_untied", &[][..]),
        ("gqa2_tied", &[]),
        ("odd_head_dim", &[]),
        ("bf16_sharded", &["--dtype", "f32"]),
        ("biased", &["--cache-dtype", "int8"]),
        ("biased", &["--cache-dtype", "f8"]),
    ] {
        let model = fixture(model);
        let tokens = |tp: &str| {
            let fixed = [
                "generate",
                "--model",
                &model,
                "--greedy",
                "--prompt-tokens",
                "9",
                "--seed",
                "3",
                "--json",
                "-n",
                "12",
            ];
            json(&[&fixed[..], &["--tp", tp], more].concat())["tokens"].clone()
        };
        assert_eq!(tokens("2"), tokens("1"), "{model}");
    }
}

#[test]
fn conversations_and_scores_over_two_ranks_are_those_of_one() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text.txt");
    std::fs::write(&text, "Once upon a time, there was a little girl named Lily. She loved to play outside.").unwrap();
    let scored = |tp: &str| {
        let said = json(&["eval", "--perplexity", text.to_str().unwrap(), "--tp", tp, "--json"]);
        said["perplexity"].as_f64().unwrap_or_else(|| panic!("{said}"))
    };
    let (one, two) = (scored("1"), scored("2"));
    assert!((one / two - 1.0).abs() < 1e-5, "{one} and {two}");
    let model = Folder::stories();
    model.write("chat_template.jinja", "{{ bos_token }}{% for m in messages %}{{ m.content }}\n{% endfor %}");
    let chat = |tp: &str| {
        let turns = ["-p", "The dog was big", "-p", "Lily saw it"];
        stdout(&[&["chat", "--model", model.path(), "--greedy", "-n", "12", "--tp", tp][..], &turns].concat())
    };
    assert_eq!(chat("2"), chat("1"));
}

#[test]
fn a_server_of_two_ranks_answers_as_one_of_one() {
    let ask = |server: &Server, prompt: &str| -> Value {
        let body = json!({ "model": "stories260K", "prompt": prompt, "max_tokens": 30, "temperature": 0 });
        let answer = server.post("/v1/completions", &body);
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer.json()["choices"][0]["text"].clone()
    };
    let (one, two) = (Server::start(&[]), Server::start(&["--tp", "2", "--speculate", "3"]));
    for prompt in [PROMPT, "Once upon a time", PROMPT] {
        assert_eq!(ask(&two, prompt), ask(&one, prompt), "{prompt}");
    }
}

#[test]
fn ranks_that_are_processes_say_what_one_says() {
    let alone = stdout(&["generate", "--greedy", "-n", "30", PROMPT]);
    for transport in ["shm", "tcp"] {
        let launched = [
            "launch",
            "-n",
            "2",
            "--transport",
            transport,
            "--",
            "generate",
            "--tp",
            "2",
            "--greedy",
            "-n",
            "30",
            PROMPT,
        ];
        assert_eq!(stdout(&launched), alone, "over {transport}");
    }
    // The prompt and the seed are those of the first.
    let launched = ["launch", "-n", "2", "--", "generate", "--tp", "2", "-n", "12", "-"];
    let Ran { code, stdout: said, stderr } = ridge_reading(PROMPT, &launched);
    let seed = stderr.split_once("seed ").and_then(|(_, rest)| rest.split_once(';')).expect("it is told").0.to_owned();
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(said, stdout(&["generate", "--seed", &seed, "-n", "12", PROMPT]));
}

#[test]
fn what_cannot_be_cut_or_launched_is_named() {
    let said = |args: &[&str]| {
        let ran = ridge(args);
        assert_eq!(ran.stdout, "");
        (ran.code, ran.stderr)
    };
    let (code, error) = said(&["generate", "--tp", "3"]);
    assert!(code == 1 && error.contains("num_key_value_heads = 4 does not divide over 3 ranks"), "{error}");
    let (code, error) = said(&["launch", "-n", "2", "--", "generate", "--greedy"]);
    assert!(code == 1 && error.contains("--tp 1: 2 ranks were launched; give --tp 2"), "{error}");
    assert!(error.contains("rank 1: error: ") && error.contains("exited first, with exit status: 2"), "{error}");
    let (code, error) = said(&["launch", "-n", "2", "--", "serve"]);
    assert!(code == 2 && error.contains("COMMAND serve: does not support ranks; supported: generate"), "{error}");
    let several = ["launch", "-n", "1", "--nodes", "2", "--meet", "127.0.0.1:1", "--", "generate"];
    let (code, error) = said(&several);
    assert!(code == 2 && error.contains("RIDGE_TOKEN"), "{error}");
    let (code, error) = said(&["generate", "--tp", "2", "--device", "cuda"]);
    assert!(code == 2 && error.contains("ridge launch -n 2 -- COMMAND --tp 2 --device cuda"), "{error}");
}

#[test]
fn latent_attention_is_refused_over_ranks_for_what_it_is() {
    let model = crate::common::repository().join("fixtures/families/deepseek_v3").display().to_string();
    let refused = crate::common::ridge(&["generate", "--model", &model, "--tp", "2", "--prompt-tokens", "5"]);
    assert_ne!(refused.code, 0);
    assert!(refused.stderr.contains("latent attention caches one latent for all of its"), "{}", refused.stderr);
    assert!(!refused.stderr.contains("num_key_value_heads"), "{}", refused.stderr);
}

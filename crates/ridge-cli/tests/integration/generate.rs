//! `ridge generate`, run as users run it.

use std::process::Stdio;

use crate::common::{Folder, command, fixture, json, ran, repository, ridge, ridge_reading, stdout};

/// The text that the embedded model gives greedily, with the newline that the file ends with.
fn expected() -> String {
    std::fs::read_to_string(repository().join("models/stories260K/expected_greedy.txt")).unwrap()
}

/// Some 60 tokens.
const PROMPT: &str = "Once upon a time, there was a little boy named Tim. Tim had a big red ball and a small dog. \
                      One day, Tim and the dog went to the";

#[test]
fn greedy_text_is_the_expected_one_on_any_number_of_threads() {
    for threads in ["1", "2", "3"] {
        assert_eq!(stdout(&["generate", "--greedy", "--threads", threads]), expected(), "{threads} threads");
    }
}

#[test]
fn a_model_folder_gives_the_text_of_the_embedded_model() {
    let folder = Folder::stories();
    assert_eq!(stdout(&["generate", "--greedy", "--model", folder.path()]), expected());
}

#[test]
fn chunks_of_the_prompt_do_not_change_the_text() {
    let whole = stdout(&["generate", "--greedy", PROMPT]);
    assert!(whole.split_whitespace().count() > 50, "{whole}");
    for chunk in ["1", "3", "64"] {
        for threads in ["1", "2"] {
            let text = stdout(&["generate", "--greedy", "--chunk", chunk, "--threads", threads, PROMPT]);
            assert_eq!(text, whole, "chunks of {chunk}, {threads} threads");
        }
    }
}

#[test]
fn a_seed_fixes_the_text_and_another_changes_it() {
    let text = |seed| stdout(&["generate", "--seed", seed, "-n", "60"]);
    let first = text("1");
    assert_eq!(text("1"), first);
    assert_eq!(stdout(&["generate", "--seed", "1", "-n", "60", "--threads", "2"]), first);
    assert!(["2", "3", "4"].iter().all(|seed| text(seed) != first));
}

#[test]
fn a_seed_that_was_not_given_is_told() {
    let ran = ridge(&["generate", "-n", "40"]);
    let seed = ran.stderr.strip_prefix("seed ").and_then(|rest| rest.split_once(';')).unwrap().0.to_owned();
    assert_eq!(stdout(&["generate", "-n", "40", "--seed", &seed]), ran.stdout);
    for quiet in [&["generate", "-q"][..], &["generate", "--greedy"], &["generate", "--seed", "1"]] {
        assert_eq!(ridge(quiet).stderr, "");
    }
}

#[test]
fn text_ends_before_a_stop_string() {
    let text = stdout(&["generate", "--greedy", "--stop", "nowhere", "--stop", "red ball"]);
    assert_eq!(text, format!("{}\n", expected().split_once("red ball").unwrap().0));
    let object = json(&["generate", "--greedy", "--stop", "red ball", "--json"]);
    assert_eq!((&object["finish_reason"], &object["stopped_by_string"]), (&"stop".into(), &true.into()));
}

#[test]
fn a_prompt_comes_from_standard_input_as_from_an_argument() {
    let args = ["generate", "--greedy", "-n", "20"];
    let expected = stdout(&[&args[..], &["The dog"]].concat());
    assert_eq!(ridge_reading("The dog\n", &[&args[..], &["-"]].concat()).stdout, expected);
    assert_eq!(ridge_reading("The dog", &[&args[..], &["-"]].concat()).stdout, expected);
}

#[test]
fn echo_puts_the_prompt_before_the_answer() {
    let args = ["generate", "--greedy", "-n", "20", "Lily went to the"];
    let answer = stdout(&args);
    assert!(answer.starts_with(' '), "{answer:?}");
    assert_eq!(stdout(&[&args[..], &["--echo"]].concat()), format!("Lily went to the{answer}"));
}

#[test]
fn json_is_all_that_is_printed_and_says_it_all() {
    let ran = ridge(&["generate", "--greedy", "--json"]);
    assert_eq!((ran.code, ran.stderr.as_str()), (0, ""));
    let object: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(object["text"].as_str().unwrap(), expected().strip_suffix('\n').unwrap());
    assert_eq!(object["tokens"].as_array().unwrap().len(), 200);
    assert_eq!(object["finish_reason"], "length");
    assert_eq!((&object["prompt_tokens"], &object["generated_tokens"]), (&1.into(), &200.into()));
    assert_eq!((&object["settings"]["max_tokens"], &object["settings"]["context"]), (&200.into(), &201.into()));
    for key in ["load_seconds", "prompt_seconds", "generate_seconds", "generated_tokens_per_second"] {
        assert!(object["measured"][key].as_f64().unwrap() > 0.0, "{key}");
    }
}

#[test]
fn int8_attention_is_rejected_on_a_cpu() {
    let ran = ridge(&["generate", "--device", "cpu", "--cache-dtype", "int8", "--attention", "int8"]);
    assert_ne!(ran.code, 0);
    assert!(ran.stdout.is_empty() && ran.stderr.contains("leave --attention int8 out"), "{}", ran.stderr);
}

#[test]
fn defaults_are_told_as_they_are_typed() {
    let settings = &json(&["generate", "-n", "1", "--json"])["settings"];
    let told = ["temperature", "top_k", "top_p", "dtype", "cache_dtype"].map(|key| settings[key].to_string());
    assert_eq!(told, ["0.8", "40", "0.95", "\"f32\"", "\"f32\""]);
}

#[test]
fn times_are_told_when_asked_for() {
    let ran = ridge(&["generate", "--greedy", "-v"]);
    assert!(ran.stderr.contains("generated 200 tokens in ") && ran.stderr.contains(" tok/s"), "{}", ran.stderr);
    assert_eq!(ran.stdout, expected());
}

#[test]
fn a_full_context_ends_the_text_and_says_so() {
    let ran = ridge(&["generate", "--greedy", "--context", "16"]);
    assert_eq!((ran.code, ran.stderr.as_str()), (0, "the context of 16 tokens is full\n"));
    assert!(expected().starts_with(ran.stdout.trim_end_matches('\n')));
    assert_eq!(json(&["generate", "--greedy", "--context", "16", "--json"])["finish_reason"], "context");
}

/// Fixtures have no tokenizer: ids stand for the text.
#[test]
fn a_model_without_tokenizer_gives_ids() {
    for name in ["mha_untied", "gqa8_llama3_rope", "bf16_sharded", "odd_head_dim", "biased"] {
        let model = fixture(name);
        let args = ["generate", "--model", &model, "--prompt-tokens", "9", "--seed", "5", "--ignore-eos", "-n", "12"];
        let text = stdout(&args);
        let ids: Vec<u32> = text.split_whitespace().map(|id| id.parse().unwrap()).collect();
        assert_eq!(ids.len(), 12, "{name}");
        let object = json(&[&args[..], &["--json", "--chunk", "2", "--threads", "2"]].concat());
        assert_eq!(object["tokens"], serde_json::json!(ids), "{name}");
        assert!(object["text"].is_null());
    }
}

#[test]
fn an_end_token_ends_the_answer_unless_it_is_ignored() {
    let folder = Folder::copy_of(fixture("gqa2_tied"));
    let args = ["generate", "--greedy", "--model", folder.path(), "--json", "-n", "16"];
    let all = json(&[&args[..], &["--ignore-eos"]].concat())["tokens"].clone();
    let all: Vec<u64> = all.as_array().unwrap().iter().map(|t| t.as_u64().unwrap()).collect();
    // The first token that was not there before.
    let at = (1..all.len()).find(|i| !all[..*i].contains(&all[*i])).unwrap();
    folder.write("generation_config.json", format!(r#"{{"eos_token_id": [{}]}}"#, all[at]));
    let stopped = json(&args);
    assert_eq!((&stopped["tokens"], &stopped["finish_reason"]), (&serde_json::json!(all[..at]), &"stop".into()));
    assert_eq!(json(&[&args[..], &["--ignore-eos"]].concat())["tokens"], serde_json::json!(all));
}

#[test]
fn a_configuration_is_enough_with_random_weights() {
    let config = std::fs::read_to_string(format!("{}/config.json", fixture("gqa2_tied"))).unwrap();
    let folder = Folder::of_config(&config);
    let args = ["generate", "--model", folder.path(), "--random-weights", "--prompt-tokens", "40", "-n", "5", "--seed"];
    let text = stdout(&[&args[..], &["1"]].concat());
    assert_eq!(text.split_whitespace().count(), 5);
    assert_eq!(stdout(&[&args[..], &["1"]].concat()), text);
}

#[test]
fn numbers_may_be_kept_in_other_ways() {
    for args in [
        &["--dtype", "bf16"][..],
        &["--dtype", "f16", "--cache-dtype", "f16"],
        &["--cache-dtype", "bf16"],
        &["--cache-dtype", "int8"],
        &["--cache-dtype", "f8"],
        &["--dtype", "bf16", "--cache-dtype", "int8"],
        &["--format", "f8"],
        &["--format", "int8"],
        &["--format", "int8", "--dtype", "bf16"],
        &["--format", "q8_0"],
        &["--format", "q8_0", "--dtype", "bf16", "--cache-dtype", "bf16"],
    ] {
        let text = stdout(&[&["generate", "--greedy"], args].concat());
        assert!(text.starts_with("Once upon a time, there was a little girl named"), "{args:?}: {text}");
    }
}

#[test]
fn no_tokens_may_be_asked_for() {
    assert_eq!(stdout(&["generate", "--greedy", "-n", "0"]), "\n");
}

#[test]
fn a_reader_that_leaves_is_no_failure() {
    for args in [&["generate", "--greedy"][..], &["generate", "--greedy", "--json"], &["inspect"], &["--help"]] {
        let mut child = command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{args:?}");
        assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{args:?}");
    }
}

#[test]
fn ids_in_place_of_text_are_announced() {
    let model = fixture("mha_untied");
    let args = ["generate", "--model", &model, "--prompt-tokens", "3", "--seed", "1", "-n", "2"];
    assert_eq!(ridge(&args).stderr, format!("no tokenizer.json in {model}; printing token ids\n"));
    assert_eq!(ridge(&[&args[..], &["-q"]].concat()).stderr, "");
    assert_eq!(ridge(&[&args[..], &["--json"]].concat()).stderr, "");
}

#[test]
fn the_environment_names_the_device() {
    let of = |device: &str| ran(command(&["generate", "-n", "1", "x"]).env("RIDGE_DEVICE", device).output().unwrap());
    assert_eq!(of("cpu").code, 0);
    let wrong = of("nonsense");
    assert!(wrong.code == 2 && wrong.stderr.contains("RIDGE_DEVICE"), "{}", wrong.stderr);
    // What is typed goes first.
    let typed = command(&["generate", "-n", "1", "--device", "cpu", "x"]).env("RIDGE_DEVICE", "nonsense").output();
    assert_eq!(ran(typed.unwrap()).code, 0);
}

#[test]
fn matrices_that_a_format_leaves_are_told() {
    let said = ridge(&["generate", "--greedy", "--format", "q8_0", "-n", "1"]).stderr;
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(said.starts_with("--format q8_0 does not convert 5 of 36 matrices, such as model.layers.0.mlp."), "{said}");
    assert!(said.contains("blocks of 32 along the innermost axis"), "{said}");
}

#[test]
fn biases_of_experts_stay_as_they_are_beside_matrices_in_a_format() {
    let model = crate::common::repository().join("fixtures/families/gpt_oss").display().to_string();
    for format in ["q8_0", "mxfp4"] {
        stdout(&["generate", "--greedy", "--prompt-tokens", "4", "-n", "2", "--format", format, "-m", &model]);
    }
    let folder = Folder::of_config("{}");
    let file = folder.file("x.gguf").display().to_string();
    stdout(&["quantize", &model, &file, "--format", "q8_0", "-q"]);
    stdout(&["generate", "--greedy", "--prompt-tokens", "4", "-n", "2", "-m", &file]);
}

#[test]
fn matrices_that_are_quantised_already_count_among_those_that_a_format_leaves() {
    let folder = Folder::of_config("{}");
    let file = folder.file("x.gguf").display().to_string();
    let model = crate::common::repository().join("models/stories260K").display().to_string();
    stdout(&["quantize", &model, &file, "--format", "q8_0", "-q"]);
    for args in [
        &["generate", "--greedy", "-n", "1", "--format", "q4_k", "-m", &file][..],
        &["inspect", &file, "--format", "q4_k"],
    ] {
        let said = ridge(args).stderr;
        assert!(said.contains("--format q4_k does not convert 36 of 36 matrices"), "{args:?}: {said}");
    }
    // Those that have the format are not among them.
    let said = ridge(&["generate", "--greedy", "-n", "1", "--format", "q8_0", "-m", &file]).stderr;
    assert!(said.contains("--format q8_0 does not convert 5 of 36 matrices"), "{said}");
}

#[test]
fn help_is_a_command_too() {
    for command in ["generate", "inspect", "doctor"] {
        assert_eq!(stdout(&["help", command]), stdout(&[command, "--help"]));
    }
    assert_eq!(stdout(&["help"]), stdout(&["--help"]));
    let help = stdout(&["help", "generate"]);
    assert!(help.contains("generation_config.json") && help.contains("after `--`"), "{help}");
}

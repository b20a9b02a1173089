//! What users get wrong: each mistake ends in an exit code and a message that names the thing, its value and the way
//! out.

mod common;

use common::{Folder, fixture, ridge};

/// Runs, and checks code and message.
fn refused(code: i32, args: &[&str], said: &[&str]) {
    let ran = ridge(args);
    assert_eq!(ran.code, code, "{args:?}: {}{}", ran.stdout, ran.stderr);
    assert!(ran.stderr.starts_with("error: "), "{args:?}: {}", ran.stderr);
    for part in said {
        assert!(ran.stderr.contains(part), "{args:?} does not say {part:?}: {}", ran.stderr);
    }
    assert_eq!(ran.stdout, "", "{args:?}");
}

#[test]
fn missing_folder() {
    refused(1, &["generate", "--model", "/no/such"], &["/no/such: there is no such folder", "leave it out"]);
    refused(1, &["inspect", "owner/name"], &["owner/name", "hf download owner/name"]);
}

#[test]
fn folder_without_config() {
    let folder = Folder::stories();
    std::fs::remove_file(folder.file("config.json")).unwrap();
    for command in ["generate", "inspect"] {
        refused(1, &[command, "--model", folder.path()], &[folder.path(), "it holds no config.json", "download"]);
    }
}

#[test]
fn file_in_place_of_a_folder() {
    let folder = Folder::stories();
    let file = folder.file("model.safetensors");
    let file = file.to_str().unwrap();
    refused(1, &["generate", "--model", file], &[file, "it is a file, and a model is a folder", folder.path()]);
    refused(1, &["inspect", file], &[file, "cannot read the configuration"]);
}

#[test]
fn truncated_weights() {
    let folder = Folder::stories();
    let bytes = std::fs::read(folder.file("model.safetensors")).unwrap();
    for len in [0, 5, 1000, bytes.len() - 1] {
        folder.write("model.safetensors", &bytes[..len]);
        for command in ["generate", "inspect"] {
            refused(1, &[command, "--model", folder.path()], &["model.safetensors", "download"]);
        }
    }
}

#[test]
fn weights_of_another_model() {
    let folder = Folder::copy_of(fixture("mha_untied"));
    folder.edit("config.json", |c| c.replace("\"intermediate_size\": ", "\"intermediate_size\": 1"));
    let said = ["model.layers.0.mlp.gate_proj.weight", "check that config.json belongs to this checkpoint"];
    refused(1, &["generate", "--model", folder.path()], &said);
}

#[test]
fn missing_weights() {
    let folder = Folder::of_config(include_str!("../../../models/stories260K/config.json"));
    refused(1, &["generate", "--model", folder.path()], &[folder.path(), "no *.safetensors file", "download"]);
}

#[test]
fn wrong_configuration() {
    for (edit, said) in [
        ("\"rope_theta\"", ["unknown key", "rope_thetas"]),
        ("\"num_key_value_heads\": 4", ["num_key_value_heads = 3", "does not divide num_attention_heads = 8"]),
        ("\"model_type\": \"llama\"", ["model_type = \"mamba\"", "is not a family that Ridge reads"]),
        ("\"hidden_act\": \"silu\"", ["hidden_act = \"gelu\"", "config.json"]),
    ] {
        let folder = Folder::stories();
        let to = edit.replace("theta", "thetas").replace('4', "3").replace("llama", "mamba").replace("silu", "gelu");
        folder.edit("config.json", |c| c.replace(edit, &to));
        for command in ["generate", "inspect"] {
            refused(1, &[command, "--model", folder.path()], &said);
        }
    }
}

#[test]
fn not_json() {
    let folder = Folder::of_config("{\"model_type\": ");
    refused(1, &["generate", "--model", folder.path()], &["config.json", "not valid JSON", "line 1"]);
}

#[test]
fn damaged_tokenizer() {
    let folder = Folder::stories();
    folder.write("tokenizer.json", "{}");
    refused(1, &["generate", "--model", folder.path()], &["tokenizer.json", "download it again"]);
}

#[test]
fn prompt_without_tokenizer() {
    let model = fixture("mha_untied");
    let said = ["--prompt-tokens N needs none", "caused by: ", "it holds no tokenizer.json", &model];
    refused(1, &["generate", "--model", &model, "Hello"], &said);
    refused(1, &["generate", "--model", &model, "--stop", "x"], &["--stop needs a tokenizer"]);
}

#[test]
fn prompt_beyond_the_context() {
    let prompt = "One day. ".repeat(200);
    refused(1, &["generate", &prompt], &["the model was made for 512 at most", "shorten the prompt"]);
    refused(1, &["generate", "--context", "2", "One day"], &["the context holds 2", "raise --context"]);
    refused(1, &["generate", "--prompt-tokens", "512"], &["the prompt has 512 tokens"]);
}

#[test]
fn nothing_to_start_from() {
    let folder = Folder::copy_of(fixture("mha_untied"));
    folder.edit("config.json", |c| c.replace("\"bos_token_id\": 1", "\"bos_token_id\": null"));
    refused(1, &["generate", "--model", folder.path()], &["no token that begins a text", "give a prompt"]);
}

#[test]
fn settings_out_of_range() {
    for (args, said) in [
        (&["--temperature", "-1"][..], "--temperature -1: must be 0 (greedy) or a positive number"),
        (&["--temperature", "nan"], "--temperature NaN"),
        (&["--top-p", "0"], "--top-p 0: must be above 0 and at most 1"),
        (&["--top-p", "1.5"], "--top-p 1.5"),
        (&["--context", "513"], "--context 513: the model was made for at most 512 tokens"),
        (&["--context", "0"], "--context 0: must be at least 1"),
        (&["--chunk", "0"], "--chunk 0"),
        (&["--threads", "0"], "--threads 0"),
        (&["--threads", "99999"], "--threads 99999: must be at most 1024"),
        (&["--format", "q9_9"], "invalid value 'q9_9' for '--format <FORMAT>'"),
        (&["--dtype", "i8"], "[possible values: f32, bf16, f16]"),
        (&["--max-tokens", "-5"], "--max-tokens"),
        (&["--top-k", "many"], "invalid value 'many' for '--top-k <K>'"),
        (&["--greedy", "--top-k", "3"], "--greedy"),
        (&["--prompt-tokens", "3", "Hello"], "--prompt-tokens"),
        (&["--modle", "x"], "--model"),
    ] {
        refused(2, &[&["generate"], args].concat(), &[said]);
    }
    refused(2, &["inspect", "--context", "513"], &["--context 513: the model was made for at most 512 tokens"]);
    refused(2, &["inspect", "--lowered"], &["--graph"]);
    refused(2, &["genrate"], &["generate"]);
}

#[test]
fn more_memory_than_there_is() {
    let config = include_str!("../../ridge-models/tests/data/configs/Meta-Llama-3.1-405B.json");
    let folder = Folder::of_config(&config.replace("16384", "65536"));
    let args = ["generate", "--model", folder.path(), "--random-weights", "--prompt-tokens", "1"];
    refused(1, &args, &["the weights needs", "and this process can take", "choose a smaller model"]);
}

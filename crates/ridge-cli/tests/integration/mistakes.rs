//! What users get wrong: each mistake ends in an exit code and a message that names the thing, its value and the way
//! out.

use std::process::Stdio;

use crate::common::{Folder, command, fixture, ridge, ridge_reading_bytes};

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
    refused(1, &["inspect", "owner/name"], &["owner/name", "run `ridge pull owner/name`"]);
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
    refused(1, &["inspect", file], &[file, "it holds weights", "give the config.json beside it"]);
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
    let folder = Folder::of_config(include_str!("../../../../models/stories260K/config.json"));
    refused(1, &["generate", "--model", folder.path()], &[folder.path(), "no *.safetensors file", "download"]);
}

#[test]
fn wrong_configuration() {
    for (edit, said) in [
        ("\"rope_theta\"", ["unknown key", "rope_thetas"]),
        ("\"num_key_value_heads\": 4", ["num_key_value_heads = 3", "does not divide num_attention_heads = 8"]),
        ("\"model_type\": \"llama\"", ["model_type = \"hyena\"", "is not a family that Ridge reads"]),
        ("\"hidden_act\": \"silu\"", ["hidden_act = \"gelu\"", "config.json"]),
    ] {
        let folder = Folder::stories();
        let to = edit.replace("theta", "thetas").replace('4', "3").replace("llama", "hyena").replace("silu", "gelu");
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
    refused(1, &["generate", &prompt], &["the model supports at most 512", "shorten the prompt"]);
    refused(1, &["generate", "--context", "2", "One day"], &["the context holds 2", "raise --context"]);
    refused(1, &["generate", "--prompt-tokens", "512"], &["the prompt has 512 tokens"]);
    for count in ["4294967296", "999999999999999999"] {
        for more in [&["--max-tokens", "0"][..], &["--max-tokens", "1"], &["--context", "20"]] {
            let args = [&["generate", "--prompt-tokens", count], more].concat();
            refused(1, &args, &[&format!("the prompt has {count} tokens"), "shorten the prompt"]);
        }
    }
}

#[test]
fn nothing_to_start_from() {
    let folder = Folder::copy_of(fixture("mha_untied"));
    folder.edit("config.json", |c| c.replace("\"bos_token_id\": 1", "\"bos_token_id\": null"));
    let said = ["no begin token", "no tokenizer.json", "give --prompt-tokens N"];
    refused(1, &["generate", "--model", folder.path()], &said);
}

#[test]
fn settings_out_of_range() {
    for (args, said) in [
        (&["--temperature", "-1"][..], "'-1' for '--temperature <T>': must be 0 (greedy) or a positive number"),
        (&["--temperature", "1e400"], "'1e400' for '--temperature <T>'"),
        (&["--top-p", "0"], "'0' for '--top-p <P>': must be above 0 and at most 1"),
        (&["--top-p", "4294967296"], "'4294967296' for '--top-p <P>'"),
        (&["--context", "513"], "--context 513: the model supports at most 512 tokens"),
        (&["--context", "0"], "'0' for '--context <N>': must be a whole number from 1 to"),
        (&["--threads", "0"], "'0' for '--threads <N>': must be a whole number from 1 to 1024"),
        (&["--threads", "99999"], "must be a whole number from 1 to 1024"),
        (&["--seed", "-1"], "must be a whole number from 0 to 18446744073709551615"),
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
    refused(2, &["inspect", "--context", "513"], &["--context 513: the model supports at most 512 tokens"]);
    refused(2, &["genrate"], &["generate"]);
}

#[test]
fn more_memory_than_there_is() {
    let config = include_str!("../../../ridge-models/tests/data/configs/Meta-Llama-3.1-405B.json");
    let folder = Folder::of_config(&config.replace("16384", "65536"));
    let args = ["generate", "--model", folder.path(), "--random-weights", "--prompt-tokens", "1"];
    refused(1, &args, &["the weights need ", "is available to this process", "use a smaller model"]);
}

#[test]
fn a_folder_that_cannot_be_looked_into_says_so() {
    let folder = Folder::of_config("{}");
    std::fs::remove_file(folder.file("config.json")).unwrap();
    // A link to itself fails for every user; permissions do not for the superuser.
    std::os::unix::fs::symlink(folder.file("config.json"), folder.file("config.json")).unwrap();
    let said = ["cannot look for config.json in it", "check the permissions"];
    for command in ["generate", "inspect"] {
        refused(1, &[command, "--model", folder.path()], &said);
    }
}

#[test]
fn text_that_is_not_utf8() {
    let folder = Folder::stories();
    folder.write("config.json", b"{\"model_type\": \"\xe9\"}");
    let said = ["config.json: it is not UTF-8 text at byte 16", "save it as UTF-8"];
    refused(1, &["generate", "--model", folder.path()], &said);
    let ran = ridge_reading_bytes(b"caf\xe9", &["generate", "-"]);
    assert_eq!(ran.code, 1);
    assert!(ran.stderr.contains("not UTF-8 at byte 3") && ran.stderr.contains("iconv"), "{}", ran.stderr);
}

#[test]
fn a_prompt_without_end() {
    let mut child = command(&["generate", "-"]);
    let zero = std::fs::File::open("/dev/zero").unwrap();
    let output = child.stdin(zero).stdout(Stdio::piped()).stderr(Stdio::piped()).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("standard input exceeds 64 MiB"), "{said}");
}

#[test]
fn help_that_cannot_be_written() {
    for args in [&["--help"][..], &["--version"], &["help", "generate"]] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = command(args).stdout(full).stderr(Stdio::piped()).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains("cannot write to standard output"), "{args:?}: {said}");
    }
}

/// The embedded model with its safetensors file changed by `edit`, which is given header and data.
fn spoiled(edit: impl FnOnce(&mut serde_json::Value, &mut [u8])) -> Folder {
    let folder = Folder::stories();
    let bytes = std::fs::read(folder.file("model.safetensors")).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let mut data = bytes[8 + length..].to_vec();
    edit(&mut header, &mut data);
    let header = header.to_string();
    let length = (header.len() as u64).to_le_bytes();
    folder.write("model.safetensors", [&length[..], header.as_bytes(), &data].concat());
    folder
}

#[test]
fn weights_that_are_not_finite() {
    for bad in [f32::NAN, f32::INFINITY] {
        let folder = spoiled(|header, data| {
            let at = header["model.norm.weight"]["data_offsets"][0].as_u64().unwrap() as usize;
            data[at..at + 4].copy_from_slice(&bad.to_le_bytes());
        });
        for how in ["--greedy", "--seed=1"] {
            let args = ["generate", "--model", folder.path(), how];
            let ran = ridge(&args);
            assert_eq!(ran.code, 1, "{bad} {how}: {}", ran.stdout);
            assert!(ran.stderr.contains("the model's output is not finite"), "{}", ran.stderr);
        }
    }
}

#[test]
fn weights_that_are_integers() {
    let folder = spoiled(|header, _| {
        assert_eq!(header["model.norm.weight"]["dtype"], "F32");
        header["model.norm.weight"]["dtype"] = "I32".into();
    });
    let said = ["model.safetensors: the tensor model.norm.weight is stored as i32", "f32, bf16 or f16"];
    refused(1, &["generate", "--model", folder.path()], &said);
}

#[test]
fn what_stands_in_files_does_not_reach_the_terminal_as_it_is() {
    let folder = Folder::stories();
    let name = "n".repeat(10_000);
    folder.edit("config.json", |c| c.replacen('{', "{\"key \\u001b]0;title\\u0007\\u009b2J\": {\"a\": 1},", 1));
    let ran = ridge(&["inspect", folder.path()]);
    assert!(ran.code != 0 && !ran.stderr.contains(['\x1b', '\x07', '\u{9b}']), "{:?}", ran.stderr);
    assert!(ran.stderr.contains("\\u{1b}]0;title"), "{}", ran.stderr);
    let ran = ridge(&["inspect", &name]);
    assert!(ran.code != 0 && ran.stderr.len() < 1000 && ran.stderr.contains("characters]"), "{}", ran.stderr);
}

//! `ridge train` and `ridge data`: settings, interruptions at any instant, and what comes out of a run.

use std::io::{BufRead as _, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::common::server::Server;
use crate::common::{self, Folder, command, ran, ridge, stdout};

const MODEL: &str = r#"{"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": false}"#;

/// A folder with a model's configuration, a text, and the settings of a run of `steps` steps with a checkpoint every `every`.
pub(crate) fn folder(steps: u64, every: u64) -> Folder {
    let folder = Folder::of_config(MODEL);
    let text: String = (0..300).map(|i| format!("{i} bottles of ink, take {} down.\n", i % 7)).collect();
    folder.write("text.txt", text);
    let at = |name: &str| folder.file(name).display().to_string();
    folder.write(
        "run.toml",
        format!(
            "[model]\nconfig = {:?}\n[data]\ntrain = [{:?}]\nvocabulary = \"characters\"\nsequence_length = 32\n\
             [train]\nbatch_size = 2\nsteps = {steps}\n[optimizer]\nlearning_rate = 1e-2\n[validation]\nevery = 0\n\
             [checkpoint]\nfolder = {:?}\nevery = {every}\nresume = \"auto\"\n",
            at("config.json"),
            at("text.txt"),
            at("run")
        ),
    );
    folder
}

fn parsed(text: &str) -> serde_json::Value {
    serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

pub(crate) fn run_file(folder: &Folder) -> String {
    folder.file("run.toml").display().to_string()
}

fn last_state(folder: &Folder, steps: u64) -> Vec<u8> {
    std::fs::read(folder.file(&format!("run/checkpoints/step-{steps:08}/state.safetensors"))).unwrap()
}

/// Kills at random instants: as many as `RIDGE_KILLS` says, or a few.
#[test]
fn runs_that_are_killed_at_random_instants_end_with_the_bits_of_one_that_is_not() {
    let kills: u64 = std::env::var("RIDGE_KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(4);
    // A checkpoint behind every step, so that many kills fall into the writing of one.
    let steps = 30 + 2 * kills;
    let whole = folder(steps, 1);
    let began = Instant::now();
    stdout(&["train", &run_file(&whole), "-t", "1"]);
    let took = began.elapsed();
    let wanted = last_state(&whole, steps);

    let killed = folder(steps, 1);
    let file = run_file(&killed);
    let mut random = 7_u64;
    for kill in 0..kills {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let args = ["train", &file, "-t", "1"];
        let mut child = command(&args).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        // Up to the time of some eight steps behind the start.
        let share = (random >> 40) as f64 / (1_u64 << 24) as f64;
        std::thread::sleep(took.mul_f64(0.15 + 8.0 / steps as f64 * share));
        child.kill().unwrap();
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!stderr.contains("error:") && !stderr.contains("panicked"), "kill {kill}: {stderr}");
    }
    stdout(&["train", &file, "-t", "2"]);
    assert!(last_state(&killed, steps) == wanted, "after {kills} kills the state has other bits");
    let left: Vec<PathBuf> =
        killed.file("run/checkpoints").read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(left.iter().all(|path| !path.file_name().unwrap().to_str().unwrap().starts_with('.')), "{left:?}");
}

#[test]
fn sigterm_saves_and_exits() {
    let folder = folder(100_000, 0);
    let args = ["train", &run_file(&folder), "-t", "1"];
    let child = command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let log = folder.file("run/log.jsonl");
    let deadline = Instant::now() + Duration::from_secs(60);
    while !std::fs::read_to_string(&log).is_ok_and(|text| text.contains("\"loss\"")) {
        assert!(Instant::now() < deadline, "no step was made");
        std::thread::sleep(Duration::from_millis(20));
    }
    let id = child.id().to_string();
    assert!(std::process::Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
    let ran = ran(child.wait_with_output().unwrap());
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(ran.stderr.contains("and saved; --checkpoint.resume auto continues from there"), "{}", ran.stderr);
    assert_eq!(folder.file("run/checkpoints").read_dir().unwrap().count(), 1);
}

#[test]
fn a_dry_run_prints_settings_that_are_a_configuration_and_trains_nothing() {
    let folder = folder(7, 1);
    let printed = stdout(&["train", &run_file(&folder), "--dry-run", "--optimizer.name", "lion"]);
    assert!(printed.contains("steps = 7\n") && printed.contains("name = \"lion\"\n"), "{printed}");
    let comments: Vec<&str> = printed.lines().filter(|line| line.starts_with("# ")).collect();
    assert!(comments[0].contains(" parameters; memory "), "{comments:?}");
    assert_eq!(comments[1], "# recomputed: no activations");
    assert!(!folder.file("run").exists());
    folder.write("again.toml", &printed);
    let again = folder.file("again.toml").display().to_string();
    assert_eq!(stdout(&["train", &again, "--dry-run"]), printed);
}

#[test]
fn a_dry_run_predicts_what_a_run_allocates_and_shows_the_precision_of_ops() {
    let folder = folder(2, 0);
    let keys = ["--train.batch_size", "128", "--train.precision", "bf16", "--train.fp8", "delayed", "--log.every", "1"];
    let file = run_file(&folder);
    let printed = stdout(&[&["train", &file, "-t", "1", "--dry-run"], &keys[..]].concat());
    let row = |first: &str| {
        let line = printed.lines().find(|line| line.strip_prefix("# ").is_some_and(|line| line.starts_with(first)));
        let line = line.unwrap_or_else(|| panic!("no line of {first}: {printed}"));
        line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(row("weights ")[2], "bf16");
    assert_eq!(row("master ")[2], "f32");
    // Codes by codes, summed in f32, results in bf16.
    let line = row("fp8_linears ");
    assert_eq!(line[2..], ["f8e4m3_tensor,", "f32", "f32", "bf16", "8"], "{line:?}");
    let predicted: f64 = row("all, aligned").last().unwrap().replace(',', "").parse().unwrap();
    stdout(&[&["train", &file, "-t", "1"], &keys[..]].concat());
    let log = std::fs::read_to_string(folder.file("run/log.jsonl")).unwrap();
    let steps: Vec<_> = log.lines().map(parsed).filter(|event| event["event"] == "step").collect();
    let used = steps.last().unwrap()["memory_bytes"].as_f64().unwrap();
    println!("predicted {predicted}, used {used}");
    // Besides, the thread has memory to work in, a power of two up to some MiB, which grows to what its kernels ask for.
    let of_thread = (used - predicted).max(1.0).log2().round().exp2();
    assert!(of_thread <= 4.0 * 1024.0 * 1024.0, "predicted {predicted}, used {used}");
    let off = (used - predicted - of_thread).abs().min((used - predicted).abs());
    assert!(off < 0.01 * predicted, "predicted {predicted}, used {used}");
}

#[test]
fn a_dry_run_shows_what_is_offloaded_and_writes_a_snapshot() {
    let folder = folder(2, 0);
    let deep = std::fs::read_to_string(folder.file("config.json")).unwrap();
    folder.write("config.json", deep.replace("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 6"));
    let file = run_file(&folder);
    let snapshot = |offload: &str| {
        let to = folder.file(&format!("{offload}.json")).display().to_string();
        let dry =
            ["train", &file, "--dry-run", "--train.batch_size", "16", "--train.offload", offload, "--snapshot", &to];
        (stdout(&dry), parsed(&std::fs::read_to_string(&to).unwrap()))
    };
    let ((plain, whole), (printed, moved)) = (snapshot("none"), snapshot("all"));
    assert!(!plain.contains("host memory") && printed.contains("# offloaded to host memory: "), "{printed}");
    let bytes = |of: &serde_json::Value, block: &str| of[block]["peak"]["bytes"].as_f64().unwrap();
    assert!(bytes(&moved, "workspace") < 0.8 * bytes(&whole, "workspace"), "{moved}");
    assert!(bytes(&whole, "host") == 0.0 && bytes(&moved, "host") > 0.2 * bytes(&whole, "workspace"), "{moved}");
    let refused = ridge(&["train", &file, "--snapshot", "x.json"]);
    assert_eq!(refused.code, 2, "{}", refused.stderr);
}

/// What the packages of MLflow and W&B read from such files is checked by `fixtures/run_logs.py`.
#[test]
fn a_run_is_logged_for_mlflow_and_wandb_and_keeps_its_id_when_it_continues() {
    let folder = folder(4, 0);
    let (file, store) = (run_file(&folder), folder.file("mlruns").display().to_string());
    let keys = ["-t", "1", "--log.every", "1", "--log.mlflow", &store, "--log.wandb", "project"];
    for more in [&[][..], &["--train.steps", "6"]] {
        let mut offline = command(&[&["train", &file], &keys[..], more].concat());
        let ran = ran(offline.env("WANDB_MODE", "offline").output().unwrap());
        assert!(ran.code == 0 && !ran.stderr.contains("W&B"), "{}", ran.stderr);
    }
    let id = std::fs::read_to_string(folder.file("run/run-id")).unwrap();
    let run = PathBuf::from(&store).join("271828182845904523").join(&id);
    let read = |name: &str| std::fs::read_to_string(run.join(name)).unwrap();
    let steps: Vec<String> = read("metrics/train/loss").lines().map(|l| l.split(' ').nth(2).unwrap().into()).collect();
    assert_eq!(steps, ["1", "2", "3", "4", "5", "6"]);
    assert!(read("meta.yaml").contains("status: 3\n"), "it is finished");
    assert_eq!(read("params/optimizer.learning_rate"), "0.01");
    let runs: Vec<_> = folder.file("run/wandb").read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
    let name = format!("run-{}.wandb", &id[..8]);
    assert!(!runs.is_empty() && runs.iter().all(|run| run.join(&name).is_file()), "{runs:?}");
}

#[test]
fn a_page_shows_a_run_while_it_lasts() {
    let folder = folder(100_000, 0);
    let args = ["train", &run_file(&folder), "-t", "1", "--log.page", "127.0.0.1:0", "--checkpoint.export", "false"];
    let mut child = command(&args).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = std::io::BufReader::new(child.stderr.take().unwrap()).lines();
    let address = lines.find_map(|line| Some(line.unwrap().split_once("http://")?.1.trim().to_owned())).unwrap();
    let get = |path: &str| {
        let mut stream = std::net::TcpStream::connect(&address).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200"), "{path}: {head}");
        body.to_owned()
    };
    assert!(get("/").contains("/page/run.js"));
    assert!(get("/page/run.js").contains("/events?from="));
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut next = 0;
    let mut seen = Vec::new();
    while seen.iter().filter(|event: &&serde_json::Value| event["event"] == "step").count() < 3 {
        assert!(Instant::now() < deadline, "{seen:?}");
        let answer = parsed(&get(&format!("/events?from={next}")));
        seen.extend(answer["events"].as_array().unwrap().clone());
        next = answer["next"].as_u64().unwrap();
        assert_eq!(seen.len() as u64, next);
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(seen[0]["event"], "started");
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn mistakes_of_use_have_exit_code_2_and_say_what_to_do() {
    let folder = folder(3, 1);
    let file = run_file(&folder);
    for (args, wanted) in [
        (
            vec!["train"],
            "CONFIG is missing: give a TOML file that says which model to train ([model]), on which text ([data])",
        ),
        (vec!["train"], "docs/training.md begins with one, and `ridge train --help` lists all keys"),
        (
            vec!["train", "-t", "1", "--train.steps", "2"],
            "model.config = nothing: is missing; give a config.json to train",
        ),
        (vec!["train", &file, "--train.precision", "f8"], "train.precision = \"f8\": unknown variant `f8`"),
        (vec!["train", &file, "--optimizer.beta1", "2"], "must be at least 0 and below 1"),
        (vec!["train", &file, "--log.page", "7070"], "log.page = 7070: must be host:port, such as 127.0.0.1:7070"),
    ] {
        let ran = ridge(&args);
        assert_eq!(ran.code, 2, "{}", ran.stderr);
        assert!(ran.stderr.contains(wanted), "{}", ran.stderr);
    }
    folder.edit("run.toml", |text| text.replace("batch_size", "batchsize"));
    let ran = ridge(&["train", &file]);
    assert_eq!(ran.code, 2);
    assert!(ran.stderr.contains("unknown key train.batchsize; did you mean train.batch_size?"), "{}", ran.stderr);
}

#[test]
fn a_folder_that_cannot_be_written_is_named() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = folder(3, 1);
    let closed = folder.file("closed");
    std::fs::create_dir(&closed).unwrap();
    std::fs::set_permissions(&closed, std::fs::Permissions::from_mode(0o500)).unwrap();
    if std::fs::write(closed.join("probe"), b"").is_ok() {
        ridge_testing::skip!("this user may write everywhere");
    }
    let target = closed.join("run").display().to_string();
    let ran = ridge(&["train", &run_file(&folder), "--checkpoint.folder", &target]);
    assert_eq!(ran.code, 1);
    assert!(ran.stderr.contains("give a folder that can be written, or change its permissions"), "{}", ran.stderr);
}

#[test]
fn a_full_disk_ends_the_run_with_what_to_do_and_leaves_the_last_checkpoint() {
    let full = Path::new("/dev/full");
    if !full.exists() {
        ridge_testing::skip!("there is no /dev/full");
    }
    let folder = folder(4, 1);
    stdout(&["train", &run_file(&folder), "-t", "1"]);
    let wanted = last_state(&folder, 4);
    // The log is the file of a run that can be led to a full device.
    std::fs::remove_file(folder.file("run/log.jsonl")).unwrap();
    std::os::unix::fs::symlink(full, folder.file("run/log.jsonl")).unwrap();
    let ran = ridge(&["train", &run_file(&folder), "-t", "1", "--train.steps", "8"]);
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(ran.stderr.contains("free space on the disk"), "{}", ran.stderr);
    assert!(last_state(&folder, 4) == wanted);
}

#[test]
fn what_was_trained_is_generated_from_served_and_trained_on() {
    let folder = folder(30, 0);
    let printed = stdout(&["train", &run_file(&folder), "--sample.every", "30", "--sample.prompt", "7 bottles"]);
    assert!(printed.contains("step 30  sample:\n7 bottles"), "{printed}");
    let model = folder.file("run/model").display().to_string();
    let text = stdout(&["generate", "-m", &model, "7 bot", "-n", "8", "--temperature", "0"]);
    assert!(text.contains("tles of"), "{text}");
    let server = Server::start(&["--model", &model]);
    let ask = json!({ "prompt": "7 bot", "temperature": 0, "max_tokens": 8 });
    let answer = server.post("/v1/completions", &ask).json();
    assert_eq!(answer["choices"][0]["text"], text.trim_end_matches('\n'), "{answer}");
    drop(server);
    let inspected = common::json(&["inspect", &model, "--json"]);
    assert!(inspected.to_string().contains("llama"));

    let text = folder.file("text.txt").display().to_string();
    let shards = folder.file("shards").display().to_string();
    let ran = ridge(&["data", &text, "-o", &shards, "--tokenizer", &model]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(ran.stderr.contains("1 of 1 documents"), "{}", ran.stderr);
    let more = folder.file("more").display().to_string();
    let args = [
        "train",
        "--model.from",
        &model,
        "--data.train",
        &shards,
        "--data.sequence_length",
        "32",
        "--train.steps",
        "2",
        "--checkpoint.folder",
        &more,
        "--log.every",
        "1",
        "--validation.every",
        "0",
        "--train.precision",
        "bf16",
    ];
    let printed = stdout(&args);
    let loss: f64 = printed.split("loss ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
    assert!(loss < 2.2, "it goes on from what was learned: {printed}");
}

#[test]
fn data_reads_tables_archives_and_shards_of_other_software() {
    let folder = folder(1, 0);
    let shards = |name: &str| folder.file(name).display().to_string();
    let fixture = |name: &str| format!("{}/../../fixtures/documents/{name}", env!("CARGO_MANIFEST_DIR"));
    let files = ["snappy.parquet", "samples.tar", "shard.mds"].map(fixture);
    let all: Vec<&str> = files.iter().map(String::as_str).collect();
    for (duplicates, kept) in [("keep", "15 of 15 documents"), ("exact", "5 of 15 documents")] {
        let ran = ridge(&[&["data"], &all[..], &["-o", &shards(duplicates), "--duplicates", duplicates]].concat());
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        assert!(ran.stderr.contains(kept), "{}", ran.stderr);
    }
    let ran = ridge(&["data", &files[0], "-o", &shards("none"), "--text-field", "body"]);
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(ran.stderr.contains("there is no column body; it has id, text, score"), "{}", ran.stderr);
}

#[test]
fn data_filters_by_rules_and_language() {
    let folder = folder(1, 0);
    let english = "The ships had been waiting in the harbour since the beginning of winter. Nobody knew when they would leave. \
                   Then one morning the ice was gone.";
    let german = "Die Schiffe warteten seit dem Anfang des Winters im Hafen. Niemand wusste, wann sie ausfahren w\u{fc}rden. \
                  Dann war das Eis eines Morgens fort.";
    let lines =
        [english.to_owned(), german.to_owned(), "if (x) { return; }".to_owned(), format!("Menu\n{english}\nLogin")];
    let text: String = lines.iter().map(|text| json!({ "text": text }).to_string() + "\n").collect();
    folder.write("a.jsonl", text);
    let [input, output] = ["a.jsonl", "out"].map(|name| folder.file(name).display().to_string());
    let ran = ridge(&["data", &input, "-o", &output, "--c4", "--repetition", "--language", "en"]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    for said in ["left out 1: another language", "left out 1: braces", "left out 1: duplicate", "1 of 4 documents"] {
        assert!(ran.stderr.contains(said), "{said}: {}", ran.stderr);
    }
    folder.write("words", "frozen sea\nANFANG\n");
    folder.write("more", "Login\n");
    let [words, more, second] = ["words", "more", "second"].map(|name| folder.file(name).display().to_string());
    let lists = ["--blocklist", &words, "--blocklist", &more];
    let ran = ridge(&[&["data", &input, "-o", &second], &lists[..]].concat());
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(
        ran.stderr.contains("left out 2: words of the blocklist") && ran.stderr.contains("2 of 4"),
        "{}",
        ran.stderr
    );
    let refused = ridge(&["data", &input, "-o", &output, "--language", "elvish"]);
    assert_eq!(refused.code, 2, "{}", refused.stderr);
    assert!(refused.stderr.contains("ISO 639-3"), "{}", refused.stderr);
}

#[test]
fn a_configuration_with_infinity_is_trained_and_written_as_python_reads_it() {
    let folder = folder(1, 1);
    let fixture =
        std::fs::read_to_string(common::repository().join("fixtures/families/nemotron_h/config.json")).unwrap();
    let mut config = parsed(&fixture);
    let keys = config.as_object_mut().unwrap();
    keys.retain(|key, _| !["vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"].contains(&key.as_str()));
    keys.insert("time_step_limit".to_owned(), json!([0.0, "LIMIT"]));
    folder.write("config.json", config.to_string().replace("\"LIMIT\"", "Infinity"));
    stdout(&["train", &run_file(&folder), "-t", "1"]);
    for written in ["run/model/config.json", "run/checkpoints/step-00000001/config.json"] {
        let text = std::fs::read_to_string(folder.file(written)).unwrap();
        let compact: String = text.split_whitespace().collect();
        assert!(compact.contains("\"time_step_limit\":[0.0,Infinity]"), "{written}: {text}");
    }
    // What was exported is evaluated, whatever the steps; it is trained on, and the checkpoint is resumed.
    let perplexity = |chunk: &str| {
        let text = folder.file("text.txt").display().to_string();
        let model = folder.file("run/model").display().to_string();
        let args = ["eval", "--json", "-q", "-m", &model, "--perplexity", &text, "--context", "64", "--stride", "32"];
        common::json(&[&args[..], &["--chunk", chunk]].concat())["perplexity"].as_f64().unwrap()
    };
    let (whole, in_parts) = (perplexity("512"), perplexity("7"));
    assert!((1.0..1e3).contains(&whole) && (whole / in_parts - 1.0).abs() < 1e-4, "{whole} and {in_parts}");
    let model = folder.file("run/model").display().to_string();
    let file = run_file(&folder);
    folder.edit("run.toml", |text| text.replace("steps = 1", "steps = 2"));
    stdout(&["train", &file, "-t", "1"]);
    folder.edit("run.toml", |text| {
        let config = format!("config = {:?}", folder.file("config.json").display().to_string());
        text.replace(&config, &format!("from = {model:?}")).replace("vocabulary = \"characters\"\n", "")
    });
    let other = folder.file("other").display().to_string();
    stdout(&["train", &file, "-t", "1", "--checkpoint.folder", &other]);
}

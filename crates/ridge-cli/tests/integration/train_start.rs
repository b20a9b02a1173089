//! `ridge train` before its first step: memory that is not there, and signals.

use std::net::{TcpListener, TcpStream};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use crate::common::{Folder, Ran, command, ran, ridge};
use crate::train::{folder, run_file};

/// A configuration of a Llama of this hidden size.
fn config(hidden: usize) -> String {
    format!(
        r#"{{"model_type": "llama", "hidden_size": {hidden}, "intermediate_size": {}, "num_hidden_layers": 2,
        "num_attention_heads": 64, "num_key_value_heads": 64, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": false}}"#,
        4 * hidden
    )
}

fn start(args: &[&str]) -> Child {
    command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn signal(child: &Child, name: &str) {
    let id = child.id().to_string();
    assert!(std::process::Command::new("kill").args([name, &id]).status().unwrap().success());
}

/// What the process left, which must end within this time.
fn ended_within(mut child: Child, most: Duration) -> Ran {
    let began = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if began.elapsed() > most {
            child.kill().unwrap();
            panic!("still runs after {most:?}: {}", ran(child.wait_with_output().unwrap()).stderr);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    ran(child.wait_with_output().unwrap())
}

fn stopped_without_a_trace(folder: &Folder, child: Child) {
    let ran = ended_within(child, Duration::from_secs(20));
    assert_eq!((ran.code, &*ran.stdout), (0, ""), "{}", ran.stderr);
    assert_eq!(ran.stderr, "stopped before the first step; nothing was saved\n");
    assert!(!folder.file("run").exists(), "{:?}", folder.file("run"));
}

#[test]
fn a_run_that_does_not_fit_into_memory_is_refused_before_anything_is_made() {
    if !cfg!(target_os = "linux") {
        ridge_testing::skip!("the system does not say how much memory is free");
    }
    let folder = folder(2, 0);
    // No machine has memory for it.
    folder.write("config.json", config(1 << 19));
    let refused = ridge(&["train", &run_file(&folder), "-t", "1"]);
    assert_eq!(refused.code, 1, "{}", refused.stderr);
    let wanted =
        ["the run needs ", " TiB of memory, ", " is available to this process: weights, gradients and optimizer take "];
    assert!(wanted.iter().all(|wanted| refused.stderr.contains(wanted)), "{}", refused.stderr);
    assert!(refused.stderr.contains("optimizer.name = \"adamw8bit\""), "{}", refused.stderr);
    assert!(!folder.file("run").exists());
}

/// Bytes of memory that the process has touched.
fn resident(child: &Child) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? << 10)
}

#[test]
fn signals_end_a_run_whose_weights_are_being_made() {
    if !cfg!(target_os = "linux") {
        ridge_testing::skip!("there is no /proc to see by that weights are made");
    }
    let folder = folder(100_000, 0);
    // Half a GiB of weights; a step is not reached.
    folder.write("config.json", config(2048));
    for name in ["-TERM", "-USR1", "-INT"] {
        let child = start(&["train", &run_file(&folder)]);
        let deadline = Instant::now() + Duration::from_secs(60);
        while resident(&child).expect("is told") < 150 << 20 {
            assert!(Instant::now() < deadline, "no weight was made");
            std::thread::sleep(Duration::from_millis(2));
        }
        signal(&child, name);
        stopped_without_a_trace(&folder, child);
    }
}

/// A run that waits for a server, which has accepted its request and does not answer.
fn waiting(folder: &Folder, server: &TcpListener) -> (Child, TcpStream) {
    let address = format!("https://{}/text.jsonl", server.local_addr().unwrap());
    let child = start(&["train", &run_file(folder), "-t", "1", "--data.train", &address]);
    let (connection, _) = server.accept().unwrap();
    (child, connection)
}

#[test]
fn signals_end_a_run_that_waits_for_data() {
    let (folder, server) = (folder(2, 0), TcpListener::bind("127.0.0.1:0").unwrap());
    for name in ["-TERM", "-USR1", "-INT"] {
        let (child, _connection) = waiting(&folder, &server);
        signal(&child, name);
        stopped_without_a_trace(&folder, child);
    }
}

#[test]
fn a_second_ctrl_c_ends_the_process_at_once() {
    let (folder, server) = (folder(2, 0), TcpListener::bind("127.0.0.1:0").unwrap());
    // The first ends it half a second later, which a loaded machine may sleep through.
    let ended_at_once = (0..10).any(|_| {
        let (child, _connection) = waiting(&folder, &server);
        signal(&child, "-INT");
        std::thread::sleep(Duration::from_millis(100));
        signal(&child, "-INT");
        let ran = ended_within(child, Duration::from_secs(20));
        assert!(matches!((ran.code, &*ran.stderr), (130, "") | (0, _)), "{}: {}", ran.code, ran.stderr);
        ran.code == 130
    });
    assert!(ended_at_once);
    // One behind SIGTERM is the first.
    let (child, _connection) = waiting(&folder, &server);
    signal(&child, "-TERM");
    std::thread::sleep(Duration::from_millis(100));
    signal(&child, "-INT");
    stopped_without_a_trace(&folder, child);
}

#[test]
fn a_run_that_continues_is_stopped_before_its_first_step_as_well() {
    let (folder, server) = (folder(2, 0), TcpListener::bind("127.0.0.1:0").unwrap());
    assert_eq!(ridge(&["train", &run_file(&folder), "-t", "1"]).code, 0);
    let files = || {
        let mut files: Vec<_> =
            folder.file("run/checkpoints").read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        (files, std::fs::read(folder.file("run/log.jsonl")).unwrap())
    };
    let before = files();
    let (child, _connection) = waiting(&folder, &server);
    signal(&child, "-TERM");
    let ran = ended_within(child, Duration::from_secs(2));
    assert_eq!((ran.code, &*ran.stderr), (0, "stopped before the first step; nothing was saved\n"));
    assert_eq!(files(), before);
}

#[test]
fn quantised_weights_are_refused_with_a_conversion_that_works_and_without_a_trace() {
    let folder = folder(2, 0);
    let (model, file, plain) = (
        crate::common::repository().join("models/stories260K").display().to_string(),
        folder.file("q8.gguf").display().to_string(),
        folder.file("plain").display().to_string(),
    );
    assert_eq!(ridge(&["quantize", &model, &file, "--format", "q8_0"]).code, 0);
    folder.edit("run.toml", |text| {
        let kept = text.lines().filter(|line| !line.starts_with("config =") && !line.starts_with("vocabulary ="));
        kept.map(|line| format!("{line}\n")).collect()
    });
    let train = |from: &str| ridge(&["train", &run_file(&folder), "-t", "1", "--model.from", from]);
    let refused = train(&file);
    let says = format!("is quantised; convert it to a folder of plain weights with `ridge convert {file} FOLDER`");
    assert!(refused.code == 1 && refused.stderr.contains(&says), "{}", refused.stderr);
    assert!(!folder.file("run").exists());
    let converted = ridge(&["convert", &file, &plain]);
    assert_eq!(converted.code, 0, "{}", converted.stderr);
    let trained = train(&plain);
    assert_eq!(trained.code, 0, "{}", trained.stderr);
}

#[test]
fn a_run_that_fails_before_its_first_step_leaves_no_empty_folder() {
    let (folder, model) = (folder(2, 0), Folder::stories());
    folder.edit("run.toml", |text| {
        let kept = text.lines().filter(|line| !line.starts_with("config =") && !line.starts_with("vocabulary ="));
        kept.map(|line| format!("{line}\n")).collect()
    });
    let mut weights = std::fs::read(model.file("model.safetensors")).unwrap();
    let header = u64::from_le_bytes(weights[..8].try_into().unwrap()) as usize;
    weights[8 + header..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
    model.write("model.safetensors", weights);
    let within = folder.file("a/b/run").display().to_string();
    let args = ["train", &run_file(&folder), "-t", "1", "--model.from", model.path(), "--checkpoint.folder", &within];
    let refused = ridge(&args);
    assert!(refused.code == 1 && refused.stderr.contains("holds NaN at element 0"), "{}", refused.stderr);
    assert!(!folder.file("a").exists());
}

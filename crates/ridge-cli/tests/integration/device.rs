//! `--device`: a device that is asked for is used, or the command fails. Without a GPU, `cuda` fails alike everywhere.

use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::common::server::Server;
use crate::common::{Ran, command, ran, repository, ridge, stdout};

fn bert() -> String {
    repository().join("fixtures/families/bert").display().to_string()
}

/// Runs a command that may turn out to be a server, which fails the test.
#[track_caller]
fn ends(args: &[&str]) -> Ran {
    let mut child = command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            child.kill().unwrap();
            let output = child.wait_with_output().unwrap();
            panic!("{args:?} runs on: {}", String::from_utf8_lossy(&output.stderr));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    ran(child.wait_with_output().unwrap())
}

/// Why this machine has no GPU that Ridge can use, as `ridge generate` says it.
fn no_gpu() -> Option<String> {
    let ran = ridge(&["generate", "--device", "cuda", "--max-tokens", "1", "--quiet"]);
    (ran.code != 0).then(|| {
        assert_eq!(ran.code, 1, "{}", ran.stderr);
        ran.stderr
    })
}

#[test]
fn without_a_gpu_every_command_that_takes_cuda_fails_alike() {
    let Some(why) = no_gpu() else { ridge_testing::skip!("there is a GPU") };
    // The backend names what is missing.
    assert!(why.starts_with("error: cuda: "), "{why}");
    let (bert, vit) = (bert(), repository().join("fixtures/families/vit").display().to_string());
    let image = format!("{vit}/gray.png");
    for args in [
        &["embed", "--device", "cuda", "--quiet", "a text"][..],
        &["embed", "--device", "cuda", "--quiet", "--pooling", "mean", "--random-weights", "a text"],
        &["classify", "--device", "cuda", "--model", &vit, &image],
        &["bench", "--device", "cuda"],
        &["generate", "--device", "cuda:0"],
        &["serve", "--device", "cuda", "--port", "0"],
        &["serve", "--device", "cuda", "--dry-run"],
        &["serve", "--device", "cuda", "--port", "0", "--model", &bert],
        &["serve", "--device", "cuda", "--dry-run", "--model", &bert],
    ] {
        let ran = ends(args);
        assert_eq!((ran.code, ran.stdout.as_str(), ran.stderr.as_str()), (1, "", why.as_str()), "{args:?}");
    }
}

#[test]
fn a_limit_of_gpu_memory_is_a_size_and_needs_a_gpu() {
    for command in ["generate", "bench", "serve"] {
        for (size, wanted) in [
            ("24", "add its unit"),
            ("lots", "is not a number with a unit"),
            ("0GiB", "must be above 0"),
            ("24GiB", "has no memory of its own to limit; leave --gpu-memory out"),
        ] {
            let ran = ends(&[command, "--gpu-memory", size]);
            assert_eq!((ran.code, ran.stdout.as_str()), (2, ""), "{command} {size}: {}", ran.stderr);
            assert!(ran.stderr.contains(wanted), "{command} {size}: {}", ran.stderr);
        }
    }
}

/// A new command that takes `--device` belongs into the test above.
#[test]
fn commands_that_take_a_device_are_listed_above() {
    let help = stdout(&["--help"]);
    let listed = help.split_once("Commands:\n").unwrap().1.split_once("\n\n").unwrap().0;
    let names = listed.lines().filter_map(|line| line.split_whitespace().next()).filter(|name| *name != "help");
    let mut taking: Vec<&str> = names.filter(|name| stdout(&[name, "--help"]).contains("--device <DEVICE>")).collect();
    taking.sort_unstable();
    assert_eq!(taking, ["bench", "classify", "embed", "generate", "serve", "train"]);
}

#[test]
fn vectors_of_an_encoder_on_a_gpu_are_those_of_the_cpu() {
    if let Some(why) = no_gpu() {
        ridge_testing::skip!("{}", why.trim());
    }
    let bert = bert();
    let vectors = |device: &str| -> Vec<Vec<f64>> {
        let server = Server::start(&["--model", &bert, "--device", device]);
        let answer = server.post("/v1/embeddings", &json!({ "input": [[1, 2, 3, 4], [5, 6], [7]] }));
        assert_eq!(answer.status, 200, "{}", answer.text());
        let data = answer.json()["data"].as_array().unwrap().clone();
        let numbers = |v: &Value| v["embedding"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
        data.iter().map(numbers).collect()
    };
    let (on_cpu, on_gpu) = (vectors("cpu"), vectors("cuda"));
    assert_eq!(on_cpu.len(), 3);
    for (a, b) in on_cpu.iter().zip(&on_gpu) {
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
        let cosine = dot(a, b) / (dot(a, a) * dot(b, b)).sqrt();
        assert!(cosine > 0.9999, "cosine {cosine}");
    }
}

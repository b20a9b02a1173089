//! `ridge train` and the servers that it reports a run to.

use std::path::Path;

use ridge_testing::{JsonReply, JsonRequest, JsonServer};
use serde_json::{Value, json};

use crate::common::{Folder, Ran, command, ran};
use crate::train::{folder, run_file};

const SECRETS: [(&str, &str); 3] = [
    ("MLFLOW_TRACKING_USERNAME", "somebody"),
    ("MLFLOW_TRACKING_PASSWORD", "secret-password"),
    ("WANDB_API_KEY", "secret-key"),
];

/// A run of four steps that is reported to both servers at `url`.
fn trained(folder: &Folder, url: &str, secrets: &[(&str, &str)], more: &[&str]) -> Ran {
    let file = run_file(folder);
    let keys = ["train", &file, "-t", "1", "--log.every", "1", "--log.mlflow", url, "--log.wandb", "project"];
    let mut command = command(&[&keys[..], more].concat());
    for name in ["WANDB_MODE", "WANDB_ENTITY", "NETRC", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_TRACKING_TOKEN"] {
        command.env_remove(name);
    }
    for (name, _) in SECRETS {
        command.env_remove(name);
    }
    let environment = [("HOME", folder.path()), ("WANDB_BASE_URL", url)];
    ran(command.envs(environment).envs(secrets.iter().copied()).output().unwrap())
}

/// Both servers in one.
fn answer(request: &JsonRequest) -> JsonReply {
    let (status, body) = match request.target.split('?').next().unwrap() {
        "/api/2.0/mlflow/experiments/get-by-name" => (200, json!({ "experiment": { "experiment_id": "1" } })),
        "/api/2.0/mlflow/runs/create" => (200, json!({ "run": { "info": { "run_id": "r" }, "data": {} } })),
        "/graphql" => {
            let project = json!({ "name": "project", "entity": { "name": "us" } });
            (200, json!({ "data": { "upsertBucket": { "bucket": { "project": project }, "inserted": true } } }))
        }
        _ => (200, json!({})),
    };
    JsonReply::Body(status, body.to_string())
}

fn sent(server: &JsonServer, target: &str) -> Vec<Value> {
    let requests = server.seen().into_iter().filter(|request| request.target.ends_with(target));
    requests.map(|request| serde_json::from_str(&request.body).unwrap()).collect()
}

/// Whether a file in the folder, or in one within it, has the text.
fn has(folder: &Path, text: &str) -> bool {
    folder.read_dir().unwrap().any(|entry| {
        let path = entry.unwrap().path();
        let found = |bytes: Vec<u8>| bytes.windows(text.len()).any(|window| window == text.as_bytes());
        if path.is_dir() { has(&path, text) } else { found(std::fs::read(&path).unwrap()) }
    })
}

#[test]
fn both_servers_get_a_run_and_no_secret_is_left_anywhere() {
    let (folder, server) = (folder(4, 2), JsonServer::start(|request, _| answer(request)));
    let ran = trained(&folder, &server.url(), &SECRETS, &[]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let metrics: Vec<Value> = sent(&server, "log-batch")
        .iter()
        .flat_map(|body| body["metrics"].as_array().cloned().unwrap_or_default())
        .filter(|metric| metric["key"] == "train/loss")
        .collect();
    let lines: Vec<Value> = sent(&server, "file_stream")
        .iter()
        .flat_map(|body| body["files"]["wandb-history.jsonl"]["content"].as_array().cloned().unwrap_or_default())
        .map(|line| serde_json::from_str(line.as_str().unwrap()).unwrap())
        .collect();
    let log = std::fs::read_to_string(folder.file("run/log.jsonl")).unwrap();
    let steps: Vec<Value> =
        log.lines().map(|line| serde_json::from_str(line).unwrap()).filter(|e: &Value| e["event"] == "step").collect();
    assert_eq!((steps.len(), metrics.len(), lines.len()), (4, 4, 4));
    for ((step, metric), line) in steps.iter().zip(&metrics).zip(&lines) {
        assert_eq!((&metric["value"], &metric["step"]), (&step["loss"], &step["step"]));
        assert_eq!((&line["train/loss"], &line["_step"]), (&step["loss"], &step["step"]));
    }
    assert_eq!(sent(&server, "runs/update").last().unwrap()["status"], "FINISHED");
    assert_eq!(sent(&server, "file_stream").last().unwrap(), &json!({ "complete": true, "exitcode": 0 }));
    assert!(
        ran.stderr.contains("/us/project/runs/") && ran.stderr.contains("/#/experiments/1/runs/r"),
        "{}",
        ran.stderr
    );
    assert!(!ran.stderr.contains("not delivered"), "{}", ran.stderr);
    for secret in ["secret-password", "secret-key"] {
        assert!(!ran.stderr.contains(secret) && !ran.stdout.contains(secret), "{}", ran.stderr);
        assert!(!has(Path::new(folder.path()), secret), "{secret} is in a file");
    }
}

#[test]
fn a_run_whose_servers_are_gone_ends_as_any_other_and_says_what_they_lack() {
    let (folder, without) = (folder(4, 0), folder(4, 0));
    // Nobody listens on a port that was just given back.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let url = format!("http://127.0.0.1:{port}");
    let ran = trained(&folder, &url, &SECRETS, &[]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    for server in ["MLflow", "W&B"] {
        let missing = format!("{server} at {url}: 4 of 4 reports were not delivered (");
        assert!(ran.stderr.contains(&missing), "{}", ran.stderr);
    }
    assert!(ran.stderr.contains("run/mlruns") && ran.stderr.contains("`wandb sync "), "{}", ran.stderr);
    crate::common::stdout(&["train", &run_file(&without), "-t", "1"]);
    let state = |folder: &Folder| std::fs::read(folder.file("run/model/model.safetensors")).unwrap();
    assert!(state(&folder) == state(&without), "the weights differ");
}

/// What others have learnt of a run has an end, though training never begins.
#[test]
fn servers_learn_of_a_run_that_fails_while_it_starts() {
    let (folder, server) = (folder(2, 0), JsonServer::start(|request, _| answer(request)));
    crate::common::stdout(&["train", &run_file(&folder), "-t", "1"]);
    let ran = trained(&folder, &server.url(), &SECRETS, &["--train.seed", "77"]);
    assert!(ran.code != 0 && ran.stderr.contains("seed"), "{}", ran.stderr);
    assert_eq!(sent(&server, "runs/update").last().unwrap()["status"], "FAILED", "{}", ran.stderr);
    assert_eq!(sent(&server, "file_stream").last().unwrap(), &json!({ "complete": true, "exitcode": 1 }));
}

#[test]
fn without_a_key_a_run_is_written_offline() {
    let (folder, server) = (folder(2, 0), JsonServer::start(|request, _| answer(request)));
    let ran = trained(&folder, &server.url(), &[], &[]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let wanted =
        "W&B: WANDB_API_KEY is not set, and no netrc file has a key of 127.0.0.1, so the run is written offline";
    assert!(ran.stderr.contains(wanted), "{}", ran.stderr);
    assert!(server.seen().iter().all(|request| request.target.contains("mlflow") && request.authorization.is_none()));
}

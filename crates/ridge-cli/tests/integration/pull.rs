//! `ridge pull`, and models called by their names on the Hub.

use std::path::Path;

use ridge_testing::{HubFaults, HubServer};
use tempfile::TempDir;

use crate::common::server::Server;
use crate::common::{Ran, command, ran, repository, stdout};

/// A server with the model of `models/stories260K`, and an empty cache.
struct Hub {
    server: HubServer,
    cache: TempDir,
}

impl Hub {
    fn start() -> Self {
        let folder = repository().join("models/stories260K").read_dir().unwrap();
        let files = folder.map(|file| {
            let path = file.unwrap().path();
            (path.file_name().unwrap().to_str().unwrap().to_owned(), std::fs::read(path).unwrap())
        });
        let server = HubServer::start("org/stories", files, HubFaults::default());
        Self { server, cache: tempfile::tempdir().unwrap() }
    }

    fn environment(&self) -> [(&'static str, String); 2] {
        [("HF_ENDPOINT", self.server.endpoint()), ("HF_HUB_CACHE", self.cache.path().display().to_string())]
    }

    fn ridge(&self, args: &[&str]) -> Ran {
        ran(command(args).envs(self.environment()).env_remove("HF_TOKEN").output().unwrap())
    }
}

#[test]
fn a_pulled_model_is_run_by_its_name() {
    let hub = Hub::start();
    let before = hub.ridge(&["generate", "-m", "org/stories", "--greedy"]);
    assert_eq!(before.code, 1);
    assert!(before.stderr.contains("run `ridge pull org/stories` to download it"), "{}", before.stderr);

    let prompt = hub.ridge(&["generate", "org/stories", "--greedy", "-n", "5"]);
    assert!(prompt.code == 0 && prompt.stderr.contains("give -m org/stories"), "{}", prompt.stderr);
    let pulled = hub.ridge(&["pull", "org/stories"]);
    assert_eq!(pulled.code, 0, "{}", pulled.stderr);
    let folder = Path::new(pulled.stdout.trim());
    assert!(folder.starts_with(hub.cache.path()) && folder.join("model.safetensors").exists());
    assert!(pulled.stderr.starts_with("org/stories: ") && pulled.stderr.contains("downloaded"), "{}", pulled.stderr);

    let story = stdout(&["generate", "--greedy", "-n", "20"]);
    for args in [["generate", "-m", "org/stories"], ["generate", "--model", "org/stories@main"]] {
        assert_eq!(hub.ridge(&[&args[..], &["--greedy", "-n", "20"]].concat()).stdout, story);
    }
    assert_eq!(hub.ridge(&["generate", "org/stories", "--greedy", "-n", "20"]).stdout, story);
    for args in [&["inspect", "org/stories"][..], &["plan", "fit", "org/stories"], &["tokenize", "org/stories", "Once"]]
    {
        let ran = hub.ridge(args);
        assert_eq!(ran.code, 0, "{args:?}: {}", ran.stderr);
    }
    let again = hub.ridge(&["pull", "org/stories", "--json"]);
    let again: serde_json::Value = serde_json::from_str(&again.stdout).unwrap();
    assert_eq!((&again["downloaded"], again["folder"].as_str().unwrap()), (&0.into(), folder.to_str().unwrap()));
}

#[test]
fn a_server_calls_a_pulled_model_by_its_name() {
    let hub = Hub::start();
    assert_eq!(hub.ridge(&["pull", "org/stories", "-q"]).code, 0);
    let environment = hub.environment();
    let environment = environment.each_ref().map(|(name, value)| (*name, value.as_str()));
    let server = Server::start_with(&["--model", "org/stories"], &environment);
    assert_eq!(server.get("/v1/models").json()["data"][0]["id"], "org/stories");
}

#[test]
fn what_cannot_be_pulled_is_said_with_what_to_do() {
    let hub = Hub::start();
    for (args, code, said) in [
        (&["pull", "stories"][..], 2, "stories is not the name of a model on the Hugging Face Hub; give ORG/NAME"),
        (&["pull", "org/stories", "--revision", "../x"], 2, "is not a valid revision"),
        (&["pull", "org/stories@v3"], 1, "there is no revision v3"),
        (&["pull", "org/none"], 1, "has no such model, or it is not visible without a token (HF_TOKEN)"),
        (&["pull", "org/stories", "--include", "*.gguf"], 1, "no file matches; its files are"),
    ] {
        let ran = hub.ridge(args);
        assert_eq!(ran.code, code, "{args:?}: {}", ran.stderr);
        assert!(ran.stderr.contains(said), "{args:?}: {}", ran.stderr);
    }
    let offline = command(&["pull", "org/stories"]).envs(hub.environment()).env("HF_HUB_OFFLINE", "1").output();
    let offline = ran(offline.unwrap());
    assert!(offline.code == 1 && offline.stderr.contains("HF_HUB_OFFLINE is set"), "{}", offline.stderr);
    let wrong = ran(command(&["pull", "org/stories"]).env("HF_ENDPOINT", "hub").output().unwrap());
    assert!(wrong.code == 2 && wrong.stderr.contains("HF_ENDPOINT = \"hub\""), "{}", wrong.stderr);
}

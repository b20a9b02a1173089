//! Downloads from a local server with the Hub's endpoints.

use std::path::Path;
use std::time::Duration;

use ridge_hub::{HubCache, HubError, HubSettings, PullObserver, PullRequest, Pulled, pull};
use ridge_testing::{HubFaults, HubServer};

const MODEL: &str = "org/model";

fn files() -> Vec<(String, Vec<u8>)> {
    let shard =
        |seed: u32| (0..300_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8 ^ seed as u8).collect();
    [
        ("README.md", b"read me".to_vec()),
        ("config.json", b"{\"model_type\": \"llama\"}".to_vec()),
        ("model.safetensors.index.json", b"{}".to_vec()),
        ("model-00001-of-00002.safetensors", shard(1)),
        ("model-00002-of-00002.safetensors", shard(2)),
        ("1_Pooling/config.json", b"{\"pooling\": \"mean\"}".to_vec()),
    ]
    .map(|(name, content)| (name.to_owned(), content))
    .into()
}

fn settings(server: &HubServer, cache: &Path) -> HubSettings {
    HubSettings {
        endpoint: server.endpoint(),
        token: None,
        offline: false,
        cache: HubCache::new(cache),
        timeout: Duration::from_secs(20),
        authorities: None,
    }
}

fn request() -> PullRequest {
    PullRequest::new(MODEL.parse().unwrap())
}

/// Are all files but the README there, as the server has them?
fn assert_complete(pulled: &Pulled) {
    for (name, content) in files().into_iter().filter(|(name, _)| name != "README.md") {
        let path = pulled.folder.join(&name);
        assert!(std::fs::read_link(&path).unwrap().is_relative(), "{name}");
        assert!(std::fs::read(&path).unwrap() == content, "{name}");
    }
    assert!(!pulled.folder.join("README.md").exists());
    let blobs = pulled.folder.join("../../blobs").read_dir().unwrap();
    assert!(blobs.flatten().all(|e| !e.file_name().to_string_lossy().ends_with(".incomplete")));
}

#[test]
fn what_is_pulled_is_found_by_name_and_not_pulled_again() {
    #[derive(Default)]
    struct Last(u64, u64);
    impl PullObserver for Last {
        fn chosen(&mut self, _: usize, bytes: u64) {
            self.0 = bytes;
        }
        fn at(&mut self, bytes: u64) {
            self.1 = bytes;
        }
    }
    let cache = tempfile::tempdir().unwrap();
    let server = HubServer::start(MODEL, files(), HubFaults::default());
    let settings = settings(&server, cache.path());
    let mut last = Last::default();
    let pulled = pull(&request(), &settings, &mut last).unwrap();
    assert_complete(&pulled);
    assert_eq!((pulled.files, pulled.downloaded, pulled.commit.as_str()), (5, 5, server.commit()));
    assert_eq!((last.0, last.1), (pulled.bytes, pulled.bytes));
    assert_eq!(settings.cache.find(&request().model).unwrap(), pulled.folder);

    let asked = server.seen().len();
    let again = pull(&request(), &settings, &mut ()).unwrap();
    assert_eq!((again.downloaded, &again.folder), (0, &pulled.folder));
    assert_eq!(server.seen().len(), asked + 1, "the list of files alone");

    // Nothing is written, so that the cache may be read-only.
    let reference = cache.path().join("models--org--model/refs/main");
    let with_newline = format!("{}\n", pulled.commit);
    std::fs::write(&reference, &with_newline).unwrap();
    pull(&request(), &settings, &mut ()).unwrap();
    assert_eq!(std::fs::read_to_string(&reference).unwrap(), with_newline);

    let offline = HubSettings { offline: true, endpoint: "http://127.0.0.1:9".to_owned(), ..settings.clone() };
    assert_eq!(pull(&request(), &offline, &mut ()).unwrap().folder, pulled.folder);
    let other = PullRequest::new("org/other".parse().unwrap());
    assert!(matches!(pull(&other, &offline, &mut ()), Err(HubError::Offline { .. })));
}

#[test]
fn a_download_continues_where_the_connection_ended() {
    let cache = tempfile::tempdir().unwrap();
    let server = HubServer::start(MODEL, files(), HubFaults { cut_after: Some(200_000), ..HubFaults::default() });
    assert_complete(&pull(&request(), &settings(&server, cache.path()), &mut ()).unwrap());
    assert!(server.seen().iter().any(|seen| seen.range.as_deref() == Some("bytes=200000-")));
}

#[test]
fn a_download_continues_what_an_earlier_command_left() {
    for without_ranges in [false, true] {
        let cache = tempfile::tempdir().unwrap();
        let server = HubServer::start(MODEL, files(), HubFaults { without_ranges, ..HubFaults::default() });
        let settings = settings(&server, cache.path());
        let pulled = pull(&request(), &settings, &mut ()).unwrap();
        let link = pulled.folder.join("model-00001-of-00002.safetensors");
        let blob = link.canonicalize().unwrap();
        let content = std::fs::read(&blob).unwrap();
        std::fs::remove_file(&blob).unwrap();
        let incomplete = blob.with_extension("incomplete");
        std::fs::write(&incomplete, &content[..123_456]).unwrap();
        let again = pull(&request(), &settings, &mut ()).unwrap();
        assert_eq!(again.downloaded, 1);
        assert_complete(&again);
        assert!(server.seen().iter().any(|seen| seen.range.as_deref() == Some("bytes=123456-")));
    }
}

#[test]
fn a_file_is_downloaded_anew_if_an_earlier_command_left_wrong_bytes() {
    let cache = tempfile::tempdir().unwrap();
    let server = HubServer::start(MODEL, files(), HubFaults::default());
    let settings = settings(&server, cache.path());
    let pulled = pull(&request(), &settings, &mut ()).unwrap();
    let blob = pulled.folder.join("model-00001-of-00002.safetensors").canonicalize().unwrap();
    std::fs::remove_file(&blob).unwrap();
    std::fs::write(blob.with_extension("incomplete"), vec![7; 123_456]).unwrap();
    let again = pull(&request(), &settings, &mut ()).unwrap();
    assert_eq!(again.downloaded, 1);
    assert_complete(&again);
}

#[test]
fn a_server_that_is_busy_is_asked_again() {
    let cache = tempfile::tempdir().unwrap();
    let server = HubServer::start(MODEL, files(), HubFaults { unavailable: 3, ..HubFaults::default() });
    assert_complete(&pull(&request(), &settings(&server, cache.path()), &mut ()).unwrap());
    let cache = tempfile::tempdir().unwrap();
    server.set_faults(HubFaults { unavailable: 1000, ..HubFaults::default() });
    let said = pull(&request(), &settings(&server, cache.path()), &mut ()).unwrap_err().to_string();
    assert!(said.contains("503 Service Unavailable (5 attempts); run the command again"), "{said}");
}

#[test]
fn wrong_content_is_deleted_and_named() {
    let cache = tempfile::tempdir().unwrap();
    let server = HubServer::start(MODEL, files(), HubFaults { corrupt: true, ..HubFaults::default() });
    let settings = settings(&server, cache.path());
    let error = pull(&request(), &settings, &mut ()).unwrap_err();
    assert!(matches!(&error, HubError::Checksum { file, .. } if file.ends_with(".safetensors")), "{error}");
    assert!(settings.cache.find(&request().model).is_err(), "an incomplete model is not found");
    server.set_faults(HubFaults::default());
    assert_complete(&pull(&request(), &settings, &mut ()).unwrap());
}

#[test]
fn the_token_is_sent_to_the_hub_alone() {
    let cache = tempfile::tempdir().unwrap();
    let server =
        HubServer::start(MODEL, files(), HubFaults { token: Some("secret".to_owned()), ..HubFaults::default() });
    let settings = settings(&server, cache.path());
    assert!(matches!(pull(&request(), &settings, &mut ()), Err(HubError::Gated { .. })));
    let settings = HubSettings { token: Some("secret".to_owned()), ..settings };
    assert_complete(&pull(&request(), &settings, &mut ()).unwrap());
    let (storage, hub): (Vec<_>, Vec<_>) = server.seen().into_iter().partition(|s| s.target.starts_with("/storage"));
    assert!(storage.len() == 2 && storage.iter().all(|seen| seen.authorization.is_none()), "{storage:?}");
    assert!(hub.iter().skip(1).all(|seen| seen.authorization.as_deref() == Some("Bearer secret")));
}

#[test]
fn revisions_and_models_that_are_not_there_are_named() {
    let cache = tempfile::tempdir().unwrap();
    let server = HubServer::start(MODEL, files(), HubFaults::default());
    let settings = settings(&server, cache.path());
    let pull = |name: &str| pull(&PullRequest::new(name.parse().unwrap()), &settings, &mut ());
    for revision in ["v1", "refs/pr/7", server.commit()] {
        let name = format!("{MODEL}@{revision}");
        let pulled = pull(&name).unwrap();
        assert_eq!(settings.cache.find(&name.parse().unwrap()).unwrap(), pulled.folder);
    }
    let said = pull("org/model@v2").unwrap_err().to_string();
    assert!(said.starts_with("org/model: there is no revision v2;"), "{said}");
    let said = pull("org/other").unwrap_err().to_string();
    assert!(said.contains("has no such model, or it is not visible without a token"), "{said}");
    let refused = HubSettings { endpoint: "http://127.0.0.1:9/".to_owned(), ..settings.clone() };
    let error = ridge_hub::pull(&request(), &refused, &mut ()).unwrap_err();
    assert!(matches!(error, HubError::Request { .. }), "{error}");
}

#[test]
fn several_processes_may_pull_the_same_model() {
    let cache = tempfile::tempdir().unwrap();
    let server = HubServer::start(MODEL, files(), HubFaults { cut_after: Some(90_000), ..HubFaults::default() });
    let settings = settings(&server, cache.path());
    std::thread::scope(|scope| {
        let pulls = [(); 4].map(|()| scope.spawn(|| pull(&request(), &settings, &mut ()).unwrap()));
        let pulled = pulls.map(|pull| pull.join().unwrap());
        assert_eq!(pulled.iter().map(|p| p.downloaded).sum::<usize>(), 5);
        pulled.iter().for_each(assert_complete);
    });
}

#[test]
fn what_is_pulled_is_read_by_huggingface_hub() {
    let python = std::process::Command::new("python3").args(["-c", "import huggingface_hub"]).output();
    if !python.is_ok_and(|output| output.status.success()) {
        ridge_testing::skip!("python3 has no package huggingface_hub");
    }
    let cache = tempfile::tempdir().unwrap();
    let server = HubServer::start(MODEL, files(), HubFaults::default());
    let pulled = pull(&request(), &settings(&server, cache.path()), &mut ()).unwrap();
    let script = "import sys, huggingface_hub as h; print(h.snapshot_download('org/model', cache_dir=sys.argv[1]))";
    let mut python = std::process::Command::new("python3");
    let output = python.args(["-c", script]).arg(cache.path()).env("HF_HUB_OFFLINE", "1").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(Path::new(String::from_utf8_lossy(&output.stdout).trim()), pulled.folder);
}

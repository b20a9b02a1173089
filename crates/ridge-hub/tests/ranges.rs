//! Files at URLs, read in ranges of bytes from a local server.

use std::io::Read as _;
use std::time::Duration;

use ridge_hub::{HubCache, HubError, HubSettings, RangedFile};
use ridge_testing::{HubFaults, HubServer};

fn content(seed: u8, length: usize) -> Vec<u8> {
    (0..length).map(|i| (i % 251) as u8 ^ seed).collect()
}

fn server(faults: HubFaults) -> HubServer {
    let files = [("file".to_owned(), content(1, 50_000)), ("empty".to_owned(), Vec::new())];
    HubServer::start("org/data", files, faults)
}

fn settings(server: &HubServer) -> HubSettings {
    HubSettings {
        endpoint: server.endpoint(),
        token: None,
        offline: false,
        cache: HubCache::new("unused"),
        timeout: Duration::from_secs(20),
        authorities: None,
    }
}

fn open(server: &HubServer, file: &str) -> RangedFile {
    RangedFile::open(&format!("{}/storage/{file}", server.endpoint()), &settings(server)).expect("is there")
}

#[test]
fn a_file_that_changes_while_it_is_read_is_refused() {
    // Of another size and of the same.
    for other in [content(1, 50_001), content(2, 50_000)] {
        let server = server(HubFaults { cut_after: Some(20_000), ..HubFaults::default() });
        let file = open(&server, "file");
        assert_eq!(file.read(100, 50).expect("reads"), content(1, 50_000)[100..150]);
        let mut stream = file.stream(0);
        let mut front = vec![0; 20_000];
        stream.read_exact(&mut front).expect("reads");
        assert_eq!(front, content(1, 50_000)[..20_000]);

        server.put("file", other);
        let error = stream.read_to_end(&mut front).expect_err("is another file").to_string();
        assert!(error.contains("/storage/file: the file changed on the server"), "{error}");
        assert!(matches!(file.read(100, 50), Err(HubError::Changed { .. })));

        server.put("file", content(1, 50_000));
        assert_eq!(file.read(100, 50).expect("is the first one"), content(1, 50_000)[100..150]);
    }
    // Of a file that is now empty there is no range.
    let server = server(HubFaults::default());
    let file = open(&server, "file");
    server.put("file", Vec::new());
    assert!(matches!(file.read(0, 50), Err(HubError::Changed { .. })));
}

#[test]
fn an_empty_file_is_empty() {
    for without_ranges in [false, true] {
        let server = server(HubFaults { without_ranges, ..HubFaults::default() });
        let file = open(&server, "empty");
        assert_eq!((file.size(), file.read(0, 0).expect("reads")), (0, Vec::new()));
        let mut all = Vec::new();
        file.stream(0).read_to_end(&mut all).expect("reads");
        assert!(all.is_empty());
    }
}

#[test]
fn offline_no_server_is_asked() {
    let server = server(HubFaults::default());
    let url = format!("{}/storage/file", server.endpoint());
    let refused = RangedFile::open(&url, &HubSettings { offline: true, ..settings(&server) });
    let error = refused.err().expect("is offline").to_string();
    assert!(error.contains("HF_HUB_OFFLINE is set; unset it, or download the file"), "{error}");
    assert!(server.seen().is_empty());
}

//! A server with the endpoints of the Hugging Face Hub that downloads use: the files of a revision, and their content, that
//! of large files by redirection to another host, in parts where a request asks for them.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sha1::Sha1;
use sha2::{Digest as _, Sha256};

/// The commit of every revision.
const COMMIT: &str = "9f3a1c5e7b2d4068a1c3e5f70918273645abcdef";
/// Files from this size on are large ones, which have a SHA-256.
const LARGE: usize = 10_000;

/// What goes wrong.
#[derive(Clone, Debug, Default)]
pub struct HubFaults {
    /// Connections end after so many bytes of content.
    pub cut_after: Option<usize>,
    /// So many requests for content are answered with status 503 first.
    pub unavailable: usize,
    /// Content always begins at the first byte, whatever part is asked for.
    pub without_ranges: bool,
    /// One byte of the content of large files is wrong.
    pub corrupt: bool,
    /// Requests without this token are answered as the Hub does for restricted models.
    pub token: Option<String>,
}

/// A request that arrived.
#[derive(Clone, Debug)]
pub struct SeenRequest {
    /// The path, and the query.
    pub target: String,
    /// Of the header `authorization`.
    pub authorization: Option<String>,
    /// Of the header `range`.
    pub range: Option<String>,
    /// Of the header `host`.
    pub host: String,
}

struct State {
    model: String,
    files: BTreeMap<String, Vec<u8>>,
    faults: HubFaults,
    seen: Vec<SeenRequest>,
}

/// A server that runs as long as the test does.
pub struct HubServer {
    state: Arc<Mutex<State>>,
    port: u16,
}

impl HubServer {
    /// Serves one model, `ORG/NAME`, with these files by their paths.
    ///
    /// # Panics
    /// When no port can be opened.
    pub fn start(model: &str, files: impl IntoIterator<Item = (String, Vec<u8>)>, faults: HubFaults) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port of this machine");
        let port = listener.local_addr().expect("it is bound").port();
        let files = files.into_iter().collect();
        let state = Arc::new(Mutex::new(State { model: model.to_owned(), files, faults, seen: Vec::new() }));
        let shared = Arc::clone(&state);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = Arc::clone(&shared);
                // A client that leaves is its own business.
                std::thread::spawn(move || answer(&state, port, stream));
            }
        });
        Self { state, port }
    }

    /// The value of `HF_ENDPOINT`.
    pub fn endpoint(&self) -> String {
        format!("http://localhost:{}", self.port)
    }

    /// The commit of every revision.
    pub fn commit(&self) -> &'static str {
        COMMIT
    }

    /// Changes what goes wrong from now on.
    pub fn set_faults(&self, faults: HubFaults) {
        lock(&self.state).faults = faults;
    }

    /// Puts a file in the place of the one of this path, if there is one.
    pub fn put(&self, path: &str, content: Vec<u8>) {
        lock(&self.state).files.insert(path.to_owned(), content);
    }

    /// The requests so far.
    pub fn seen(&self) -> Vec<SeenRequest> {
        lock(&self.state).seen.clone()
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn blob_id(content: &[u8]) -> String {
    hex(&Sha1::new_with_prefix(format!("blob {}\0", content.len())).chain_update(content).finalize())
}

/// What is sent.
struct Reply {
    status: &'static str,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
    /// The connection ends after so many bytes of the body.
    cut_after: usize,
}

impl Reply {
    fn new(status: &'static str, body: impl Into<Vec<u8>>) -> Self {
        Self { status, headers: Vec::new(), body: body.into(), cut_after: usize::MAX }
    }

    fn refusal(status: &'static str, code: &str) -> Self {
        Self { headers: vec![("x-error-code", code.to_owned())], ..Self::new(status, "") }
    }
}

fn answer(state: &Mutex<State>, port: u16, stream: TcpStream) -> Option<()> {
    let mut lines = BufReader::new(stream.try_clone().ok()?).take(1 << 16);
    let mut first = String::new();
    lines.read_line(&mut first).ok()?;
    let target = first.split(' ').nth(1)?.to_owned();
    let mut seen = SeenRequest { target, authorization: None, range: None, host: String::new() };
    loop {
        let mut line = String::new();
        lines.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        let value = value.trim().to_owned();
        match name.to_ascii_lowercase().as_str() {
            "authorization" => seen.authorization = Some(value),
            "range" => seen.range = Some(value),
            "host" => seen.host = value,
            _ => {}
        }
    }
    let reply = {
        let mut state = lock(state);
        state.seen.push(seen.clone());
        reply(&mut state, port, &seen)
    };
    let mut head =
        format!("HTTP/1.1 {}\r\ncontent-length: {}\r\nconnection: close\r\n", reply.status, reply.body.len());
    for (name, value) in &reply.headers {
        let _ = write!(head, "{name}: {value}\r\n");
    }
    let mut stream = stream;
    stream.write_all(format!("{head}\r\n").as_bytes()).ok()?;
    stream.write_all(&reply.body[..reply.body.len().min(reply.cut_after)]).ok()
}

fn reply(state: &mut State, port: u16, seen: &SeenRequest) -> Reply {
    let (path, _) = seen.target.split_once('?').unwrap_or((&seen.target, ""));
    let known = |revision: &str| [COMMIT, "main", "v1", "refs%2Fpr%2F7"].contains(&revision);
    if let Some(file) = path.strip_prefix("/storage/") {
        let Some(content) = state.files.get(file).cloned() else { return Reply::new("404 Not Found", "") };
        return content_reply(state, content, seen);
    }
    if let Some(token) = &state.faults.token
        && seen.authorization.as_deref() != Some(&format!("Bearer {token}"))
    {
        return Reply::refusal("401 Unauthorized", "GatedRepo");
    }
    if let Some(revision) = path.strip_prefix(&format!("/api/models/{}/revision/", state.model)) {
        if !known(revision) {
            return Reply::refusal("404 Not Found", "RevisionNotFound");
        }
        let siblings: Vec<String> = state.files.iter().map(|(name, content)| sibling(name, content)).collect();
        return Reply::new("200 OK", format!(r#"{{"sha": "{COMMIT}", "siblings": [{}]}}"#, siblings.join(", ")));
    }
    let file = path.strip_prefix(&format!("/{}/resolve/{COMMIT}/", state.model));
    let Some((file, content)) = file.and_then(|file| state.files.get_key_value(file)) else {
        return Reply::refusal("401 Unauthorized", "RepoNotFound");
    };
    if content.len() >= LARGE {
        let location = format!("http://127.0.0.1:{port}/storage/{file}?signature=s");
        return Reply { headers: vec![("location", location)], ..Reply::new("302 Found", "") };
    }
    let content = content.clone();
    content_reply(state, content, seen)
}

fn sibling(name: &str, content: &[u8]) -> String {
    let size = content.len();
    let large = match size >= LARGE {
        true => {
            format!(r#", "lfs": {{"sha256": "{}", "size": {size}, "pointerSize": 131}}"#, hex(&Sha256::digest(content)))
        }
        false => String::new(),
    };
    format!(r#"{{"rfilename": "{name}", "size": {size}, "blobId": "{}"{large}}}"#, blob_id(content))
}

fn content_reply(state: &mut State, mut content: Vec<u8>, seen: &SeenRequest) -> Reply {
    let faults = &mut state.faults;
    if faults.unavailable > 0 {
        faults.unavailable -= 1;
        return Reply { headers: vec![("retry-after", "0".to_owned())], ..Reply::new("503 Service Unavailable", "") };
    }
    if faults.corrupt && content.len() >= LARGE {
        content[LARGE / 2] ^= 1;
    }
    let size = content.len();
    let etag = ("etag", format!("\"{}\"", blob_id(&content)));
    let range = seen.range.as_deref().and_then(|range| {
        let (start, last) = range.strip_prefix("bytes=")?.split_once('-')?;
        Some((start.parse().ok()?, last.parse().unwrap_or(usize::MAX)))
    });
    let mut reply = match range.filter(|_| !faults.without_ranges) {
        Some((start, last)) if start < size => {
            let end = last.saturating_add(1).min(size);
            content.truncate(end);
            Reply {
                headers: vec![("content-range", format!("bytes {start}-{}/{size}", end - 1))],
                ..Reply::new("206 Partial Content", content.split_off(start))
            }
        }
        Some(_) => Reply {
            headers: vec![("content-range", format!("bytes */{size}"))],
            ..Reply::new("416 Range Not Satisfiable", "")
        },
        None => Reply::new("200 OK", content),
    };
    reply.headers.push(etag);
    reply.cut_after = faults.cut_after.unwrap_or(usize::MAX);
    reply
}

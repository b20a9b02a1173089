//! A server that is the real binary, and a small HTTP client that can also misbehave.
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// A running `ridge serve`, ended when dropped.
pub struct Server {
    /// Nothing where somebody else has it.
    child: Option<Child>,
    pub address: SocketAddr,
}

/// What a server answered.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    /// Lines of the head, in lower case.
    pub head: String,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("the body is text")
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {:?}", self.text()))
    }

    /// The value of a header.
    pub fn header(&self, name: &str) -> Option<&str> {
        let line = |line: &'_ str| line.strip_prefix(name)?.strip_prefix(':').map(str::len);
        self.head.lines().find(|l| line(l).is_some()).and_then(|l| l.split_once(':')).map(|(_, value)| value.trim())
    }

    /// The values of a stream of events, which must end as it should.
    pub fn events(&self) -> Vec<Value> {
        assert_eq!(self.header("content-type"), Some("text/event-stream; charset=utf-8"));
        let mut data: Vec<&str> =
            self.text().split_terminator("\n\n").filter_map(|e| e.strip_prefix("data: ")).collect();
        assert_eq!(data.pop(), Some("[DONE]"));
        data.into_iter().map(|d| serde_json::from_str(d).unwrap()).collect()
    }

    /// The parameter that an error names, in a response that has OpenAI's shape.
    #[track_caller]
    pub fn refused(&self, status: u16) -> String {
        assert_eq!(self.status, status, "{}", self.text());
        let error = self.json()["error"].clone();
        assert!(error["message"].as_str().is_some_and(|m| !m.is_empty()) && error["type"].is_string(), "{error}");
        error["param"].as_str().unwrap_or_default().to_owned()
    }
}

impl Server {
    /// With the embedded model.
    pub fn start(args: &[&str]) -> Self {
        Self::start_with(args, &[])
    }

    pub fn start_with(args: &[&str], variables: &[(&str, &str)]) -> Self {
        let mut command = super::binary();
        command.arg("serve").args(["--port", "0", "--threads", "1", "--no-roofline"]).args(args);
        command.env_remove("RIDGE_API_KEY").envs(variables.iter().copied());
        let mut child = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let (address, log) = address(&mut child);
        // The log must not fill the pipe; a panic in it fails the test that made it.
        std::thread::spawn(move || {
            for line in log.lines().map_while(Result::ok) {
                if std::env::var_os("RIDGE_TEST_LOG").is_some() {
                    eprintln!("{line}");
                }
                assert!(!line.contains("panicked"), "{line}");
            }
        });
        Self { child: Some(child), address }
    }

    /// The server that a child is, whom the caller ends, and its log.
    pub fn adopt(child: &mut Child) -> (Self, BufReader<ChildStderr>) {
        let (address, log) = address(child);
        (Self { child: None, address }, log)
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }

    pub fn get(&self, path: &str) -> Answer {
        self.send(&format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"), b"")
    }

    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.post_bytes(path, body.to_string().as_bytes())
    }

    pub fn post_bytes(&self, path: &str, body: &[u8]) -> Answer {
        self.post_with(path, "", body)
    }

    /// With more lines in the head, each with its end.
    pub fn post_with(&self, path: &str, headers: &str, body: &[u8]) -> Answer {
        let length = body.len();
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n"
        );
        self.send(&head, body)
    }

    /// Sends bytes and reads what comes until the server closes.
    pub fn send(&self, head: &str, body: &[u8]) -> Answer {
        let mut stream = self.connect();
        stream.write_all(head.as_bytes()).unwrap();
        // A server may refuse before it has read all.
        let _ = stream.write_all(body);
        read_answer(&mut stream)
    }

    /// Begins a request, and reads no answer.
    pub fn begin(&self, path: &str, body: &Value) -> TcpStream {
        let mut stream = self.connect();
        let body = body.to_string();
        let head = format!("POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n", body.len());
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(body.as_bytes()).unwrap();
        stream
    }

    /// The value of a metric without labels but the model's.
    pub fn metric(&self, name: &str) -> f64 {
        let answer = self.get("/metrics");
        let line =
            answer.text().lines().find(|l| l.starts_with(&format!("{name}{{"))).unwrap_or_else(|| panic!("no {name}"));
        line.rsplit_once(' ').unwrap().1.parse().unwrap()
    }

    /// Waits until `done`, or fails.
    #[track_caller]
    pub fn until(&self, what: &str, done: impl Fn(&Self) -> bool) {
        let end = Instant::now() + Duration::from_secs(60);
        while !done(self) {
            assert!(Instant::now() < end, "never: {what}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.as_ref().unwrap().id()
    }

    /// Sends a signal, as `kill` does.
    pub fn signal(&self, signal: &str) {
        let status = Command::new("kill").args([signal, &self.pid().to_string()]).status().unwrap();
        assert!(status.success());
    }

    /// Its exit code, once it has ended.
    pub fn wait(&mut self) -> i32 {
        self.child.as_mut().unwrap().wait().unwrap().code().unwrap_or(-1)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Where a server says that it listens, and the rest of what it says.
fn address(child: &mut Child) -> (SocketAddr, BufReader<ChildStderr>) {
    let mut log = BufReader::new(child.stderr.take().unwrap());
    let mut said = String::new();
    loop {
        let mut line = String::new();
        assert!(log.read_line(&mut line).unwrap() > 0, "the server ended: {said}");
        if let Some(rest) = line.split("at http://").nth(1) {
            return (rest.split(',').next().unwrap().parse().unwrap(), log);
        }
        said += &line;
    }
}

/// Reads until the other side closes.
pub fn read_answer(stream: &mut TcpStream) -> Answer {
    let mut bytes = Vec::new();
    // A reset behind a refusal leaves what was read.
    let ended = stream.read_to_end(&mut bytes);
    assert!(!bytes.is_empty(), "no answer: {ended:?}");
    parse(&bytes)
}

fn parse(bytes: &[u8]) -> Answer {
    let end = bytes.windows(4).position(|w| w == b"\r\n\r\n").unwrap_or_else(|| panic!("no answer: {bytes:?}"));
    let head = String::from_utf8(bytes[..end].to_vec()).unwrap().to_lowercase();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let rest = &bytes[end + 4..];
    let body = if head.contains("transfer-encoding: chunked") { unchunked(rest) } else { rest.to_vec() };
    Answer { status, head, body }
}

fn unchunked(mut rest: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    while let Some(line) = rest.windows(2).position(|w| w == b"\r\n") {
        let size = usize::from_str_radix(std::str::from_utf8(&rest[..line]).unwrap(), 16).unwrap();
        let start = line + 2;
        body.extend_from_slice(&rest[start..start + size]);
        rest = &rest[(start + size + 2).min(rest.len())..];
        if size == 0 {
            break;
        }
    }
    body
}

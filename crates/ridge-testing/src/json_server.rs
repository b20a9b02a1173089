//! A server that records requests and answers them as a test says.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A request that arrived.
#[derive(Clone, Debug)]
pub struct JsonRequest {
    /// Such as `POST`.
    pub method: String,
    /// The path, and the query.
    pub target: String,
    /// Of the header `authorization`.
    pub authorization: Option<String>,
    /// What was sent.
    pub body: String,
}

/// How a request is answered.
#[derive(Clone, Debug)]
pub enum JsonReply {
    /// With this status and body.
    Body(u16, String),
    /// Not at all: the connection stays open.
    Silence,
}

/// A server that runs as long as the test does.
pub struct JsonServer {
    seen: Arc<Mutex<Vec<JsonRequest>>>,
    port: u16,
}

impl JsonServer {
    /// Answers each request by `answer`, which also learns how many came before.
    ///
    /// # Panics
    /// When no port can be opened.
    pub fn start(answer: impl Fn(&JsonRequest, usize) -> JsonReply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port of this machine");
        let port = listener.local_addr().expect("it is bound").port();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (shared, answer) = (Arc::clone(&seen), Arc::new(answer));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (seen, answer) = (Arc::clone(&shared), Arc::clone(&answer));
                // A client that leaves is its own business.
                std::thread::spawn(move || reply(&seen, &*answer, stream));
            }
        });
        Self { seen, port }
    }

    /// Its address, without a slash at the end.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// The requests so far.
    pub fn seen(&self) -> Vec<JsonRequest> {
        lock(&self.seen).clone()
    }
}

fn lock(seen: &Mutex<Vec<JsonRequest>>) -> MutexGuard<'_, Vec<JsonRequest>> {
    seen.lock().unwrap_or_else(PoisonError::into_inner)
}

fn reply(
    seen: &Mutex<Vec<JsonRequest>>,
    answer: &dyn Fn(&JsonRequest, usize) -> JsonReply,
    mut stream: TcpStream,
) -> Option<()> {
    let request = read(&stream)?;
    let before = {
        let mut seen = lock(seen);
        seen.push(request.clone());
        seen.len() - 1
    };
    match answer(&request, before) {
        JsonReply::Body(status, body) => {
            let head = format!(
                "HTTP/1.1 {status} Status\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
                body.len()
            );
            stream.write_all(format!("{head}{body}").as_bytes()).ok()
        }
        JsonReply::Silence => {
            // Until the client closes the connection.
            stream.read_to_end(&mut Vec::new()).ok().map(|_| ())
        }
    }
}

fn read(stream: &TcpStream) -> Option<JsonRequest> {
    let mut lines = BufReader::new(stream);
    let mut first = String::new();
    lines.read_line(&mut first).ok()?;
    let mut words = first.split(' ').map(str::to_owned);
    let (method, target) = (words.next()?, words.next()?);
    let (mut authorization, mut length) = (None, 0_usize);
    loop {
        let mut line = String::new();
        lines.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        match name.to_ascii_lowercase().as_str() {
            "authorization" => authorization = Some(value.trim().to_owned()),
            "content-length" => length = value.trim().parse().ok()?,
            _ => {}
        }
    }
    let mut body = vec![0; length];
    lines.read_exact(&mut body).ok()?;
    Some(JsonRequest { method, target, authorization, body: String::from_utf8(body).ok()? })
}

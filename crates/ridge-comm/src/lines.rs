//! Messages between the ranks' control threads, one line of JSON each.

use std::io::{self, Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// What ranks tell each other beside what they compute.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Message {
    /// A rank that joins: who it is, and where it listens for others.
    Hello { version: u32, token: String, rank: usize, ranks: usize, transport: String, port: u16 },
    /// The answer, once all have joined: where each rank listens, and the file of the shared memory.
    Table { addresses: Vec<String>, segment: Option<String> },
    /// The answer to a rank that cannot join.
    Refused { why: String },
    /// A sign of life: exchanges begun, and whether the rank is within the last of them.
    Beat { number: u64, within: bool },
    /// A rank is lost.
    Lost { rank: usize, why: String },
    /// The sender cannot continue.
    Failed { why: String },
    /// The sender has nothing more to exchange.
    Bye { number: u64 },
}

/// The longest line.
const MAX_LINE: usize = 64 << 10;

/// One end of a connection that carries messages, and never blocks but where it says so.
#[derive(Debug)]
pub(crate) struct Lines {
    stream: TcpStream,
    inbox: Vec<u8>,
}

impl Lines {
    /// # Errors
    /// When the connection cannot be set up so.
    pub(crate) fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        Ok(Self { stream, inbox: Vec::new() })
    }

    pub(crate) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Sends a message. The few bytes of a message fit into what the system buffers, unless nobody has read for long.
    ///
    /// # Errors
    /// When the other end is gone.
    pub(crate) fn send(&mut self, message: &Message) -> io::Result<()> {
        let mut line = serde_json::to_vec(message).map_err(io::Error::other)?;
        line.push(b'\n');
        let started = Instant::now();
        let mut rest = &line[..];
        while !rest.is_empty() {
            match self.stream.write(rest) {
                Ok(0) => return Err(io::ErrorKind::ConnectionAborted.into()),
                Ok(taken) => rest = &rest[taken..],
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                    if started.elapsed() > Duration::from_millis(100) {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// The next message that has arrived, if there is one.
    ///
    /// # Errors
    /// When the other end is gone, or says what is no message.
    pub(crate) fn receive(&mut self) -> io::Result<Option<Message>> {
        loop {
            if let Some(end) = self.inbox.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.inbox.drain(..=end).collect();
                return serde_json::from_slice(&line).map(Some).map_err(io::Error::other);
            }
            if self.inbox.len() > MAX_LINE {
                return Err(io::Error::other("a message is too long"));
            }
            let mut bytes = [0; 4096];
            match self.stream.read(&mut bytes) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(taken) => self.inbox.extend_from_slice(&bytes[..taken]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Waits for the next message until `deadline`.
    ///
    /// # Errors
    /// As for [`receive`](Self::receive), and when none came.
    pub(crate) fn wait(&mut self, deadline: Instant) -> io::Result<Message> {
        loop {
            if let Some(message) = self.receive()? {
                return Ok(message);
            }
            if Instant::now() > deadline {
                return Err(io::ErrorKind::TimedOut.into());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

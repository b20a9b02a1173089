//! Links over TCP.

use std::io::{self, Read as _, Write as _};
use std::net::TcpStream;

use crate::link::Link;

/// A connection that never blocks.
pub(crate) struct TcpLink(TcpStream);

impl TcpLink {
    /// # Errors
    /// When the connection cannot be set up so.
    pub(crate) fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        Ok(Self(stream))
    }
}

/// Bytes moved now: none where there is nothing to do yet.
fn moved(outcome: io::Result<usize>) -> io::Result<usize> {
    match outcome {
        Ok(0) => Err(io::ErrorKind::ConnectionAborted.into()),
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(0),
        outcome => outcome,
    }
}

impl Link for TcpLink {
    fn send(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.is_empty() { Ok(0) } else { moved(self.0.write(bytes)) }
    }

    fn receive(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        if bytes.is_empty() { Ok(0) } else { moved(self.0.read(bytes)) }
    }
}

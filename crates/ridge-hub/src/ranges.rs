//! A file on a server, read in ranges of bytes.

use std::io::{self, Read};

use ureq::Body;
use ureq::http::{Response, StatusCode};

use crate::client::{Attempts, Client, Failure};
use crate::error::{HubError, Result};
use crate::settings::HubSettings;

/// How often a request may fail one after the other: 15 seconds of waiting.
const ATTEMPTS: u32 = 5;

/// A file at a URL. Nothing of it is kept.
pub struct RangedFile {
    client: Client,
    url: String,
    size: u64,
    /// Of the first response, if it is a strong one (RFC 9110, section 8.8.1): other bytes have another.
    etag: Option<String>,
    has_ranges: bool,
}

impl RangedFile {
    /// Asks the server for the size of the file at `url`, which begins with `https://` or `http://`. The token of `settings` is
    /// sent to its endpoint alone.
    ///
    /// # Errors
    /// When the settings are offline, the server does not have the file, does not say how large it is, or does not answer.
    pub fn open(url: &str, settings: &HubSettings) -> Result<Self> {
        if settings.offline {
            return Err(HubError::OfflineFile { url: url.to_owned() });
        }
        let client = Client::new(settings)?;
        let mut file = Self { client, url: url.to_owned(), size: 0, etag: None, has_ranges: true };
        let first = file.ask_any(0, Some(1))?;
        (file.size, file.etag, file.has_ranges) = (first.size, first.etag, first.has_ranges);
        Ok(file)
    }

    /// Its size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// `length` bytes from `start` on.
    ///
    /// # Errors
    /// When the file has fewer or is no longer the one that was opened, the server sends no ranges, or does not answer.
    pub fn read(&self, start: u64, length: usize) -> Result<Vec<u8>> {
        let end = start.checked_add(length as u64).filter(|end| *end <= self.size);
        let end =
            end.ok_or_else(|| self.wrong(format!("{length} bytes from {start} on are past its {}", self.size)))?;
        if !self.has_ranges && (start > 0 || end < self.size) {
            return Err(self.wrong("the server does not send ranges of bytes; download the file first".to_owned()));
        }
        let mut bytes = Vec::with_capacity(length);
        let mut attempts = Attempts::of(ATTEMPTS);
        while bytes.len() < length {
            let at = start + bytes.len() as u64;
            let answer = self.ask(at, Some(end - at))?;
            let before = bytes.len();
            let read = answer.body.into_reader().take(end - at).read_to_end(&mut bytes);
            if bytes.len() > before {
                attempts.progressed();
            }
            if bytes.len() < length {
                let problem =
                    read.err().map_or_else(|| "the response ends early".to_owned(), |error| error.to_string());
                attempts.wait(Failure::Passing { problem, wait: None }, || self.url.clone())?;
            }
        }
        Ok(bytes)
    }

    /// All from `start` on, asked for again from where it stopped if the connection breaks.
    pub fn stream(&self, start: u64) -> RangedStream<'_> {
        RangedStream { file: self, at: start, body: None, attempts: Attempts::of(ATTEMPTS) }
    }

    fn wrong(&self, problem: String) -> HubError {
        HubError::Answer { url: self.url.clone(), problem }
    }

    /// Asks for `length` bytes, or all, from `start` on, of the file that was opened.
    fn ask(&self, start: u64, length: Option<u64>) -> Result<Answer> {
        let answer = self.ask_any(start, length)?;
        let other_etag = self.etag.as_ref().zip(answer.etag.as_ref()).is_some_and(|(first, now)| first != now);
        if answer.size != self.size || other_etag {
            return Err(HubError::Changed { url: self.url.clone() });
        }
        Ok(answer)
    }

    /// Asks again where that may help.
    fn ask_any(&self, start: u64, length: Option<u64>) -> Result<Answer> {
        let mut attempts = Attempts::of(ATTEMPTS);
        loop {
            match self.try_ask(start, length) {
                Ok(answer) => return Ok(answer),
                Err(failure) => attempts.wait(failure, || self.url.clone())?,
            }
        }
    }

    fn try_ask(&self, start: u64, length: Option<u64>) -> Result<Answer, Failure> {
        let end = length.map_or_else(String::new, |length| (start + length.max(1) - 1).to_string());
        let request = self.client.request_url(&self.url).header("range", format!("bytes={start}-{end}"));
        let response = request.call().map_err(Failure::of)?;
        let header = |response: &Response<Body>, name: &str| {
            response.headers().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned)
        };
        let etag = header(&response, "etag").filter(|etag| etag.starts_with('"'));
        // An empty file has no range that could be sent.
        if response.status() == StatusCode::RANGE_NOT_SATISFIABLE
            && header(&response, "content-range").as_deref() == Some("bytes */0")
        {
            return Ok(Answer { size: 0, etag, has_ranges: true, body: response.into_body() });
        }
        let response = Client::checked(&self.url, response)?;
        let header = |name: &str| header(&response, name);
        let lasting = |problem: &str| Failure::Lasting(self.wrong(problem.to_owned()));
        if response.status() != StatusCode::PARTIAL_CONTENT {
            let size = header("content-length").and_then(|size| size.parse().ok());
            let size =
                size.ok_or_else(|| lasting("the server does not say how large the file is; download it first"))?;
            if start > 0 {
                return Err(lasting("the server does not send ranges of bytes; download the file first"));
            }
            return Ok(Answer { size, etag, has_ranges: false, body: response.into_body() });
        }
        let range = header("content-range").and_then(|range| {
            let (place, size) = range.strip_prefix("bytes ")?.split_once('/')?;
            Some((place.split_once('-')?.0.parse::<u64>().ok()?, size.parse().ok()?))
        });
        match range {
            Some((at, size)) if at == start => Ok(Answer { size, etag, has_ranges: true, body: response.into_body() }),
            _ => Err(lasting(&format!("bytes from {start} on were requested, but the response has another range"))),
        }
    }
}

struct Answer {
    size: u64,
    etag: Option<String>,
    has_ranges: bool,
    body: Body,
}

/// The content of a file from a position on.
pub struct RangedStream<'a> {
    file: &'a RangedFile,
    at: u64,
    body: Option<Box<dyn Read>>,
    attempts: Attempts,
}

impl Read for RangedStream<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        while self.at < self.file.size && !to.is_empty() {
            let body = match &mut self.body {
                Some(body) => body,
                None => {
                    let answer = self.file.ask(self.at, None).map_err(io::Error::other)?;
                    self.body.insert(Box::new(answer.body.into_reader()))
                }
            };
            let problem = match body.read(to) {
                Ok(0) => "the response ends early".to_owned(),
                Ok(bytes) => {
                    self.attempts.progressed();
                    self.at += bytes as u64;
                    return Ok(bytes);
                }
                Err(error) => error.to_string(),
            };
            self.body = None;
            let url = || self.file.url.clone();
            self.attempts.wait(Failure::Passing { problem, wait: None }, url).map_err(io::Error::other)?;
        }
        Ok(0)
    }
}

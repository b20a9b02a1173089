//! Server-sent events (WHATWG HTML, section 9.2): what a stream of bytes says.

/// Bytes of an event at most; a server that sends more without an end is not sending events.
const MOST: usize = 16 << 20;

/// Reads events as their bytes come.
#[derive(Debug, Default)]
pub(super) struct SseEvents {
    /// The line that has not ended yet.
    line: Vec<u8>,
    /// Lines of data of the event that has not ended yet, each with its newline.
    data: Vec<u8>,
    /// A carriage return ended the last line, and a newline behind it is of the same end.
    after_return: bool,
}

impl SseEvents {
    /// Gives the data of every event that ends in `bytes` to `event`.
    ///
    /// # Errors
    /// Says in what the stream is not one of events; those of `event` come through.
    pub(super) fn read(
        &mut self,
        bytes: &[u8],
        mut event: impl FnMut(&str) -> Result<(), String>,
    ) -> Result<(), String> {
        for byte in bytes {
            let newline_of_return = std::mem::take(&mut self.after_return) && *byte == b'\n';
            match byte {
                b'\n' if newline_of_return => {}
                b'\n' | b'\r' => {
                    self.after_return = *byte == b'\r';
                    self.end_line(&mut event)?;
                }
                byte => self.line.push(*byte),
            }
            if self.line.len() + self.data.len() > MOST {
                return Err(format!("an event has more than {MOST} bytes"));
            }
        }
        Ok(())
    }

    /// Is there a part of an event that has not ended?
    pub(super) fn unfinished(&self) -> bool {
        !self.line.is_empty() || !self.data.is_empty()
    }

    fn end_line(&mut self, event: &mut impl FnMut(&str) -> Result<(), String>) -> Result<(), String> {
        let line = std::mem::take(&mut self.line);
        if line.is_empty() {
            let mut data = std::mem::take(&mut self.data);
            if data.pop().is_none() {
                return Ok(());
            }
            return event(str::from_utf8(&data).map_err(|_| "an event is not UTF-8".to_owned())?);
        }
        let (field, value) = match line.iter().position(|b| *b == b':') {
            Some(colon) => (&line[..colon], &line[colon + 1..]),
            None => (&line[..], &[][..]),
        };
        match field {
            b"data" => {
                self.data.extend_from_slice(value.strip_prefix(b" ").unwrap_or(value));
                self.data.push(b'\n');
            }
            // A comment, as servers send to keep a connection.
            b"" | b"event" | b"id" | b"retry" => {}
            other => {
                let shown: String = String::from_utf8_lossy(other).chars().take(60).collect();
                return Err(format!("a line that is not part of an event: {shown:?}"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &[u8], piece: usize) -> Result<Vec<String>, String> {
        let (mut events, mut all) = (SseEvents::default(), Vec::new());
        for bytes in text.chunks(piece) {
            events.read(bytes, |data| {
                all.push(data.to_owned());
                Ok(())
            })?;
        }
        assert!(!events.unfinished());
        Ok(all)
    }

    #[test]
    fn events_are_the_same_however_their_bytes_come() {
        let text = ": keep\ndata: {\"a\": 1}\n\ndata:x\r\ndata: y\r\n\r\nid: 3\n\nevent: e\ndata: \u{1f600}é\r\rdata\n\ndata: [DONE]\n\n";
        for piece in 1..=text.len() {
            let events = read(text.as_bytes(), piece).unwrap();
            assert_eq!(events, ["{\"a\": 1}", "x\ny", "\u{1f600}é", "", "[DONE]"], "{piece}");
        }
    }

    #[test]
    fn what_is_no_stream_of_events_is_refused() {
        assert!(read(b"<html>\n\n", 3).unwrap_err().contains("<html>"));
        assert!(read(b"data: \xff\n\n", 3).unwrap_err().contains("UTF-8"));
        assert!(read(&[b'x'; MOST + 2], 1 << 20).unwrap_err().contains("more than"));
    }
}

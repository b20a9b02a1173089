//! Keys that are typed during a reply.

use std::io::stdin;

use rustix::termios::{InputModes, LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcsetattr};

use super::commands::unfinished;

/// While this guard exists, typed keys are buffered and not echoed. Ctrl-C is still a signal.
pub(super) struct HeldKeys(Option<Termios>);

impl HeldKeys {
    pub(super) fn new() -> Self {
        let before = tcgetattr(stdin()).ok();
        if let Some(mut modes) = before.clone() {
            modes.local_modes.remove(LocalModes::ECHO | LocalModes::ICANON);
            // Ctrl-C does not discard them.
            modes.local_modes.insert(LocalModes::NOFLSH);
            modes.input_modes.remove(InputModes::ICRNL);
            // Non-blocking reads.
            modes.special_codes[SpecialCodeIndex::VMIN] = 0;
            modes.special_codes[SpecialCodeIndex::VTIME] = 0;
            let _ = tcsetattr(stdin(), OptionalActions::Drain, &modes);
        }
        Self(before)
    }

    /// The keys typed so far, as the terminal sends them.
    pub(super) fn typed(&self) -> String {
        /// Limits the input of a stuck key.
        const MAX: usize = 1 << 16;
        let mut bytes = Vec::new();
        let mut buffer = [0; 1024];
        while self.0.is_some() && bytes.len() < MAX {
            match rustix::io::read(stdin(), &mut buffer) {
                Ok(length @ 1..) => bytes.extend(&buffer[..length]),
                _ => break,
            }
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl Drop for HeldKeys {
    fn drop(&mut self) {
        if let Some(modes) = &self.0 {
            let _ = tcsetattr(stdin(), OptionalActions::Drain, modes);
        }
    }
}

/// Typed keys as a line editor interprets them: complete messages, an unfinished line, and whether Ctrl-D was typed.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct TypedAhead {
    pub(super) messages: Vec<String>,
    pub(super) line: String,
    pub(super) ends: bool,
}

impl TypedAhead {
    /// Appends keys as the terminal sends them to the unfinished line. Cursor and function keys are ignored.
    pub(super) fn read(&mut self, keys: &str) {
        let mut keys = keys.chars().peekable();
        while let Some(key) = keys.next() {
            match key {
                '\r' | '\n' if unfinished(&self.line) => self.line.push('\n'),
                '\r' | '\n' => self.messages.push(std::mem::take(&mut self.line)),
                '\x7f' | '\x08' => drop(self.line.pop()),
                '\x15' => self.line.clear(),
                '\x04' if self.line.is_empty() => self.ends = true,
                // ESC [ parameters letter, or ESC and one character.
                '\x1b' if keys.next_if(|k| matches!(k, '[' | 'O')).is_some() => {
                    while keys.next_if(|k| k.is_ascii_digit() || *k == ';').is_some() {}
                    keys.next();
                }
                '\x1b' => drop(keys.next()),
                key if key.is_control() && key != '\t' => {}
                key => self.line.push(key),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_become_what_a_line_editor_makes_of_them() {
        let read = |keys: &[&str]| {
            let mut typed = TypedAhead::default();
            keys.iter().for_each(|keys| typed.read(keys));
            (typed.messages.join("|"), typed.line, typed.ends)
        };
        let expected = |messages: &str, line: &str, ends| (messages.to_owned(), line.to_owned(), ends);
        assert_eq!(read(&["one\rtw", "oo\x7f\r/set"]), expected("one|two", "/set", false));
        assert_eq!(read(&["a\\\rb\r\"\"\"\rc\rd\"\"\"\r"]), expected("a\\\nb|\"\"\"\nc\nd\"\"\"", "", false));
        assert_eq!(read(&["x\x1b[A\x1b[1;5Cy\x1bOPz\x15é\x04\x07"]), expected("", "é", false));
        assert_eq!(read(&["a\r\x04"]), expected("a", "", true));
    }
}

//! One call in JSON, read character by character.

/// What is certain of a call.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Piece {
    Name(String),
    Arguments(String),
}

/// A call that is being read: an object with a name and arguments, or arguments alone whose name is known.
pub(super) struct Call {
    scan: Scan,
    /// The name, and is it out?
    name: Option<String>,
    announced: bool,
    /// Is all that is read the arguments?
    bare: bool,
    /// The text of the present key, or of the present value of the object.
    key: String,
    value: String,
    /// Arguments that wait for the name.
    waiting: String,
    any_arguments: bool,
}

impl Call {
    /// An object with a name and arguments.
    pub(super) fn new() -> Self {
        Self {
            scan: Scan::new(),
            name: None,
            announced: false,
            bare: false,
            key: String::new(),
            value: String::new(),
            waiting: String::new(),
            any_arguments: false,
        }
    }

    /// The arguments of `name`.
    pub(super) fn of(name: String) -> Self {
        Self { name: Some(name), bare: true, ..Self::new() }
    }

    /// Has the call ended?
    pub(super) fn done(&self) -> bool {
        self.scan.done()
    }

    /// Takes one character. `Err` if what has come is no call.
    pub(super) fn take(&mut self, c: char) -> Result<Vec<Piece>, ()> {
        if self.bare {
            if self.scan.blank() && c != '{' {
                return if c.is_whitespace() { Ok(Vec::new()) } else { Err(()) };
            }
            self.scan.take(c)?;
            self.waiting.push(c);
            return Ok(self.pieces());
        }
        let was_value = self.scan.in_value();
        let (was_key, was_bare) = (self.scan.in_key(), self.scan.in_bare_value());
        self.scan.take(c)?;
        let (in_value, in_key) = (self.scan.in_value(), self.scan.in_key());
        if in_key && !was_key {
            self.key.clear();
        }
        if in_key || was_key {
            self.key.push(c);
        }
        // The character that ends a number is not of it; those that end what is quoted or bracketed are.
        let closes = was_value && !in_value && !was_bare;
        if in_value || closes {
            self.value.push(c);
        }
        let streams = self.is_arguments() && self.value.starts_with('{');
        if streams && (in_value || closes) {
            self.waiting.push(c);
        }
        if was_value && !in_value {
            let value = std::mem::take(&mut self.value);
            self.ended(&value)?;
        }
        if self.done() {
            if self.name.is_none() {
                return Err(());
            }
            if !self.any_arguments {
                self.waiting.push_str("{}");
            }
        }
        Ok(self.pieces())
    }

    fn is_arguments(&self) -> bool {
        matches!(self.key.as_str(), "\"arguments\"" | "\"parameters\"")
    }

    /// A value of the object has ended.
    fn ended(&mut self, value: &str) -> Result<(), ()> {
        let text = || serde_json::from_str::<String>(value).map_err(|_| ());
        if self.key == "\"name\"" && self.name.is_none() {
            self.name = Some(text()?);
        } else if self.is_arguments() && !self.any_arguments {
            self.any_arguments = true;
            match value.chars().next() {
                Some('{') => {}
                Some('"') => self.waiting.push_str(&text()?),
                _ if value == "null" => self.waiting.push_str("{}"),
                _ => return Err(()),
            }
        }
        Ok(())
    }

    fn pieces(&mut self) -> Vec<Piece> {
        let mut pieces = Vec::new();
        if let Some(name) = self.name.as_ref().filter(|_| !self.announced) {
            pieces.push(Piece::Name(name.clone()));
            self.announced = true;
        }
        if self.announced && !self.waiting.is_empty() {
            pieces.push(Piece::Arguments(std::mem::take(&mut self.waiting)));
        }
        pieces
    }
}

/// What may come next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CallListState {
    Value,
    /// A value, or the end of an empty list.
    ValueOrEnd,
    Key,
    /// A key, or the end of an empty object.
    KeyOrEnd,
    Colon,
    CommaOrEnd,
    Nothing,
}

/// Checks one JSON value as it comes.
struct Scan {
    /// Closing brackets that are owed.
    open: Vec<char>,
    next: CallListState,
    /// The string or the literal that is being read.
    token: Option<JsonToken>,
    began: bool,
}

enum JsonToken {
    /// Is it a key, and is the next character escaped? An escape of `\u` owes digits.
    Text {
        key: bool,
        escaped: bool,
        digits: u8,
    },
    Literal(String),
}

/// Values nest no deeper than this, as `serde_json` has it for the client's own requests.
const DEEPEST: usize = 128;

impl Scan {
    fn new() -> Self {
        Self { open: Vec::new(), next: CallListState::Value, token: None, began: false }
    }

    fn blank(&self) -> bool {
        !self.began
    }

    fn done(&self) -> bool {
        self.next == CallListState::Nothing && self.token.is_none()
    }

    /// In a key of the outermost object.
    fn in_key(&self) -> bool {
        self.open.len() == 1 && matches!(self.token, Some(JsonToken::Text { key: true, .. }))
    }

    /// In a value of the outermost object.
    fn in_value(&self) -> bool {
        self.open.len() > 1
            || self.open.len() == 1
                && matches!(self.token, Some(JsonToken::Text { key: false, .. } | JsonToken::Literal(_)))
    }

    /// In a value of the outermost object that is a number or a word.
    fn in_bare_value(&self) -> bool {
        self.open.len() == 1 && matches!(self.token, Some(JsonToken::Literal(_)))
    }

    fn take(&mut self, c: char) -> Result<(), ()> {
        self.began = true;
        match &mut self.token {
            Some(JsonToken::Text { key, escaped, digits }) => {
                match c {
                    _ if *digits > 0 => {
                        if !c.is_ascii_hexdigit() {
                            return Err(());
                        }
                        *digits -= 1;
                    }
                    _ if *escaped => {
                        if !matches!(c, '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't' | 'u') {
                            return Err(());
                        }
                        *escaped = false;
                        *digits = if c == 'u' { 4 } else { 0 };
                    }
                    '\\' => *escaped = true,
                    '"' => {
                        self.next = if *key { CallListState::Colon } else { self.after() };
                        self.token = None;
                    }
                    c if c < ' ' => return Err(()),
                    _ => {}
                }
                return Ok(());
            }
            Some(JsonToken::Literal(text)) if c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.') => {
                text.push(c);
                // Longer than any number that is meant.
                return if text.len() <= 400 { Ok(()) } else { Err(()) };
            }
            Some(JsonToken::Literal(text)) => {
                serde_json::from_str::<serde_json::Value>(text).map_err(|_| ())?;
                self.token = None;
                self.next = self.after();
            }
            None => {}
        }
        match (self.next, c) {
            (_, ' ' | '\t' | '\n' | '\r') => {}
            (CallListState::Value | CallListState::ValueOrEnd, '{') => self.open('}', CallListState::KeyOrEnd)?,
            (CallListState::Value | CallListState::ValueOrEnd, '[') => self.open(']', CallListState::ValueOrEnd)?,
            (CallListState::Value | CallListState::ValueOrEnd, '"') => {
                self.token = Some(JsonToken::Text { key: false, escaped: false, digits: 0 });
            }
            (CallListState::Value | CallListState::ValueOrEnd, c) if c.is_ascii_alphanumeric() || c == '-' => {
                self.token = Some(JsonToken::Literal(c.to_string()));
            }
            (CallListState::Key | CallListState::KeyOrEnd, '"') => {
                self.token = Some(JsonToken::Text { key: true, escaped: false, digits: 0 });
            }
            (CallListState::Colon, ':') => self.next = CallListState::Value,
            (CallListState::CommaOrEnd, ',') => {
                self.next = if self.open.last() == Some(&'}') { CallListState::Key } else { CallListState::Value };
            }
            (CallListState::CommaOrEnd | CallListState::KeyOrEnd | CallListState::ValueOrEnd, c)
                if self.open.last() == Some(&c) =>
            {
                self.open.pop();
                self.next = self.after();
            }
            _ => return Err(()),
        }
        Ok(())
    }

    fn open(&mut self, close: char, next: CallListState) -> Result<(), ()> {
        self.open.push(close);
        self.next = next;
        if self.open.len() <= DEEPEST { Ok(()) } else { Err(()) }
    }

    /// What comes behind a value.
    fn after(&self) -> CallListState {
        if self.open.is_empty() { CallListState::Nothing } else { CallListState::CommaOrEnd }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn valid(text: &str) -> bool {
        let mut scan = Scan::new();
        text.chars().all(|c| scan.take(c).is_ok()) && scan.done()
    }

    #[test]
    fn the_scan_accepts_what_serde_json_accepts() {
        for text in [
            "{}",
            "[]",
            "[1, 2.5e-3, -0]",
            r#"{"a": {"b": [true, false, null]}}"#,
            r#"["\u00e9\n\"\\"]"#,
            "[[],{}]",
            "{\"a\":\n1\t}",
            "[1,]",
            "{,}",
            "{\"a\"}",
            "[01]",
            "[tru]",
            "{\"a\": 1,}",
            "[\"\\x\"]",
            "[\"\\u12g4\"]",
            "[}",
            "]",
            "[1 2]",
            "[\"\n\"]",
            "{\"a\" 1}",
            "[-]",
            "[+1]",
            "[1.]",
            "[.5]",
            "{1: 2}",
        ] {
            let known: Result<serde_json::Value, _> = serde_json::from_str(text);
            assert_eq!(valid(text), known.is_ok(), "{text}");
        }
        assert!(!valid(&"[".repeat(500)));
    }
}

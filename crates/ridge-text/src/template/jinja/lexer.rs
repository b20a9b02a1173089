//! Template source to tokens, with jinja2's rules for whitespace: `trim_blocks` and `lstrip_blocks` are on, one newline
//! at the end of the source is dropped.

use super::escape::unescape;
use super::fault::{Fault, FaultKind, Res};
use super::text::is_space;

/// Sources longer than this many bytes are refused.
const LONGEST_SOURCE: usize = 4 << 20;

/// A token.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Tok {
    Data(String),
    /// `{{`
    PrintBegin,
    /// `}}`
    PrintEnd,
    /// `{%`
    BlockBegin,
    /// `%}`
    BlockEnd,
    Name(String),
    Str(String),
    Int(i128),
    Float(f64),
    Op(&'static str),
    End,
}

/// Longer ones first.
const OPERATORS: [&str; 26] = [
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}", ">", "<", "=", ".",
    ":", "|", ",", ";",
];

/// The tokens of `source`, each with its line, counted from 1.
pub(crate) fn tokenize(source: &str) -> Res<Vec<(Tok, u32)>> {
    if source.len() > LONGEST_SOURCE {
        return Err(Fault::new(FaultKind::Limit, format!("the source is longer than {LONGEST_SOURCE} bytes")));
    }
    let mut source = source.replace("\r\n", "\n").replace('\r', "\n");
    if source.ends_with('\n') {
        source.pop();
    }
    let mut lexer = Lexer { source: &source, pos: 0, counted: 0, line: 1, line_starting: true, tokens: Vec::new() };
    match lexer.run() {
        Ok(()) => Ok(lexer.tokens),
        Err(fault) => Err(fault.at(lexer.line_here())),
    }
}

struct Lexer<'a> {
    source: &'a str,
    pos: usize,
    /// Where `line` was counted up to.
    counted: usize,
    line: u32,
    /// Did the last tag end with a newline, or is this the start?
    line_starting: bool,
    tokens: Vec<(Tok, u32)>,
}

impl<'a> Lexer<'a> {
    fn rest(&self) -> &'a str {
        &self.source[self.pos..]
    }

    fn line_here(&mut self) -> u32 {
        let newlines = self.source[self.counted..self.pos].bytes().filter(|&b| b == b'\n').count();
        self.line += newlines as u32;
        self.counted = self.pos;
        self.line
    }

    fn push(&mut self, tok: Tok) {
        let line = self.line_here();
        self.tokens.push((tok, line));
    }

    fn syntax<T>(message: impl Into<String>) -> Res<T> {
        Err(Fault::new(FaultKind::Template, message))
    }

    fn run(&mut self) -> Res<()> {
        loop {
            let rest = self.rest();
            let Some(start) = tag_start(rest) else {
                if !rest.is_empty() {
                    self.push(Tok::Data(rest.to_owned()));
                }
                self.pos = self.source.len();
                self.push(Tok::End);
                return Ok(());
            };
            let kind = rest.as_bytes()[start + 1];
            let sign = rest[start + 2..].chars().next().filter(|c| "+-".contains(*c));
            self.data(start, sign, kind != b'{');
            self.pos += start;
            if kind == b'%'
                && let Some(length) = raw_begin(self.rest())
            {
                self.pos += length;
                self.ended();
                self.raw()?;
                continue;
            }
            match kind {
                b'#' => {
                    self.pos += 2 + usize::from(sign.is_some());
                    self.comment()?;
                }
                b'%' => {
                    self.push(Tok::BlockBegin);
                    self.pos += 2 + usize::from(sign.is_some());
                    self.tag(true)?;
                }
                _ => {
                    self.push(Tok::PrintBegin);
                    self.pos += 2 + usize::from(sign.is_some());
                    self.tag(false)?;
                }
            }
        }
    }

    /// The text before a tag that begins `length` bytes on, stripped as the tag asks.
    fn data(&mut self, length: usize, sign: Option<char>, lstrip: bool) {
        let mut text = &self.rest()[..length];
        if sign == Some('-') {
            text = text.trim_end_matches(is_space);
        } else if sign != Some('+') && lstrip {
            let line_start = text.rfind('\n').map_or(0, |at| at + 1);
            if (line_start > 0 || self.line_starting) && text[line_start..].chars().all(is_space) {
                text = &text[..line_start];
            }
        }
        if !text.is_empty() {
            self.push(Tok::Data(text.to_owned()));
        }
    }

    /// Takes the end of a tag that `close` closes, if it is here, and the whitespace that it swallows.
    fn take_end(&mut self, close: &str, may_keep: bool) -> bool {
        let rest = self.rest();
        if let Some(after) = rest.strip_prefix('-').and_then(|r| r.strip_prefix(close)) {
            self.pos = self.source.len() - after.trim_start_matches(is_space).len();
        } else if may_keep && rest.strip_prefix('+').is_some_and(|r| r.starts_with(close)) {
            self.pos += 1 + close.len();
        } else if let Some(after) = rest.strip_prefix(close) {
            // `trim_blocks`: blocks and comments swallow a newline, prints do not.
            let newline = may_keep && after.starts_with('\n');
            self.pos += close.len() + usize::from(newline);
        } else {
            return false;
        }
        self.ended();
        true
    }

    fn ended(&mut self) {
        self.line_starting = self.source[..self.pos].ends_with('\n');
    }

    fn comment(&mut self) -> Res<()> {
        while self.pos < self.source.len() {
            if self.take_end("#}", true) {
                return Ok(());
            }
            self.pos += self.rest().chars().next().map_or(0, char::len_utf8);
        }
        Self::syntax("a comment is not closed")
    }

    fn raw(&mut self) -> Res<()> {
        let rest = self.rest();
        let mut from = 0;
        while let Some(found) = rest[from..].find("{%") {
            let start = from + found;
            let after = &rest[start + 2..];
            let sign = after.chars().next().filter(|c| "+-".contains(*c));
            let inner = after[usize::from(sign.is_some())..].trim_start_matches(is_space);
            if let Some(inner) = inner.strip_prefix("endraw") {
                let before = self.pos;
                self.pos = self.source.len() - inner.trim_start_matches(is_space).len();
                let at_end = self.pos;
                let starting = self.line_starting;
                if self.take_end("%}", true) {
                    let end = self.pos;
                    self.pos = before;
                    self.line_starting = starting;
                    self.data(start, sign, true);
                    self.pos = end;
                    self.ended();
                    return Ok(());
                }
                debug_assert_eq!(self.pos, at_end);
                self.pos = before;
            }
            from = start + 2;
        }
        Self::syntax("a raw block is not closed")
    }

    /// The tokens of a statement or an expression, its end included.
    fn tag(&mut self, block: bool) -> Res<()> {
        let mut open: Vec<&str> = Vec::new();
        loop {
            let blank = self.rest().len() - self.rest().trim_start_matches(is_space).len();
            // The end may begin with a minus sign, which also ends what is in brackets.
            if open.is_empty() {
                let before = self.tokens.len();
                let line = self.line_here();
                let (close, tok) = if block { ("%}", Tok::BlockEnd) } else { ("}}", Tok::PrintEnd) };
                if self.take_end(close, block) {
                    self.tokens.insert(before, (tok, line));
                    return Ok(());
                }
            }
            if blank > 0 {
                self.pos += blank;
                continue;
            }
            let rest = self.rest();
            let Some(first) = rest.chars().next() else {
                return Self::syntax("a tag is not closed");
            };
            if first.is_ascii_digit() {
                self.number()?;
            } else if first == '_' || first.is_alphanumeric() {
                let name: &str = &rest[..rest.find(|c: char| c != '_' && !c.is_alphanumeric()).unwrap_or(rest.len())];
                if first.is_numeric() {
                    return Self::syntax(format!("the name {name} begins with a digit"));
                }
                self.push(Tok::Name(name.to_owned()));
                self.pos += name.len();
            } else if first == '\'' || first == '"' {
                self.string(first)?;
            } else if let Some(op) = OPERATORS.iter().find(|op| rest.starts_with(**op)) {
                match *op {
                    "(" => open.push(")"),
                    "[" => open.push("]"),
                    "{" => open.push("}"),
                    ")" | "]" | "}" if open.pop() != Some(op) => {
                        return Self::syntax(format!("unexpected '{op}'"));
                    }
                    _ => {}
                }
                self.push(Tok::Op(op));
                self.pos += op.len();
            } else {
                return Self::syntax(format!("unexpected character {first:?}"));
            }
        }
    }

    fn string(&mut self, quote: char) -> Res<()> {
        let rest = self.rest();
        let mut chars = rest.char_indices().skip(1);
        while let Some((at, c)) = chars.next() {
            if c == '\\' {
                chars.next();
            } else if c == quote {
                let text = unescape(&rest[1..at])?;
                self.push(Tok::Str(text));
                self.pos += at + 1;
                return Ok(());
            }
        }
        Self::syntax("a string is not closed")
    }

    fn number(&mut self) -> Res<()> {
        let rest = self.rest().as_bytes();
        let digits = |from: usize, ok: fn(u8) -> bool, first_may_be_underscore: bool| {
            let mut at = from;
            loop {
                let skip = usize::from(rest.get(at) == Some(&b'_') && (at > from || first_may_be_underscore));
                match rest.get(at + skip) {
                    Some(&b) if ok(b) => at += skip + 1,
                    _ => return at,
                }
            }
        };
        let decimal = |b: u8| b.is_ascii_digit();
        let whole = digits(0, decimal, false);
        let mut end = whole;
        let preceded_by_dot = self.source[..self.pos].ends_with('.');
        if !preceded_by_dot {
            if rest.get(end) == Some(&b'.') && rest.get(end + 1).copied().is_some_and(decimal) {
                end = digits(end + 1, decimal, false);
            }
            if matches!(rest.get(end), Some(b'e' | b'E')) {
                let sign = usize::from(matches!(rest.get(end + 1), Some(b'+' | b'-')));
                if rest.get(end + 1 + sign).copied().is_some_and(decimal) {
                    end = digits(end + 1 + sign, decimal, false);
                }
            }
        }
        let clean = |from: usize, to: usize| self.rest()[from..to].replace('_', "");
        if end > whole {
            let value = clean(0, end).parse().map_err(|_| Fault::new(FaultKind::Template, "not a number"))?;
            self.push(Tok::Float(value));
            self.pos += end;
            return Ok(());
        }
        let based = |base: u32, ok: fn(u8) -> bool| {
            let to = digits(2, ok, true);
            (to > 2).then(|| (to, i128::from_str_radix(&clean(2, to), base)))
        };
        let prefixed = match (rest[0], rest.get(1)) {
            (b'0', Some(b'b' | b'B')) => based(2, |b| matches!(b, b'0' | b'1')),
            (b'0', Some(b'o' | b'O')) => based(8, |b| matches!(b, b'0'..=b'7')),
            (b'0', Some(b'x' | b'X')) => based(16, |b| b.is_ascii_hexdigit()),
            _ => None,
        };
        let (to, value) = prefixed.unwrap_or_else(|| {
            // A number that begins with 0 is zeros alone.
            let to = if rest[0] == b'0' { digits(0, |b| b == b'0', false) } else { whole };
            (to, clean(0, to).parse())
        });
        let value = value
            .map_err(|_| Fault::new(FaultKind::Unsupported, "integers of more than 127 bits are not supported"))?;
        self.push(Tok::Int(value));
        self.pos += to;
        Ok(())
    }
}

/// Where the next tag begins.
fn tag_start(text: &str) -> Option<usize> {
    text.as_bytes().windows(2).position(|pair| pair[0] == b'{' && matches!(pair[1], b'{' | b'%' | b'#'))
}

/// The length of `{% raw %}`, if `text` begins with it.
fn raw_begin(text: &str) -> Option<usize> {
    let inner = text.strip_prefix("{%")?;
    let inner = inner.strip_prefix(['+', '-']).unwrap_or(inner).trim_start_matches(is_space);
    let inner = inner.strip_prefix("raw")?.trim_start_matches(is_space);
    let rest = match inner.strip_prefix("-%}") {
        Some(rest) => rest.trim_start_matches(is_space),
        None => inner.strip_prefix("%}")?,
    };
    Some(text.len() - rest.len())
}

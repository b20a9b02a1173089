//! Escapes in string literals, and the way Python shows strings.

use std::fmt::Write;

use super::fault::{Res, fail, unsupported};

/// The text of a string literal, whose quotes are off: jinja2 writes non-ASCII characters as escapes and then has
/// Python's `unicode-escape` read the whole, so a backslash before such a character stands for itself.
pub(crate) fn unescape(literal: &str) -> Res<String> {
    if !literal.contains('\\') {
        return Ok(literal.to_owned());
    }
    let mut out = String::with_capacity(literal.len());
    let mut chars = literal.chars().peekable();
    while let Some(c) = chars.next() {
        if c != '\\' {
            out.push(c);
            continue;
        }
        let Some(c) = chars.next() else {
            return fail("\\ at end of string");
        };
        let mut hex = |digits: u32| -> Res<char> {
            let mut code = 0u32;
            for _ in 0..digits {
                match chars.next().and_then(|d| d.to_digit(16)) {
                    Some(d) => code = code << 4 | d,
                    None => return fail(format!("truncated \\{c} escape")),
                }
            }
            match char::from_u32(code) {
                Some(c) => Ok(c),
                None if code > 0x10_FFFF => fail("illegal Unicode character"),
                None => unsupported(format!("half a surrogate pair, \\{c}{code:04x}, is not supported")),
            }
        };
        match c {
            '\n' => {}
            '\\' | '\'' | '"' => out.push(c),
            'a' => out.push('\x07'),
            'b' => out.push('\x08'),
            'f' => out.push('\x0c'),
            'n' => out.push('\n'),
            'r' => out.push('\r'),
            't' => out.push('\t'),
            'v' => out.push('\x0b'),
            'x' => out.push(hex(2)?),
            'u' => out.push(hex(4)?),
            'U' => out.push(hex(8)?),
            'N' => return unsupported("\\N{...} in a string is not supported"),
            '0'..='7' => {
                let mut code = c.to_digit(8).unwrap_or(0);
                for _ in 0..2 {
                    let Some(d) = chars.peek().and_then(|d| d.to_digit(8)) else { break };
                    code = code << 3 | d;
                    chars.next();
                }
                out.extend(char::from_u32(code));
            }
            c if c.is_ascii() => {
                out.push('\\');
                out.push(c);
            }
            // The character was written as \xe9, \u20ac or \U0001f600, and the backslash before that makes it plain.
            c => {
                let code = u32::from(c);
                let _ = match code {
                    0..=0xFF => write!(out, "\\x{code:02x}"),
                    0x100..=0xFFFF => write!(out, "\\u{code:04x}"),
                    _ => write!(out, "\\U{code:08x}"),
                };
            }
        }
    }
    Ok(out)
}

/// `text` as Python's `repr` shows it.
pub(crate) fn quote(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        let code = u32::from(c);
        let _ = match c {
            '\\' => write!(out, "\\\\"),
            '\n' => write!(out, "\\n"),
            '\r' => write!(out, "\\r"),
            '\t' => write!(out, "\\t"),
            c if c == quote => write!(out, "\\{c}"),
            c if printable(c) => write!(out, "{c}"),
            _ if code <= 0xFF => write!(out, "\\x{code:02x}"),
            _ if code <= 0xFFFF => write!(out, "\\u{code:04x}"),
            _ => write!(out, "\\U{code:08x}"),
        };
    }
    out.push(quote);
}

/// Python's `isprintable` of one character. Rust's tables know characters of newer Unicode versions too.
pub(crate) fn printable(c: char) -> bool {
    if c.is_ascii() {
        return c == ' ' || c.is_ascii_graphic();
    }
    // Escaping a text leaves combining characters alone where they follow something.
    let mut text = [0; 5];
    text[0] = b'a';
    let length = 1 + c.encode_utf8(&mut text[1..]).len();
    std::str::from_utf8(&text[..length]).is_ok_and(|text| !text.escape_debug().skip(1).any(|c| c == '\\'))
}

//! Python's idea of characters and lines.

use super::fault::{Res, unsupported};

/// Python's `str.isspace`, which is also the `\s` of its regular expressions.
pub(crate) fn is_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\x1c'..='\x1f')
}

/// The lines of a text, as `str.splitlines` sees them; with their ends if `keep`.
pub(crate) fn lines(text: &str, keep: bool) -> Vec<&str> {
    let ends = |c: char| {
        matches!(c, '\n' | '\r' | '\x0b' | '\x0c' | '\x1c' | '\x1d' | '\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}')
    };
    let mut found = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find(ends) {
        let width = match &rest[at..] {
            end if end.starts_with("\r\n") => 2,
            end => end.chars().next().map_or(1, char::len_utf8),
        };
        found.push(&rest[..if keep { at + width } else { at }]);
        rest = &rest[at + width..];
    }
    if !rest.is_empty() {
        found.push(rest);
    }
    found
}

/// The first `count` pieces between runs of whitespace, and the rest.
pub(crate) fn split_space(text: &str, count: Option<usize>) -> Vec<&str> {
    let mut found = Vec::new();
    let mut rest = text.trim_start_matches(is_space);
    while !rest.is_empty() {
        if count.is_some_and(|count| found.len() == count) {
            found.push(rest);
            break;
        }
        let end = rest.find(is_space).unwrap_or(rest.len());
        found.push(&rest[..end]);
        rest = rest[end..].trim_start_matches(is_space);
    }
    found
}

/// [`split_space`] from the right.
pub(crate) fn rsplit_space(text: &str, count: Option<usize>) -> Vec<&str> {
    let mut found = Vec::new();
    let mut rest = text.trim_end_matches(is_space);
    while !rest.is_empty() {
        if count.is_some_and(|count| found.len() == count) {
            found.push(rest);
            break;
        }
        let start = rest.char_indices().rev().find(|(_, c)| is_space(*c)).map_or(0, |(at, c)| at + c.len_utf8());
        found.push(&rest[start..]);
        rest = rest[..start].trim_end_matches(is_space);
    }
    found.reverse();
    found
}

/// A character in title case. Where that is not its capital, Rust's tables do not have it.
fn title_char(c: char, out: &mut String) -> Res<()> {
    let mut upper = c.to_uppercase();
    let digraph = matches!(c, '\u{1c4}'..='\u{1cc}' | '\u{1f1}'..='\u{1f3}');
    let georgian = matches!(c, '\u{10d0}'..='\u{10ff}');
    if upper.len() > 1 || digraph || georgian {
        return unsupported(format!("the title case of {c:?} is not supported"));
    }
    out.extend(upper.next());
    Ok(())
}

/// `str.capitalize`.
pub(crate) fn capitalize(text: &str) -> Res<String> {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars();
    if let Some(first) = chars.next() {
        title_char(first, &mut out)?;
        // The case of a sigma depends on what stands before it, so the whole is lowered at once.
        let lower = text.to_lowercase();
        let first_lower = first.to_lowercase().map(char::len_utf8).sum();
        out.push_str(lower.get(first_lower..).unwrap_or_default());
    }
    Ok(out)
}

/// `str.title`: capitals behind everything that has no case.
pub(crate) fn title(text: &str) -> Res<String> {
    let mut out = String::with_capacity(text.len());
    let mut in_word = false;
    for c in text.chars() {
        if c == 'Σ' {
            return unsupported("the title case of 'Σ' is not supported");
        }
        if in_word {
            out.extend(c.to_lowercase());
        } else {
            title_char(c, &mut out)?;
        }
        in_word = is_cased(c);
    }
    Ok(out)
}

/// `str.swapcase`.
pub(crate) fn swapcase(text: &str) -> Res<String> {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c == 'Σ' {
            return unsupported("the swapped case of 'Σ' is not supported");
        }
        if c.is_uppercase() {
            out.extend(c.to_lowercase());
        } else {
            out.extend(c.to_uppercase());
        }
    }
    Ok(out)
}

/// Is the character a capital, a small letter or one of the letters in title case?
pub(crate) fn is_cased(c: char) -> bool {
    c.is_uppercase() || c.is_lowercase() || is_title(c)
}

fn is_title(c: char) -> bool {
    matches!(
        c,
        '\u{1c5}' | '\u{1c8}' | '\u{1cb}' | '\u{1f2}' | '\u{1f88}'..='\u{1f8f}' | '\u{1f98}'..='\u{1f9f}'
            | '\u{1fa8}'..='\u{1faf}' | '\u{1fbc}' | '\u{1fcc}' | '\u{1ffc}'
    )
}

/// `str.isupper` and, with `lower`, `str.islower`.
pub(crate) fn all_of_case(text: &str, lower: bool) -> bool {
    let mut any = false;
    for c in text.chars() {
        let (is, is_other) =
            if lower { (c.is_lowercase(), c.is_uppercase()) } else { (c.is_uppercase(), c.is_lowercase()) };
        if is_other || is_title(c) {
            return false;
        }
        any |= is;
    }
    any
}

/// `str.istitle`.
pub(crate) fn is_title_text(text: &str) -> bool {
    let (mut in_word, mut any) = (false, false);
    for c in text.chars() {
        let capital = c.is_uppercase() || is_title(c);
        if capital && in_word || c.is_lowercase() && !in_word {
            return false;
        }
        in_word = is_cased(c);
        any |= in_word;
    }
    any
}

/// Does every character of a text that is not empty pass? `ascii` decides for ASCII; others are looked up in what Rust
/// knows of them, and where that is not what Python asks, nothing is guessed.
pub(crate) fn all_chars(
    text: &str,
    method: &str,
    ascii: fn(char) -> bool,
    other: fn(char) -> Option<bool>,
) -> Res<bool> {
    for c in text.chars() {
        let passes = if c.is_ascii() { Some(ascii(c)) } else { other(c) };
        match passes {
            Some(true) => {}
            Some(false) => return Ok(false),
            None => return unsupported(format!("{method}() of {c:?} is not supported")),
        }
    }
    Ok(!text.is_empty())
}

/// Is the character a letter? Unknown for marks and the like, which Rust counts as alphabetic and Python does not.
pub(crate) fn is_letter(c: char) -> Option<bool> {
    let surely = matches!(
        c,
        'À'..='Ö' | 'Ø'..='ö' | 'ø'..='ʯ' | 'Ͱ'..='ͳ' | 'Ά' | 'Έ'..='ϡ' | 'Ѐ'..='ҁ' | 'Ҋ'..='ԯ' | 'א'..='ת'
            | 'ء'..='ي' | 'ぁ'..='ゖ' | 'ァ'..='ヺ' | '\u{3400}'..='\u{4dbf}' | '\u{4e00}'..='\u{9fff}'
            | '가'..='힣'
    );
    match c.is_alphabetic() {
        false => Some(false),
        true if surely => Some(true),
        true => None,
    }
}

/// Is the character a digit? Unknown for the many kinds of numerals.
pub(crate) fn is_digit(c: char) -> Option<bool> {
    if c.is_numeric() { None } else { Some(false) }
}

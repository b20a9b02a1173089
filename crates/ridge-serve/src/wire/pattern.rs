//! Regular expressions of schemas that say something of the text ahead or behind, which no mask can follow.

/// The characters of `^(?!^[...]*$)`, by which pydantic asks a decimal number for more than signs, and what follows it.
pub(super) fn not_only(pattern: &str) -> Option<(&str, &str)> {
    let (class, rest) = pattern.strip_prefix("^(?!^[")?.split_once("]*$)")?;
    (!class.contains(['[', ']', '\\']) && !class.starts_with('^')).then_some((class, rest))
}

/// `pattern` without its groups that look ahead or behind; `None` if it has none.
pub(super) fn without_assertions(pattern: &str) -> Option<String> {
    let (mut kept, mut rest, mut found) = (String::new(), pattern, false);
    while !rest.is_empty() {
        let begins = ["(?=", "(?!", "(?<=", "(?<!"].into_iter().find(|begin| rest.starts_with(begin));
        if begins.is_some() {
            rest = &rest[group(rest)?..];
            found = true;
            continue;
        }
        // An escape, a class, or a character.
        let length = match rest.chars().next()? {
            '\\' => 1 + rest[1..].chars().next().map_or(0, char::len_utf8),
            '[' => class(rest)?,
            c => c.len_utf8(),
        };
        kept.push_str(&rest[..length]);
        rest = &rest[length..];
    }
    found.then_some(kept)
}

/// Bytes of the group that `text` begins with.
fn group(text: &str) -> Option<usize> {
    let (mut at, mut depth) = (0, 0_usize);
    loop {
        let c = text[at..].chars().next()?;
        at += match c {
            '\\' => 1 + text[at + 1..].chars().next()?.len_utf8(),
            '[' => class(&text[at..])?,
            c => c.len_utf8(),
        };
        depth = match c {
            '(' => depth + 1,
            ')' => depth - 1,
            _ => depth,
        };
        if depth == 0 {
            return Some(at);
        }
    }
}

/// Bytes of the class of characters that `text` begins with.
fn class(text: &str) -> Option<usize> {
    let mut at = 1;
    if text[at..].starts_with('^') {
        at += 1;
    }
    // A bracket that comes first stands for itself.
    if text[at..].starts_with(']') {
        at += 1;
    }
    loop {
        let c = text[at..].chars().next()?;
        at += if c == '\\' { 1 + text[at + 1..].chars().next()?.len_utf8() } else { c.len_utf8() };
        if c == ']' {
            return Some(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn assertions_are_taken_out_whole() {
        assert_eq!(without_assertions(r"a(?<=(b|\))[)])c(?:d)"), Some("ac(?:d)".to_owned()));
        assert_eq!(without_assertions(r"a\(?=b)"), None);
        assert_eq!(without_assertions("a(?=b"), None);
        assert_eq!(not_only("^(?!^[-+.]*$)[+-]?0"), Some(("-+.", "[+-]?0")));
        assert_eq!(not_only("^(?!^[^a]*$)b"), None);
    }
}

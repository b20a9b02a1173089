//! Regular expressions of schemas: those that say something of the text ahead or behind, which no mask can follow, and those that
//! are mistaken.

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

/// What makes a pattern that ends within an escape, which the grammar library takes for the character before, no regular expression.
pub(super) fn open_escape(pattern: &str) -> Option<String> {
    let backslashes = pattern.len() - pattern.trim_end_matches('\\').len();
    (backslashes % 2 == 1).then(|| format!("the \\ at byte {} escapes nothing", pattern.len() - 1))
}

/// What makes `pattern` no regular expression of any dialect, if something does: brackets that are not balanced, nothing to
/// repeat, bounds or ranges in the wrong order, an escape of nothing.
pub(super) fn mistake(pattern: &str) -> Option<String> {
    let (mut at, mut open) = (0, Vec::new());
    // Is there something in front that can be repeated?
    let mut repeatable = false;
    while let Some(c) = pattern[at..].chars().next() {
        let rest = &pattern[at..];
        let mut length = c.len_utf8();
        let before = std::mem::replace(&mut repeatable, !matches!(c, '(' | '|'));
        match c {
            '\\' => match rest[1..].chars().next() {
                Some(escaped) => length += escaped.len_utf8(),
                None => return open_escape(pattern),
            },
            '[' => match class(rest) {
                Some(bytes) => {
                    if let Some((within, first, last)) = reversed_range(&rest[..bytes]) {
                        let at = at + within;
                        return Some(format!("the range {first}-{last} at byte {at} is in the wrong order"));
                    }
                    length = bytes;
                }
                // ECMAScript's classes of no and of any character.
                None if rest.starts_with("[]") => length = 2,
                None if rest.starts_with("[^]") => length = 3,
                None => return Some(format!("the [ at byte {at} is not closed")),
            },
            '(' => {
                open.push(at);
                // What kind of group it is.
                length +=
                    rest[1..].strip_prefix('?').map_or(0, |kind| 1 + kind.chars().next().map_or(0, char::len_utf8));
            }
            ')' if open.pop().is_none() => return Some(format!("the ) at byte {at} closes nothing")),
            '*' | '+' | '?' if !before => return Some(format!("the {c} at byte {at} repeats nothing")),
            '{' => {
                let bounds = rest[1..].split_once('}').and_then(|(bounds, _)| bounds.split_once(','));
                let numbers = bounds.and_then(|(least, most)| Some((least.parse().ok()?, most.parse().ok()?)));
                if let Some((least, most)) = numbers.filter(|(least, most): &(u64, u64)| least > most) {
                    return Some(format!("the bounds at byte {at} are in the wrong order: {least} exceeds {most}"));
                }
            }
            _ => {}
        }
        at += length;
    }
    open.last().map(|at| format!("the ( at byte {at} is not closed"))
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

/// The first range of the class of characters `text` whose ends are in the wrong order, and the byte that it begins at.
fn reversed_range(text: &str) -> Option<(usize, char, char)> {
    // A character with its bytes; `None` of an escape that stands for others.
    let item = |at: usize| {
        let mut chars = text[at..].chars();
        match (chars.next()?, chars.next()) {
            ('\\', Some(escaped)) if escaped.is_ascii_punctuation() => Some((Some(escaped), 2)),
            ('\\', Some(escaped)) => {
                Some((None, 1 + escaped.len_utf8() + argument(escaped, &text[at + 1 + escaped.len_utf8()..])))
            }
            (c, _) => Some((Some(c), c.len_utf8())),
        }
    };
    let mut at = if text.starts_with("[^") { 2 } else { 1 };
    while at + 1 < text.len() {
        let (first, bytes) = item(at)?;
        let begins = at;
        at += bytes;
        // A hyphen at the end stands for itself, and one before a class takes that away in some dialects.
        if !text[at..].starts_with('-') || ["-]", "-["].iter().any(|end| text[at..].starts_with(end)) {
            continue;
        }
        let (last, bytes) = item(at + 1)?;
        at += 1 + bytes;
        if let (Some(first), Some(last)) = (first, last)
            && first > last
        {
            return Some((begins, first, last));
        }
    }
    None
}

/// Bytes of what belongs to the escape of `letter`, of what follows it.
fn argument(letter: char, rest: &str) -> usize {
    let digits = match letter {
        'x' => 2,
        'u' => 4,
        'U' => 8,
        'p' | 'P' | 'c' => 1,
        _ => return 0,
    };
    if rest.starts_with('{') {
        return rest.find('}').map_or(rest.len(), |end| end + 1);
    }
    rest.chars().take(digits).take_while(char::is_ascii_alphanumeric).map(char::len_utf8).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mistakes_are_told_from_what_dialects_have() {
        for (pattern, why) in [
            ("a(b", "the ( at byte 1 is not closed"),
            ("(a(b)", "the ( at byte 0 is not closed"),
            ("ab)", "the ) at byte 2 closes nothing"),
            ("[a-z", "the [ at byte 0 is not closed"),
            ("*a", "the * at byte 0 repeats nothing"),
            ("a|+", "the + at byte 2 repeats nothing"),
            ("(?:?a)", "the ? at byte 3 repeats nothing"),
            ("é{3,1}", "the bounds at byte 2 are in the wrong order: 3 exceeds 1"),
            ("a\\", "the \\ at byte 1 escapes nothing"),
            ("x[^z-a]", "the range z-a at byte 3 is in the wrong order"),
            ("[a-z9-0]", "the range 9-0 at byte 4 is in the wrong order"),
            (r"[\]-\[]", r"the range ]-[ at byte 1 is in the wrong order"),
        ] {
            assert_eq!(mistake(pattern).as_deref(), Some(why), "{pattern}");
        }
        for pattern in [
            "",
            "a+?",
            "a*+",
            r"\(",
            "[(]",
            "[])]",
            "[^]",
            "[]",
            "(?<year>\\d{4})",
            "(?=a)b",
            r"(a)\1",
            "(?i)a",
            "a{2,}",
            "{",
            "x{,3}",
            "(|a)?",
            "^$",
            "(?P<n>é)*",
            "[a-z-]",
            r"[\w-a]",
            "[--0]",
            "[a-z-[aeiou]]",
            r"[\x2d-9]",
            r"[\p{L}-.]",
            r"[\u{2d}-9\cA-\u0041]",
            "[]-a]",
        ] {
            assert_eq!(mistake(pattern), None, "{pattern}");
        }
    }

    #[test]
    fn assertions_are_taken_out_whole() {
        assert_eq!(without_assertions(r"a(?<=(b|\))[)])c(?:d)"), Some("ac(?:d)".to_owned()));
        assert_eq!(without_assertions(r"a\(?=b)"), None);
        assert_eq!(without_assertions("a(?=b"), None);
        assert_eq!(not_only("^(?!^[-+.]*$)[+-]?0"), Some(("-+.", "[+-]?0")));
        assert_eq!(not_only("^(?!^[^a]*$)b"), None);
    }
}

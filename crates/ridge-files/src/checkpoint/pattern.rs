//! Patterns of tensor names, in which `*` matches any characters, including none.

/// Whether `text` matches `pattern`, in which `*` stands for any characters, also none.
pub fn matches(pattern: &str, text: &str) -> bool {
    let Some((head, tail)) = pattern.split_once('*') else {
        return pattern == text;
    };
    let Some(mut rest) = text.strip_prefix(head) else {
        return false;
    };
    let mut parts = tail.split('*');
    let last = parts.next_back().unwrap_or_default();
    for part in parts {
        // The earliest place leaves the most for the parts behind it.
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

/// What the one `*` of `pattern` stands for when `name` matches it.
pub(super) fn star<'a>(pattern: &str, name: &'a str) -> Option<&'a str> {
    match pattern.split_once('*') {
        Some((head, tail)) => name.strip_prefix(head)?.strip_suffix(tail),
        None => (pattern == name).then_some(""),
    }
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn star_stands_for_any_characters() {
        for (pattern, text, expected) in [
            ("a.b", "a.b", true),
            ("a.b", "a.bc", false),
            ("*.inv_freq", "layers.0.inv_freq", true),
            ("*.inv_freq", "inv_freq", false),
            ("*.inv_freq", "x.inv_freq.weight", false),
            ("layers.*.q.*", "layers.0.q.bias", true),
            ("layers.*.q.*", "layers.0.k.bias", false),
            ("*ab*ab", "ab", false),
            ("*ab*ab", "abab", true),
            ("*", "", true),
            ("a*a", "a", false),
        ] {
            assert_eq!(matches(pattern, text), expected, "{pattern} against {text}");
        }
    }
}

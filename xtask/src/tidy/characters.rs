//! Characters: whitespace that no reader sees and letters that no keyboard finds.

use super::finding::Finding;
use super::rust_text::RustText;

/// Files in which a tab is never meant; elsewhere (Makefiles, test data) it may be.
const NO_TABS: &[&str] = &[".rs", ".md", ".toml"];

/// Over every text but published models and test data, which are kept byte for byte as they are.
pub(super) fn check(path: &str, text: &str) -> Vec<Finding> {
    if path.starts_with("models/") || path.contains("/tests/data/") || path.ends_with(".jinja") {
        return Vec::new();
    }
    let no_tabs = NO_TABS.iter().any(|ending| path.ends_with(ending));
    let mut findings = Vec::new();
    for (index, line) in text.split('\n').enumerate() {
        let mut found = |message| findings.push(Finding::failure(path, index + 1, message));
        let content = line.strip_suffix('\r').unwrap_or(line);
        if content.len() < line.len() {
            found("line ends in CRLF; end it in LF");
        }
        if content.trim_end().len() < content.len() {
            found("trailing whitespace; remove it");
        }
        if no_tabs && content.contains('\t') {
            found("tab; use spaces, or \\t in a string");
        }
    }
    findings.extend(check_end(path, text));
    findings
}

fn check_end(path: &str, text: &str) -> Option<Finding> {
    let last = text.lines().count();
    if text.is_empty() {
        None
    } else if !text.ends_with('\n') {
        Some(Finding::failure(path, last, "no newline at the end of the file; add one"))
    } else if text == "\n" || text.ends_with("\n\n") {
        Some(Finding::failure(path, last, "empty lines at the end of the file; leave one newline"))
    } else {
        None
    }
}

/// Comments and strings may hold any letter, code only ASCII.
pub(super) fn check_identifiers(path: &str, rust: &RustText) -> Vec<Finding> {
    let lines = rust.code.lines().enumerate();
    lines
        .filter_map(|(index, line)| {
            let letter = line.chars().find(|letter| !letter.is_ascii())?;
            let message = format!("`{letter}` in code; name it in ASCII");
            Some(Finding::failure(path, index + 1, message))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> Vec<(usize, String)> {
        let findings = check(path, text).into_iter();
        findings.map(|f| (f.line, f.message)).collect()
    }

    #[track_caller]
    fn assert_one(path: &str, text: &str, line: usize, what: &str) {
        let found = found(path, text);
        assert!(matches!(found.as_slice(), [(at, message)] if *at == line && message.starts_with(what)), "{found:?}");
    }

    #[test]
    fn clean_text_passes() {
        assert_eq!(found("a.rs", "a\n\n  b\n"), []);
        assert_eq!(found("a.rs", ""), []);
    }

    #[test]
    fn whitespace_at_the_end_of_a_line_is_found() {
        assert_one("a.txt", "a\nb \nc\n", 2, "trailing");
        assert_one("Makefile", "a\nb\t\nc\n", 2, "trailing");
    }

    #[test]
    fn carriage_return_is_found() {
        assert_one("a.txt", "a\nb\r\n", 2, "line ends in CRLF");
    }

    #[test]
    fn tab_is_found_where_none_is_meant() {
        for path in ["a.rs", "a.md", "a.toml"] {
            assert_one(path, "a\n\tb\n", 2, "tab");
        }
        assert_eq!(found("Makefile", "a\n\tb\n"), []);
    }

    #[test]
    fn file_ends_in_one_newline() {
        assert_one("a.txt", "a\nb", 2, "no newline");
        assert_one("a.txt", "a\n\n", 2, "empty lines");
        assert_one("a.txt", "\n", 1, "empty lines");
    }

    #[test]
    fn published_models_and_test_data_are_left_alone() {
        for path in ["models/tiny/config.json", "crates/ridge-models/tests/data/config.json", "fixtures/chat.jinja"] {
            assert_eq!(found(path, "a \r\n\n\n"), []);
        }
    }

    #[test]
    fn letters_outside_ascii_are_found_in_code_alone() {
        let found = |source| {
            let findings = check_identifiers("a.rs", &RustText::split(source));
            findings.iter().map(|f| f.line).collect::<Vec<_>>()
        };
        assert_eq!(found("\nlet \u{3b1} = 1;"), [2]);
        assert!(found("// \u{3b1}\nf(\"\u{3b1}\", '\u{3b1}')").is_empty());
    }
}

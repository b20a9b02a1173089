//! Unfinished work: placeholder macros, notes to self, and tests that are ignored without a reason.

use super::finding::Finding;
use super::rust_text::{RustText, Word, words};

const PLACEHOLDERS: &[&str] = &["todo", "unimplemented", "dbg"];
const NOTES: &[&str] = &["TODO", "FIXME", "XXX"];

pub(super) fn check(path: &str, rust: &RustText) -> Vec<Finding> {
    let in_code = words(&rust.code).filter_map(|word| Some((word.line, wrong_in_code(&word)?)));
    let in_comments = words(&rust.comments).filter_map(|word| Some((word.line, note(&word)?)));
    in_code.chain(in_comments).map(|(line, message)| Finding::failure(path, line, message)).collect()
}

fn wrong_in_code(word: &Word<'_>) -> Option<String> {
    if is_placeholder(word) {
        return Some(format!(
            "`{}!` is left in the code; finish it, or return an error that says what is not supported",
            word.text
        ));
    }
    if word.text == "ignore" && is_bare_ignore(word) {
        return Some("test ignored without a reason; give it one, `#[ignore = \"...\"]`, or let it run".to_owned());
    }
    note(word)
}

fn is_placeholder(word: &Word<'_>) -> bool {
    PLACEHOLDERS.contains(&word.text)
        && word.after.trim_start().strip_prefix('!').is_some_and(|rest| rest.trim_start().starts_with(['(', '[', '{']))
}

fn note(word: &Word<'_>) -> Option<String> {
    NOTES.contains(&word.text).then(|| {
        format!("`{}` is a note to self; do it now, or open an issue and say in the code what is so and why", word.text)
    })
}

/// `#[ignore]`, alone or inside `cfg_attr`.
fn is_bare_ignore(word: &Word<'_>) -> bool {
    let Some((_, attribute)) = word.before.rsplit_once("#[") else {
        return false;
    };
    let attribute = attribute.trim();
    let after = word.after.trim_start();
    let (is_attribute, close) = if attribute.is_empty() {
        (true, ']')
    } else {
        (attribute.starts_with("cfg_attr(") && attribute.ends_with(','), ')')
    };
    is_attribute && (after.starts_with(close) || after.starts_with(','))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(source: &str) -> Vec<usize> {
        let findings = check("crates/ridge-hw/src/lib.rs", &RustText::split(source));
        findings.iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn placeholder_macros_are_found() {
        for source in ["\ntodo!()", "\nunimplemented!(\"later\")", "\ndbg![x]", "\ndbg ! {x}"] {
            assert_eq!(found(source), [2], "{source}");
        }
        for source in ["todo != other", "todo(x)", "\"todo!()\"", "// was dbg!(x)", "my_todo!()"] {
            assert!(found(source).is_empty(), "{source}");
        }
    }

    #[test]
    fn notes_to_self_are_found() {
        for source in ["\n// TODO: later", "\n/// FIXME", "\n/* XXX */", "\nx // TODO(name)", "\nconst TODO: u8 = 0;"] {
            assert_eq!(found(source), [2], "{source}");
        }
        for source in ["\"TODO\"", "// U+XXXX", "// CU_XXX_1"] {
            assert!(found(source).is_empty(), "{source}");
        }
    }

    #[test]
    fn ignored_test_without_a_reason_is_found() {
        for source in ["\n#[ignore]", "\n#[ ignore ]", "\n#[cfg_attr(miri, ignore)]"] {
            assert_eq!(found(source), [2], "{source}");
        }
        for source in [
            "#[ignore = \"needs a GPU\"]",
            "#[cfg_attr(miri, ignore = \"slow\")]",
            "#[error(ignore)]",
            "f(ignore)",
            "#[derive(Debug)] struct A; fn f(a, ignore)",
        ] {
            assert!(found(source).is_empty(), "{source}");
        }
    }
}

//! Unsafe code is allowed in five places only: the two backends, memory that processes share, the mapping of files, and
//! tensors that Python reads.

use super::finding::Finding;
use super::rust_text::{RustText, Word, words};

/// Beginnings of paths under which unsafe code may stand.
const ROOMS: &[&str] = &[
    "crates/ridge-cpu/",
    "crates/ridge-cuda/",
    "crates/ridge-comm/src/shared_memory",
    "crates/ridge-files/src/mapped",
    "python/src/tensor",
];

pub(super) fn check(path: &str, rust: &RustText) -> Vec<Finding> {
    if ROOMS.iter().any(|room| path.starts_with(room)) {
        return Vec::new();
    }
    words(&rust.code)
        .filter(|word| word.text == "unsafe" || permits_unsafe(word))
        .map(|Word { text, line, .. }| {
            let message = format!(
                "`{text}` outside ridge-cpu, ridge-cuda, ridge-comm/src/shared_memory*, ridge-files/src/mapped* and python/src/tensor*; move it there behind a safe interface, or avoid it"
            );
            Finding::failure(path, line, message)
        })
        .collect()
}

/// The lint's name in an attribute that lowers it.
fn permits_unsafe(word: &Word<'_>) -> bool {
    if word.text != "unsafe_code" {
        return false;
    }
    let attribute = word.before.rsplit_once('(').map_or("", |(before, _)| before);
    let level = words(attribute).last().map_or("", |word| word.text);
    matches!(level, "allow" | "expect" | "warn")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, source: &str) -> Vec<usize> {
        let findings = check(path, &RustText::split(source));
        findings.iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn unsafe_outside_its_rooms_is_found() {
        for source in [
            "\nfn f() { unsafe { g() } }",
            "\nunsafe fn f() {}",
            "\nunsafe impl Send for A {}",
            "\n#[unsafe(no_mangle)]",
            "\n#![allow(unsafe_code)]",
            "\n#[expect(unsafe_code, reason = \"r\")]",
            "#![allow(\nunsafe_code)]",
        ] {
            assert_eq!(found("crates/ridge-graph/src/lib.rs", source), [2], "{source}");
            assert_eq!(found("crates/ridge-files/src/lib.rs", source), [2], "{source}");
            assert!(found("crates/ridge-files/src/mapped.rs", source).is_empty(), "{source}");
            assert!(found("crates/ridge-cpu/tests/gemm.rs", source).is_empty(), "{source}");
            assert!(found("crates/ridge-cuda/src/driver.rs", source).is_empty(), "{source}");
        }
    }

    #[test]
    fn word_in_comment_string_or_prohibition_passes() {
        for source in [
            "// unsafe",
            "f(\"unsafe\")",
            "#![forbid(unsafe_code)]",
            "#![deny(unsafe_code)]",
            "#![deny(unsafe_op_in_unsafe_fn)]",
            "mod unsafe_code;",
        ] {
            assert!(found("crates/ridge-graph/src/lib.rs", source).is_empty(), "{source}");
        }
    }
}

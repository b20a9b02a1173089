//! Headers: every source file opens with a `//!` comment that tells a newcomer what lives there.

use super::finding::Finding;

pub(super) fn check(path: &str, text: &str) -> Vec<Finding> {
    if !is_source(path) {
        return Vec::new();
    }
    let first = text.lines().next().unwrap_or_default();
    match first.strip_prefix("//!") {
        Some(says) if !says.trim().is_empty() => Vec::new(),
        _ => vec![Finding::failure(path, 1, "no header; open the file with `//!` and a few words on what lives there")],
    }
}

fn is_source(path: &str) -> bool {
    let mut parts = path.split('/');
    let in_crate = match parts.next() {
        Some("crates") => parts.next().is_some(),
        Some("xtask") => true,
        _ => false,
    };
    in_crate && parts.next() == Some("src")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn source_without_a_header_is_found() {
        for path in ["crates/ridge-hw/src/lib.rs", "crates/ridge-hw/src/sheet/gpu.rs", "xtask/src/main.rs"] {
            assert_eq!(check(path, "//! Sheets.\n\nuse a;\n"), []);
            assert_eq!(check(path, "use a;\n").len(), 1, "{path}");
            assert_eq!(check(path, "\n//! Too late.\n").len(), 1, "{path}");
            assert_eq!(check(path, "//!\n//! Empty first line.\n").len(), 1, "{path}");
            assert_eq!(check(path, "").len(), 1, "{path}");
        }
    }

    #[test]
    fn files_outside_src_owe_no_header() {
        assert_eq!(check("crates/ridge-hw/tests/sheets.rs", "use a;\n"), []);
        assert_eq!(check("crates/ridge-hw/build.rs", "use a;\n"), []);
    }
}

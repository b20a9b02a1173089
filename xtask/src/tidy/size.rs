//! Size: a file has one subject, and the repository holds no large data.

use super::finding::Finding;

/// A Rust file with more lines than this is probably two.
const LONG_LINES: usize = 500;
/// A Rust file with more lines than this is refused.
const MAX_LINES: usize = 700;
/// The largest file outside `models/`: 4 MB.
pub(super) const MAX_BYTES: u64 = 4_000_000;

pub(super) fn check_lines(path: &str, text: &str) -> Vec<Finding> {
    let lines = text.lines().count();
    if lines > MAX_LINES {
        let message = format!("{lines} lines, the limit is {MAX_LINES}; split it by subject");
        vec![Finding::failure(path, 1, message)]
    } else if lines > LONG_LINES {
        let message = format!("{lines} lines, past {LONG_LINES} it is probably two files; split it by subject");
        vec![Finding::warning(path, 1, message)]
    } else {
        Vec::new()
    }
}

pub(super) fn check_bytes(path: &str, bytes: u64) -> Vec<Finding> {
    if bytes <= MAX_BYTES || path.starts_with("models/") {
        return Vec::new();
    }
    let message = format!(
        "{bytes} bytes, the limit is {MAX_BYTES}; generate it where it is needed, or keep it out of the repository"
    );
    vec![Finding::failure(path, 1, message)]
}

#[cfg(test)]
mod tests {
    use super::super::finding::Level;
    use super::*;

    #[test]
    fn long_file_is_warned_of_and_longer_one_refused() {
        let level = |lines| {
            let found = check_lines("a.rs", &"x\n".repeat(lines));
            found.first().map(|finding| finding.level)
        };
        assert_eq!(level(500), None);
        assert_eq!(level(501), Some(Level::Warning));
        assert_eq!(level(700), Some(Level::Warning));
        assert_eq!(level(701), Some(Level::Failure));
    }

    #[test]
    fn large_file_is_refused_outside_models() {
        assert_eq!(check_bytes("data/a.bin", MAX_BYTES), []);
        assert_eq!(check_bytes("data/a.bin", MAX_BYTES + 1).len(), 1);
        assert_eq!(check_bytes("models/a.safetensors", MAX_BYTES + 1), []);
    }
}

//! Machine paths: an absolute path of somebody's machine is true nowhere else.

use super::finding::Finding;

/// Folders that only one machine has. Each is written in two parts, or this file would be a finding.
const FOLDERS: &[&str] = &[concat!("/ho", "me/"), concat!("/ro", "ot/"), concat!("/Us", "ers/"), concat!("/wo", "rk/")];

pub(super) fn check(path: &str, text: &str) -> Vec<Finding> {
    let lines = text.lines().enumerate();
    lines
        .filter_map(|(index, line)| {
            let folder = FOLDERS.iter().find(|folder| has_absolute(line, folder))?;
            let message =
                format!("absolute path under {folder}; write it relative to the repository, or from ~ or a variable");
            Some(Finding::failure(path, index + 1, message))
        })
        .collect()
}

/// Does the line hold a path that begins with the folder and continues? In the middle of a longer path it is another
/// folder of the same name.
fn has_absolute(line: &str, folder: &str) -> bool {
    line.match_indices(folder).any(|(at, _)| {
        let is_path = |letter: char| letter.is_alphanumeric() || "_-.~$}>)*".contains(letter);
        let (before, after) = (&line[..at], &line[at + folder.len()..]);
        !before.ends_with(is_path) && after.starts_with(is_path)
    })
}

/// A text that this rule refuses, for tests elsewhere.
#[cfg(test)]
pub(super) fn example() -> String {
    format!("{}someone", FOLDERS[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absolute_path_of_a_machine_is_found() {
        for folder in FOLDERS {
            for (before, after) in
                [("", "x/y"), ("see `", "x`"), ("\"", ".cache\""), ("file://", "x"), ("-v cache:", "x")]
            {
                let text = format!("one\n{before}{folder}{after}\n");
                let found = check("notes.md", &text);
                assert_eq!(found.len(), 1, "{text}");
                assert_eq!(found[0].line, 2, "{text}");
            }
        }
    }

    #[test]
    fn folder_of_that_name_inside_another_passes() {
        for folder in FOLDERS {
            for before in ["a", "..", "~", "${X}", "https://example.org"] {
                let text = format!("{before}{folder}x\n");
                assert_eq!(check("notes.md", &text), [], "{text}");
            }
        }
    }
}

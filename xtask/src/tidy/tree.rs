//! The files that tidy looks at: what git tracks and what it would track next, read from the working tree.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use super::size;
use crate::error::XtaskError;

/// One file of the repository.
pub(super) struct RepoFile {
    /// From the root of the repository, with `/` between its parts.
    pub(super) path: String,
    pub(super) bytes: u64,
    /// None when the file is binary, or too large to be read at all.
    pub(super) text: Option<String>,
}

pub(super) fn files_of_the_repository(root: &Path) -> Result<Vec<RepoFile>, XtaskError> {
    // In a container the checkout often belongs to another user, which git refuses unless it is told otherwise.
    let output = Command::new("git")
        .args(["-c", "safe.directory=*", "ls-files", "-z"])
        .args(["--cached", "--others", "--exclude-standard"])
        .current_dir(root)
        .output()
        .map_err(XtaskError::GitStart)?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(XtaskError::GitRefused(stderr));
    }
    let listing = String::from_utf8_lossy(&output.stdout);
    // A file in conflict is listed once for each of its versions.
    let paths: BTreeSet<&str> = listing.split('\0').filter(|path| !path.is_empty()).collect();
    let mut files = Vec::with_capacity(paths.len());
    for path in paths {
        files.extend(read(root, path)?);
    }
    Ok(files)
}

/// None for what is tracked but deleted in the working tree, and for what is no regular file (symbolic links).
fn read(root: &Path, path: &str) -> Result<Option<RepoFile>, XtaskError> {
    let place = root.join(path);
    let failed = |source| XtaskError::Read { path: path.into(), source };
    let metadata = match place.symlink_metadata() {
        Ok(metadata) if metadata.is_file() => metadata,
        Ok(_) => return Ok(None),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    let bytes = metadata.len();
    let text = if bytes > size::MAX_BYTES { None } else { text_of(std::fs::read(&place).map_err(failed)?) };
    Ok(Some(RepoFile { path: path.to_owned(), bytes, text }))
}

/// The text of a file, or None when it is binary: a NUL byte, or no UTF-8.
fn text_of(content: Vec<u8>) -> Option<String> {
    String::from_utf8(content).ok().filter(|text| !text.contains('\0'))
}

/// The files and the folders above them, without a slash at the end; the root is the empty string.
pub(super) fn places<'a>(files: impl Iterator<Item = &'a str>) -> BTreeSet<String> {
    let mut places = BTreeSet::from([String::new()]);
    for file in files {
        let ends = file.match_indices('/').map(|(end, _)| end);
        places.extend(ends.map(|end| file[..end].to_owned()));
        places.insert(file.to_owned());
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listing_holds_this_file_and_nothing_that_git_ignores() {
        let files = files_of_the_repository(crate::repository_root()).unwrap();
        let this = files.iter().find(|file| file.path == "xtask/src/tidy/tree.rs").unwrap();
        assert_eq!(this.text.as_ref().unwrap().len() as u64, this.bytes);
        assert!(!files.iter().any(|file| file.path.starts_with("target/")));
    }

    #[test]
    fn binary_content_has_no_text() {
        assert_eq!(text_of(b"plain \xc3\xa9".to_vec()).unwrap(), "plain \u{e9}");
        assert_eq!(text_of(b"nul \0".to_vec()), None);
        assert_eq!(text_of(b"not utf-8 \xff".to_vec()), None);
    }

    #[test]
    fn places_are_files_and_their_folders() {
        let places = places(["a/b/c.md", "d.md"].into_iter());
        let expected = ["", "a", "a/b", "a/b/c.md", "d.md"];
        assert!(places.iter().eq(expected.iter()), "{places:?}");
    }
}

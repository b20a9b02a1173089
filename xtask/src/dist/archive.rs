//! Archives whose bytes depend on their content alone: entries by name, one time for all, owned by root.

use std::io::Write as _;

use flate2::{Compression, GzBuilder};
use tar::{Builder, EntryType, Header};

use crate::error::XtaskError;

/// A file, folder or link in an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    path: String,
    content: Content,
    /// User and group.
    owner: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Content {
    File { bytes: Vec<u8>, mode: u32 },
    Folder { mode: u32 },
    Link { to: String },
}

impl Entry {
    pub(super) fn file(path: &str, bytes: Vec<u8>) -> Self {
        Self { path: path.to_owned(), content: Content::File { bytes, mode: 0o644 }, owner: 0 }
    }

    pub(super) fn executable(path: &str, bytes: Vec<u8>) -> Self {
        Self { path: path.to_owned(), content: Content::File { bytes, mode: 0o755 }, owner: 0 }
    }

    /// A folder that its owner can write to.
    pub(super) fn folder(path: &str, owner: u64) -> Self {
        Self { path: path.to_owned(), content: Content::Folder { mode: 0o755 }, owner }
    }

    /// A folder for everybody's temporary files.
    pub(super) fn temporary_folder(path: &str) -> Self {
        Self { path: path.to_owned(), content: Content::Folder { mode: 0o1777 }, owner: 0 }
    }

    pub(super) fn link(path: &str, to: &str) -> Self {
        Self { path: path.to_owned(), content: Content::Link { to: to.to_owned() }, owner: 0 }
    }

    /// Length of a file in bytes.
    pub(super) fn bytes(&self) -> u64 {
        match &self.content {
            Content::File { bytes, .. } => bytes.len() as u64,
            Content::Folder { .. } | Content::Link { .. } => 0,
        }
    }
}

/// A tar archive in which every file has `time`, seconds since 1970.
pub(super) fn tar(entries: &[Entry], time: u64) -> Result<Vec<u8>, XtaskError> {
    let mut entries: Vec<&Entry> = entries.iter().collect();
    entries.sort_by(|a, b| a.path.cmp(&b.path));
    let mut builder = Builder::new(Vec::new());
    for entry in entries {
        let mut header = Header::new_gnu();
        header.set_mtime(time);
        header.set_uid(entry.owner);
        header.set_gid(entry.owner);
        let (kind, mode, bytes) = match &entry.content {
            Content::File { bytes, mode } => (EntryType::Regular, *mode, &bytes[..]),
            Content::Folder { mode } => (EntryType::Directory, *mode, &[][..]),
            Content::Link { .. } => (EntryType::Symlink, 0o777, &[][..]),
        };
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_size(bytes.len() as u64);
        match &entry.content {
            Content::Link { to } => builder.append_link(&mut header, &entry.path, to),
            Content::File { .. } | Content::Folder { .. } => builder.append_data(&mut header, &entry.path, bytes),
        }
        .map_err(|source| XtaskError::Write { path: entry.path.clone().into(), source })?;
    }
    builder.into_inner().map_err(|source| XtaskError::Write { path: "archive".into(), source })
}

/// Compressed by gzip, without a name or time in its header.
pub(super) fn gzip(bytes: &[u8]) -> Result<Vec<u8>, XtaskError> {
    let mut encoder = GzBuilder::new().mtime(0).write(Vec::new(), Compression::best());
    let done = encoder.write_all(bytes).and_then(|()| encoder.finish());
    done.map_err(|source| XtaskError::Write { path: "archive".into(), source })
}

/// A compressed tar archive with everything in one folder.
pub(super) fn tar_gz(folder: &str, entries: &[Entry], time: u64) -> Result<Vec<u8>, XtaskError> {
    let inside = |entry: &Entry| Entry { path: format!("{folder}/{}", entry.path), ..entry.clone() };
    gzip(&tar(&entries.iter().map(inside).collect::<Vec<_>>(), time)?)
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use flate2::read::GzDecoder;
    use tar::Archive;

    use super::*;

    #[test]
    fn the_same_content_gives_the_same_bytes_in_any_order() {
        let (a, b) = (Entry::file("a", vec![1; 100]), Entry::executable("b", vec![2]));
        let one = tar_gz("x", &[a.clone(), b.clone()], 7).unwrap();
        assert_eq!(one, tar_gz("x", &[b.clone(), a.clone()], 7).unwrap());
        assert_ne!(one, tar_gz("x", &[b, a], 8).unwrap());
    }

    #[test]
    fn everything_is_in_one_folder_with_its_mode() {
        let entries = [Entry::executable("ridge", b"program".to_vec()), Entry::file("man/man1/ridge.1", vec![])];
        let bytes = tar_gz("ridge-1", &entries, 1_000).unwrap();
        let mut archive = Archive::new(GzDecoder::new(&bytes[..]));
        let mut found = Vec::new();
        for entry in archive.entries().unwrap() {
            let mut entry = entry.unwrap();
            let mut text = String::new();
            entry.read_to_string(&mut text).unwrap();
            let header = entry.header();
            assert_eq!((header.mtime().unwrap(), header.uid().unwrap()), (1_000, 0));
            found.push((entry.path().unwrap().display().to_string(), header.mode().unwrap(), text));
        }
        let expected = [("ridge-1/man/man1/ridge.1", 0o644, ""), ("ridge-1/ridge", 0o755, "program")];
        assert_eq!(found, expected.map(|(path, mode, text)| (path.to_owned(), mode, text.to_owned())));
    }
}

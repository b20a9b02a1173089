//! A file mapped read-only into memory, so that opening weights costs no copy and no read until a page is touched.
#![allow(unsafe_code)]

use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Deref;
use std::path::Path;

use memmap2::Mmap;

/// The bytes of a regular file, mapped read-only and shared with every other process that maps it.
///
/// Dereferences to `&[u8]`. The mapping starts on a page boundary; what lies inside the file is aligned only as its
/// own offset allows. An empty file gives an empty slice.
///
/// # The file must not shrink or be rewritten in place
///
/// The kernel fetches pages when they are first touched. If another process truncates the file meanwhile, touching a
/// page past the new end kills this process with `SIGBUS`; if it writes into the file, the bytes change underneath.
/// Programs that replace a checkpoint by writing a new file and renaming it over the old one are safe: the mapping
/// keeps the old file alive.
pub struct MappedFile {
    /// `None` for an empty file, which cannot be mapped.
    map: Option<Mmap>,
}

impl MappedFile {
    /// Maps the whole of the regular file at `path`, following symbolic links.
    ///
    /// # Errors
    ///
    /// What the operating system says when the file cannot be opened or mapped; `InvalidInput` if `path` names
    /// something other than a regular file (a folder, a pipe, a device).
    pub fn open(path: impl AsRef<Path>) -> io::Result<Self> {
        let path = path.as_ref();
        // Asked before opening, because opening a pipe would wait for its writer, and again of what was opened,
        // because the name may have come to mean another file.
        regular(&std::fs::metadata(path)?)?;
        let file = File::open(path)?;
        let metadata = file.metadata()?;
        regular(&metadata)?;
        if metadata.len() == 0 {
            return Ok(Self { map: None });
        }
        // SAFETY: the mapping is private to this type, read-only, and lives as long as every slice borrowed from it.
        // What the type system cannot promise is that no other process truncates or rewrites the file while it is
        // mapped: a truncation becomes SIGBUS on access and not a read of foreign memory, and a rewrite changes the
        // values of plain bytes, on which no layout, length or pointer depends once it has been checked and copied
        // out. The type's documentation passes this hazard on to the user.
        let map = unsafe { Mmap::map(&file)? };
        Ok(Self { map: Some(map) })
    }
}

fn regular(metadata: &std::fs::Metadata) -> io::Result<()> {
    if metadata.is_file() {
        Ok(())
    } else {
        Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"))
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.map.as_deref().unwrap_or_default()
    }
}

impl AsRef<[u8]> for MappedFile {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl fmt::Debug for MappedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MappedFile").field("bytes", &self.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapping_shows_the_bytes_of_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("some.bin");
        let bytes: Vec<u8> = (0..=255).cycle().take(10_000).collect();
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!(&*MappedFile::open(&path).unwrap(), &bytes[..]);
    }

    #[test]
    fn mapping_survives_the_removal_of_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("some.bin");
        std::fs::write(&path, b"ridge").unwrap();
        let map = MappedFile::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(&*map, b"ridge");
    }

    #[test]
    fn empty_file_gives_an_empty_slice() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("empty.bin");
        std::fs::write(&path, b"").unwrap();
        assert!(MappedFile::open(&path).unwrap().is_empty());
    }

    #[test]
    fn folder_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let error = MappedFile::open(dir.path()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn missing_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let error = MappedFile::open(dir.path().join("none")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}

//! The files of a release: read, written, and named with their checksums.

use std::fs;
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

use crate::error::XtaskError;

/// `CHECKSUM  NAME` for every file in the folder, as sha256sum prints and checks them.
pub(super) fn checksums(folder: &Path) -> Result<String, XtaskError> {
    let mut text = String::new();
    for path in files(folder)? {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        text += &format!("{}  {name}\n", sha256(&read(&path)?));
    }
    Ok(text)
}

/// SHA-256 in hexadecimal.
pub(super) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The files in a folder, by name.
pub(super) fn files(folder: &Path) -> Result<Vec<PathBuf>, XtaskError> {
    let failed = |source| XtaskError::Read { path: folder.into(), source };
    let entries = fs::read_dir(folder).map_err(failed)?;
    let mut paths = entries.map(|entry| Ok(entry.map_err(failed)?.path())).collect::<Result<Vec<_>, _>>()?;
    paths.sort();
    Ok(paths)
}

pub(super) fn read(path: &Path) -> Result<Vec<u8>, XtaskError> {
    fs::read(path).map_err(|source| XtaskError::Read { path: path.into(), source })
}

/// Writes a file and gives its line of the report.
pub(super) fn write(folder: &Path, name: &str, bytes: &[u8]) -> Result<String, XtaskError> {
    let path = folder.join(name);
    fs::write(&path, bytes).map_err(|source| XtaskError::Write { path: path.clone(), source })?;
    Ok(named_size(&path, bytes.len()))
}

pub(super) fn named_size(path: &Path, bytes: usize) -> String {
    format!("{}  {}", path.file_name().unwrap_or_default().to_string_lossy(), mb(bytes as u64))
}

pub(super) fn mb(bytes: u64) -> String {
    format!("{:.1} MB", bytes as f64 / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_sha256sum_in_order_of_names() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("b"), "abc").unwrap();
        fs::write(folder.path().join("a"), "").unwrap();
        // FIPS 180-4's example, and the checksum of nothing.
        let expected = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855  a\n\
                        ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad  b\n";
        assert_eq!(checksums(folder.path()).unwrap(), expected);
    }
}

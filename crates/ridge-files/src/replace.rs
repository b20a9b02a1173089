//! Atomic replacement of a file.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::Path;

/// Writes the file `path` under a temporary name in its folder and renames it when it is complete. An existing mapping of
/// the old file stays valid, and a failure leaves no file behind.
///
/// # Errors
///
/// Those of `write`, and those of the operating system; `path` must not be a folder.
pub fn replace_file<E: From<std::io::Error>>(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> Result<(), E>,
) -> Result<(), E> {
    // Follows a symbolic link, so that the file it points to is replaced.
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    if path.is_dir() {
        return Err(std::io::Error::from(std::io::ErrorKind::IsADirectory).into());
    }
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.part", std::process::id()));
    let beside = path.with_file_name(name);
    let mut out = BufWriter::new(File::create(&beside)?);
    let done = write(&mut out).and_then(|()| Ok(out.flush()?)).and_then(|()| Ok(std::fs::rename(&beside, &path)?));
    if done.is_err() {
        // The first failure is the one to report.
        let _ = std::fs::remove_file(&beside);
    }
    done
}

//! Files that `ridge convert` and `ridge quantize` write: where they may be, and how writing them is interrupted.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ridge_models::ModelFiles;
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::error::{Error, Result, refused};
use crate::output::Progress;

/// Whether it is the name of a GGUF file.
pub(crate) fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"))
}

/// Refuses to write over what is there, or over what is read, of which every part is needed, and where no file can be.
pub(crate) fn check_target(files: &ModelFiles, from: &Path, to: &Path, force: bool) -> Result<()> {
    let shown = to.display().to_string();
    let mut read: Vec<&Path> = vec![from];
    read.extend(files.gguf().into_iter().flat_map(ridge_files::Gguf::files).map(Path::new));
    if let Ok(to) = to.canonicalize()
        && read.iter().any(|path| path.canonicalize().is_ok_and(|path| path == to))
    {
        return Err(refused("the output", &shown, "is what is read: give another name"));
    }
    let file = is_gguf(to);
    if file && to.is_dir() {
        return Err(refused("the output", &shown, "is a folder: give the name of a file"));
    }
    if to.exists() && !force {
        return Err(refused("the output", &shown, "is there: give another name, or --force"));
    }
    if file && to.parent().is_some_and(|folder| !folder.as_os_str().is_empty() && !folder.is_dir()) {
        return Err(refused("the output", &shown, "is in a folder that is not there: make it first"));
    }
    Ok(())
}

/// Runs `write` with a callback that takes the bytes done and the total. An interrupt ends it after the current tensor, so
/// that no part of a file is left; a second one ends the process.
pub(crate) fn interruptible<T>(
    what: &'static str,
    write: impl FnOnce(&mut dyn FnMut(u64, u64) -> io::Result<()>) -> ridge_models::Result<T>,
) -> Result<T> {
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&interrupted))
            .map_err(Error::Signal)?;
        signal_hook::flag::register(signal, Arc::clone(&interrupted)).map_err(Error::Signal)?;
    }
    let mut progress = None;
    let done = write(&mut |done, total| {
        progress.get_or_insert_with(|| Progress::new(what, total)).at(done);
        if interrupted.load(Ordering::Relaxed) { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) }
    });
    if done.is_err() && interrupted.load(Ordering::Relaxed) {
        return Err(Error::Interrupted);
    }
    Ok(done?)
}

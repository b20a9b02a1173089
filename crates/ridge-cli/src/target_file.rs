//! Files that `ridge convert` and `ridge quantize` write: where they may be, and how writing them is interrupted.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ridge_models::ModelFiles;
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::error::{Error, Result, refused};
use crate::output::{Progress, report};

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
        return Err(refused("the output", &shown, "already exists: give another name, or --force"));
    }
    if file && to.parent().is_some_and(|folder| !folder.as_os_str().is_empty() && !folder.is_dir()) {
        return Err(refused("the output", &shown, "is in a folder that is not there: make it first"));
    }
    Ok(())
}

/// How long an interruption waits for the current tensor.
const GRACE: Duration = Duration::from_millis(200);

/// Runs `write`, which writes `to`, with a callback that takes the bytes done and the total. An interrupt ends it after the
/// current tensor, or, where that takes long, at once; no part of a file is left.
pub(crate) fn interruptible<T: Send>(
    what: &'static str,
    to: &Path,
    write: impl FnOnce(&mut dyn FnMut(u64, u64) -> io::Result<()>) -> ridge_models::Result<T> + Send,
) -> Result<T> {
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&interrupted)).map_err(Error::Signal)?;
    }
    let is_interrupted = || interrupted.load(Ordering::Relaxed);
    let done = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut progress = None;
            write(&mut |done, total| {
                progress.get_or_insert_with(|| Progress::new(what, total)).at(done);
                if is_interrupted() { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) }
            })
        });
        let mut heard = None;
        while !writer.is_finished() {
            std::thread::sleep(Duration::from_millis(20));
            if is_interrupted() && heard.get_or_insert_with(Instant::now).elapsed() > GRACE {
                remove_parts(to);
                report(&Error::Interrupted);
                #[expect(clippy::exit, reason = "the thread that writes does not notice before its tensor is done")]
                std::process::exit(130);
            }
        }
        writer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    if done.is_err() && is_interrupted() {
        return Err(Error::Interrupted);
    }
    Ok(done?)
}

/// Removes what this process has begun to write, under names that end in its number and `.part`.
fn remove_parts(to: &Path) {
    let ending = format!(".{}.part", std::process::id());
    let parent = to.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    for folder in [to, parent] {
        for entry in folder.read_dir().into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().ends_with(&ending) {
                // Nothing is left to do about one that cannot be removed.
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }
}

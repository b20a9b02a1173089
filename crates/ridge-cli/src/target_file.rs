//! Output files of `ridge convert` and `ridge quantize`: validation of the path, and interruption of the write.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ridge_models::ModelFiles;
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::error::{Error, Result, refused};
use crate::output::{Progress, report};

/// Whether the path has the extension of a GGUF file.
pub(crate) fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"))
}

/// Rejects a path that exists, is an input (including each part of a split file), or is in a missing folder.
pub(crate) fn check_target(files: &ModelFiles, from: &Path, to: &Path, force: bool) -> Result<()> {
    let shown = to.display().to_string();
    let mut read: Vec<&Path> = vec![from];
    read.extend(files.gguf().into_iter().flat_map(ridge_files::Gguf::files).map(Path::new));
    // A name on the Hub is another path than the folder that it stands for.
    read.extend(files.folder());
    if let Ok(to) = to.canonicalize()
        && read.iter().any(|path| path.canonicalize().is_ok_and(|path| path == to))
    {
        return Err(refused("the output", &shown, "is an input of this command; give another name"));
    }
    let file = is_gguf(to);
    if file && to.is_dir() {
        return Err(refused("the output", &shown, "is a folder; give a file name"));
    }
    if to.exists() && !force {
        return Err(refused("the output", &shown, "already exists; give another name, or --force"));
    }
    if file && to.parent().is_some_and(|folder| !folder.as_os_str().is_empty() && !folder.is_dir()) {
        return Err(refused("the output", &shown, "is in a folder that does not exist; create it first"));
    }
    Ok(())
}

/// How long an interruption waits for the current tensor to finish. Removing a large partial file takes a few tenths of a
/// second too, and both together should stay within 0.3 s.
const GRACE: Duration = Duration::from_millis(40);

/// Runs `write`, which writes `to`, with a callback for the bytes done and the total. An interrupt ends it after the current
/// tensor, or immediately if that takes long; no partial file remains.
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
                report(&Error::Interrupted);
                remove_parts(to);
                #[expect(clippy::exit, reason = "the writing thread checks for interruption only between tensors")]
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

/// Removes the partial files of this process, whose names end in its process id and `.part`.
fn remove_parts(to: &Path) {
    let ending = format!(".{}.part", std::process::id());
    let parent = to.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    for folder in [to, parent] {
        for entry in folder.read_dir().into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().ends_with(&ending) {
                // Failure to remove one is ignored.
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }
}

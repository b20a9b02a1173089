//! `ridge convert`: from a folder in the layout of Hugging Face to a GGUF file, and back.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Args;
use ridge_files::gguf::TensorStorage;
use ridge_graph::DType;
use ridge_hw::units::Bytes;
use ridge_models::ModelFiles;
use ridge_models::gguf::{self, Quantisation};
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::args::FLOATS;
use crate::error::{Error, Result};
use crate::output::{Progress, note};
use crate::settings::refused;

/// Write a model in another layout
///
/// A folder in the layout of Hugging Face becomes a GGUF file, and a GGUF file such a folder: configuration,
/// tokenizer, chat template and weights.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ridge convert DIR model.gguf               a file for llama.cpp
  ridge convert DIR model.gguf --dtype bf16  with matrices in bf16
  ridge convert model.gguf DIR               a folder for transformers

Exit codes: 0 done, 1 failed, 2 not understood.")]
pub(crate) struct ConvertArgs {
    /// Folder of a model in the layout of Hugging Face, or a GGUF file
    from: PathBuf,

    /// What to write: a file that ends in .gguf, or a folder that is yet to be made
    to: PathBuf,

    /// Dtype of the matrices [default: as they are; f32 for what a folder has no format for]
    #[arg(long, value_parser = FLOATS, value_name = "DTYPE")]
    dtype: Option<String>,

    /// Write over what is there
    #[arg(long)]
    force: bool,

    /// Print no notes
    #[arg(short, long)]
    quiet: bool,
}

/// Is it the name of a GGUF file?
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

/// Runs `write`, to be told of progress. An interrupt ends it after the tensor that it is at, so that no part of a file
/// is left; a second one ends the process.
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

pub(crate) fn run(args: &ConvertArgs) -> Result<()> {
    let files = ModelFiles::open(Some(&args.from))?;
    check_target(&files, &args.from, &args.to, args.force)?;
    let dtype = args.dtype.as_deref().and_then(DType::from_name);
    match (files.gguf(), is_gguf(&args.to)) {
        (_, true) => {
            let how = Quantisation { matrices: dtype.map(TensorStorage::plain), ..Quantisation::default() };
            let written = interruptible("writing weights", |told| gguf::to_gguf(&files, &args.to, &how, told))?;
            if !args.quiet {
                note(&format!("wrote {}, {}", args.to.display(), Bytes(written.bytes)));
            }
        }
        (Some(file), false) => {
            interruptible("writing weights", |told| {
                gguf::to_folder(file, &args.to, dtype.unwrap_or(DType::F32), dtype.is_some(), told)
            })?;
            if !args.quiet {
                note(&format!("wrote {}", args.to.display()));
            }
        }
        (None, false) => {
            let shown = args.to.display().to_string();
            return Err(refused("the output", &shown, "does not end in .gguf, and a folder is what is read"));
        }
    }
    Ok(())
}

//! `ridge convert`: between a folder in the Hugging Face layout and a GGUF file, or from a folder to one of plain weights.

use std::path::PathBuf;

use clap::Args;
use ridge_files::gguf::TensorStorage;
use ridge_graph::DType;
use ridge_hw::units::Bytes;
use ridge_models::ModelFiles;
use ridge_models::gguf::{self, Quantisation};

use crate::args::FLOATS;
use crate::error::Result;
use crate::output::note;
use crate::target_file::{check_target, interruptible, is_gguf};

/// Convert between the Hugging Face layout and GGUF
///
/// Converts configuration, tokenizer, chat template and weights. What is written follows from the name of the output. A folder
/// written from a folder has the same model with its quantised weights (GPTQ, AWQ, fp8 and others) as plain ones.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ridge convert DIR model.gguf               a file for llama.cpp
  ridge convert DIR model.gguf --dtype bf16  the same with bf16 matrices
  ridge convert model.gguf DIR               a folder for transformers
  ridge convert GPTQ PLAIN --dtype bf16      quantised weights as plain ones

Exit codes: 0 done, 1 failed, 2 usage error.")]
pub(crate) struct ConvertArgs {
    /// Model: a folder in the Hugging Face layout, a GGUF file, or the ORG/NAME of a model downloaded with `ridge pull`
    from: PathBuf,

    /// Output: a .gguf file, or a new folder
    to: PathBuf,

    /// Dtype of the matrices [default: as stored; for quantised matrices written to a folder, f32 from GGUF and
    /// the dtype that the configuration names, or bf16, from a folder]
    #[arg(long, value_parser = FLOATS, value_name = "DTYPE")]
    dtype: Option<String>,

    /// Overwrite existing files
    #[arg(long)]
    force: bool,

    /// Print no notes
    #[arg(short, long)]
    quiet: bool,
}

pub(crate) fn run(args: &ConvertArgs) -> Result<()> {
    let files = ModelFiles::open(Some(&args.from))?;
    check_target(&files, &args.from, &args.to, args.force)?;
    let dtype = args.dtype.as_deref().and_then(DType::from_name);
    match (files.gguf(), is_gguf(&args.to)) {
        (_, true) => {
            let how = Quantisation { matrices: dtype.map(TensorStorage::plain), ..Quantisation::default() };
            let written =
                interruptible("writing weights", &args.to, |progress| gguf::to_gguf(&files, &args.to, &how, progress))?;
            if !args.quiet {
                note(&format!("wrote {}, {}", args.to.display(), Bytes(written.bytes)));
            }
        }
        (file, false) => {
            let default = match file {
                Some(_) => DType::F32,
                None => files.network_config()?.torch_dtype().unwrap_or(DType::BF16),
            };
            interruptible("writing weights", &args.to, |progress| {
                gguf::to_folder(&files, &args.to, dtype.unwrap_or(default), dtype.is_some(), progress)
            })?;
            if !args.quiet {
                note(&format!("wrote {}", args.to.display()));
            }
        }
    }
    Ok(())
}

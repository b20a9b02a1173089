//! `ridge quantize`: a model with its matrices in fewer bits, as a GGUF file.

use std::path::PathBuf;

use clap::Args;
use ridge_hw::units::Bytes;
use ridge_models::gguf::{self, Gguf, Quantisation, Storage};
use ridge_models::{ModelFiles, gguf::Written};

use crate::args::formats;
use crate::convert::{check_target, is_gguf};
use crate::error::Result;
use crate::output::{Progress, count, note};
use crate::settings::refused;

/// Store a model's matrices in fewer bits
///
/// Writes a GGUF file, which Ridge and llama.cpp run. Vectors stay f32. Rows that do not divide into the format's
/// blocks take the nearest format that holds them.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ridge quantize DIR model.gguf --format q8_0     hardly a difference
  ridge quantize DIR model.gguf --format q4_k     a quarter of bf16's bytes
  ridge quantize a.gguf b.gguf --format q3_k --imatrix i.gguf    weighed

Exit codes: 0 done, 1 failed, 2 not understood.")]
pub(crate) struct QuantizeArgs {
    /// Folder of a model in the layout of Hugging Face, or a GGUF file
    model: PathBuf,

    /// The file to write; its name ends in .gguf
    to: PathBuf,

    /// Format of the matrices
    #[arg(long, value_parser = formats())]
    format: String,

    /// Format of the embedding and the output projection [default: q6_k for formats of fewer bits, else --format]
    #[arg(long, value_parser = formats(), value_name = "FORMAT")]
    outer: Option<String>,

    /// How much each input of each matrix matters: a GGUF file that llama-imatrix wrote
    #[arg(long, value_name = "FILE")]
    imatrix: Option<PathBuf>,

    /// Write over what is there
    #[arg(long)]
    force: bool,

    /// Print no notes
    #[arg(short, long)]
    quiet: bool,
}

/// Bits of a stored number.
fn bits(storage: &Storage) -> f64 {
    let (elements, bytes) = storage.block();
    bytes as f64 * 8.0 / elements as f64
}

pub(crate) fn run(args: &QuantizeArgs) -> Result<()> {
    let storage = |name: &str| Storage::from_name(name).ok_or_else(|| refused("--format", name, "is not a format"));
    let matrices = storage(&args.format)?;
    let fine = storage("q6_k")?;
    let outer = match &args.outer {
        Some(name) => Some(storage(name)?),
        None => (bits(&matrices) < bits(&fine)).then_some(fine),
    };
    if !is_gguf(&args.to) {
        let shown = args.to.display().to_string();
        return Err(refused("the output", &shown, "does not end in .gguf, which is what is written"));
    }
    let files = ModelFiles::open(Some(&args.model))?;
    check_target(&args.model, &args.to, args.force)?;
    let importance = args.imatrix.as_ref().map(Gguf::open).transpose()?;
    let how = Quantisation { matrices: Some(matrices), outer, importance };
    let mut progress = None;
    let told = |done, total| progress.get_or_insert_with(|| Progress::new("quantising", total)).at(done);
    let written = gguf::to_gguf(&files, &args.to, &how, told)?;
    drop(progress);
    if !args.quiet {
        say(args, &written);
    }
    Ok(())
}

fn say(args: &QuantizeArgs, written: &Written) {
    let each: Vec<String> = written.tensors.iter().map(|(name, n)| format!("{n} in {name}")).collect();
    note(&format!("wrote {}, {}: {}", args.to.display(), Bytes(written.bytes), each.join(", ")));
    if let Some((first, has)) = written.instead.first() {
        let n = count(written.instead.len(), "matrix").replace("matrixs", "matrices");
        note(&format!("{n} whose rows {} cannot hold, such as {first}, which is in {has}", args.format));
    }
    if written.unweighed > 0 {
        let n = count(written.unweighed, "matrix").replace("matrixs", "matrices");
        note(&format!("the importance matrix says nothing of {n}"));
    }
}

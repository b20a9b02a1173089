//! `ridge quantize`: quantises a model's matrices and writes a GGUF file.

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::Args;
use clap::builder::PossibleValuesParser;
use ridge_files::gguf::{ImportanceMatrix, TensorStorage};
use ridge_graph::format;
use ridge_hw::units::Bytes;
use ridge_models::gguf::{self, Instead, Mix, Quantisation};
use ridge_models::{ModelFiles, gguf::Written};

use crate::args::formats;
use crate::error::{Result, refused};
use crate::output::{count, note};
use crate::target_file::{check_target, interruptible, is_gguf};

/// Quantise a model's weights
///
/// Writes a GGUF file for Ridge and llama.cpp. Vectors stay f32. Matrices whose row length is not a multiple of the
/// format's block size use the nearest format that fits.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ridge quantize DIR model.gguf --format q8_0     nearly lossless
  ridge quantize DIR model.gguf --format q4_k     0.28 times the size of bf16
  ridge quantize DIR model.gguf --format q4_k_m   a mix of formats
  ridge quantize a.gguf b.gguf --format q3_k --imatrix i.gguf

Exit codes: 0 done, 1 failed, 2 usage error.")]
pub(crate) struct QuantizeArgs {
    /// Model: a folder in the Hugging Face layout, a GGUF file, or the ORG/NAME of a model downloaded with `ridge pull`
    model: PathBuf,

    /// Output file, with the extension .gguf
    to: PathBuf,

    /// Format of the matrices, or one of llama-quantize's mixes (_s, _m, _l)
    #[arg(long, value_parser = formats_and_mixes(), ignore_case = true)]
    format: String,

    /// Format of the embedding and the output projection [default: that of the mix; q6_k for formats of
    /// fewer bits; otherwise --format]
    #[arg(long, value_parser = formats(), ignore_case = true, value_name = "FORMAT")]
    outer: Option<String>,

    /// Importance matrix: a file written by llama-imatrix, GGUF or the older format
    #[arg(long, value_name = "FILE")]
    imatrix: Option<PathBuf>,

    /// Overwrite existing files
    #[arg(long)]
    force: bool,

    /// Print no notes
    #[arg(short, long)]
    quiet: bool,
}

fn formats_and_mixes() -> PossibleValuesParser {
    let formats = format::all();
    let names = formats.iter().map(|format| format.name()).chain(Mix::all().iter().map(|mix| mix.name));
    names.collect::<Vec<_>>().into()
}

/// Bits per stored element.
fn bits(storage: &TensorStorage) -> f64 {
    let (elements, bytes) = storage.block();
    bytes as f64 * 8.0 / elements as f64
}

pub(crate) fn run(args: &QuantizeArgs) -> Result<()> {
    let storage = |name: &str| {
        TensorStorage::from_name(&name.to_ascii_lowercase()).ok_or_else(|| refused("--format", name, "is not a format"))
    };
    let mix = Mix::from_name(&args.format.to_ascii_lowercase());
    let matrices = if mix.is_none() { Some(storage(&args.format)?) } else { None };
    let fine = storage("q6_k")?;
    let outer = match &args.outer {
        Some(name) => Some(storage(name)?),
        None => matrices.as_ref().is_some_and(|m| bits(m) < bits(&fine)).then_some(fine),
    };
    if !is_gguf(&args.to) {
        let shown = args.to.display().to_string();
        return Err(refused("the output", &shown, "must end in .gguf"));
    }
    let files = ModelFiles::open(Some(&args.model))?;
    check_target(&files, &args.model, &args.to, args.force)?;
    let importance = args.imatrix.as_ref().map(ImportanceMatrix::open).transpose()?;
    let how = Quantisation { matrices, mix, outer, importance };
    let written = interruptible("quantising", &args.to, |progress| gguf::to_gguf(&files, &args.to, &how, progress))?;
    if !args.quiet {
        say(args, &written);
    }
    Ok(())
}

fn say(args: &QuantizeArgs, written: &Written) {
    let each: Vec<String> = written.tensors.iter().map(|(name, n)| format!("{n} in {name}")).collect();
    note(&format!("wrote {}, {}: {}", args.to.display(), Bytes(written.bytes), each.join(", ")));
    let matrices = |n: usize| count(n, "matrix").replace("matrixs", "matrices");
    // Grouped by the requested format: that of --format, of --outer, or of a mix.
    let mut instead: BTreeMap<&str, Vec<&Instead>> = BTreeMap::new();
    for matrix in &written.instead {
        instead.entry(matrix.wanted).or_default().push(matrix);
    }
    for (wanted, all) in instead {
        let (n, Instead { tensor, has, .. }) = (matrices(all.len()), all[0]);
        note(&format!("{n} with a row length that does not fit {wanted}, such as {tensor}, stored as {has}"));
    }
    if written.again > 0 {
        let n = matrices(written.again);
        note(&format!(
            "{n} were already quantised, so errors accumulate; start from the unquantised model if possible"
        ));
    }
    if written.unweighed > 0 {
        note(&format!("the importance matrix has no entry for {}", matrices(written.unweighed)));
    }
}

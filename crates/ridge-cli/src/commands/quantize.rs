//! `ridge quantize`: a model with its matrices in fewer bits, as a GGUF file.

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
/// Writes a GGUF file, which Ridge and llama.cpp run. Vectors stay f32. Rows that do not divide into the format's
/// blocks take the nearest format that holds them.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ridge quantize DIR model.gguf --format q8_0     nearly lossless
  ridge quantize DIR model.gguf --format q4_k     a quarter of bf16's bytes
  ridge quantize DIR model.gguf --format q4_k_m   more bits where they matter
  ridge quantize a.gguf b.gguf --format q3_k --imatrix i.gguf

Exit codes: 0 done, 1 failed, 2 usage error.")]
pub(crate) struct QuantizeArgs {
    /// Model: a folder in the Hugging Face layout, a GGUF file, or the ORG/NAME of one that `ridge pull` downloaded
    model: PathBuf,

    /// Output file; its name ends in .gguf
    to: PathBuf,

    /// Format of the matrices, or a mix of formats (_s, _m, _l) as llama-quantize has it
    #[arg(long, value_parser = formats_and_mixes(), ignore_case = true)]
    format: String,

    /// Format of the embedding and the output projection [default: that of the mix; q6_k for formats of
    /// fewer bits; else --format]
    #[arg(long, value_parser = formats(), ignore_case = true, value_name = "FORMAT")]
    outer: Option<String>,

    /// Importance matrix: a file that llama-imatrix wrote, GGUF or the older format
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

/// Bits of a stored number.
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
        return Err(refused("the output", &shown, "does not end in .gguf, which is what is written"));
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
    // By what was wanted: of --format, of --outer, or of a mix.
    let mut instead: BTreeMap<&str, Vec<&Instead>> = BTreeMap::new();
    for matrix in &written.instead {
        instead.entry(matrix.wanted).or_default().push(matrix);
    }
    for (wanted, all) in instead {
        let (n, Instead { tensor, has, .. }) = (matrices(all.len()), all[0]);
        note(&format!("{n} whose rows {wanted} cannot hold, such as {tensor}, which is in {has}"));
    }
    if written.again > 0 {
        let n = matrices(written.again);
        note(&format!(
            "{n} quantised a second time, and the losses add up: begin with the unquantised model if you can"
        ));
    }
    if written.unweighed > 0 {
        note(&format!("the importance matrix says nothing of {}", matrices(written.unweighed)));
    }
}

//! Arguments for the number formats in which a model is stored and computed.

use std::path::PathBuf;

use clap::builder::{PossibleValue, PossibleValuesParser};
use clap::{Args, ValueEnum};
use ridge::{ActivationMode, NumberSettings};
use ridge_graph::format::{self, ScaledFormat};
use ridge_graph::{DType, FormatRef};

use crate::error::{Result, refused};

/// The model and its number formats.
#[derive(Clone, Debug)]
pub(crate) struct ModelSettings {
    /// A folder, a configuration or a GGUF file; the embedded model if `None`.
    pub(crate) path: Option<PathBuf>,
    pub(crate) numbers: NumberSettings,
}

/// Number formats, for every command that builds a model.
#[derive(Debug, Args)]
#[command(next_help_heading = "Precision")]
pub(crate) struct NumberArgs {
    /// Store matrices in this format, converted while loading; f8 (E4M3) and int8 have one scale per row and are for the
    /// matrices of layers
    #[arg(long, value_parser = storage_formats(), ignore_case = true)]
    format: Option<String>,

    /// Dtype of activations [default: that in the model's config; for GGUF files bf16, or f32 if their matrices are f32]
    #[arg(long, value_parser = FLOATS, ignore_case = true, value_name = "DTYPE")]
    dtype: Option<String>,

    /// Dtype of the KV cache; int8 and f8 (E4M3) have one scale per key and value of each head [default: the dtype of
    /// activations]
    #[arg(long, value_parser = cache_dtypes(), ignore_case = true, value_name = "DTYPE")]
    cache_dtype: Option<String>,

    /// Activations in products with quantised weights: exact, or rounded to int8 with one scale per 256 values (on the CPU, by
    /// block-quantised weights) or to 8 bits as the weights are (on a GPU, by weights in f8 or int8 with scales of rows or of blocks)
    #[arg(long, value_enum, default_value = "auto")]
    activations: ActivationArg,
}

/// Values of `--activations`.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum ActivationArg {
    /// The faster one: on the CPU exact for prompts if activations are bf16 and it has AMX, int8 otherwise; on a GPU 8 bits by
    /// weights of 8 bits
    Auto,
    /// Int8 on the CPU; on a GPU as auto
    Int8,
    /// Always exact
    Exact,
}

impl NumberArgs {
    /// The settings of the model at `path`, or of the embedded model.
    ///
    /// # Errors
    /// When a dtype or format has an unknown name.
    pub(crate) fn settings(&self, path: Option<PathBuf>) -> Result<ModelSettings> {
        let dtype = |flag, name: &str| {
            DType::from_name(&name.to_ascii_lowercase()).ok_or_else(|| refused(flag, name, "is not a dtype"))
        };
        let format = |name: &String| {
            let name = name.to_ascii_lowercase();
            let rows = ROWS.iter().find(|(own, _)| *own == name).map(|(_, format)| FormatRef::new(*format));
            rows.or_else(|| FormatRef::from_name(&name)).ok_or_else(|| refused("--format", &name, "is not a format"))
        };
        let numbers = NumberSettings {
            format: self.format.as_ref().map(format).transpose()?,
            dtype: self.dtype.as_deref().map(|name| dtype("--dtype", name)).transpose()?,
            cache_dtype: match self.cache_dtype.as_deref() {
                Some(name) => match &*name.to_ascii_lowercase() {
                    INT8 | "i8" => Some(DType::I8),
                    F8 | "f8e4m3" => Some(DType::F8E4M3),
                    _ => Some(dtype("--cache-dtype", name)?),
                },
                None => None,
            },
            activations: match self.activations {
                ActivationArg::Auto => ActivationMode::Auto,
                ActivationArg::Int8 => ActivationMode::Int8,
                ActivationArg::Exact => ActivationMode::Exact,
            },
        };
        Ok(ModelSettings { path, numbers })
    }
}

/// Dtypes of activations and unquantised matrices, by name.
pub(crate) const FLOATS: [&str; 3] = ["f32", "bf16", "f16"];

const F8: &str = "f8";
const INT8: &str = "int8";
/// Formats of codes with a scale for each row, by their names on the command line.
const ROWS: [(&str, ScaledFormat); 2] = [(F8, ScaledFormat::F8_ROWS), (INT8, ScaledFormat::INT8_ROWS)];

/// Names of dtypes of a cache, and of those that reports show.
fn cache_dtypes() -> PossibleValuesParser {
    let aliased = [PossibleValue::new(INT8).alias("i8"), PossibleValue::new(F8).alias("f8e4m3")];
    ["f32", "bf16", "f16"].map(PossibleValue::new).into_iter().chain(aliased).collect::<Vec<_>>().into()
}

/// Parses the name of a format that weights can have in memory.
fn storage_formats() -> PossibleValuesParser {
    format::all().iter().map(|f| f.name()).chain(ROWS.map(|(name, _)| name)).collect::<Vec<_>>().into()
}

/// Parses the name of a storage format of files.
pub(crate) fn formats() -> PossibleValuesParser {
    format::all().iter().map(|f| f.name()).collect::<Vec<_>>().into()
}

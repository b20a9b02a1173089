//! In which number formats a model is stored and computes.

use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use clap::{Args, ValueEnum};
use ridge::{ActivationMode, NumberSettings};
use ridge_graph::{DType, FormatRef, format};

use crate::error::{Result, refused};

/// Which model is run, and in which number formats.
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
    /// Store matrices in this format, converted while loading
    #[arg(long, value_parser = formats(), ignore_case = true)]
    format: Option<String>,

    /// Dtype of activations [default: what the model names; bf16 for GGUF files but those of f32]
    #[arg(long, value_parser = FLOATS, ignore_case = true, value_name = "DTYPE")]
    dtype: Option<String>,

    /// Dtype of the keys and values in the cache, int8 with a scale for each key and value of each head [default: that of
    /// activations]
    #[arg(long, value_parser = ["f32", "bf16", "f16", "int8"], ignore_case = true, value_name = "DTYPE")]
    cache_dtype: Option<String>,

    /// Activations that the CPU multiplies block-quantised weights by: exact, or rounded to int8 with a scale for every 256
    #[arg(long, value_enum, default_value = "auto")]
    activations: ActivationArg,
}

/// Values of `--activations`.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum ActivationArg {
    /// The faster one: exact for prompts if activations are bf16 and the CPU has AMX, else rounded
    Auto,
    /// All rounded
    Int8,
    /// All exact
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
            FormatRef::from_name(&name.to_ascii_lowercase()).ok_or_else(|| refused("--format", name, "is not a format"))
        };
        let numbers = NumberSettings {
            format: self.format.as_ref().map(format).transpose()?,
            dtype: self.dtype.as_deref().map(|name| dtype("--dtype", name)).transpose()?,
            cache_dtype: match self.cache_dtype.as_deref() {
                Some(name) if name.eq_ignore_ascii_case("int8") => Some(DType::I8),
                name => name.map(|name| dtype("--cache-dtype", name)).transpose()?,
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

/// Names of the dtypes that activations and unquantised matrices may have.
pub(crate) const FLOATS: [&str; 3] = ["f32", "bf16", "f16"];

/// Parses the name of a storage format.
pub(crate) fn formats() -> PossibleValuesParser {
    format::all().iter().map(|f| f.name()).collect::<Vec<_>>().into()
}

//! The model and the device of a plan, and the sources of their figures.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use ridge_files::hub::find_model;
use ridge_graph::DType;
use ridge_hw::spec::Precision;
use ridge_models::{ModelConfig, ModelFiles, NetworkConfig, WeightSource};
use ridge_plan::PlanError;
use ridge_plan::efficiency::{Calibration, Machine};
use ridge_plan::ledger::Quantisation;
use ridge_plan::reading::Reading;
use serde_json::{Value, json};

use super::shape::{ModelShape, rope_scaling, with_rope_scaling};
use crate::error::{Error, Result, refused};
use crate::output::note;

/// The model and the device.
#[derive(Debug, Args)]
pub(crate) struct TargetArgs {
    /// Model: a folder in the Hugging Face layout, a config.json, a GGUF file, or the ORG/NAME of a model downloaded with
    /// `ridge pull`
    #[arg(value_name = "MODEL", required_unless_present = "shape", conflicts_with = "shape")]
    pub(crate) model: Option<PathBuf>,

    /// Plan a decoder of these sizes instead of a model, with SwiGLU and no biases: D hidden size, L layers, V vocabulary
    /// size, m MLP width relative to D (or F, the absolute width), N attention heads; optionally K key-value heads, H head
    /// size, T maximum context
    #[arg(long, value_name = "D=4096,L=32,V=128256,m=3.5,N=32", value_parser = ModelShape::parse)]
    pub(crate) shape: Option<ModelShape>,

    /// Override the model's rope_scaling with this JSON object; its factor also multiplies the maximum context
    #[arg(long, value_name = "JSON", value_parser = rope_scaling)]
    pub(crate) rope_scaling: Option<Value>,

    /// Device, by marketing name or driver name
    #[arg(long, value_name = "NAME", default_value = "H100-SXM")]
    pub(crate) device: String,

    /// Efficiencies of devices, as measured by `ridge bench --calibrate FILE` [default: a table of published and
    /// fitted figures]
    #[arg(long, value_name = "FILE")]
    pub(crate) efficiency: Option<PathBuf>,
}

impl TargetArgs {
    /// The model's graph in the form that plans read.
    pub(crate) fn reading(&self) -> Result<Reading> {
        self.read_as(Reading::from_json)
    }

    /// The same, with a cache of `bits` an element as the engine stores it, its scales included where it has such a dtype.
    pub(crate) fn reading_with_cache(&self, bits: usize) -> Result<Reading> {
        self.read_as(|file, text| Reading::with_cache(file, text, cache_dtype(bits)))
    }

    /// `reading`, of this model, with the module that drafts tokens if there are to be `drafts`.
    pub(crate) fn with_drafts(&self, reading: Reading, drafts: usize) -> Result<Reading> {
        if drafts == 0 {
            return Ok(reading);
        }
        self.read_as(|file, text| reading.clone().with_prediction(file, text))
    }

    /// The model's graph in the form that Ridge trains.
    pub(crate) fn reading_trained_by_ridge(&self) -> Result<Reading> {
        self.read_as(Reading::trained_by_ridge)
    }

    fn read_as(&self, read: impl Fn(&str, &str) -> Result<Reading, PlanError>) -> Result<Reading> {
        let (name, text) = self.config_text()?;
        Ok(read(&name, &text)?)
    }

    /// The model's configuration, as a family that runs reads it, and where its weights would come from: its files, or, where it has
    /// none that can be read, random ones in the formats in which the configuration says that they are published.
    pub(crate) fn config_and_weights(&self) -> Result<(ModelConfig, WeightSource)> {
        let (name, text) = self.config_text()?;
        let config = ModelConfig::from_json(&name, &text)?;
        let published = || WeightSource::RandomAsPublished(Box::new(config.clone()));
        let files = self.model.as_deref().map(open).transpose()?.filter(ModelFiles::has_weights);
        let source = match files.map(|files| (stored(&files, &config), files.gguf().is_some())) {
            None => published(),
            Some((Err(error), false)) => {
                note(&format!("weights are counted as {name} says, because their files cannot be counted: {error}"));
                published()
            }
            Some((stored, _)) => stored?,
        };
        Ok((config, source))
    }

    /// The configuration of the model before it was quantised.
    pub(crate) fn unquantised_config(&self) -> Result<ModelConfig> {
        let (name, text) = self.config_text()?;
        Ok(ModelConfig::unquantised(&name, &text)?)
    }

    /// The name and the text of the model's configuration.
    fn config_text(&self) -> Result<(String, String)> {
        let (name, mut text) = match (&self.model, &self.shape) {
            (Some(path), _) => {
                let files = open(path)?;
                (files.config_name(), untied_as_stored(&files)?)
            }
            (None, Some(shape)) => ("--shape".to_owned(), shape.config()),
            (None, None) => return Err(refused("MODEL", "", "is required, or --shape")),
        };
        if let Some(scaling) = &self.rope_scaling {
            let wrong = |why: String| refused("--rope-scaling", scaling, &why);
            text = with_rope_scaling(&text, scaling).map_err(wrong)?;
        }
        Ok((name, text))
    }

    /// The device in `precision`.
    pub(crate) fn machine(&self, precision: Precision) -> Result<Machine> {
        Ok(self.calibration()?.machine(&self.device, precision)?)
    }

    /// The requested weight format, or that of the model's files of weights, or that in which the configuration says that the model
    /// is published, or 16 bits.
    pub(crate) fn weights(&self, asked: Option<Quantisation>) -> Result<Quantisation> {
        match asked {
            Some(weights) => Ok(weights),
            None => {
                let (config, source) = self.config_and_weights().map_err(|error| match error {
                    Error::Plan(PlanError::Model(error)) | Error::Model(error) => {
                        PlanError::Storage(Box::new(error)).into()
                    }
                    other => other,
                })?;
                Ok(Quantisation::of_source(&config, &source)?.unwrap_or(Quantisation::Bf16))
            }
        }
    }

    /// The device for serving with weights in this format.
    pub(crate) fn server(&self, weights: Quantisation) -> Result<Machine> {
        serving_machine(&self.calibration()?, &self.device, weights)
    }

    fn calibration(&self) -> Result<Calibration> {
        let Some(path) = &self.efficiency else {
            if self.device.eq_ignore_ascii_case("cpu") {
                let why = "has no specification sheet; create one with `ridge bench --calibrate FILE`, then give --efficiency FILE and the device name in it";
                return Err(refused("--device", &self.device, why));
            }
            return Ok(Calibration::default());
        };
        let file = path.display().to_string();
        let text = std::fs::read_to_string(path)
            .map_err(|e| refused("--efficiency", &file, &format!("cannot be read: {e}")))?;
        Ok(Calibration::parse(&file, &text)?)
    }
}

/// The graph of a config.json, of one in a folder or of a GGUF file, in the form that plans read, with a cache of `bits` an
/// element as the engine stores it.
pub(crate) fn read_model(path: &Path, bits: usize) -> Result<Reading> {
    let files = open(path)?;
    Ok(Reading::with_cache(&files.config_name(), &untied_as_stored(&files)?, cache_dtype(bits))?)
}

/// The text of a model's configuration, without tied embeddings where its weights have an output projection of their own.
fn untied_as_stored(files: &ModelFiles) -> Result<String> {
    let text = files.config_text()?.into_owned();
    let tied = |config: ridge_models::Result<ModelConfig>| config.is_ok_and(|config| config.tie_word_embeddings);
    if tied(ModelConfig::from_json(&files.config_name(), &text))
        && files.config().is_ok_and(|config| !config.tie_word_embeddings)
        && let Ok(serde_json::Value::Object(mut config)) = serde_json::from_str(&text)
    {
        config.insert("tie_word_embeddings".to_owned(), false.into());
        return Ok(serde_json::Value::Object(config).to_string());
    }
    Ok(text)
}

/// The dtype of a cache with elements of `bits` bits; bf16 for those that the engine does not have.
pub(crate) fn cache_dtype(bits: usize) -> DType {
    match bits {
        8 => DType::I8,
        32 => DType::F32,
        _ => DType::BF16,
    }
}

/// What an element of a cache of `bits` bits takes, for the inputs of a plan.
pub(crate) fn cache_element(bits: usize) -> String {
    match bits {
        8 => "8 bits, and an f32 scale per key and value of each head".to_owned(),
        _ => format!("{bits} bits"),
    }
}

/// The files of a model.
fn open(path: &Path) -> Result<ModelFiles> {
    let path = find_model(path)?;
    let config = if path.is_dir() { path.join("config.json") } else { path.clone() };
    if let Err(e) = std::fs::metadata(&config) {
        let why = format!("cannot be read ({e}); give a folder with a config.json, that file, or a GGUF file");
        return Err(refused("MODEL", config.display(), &why));
    }
    let files = if path.is_dir() { ModelFiles::open(Some(&path)) } else { ModelFiles::from_config(&path) };
    Ok(files.map_err(PlanError::from)?)
}

/// The weights of `files`, whose tensors must be those of the model of `config`.
fn stored(files: &ModelFiles, config: &ModelConfig) -> Result<WeightSource, PlanError> {
    let checkpoint = files.network_checkpoint(&NetworkConfig::Decoder(config.clone()))?;
    let source = WeightSource::Checkpoint(Arc::new(checkpoint));
    Quantisation::of_source(config, &source)?;
    Ok(source)
}

/// The machine for weights in this format.
pub(crate) fn serving_machine(known: &Calibration, device: &str, weights: Quantisation) -> Result<Machine> {
    Ok(match weights {
        Quantisation::Nvfp4 | Quantisation::Mxfp4 => {
            known.machine(device, Precision::Fp8)?.in_a_server().in_four_bits()
        }
        Quantisation::Fp8 => known.machine(device, Precision::Fp8)?.in_a_server(),
        // Where the device has no products of a file's codes, these are decoded to 16 bits as integers are.
        Quantisation::File { precision, .. } => {
            let machine = known.machine(device, precision).or_else(|_| known.machine(device, Precision::Bf16));
            machine?.in_a_server()
        }
        // Integer weights are decoded to 16 bits before the matrix units.
        Quantisation::Bf16 | Quantisation::Q8 | Quantisation::Int4 | Quantisation::Blocks { .. } => {
            known.machine(device, Precision::Bf16)?.in_a_server()
        }
    })
}

/// The sources of a device's figures.
pub(crate) fn sources(machine: &Machine) -> Vec<String> {
    vec![
        match machine.specified {
            true => format!("{}: rates and capacity specified by its sheet", machine.name),
            false => format!("{}: rates measured, capacity as reported by the system", machine.name),
        },
        format!("efficiencies: {}", machine.efficiency.source),
        "parameters, FLOPs and bytes: modelled, exact for the model's graph".to_owned(),
        "times: modelled; cargo xtask accuracy reports their errors".to_owned(),
    ]
}

/// The same for JSON.
pub(crate) fn sources_json(machine: &Machine) -> serde_json::Value {
    json!({ "device": if machine.specified { "specified" } else { "measured" }, "efficiencies": machine.efficiency.source, "memory": "modelled", "times": "modelled" })
}

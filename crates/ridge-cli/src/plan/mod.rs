//! `ridge plan`: what a model needs and takes on given hardware. One file a subcommand; what they share is here.

mod comm;
mod diagnose;
mod fit;
mod kernel;
mod page;
mod pipeline;
mod serve;
mod topology;
mod train;

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use ridge_hw::spec::Precision;
use ridge_models::ModelFiles;
use ridge_plan::PlanError;
use ridge_plan::efficiency::{Calibration, Machine};
use ridge_plan::ledger::{Ledger, LedgerEntry, Quantisation};
use ridge_plan::plot::Bar;
use ridge_plan::reading::Reading;
use serde_json::json;

use self::page::Table;
use crate::error::{Error, Result};
use crate::settings::refused;

/// What can be planned.
#[derive(Debug, Subcommand)]
pub(crate) enum PlanCommand {
    Fit(fit::FitArgs),
    Kernel(kernel::KernelArgs),
    Train(train::TrainArgs),
    Serve(serve::ServeArgs),
    Comm(comm::CommArgs),
    Pipeline(pipeline::PipelineArgs),
    Topology(topology::TopologyArgs),
    Diagnose(diagnose::DiagnoseArgs),
}

/// Runs one.
pub(crate) fn run(command: &PlanCommand) -> Result<()> {
    match command {
        PlanCommand::Fit(args) => fit::run(args),
        PlanCommand::Kernel(args) => kernel::run(args),
        PlanCommand::Train(args) => train::run(args),
        PlanCommand::Serve(args) => serve::run(args),
        PlanCommand::Comm(args) => comm::run(args),
        PlanCommand::Pipeline(args) => pipeline::run(args),
        PlanCommand::Topology(args) => topology::run(args),
        PlanCommand::Diagnose(args) => diagnose::run(args),
    }
}

/// The model and the device.
#[derive(Debug, Args)]
pub(crate) struct TargetArgs {
    /// Folder of a model in the layout of Hugging Face, a config.json, also of families that can only be planned, or a GGUF
    /// file
    #[arg(value_name = "MODEL")]
    pub(crate) model: PathBuf,

    /// Device, as its maker or its driver calls it
    #[arg(long, value_name = "NAME", default_value = "H100-SXM")]
    pub(crate) device: String,

    /// What devices reach of their sheets, as `ridge bench --calibrate FILE` measured it [default: a table of published and
    /// fitted figures]
    #[arg(long, value_name = "FILE")]
    pub(crate) efficiency: Option<PathBuf>,
}

/// How it is shown.
#[derive(Debug, Args)]
pub(crate) struct ShownArgs {
    /// Print one JSON object
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,

    /// Show the formula and the source of each figure
    #[arg(long, conflicts_with = "json", help_heading = "Output")]
    pub(crate) explain: bool,
}

impl TargetArgs {
    /// The model's graph as plans read it.
    pub(crate) fn reading(&self) -> Result<Reading> {
        read_model(&self.model)
    }

    /// The device in `precision`.
    pub(crate) fn machine(&self, precision: Precision) -> Result<Machine> {
        Ok(self.calibration()?.machine(&self.device, precision)?)
    }

    /// The device as a server uses it, for weights in this format.
    pub(crate) fn server(&self, weights: Quantisation) -> Result<Machine> {
        serving_machine(&self.calibration()?, &self.device, weights)
    }

    fn calibration(&self) -> Result<Calibration> {
        let Some(path) = &self.efficiency else {
            if self.device.eq_ignore_ascii_case("cpu") {
                let why = "has no sheet, since no two are alike; write one with `ridge bench --calibrate FILE`, then give --efficiency FILE and the device that it names";
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

/// The graph of a model's config.json, of that in a folder or of a GGUF file, as plans read it.
pub(crate) fn read_model(path: &Path) -> Result<Reading> {
    let path = if path.is_dir() { path.join("config.json") } else { path.to_owned() };
    if let Err(e) = std::fs::metadata(&path) {
        let why = format!("cannot be read ({e}); give a folder with a config.json, that file, or a GGUF file");
        return Err(refused("MODEL", path.display(), &why));
    }
    let files = ModelFiles::from_config(&path).map_err(PlanError::from)?;
    Ok(Reading::from_json(name_of(&path), files.config_text())?)
}

fn name_of(path: &Path) -> &str {
    path.file_name().and_then(|n| n.to_str()).unwrap_or("config.json")
}

/// The machine for weights in this format.
pub(crate) fn serving_machine(known: &Calibration, device: &str, weights: Quantisation) -> Result<Machine> {
    Ok(match weights {
        Quantisation::Nvfp4 | Quantisation::Mxfp4 => {
            known.machine(device, Precision::Fp8)?.in_a_server().in_four_bits()
        }
        Quantisation::Fp8 => known.machine(device, Precision::Fp8)?.in_a_server(),
        // Integers are decoded to 16 bits on their way to the matrix units.
        Quantisation::Bf16 | Quantisation::Q8 | Quantisation::Int4 => {
            known.machine(device, Precision::Bf16)?.in_a_server()
        }
    })
}

/// A format of weights.
pub(crate) fn quantisation(typed: &str) -> Result<Quantisation, String> {
    Quantisation::find(typed).map_err(|e| match e {
        PlanError::Setting { problem, remedy, .. } => format!("{problem}; {remedy}"),
        other => other.to_string(),
    })
}

/// A number above 0 and at most `MOST`, such as `2.5` or `15e12`, or with K, M, B or T behind it: thousands to millions
/// of millions.
pub(crate) fn amount<const MOST: u64>(typed: &str) -> Result<f64, String> {
    let (digits, unit) = match typed.char_indices().last() {
        Some((at, 'K' | 'k')) => (&typed[..at], 1e3),
        Some((at, 'M')) => (&typed[..at], 1e6),
        Some((at, 'B' | 'G')) => (&typed[..at], 1e9),
        Some((at, 'T')) => (&typed[..at], 1e12),
        _ => (typed, 1.0),
    };
    let value = digits.parse::<f64>().ok().map(|v| v * unit).filter(|v| *v > 0.0 && *v <= MOST as f64);
    value.ok_or_else(|| {
        format!("must be a number above 0 and at most {:e}, such as 2.5, 12e3 or 15T (K, M, B, T)", MOST as f64)
    })
}

/// One of `all` by its name.
pub(crate) fn named<T: Copy>(typed: &str, all: &[T], name: fn(T) -> &'static str) -> Result<T, String> {
    let found = all.iter().copied().find(|one| name(*one).eq_ignore_ascii_case(typed));
    let names = || all.iter().map(|one| name(*one)).collect::<Vec<_>>().join(", ");
    found.ok_or_else(|| format!("must be one of {}", names()))
}

/// Writes a plot or a trace.
pub(crate) fn write_file(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).map_err(|cause| Error::Write { path: path.display().to_string(), cause })
}

/// Seconds for people.
pub(crate) fn seconds(s: f64) -> String {
    ridge_hw::units::Seconds(s).to_string()
}

/// The entries of a ledger as a table.
pub(crate) fn ledger_table(caption: impl Into<String>, entries: &[LedgerEntry]) -> Table {
    let mut table = Table { caption: caption.into(), ..Table::default() };
    for e in entries {
        table.push([e.what.to_owned(), e.bytes.to_string()], e.formula.clone());
    }
    table
}

/// A ledger as a bar.
pub(crate) fn ledger_bar(name: impl Into<String>, ledger: &Ledger) -> Bar {
    let parts = ledger.entries.iter().map(|e| (e.what.to_owned(), e.bytes.as_f64())).collect();
    Bar { name: name.into(), parts }
}

/// Where the figures of a device come from.
pub(crate) fn sources(machine: &Machine) -> Vec<String> {
    vec![
        match machine.specified {
            true => format!("{}: rates and capacity specified by its sheet", machine.name),
            false => format!("{}: rates measured, capacity told by the system", machine.name),
        },
        format!("efficiencies: {}", machine.efficiency.source),
        "parameters, FLOPs and bytes: modelled, exact for the model's graph".to_owned(),
        "times: modelled; cargo xtask accuracy says how near they come".to_owned(),
    ]
}

/// The same for JSON.
pub(crate) fn sources_json(machine: &Machine) -> serde_json::Value {
    json!({ "device": if machine.specified { "specified" } else { "measured" }, "efficiencies": machine.efficiency.source, "memory": "modelled", "times": "modelled" })
}

//! `ridge train`: trains a model as a configuration file says.

mod args;
mod plan;
mod signals;

use std::path::PathBuf;

use clap::Args;
use ridge::train::{RunEnd, StepReport, TrainEvent, Trainer};
use ridge_hw::units::Bytes;
use ridge_serve::{ReservedAddress, RunPage};
use ridge_train::settings::shown_settings;
use serde_json::json;

use crate::args::DeviceArgs;
use crate::error::{Result, refused};
use crate::output::{count, grouped, note, print};
use crate::snapshot;
use args::KeyArgs;
use signals::Signals;

/// Train a model
///
/// From scratch by a config.json, or further from weights. Each key of the configuration file is also a flag, which takes
/// precedence: --optimizer.learning_rate 1e-3 is learning_rate in the section `[optimizer]`. SIGTERM, SIGUSR1 and Ctrl-C
/// save a checkpoint and exit; before the first step they exit without writing anything. A second Ctrl-C exits at once.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ridge train run.toml                             trains as configured
  ridge train run.toml --checkpoint.resume auto    from the last checkpoint
  ridge train run.toml --train.steps 100           overrides the steps
  ridge train run.toml --dry-run                   shows memory and precision

Exit codes: 0 done or stopped by a signal, 1 failed, 2 usage error, 130 ended by a second Ctrl-C.")]
pub(crate) struct TrainArgs {
    /// Configuration file (TOML)
    #[arg(value_name = "CONFIG")]
    config: Option<PathBuf>,

    /// Print the resolved settings, the predicted memory and the precision of each op, and train nothing
    #[arg(long)]
    dry_run: bool,

    /// With --dry-run, write the memory of a micro-batch's forward and backward pass to this file, JSON or SVG by its name
    #[arg(long, value_name = "FILE", requires = "dry_run")]
    snapshot: Option<PathBuf>,

    #[command(flatten)]
    device: DeviceArgs,

    #[command(flatten)]
    keys: KeyArgs,
}

/// What is said to those who type `ridge train` alone.
const NO_CONFIGURATION: &str = "give a TOML file that says which model to train ([model]), on which text ([data]) and for how many \
                                steps ([train]), as in `ridge train run.toml`; docs/training.md begins with one, and \
                                `ridge train --help` lists all keys, each of which is a flag as well";

pub(crate) fn run(args: &TrainArgs) -> Result<()> {
    if args.config.is_none() && args.keys.0.is_empty() {
        return Err(refused("CONFIG", "is missing", NO_CONFIGURATION));
    }
    let mut trainer = Trainer::from_file(args.config.as_deref(), &args.keys.0)?.on(args.device.placement());
    if args.dry_run {
        print(&shown_settings(trainer.settings()))?;
        let plan = trainer.plan()?;
        if let Some(file) = &args.snapshot {
            let settings = trainer.settings();
            let tokens = settings.train.batch_size * settings.data.sequence_length;
            snapshot::write(&plan.snapshot, &json!({ "tokens": tokens }), &count(tokens, "token"), file)?;
        }
        return print(&plan::text(&plan));
    }
    let signals = Signals::register()?;
    let page = page(trainer.settings().log.page.as_deref())?;
    let mut printed = Ok(());
    let end = trainer.run(&signals.stop, |event| {
        if matches!(event, TrainEvent::Started { .. }) {
            signals.started();
        }
        if let Some(page) = &page {
            page.add(event.json());
        }
        if printed.is_ok() {
            printed = show(event);
        }
    })?;
    printed?;
    match end {
        RunEnd::Finished { .. } => Ok(()),
        RunEnd::Stopped { step } => {
            note(&format!("stopped behind step {step} and saved; --checkpoint.resume auto continues from there"));
            Ok(())
        }
        RunEnd::StoppedBeforeFirstStep => {
            signals.stopped_before_first_step();
            Ok(())
        }
    }
}

/// The page of the run, at `host:port`.
fn page(address: Option<&str>) -> Result<Option<RunPage>> {
    let Some((host, port)) = address.and_then(|address| address.rsplit_once(':')) else { return Ok(None) };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let reserved = ReservedAddress::new(host, port.parse().unwrap_or(0))?;
    let port = reserved.port()?;
    let page = RunPage::start(reserved.listen()?)?;
    note(&format!("the run is shown at http://{host}:{port}"));
    Ok(Some(page))
}

fn show(event: &TrainEvent) -> Result<()> {
    match event {
        TrainEvent::Started { step, parameters, tokens } => {
            let from = if *step > 0 { format!(", from step {step} on") } else { String::new() };
            note(&format!("{} parameters, {} tokens{from}", grouped(*parameters), grouped(*tokens)));
            Ok(())
        }
        TrainEvent::Step(report) => print(&line(report)),
        TrainEvent::Validation { step, loss, best } => {
            let best = if *best { ", the lowest so far" } else { "" };
            print(&format!("step {step}  validation loss {loss:.4}{best}\n"))
        }
        TrainEvent::Experts { step, layers } => {
            let least = layers.iter().map(|used| used.entropy).fold(1.0, f64::min);
            let most = layers.iter().map(|used| used.max_load).fold(0.0, f64::max);
            let dead: usize = layers.iter().map(|used| used.dead).sum();
            let dropped = layers.iter().map(|used| used.dropped).fold(0.0, f64::max);
            let dropped =
                if dropped > 0.0 { format!("  dropped up to {:.1} %", dropped * 100.0) } else { String::new() };
            print(&format!(
                "step {step}  experts of {} layers: least entropy {least:.3}  largest load {most:.2} of the mean  dead {dead}\
                 {dropped}\n",
                layers.len()
            ))
        }
        TrainEvent::ExpertCollapse { step, used } => {
            note(&format!(
                "warning: step {step}: the experts of {} have collapsed: entropy {:.3} of equal loads, largest load {:.2} of the \
                 mean, {} dead; raise experts.router_aux_loss_coef or experts.bias_update_speed",
                used.layer, used.entropy, used.max_load, used.dead
            ));
            Ok(())
        }
        TrainEvent::Sample { step, text } => print(&format!("step {step}  sample:\n{text}\n")),
        TrainEvent::Refused { step, why } => {
            note(&format!("step {step}: {why}; its update is left out"));
            Ok(())
        }
        TrainEvent::RolledBack { step } => {
            note(&format!("back at the checkpoint of step {step}"));
            Ok(())
        }
        TrainEvent::Note { text } => {
            note(text);
            Ok(())
        }
        TrainEvent::Exported { folder } => {
            note(&format!("the model is in {folder}"));
            Ok(())
        }
        TrainEvent::Checkpoint { .. } => Ok(()),
    }
}

fn line(report: &StepReport) -> String {
    let StepReport { step, steps, loss, gradient_norm, learning_rate, .. } = report;
    let mfu = report.mfu.map_or_else(String::new, |mfu| format!("  mfu {:.1} %", mfu * 100.0));
    let memory = Bytes(report.memory_bytes);
    format!(
        "step {step}/{steps}  loss {loss:.4}  norm {gradient_norm:.3}  lr {learning_rate:.2e}  {} tok/s{mfu}  {memory}  \
         epoch {:.2}  {} left\n",
        grouped(report.tokens_per_second as u64),
        report.epoch,
        duration(report.seconds_left)
    )
}

fn duration(seconds: f64) -> String {
    let seconds = seconds.max(0.0) as u64;
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        _ => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
    }
}

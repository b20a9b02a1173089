//! Ridge's own training on one GPU: the memory of each choice of recomputation and offloading, as `ridge train --dry-run` on that
//! GPU predicts it, and the fastest that fits.

use std::sync::Arc;

use ridge::train::{Fp8, Precision as Stored, Recomputation, Settings, StepChoice, step_choices};
use ridge_cuda::PlannedGpu;
use ridge_hw::spec::DeviceSpec;
use ridge_hw::units::Bytes;
use ridge_plan::PlanError;
use ridge_plan::efficiency::Machine;
use ridge_plan::reading::Reading;
use ridge_plan::search::SearchSpace;
use ridge_plan::train::{Layout, Recompute, Workload, step_time};
use ridge_runtime::{Backend, MemoryOwner};
use serde_json::{Value, json};

use super::args::PlanTrainArgs;
use super::cost::{answer, checkpoints, given_of_failures, optimal, optimal_json, run_of};
use crate::commands::plan::page::{Page, PageBlock, PageTable, seconds};
use crate::commands::plan::target::{sources, sources_json};
use crate::error::{Error, Result, refused};
use crate::output::grouped;

/// A choice with the time of its step.
struct Timed {
    choice: StepChoice,
    seconds: f64,
    fits: bool,
}

impl Timed {
    fn device(&self) -> u64 {
        self.choice.memory.on_device() as u64
    }

    fn host(&self) -> u64 {
        self.choice.memory.on_host() as u64
    }

    fn json(&self) -> Value {
        let StepChoice { recomputation, offload, memory, .. } = &self.choice;
        let owners: serde_json::Map<String, Value> =
            memory.iter().map(|(owner, bytes)| (owner.name().replace(' ', "_"), bytes.into())).collect();
        json!({
            "recomputation": recomputation, "offload": offload, "device_bytes": self.device(), "host_bytes": self.host(),
            "memory": owners, "seconds": self.seconds, "fits": self.fits,
        })
    }
}

/// The recomputation that choices are restricted to, if any is.
fn recomputation(args: &PlanTrainArgs) -> Result<Option<Recomputation>> {
    match args.layout.recompute {
        None => Ok(None),
        Some(Recompute::None) => Ok(Some(Recomputation::None)),
        Some(Recompute::Full) => Ok(Some(Recomputation::Full)),
        Some(other) => {
            let why =
                "is not how Ridge recomputes; give none or full, or leave it out to compare none, selective and full";
            Err(refused("--recompute", other, why))
        }
    }
}

/// The settings that are planned.
fn settings(args: &PlanTrainArgs) -> Result<Settings> {
    let fixed = &args.layout;
    let given = [fixed.tp, fixed.pp, fixed.dp, fixed.cp, fixed.ep, fixed.interleave];
    if given.iter().any(|degree| degree.is_some_and(|degree| degree > 1)) || fixed.zero.is_some_and(|zero| zero > 0) {
        return Err(refused("--gpus", 1, "is one GPU: nothing is divided over several; leave degrees out"));
    }
    if let Some(top) = args.top {
        return Err(refused("--top", top, "does not apply to one GPU: all choices are shown; leave it out"));
    }
    let sequences = fixed.micro_batch.unwrap_or(1);
    if !args.batch.is_multiple_of(sequences) {
        let why = format!("is not a multiple of --micro-batch {sequences}");
        return Err(refused("--batch", args.batch, &why));
    }
    let mut settings = Settings::default();
    settings.data.sequence_length = args.seq;
    settings.train.batch_size = sequences;
    settings.train.accumulation = args.batch / sequences;
    settings.train.precision = match args.states.as_str() {
        "full" => Stored::F32,
        "half" => Stored::Bf16Stochastic,
        _ => Stored::Bf16,
    };
    settings.train.fp8 = if args.precision == "fp8" { Fp8::Tensor } else { Fp8::None };
    Ok(settings)
}

pub(super) fn run(args: &PlanTrainArgs, reading: &Reading, machine: &Machine, work: &Workload) -> Result<()> {
    let settings = settings(args)?;
    let only = recomputation(args)?;
    let backend: Arc<dyn Backend> =
        Arc::new(PlannedGpu::new(DeviceSpec::find(&machine.name).map_err(PlanError::from)?)?);
    let usable = machine.memory * SearchSpace::new(1, 1).utilisation;
    let timed = |choice: StepChoice| {
        // What is a pass over memory is not in the time of `selective`.
        let recompute = if choice.recomputation == Recomputation::Full { Recompute::Full } else { Recompute::None };
        let layout = Layout { micro_batch: settings.train.batch_size, recompute, ..Layout::default() };
        let step = step_time(reading, machine, &layout, work);
        let forward = (step.compute - step.recompute) / (3.0 * choice.parts as f64);
        let seconds = step.total + choice.exposed_seconds(forward, args.host_link);
        Timed { seconds, fits: choice.memory.on_device() as f64 <= usable, choice }
    };
    let choices: Vec<Timed> = step_choices(&settings, &args.target.unquantised_config()?, &backend)?
        .into_iter()
        .filter(|choice| only.is_none_or(|only| choice.recomputation == only))
        .map(timed)
        .collect();
    let fitting = choices.iter().filter(|choice| choice.fits);
    let best = fitting.min_by(|a, b| a.seconds.total_cmp(&b.seconds).then(a.host().cmp(&b.host())));
    let run = best.map(|best| run_of(args, (args.batch * args.seq) as f64 / best.seconds));
    let optimal = optimal(args, reading);
    let title = format!(
        "{} with {} parameters trained by Ridge on one {}: {} x {} tokens per micro-batch, {} per step",
        reading.family,
        grouped(reading.parameters),
        machine.name,
        settings.train.batch_size,
        args.seq,
        settings.train.accumulation
    );
    let mut table = PageTable::with_head("", ["recomputation", "offload", "memory", "host memory", "step", "fits"]);
    for of in &choices {
        let cells = [
            of.choice.recomputation.to_string(),
            of.choice.offload.to_string(),
            Bytes(of.device()).to_string(),
            Bytes(of.host()).to_string(),
            seconds(of.seconds),
            if of.fits { "yes" } else { "no" }.to_owned(),
        ];
        table.push(cells, "");
    }
    let json = json!({
        "model": reading.family, "parameters": reading.parameters, "device": machine.name, "usable_bytes": usable,
        "choices": choices.iter().map(Timed::json).collect::<Vec<_>>(), "best": best.map(Timed::json),
        "run": run, "checkpoints": best.map(|_| checkpoints(args)), "compute_optimal": optimal_json(optimal),
        "sources": sources_json(machine),
    });
    let mut page =
        Page { title, blocks: vec![PageBlock::Table(table)], sources: sources(machine), json, ..Page::default() };
    match best.zip(run) {
        Some((best, run)) => {
            let StepChoice { recomputation, offload, memory, .. } = &best.choice;
            page.lead = format!(
                "recomputation {}, offload {}: {} on the GPU, {} on the host, {} per step",
                recomputation,
                offload,
                Bytes(best.device()),
                Bytes(best.host()),
                seconds(best.seconds)
            );
            let mut parts = PageTable::with_head(
                format!("memory with recomputation {recomputation}, offload {offload}"),
                ["what", "bytes", "where"],
            );
            for (owner, bytes) in memory.iter() {
                let what =
                    if owner == MemoryOwner::States { "weights, gradients and optimizer states" } else { owner.name() };
                let place = if owner.is_host() { "host" } else { "GPU" };
                parts.push([what.to_owned(), Bytes(bytes as u64).to_string(), place.to_owned()], "");
            }
            page.blocks.push(PageBlock::Table(parts));
            page.blocks.push(PageBlock::Answer(format!(
                "train.recomputation = \"{recomputation}\" and train.offload = \"{offload}\" are the fastest that fit\n{}",
                answer(args, &run, optimal)
            )));
        }
        None => {
            let least = choices.iter().map(Timed::device).min().unwrap_or(0);
            let usable = Bytes(usable as u64);
            let lacking = Bytes(least.saturating_sub(usable.0));
            let why = format!(
                "nothing fits: the least is {}, {lacking} more than the {usable} that are usable",
                Bytes(least)
            );
            page.blocks.push(PageBlock::Answer(format!(
                "{why}; use shorter sequences, a smaller micro-batch, or a larger GPU"
            )));
        }
    }
    page.given("memory", "the plans of the compiled programs, as ridge train --dry-run has it on that GPU", "exact");
    page.given("tokens per sequence", args.seq, "--seq");
    page.given("link to the host, bytes per second in each direction", args.host_link, "--host-link");
    page.given("usable share of the device's memory", SearchSpace::new(1, 1).utilisation, "set: the rest is margin");
    given_of_failures(&mut page, args);
    page.assume(machine);
    args.page.show(&page)?;
    if best.is_some() { Ok(()) } else { Err(Error::DoesNotFit) }
}

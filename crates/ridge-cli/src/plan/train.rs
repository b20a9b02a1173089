//! `ridge plan train`: what a training step takes, divided as asked or in the best of all ways, and what a run costs.

use clap::Args;
use ridge_hw::spec::Precision;
use ridge_hw::units::Bytes;
use ridge_plan::ledger::training;
use ridge_plan::search::{Candidate, Found, Space, judge, pareto, search};
use ridge_plan::train::{Layout, Recompute, Run, StateBytes, Workload, checkpointing, chinchilla};
use serde_json::json;

use super::{ShownArgs, TargetArgs, amount, ledger_rows, seconds, sources, sources_json};
use crate::args::whole;
use crate::error::Result;
use crate::output::{columns, count, grouped, print, print_json};

/// Time a training step in every way to divide it, and cost a run
///
/// Without --tp, --pp, --dp, --cp, --ep and the like, all layouts of the GPUs are searched.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ridge plan train Llama-3.1-70B --gpus 256 --batch 1024 --tokens 1T --price 2.5
  ridge plan train Llama-3.1-8B --device A100 --gpus 8 --batch 64 --tp 2 --zero 1 --explain")]
pub(crate) struct TrainArgs {
    #[command(flatten)]
    target: TargetArgs,

    /// GPUs, all of which are used
    #[arg(long, value_name = "N", value_parser = whole::<usize, 1, 1_000_000>)]
    gpus: usize,

    /// Sequences of a step, over all GPUs
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = whole::<usize, 1, 10_000_000>)]
    batch: usize,

    /// Tokens of a sequence
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = whole::<usize, 1, 100_000_000>)]
    seq: usize,

    /// Precision of matrix products
    #[arg(long, value_parser = ["bf16", "fp8"], default_value = "bf16")]
    precision: String,

    /// States of a parameter: mixed (18 bytes), full (f32, 16 bytes) or half (8 bytes)
    #[arg(long, value_parser = ["mixed", "full", "half"], default_value = "mixed")]
    states: String,

    #[command(flatten)]
    layout: LayoutArgs,

    /// Tokens of the run, such as 15T
    #[arg(long, value_name = "N", value_parser = amount)]
    tokens: Option<f64>,

    /// Dollars of a GPU hour
    #[arg(long, value_name = "USD", value_parser = amount)]
    price: Option<f64>,

    /// Hours that one GPU runs between failures
    #[arg(long, value_name = "HOURS", value_parser = amount, default_value = "50000")]
    gpu_mtbf: f64,

    /// Seconds that a checkpoint stops training for
    #[arg(long, value_name = "S", value_parser = amount, default_value = "30")]
    checkpoint: f64,

    /// Layouts shown
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = whole::<usize, 1, 10_000>)]
    top: usize,

    #[command(flatten)]
    shown: ShownArgs,
}

/// Degrees, where they are fixed.
#[derive(Debug, Args)]
#[command(next_help_heading = "One layout rather than all")]
struct LayoutArgs {
    /// Tensor parallel ranks
    #[arg(long, value_name = "N")]
    tp: Option<usize>,
    /// Pipeline stages
    #[arg(long, value_name = "N")]
    pp: Option<usize>,
    /// Ranks that share a sequence
    #[arg(long, value_name = "N")]
    cp: Option<usize>,
    /// Ranks that share the experts
    #[arg(long, value_name = "N")]
    ep: Option<usize>,
    /// Sequences of a micro-batch
    #[arg(long, value_name = "N")]
    micro_batch: Option<usize>,
    /// Chunks of a stage
    #[arg(long, value_name = "N")]
    interleave: Option<usize>,
    /// ZeRO stage
    #[arg(long, value_name = "0..3")]
    zero: Option<u8>,
    /// What is computed again: none, attention, products or full
    #[arg(long, value_parser = recompute)]
    recompute: Option<Recompute>,
}

fn recompute(typed: &str) -> Result<Recompute, String> {
    let found = Recompute::ALL.into_iter().find(|r| r.to_string() == typed);
    found.ok_or_else(|| "must be none, attention, products or full".to_owned())
}

impl LayoutArgs {
    /// The layout that they give `gpus`, if any is given.
    fn layout(&self, gpus: usize) -> Option<Layout> {
        let degrees = [self.tp, self.pp, self.cp, self.ep, self.micro_batch, self.interleave];
        if degrees.iter().all(Option::is_none) && self.zero.is_none() && self.recompute.is_none() {
            return None;
        }
        let [tp, pp, cp, ep, micro_batch, interleave] = degrees.map(|d| d.unwrap_or(1));
        let dp = gpus / (tp * pp * cp).max(1);
        let recompute = self.recompute.unwrap_or(Recompute::None);
        let sequence_parallel = tp > 1;
        let zero = self.zero.unwrap_or(u8::from(dp > 1));
        Some(Layout { tp, pp, dp, cp, ep, micro_batch, interleave, recompute, zero, sequence_parallel })
    }
}

pub(super) fn run(args: &TrainArgs) -> Result<()> {
    let reading = args.target.reading()?;
    let precision = if args.precision == "fp8" { Precision::Fp8 } else { Precision::Bf16 };
    let machine = args.target.machine(precision)?;
    let states = match args.states.as_str() {
        "full" => StateBytes::FULL,
        "half" => StateBytes::HALF,
        _ => StateBytes::MIXED,
    };
    let work = Workload { seq: args.seq, global_batch: args.batch, precision, states, ..Workload::default() };
    let space = Space::new(args.gpus, machine.fabric.node);
    let found = match args.layout.layout(args.gpus) {
        None => search(&reading, &machine, &work, &space),
        Some(layout) => {
            if layout.gpus() != args.gpus {
                let why = format!("is no multiple of tp x pp x cp; the nearest below is {}", layout.gpus());
                return Err(crate::settings::refused("--gpus", args.gpus, &why));
            }
            layout.require(&reading, work.seq, work.global_batch)?;
            let one = judge(&reading, &machine, &work, &layout, f64::INFINITY);
            Found { ranked: one.into_iter().collect(), seen: 1, ..Found::default() }
        }
    };
    let best = found.ranked.first().copied();
    let usable = machine.memory * space.utilisation;
    let fit = found.ranked.iter().filter(|c| c.bytes <= usable).count();
    let run = best.map(|b| run_of(args, &b));
    let optimal = chinchilla(6.0 * reading.active() * args.tokens.unwrap_or(20.0 * reading.active()));
    if args.shown.json {
        let ranked: Vec<_> = found.ranked.iter().take(args.top).collect();
        return print_json(&json!({
            "model": reading.family, "parameters": reading.parameters, "device": machine.name, "work": work,
            "seen": found.seen, "fit": fit, "ranked": ranked, "rejected": found.rejected,
            "pareto": pareto(&found.ranked).iter().take(args.top).collect::<Vec<_>>(),
            "ledger": best.map(|b| training(&reading, &b.layout, &work)),
            "run": run, "checkpoints": best.map(|_| checkpointing(args.gpus, args.gpu_mtbf, args.checkpoint, 300.0)),
            "compute_optimal": { "parameters": optimal.0, "tokens": optimal.1 }, "sources": sources_json(&machine),
        }));
    }
    let mut text = format!(
        "{} with {} parameters ({:.3e} multiplied by a token) on {} x {}\n{}, {} fit\n\n",
        reading.family,
        grouped(reading.parameters),
        reading.active(),
        args.gpus,
        machine.name,
        count(found.seen, "layout"),
        grouped(fit as u64)
    );
    let header = ["layout", "step", "tokens/s", "MFU", "HFU", "memory"].map(str::to_owned).to_vec();
    let row = |c: &Candidate| {
        let percent = |share: f64| format!("{:.1} %", 100.0 * share);
        let rate = grouped(c.step.tokens_per_second as u64);
        let memory = Bytes(c.bytes as u64).to_string();
        vec![c.layout.to_string(), seconds(c.step.total), rate, percent(c.step.mfu), percent(c.step.hfu), memory]
    };
    text += &columns(&std::iter::once(header).chain(found.ranked.iter().take(args.top).map(row)).collect::<Vec<_>>());
    if !found.rejected.is_empty() {
        let rejected = found
            .rejected
            .iter()
            .map(|(why, (n, layout))| vec![grouped(*n as u64), why.clone(), format!("such as {layout}")]);
        text += &format!("\nrejected\n{}", columns(&rejected.collect::<Vec<_>>()));
    }
    if let (Some(best), Some(run)) = (best, run) {
        let fits = best.bytes <= usable;
        text +=
            &format!("\nmemory of the fullest GPU, {}{}\n", best.layout, if fits { "" } else { ": it does NOT fit" });
        text += &ledger_rows(&training(&reading, &best.layout, &work).entries, args.shown.explain);
        text += &step_text(&best, args.shown.explain);
        let saves = checkpointing(args.gpus, args.gpu_mtbf, args.checkpoint, 300.0);
        text += &format!(
            "\na failure every {:.1} h; a checkpoint every {} loses least: {:.1} % of the time\n",
            saves.mtbf_hours,
            seconds(saves.interval_seconds),
            100.0 * saves.overhead
        );
        if args.tokens.is_some() {
            text += &format!(
                "{:.1} days, {:.1} with failures: {} GPU hours",
                run.days,
                run.days_with_failures,
                grouped(run.gpu_hours as u64)
            );
            text += &args.price.map_or(String::from("; --price gives dollars\n"), |_| {
                format!(", {} dollars\n", grouped(run.dollars as u64))
            });
        }
        text += &format!(
            "the same FLOPs are best spent on {:.3e} parameters and {:.3e} tokens (Hoffmann et al. 2022)\n",
            optimal.0, optimal.1
        );
    } else {
        text += "\nnothing fits: take more GPUs, a smaller batch or a GPU with more memory\n";
    }
    if args.shown.explain {
        text += &sources(&machine);
    }
    print(&text)
}

fn run_of(args: &TrainArgs, best: &Candidate) -> Run {
    let saves = checkpointing(args.gpus, args.gpu_mtbf, args.checkpoint, 300.0);
    let tokens = args.tokens.unwrap_or(0.0);
    Run::new(tokens, best.step.tokens_per_second, args.gpus, args.price.unwrap_or(0.0), saves.overhead)
}

fn step_text(best: &Candidate, explain: bool) -> String {
    let s = &best.step;
    let parts = [
        (
            "compute",
            s.compute,
            "each op's max(FLOPs / (rate x efficiency), bytes / bandwidth), all micro-batches, last stage",
        ),
        ("  of it again", s.recompute, "what recomputation does a second time"),
        ("tensor, context, experts", s.exposed_model, "ring sums and exchanges that products do not hide"),
        ("pipeline", s.pipeline, "(p - 1) / v stages of a micro-batch, and messages"),
        ("data parallel", s.data, "reduce-scatter and all-gather that the backward pass does not hide"),
        ("optimiser", s.optimiser, "states read and written once"),
    ];
    let row = |(what, time, formula): &(&str, f64, &str)| {
        let mut row = vec![(*what).to_owned(), seconds(*time)];
        row.extend(explain.then(|| (*formula).to_owned()));
        row
    };
    format!("\ntime of a step\n{}", columns(&parts.iter().map(row).collect::<Vec<_>>()))
}

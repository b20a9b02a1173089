//! Days, failures and cost of a run.

use ridge_plan::reading::Reading;
use ridge_plan::train::{Checkpointing, TrainingRun, checkpointing, chinchilla};
use serde_json::{Value, json};

use super::args::PlanTrainArgs;
use crate::commands::plan::page::{Page, seconds};
use crate::output::grouped;

/// Seconds from a failure until training continues.
pub(super) const RESTART: f64 = 300.0;

pub(super) fn checkpoints(args: &PlanTrainArgs) -> Checkpointing {
    checkpointing(args.gpus, args.gpu_mtbf, args.checkpoint, RESTART)
}

/// Parameters and tokens that are compute-optimal for the FLOPs of the run.
pub(super) fn optimal(args: &PlanTrainArgs, reading: &Reading) -> Option<(f64, f64)> {
    args.tokens.map(|tokens| chinchilla(6.0 * reading.active() * tokens))
}

pub(super) fn optimal_json(optimal: Option<(f64, f64)>) -> Option<Value> {
    optimal.map(|(parameters, tokens)| json!({ "parameters": parameters, "tokens": tokens }))
}

pub(super) fn given_of_failures(page: &mut Page, args: &PlanTrainArgs) {
    page.given("hours between failures of a GPU", args.gpu_mtbf, "--gpu-mtbf");
    let seconds = format!("{}, {RESTART}", args.checkpoint);
    page.given("seconds of a checkpoint, and of a restart", seconds, "--checkpoint; set");
}

pub(super) fn answer(args: &PlanTrainArgs, run: &TrainingRun, optimal: Option<(f64, f64)>) -> String {
    let saves = checkpoints(args);
    let (between, interval) = (seconds(3600.0 * saves.mtbf_hours), seconds(saves.interval_seconds));
    let restart = seconds(RESTART);
    let mut text = if saves.overhead.is_finite() {
        format!(
            "one failure per {between}; the optimal checkpoint interval is {interval}: failures and checkpoints add {:.1} % to the time, including a restart of {restart} per failure\n",
            100.0 * saves.overhead
        )
    } else {
        format!(
            "one failure per {between}: less than a restart of {restart} plus {interval} to the next checkpoint, so the run makes no progress\n"
        )
    };
    if args.tokens.is_some() && !saves.overhead.is_finite() {
        text += &format!("{:.1} days without failures\n", run.days);
    } else if args.tokens.is_some() {
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
    if let Some((parameters, tokens)) = optimal {
        text += &format!(
            "compute-optimal for the same FLOPs: {parameters:.3e} parameters and {tokens:.3e} tokens (Hoffmann et al. 2022)"
        );
    }
    text
}

pub(super) fn run_of(args: &PlanTrainArgs, tokens_per_second: f64) -> TrainingRun {
    let tokens = args.tokens.unwrap_or(0.0);
    TrainingRun::new(tokens, tokens_per_second, args.gpus, args.price.unwrap_or(0.0), checkpoints(args).overhead)
}

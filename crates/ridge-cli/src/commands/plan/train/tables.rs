//! The tables of a layout's page: formulas, memory and time.

use ridge_hw::units::{Bytes, Flops};
use ridge_plan::efficiency::Machine;
use ridge_plan::ledger::{Ledger, training, training_stages};
use ridge_plan::reading::Reading;
use ridge_plan::search::{LayoutCandidate, SearchSpace, judge};
use ridge_plan::train::{Layout, Recompute, StepTime, Workload};

use crate::commands::plan::page::{PageTable, ledger_table, seconds};
use crate::output::grouped;

/// Formulas of the figures in the table of layouts and of the run.
pub(super) fn formulas(best: &LayoutCandidate, optimal: bool) -> PageTable {
    let s = &best.step;
    let mut table = PageTable { caption: "how".into(), detail: true, ..PageTable::default() };
    let percent = |share: f64| format!("{:.1} %", 100.0 * share);
    let flops = |flops: f64| Flops(flops).to_string();
    table.push(
        ["model FLOPs".to_owned(), flops(s.model_flops)],
        "3 x (2 per active parameter, 4 per head, pair and element) x tokens per step",
    );
    table.push(["hardware FLOPs".to_owned(), flops(s.hardware_flops)], "including recomputation");
    table.push(["MFU".to_owned(), percent(s.mfu)], "model FLOPs / (step x dense rate of the sheet x GPUs)");
    table.push(["HFU".to_owned(), percent(s.hfu)], "hardware FLOPs / (the same)");
    table.push(["tokens/s".to_owned(), grouped(s.tokens_per_second as u64)], "batch x sequence / step");
    table.push(
        ["checkpoints".to_owned(), String::new()],
        "interval sqrt(2 w M) (1 + sqrt(w / 2M) / 3 + w / 18M) - w, w the checkpoint time, M the time between failures (Daly 2006)",
    );
    if optimal {
        table.push(
            ["compute-optimal".to_owned(), String::new()],
            "6 N D FLOPs with D = 20 N tokens (Hoffmann et al. 2022)",
        );
    }
    table
}

/// Memory and time of the layout under each recomputation policy.
pub(super) fn by_recompute(reading: &Reading, machine: &Machine, work: &Workload, best: &LayoutCandidate) -> PageTable {
    let mut table =
        PageTable::with_head("by recomputation policy", ["recompute", "activations", "total", "step", "HFU"]);
    for recompute in Recompute::ALL {
        let layout = Layout { recompute, ..best.layout };
        let Ok(c) = judge(reading, machine, work, &layout, f64::INFINITY) else { continue };
        let ledger = training(reading, &layout, work);
        let activations = ledger.of("activations") + ledger.of("recomputed layer");
        let cells = [
            recompute.to_string(),
            activations.to_string(),
            ledger.total().to_string(),
            seconds(c.step.total),
            format!("{:.1} %", 100.0 * c.step.hfu),
        ];
        table.push(cells, "");
    }
    table.detail = true;
    table
}

/// A ledger, the margin, and the remaining memory of the device.
pub(super) fn with_room(caption: String, ledger: &Ledger, machine: &Machine, space: &SearchSpace) -> PageTable {
    let mut table = ledger_table(caption, &ledger.entries);
    let margin = machine.memory * (1.0 - space.utilisation);
    let formula =
        format!("{:.0} % of the device: context, libraries, fragmentation", 100.0 * (1.0 - space.utilisation));
    table.push(["margin".to_owned(), Bytes(margin as u64).to_string()], formula);
    let left = machine.memory - margin - ledger.total().as_f64();
    let (what, formula) =
        if left < 0.0 { ("missing", "exceeds the device's memory") } else { ("free", "remaining memory") };
    table.push([what.to_owned(), Bytes(left.abs() as u64).to_string()], formula);
    table
}

/// Memory per rank for each stage, if there are several stages.
pub(super) fn stages_table(reading: &Reading, best: &LayoutCandidate, work: &Workload) -> Option<PageTable> {
    let stages = training_stages(reading, &best.layout, work);
    if stages.len() < 2 {
        return None;
    }
    let mut table = PageTable::with_head(
        "memory per GPU by stage",
        ["stage", "weights", "gradients", "states", "activations", "logits", "total"],
    );
    for (i, ledger) in stages.iter().enumerate() {
        let of = |what: &str| ledger.of(what).to_string();
        let states = (ledger.of("master weights") + ledger.of("optimiser states")).to_string();
        let activations = (ledger.of("activations") + ledger.of("recomputed layer")).to_string();
        let cells = [
            i.to_string(),
            of("weights"),
            of("gradients"),
            states,
            activations,
            of("logits"),
            ledger.total().to_string(),
        ];
        table.push(cells, "");
    }
    table.detail = true;
    Some(table)
}

/// A step's parts, with their labels in a figure and their formulas.
pub(super) fn parts(s: &StepTime) -> [(&'static str, f64, &'static str); 6] {
    [
        (
            "compute",
            s.compute,
            "each op's max(FLOPs / (rate x efficiency), bytes / bandwidth), all micro-batches, last stage",
        ),
        ("  recomputation", s.recompute, "forward ops computed a second time"),
        (
            "tensor, context, experts",
            s.exposed_model,
            "ring collectives and exchanges that do not overlap with products",
        ),
        ("pipeline", s.pipeline, "(p - 1) / v stages of a micro-batch, and messages"),
        ("data parallel", s.data, "reduce-scatter and all-gather that do not overlap with the backward pass"),
        ("optimiser", s.optimiser, "states read and written once"),
    ]
}

pub(super) fn step_table(best: &LayoutCandidate) -> PageTable {
    let mut table = PageTable { caption: "time per step".into(), ..PageTable::default() };
    for (what, time, formula) in parts(&best.step) {
        table.push([what.to_owned(), seconds(time)], formula);
    }
    table
}

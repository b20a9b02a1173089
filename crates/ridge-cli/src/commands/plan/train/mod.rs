//! `ridge plan train`: time and memory of a training step in a given layout or in the best one, and the cost of a run.

mod args;
mod cost;
mod one_gpu;
mod tables;

use ridge_hw::spec::Precision;
use ridge_hw::units::Bytes;
use ridge_plan::efficiency::Machine;
use ridge_plan::ledger::{training, training_stages};
use ridge_plan::plot::{Axis, Bar, Bars, Chart, ChartPoint, Panel, Series, Style, Unit};
use ridge_plan::reading::Reading;
use ridge_plan::search::{LayoutCandidate, SearchResult, SearchSpace, judge, pareto, search};
use ridge_plan::train::{StateBytes, TrainingRun, Workload, checkpointing};
use serde_json::json;

pub(crate) use self::args::PlanTrainArgs;
use self::cost::{RESTART, answer, checkpoints, given_of_failures, optimal, optimal_json, run_of};
use self::tables::{by_recompute, formulas, parts, stages_table, step_table, with_room};
use super::page::{Page, PageBlock, PageTable, ledger_bar, seconds};
use super::target::{sources, sources_json};
use crate::error::{Error, Result, refused};
use crate::output::{count, grouped};

pub(super) fn run(args: &PlanTrainArgs) -> Result<()> {
    let by_ridge = args.software == "ridge";
    let reading = if by_ridge { args.target.reading_trained_by_ridge()? } else { args.target.reading()? };
    if args.seq > reading.max_context {
        let why = format!("exceeds the model's maximum of {}", reading.max_context);
        return Err(refused("--seq", args.seq, &why));
    }
    let precision = if args.precision == "fp8" { Precision::Fp8 } else { Precision::Bf16 };
    let machine = args.target.machine(precision)?;
    let states = match args.states.as_str() {
        "full" => StateBytes::FULL,
        "half" => StateBytes::HALF,
        _ => StateBytes::MIXED,
    };
    let work = Workload { seq: args.seq, global_batch: args.batch, precision, states, ..Workload::default() };
    if by_ridge && args.gpus == 1 {
        return one_gpu::run(args, &reading, &machine, &work);
    }
    let space = SearchSpace { sequence_parallel: !by_ridge, ..SearchSpace::new(args.gpus, machine.fabric.node) };
    let found = match args.layout.layout(args.gpus, by_ridge) {
        None => search(&reading, &machine, &work, &space),
        Some(layout) => {
            if layout.gpus() != args.gpus {
                let given = args.layout.dp.is_some();
                let unit = layout.tp * layout.pp * layout.cp * if given { layout.dp } else { 1 };
                let nearest = (args.gpus as f64 / unit as f64).round().max(1.0) as usize * unit;
                let why = match given {
                    true => format!("is not tp x pp x cp x dp = {unit}"),
                    false => format!("is not a multiple of tp x pp x cp = {unit}; the nearest is {nearest}"),
                };
                return Err(refused("--gpus", args.gpus, &why));
            }
            layout.require(&reading, work.seq, work.global_batch)?;
            let one = judge(&reading, &machine, &work, &layout, f64::INFINITY);
            SearchResult { ranked: one.into_iter().collect(), seen: 1, ..SearchResult::default() }
        }
    };
    let best = found.ranked.first().copied();
    let usable = machine.memory * space.utilisation;
    let fit = found.ranked.iter().filter(|c| c.bytes <= usable).count();
    let run = best.map(|b| run_of(args, b.step.tokens_per_second));
    let optimal = optimal(args, &reading);
    let json = {
        let ranked: Vec<_> = found.ranked.iter().take(args.top()).collect();
        json!({
            "model": reading.family, "parameters": reading.parameters, "device": machine.name, "work": work,
            "seen": found.seen, "fit": fit, "ranked": ranked, "rejected": found.rejected,
            "pareto": pareto(&found.ranked).iter().take(args.top()).collect::<Vec<_>>(),
            "ledger": best.map(|b| training(&reading, &b.layout, &work)),
            "ledger_of_stages": best.map(|b| training_stages(&reading, &b.layout, &work)),
            "run": run, "checkpoints": best.map(|_| checkpoints(args)), "compute_optimal": optimal_json(optimal),
            "sources": sources_json(&machine),
        })
    };
    let title = format!(
        "{} with {} parameters ({:.3e} active per token) on {} x {}\n{}, {} fit",
        reading.family,
        grouped(reading.parameters),
        reading.active(),
        args.gpus,
        machine.name,
        count(found.seen, "layout"),
        grouped(fit as u64)
    );
    let mut table = PageTable::with_head("", ["layout", "step", "tokens/s", "MFU", "HFU", "memory"]);
    for c in found.ranked.iter().take(args.top()) {
        let percent = |share: f64| format!("{:.1} %", 100.0 * share);
        let rate = grouped(c.step.tokens_per_second as u64);
        let memory = Bytes(c.bytes as u64).to_string();
        let cells =
            [c.layout.to_string(), seconds(c.step.total), rate, percent(c.step.mfu), percent(c.step.hfu), memory];
        table.push(cells, "");
    }
    let blocks = if found.ranked.is_empty() { Vec::new() } else { vec![PageBlock::Table(table)] };
    let mut page = Page { title, blocks, sources: sources(&machine), json, ..Page::default() };
    if !found.rejected.is_empty() {
        let mut rejected = PageTable { caption: "rejected".into(), ..PageTable::default() };
        for (why, (n, layout)) in &found.rejected {
            rejected.push([grouped(*n as u64), why.clone(), format!("such as {layout}")], "");
        }
        page.blocks.push(PageBlock::Table(rejected));
    }
    if let (Some(best), Some(run)) = (best, run) {
        let fits = best.bytes <= usable;
        let caption = format!(
            "memory of the GPU with the highest use, {}{}",
            best.layout,
            if fits { "" } else { ": does not fit" }
        );
        page.blocks.push(PageBlock::Table(with_room(
            caption,
            &training(&reading, &best.layout, &work),
            &machine,
            &space,
        )));
        page.blocks.extend(stages_table(&reading, &best, &work).map(PageBlock::Table));
        page.blocks.push(PageBlock::Table(step_table(&best)));
        page.blocks.push(PageBlock::Table(formulas(&best, optimal.is_some())));
        if !by_ridge {
            page.blocks.push(PageBlock::Table(by_recompute(&reading, &machine, &work, &best)));
        }
        page.blocks.push(PageBlock::Answer(answer(args, &run, optimal)));
        page.lead = format!(
            "{}: {} per step, {} tokens/s, {:.1} % MFU, {} per GPU",
            best.layout,
            seconds(best.step.total),
            grouped(best.step.tokens_per_second as u64),
            100.0 * best.step.mfu,
            Bytes(best.bytes as u64)
        );
        if args.page.draws() {
            page.panels = panels(args, &reading, &machine, &work, &found, &space);
        }
    } else {
        let mut text = "no layout fits: use more GPUs, a smaller batch or GPUs with more memory".to_owned();
        if let Some((why, (_, layout))) = found.rejected.iter().find(|(why, _)| why.starts_with("needs ")) {
            text += &format!("\nthe closest is {layout}, which {why}");
        }
        page.blocks.push(PageBlock::Answer(text));
    }
    let s = work.states;
    let bytes = s.weight + s.gradient + s.master + s.moments;
    page.given("tokens per sequence", work.seq, "--seq");
    page.given("sequences per step", work.global_batch, "--batch");
    page.given("state per parameter", format!("{} ({bytes} B)", args.states), "--states");
    if by_ridge {
        page.given("activations", "the residuals of the gradient of Ridge's own graph", "--software");
    } else {
        page.given("attention and loss", "fused", "set: scores and log-probabilities are never written to memory");
    }
    page.given("data-parallel communication", "overlapped where possible", "set");
    page.given("usable share of the device's memory", space.utilisation, "set: the rest is margin");
    given_of_failures(&mut page, args);
    page.assume(&machine);
    args.page.show(&page)?;
    if fit == 0 { Err(Error::DoesNotFit) } else { Ok(()) }
}

/// Maximum step time of the layouts in a figure, relative to the fastest.
const SLOWEST: f64 = 3.0;
/// Maximum number of layouts in a figure; the fastest are shown.
const MAX_POINTS: usize = 1500;

/// Figures: fitting layouts by time and memory; memory and time of the best layouts; cost over the number of GPUs.
fn panels(
    args: &PlanTrainArgs,
    reading: &Reading,
    machine: &Machine,
    work: &Workload,
    found: &SearchResult,
    space: &SearchSpace,
) -> Vec<Panel> {
    let mut panels: Vec<Panel> = Vec::new();
    let point = |c: &LayoutCandidate| (c.step.total, c.bytes);
    if let [fastest, _, ..] = &found.ranked[..] {
        let axes = (Axis::log("time per step", Unit::Seconds), Axis::linear("peak memory per GPU", Unit::Bytes));
        // Slow layouts would compress the scale.
        let shown = |c: &&LayoutCandidate| c.step.total <= SLOWEST * fastest.step.total;
        let slower = found.ranked.iter().filter(|c| !shown(c)).count();
        let title = match slower {
            0 => "Layouts that fit".to_owned(),
            n => {
                format!("Layouts that fit; {} slower than {SLOWEST} times the fastest are not shown", grouped(n as u64))
            }
        };
        let mut chart = Chart { height: 340.0, ..Chart::new(title, axes.0, axes.1) };
        let layouts = found.ranked.iter().filter(shown).take(MAX_POINTS).map(point);
        chart.series.push(Series::new("layouts", Style::Points, layouts));
        let named = |c: &LayoutCandidate, label: String| ChartPoint { x: c.step.total, y: c.bytes, label };
        let name = format!("the fastest, {}", fastest.layout);
        chart.series.push(Series { name, points: vec![named(fastest, "fastest".into())], style: Style::Points });
        let front = pareto(&found.ranked);
        let others = front.iter().filter(shown).filter(|c| c.layout != fastest.layout);
        let points = others.map(|c| named(c, c.layout.to_string())).collect();
        chart.series.push(Series { name: "Pareto front".into(), points, style: Style::Both });
        panels.push(chart.into());
    }
    let top: Vec<&LayoutCandidate> = found.ranked.iter().take(args.top().min(8)).collect();
    let limit = Some((machine.name.clone(), machine.memory));
    let bars = top.iter().map(|c| ledger_bar(c.layout.to_string(), &training(reading, &c.layout, work))).collect();
    let axis = || Axis::linear("memory", Unit::Bytes);
    panels.push(Bars { title: "Peak memory per GPU".into(), axis: axis(), bars, limit: limit.clone() }.into());
    if let Some(best) = top.first().filter(|c| c.layout.pp > 1) {
        let stages = training_stages(reading, &best.layout, work);
        let bars = stages.iter().enumerate().map(|(i, ledger)| ledger_bar(format!("stage {i}"), ledger)).collect();
        panels.push(Bars { title: format!("Memory by stage, {}", best.layout), axis: axis(), bars, limit }.into());
    }
    let bar = |c: &&LayoutCandidate| Bar {
        name: c.layout.to_string(),
        parts: parts(&c.step)
            .into_iter()
            .map(|(what, time, _)| match what {
                "compute" => (what.to_owned(), time - c.step.recompute),
                "  recomputation" => ("recomputation".to_owned(), time),
                _ => (what.to_owned(), time),
            })
            .collect(),
    };
    let axis = Axis::linear("time", Unit::Seconds);
    panels.push(Bars { title: "Time per step".into(), axis, bars: top.iter().map(bar).collect(), limit: None }.into());
    panels.extend(over_gpus(args, reading, machine, work, space));
    panels
}

/// Days and GPU hours, or dollars, of the run for other numbers of GPUs, each with its fastest layout.
fn over_gpus(
    args: &PlanTrainArgs,
    reading: &Reading,
    machine: &Machine,
    work: &Workload,
    space: &SearchSpace,
) -> Option<Panel> {
    let tokens = args.tokens?;
    let fewer = [8, 4, 2].into_iter().filter(|n| args.gpus.is_multiple_of(*n)).map(|n| args.gpus / n);
    let counts = fewer.chain([1, 2, 4].map(|n| args.gpus * n));
    let spent = |gpus: usize| {
        let space = SearchSpace { gpus, ..space.clone() };
        let best = search(reading, machine, work, &space).ranked.into_iter().next()?;
        let saves = checkpointing(gpus, args.gpu_mtbf, args.checkpoint, RESTART);
        let run =
            TrainingRun::new(tokens, best.step.tokens_per_second, gpus, args.price.unwrap_or(1.0), saves.overhead);
        let label = format!("{} GPUs", grouped(gpus as u64));
        Some(ChartPoint { x: run.days_with_failures, y: run.dollars, label })
    };
    let points: Vec<ChartPoint> = counts.filter_map(spent).filter(|p| p.x.is_finite()).collect();
    let y = if args.price.is_some() { "dollars" } else { "GPU hours" };
    let axes = (Axis::log("days, with failures", Unit::Number), Axis::linear(y, Unit::Number));
    let mut chart = Chart::new("Time and cost of the run at the same batch", axes.0, axes.1);
    chart.series.push(Series { name: "fastest layout".into(), points, style: Style::Both });
    Some(chart.into())
}

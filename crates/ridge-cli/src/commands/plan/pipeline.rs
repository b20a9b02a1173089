//! `ridge plan pipeline`: simulates a pipeline step event by event.

use std::path::PathBuf;

use clap::Args;
use ridge_hw::units::{Bytes, Seconds};
use ridge_plan::pipeline::{Pipeline, Schedule, Stage, Timeline};
use ridge_plan::plot::Panel;
use serde_json::json;

use super::page::{Page, PageArgs, PageBlock, PageTable, seconds};
use super::parsers::named;
use crate::args::whole;
use crate::error::{Result, refused};
use crate::output::write_file;

/// Simulate pipeline schedules: bubble, memory, timeline
///
/// Without --schedule, all applicable schedules are compared.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ridge plan pipeline --stages 8 --micro-batches 32
  ridge plan pipeline --stages 4 --micro-batches 8 --schedule 1f1b --plot 1f1b.svg --trace 1f1b.json
  ridge plan pipeline --stages 8 --micro-batches 64 --schedule interleaved --chunks 4")]
pub(crate) struct PlanPipelineArgs {
    /// Devices, each with an equal share of the layers
    #[arg(long, value_name = "N", value_parser = whole::<usize, 1, 4096>)]
    stages: usize,

    /// Micro-batches of a step
    #[arg(long, value_name = "N", value_parser = whole::<usize, 1, 1_000_000>)]
    micro_batches: usize,

    /// gpipe, 1f1b, interleaved, zb-h1, zb-v or dualpipe
    #[arg(long, value_name = "NAME", value_parser = |typed: &str| named(typed, &Schedule::ALL, Schedule::name))]
    schedule: Option<Schedule>,

    /// Layer chunks per device, for the interleaved schedule
    #[arg(long, value_name = "N", value_parser = whole::<usize, 1, 1024>)]
    chunks: Option<usize>,

    /// Time of the forward pass of a device's layers
    #[arg(long, value_name = "TIME", default_value = "10ms")]
    forward: Seconds,

    /// Time of the gradient of the inputs [default: that of the forward pass]
    #[arg(long, value_name = "TIME")]
    input: Option<Seconds>,

    /// Time of the gradient of the weights [default: that of the forward pass]
    #[arg(long, value_name = "TIME")]
    weight: Option<Seconds>,

    /// Extra forward time of the last stage, for the logits
    #[arg(long, value_name = "TIME", default_value = "0s")]
    head: Seconds,

    /// Time of a message between stages
    #[arg(long, value_name = "TIME", default_value = "0s")]
    message: Seconds,

    /// Blocking sends
    #[arg(long)]
    blocking: bool,

    /// Time of an overlapped forward and backward pass, relative to their sum (dualpipe)
    #[arg(long, value_name = "SHARE", default_value_t = 1.0)]
    paired: f64,

    /// Activation memory of a device's layers per micro-batch
    #[arg(long, value_name = "BYTES", default_value = "0B")]
    activations: Bytes,

    /// Write the timeline as a Chrome trace
    #[arg(long, value_name = "FILE", requires = "schedule")]
    trace: Option<PathBuf>,

    #[command(flatten)]
    page: PageArgs,
}

impl PlanPipelineArgs {
    fn pipeline(&self, schedule: Schedule) -> Result<Pipeline> {
        let chunks = match schedule {
            Schedule::Interleaved => self.chunks.unwrap_or(2),
            _ if self.schedule.is_some() => self.chunks.unwrap_or(1),
            _ => 1,
        };
        let stage = Stage {
            forward: self.forward.0,
            input: self.input.unwrap_or(self.forward).0,
            weight: self.weight.unwrap_or(self.forward).0,
            activations: self.activations.as_f64(),
        };
        let mut pipeline = Pipeline::uniform(schedule, self.stages, chunks, self.micro_batches, stage)?;
        (pipeline.message, pipeline.blocking, pipeline.paired) = (self.message.0, self.blocking, self.paired);
        if let Some(last) = pipeline.stages.last_mut() {
            // Logits also have both gradients.
            last.forward += self.head.0;
            last.input += self.head.0;
            last.weight += self.head.0;
        }
        pipeline.check()?;
        Ok(pipeline)
    }
}

pub(super) fn run(args: &PlanPipelineArgs) -> Result<()> {
    if !(args.paired > 0.0 && args.paired <= 1.0) {
        return Err(refused("--paired", args.paired, "must be above 0 and at most 1"));
    }
    if let Some(schedule) = args.schedule {
        let pipeline = args.pipeline(schedule)?;
        return one(args, &pipeline, &pipeline.simulate()?);
    }
    let mut table = PageTable::with_head("", ["schedule", "step", "bubble", "idle", "in flight", "activations"]);
    let mut rejected = Vec::new();
    let mut first = None;
    let mut found = Vec::new();
    let mut panels: Vec<Panel> = Vec::new();
    for schedule in Schedule::ALL {
        match args.pipeline(schedule).and_then(|p| Ok((p.simulate()?, p.chunks))) {
            Ok((t, chunks)) => {
                let cells = [
                    schedule.to_string(),
                    seconds(t.makespan),
                    percent(t.bubble),
                    percent(t.waiting),
                    format!("{:.2}", alive(&t, chunks)),
                    Bytes(peak(&t) as u64).to_string(),
                ];
                table.push(cells, schedule.formula());
                panels.extend(args.page.draws().then(|| t.chart(schedule.name()).into()));
                found.push(json!({
                    "schedule": schedule, "makespan": t.makespan, "bubble": t.bubble, "waiting": t.waiting,
                    "devices": t.devices,
                }));
            }
            Err(why) => {
                rejected.push(PageBlock::Text(format!("{schedule} cannot run: {why}")));
                found.push(json!({ "schedule": schedule, "rejected": why.to_string() }));
                // If the simplest schedule cannot run, none can.
                first.get_or_insert(why);
            }
        }
    }
    if let Some(why) = first.filter(|_| rejected.len() == Schedule::ALL.len()) {
        return Err(why);
    }
    let title = format!("{} stages, {} micro-batches", args.stages, args.micro_batches);
    let blocks = std::iter::once(PageBlock::Table(table)).chain(rejected).collect();
    let json = json!({ "stages": args.stages, "micro_batches": args.micro_batches, "schedules": found });
    args.page.show(&Page { title, blocks, panels, sources: sources(), json, ..Page::default() })
}

fn sources() -> Vec<String> {
    vec!["times of passes and messages: given; all others: modelled, event by event".to_owned()]
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

/// Peak number of in-flight micro-batches, in units of a device's layers.
fn alive(t: &Timeline, chunks: usize) -> f64 {
    t.devices.iter().map(|d| d.peak_alive).max().unwrap_or(0) as f64 / chunks as f64
}

fn peak(t: &Timeline) -> f64 {
    t.devices.iter().map(|d| d.peak_bytes).fold(0.0, f64::max)
}

fn one(args: &PlanPipelineArgs, pipeline: &Pipeline, t: &Timeline) -> Result<()> {
    let schedule = pipeline.schedule;
    let title = format!("{schedule}: {} stages, {} micro-batches", args.stages, args.micro_batches);
    if let Some(path) = &args.trace {
        write_file(path, &t.chrome_trace().to_string())?;
    }
    let answer = format!(
        "step    {}\nbubble  {} of all devices' time\nidle    {} between a device's first pass and its last",
        seconds(t.makespan),
        percent(t.bubble),
        percent(t.waiting)
    );
    let mut table = PageTable::with_head("", ["device", "busy", "idle", "in flight", "activations"]);
    for (d, of) in t.devices.iter().enumerate() {
        let alive = format!("{:.2}", of.peak_alive as f64 / pipeline.chunks as f64);
        let bytes = Bytes(of.peak_bytes as u64).to_string();
        table.push([d.to_string(), seconds(of.busy), seconds(of.waits), alive, bytes], "");
    }
    let mut sources = sources();
    sources.insert(0, format!("with equal stages and no messages: {}", schedule.formula()));
    let page = Page {
        blocks: vec![PageBlock::Answer(answer), PageBlock::Drawn(t.text(96)), PageBlock::Table(table)],
        panels: args.page.draws().then(|| t.chart(&title).into()).into_iter().collect(),
        sources,
        json: json!({ "pipeline": pipeline, "timeline": t }),
        title,
        ..Page::default()
    };
    args.page.show(&page)
}

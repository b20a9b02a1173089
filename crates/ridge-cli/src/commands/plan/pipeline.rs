//! `ridge plan pipeline`: a step of a pipeline, event by event.

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
/// Without --schedule, all schedules that can run so are compared.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ridge plan pipeline --stages 8 --micro-batches 32
  ridge plan pipeline --stages 4 --micro-batches 8 --schedule 1f1b --plot 1f1b.svg --trace 1f1b.json
  ridge plan pipeline --stages 8 --micro-batches 64 --schedule interleaved --chunks 4 --message 200us")]
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

    /// Chunks of layers a device, of the interleaved schedule
    #[arg(long, value_name = "N", value_parser = whole::<usize, 1, 1024>)]
    chunks: Option<usize>,

    /// Forward pass of a device's layers
    #[arg(long, value_name = "TIME", default_value = "10ms")]
    forward: Seconds,

    /// Gradient of their inputs; as long as the forward pass if it is not given
    #[arg(long, value_name = "TIME")]
    input: Option<Seconds>,

    /// Gradient of their weights; as long as the forward pass if it is not given
    #[arg(long, value_name = "TIME")]
    weight: Option<Seconds>,

    /// Extra forward time of the last stage, for the logits
    #[arg(long, value_name = "TIME", default_value = "0s")]
    head: Seconds,

    /// A message between stages
    #[arg(long, value_name = "TIME", default_value = "0s")]
    message: Seconds,

    /// Blocking sends
    #[arg(long)]
    blocking: bool,

    /// Time of a forward and a backward pass in a pair, of their sum (dualpipe)
    #[arg(long, value_name = "SHARE", default_value_t = 1.0)]
    paired: f64,

    /// Bytes of activations that a device's layers keep of a micro-batch
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
            // Logits have both gradients too.
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
        return Err(refused("--paired", args.paired, "is no share; give one above 0 and at most 1"));
    }
    if let Some(schedule) = args.schedule {
        let pipeline = args.pipeline(schedule)?;
        return one(args, &pipeline, &pipeline.simulate()?);
    }
    let mut table = PageTable::with_head("", ["schedule", "step", "bubble", "waits", "alive", "activations"]);
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
                // What the plainest schedule cannot run none can.
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
    vec!["times of passes and messages: as given; the rest: modelled, event by event".to_owned()]
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

/// Micro-batches' worth of a device's layers that are alive where most are.
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
        "step    {}\nbubble  {} of all devices' time\nwaits   {} between a device's first pass and its last",
        seconds(t.makespan),
        percent(t.bubble),
        percent(t.waiting)
    );
    let mut table = PageTable::with_head("", ["device", "busy", "waits", "alive", "activations"]);
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

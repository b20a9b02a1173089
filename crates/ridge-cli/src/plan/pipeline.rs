//! `ridge plan pipeline`: a step of a pipeline, event by event.

use std::path::PathBuf;

use clap::Args;
use ridge_hw::units::{Bytes, Seconds};
use ridge_plan::pipeline::{Pipeline, Schedule, Stage, Timeline};
use ridge_plan::plot;
use serde_json::json;

use super::{ShownArgs, named, seconds, write_file};
use crate::args::whole;
use crate::error::Result;
use crate::output::{columns, print, print_json};
use crate::settings::refused;

/// Simulate pipeline schedules: bubble, memory, timeline
///
/// Without --schedule, all schedules that can run so are compared.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ridge plan pipeline --stages 8 --micro-batches 32
  ridge plan pipeline --stages 4 --micro-batches 8 --schedule 1f1b --plot 1f1b.svg --trace 1f1b.json
  ridge plan pipeline --stages 8 --micro-batches 64 --schedule interleaved --chunks 4 --message 200us")]
pub(crate) struct PipelineArgs {
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

    /// What the last stage's forward pass takes longer, for the logits
    #[arg(long, value_name = "TIME", default_value = "0s")]
    head: Seconds,

    /// A message between stages
    #[arg(long, value_name = "TIME", default_value = "0s")]
    message: Seconds,

    /// Senders wait for their messages
    #[arg(long)]
    blocking: bool,

    /// Time of a forward and a backward pass in a pair, of their sum (dualpipe)
    #[arg(long, value_name = "SHARE", default_value_t = 1.0)]
    paired: f64,

    /// Bytes of activations that a device's layers keep of a micro-batch
    #[arg(long, value_name = "BYTES", default_value = "0B")]
    activations: Bytes,

    /// Write the timeline as SVG
    #[arg(long, value_name = "FILE", requires = "schedule")]
    plot: Option<PathBuf>,

    /// Write the timeline as a Chrome trace
    #[arg(long, value_name = "FILE", requires = "schedule")]
    trace: Option<PathBuf>,

    #[command(flatten)]
    shown: ShownArgs,
}

impl PipelineArgs {
    fn pipeline(&self, schedule: Schedule) -> Result<Pipeline> {
        if !(self.paired > 0.0 && self.paired <= 1.0) {
            return Err(refused("--paired", self.paired, "is no share; give one above 0 and at most 1"));
        }
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

pub(super) fn run(args: &PipelineArgs) -> Result<()> {
    if let Some(schedule) = args.schedule {
        let pipeline = args.pipeline(schedule)?;
        return one(args, &pipeline, &pipeline.simulate()?);
    }
    let mut rows = vec![["schedule", "step", "bubble", "waits", "alive", "activations"].map(str::to_owned).to_vec()];
    let mut found = Vec::new();
    for schedule in Schedule::ALL {
        match args.pipeline(schedule).and_then(|p| Ok((p.simulate()?, p.chunks))) {
            Ok((t, chunks)) => {
                let mut row = vec![
                    schedule.to_string(),
                    seconds(t.makespan),
                    percent(t.bubble),
                    percent(t.waiting),
                    format!("{:.2}", alive(&t, chunks)),
                    Bytes(peak(&t) as u64).to_string(),
                ];
                row.extend(args.shown.explain.then(|| schedule.formula().to_owned()));
                rows.push(row);
                found.push(json!({
                    "schedule": schedule, "makespan": t.makespan, "bubble": t.bubble, "waiting": t.waiting,
                    "devices": t.devices,
                }));
            }
            Err(why) => {
                rows.push(vec![schedule.to_string(), format!("cannot run: {why}")]);
                found.push(json!({ "schedule": schedule, "rejected": why.to_string() }));
            }
        }
    }
    if args.shown.json {
        return print_json(&json!(found));
    }
    let (head, tail) =
        (format!("{} stages, {} micro-batches\n\n", args.stages, args.micro_batches), rejected(&mut rows));
    print(&(head + &columns(&rows) + &tail))
}

/// Takes rows of schedules that cannot run out of the table.
fn rejected(rows: &mut Vec<Vec<String>>) -> String {
    let (out, kept) = std::mem::take(rows).into_iter().partition(|row: &Vec<String>| row.len() == 2);
    *rows = kept;
    out.into_iter().map(|row: Vec<String>| format!("\n{} {}\n", row[0], row[1])).collect()
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

fn one(args: &PipelineArgs, pipeline: &Pipeline, t: &Timeline) -> Result<()> {
    let schedule = pipeline.schedule;
    let title = format!("{schedule}: {} stages, {} micro-batches", args.stages, args.micro_batches);
    if let Some(path) = &args.plot {
        write_file(path, &plot::draw(&[t.chart(&title).into()]))?;
    }
    if let Some(path) = &args.trace {
        write_file(path, &t.chrome_trace().to_string())?;
    }
    if args.shown.json {
        return print_json(&json!({ "pipeline": pipeline, "timeline": t }));
    }
    let mut text = format!(
        "{title}\n\nstep    {}\nbubble  {} of all devices' time\nwaits   {} between a device's first pass and its last\n\n",
        seconds(t.makespan),
        percent(t.bubble),
        percent(t.waiting)
    );
    text += &t.text(96);
    let mut rows = vec![["device", "busy", "waits", "alive", "activations"].map(str::to_owned).to_vec()];
    for (d, of) in t.devices.iter().enumerate() {
        let alive = format!("{:.2}", of.peak_alive as f64 / pipeline.chunks as f64);
        let bytes = Bytes(of.peak_bytes as u64).to_string();
        rows.push(vec![d.to_string(), seconds(of.busy), seconds(of.waits), alive, bytes]);
    }
    text += &format!("\n{}", columns(&rows));
    if args.shown.explain {
        text += &format!("\nwith equal stages and no messages: {}\n", schedule.formula());
    }
    print(&text)
}

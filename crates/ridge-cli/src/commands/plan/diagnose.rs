//! `ridge plan diagnose`: the bottleneck of a recorded step.

use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Read};
use std::path::PathBuf;

use clap::Args;
use ridge_hw::spec::{DeviceSpec, Precision};
use ridge_plan::PlanError;
use ridge_plan::diagnose::{LoadDiagnosis, diagnose, diagnose_load};
use serde_json::json;

use crate::error::{Error, Result, refused};
use crate::output::{columns, print, print_json};

/// Find what bounds a trace, and what to try next
///
/// Reads Chrome traces of torch.profiler, of programs that write its format, and of `ridge bench --trace`. From the output of
/// `ridge bench serve --json`, it reports whether requests waited for the queue, prefill, decoding or the cache.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ridge plan diagnose trace.json
  ridge bench serve --rate 20 --json | ridge plan diagnose -
  gunzip -c trace.json.gz | ridge plan diagnose - --device H200 --json")]
pub(crate) struct PlanDiagnoseArgs {
    /// Trace file; `-` reads standard input
    #[arg(value_name = "TRACE")]
    trace: PathBuf,

    /// Device, if the trace does not name it
    #[arg(long, value_name = "NAME")]
    device: Option<String>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &PlanDiagnoseArgs) -> Result<()> {
    let roofline = match &args.device {
        Some(name) => {
            let sheet = DeviceSpec::find(name).map_err(PlanError::from)?;
            Some(sheet.roofline(Precision::Bf16).map_err(PlanError::from)?)
        }
        None => None,
    };
    let fail = |cause| Error::Read { path: args.trace.display().to_string(), cause };
    let source: Box<dyn Read> = if args.trace.as_os_str() == "-" {
        Box::new(io::stdin().lock())
    } else {
        Box::new(File::open(&args.trace).map_err(fail)?)
    };
    let mut source = BufReader::with_capacity(1 << 16, source);
    if source.fill_buf().map_err(fail)?.starts_with(&[0x1f, 0x8b]) {
        return Err(refused("TRACE", args.trace.display(), "is compressed; gunzip -c it into `ridge plan diagnose -`"));
    }
    let head = String::from_utf8_lossy(source.fill_buf().map_err(fail)?).into_owned();
    if LOAD_MARKS.iter().all(|mark| head.contains(mark)) {
        let object = serde_json::from_reader(source)
            .map_err(|e| refused("TRACE", args.trace.display(), &format!("is not JSON: {e}")))?;
        return show_load(&diagnose_load(&object)?, args.json);
    }
    let found = diagnose(source, roofline)?;
    if args.json {
        return print_json(&json!({
            "diagnosis": found,
            "sources": { "times": "measured, by the trace", "verdict": "modelled" },
        }));
    }
    let m = &found.measured;
    let percent = |share: f64| format!("{:.1} %", 100.0 * share);
    print(&format!("{}, confidence {} ({})\n\n", found.verdict, found.sure, found.because))?;
    let rows: Vec<Vec<String>> = [
        ("matrix products", m.matmul),
        ("attention", m.attention),
        ("other kernels", m.other),
        ("copies alone", m.copies),
        ("communication alone", m.communication),
        ("idle", m.idle),
    ]
    .into_iter()
    .map(|(what, share)| vec![what.to_owned(), percent(share)])
    .collect();
    let mut text = columns(&rows);
    text += "\nevidence\n";
    for line in &found.evidence {
        text += &format!("  {line}\n");
    }
    text += "\nlongest\n";
    for kernel in &m.longest {
        let name: String = kernel.name.chars().take(90).collect();
        text += &format!("  {}  {name}\n", percent(kernel.seconds / m.seconds));
    }
    text += &format!("\nnext experiment: {}\nit shows: {}\n", found.experiment, found.shows);
    // Names come from the trace.
    print(&text)
}

/// Keys in the first lines of the output of `ridge bench serve --json` that do not occur in traces.
const LOAD_MARKS: [&str; 3] = ["\"server\"", "\"endpoint\"", "\"settings\""];

fn show_load(found: &LoadDiagnosis, json: bool) -> Result<()> {
    if json {
        let sources = json!({ "times": "measured, by the report", "verdict": "modelled" });
        return print_json(&json!({ "diagnosis": found, "sources": sources }));
    }
    let percent = |share: f64| format!("{:.1} %", 100.0 * share);
    let rows = [("queue", found.queue), ("prefill", found.prefill), ("decode", found.decode)];
    let rows: Vec<Vec<String>> = rows.into_iter().map(|(what, share)| vec![what.to_owned(), percent(share)]).collect();
    let mut text =
        format!("{}, confidence {} ({})\n\n{}\nevidence\n", found.verdict, found.sure, found.because, columns(&rows));
    for line in &found.evidence {
        text += &format!("  {line}\n");
    }
    text += &format!("\nnext experiment: {}\nit shows: {}\n", found.experiment, found.shows);
    print(&text)
}

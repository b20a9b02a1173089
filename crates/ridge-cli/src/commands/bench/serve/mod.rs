//! `ridge bench serve`: load-tests a server. `args` has the settings and the workload, `show` the forms of results; this
//! file sends the load.

mod args;
mod show;

use ridge_serve::load::{Client, LoadReport, LoadRun, LoadWorkload, Pace, drive, preflight, sweep};

pub(crate) use args::ServeBenchArgs;
use args::{ArrivalMode, MAX_REQUESTS, ServeBenchSettings};
use show::LoadMeasurement;

use crate::error::{Error, Result, refused};
use crate::output::{Progress, count, note, print, print_json, write_file};

/// Runs the command.
///
/// # Errors
/// When the server cannot be reached or all requests fail, or a file cannot be read or written.
pub(crate) fn run(args: ServeBenchArgs) -> Result<()> {
    send(args.resolve()?)
}

fn send(mut settings: ServeBenchSettings) -> Result<()> {
    let workload = settings.workload(settings.when);
    let Some(first) = workload.shapes.first() else {
        return Err(refused("--duration", settings.duration.unwrap_or(0.0), "ends before the first request is due"));
    };
    let client = preflight(Client::new(settings.target.clone()), &settings.prompts, first)?;
    settings.target = client.target;
    if settings.warmup > 0 {
        let warmup = LoadWorkload {
            requests: settings.warmup,
            pace: Pace::Concurrent(settings.warmup),
            first_number: 1 << 62,
            ..workload.clone()
        };
        measure(&settings, &warmup, "warming up")?;
    }
    let measured = match settings.attain {
        None => {
            let (run, report) = measure(&settings, &workload, "asking")?;
            LoadMeasurement::Once { run, report: Box::new(report) }
        }
        Some(attain) => swept(&settings, attain)?,
    };
    if settings.json {
        print_json(&show::object(&settings, &measured))
    } else {
        print(&show::text(&settings, &measured))
    }?;
    if let Some(path) = &settings.plot {
        write_file(path, &show::plot(&settings, &measured))?;
    }
    match &measured {
        LoadMeasurement::Once { report, .. } if report.answered == 0 => {
            Err(Error::NothingAnswered { requests: count(report.requests, "request") })
        }
        _ => Ok(()),
    }
}

fn measure(
    settings: &ServeBenchSettings,
    workload: &LoadWorkload,
    what: &'static str,
) -> Result<(LoadRun, LoadReport)> {
    let mut bar = match (workload.pace, workload.duration) {
        (Pace::Concurrent(_), Some(duration)) if workload.requests == MAX_REQUESTS => {
            Progress::of_seconds(what, duration.as_secs())
        }
        (Pace::Concurrent(_), _) => Progress::of_requests(what, workload.requests as u64),
        (Pace::AtTheirTimes, _) => Progress::of_requests(what, workload.shapes.len() as u64),
    };
    let seconds = workload.requests == MAX_REQUESTS && matches!(workload.pace, Pace::Concurrent(_));
    let started = std::time::Instant::now();
    let run = drive(&settings.target, &settings.prompts, workload, |ended| {
        bar.at(if seconds { started.elapsed().as_secs() } else { ended as u64 });
    })?;
    drop(bar);
    let report = LoadReport::new(&run, |i| workload.shape(i).output_tokens, settings.objective.as_ref());
    Ok((run, report))
}

fn swept(settings: &ServeBenchSettings, attain: f64) -> Result<LoadMeasurement> {
    let first = if let ArrivalMode::Random { rate } = settings.when { rate } else { 1.0 };
    let objective = settings.objective.unwrap_or_default();
    let mut steps = Vec::new();
    let found = sweep(first, show::PRECISION, |rate| {
        let mut workload = settings.workload(ArrivalMode::Random { rate });
        if workload.shapes.is_empty() {
            let why = format!("ends before the first request is due at {rate:.3} requests/s");
            return Err(refused("--duration", settings.duration.unwrap_or(0.0), &why));
        }
        // The server may have cached a prompt that was sent before.
        workload.first_number = (steps.len() as u64 + 1) << 32;
        let (run, report) = measure(settings, &workload, "asking")?;
        let good = report.good_share().is_some_and(|share| share >= attain);
        let kept = good && report.steadiness.is_kept();
        note(&show::step(rate, kept, &report, attain, &objective.attained(&run, attain)));
        steps.push((rate, report));
        Ok(kept)
    })?;
    Ok(LoadMeasurement::Sweep { sweep: found, steps })
}

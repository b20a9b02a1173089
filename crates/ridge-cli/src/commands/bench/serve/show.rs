//! Results of `ridge bench serve` as text, JSON and charts.

use ridge_hw::units::Seconds;
use ridge_plan::plot::{Axis, Chart, Mark, Panel, Series, Style, Unit, draw};
use ridge_serve::load::{Api, LoadReport, LoadRun, Objective, RateSweep, SampleSummary, TimedResponse};
use serde_json::{Value, json};

use super::args::{ArrivalMode, RequestLengths, ServeBenchSettings};
use crate::output::{columns, count, grouped};

/// The results.
pub(super) enum LoadMeasurement {
    Once { run: LoadRun, report: Box<LoadReport> },
    Sweep { sweep: RateSweep, steps: Vec<(f64, LoadReport)> },
}

/// The ratio of the two bracketing rates at which a sweep ends.
pub(super) const PRECISION: f64 = 0.05;
/// Maximum number of points of a curve.
const MAX_POINTS: usize = 200;

fn share(share: f64) -> String {
    format!("{:.1}%", 100.0 * share)
}

fn a_second(rate: f64) -> String {
    if rate >= 100.0 { format!("{}/s", grouped(rate.round() as u64)) } else { format!("{rate:.2}/s") }
}

impl ServeBenchSettings {
    fn limits(&self) -> String {
        let limits = self.objective.iter().flat_map(Objective::limits);
        limits.map(|(name, limit)| format!("{name} at most {}", Seconds(limit))).collect::<Vec<_>>().join(", ")
    }

    fn manner(&self) -> String {
        let random = match self.burst {
            0.0 => "uniform arrivals".to_owned(),
            1.0 => "Poisson".to_owned(),
            cv => format!("bursty arrivals (coefficient of variation {cv})"),
        };
        match self.when {
            _ if self.attain.is_some() => random,
            ArrivalMode::Concurrent(n) => format!("concurrency {}", grouped(n as u64)),
            ArrivalMode::Random { rate } => format!("{random}, {}", a_second(rate)),
            ArrivalMode::Trace { speed: 1.0 } => "arrival times of the trace".to_owned(),
            ArrivalMode::Trace { speed } => format!("arrival times of the trace at {speed} times the speed"),
        }
    }

    fn endpoint(&self) -> &'static str {
        match self.target.api {
            Api::Completions => "/v1/completions",
            Api::Chat => "/v1/chat/completions",
        }
    }
}

pub(super) fn text(settings: &ServeBenchSettings, measured: &LoadMeasurement) -> String {
    let head = format!(
        "{}{}: {}, {}, seed {}\n",
        settings.target.url(),
        settings.endpoint(),
        settings.target.model,
        settings.manner(),
        settings.seed
    );
    match measured {
        LoadMeasurement::Once { report, .. } => head + &report_text(settings, report),
        LoadMeasurement::Sweep { sweep, steps } => {
            let mut text = head;
            let limits = settings.limits();
            let attained = settings.attain.map(share).unwrap_or_default();
            text += &match (sweep.highest, sweep.lowest_broken) {
                (Some(kept), Some(broken)) => format!(
                    "{} is the highest rate tried that the server sustains with {attained} within {limits}; {} is too high\n",
                    a_second(kept),
                    a_second(broken)
                ),
                (Some(kept), None) => {
                    format!("{} is sustained within {limits}; higher rates were not tried\n", a_second(kept))
                }
                (None, _) => format!("no rate tried is sustained with {attained} within {limits}\n"),
            };
            let best = steps.iter().find(|(rate, _)| sweep.highest == Some(*rate));
            best.map_or(text.clone(), |(_, report)| text + &report_text(settings, report))
        }
    }
}

/// A line of a sweep: `attained` has the percentiles of the latencies at the share `attain`.
pub(super) fn step(
    rate: f64,
    kept: bool,
    report: &LoadReport,
    attain: f64,
    attained: &[(&'static str, Option<f64>)],
) -> String {
    let time = |(name, value): &(&str, Option<f64>)| {
        format!("{name} {}", value.map_or_else(|| "none".to_owned(), |value| Seconds(value).to_string()))
    };
    format!(
        "{:>9}  {}  {} of {} within the objective, {} completed, p{} of {}",
        a_second(rate),
        if kept { "sustained" } else { "exceeded " },
        report.good.unwrap_or(0),
        count(report.requests, "request"),
        share(report.steadiness.share().min(1.0)),
        ((1e4 * attain).round() / 100.0),
        attained.iter().map(time).collect::<Vec<_>>().join(", of "),
    )
}

fn report_text(settings: &ServeBenchSettings, report: &LoadReport) -> String {
    let mut rows = vec![vec![
        "answered".to_owned(),
        format!(
            "{} of {} in {}, at most {} in flight",
            grouped(report.answered as u64),
            count(report.requests, "request"),
            Seconds(report.seconds),
            grouped(report.peak as u64)
        ),
    ]];
    let offered = if report.late.is_some() { format!(", {} sent", a_second(report.offered)) } else { String::new() };
    rows.push(vec!["requests".to_owned(), format!("{} completed{offered}", a_second(report.rate(report.answered)))]);
    let prompts = match report.prompt_tokens {
        Some(tokens) => format!("{} of prompts, ", a_second(report.rate(tokens))),
        None => "prompt tokens not reported by the server, ".to_owned(),
    };
    rows.push(vec!["tokens".to_owned(), format!("{prompts}{} generated", a_second(report.rate(report.output_tokens)))]);
    if let (Some(good), Some(of)) = (report.good, report.good_share()) {
        let rate = a_second(report.rate(good));
        rows.push(vec!["goodput".to_owned(), format!("{good} ({}), {rate}: {}", share(of), settings.limits())]);
    }
    let mut text = columns(&rows);
    let times = [
        ("ttft", &report.ttft),
        ("tpot", &report.tpot),
        ("itl", &report.itl),
        ("e2e", &report.e2e),
        ("sent late", &report.late),
    ];
    let mut rows = vec![["", "mean", "p50", "p90", "p95", "p99", "max"].map(str::to_owned).to_vec()];
    for (name, s) in times.into_iter().filter_map(|(name, s)| Some((name, s.as_ref()?))) {
        let values = [s.mean, s.p50, s.p90, s.p95, s.p99, s.max].map(|v| Seconds(v).to_string());
        rows.push([name.to_owned()].into_iter().chain(values).collect());
    }
    if rows.len() > 1 {
        text += "\n";
        text += &columns(&rows);
    }
    if !report.failures.is_empty() {
        text += "\n";
        let row = |(kind, (n, said)): (&String, &(usize, String))| vec![kind.clone(), n.to_string(), said.clone()];
        text += &columns(&report.failures.iter().map(row).collect::<Vec<_>>());
    }
    if !report.counted {
        text += "the server does not report the tokens of its responses: events were counted, each of which may carry several tokens\n";
    }
    if report.short > 0 {
        text += &format!("{} ended before the requested number of tokens\n", count(report.short, "response"));
    }
    if !settings.prompts.exact() {
        text += "prompt lengths are counted in words; with --tokenizer DIR they are exact in tokens\n";
    }
    text
}

pub(super) fn object(settings: &ServeBenchSettings, measured: &LoadMeasurement) -> Value {
    let mut object = json!({
        "server": settings.target.url(),
        "endpoint": settings.endpoint(),
        "model": settings.target.model,
        "settings": {
            "arrivals": settings.manner(),
            "burst": settings.burst,
            "lengths": match &settings.lengths {
                RequestLengths::Trace(_) => json!("trace"),
                RequestLengths::Drawn { prompt, generate } => json!({ "prompt": prompt, "generate": generate }),
            },
            "shrink": settings.shrink,
            "duration_seconds": settings.duration,
            "warmup": settings.warmup,
            "seed": settings.seed,
            "slo_seconds": settings.objective.map(|o| o.limits().map(|(n, l)| (n.to_owned(), json!(l))).collect::<serde_json::Map<_, _>>()),
            "attain": settings.attain,
            "exact_prompts": settings.prompts.exact(),
        },
    });
    match measured {
        LoadMeasurement::Once { report, .. } => object["report"] = report.object(),
        LoadMeasurement::Sweep { sweep, steps } => {
            object["sweep"] = json!({
                "highest_rate": sweep.highest,
                "lowest_broken_rate": sweep.lowest_broken,
                "steps": sweep.tried.iter().zip(steps).map(|(tried, (_, report))| json!({
                    "rate": tried.rate, "kept": tried.kept, "steady": report.steadiness.is_kept(), "report": report.object(),
                })).collect::<Vec<_>>(),
            });
        }
    }
    object
}

/// The charts, as SVG.
pub(super) fn plot(settings: &ServeBenchSettings, measured: &LoadMeasurement) -> String {
    let charts = match measured {
        LoadMeasurement::Once { run, .. } => of_run(settings, run),
        LoadMeasurement::Sweep { steps, .. } => of_sweep(settings, steps),
    };
    draw(&charts.into_iter().map(Panel::from).collect::<Vec<_>>())
}

/// The plotted latency of a response, in seconds.
type Time = fn(&TimedResponse) -> Option<f64>;

fn of_run(settings: &ServeBenchSettings, run: &LoadRun) -> Vec<Chart> {
    let answers: Vec<&TimedResponse> = run.outcomes.iter().filter_map(|o| o.answer.as_ref().ok()).collect();
    let limit = |name: &str| settings.objective.iter().flat_map(Objective::limits).find(|l| l.0 == name);
    let time = |label: &str| Axis::linear(label, Unit::Seconds);
    let spread = |title: &str, names: &[(&str, Time)]| {
        let mut chart = Chart::new(title, time("time"), Axis::linear("share of responses, %", Unit::Number));
        for (name, of) in names {
            chart.series.push(Series::new(
                *name,
                Style::Line,
                cumulated(answers.iter().filter_map(|a| of(a)).collect()),
            ));
            chart.marks.extend(limit(name).map(|(n, x)| Mark { name: format!("{n} limit"), x }));
        }
        chart
    };
    let sent = run.outcomes.iter().filter_map(|o| Some((o.sent, o.answer.as_ref().ok()?.ttft)));
    let every = answers.len().div_ceil(MAX_POINTS).max(1);
    let title = "Time to the first token, by when the request was sent";
    let over_time = Chart::new(title, time("after the start"), time("ttft")).with(Series::new(
        "ttft",
        Style::Points,
        sent.step_by(every),
    ));
    vec![
        spread("Time to the first token", &[("ttft", |a| Some(a.ttft))]),
        spread("Time per token after the first", &[("tpot", TimedResponse::tpot)]),
        spread("Time to the end", &[("e2e", |a| Some(a.e2e))]),
        over_time,
    ]
}

/// The cumulative distribution of the values, in percent.
fn cumulated(mut values: Vec<f64>) -> Vec<(f64, f64)> {
    values.sort_by(f64::total_cmp);
    let n = values.len();
    let every = n.div_ceil(MAX_POINTS).max(1);
    let at = |i: usize| (values[i], 100.0 * (i + 1) as f64 / n as f64);
    let mut points: Vec<(f64, f64)> = (0..n).step_by(every).map(at).collect();
    if n > 0 {
        points.push(at(n - 1));
        points.insert(0, (values[0], 0.0));
    }
    points
}

fn of_sweep(settings: &ServeBenchSettings, steps: &[(f64, LoadReport)]) -> Vec<Chart> {
    let mut sorted: Vec<&(f64, LoadReport)> = steps.iter().collect();
    sorted.sort_by(|a, b| a.0.total_cmp(&b.0));
    let series = |name: &str, of: &dyn Fn(&LoadReport) -> Option<f64>| {
        Series::new(name, Style::Both, sorted.iter().filter_map(|(rate, report)| Some((*rate, of(report)?))))
    };
    let chart = |title: String, y: Axis, series: Vec<Series>| Chart {
        series,
        ..Chart::new(title, Axis::linear("requests per second", Unit::Number), y)
    };
    let time = || Axis::linear("time", Unit::Seconds);
    let both = |of: fn(&LoadReport) -> &Option<SampleSummary>| {
        vec![
            series("p50", &move |r| of(r).as_ref().map(|s| s.p50)),
            series("p90", &move |r| of(r).as_ref().map(|s| s.p90)),
            series("p99", &move |r| of(r).as_ref().map(|s| s.p99)),
        ]
    };
    vec![
        chart(
            format!("Requests within {}", settings.limits()),
            Axis::linear("share of requests, %", Unit::Number),
            vec![series("good", &|r| r.good_share().map(|s| 100.0 * s))],
        ),
        chart("Time to the first token".to_owned(), time(), both(|r| &r.ttft)),
        chart("Time per token after the first".to_owned(), time(), both(|r| &r.tpot)),
    ]
}

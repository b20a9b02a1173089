//! What requests waited for under load: the report of `ridge bench serve --json` in, a verdict out.

use std::fmt;

use serde::Serialize;
use serde_json::Value;

use super::verdict::Confidence;
use crate::error::PlanError;

/// What requests spent most of their time on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LoadVerdict {
    /// Waiting for their first step.
    Queue,
    /// Their prompts.
    Prefill,
    /// Their answers, token by token.
    Decode,
    /// Room in the cache, for which they waited or which they gave to others.
    Cache,
}

impl fmt::Display for LoadVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Queue => "bound by the queue",
            Self::Prefill => "bound by prefill",
            Self::Decode => "bound by decode",
            Self::Cache => "bound by the cache",
        })
    }
}

/// What a report says.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LoadDiagnosis {
    /// What requests spent most of their time on.
    pub verdict: LoadVerdict,
    /// How sure.
    pub sure: Confidence,
    /// Why it is so sure, or not.
    pub because: String,
    /// Shares of the time of all requests: waiting, prompts, answers.
    pub queue: f64,
    /// Prompts.
    pub prefill: f64,
    /// Answers.
    pub decode: f64,
    /// Sentences with numbers.
    pub evidence: Vec<String>,
    /// What to try.
    pub experiment: &'static str,
    /// What that would show.
    pub shows: &'static str,
}

/// A cache that was so full at some time had no room for a request that waited.
const FULL: f64 = 0.9;

/// Judges what `ridge bench serve --json` printed. Of a sweep it is the lowest rate that was too much.
///
/// # Errors
/// [`PlanError::Trace`] where the object is no such report, or nothing was answered.
pub fn diagnose_load(object: &Value) -> Result<LoadDiagnosis, PlanError> {
    let steps = object["sweep"]["steps"].as_array().into_iter().flatten();
    let broken = steps.filter(|step| step["kept"] == false).min_by(|a, b| {
        let rate = |step: &Value| step["rate"].as_f64().unwrap_or(f64::INFINITY);
        rate(a).total_cmp(&rate(b))
    });
    let report = broken.map_or(&object["report"], |step| &step["report"]);
    let number = |key: &str| report[key].as_f64();
    let time = |key: &str, of: &str| report[key][of].as_f64();
    let lacking = |problem: &str| PlanError::Trace {
        problem: problem.to_owned(),
        remedy: "give the output of `ridge bench serve --json` from a run with completed requests".to_owned(),
    };
    let (ttft, e2e) = time("ttft_seconds", "mean")
        .zip(time("e2e_seconds", "mean"))
        .ok_or_else(|| lacking("the report has no latencies"))?;
    let server = &report["server"];
    let told = |key: &str| server[key].as_f64();
    let (seconds, told_by) = match (told("queue_seconds"), told("prefill_seconds"), told("decode_seconds")) {
        (Some(queue), Some(prefill), Some(decode)) if queue + prefill + decode > 0.0 => {
            ([queue, prefill, decode], "the server's metrics")
        }
        _ => {
            // The quickest first token waited for its prompt alone.
            let prefill = time("ttft_seconds", "min").unwrap_or(ttft);
            (
                [ttft - prefill, prefill, e2e - ttft],
                "the client's times: the fastest TTFT is taken as a request that did not wait",
            )
        }
    };
    let total: f64 = seconds.iter().sum::<f64>().max(f64::MIN_POSITIVE);
    let [queue, prefill, decode] = seconds.map(|s| s.max(0.0) / total);
    let percent = |share: f64| format!("{:.0} %", 100.0 * share);
    let mut evidence = vec![format!(
        "requests spent {} of their time waiting, {} in prefill and {} in decoding, according to {told_by}",
        percent(queue),
        percent(prefill),
        percent(decode)
    )];
    let (preemptions, cache) = (told("preemptions").unwrap_or(0.0), told("most_of_cache").unwrap_or(0.0));
    if told("most_of_cache").is_some() {
        evidence.push(format!(
            "at most {} of the cache was in use and {} requests waited; {preemptions} sequences were preempted",
            percent(cache),
            told("most_waiting").unwrap_or(0.0)
        ));
    }
    let kept_up = number("answered_share_when_steady");
    if let Some(share) = kept_up.filter(|share| *share < 0.95) {
        evidence
            .push(format!("{} of the requests were completed at the arrival rate: the queue grows", percent(share)));
    }
    if let Some((usual, worst)) = time("itl_seconds", "p50").zip(time("itl_seconds", "p99")) {
        evidence.push(format!(
            "half of the inter-token latencies are below {:.1} ms, 99 % below {:.1} ms",
            1e3 * usual,
            1e3 * worst
        ));
    }
    let mut parts = [(LoadVerdict::Queue, queue), (LoadVerdict::Prefill, prefill), (LoadVerdict::Decode, decode)];
    parts.sort_by(|a, b| b.1.total_cmp(&a.1));
    let full = cache >= FULL && (preemptions > 0.0 || parts[0].0 == LoadVerdict::Queue);
    let verdict = if full { LoadVerdict::Cache } else { parts[0].0 };
    let ratio = parts[0].1 / parts[1].1.max(1e-9);
    let (sure, because) = match () {
        () if told_by.starts_with("the client") => (Confidence::Low, "the server reports no times".to_owned()),
        () if full => (Confidence::High, "the cache was full while requests waited".to_owned()),
        () if ratio >= 2.0 => (Confidence::High, format!("{ratio:.1} times the next")),
        () if ratio >= 1.25 => (Confidence::Medium, format!("{ratio:.1} times the next")),
        () => (Confidence::Low, format!("{ratio:.1} times the next")),
    };
    let (experiment, shows) = match verdict {
        LoadVerdict::Queue => (
            "serve more concurrent sequences (--sequences), use more GPUs, or reduce the load",
            "if tokens per second rise, steps had free capacity; if not, the device is the bottleneck",
        ),
        LoadVerdict::Prefill => (
            "larger prompt chunks (--chunk), prompts that share prefixes, or disaggregated prefill",
            "if TTFT drops and TPOT does not rise, prompt chunks were too small",
        ),
        LoadVerdict::Decode => (
            "fewer bits for weights and cache (--format, --cache-dtype), speculative decoding (--speculate), or more tensor-parallel ranks",
            "if the time per token drops with the bytes of a step, decoding is memory-bound",
        ),
        LoadVerdict::Cache => (
            "a larger cache (--cache-tokens), one of int8 (--cache-dtype int8), or fewer sequences (--sequences)",
            "if preemptions stop, no work is done twice",
        ),
    };
    Ok(LoadDiagnosis { verdict, sure, because, queue, prefill, decode, evidence, experiment, shows })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn report(server: &Value) -> Value {
        json!({ "report": {
            "ttft_seconds": { "mean": 1.0, "min": 0.2 }, "e2e_seconds": { "mean": 3.0 },
            "itl_seconds": { "p50": 0.02, "p99": 0.2 }, "answered_share_when_steady": 0.5, "server": server,
        } })
    }

    fn server(queue: f64, prefill: f64, decode: f64, [preemptions, cache]: [f64; 2]) -> Value {
        json!({ "queue_seconds": queue, "prefill_seconds": prefill, "decode_seconds": decode, "preemptions": preemptions,
            "most_of_cache": cache, "most_waiting": 3.0 })
    }

    #[test]
    fn the_largest_share_names_the_verdict() {
        for (of, verdict, sure) in [
            (server(8.0, 1.0, 1.0, [0.0, 0.4]), LoadVerdict::Queue, Confidence::High),
            (server(1.0, 5.0, 4.0, [0.0, 0.4]), LoadVerdict::Prefill, Confidence::Medium),
            (server(1.0, 1.0, 8.0, [0.0, 1.0]), LoadVerdict::Decode, Confidence::High),
            (server(8.0, 1.0, 1.0, [0.0, 0.97]), LoadVerdict::Cache, Confidence::High),
            (server(1.0, 1.0, 8.0, [9.0, 0.99]), LoadVerdict::Cache, Confidence::High),
            (Value::Null, LoadVerdict::Decode, Confidence::Low),
        ] {
            let found = diagnose_load(&report(&of)).unwrap();
            assert_eq!((found.verdict, found.sure), (verdict, sure), "{found:?}");
            assert!((found.queue + found.prefill + found.decode - 1.0).abs() < 1e-9);
        }
    }

    #[test]
    fn of_a_sweep_the_lowest_rate_that_was_too_much_is_judged() {
        let step =
            |rate: f64, kept: bool, of: Value| json!({ "rate": rate, "kept": kept, "report": report(&of)["report"] });
        let steps = [
            step(1.0, true, server(0.0, 0.0, 1.0, [0.0; 2])),
            step(4.0, false, server(9.0, 1.0, 1.0, [0.0; 2])),
            step(2.0, false, server(1.0, 9.0, 1.0, [0.0; 2])),
        ];
        let found = diagnose_load(&json!({ "sweep": { "steps": steps } })).unwrap();
        assert_eq!(found.verdict, LoadVerdict::Prefill);
        assert!(diagnose_load(&json!({})).unwrap_err().to_string().contains("bench serve --json"));
    }
}

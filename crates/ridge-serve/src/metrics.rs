//! Counters and histograms in Prometheus' text format, with vLLM's names under the prefix `ridge:`.
//!
//! The text format is written by hand: a dozen counters and fixed-bucket histograms need fewer lines than setting up a
//! metrics library, and an observation is two atomic additions on the engine's thread.

use std::fmt::Write as _;
use std::sync::atomic::Ordering::Relaxed;

use crate::sync::AtomicU64;

/// A count of observations in buckets.
pub(crate) struct Histogram {
    /// Upper bounds, ascending.
    bounds: &'static [f64],
    /// One more than bounds: above all of them.
    counts: Vec<AtomicU64>,
    /// An f64.
    sum: AtomicU64,
}

impl Histogram {
    fn new(bounds: &'static [f64]) -> Self {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Self { bounds, counts, sum: AtomicU64::new(0) }
    }

    pub(crate) fn observe(&self, value: f64) {
        let bucket = self.bounds.partition_point(|bound| *bound < value);
        self.counts[bucket].fetch_add(1, Relaxed);
        let add = |sum: u64| Some((f64::from_bits(sum) + value).to_bits());
        // Never fails: the closure always gives a value.
        let _ = self.sum.fetch_update(Relaxed, Relaxed, add);
    }

    fn write(&self, text: &mut String, name: &str, labels: &str) {
        let mut total = 0;
        for (bound, count) in self.bounds.iter().map(f64::to_string).chain(["+Inf".to_owned()]).zip(&self.counts) {
            total += count.load(Relaxed);
            let _ = writeln!(text, "{name}_bucket{{{labels},le=\"{bound}\"}} {total}");
        }
        let _ = writeln!(text, "{name}_sum{{{labels}}} {}", f64::from_bits(self.sum.load(Relaxed)));
        let _ = writeln!(text, "{name}_count{{{labels}}} {total}");
    }
}

/// A value that only grows.
#[derive(Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// Values of the label `finished_reason`.
pub(crate) const REASONS: [&str; 4] = ["stop", "length", "abort", "error"];

/// The server's metrics. Those of the engine are passed as gauges.
pub(crate) struct Metrics {
    pub(crate) time_to_first_token: Histogram,
    pub(crate) inter_token: Histogram,
    pub(crate) queue: Histogram,
    pub(crate) end_to_end: Histogram,
    pub(crate) inference: Histogram,
    pub(crate) prefill: Histogram,
    pub(crate) decode: Histogram,
    /// Mean time per output token of a request.
    pub(crate) time_per_token: Histogram,
    pub(crate) request_prompt_tokens: Histogram,
    pub(crate) request_generation_tokens: Histogram,
    pub(crate) request_longest_answer: Histogram,
    pub(crate) request_answers: Histogram,
    pub(crate) request_max_tokens: Histogram,
    pub(crate) step: Histogram,
    pub(crate) step_tokens: Histogram,
    /// The floor of a step divided by its time.
    pub(crate) step_roofline: Histogram,
    /// Steps that took less than their floor, whose machine's rates were measured too low.
    pub(crate) step_floor_exceeded: Counter,
    pub(crate) prompt_tokens: Counter,
    pub(crate) generation_tokens: Counter,
    finished: [Counter; REASONS.len()],
    /// Responses by the first digit of their status.
    responses: [Counter; 5],
}

const SECONDS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
    120.0, 300.0,
];
const TOKENS: &[f64] = &[
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 20000.0, 50000.0, 100_000.0,
];
const ANSWERS: &[f64] = &[1.0, 2.0, 5.0, 10.0, 20.0];
const FRACTIONS: &[f64] = &[0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0];

impl Default for Metrics {
    fn default() -> Self {
        let seconds = || Histogram::new(SECONDS);
        let tokens = || Histogram::new(TOKENS);
        Self {
            time_to_first_token: seconds(),
            inter_token: seconds(),
            queue: seconds(),
            end_to_end: seconds(),
            inference: seconds(),
            prefill: seconds(),
            decode: seconds(),
            time_per_token: seconds(),
            request_prompt_tokens: tokens(),
            request_generation_tokens: tokens(),
            request_longest_answer: tokens(),
            request_answers: Histogram::new(ANSWERS),
            request_max_tokens: tokens(),
            step: seconds(),
            step_tokens: tokens(),
            step_roofline: Histogram::new(FRACTIONS),
            step_floor_exceeded: Counter::default(),
            prompt_tokens: Counter::default(),
            generation_tokens: Counter::default(),
            finished: Default::default(),
            responses: Default::default(),
        }
    }
}

/// A current value of the engine.
pub(crate) struct Gauge {
    pub(crate) name: &'static str,
    pub(crate) help: &'static str,
    /// Whether it is a counter.
    pub(crate) counter: bool,
    pub(crate) value: f64,
}

impl Metrics {
    /// A sequence ended for `reason`, one of [`REASONS`].
    pub(crate) fn finished(&self, reason: &str) {
        if let Some(i) = REASONS.iter().position(|r| *r == reason) {
            self.finished[i].add(1);
        }
    }

    pub(crate) fn responded(&self, status: u16) {
        if let Some(counter) = self.responses.get(usize::from(status / 100).wrapping_sub(1)) {
            counter.add(1);
        }
    }

    /// All of it, with the engine's `gauges`.
    pub(crate) fn text(&self, model: &str, gauges: &[Gauge]) -> String {
        let labels = format!("model_name=\"{}\"", escaped(model));
        let mut text = String::with_capacity(16 << 10);
        let head = |text: &mut String, name: &str, kind: &str, help: &str| {
            let _ = write!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
        };
        for Gauge { name, help, counter, value } in gauges {
            head(&mut text, name, if *counter { "counter" } else { "gauge" }, help);
            let _ = writeln!(text, "{name}{{{labels}}} {value}");
        }
        for (name, help, counter) in [
            ("ridge:prompt_tokens_total", "Prompt tokens of started requests.", &self.prompt_tokens),
            ("ridge:generation_tokens_total", "Generated tokens.", &self.generation_tokens),
            (
                "ridge:step_floor_exceeded_total",
                "Steps faster than their roofline floor: the machine's rates were measured too low.",
                &self.step_floor_exceeded,
            ),
        ] {
            head(&mut text, name, "counter", help);
            let _ = writeln!(text, "{name}{{{labels}}} {}", counter.get());
        }
        let name = "ridge:request_success_total";
        head(&mut text, name, "counter", "Finished sequences, by reason.");
        for (reason, counter) in REASONS.iter().zip(&self.finished) {
            let _ = writeln!(text, "{name}{{{labels},finished_reason=\"{reason}\"}} {}", counter.get());
        }
        let name = "ridge:http_responses_total";
        head(&mut text, name, "counter", "HTTP responses, by status class.");
        for (class, counter) in (1..).zip(&self.responses) {
            let _ = writeln!(text, "{name}{{{labels},status=\"{class}xx\"}} {}", counter.get());
        }
        for (name, help, histogram) in [
            ("ridge:time_to_first_token_seconds", "Time to first token.", &self.time_to_first_token),
            ("ridge:inter_token_latency_seconds", "Time between two tokens of a sequence.", &self.inter_token),
            ("ridge:request_queue_time_seconds", "Time in the queue, until the first step.", &self.queue),
            ("ridge:e2e_request_latency_seconds", "End-to-end latency of a request.", &self.end_to_end),
            ("ridge:request_inference_time_seconds", "Time from the first step to the last token.", &self.inference),
            (
                "ridge:request_prefill_time_seconds",
                "Prefill time, from the first step to the first token.",
                &self.prefill,
            ),
            ("ridge:request_decode_time_seconds", "Decode time, from the first token to the last.", &self.decode),
            (
                "ridge:request_time_per_output_token_seconds",
                "Mean time per output token of a request.",
                &self.time_per_token,
            ),
            ("ridge:request_prompt_tokens", "Prompt tokens per request.", &self.request_prompt_tokens),
            ("ridge:request_generation_tokens", "Generated tokens per sequence.", &self.request_generation_tokens),
            (
                "ridge:request_max_num_generation_tokens",
                "Generated tokens of a request's longest sequence.",
                &self.request_longest_answer,
            ),
            ("ridge:request_params_n", "Parameter n of requests.", &self.request_answers),
            ("ridge:request_params_max_tokens", "Parameter max_tokens of requests.", &self.request_max_tokens),
            ("ridge:step_time_seconds", "Time of an engine step.", &self.step),
            ("ridge:iteration_tokens_total", "Tokens per engine step.", &self.step_tokens),
            ("ridge:step_roofline_fraction", "Roofline floor of a step divided by its time.", &self.step_roofline),
        ] {
            head(&mut text, name, "histogram", help);
            histogram.write(&mut text, name, &labels);
        }
        text
    }
}

/// A value of a label.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_cumulative_and_hold_their_bound() {
        let histogram = Histogram::new(&[1.0, 2.0]);
        for value in [0.5, 1.0, 1.5, 9.0] {
            histogram.observe(value);
        }
        let mut text = String::new();
        histogram.write(&mut text, "h", "m=\"x\"");
        let expected = "h_bucket{m=\"x\",le=\"1\"} 2\nh_bucket{m=\"x\",le=\"2\"} 3\nh_bucket{m=\"x\",le=\"+Inf\"} 4\n\
                        h_sum{m=\"x\"} 12\nh_count{m=\"x\"} 4\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn labels_are_escaped() {
        let text = Metrics::default().text("a\"b\\c", &[]);
        assert!(text.contains(r#"ridge:prompt_tokens_total{model_name="a\"b\\c"} 0"#), "{text}");
    }
}

/// Two threads that observe at once, in all interleavings.
#[cfg(all(test, ridge_loom))]
mod loom_tests {
    use super::*;

    #[test]
    fn loom_no_observation_is_lost() {
        loom::model(|| {
            let histogram = loom::sync::Arc::new(Histogram::new(&[1.0]));
            let other = loom::sync::Arc::clone(&histogram);
            let thread = loom::thread::spawn(move || other.observe(0.5));
            histogram.observe(2.0);
            thread.join().unwrap();
            let mut text = String::new();
            histogram.write(&mut text, "h", "m=\"x\"");
            assert!(
                text.ends_with("h_bucket{m=\"x\",le=\"+Inf\"} 2\nh_sum{m=\"x\"} 2.5\nh_count{m=\"x\"} 2\n"),
                "{text}"
            );
        });
    }
}

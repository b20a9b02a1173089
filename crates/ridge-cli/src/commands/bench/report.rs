//! Results as text and as JSON.

use ridge::DeviceRates;
use ridge_graph::Role;
use ridge_hw::units::{Bytes, Seconds};
use ridge_models::{Model, ModelFiles};
use serde_json::{Value, json};

use super::args::BenchSettings;
use super::ops;
use super::speculation::SpeculationResult;
use super::test::BenchTest;
use super::work::{StepWork, median};
use crate::output::{columns, count, grouped};

/// The relative standard deviation above which runs are reported as noisy.
const NOISY: f64 = 0.1;

/// A floor so many times the fastest run's time is invalid: a rate of the machine was measured too low.
const EXCEEDED: f64 = 1.05;

/// The warning about such a floor.
const TOO_LOW: &str = "a floor is above the measured time, so the machine's rates were measured too low (it was busy \
                       meanwhile, or its clock changed): measure again on an idle machine\n";

/// The result of a test.
pub(super) struct BenchResult {
    pub(super) test: BenchTest,
    /// Sequences at a time.
    pub(super) batch: usize,
    /// Seconds of each run.
    pub(super) times: Vec<f64>,
    pub(super) total: StepWork,
    /// The time of each op of the last step, if requested.
    pub(super) ops: Vec<ops::OpTime>,
    /// What was drafted, where the model's module drafts.
    pub(super) speculation: Option<SpeculationResult>,
}

impl BenchResult {
    pub(super) fn median(&self) -> f64 {
        median(&self.times)
    }

    /// Is the floor above what the fastest run took?
    fn exceeds_floor(&self) -> bool {
        self.total.floor > EXCEEDED * self.times.iter().copied().fold(f64::INFINITY, f64::min)
    }

    /// Do the runs differ so much that the machine must have been busy?
    pub(super) fn noisy(&self) -> bool {
        let (mean, spread) = self.rate();
        spread > NOISY * mean
    }

    /// Mean and standard deviation of the tokens a second, all sequences together.
    fn rate(&self) -> (f64, f64) {
        let rates: Vec<f64> = self.times.iter().map(|t| (self.test.tokens() * self.batch) as f64 / t).collect();
        let mean = rates.iter().sum::<f64>() / rates.len() as f64;
        let squares: f64 = rates.iter().map(|r| (r - mean).powi(2)).sum();
        (mean, (squares / (rates.len().max(2) - 1) as f64).sqrt())
    }
}

/// What is where.
#[derive(Clone, Copy)]
pub(super) struct PlacedBytes {
    /// Weights in memory of the host.
    pub(super) on_host: Bytes,
    /// All that is allocated on the device.
    pub(super) on_gpu: Bytes,
}

/// All results, with the settings that they depend on.
pub(super) struct BenchReport<'a> {
    pub(super) settings: &'a BenchSettings,
    pub(super) files: &'a ModelFiles,
    pub(super) model: &'a Model,
    /// The device, and threads of the CPU if it is one.
    pub(super) on: (&'a str, Option<usize>),
    pub(super) placed: PlacedBytes,
    pub(super) rates: &'a DeviceRates,
    pub(super) results: &'a [BenchResult],
    /// Where there are several batches.
    pub(super) limit: Option<GenerationLimit>,
}

/// The smallest batch whose decode step has a compute-bound floor; `None` if there is none.
#[derive(Clone, Copy)]
pub(super) struct GenerationLimit(pub(super) Option<usize>);

impl BenchSettings {
    /// What a test is called; with its batch where there are several.
    pub(super) fn name(&self, test: BenchTest, batch: usize) -> String {
        let of = if self.batch.len() > 1 { format!(" x {batch}") } else { String::new() };
        test.name(self.context) + &of
    }
}

impl BenchReport<'_> {
    fn noisy(&self) -> bool {
        self.results.iter().any(BenchResult::noisy)
    }

    fn rates_too_low(&self) -> bool {
        self.results.iter().any(BenchResult::exceeds_floor)
    }

    pub(super) fn text(&self) -> String {
        let batches = &self.settings.batch;
        let many = batches.len() > 1;
        let mut text = format!(
            "{}: {}, {} parameters, {} of weights; {}, {}\n",
            self.files,
            self.model.family,
            grouped(self.model.parameter_count()),
            Bytes(self.model.weight_bytes()),
            self.on.1.map_or_else(|| self.on.0.to_owned(), |threads| count(threads, "thread")),
            match batches[..] {
                [batch] => count(batch, "sequence"),
                _ => format!("{} sequences", batches.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")),
            },
        );
        text += &format!("memory      {}: {}\n", self.rates.memory, self.rates.memory.source);
        text += &format!("arithmetic  {}: {}\n", self.rates.arithmetic, self.rates.arithmetic.source);
        if let Some(link) = &self.rates.host_link {
            text += &format!("host link   {link}: {}\n", link.source);
            let PlacedBytes { on_host, on_gpu } = self.placed;
            text += &format!("placement   {on_host} of the weights in host memory; {on_gpu} allocated on the GPU\n");
        }
        if self.on.1.is_some() && self.model.graph.args(Role::Weight).any(|weight| weight.ty.format.is_some()) {
            let (prompts, answers) =
                self.settings.model.numbers.activations.for_prompts_and_answers(self.model.activations);
            let (prompts, answers) = (prompts.name(), answers.name());
            text +=
                &format!("activations {prompts} in prompts, {answers} in generation, with block-quantised weights\n");
        }
        text.push('\n');
        let head = ["test", "tok/s", "time a token", "floor", "of floor", "limit"];
        let first = many.then_some("first token").into_iter();
        let mut rows: Vec<Vec<String>> = vec![head.into_iter().chain(first).map(str::to_owned).collect()];
        for result in self.results {
            let (mean, spread) = result.rate();
            let tokens = (result.test.tokens() * result.batch) as f64;
            let mut row = vec![
                self.settings.name(result.test, result.batch),
                format!("{mean:.2} ± {spread:.2}"),
                Seconds(result.median() / tokens).to_string(),
                Seconds(result.total.floor / tokens).to_string(),
                format!(
                    "{:.0}%{}",
                    100.0 * result.total.floor / result.median(),
                    if result.exceeds_floor() { " (!)" } else { "" }
                ),
                result.total.bound(self.rates).to_string(),
            ];
            // A prompt ends with the first token.
            row.extend((many && !result.test.answers()).then(|| Seconds(result.median()).to_string()));
            rows.push(row);
        }
        text += &columns(&rows);
        text += &format!(
            "\ntok/s and time: measured over {}; floor: modelled, costs of the graph at the rates above\n",
            count(self.settings.repeat, "run")
        );
        text += &match self.limit {
            None => String::new(),
            Some(GenerationLimit(Some(batch))) => {
                format!("generation: the floor is compute-bound from {batch} sequences\n")
            }
            Some(GenerationLimit(None)) => {
                "generation: the floor is not compute-bound for any number of sequences\n".to_owned()
            }
        };
        for result in self.results {
            let name = self.settings.name(result.test, result.batch);
            text += &result.speculation.as_ref().map_or_else(String::new, |speculation| speculation.text(&name));
        }
        for result in self.results.iter().filter(|r| self.settings.ops && !r.ops.is_empty()) {
            text += &format!("\nlast step of {}\n", self.settings.name(result.test, result.batch));
            text += &ops::text(&result.ops);
        }
        if self.rates_too_low() {
            text += TOO_LOW;
        }
        if self.noisy() {
            text +=
                "the runs differ considerably: the machine is busy with other work, or its clock frequency varies\n";
        }
        text
    }

    pub(super) fn object(&self) -> Value {
        let batch = match self.settings.batch[..] {
            [batch] => json!(batch),
            _ => json!(self.settings.batch),
        };
        let result = |r: &BenchResult| {
            let (mean, spread) = r.rate();
            json!({
                "test": self.settings.name(r.test, r.batch),
                "batch": r.batch,
                "kind": if matches!(r.test, BenchTest::Prompt(_)) { "prompt" } else { "generate" },
                "tokens": r.test.tokens(),
                "ops": self.settings.ops.then(|| ops::object(&r.ops)),
                "measured": {
                    "seconds": r.times,
                    "median_seconds": r.median(),
                    "tokens_per_second": mean,
                    "tokens_per_second_stddev": spread,
                },
                "modelled": {
                    "flops": r.total.flops,
                    "bytes": r.total.bytes,
                    "host_bytes": r.total.host,
                    "floor_seconds": r.total.floor,
                    "floor_over_time": r.total.floor / r.median(),
                    "limit": r.total.bound(self.rates),
                },
                "speculation": r.speculation.as_ref().map(SpeculationResult::object),
            })
        };
        json!({
            "model": self.files.to_string(),
            "parameters": self.model.parameter_count(),
            "weight_bytes": self.model.weight_bytes(),
            "host_weight_bytes": self.placed.on_host,
            "device_bytes": self.placed.on_gpu,
            "machine": {
                "memory_read": self.rates.memory, "matmul": self.rates.arithmetic, "host_link": self.rates.host_link,
            },
            "results": self.results.iter().map(result).collect::<Vec<_>>(),
            "compute_bound_from_batch": self.limit.and_then(|limit| limit.0),
            "noisy": self.noisy(),
            "rates_too_low": self.rates_too_low(),
            "settings": {
                "random_weights": self.settings.random_weights,
                "context": self.settings.context,
                "batch": batch,
                "repeat": self.settings.repeat,
                "chunk": self.settings.chunk,
                "drafts": self.settings.drafts,
                "device": self.on.0,
                "threads": self.on.1,
                "format": self.settings.model.numbers.format.as_ref().map(|f| f.name()),
                "dtype": self.model.activations.name(),
                "cache_dtype": self.model.cache.name(),
                "activations": self.settings.model.numbers.activations.name(),
                "int8_attention": self.settings.place.int8_attention(),
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_floor_above_the_fastest_run_is_a_measurement_problem() {
        let result = |floor: f64, times: &[f64]| BenchResult {
            test: BenchTest::Prompt(1),
            batch: 1,
            times: times.to_vec(),
            total: StepWork { floor, ..StepWork::default() },
            ops: Vec::new(),
            speculation: None,
        };
        assert!(!result(1.04, &[1.0, 2.0]).exceeds_floor());
        assert!(result(1.06, &[2.0, 1.0]).exceeds_floor());
        assert!(result(1.0, &[1.0, 2.0]).noisy() && !result(1.0, &[1.0, 1.01]).noisy());
    }
}

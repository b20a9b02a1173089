//! Scoring of texts by a model, and the parts that all results have in common.

use std::path::Path;
use std::time::Instant;

use ridge::{CacheSize, LoadedModel, Placement, RunSettings, StepExtents};
use ridge_engine::scoring::{Question, Scorer, ScorerOptions};
use ridge_models::{Model, ModelConfig, ModelFiles};
use ridge_runtime::Backend;
use ridge_text::Tokenizer;
use serde_json::json;

use super::args::EvalSettings;
use crate::error::{Error, Result};
use crate::output::{LoadProgress, Progress, print, print_json};

/// An opened model; its weights are loaded once the questions are known.
pub(super) struct EvalModel {
    pub(super) files: ModelFiles,
    pub(super) config: ModelConfig,
    pub(super) tokenizer: Tokenizer,
    /// The tokens before a text.
    pub(super) begin: Vec<u32>,
}

/// Scores, with the settings that produced them.
pub(super) struct ScoredQuestions {
    pub(super) scores: Vec<Vec<Vec<f32>>>,
    seconds: f64,
    work: usize,
    threads: usize,
}

/// Maximum number of concurrent questions: enough to fill a step with short ones.
const MAX_QUESTIONS: usize = 64;

impl EvalModel {
    /// Loads the weights and scores `questions`, at least one.
    pub(super) fn score(&self, settings: &EvalSettings, questions: &[Question<'_>]) -> Result<ScoredQuestions> {
        let context = questions.iter().map(Question::positions).max().unwrap_or(1).max(1);
        let work: usize = questions.iter().map(Question::work).sum();
        let step = settings.chunk.min(work).max(1);
        let options = ScorerOptions { context, step, questions: MAX_QUESTIONS.min(questions.len()).max(1) };
        let running = RunSettings {
            placement: Placement {
                threads: settings.threads,
                tensor_parallel: settings.parallel.here(),
                ..Placement::default()
            },
            context,
            prompt: context,
            chunk: step,
            random_weights: settings.random_weights,
            drafts: 0,
        };
        let workspace = |model: &Model, backend: &dyn Backend| {
            let largest = StepExtents { tokens: step, sequences: options.questions.min(step), context, candidates: 0 };
            ridge::scorer_bytes(model, backend, largest)
        };
        let LoadedModel { session, model, threads, .. } = ridge::load_model(
            &self.files,
            &self.config,
            &settings.model.numbers,
            &running,
            CacheSize::Scorer(options),
            workspace,
            &mut LoadProgress::new(!settings.quiet && !settings.json),
        )?;
        let mut scorer = Scorer::new(session, &model, options)?;
        let mut progress = (!settings.quiet).then(|| Progress::of_tokens("scoring", work as u64));
        let mut done = 0;
        let started = Instant::now();
        let scores = scorer.score(questions, |tokens| {
            done += tokens as u64;
            if let Some(progress) = &mut progress {
                progress.at(done);
            }
        })?;
        Ok(ScoredQuestions { scores, seconds: started.elapsed().as_secs_f64(), work, threads: threads.unwrap_or(1) })
    }
}

/// Prints a result with the parts that all results have in common.
pub(super) fn show(
    settings: &EvalSettings,
    opened: &EvalModel,
    file: &Path,
    scored: &ScoredQuestions,
    (text, mut object): (String, serde_json::Value),
) -> Result<()> {
    if !settings.json {
        return print(&text);
    }
    object["model"] = json!(opened.files.to_string());
    object["file"] = json!(file.display().to_string());
    object["begin_tokens"] = json!(opened.begin);
    object["measured"] = json!({
        "seconds": scored.seconds,
        "computed_tokens": scored.work,
        "computed_tokens_per_second": scored.work as f64 / scored.seconds,
    });
    object["settings"]["chunk"] = json!(settings.chunk);
    object["settings"]["threads"] = json!(scored.threads);
    object["settings"]["random_weights"] = json!(settings.random_weights);
    object["settings"]["format"] = json!(settings.model.numbers.format.as_ref().map(|f| f.name()));
    let options = settings.model.numbers.options(opened.config.torch_dtype);
    object["settings"]["dtype"] = json!(options.activations.name());
    object["settings"]["cache_dtype"] = json!(options.cache.name());
    object["settings"]["activations"] = json!(settings.model.numbers.activations.name());
    print_json(&object)
}

/// A file, or a line of one, that cannot be used.
pub(super) fn unusable(place: impl ToString, problem: impl ToString) -> Error {
    Error::Data { place: place.to_string(), problem: problem.to_string() }
}

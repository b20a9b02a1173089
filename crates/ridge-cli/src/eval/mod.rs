//! `ridge eval`: how well a model predicts a text, or chooses among answers.

mod choices;
mod perplexity;

use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::{ArgGroup, Args};
use ridge_engine::evaluate::beginning;
use ridge_engine::scoring::{Question, Scorer, ScorerOptions};
use ridge_models::{Model, ModelConfig, ModelFiles, with_scores};
use ridge_runtime::Backend;
use ridge_text::Tokenizer;
use serde_json::json;

use crate::args::{DeviceChoice, MOST, MOST_THREADS, NumberArgs, whole};
use crate::error::{Error, Result};
use crate::model::{self, Prepared, Running};
use crate::output::{Progress, print, print_json};
use crate::settings::{ModelSettings, refused};

/// Measure how well a model predicts a text, or chooses among answers
///
/// Both come from the probabilities that the model gives to tokens; nothing is generated.
#[derive(Debug, Args)]
#[command(
    group = ArgGroup::new("what").required(true),
    after_help = "\
Examples:
  ridge eval --perplexity book.txt
  ridge eval --perplexity wiki.test.raw --model DIR --context 1024 --stride 512
  ridge eval --perplexity book.txt --rolling --context 2047 --json
  ridge eval --choices arc.jsonl --model DIR --limit 100

Perplexity: the text, with the tokens that the tokenizer puts before it, is read in windows of --context tokens, one \
every --stride. Each window's new tokens count; its first token is never predicted, so with a stride as long as the \
window the first token of each window is left out. The defaults are the procedure of Hugging Face's guide to the \
perplexity of fixed-length models; --rolling is the loglikelihood_rolling of lm-evaluation-harness, whose windows read \
--context tokens each. Bits per byte are those of all counted tokens over the bytes of the file.

Choices: a file of JSON lines, each with a text (context, question, prompt, query or ctx), answers (choices or endings: \
texts, or an object with lists text and label) and which is right (answer, gold, label or answerKey: its number from 0, \
or its letter). Tokens are made and scored as in lm-evaluation-harness, with a space between text and answer: acc takes \
the likeliest answer, acc_norm the likeliest by character, acc_bytes by byte of UTF-8. Texts too long for --context lose \
their beginning."
)]
pub(crate) struct EvalArgs {
    /// Measure the perplexity of the text in this file
    #[arg(long, value_name = "FILE", group = "what")]
    perplexity: Option<PathBuf>,

    /// Let the model choose among the answers to the questions in this file of JSON lines
    #[arg(long, value_name = "FILE", group = "what")]
    choices: Option<PathBuf>,

    /// Folder of a model in the layout of Hugging Face, or a GGUF file [default: the model that is compiled in]
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,

    /// Take random numbers for weights
    #[arg(long)]
    random_weights: bool,

    /// Tokens that the model sees at once [default: what it was made for, and for perplexity 2048 at most]
    #[arg(long, value_name = "N", value_parser = whole::<usize, 1, MOST>, allow_negative_numbers = true)]
    context: Option<usize>,

    /// Tokens from a window's beginning to the next one's [default: half of --context]
    #[arg(
        long, value_name = "N", value_parser = whole::<usize, 1, MOST>, allow_negative_numbers = true,
        requires = "perplexity", conflicts_with = "rolling"
    )]
    stride: Option<usize>,

    /// Windows as lm-evaluation-harness makes them
    #[arg(long, requires = "perplexity")]
    rolling: bool,

    /// Stop after this many questions
    #[arg(
        long, value_name = "N", value_parser = whole::<usize, 1, MOST>, allow_negative_numbers = true,
        requires = "choices"
    )]
    limit: Option<usize>,

    /// What stands between a question's text and an answer
    #[arg(long, value_name = "TEXT", default_value = " ", requires = "choices", hide_default_value = true)]
    delimiter: String,

    /// Put no begin token before texts
    #[arg(long)]
    no_special: bool,

    #[command(flatten)]
    numbers: NumberArgs,

    /// Tokens that one step processes at most, of all texts together
    #[arg(
        long, value_name = "N", value_parser = whole::<usize, 1, MOST>,
        allow_negative_numbers = true, default_value_t = 512, help_heading = "Running"
    )]
    chunk: usize,

    /// Threads that compute [default: the cores that this process may use]
    #[arg(
        short, long, value_name = "N", value_parser = whole::<usize, 1, MOST_THREADS>,
        allow_negative_numbers = true, help_heading = "Running"
    )]
    threads: Option<usize>,

    /// Print one JSON object: results, settings, every question's scores
    #[arg(long, help_heading = "Output")]
    json: bool,

    /// Print no progress and no notes
    #[arg(short, long, help_heading = "Output")]
    quiet: bool,
}

pub(crate) struct EvalSettings {
    what: What,
    model: ModelSettings,
    random_weights: bool,
    context: Option<usize>,
    no_special: bool,
    chunk: usize,
    threads: Option<usize>,
    json: bool,
    quiet: bool,
}

enum What {
    Perplexity { file: PathBuf, windows: Windows },
    Choices { file: PathBuf, limit: Option<usize>, delimiter: String },
}

/// How a text is cut.
#[derive(Clone, Copy)]
enum Windows {
    /// Half of the context, if `None`.
    Sliding(Option<usize>),
    Rolling,
}

impl EvalArgs {
    pub(crate) fn resolve(self) -> Result<EvalSettings> {
        let what = match (self.perplexity, self.choices) {
            (Some(file), _) if self.rolling => What::Perplexity { file, windows: Windows::Rolling },
            (Some(file), _) => What::Perplexity { file, windows: Windows::Sliding(self.stride) },
            (None, Some(file)) => What::Choices { file, limit: self.limit, delimiter: self.delimiter },
            (None, None) => return Err(refused("--perplexity", "", "or --choices must be given")),
        };
        Ok(EvalSettings {
            what,
            model: ModelSettings::new(self.model, &self.numbers)?,
            random_weights: self.random_weights,
            context: self.context,
            no_special: self.no_special,
            chunk: self.chunk,
            threads: self.threads,
            json: self.json,
            quiet: self.quiet,
        })
    }
}

pub(crate) fn run(settings: &EvalSettings) -> Result<()> {
    let files = ModelFiles::open(settings.model.path.as_deref())?;
    let config = files.config()?;
    if let Some(context) = settings.context.filter(|c| *c > config.max_context()) {
        let why = format!("the model was made for at most {} tokens", config.max_context());
        return Err(refused("--context", context, &why));
    }
    let tokenizer = files.tokenizer()?;
    let begin = if settings.no_special { Vec::new() } else { beginning(&tokenizer)? };
    let opened = Opened { files, config, tokenizer, begin };
    match &settings.what {
        What::Perplexity { file, windows } => perplexity::run(settings, &opened, file, *windows),
        What::Choices { file, limit, delimiter } => choices::run(settings, &opened, file, *limit, delimiter),
    }
}

/// A model of which all but the weights is read.
struct Opened {
    files: ModelFiles,
    config: ModelConfig,
    tokenizer: Tokenizer,
    /// The tokens that stand before a text.
    begin: Vec<u32>,
}

/// Scores, and how they were made.
struct Scored {
    scores: Vec<Vec<Vec<f32>>>,
    seconds: f64,
    work: usize,
    threads: usize,
}

/// Questions at a time at most: enough to fill a step with short ones.
const QUESTIONS: usize = 64;

impl Opened {
    /// Loads the weights and scores `questions`, at least one.
    fn score(&self, settings: &EvalSettings, questions: &[Question<'_>]) -> Result<Scored> {
        let context = questions.iter().map(Question::positions).max().unwrap_or(1).max(1);
        let work: usize = questions.iter().map(Question::work).sum();
        let step = settings.chunk.min(work).max(1);
        let options = ScorerOptions { context, step, questions: QUESTIONS.min(questions.len()).max(1) };
        let running = Running {
            device: DeviceChoice::Cpu,
            context,
            prompt: context,
            chunk: step,
            threads: settings.threads,
            random_weights: settings.random_weights,
            notes: !settings.quiet && !settings.json,
        };
        let block_size = settings.model.options(self.config.torch_dtype).block_size;
        let workspace = |model: &Model, backend: &dyn Backend| {
            let graph = with_scores(&model.graph)?;
            model::graph_bytes(&graph, backend, &["scores"], (step, options.questions.min(step)), (context, model))
        };
        let cached = options.blocks(block_size) * block_size;
        let Prepared { session, model, threads, .. } =
            model::prepare(&self.files, &self.config, &settings.model, &running, cached, workspace)?;
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
        Ok(Scored { scores, seconds: started.elapsed().as_secs_f64(), work, threads: threads.unwrap_or(1) })
    }
}

/// Prints a result with what all results have.
fn show(
    settings: &EvalSettings,
    opened: &Opened,
    file: &Path,
    scored: &Scored,
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
    object["settings"]["format"] = json!(settings.model.format.as_ref().map(|f| f.name()));
    let options = settings.model.options(opened.config.torch_dtype);
    object["settings"]["dtype"] = json!(options.activations.name());
    object["settings"]["cache_dtype"] = json!(options.cache.name());
    object["settings"]["activations"] = json!(settings.model.activations.name());
    print_json(&object)
}

fn unusable(place: impl ToString, problem: impl ToString) -> Error {
    Error::Data { place: place.to_string(), problem: problem.to_string() }
}

//! Arguments of `ridge eval`, and the settings that they resolve to.

use std::path::PathBuf;

use clap::{ArgGroup, Args};

use crate::args::{MAX_COUNT, MAX_THREADS, ModelSettings, NumberArgs, ParallelArgs, whole};
use crate::error::{Result, refused};

/// Evaluate a model: perplexity or multiple choice
///
/// Both are computed from token probabilities; no text is generated.
#[derive(Debug, Args)]
#[command(
    group = ArgGroup::new("what").required(true),
    after_help = "\
Examples:
  ridge eval --perplexity book.txt
  ridge eval --perplexity wiki.test.raw --model DIR --context 1024 --stride 512
  ridge eval --perplexity book.txt --rolling --context 2047 --json
  ridge eval --choices arc.jsonl --model DIR --limit 100

Perplexity: the text, including special tokens that the tokenizer adds, is evaluated in windows of --context tokens at \
distance --stride. Each window scores only the tokens after the previous window. Its first token cannot be predicted, so \
if the stride equals the window, the first token of each window is skipped. The defaults follow Hugging Face's guide to \
the perplexity of fixed-length models; --rolling is loglikelihood_rolling of lm-evaluation-harness, with windows of \
--context tokens. Bits per byte relate the scored tokens to the bytes of the file.

Choices: a JSON Lines file. Each line has a text (context, question, prompt, query or ctx), answers (choices or endings: a \
list of texts, or an object with lists text and label) and the correct answer (answer, gold, label or answerKey: an index \
from 0, or a letter). Tokenisation and scoring follow lm-evaluation-harness, with a space between text and answer: acc \
selects the most likely answer, acc_norm the most likely per character, acc_bytes per UTF-8 byte. Texts that exceed \
--context are truncated at the beginning."
)]
pub(crate) struct EvalArgs {
    /// Compute the perplexity of the text in this file
    #[arg(long, value_name = "FILE", group = "what")]
    perplexity: Option<PathBuf>,

    /// Score the multiple-choice questions in this JSON Lines file
    #[arg(long, value_name = "FILE", group = "what")]
    choices: Option<PathBuf>,

    /// Model: a folder in the Hugging Face layout, a GGUF file, or the ORG/NAME of a model downloaded with `ridge pull`
    /// [default: the embedded model]
    #[arg(short, long, value_name = "MODEL")]
    model: Option<PathBuf>,

    /// Use random weights
    #[arg(long)]
    random_weights: bool,

    /// Context length in tokens [default: the model's maximum; for perplexity at most 2048]
    #[arg(long, value_name = "N", value_parser = whole::<usize, 1, MAX_COUNT>, allow_negative_numbers = true)]
    context: Option<usize>,

    /// Distance between the starts of consecutive windows, in tokens [default: half of --context]
    #[arg(
        long, value_name = "N", value_parser = whole::<usize, 1, MAX_COUNT>, allow_negative_numbers = true,
        requires = "perplexity", conflicts_with = "rolling"
    )]
    stride: Option<usize>,

    /// Use the rolling windows of lm-evaluation-harness
    #[arg(long, requires = "perplexity")]
    rolling: bool,

    /// Stop after this many questions
    #[arg(
        long, value_name = "N", value_parser = whole::<usize, 1, MAX_COUNT>, allow_negative_numbers = true,
        requires = "choices"
    )]
    limit: Option<usize>,

    /// Text between a question and an answer [default: a space]
    #[arg(long, value_name = "TEXT", default_value = " ", requires = "choices", hide_default_value = true)]
    delimiter: String,

    /// Do not add a begin token before texts
    #[arg(long)]
    no_special: bool,

    #[command(flatten)]
    numbers: NumberArgs,

    /// Maximum tokens that one step processes, over all texts
    #[arg(
        long, value_name = "N", value_parser = whole::<usize, 1, MAX_COUNT>,
        allow_negative_numbers = true, default_value_t = 512, help_heading = "Running"
    )]
    chunk: usize,

    /// Number of compute threads [default: the cores that this process may use]
    #[arg(
        short, long, value_name = "N", value_parser = whole::<usize, 1, MAX_THREADS>,
        allow_negative_numbers = true, help_heading = "Running"
    )]
    threads: Option<usize>,

    #[command(flatten)]
    parallel: ParallelArgs,

    /// Print one JSON object: results, settings, scores of every question
    #[arg(long, help_heading = "Output")]
    json: bool,

    /// Print no progress and no notes
    #[arg(short, long, help_heading = "Output")]
    quiet: bool,
}

/// The task, and how its result is shown.
pub(super) struct EvalSettings {
    pub(super) task: EvalTask,
    pub(super) model: ModelSettings,
    pub(super) random_weights: bool,
    pub(super) context: Option<usize>,
    pub(super) no_special: bool,
    pub(super) chunk: usize,
    pub(super) threads: Option<usize>,
    pub(super) parallel: ParallelArgs,
    pub(super) json: bool,
    pub(super) quiet: bool,
}

/// The evaluation to run.
pub(super) enum EvalTask {
    Perplexity { file: PathBuf, windows: WindowKind },
    Choices { file: PathBuf, limit: Option<usize>, delimiter: String },
}

/// How a text is divided into windows.
#[derive(Clone, Copy)]
pub(super) enum WindowKind {
    /// Half of the context, if `None`.
    Sliding(Option<usize>),
    Rolling,
}

impl EvalArgs {
    pub(super) fn resolve(self) -> Result<EvalSettings> {
        let task = match (self.perplexity, self.choices) {
            (Some(file), _) if self.rolling => EvalTask::Perplexity { file, windows: WindowKind::Rolling },
            (Some(file), _) => EvalTask::Perplexity { file, windows: WindowKind::Sliding(self.stride) },
            (None, Some(file)) => EvalTask::Choices { file, limit: self.limit, delimiter: self.delimiter },
            (None, None) => return Err(refused("--perplexity", "", "or --choices is required")),
        };
        Ok(EvalSettings {
            task,
            model: self.numbers.settings(self.model)?,
            random_weights: self.random_weights,
            context: self.context,
            no_special: self.no_special,
            chunk: self.chunk,
            threads: self.threads,
            parallel: self.parallel,
            json: self.json,
            quiet: self.quiet,
        })
    }
}

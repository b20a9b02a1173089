//! Arguments of `ridge chat`, and the settings that they resolve to.

use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};

use clap::Args;
use ridge_text::template::Data;

use crate::args::{
    MAX_COUNT, MAX_THREADS, ModelSettings, NumberArgs, ParallelArgs, SamplingArgs, SamplingSettings, whole,
};
use crate::error::{Result, refused};
use crate::input;

/// Chat with a model
///
/// Messages are rendered with the model's own chat template. Earlier turns stay in the KV cache, so each turn processes
/// only new tokens.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ridge chat Qwen/Qwen3-0.6B
  ridge chat --model DIR --system \"Answer in one sentence.\"
  ridge chat --model DIR --message \"What is a roofline?\" > answer.txt
  ridge chat --model DIR --load talk.json --json < question.txt

On a terminal, /help lists the chat commands; Ctrl-C interrupts a reply, Ctrl-D exits. On exit, an unsaved conversation \
is written to ~/.local/state/ridge/last_chat.json, unless --no-history is given. With --message, or if standard input is \
not a terminal, the command replies to the given turns and exits. When the context is full, the oldest turns are omitted, \
with a note.

Replies are streamed to standard output; everything else goes to standard error.
Exit codes: 0 done, 1 failed, 2 usage error, 130 interrupted.")]
pub(crate) struct ChatArgs {
    /// Model: a folder in the Hugging Face layout, a GGUF file, or the ORG/NAME of a model downloaded with `ridge pull`
    /// [default: the embedded model]
    #[arg(short, long, value_name = "MODEL")]
    model: Option<PathBuf>,

    /// System prompt; @FILE reads it from a file
    #[arg(short, long, value_name = "TEXT")]
    system: Option<String>,

    /// Reply to this message and exit; may be repeated for several turns; `-` reads standard input
    #[arg(short = 'p', long, value_name = "TEXT")]
    message: Vec<String>,

    /// Continue a conversation from a JSON list of messages, as written by /save
    #[arg(long, value_name = "FILE")]
    load: Option<PathBuf>,

    /// Maximum tokens per reply [default: the rest of the context]
    #[arg(
        short = 'n', long, value_name = "N", value_parser = whole::<usize, 1, MAX_COUNT>, allow_negative_numbers = true
    )]
    max_tokens: Option<usize>,

    /// Stop before this text; may be repeated
    #[arg(long, value_name = "STRING")]
    stop: Vec<String>,

    /// Use the model's chat template of this name
    #[arg(long, value_name = "NAME", help_heading = "Template", conflicts_with = "template_file")]
    template: Option<String>,

    /// Use the chat template in this file instead of the model's
    #[arg(long, value_name = "FILE", help_heading = "Template")]
    template_file: Option<PathBuf>,

    /// Set a template variable, such as enable_thinking=false; a value that is not JSON is a string
    #[arg(long, value_name = "NAME=VALUE", help_heading = "Template")]
    template_variable: Vec<String>,

    /// Tools that the model may call: a file with a JSON list of their schemas
    #[arg(long, value_name = "FILE", help_heading = "Template")]
    tools: Option<PathBuf>,

    #[command(flatten)]
    sampling: SamplingArgs,

    #[command(flatten)]
    numbers: NumberArgs,

    /// Use random weights
    #[arg(long, help_heading = "Running")]
    random_weights: bool,

    /// Context length in tokens, over all turns [default: 8192, or the model's maximum if that is less]
    #[arg(
        long, value_name = "N", value_parser = whole::<usize, 1, MAX_COUNT>,
        allow_negative_numbers = true, help_heading = "Running"
    )]
    context: Option<usize>,

    /// Maximum tokens of a prompt that one step processes
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

    /// Do not write the input history or the last conversation to disk
    #[arg(long, help_heading = "Running")]
    no_history: bool,

    /// Print only one JSON object, at the end: messages, the last finish reason, tokens
    #[arg(long, help_heading = "Output")]
    json: bool,

    /// Print each turn's tokens and timings
    #[arg(short, long, help_heading = "Output")]
    verbose: bool,

    /// Print only replies and errors
    #[arg(short, long, help_heading = "Output", conflicts_with = "verbose")]
    quiet: bool,
}

#[derive(Debug)]
pub(crate) struct ChatSettings {
    pub(crate) model: ModelSettings,
    pub(crate) random_weights: bool,
    pub(crate) system: Option<String>,
    /// The turns to reply to; an interactive conversation if `None`.
    pub(crate) turns: Option<Vec<String>>,
    pub(crate) load: Option<PathBuf>,
    pub(crate) max_tokens: Option<usize>,
    pub(crate) stops: Vec<String>,
    pub(crate) template: Option<String>,
    pub(crate) template_file: Option<PathBuf>,
    pub(crate) variables: Vec<(String, Data)>,
    pub(crate) tools: Option<Vec<Data>>,
    pub(crate) sampling: SamplingSettings,
    pub(crate) context: Option<usize>,
    pub(crate) chunk: usize,
    pub(crate) threads: Option<usize>,
    pub(crate) parallel: ParallelArgs,
    pub(crate) history: bool,
    pub(crate) json: bool,
    pub(crate) verbose: bool,
    pub(crate) notes: bool,
}

impl ChatArgs {
    /// Also reads the small files that are named, so that an error in one is reported before the model is loaded.
    pub(crate) fn resolve(self) -> Result<ChatSettings> {
        let sampling = self.sampling.resolve(false)?;
        if self.stop.iter().any(String::is_empty) {
            return Err(refused("--stop", "''", "must not be empty"));
        }
        if self.message.iter().filter(|m| *m == "-").count() > 1 {
            return Err(refused("--message", "-", "standard input can be read once"));
        }
        let message = |text: String| if text == "-" { input::stdin() } else { Ok(text) };
        let turns = if !self.message.is_empty() {
            Some(self.message.into_iter().map(message).collect::<Result<_>>()?)
        } else if std::io::stdin().is_terminal() {
            if self.json {
                return Err(refused("--json", "", "requires given turns; add --message TEXT"));
            }
            None
        } else {
            Some(vec![input::stdin()?])
        };
        Ok(ChatSettings {
            model: self.numbers.settings(self.model)?,
            random_weights: self.random_weights,
            system: self.system.map(system).transpose()?,
            turns,
            load: self.load,
            max_tokens: self.max_tokens,
            stops: self.stop,
            template: self.template,
            template_file: self.template_file,
            variables: self.template_variable.iter().map(|v| variable(v)).collect::<Result<_>>()?,
            tools: self.tools.as_deref().map(tools).transpose()?,
            sampling,
            context: self.context,
            chunk: self.chunk,
            threads: self.threads,
            parallel: self.parallel,
            history: !self.no_history,
            json: self.json,
            verbose: self.verbose,
            notes: !self.quiet,
        })
    }
}

fn system(text: String) -> Result<String> {
    match text.strip_prefix('@') {
        Some(path) => input::file(Path::new(path)).map(|text| text.trim_end().to_owned()),
        None => Ok(text),
    }
}

fn variable(typed: &str) -> Result<(String, Data)> {
    let (name, value) = typed
        .split_once('=')
        .filter(|(name, _)| !name.is_empty())
        .ok_or_else(|| refused("--template-variable", typed, "must be a name, =, and a value"))?;
    let value = Data::from_json("--template-variable", value).unwrap_or_else(|_| value.into());
    Ok((name.to_owned(), value))
}

fn tools(path: &Path) -> Result<Vec<Data>> {
    let file = path.display().to_string();
    match Data::from_json(&file, &input::file(path)?)? {
        Data::List(tools) if tools.iter().all(|tool| matches!(tool, Data::Map(_))) => Ok(tools),
        _ => Err(refused("--tools", file, "must hold a JSON list of objects, one for each tool")),
    }
}

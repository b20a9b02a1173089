//! The command line as a whole: all commands and their dispatch.

use std::ffi::OsString;
use std::path::Path;

use clap::{Arg, ArgAction, Command, CommandFactory as _, Parser, Subcommand};
use ridge_hub::{HubCache, HubModel};

use crate::commands::bench::{self, BenchArgs};
use crate::commands::chat::{self, ChatArgs};
use crate::commands::classify::{self, ClassifyArgs};
use crate::commands::convert::{self, ConvertArgs};
use crate::commands::data::{self, DataArgs};
use crate::commands::doctor::{self, DoctorArgs};
use crate::commands::embed::{self, EmbedArgs};
use crate::commands::eval::{self, EvalArgs};
use crate::commands::generate::{self, GenerateArgs};
use crate::commands::inspect::{self, InspectArgs};
use crate::commands::launch::{self, LaunchArgs};
use crate::commands::plan::{self, PlanArgs};
use crate::commands::pull::{self, PullArgs};
use crate::commands::quantize::{self, QuantizeArgs};
use crate::commands::serve::{self, ServeArgs};
use crate::commands::shell::{self, CompletionsArgs, ManArgs};
use crate::commands::tokenize::{self, TokenizeArgs};
use crate::commands::train::{self, TrainArgs};
use crate::error::Result;

/// Run, serve, train, quantise and plan language models.
#[derive(Debug, Parser)]
#[command(
    name = "ridge",
    version,
    arg_required_else_help = true,
    max_term_width = 100,
    after_help = "\
Examples:
  ridge generate                              text from the embedded model
  ridge generate DIR \"Once upon a\"            text from a downloaded model
  ridge pull Qwen/Qwen3-0.6B                  download from the Hugging Face Hub
  ridge chat Qwen/Qwen3-0.6B                  chat with it
  ridge serve model.gguf                      OpenAI-compatible API and web page
  ridge tokenize \"Once upon a\"                token ids and spellings
  ridge eval --perplexity FILE                perplexity of a text
  ridge bench DIR                             throughput and its roofline floor
  ridge quantize DIR out.gguf --format q4_k   quantised model as a GGUF file
  ridge train run.toml                        model trained from scratch or from weights
  ridge data corpus/ -o shards                token shards of texts
  ridge inspect DIR                           structure, parameters, cost
  ridge doctor                                hardware and measured rates
  ridge plan fit DIR --device H100            whether the model fits a device

DIR is a folder in the Hugging Face layout. A GGUF file, or the ORG/NAME of a model downloaded with `ridge pull`, works as \
well. The model is the first argument of a command, or follows -m or --model anywhere."
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: CliCommand,
}

/// Inserts `--model` before a model that directly follows its command. If the command also accepts a text there, only a GGUF file, a
/// folder with a config.json and a downloaded model count as one, and whatever is followed by the text.
pub(crate) fn with_model_named(args: impl IntoIterator<Item = OsString>, cli: &Command) -> Vec<OsString> {
    let mut args: Vec<OsString> = args.into_iter().collect();
    let takes_model = |command: &&Command| {
        let is_positional = |arg: &Arg| arg.get_value_names().is_some_and(|names| names.iter().any(|n| n == "MODEL"));
        command.get_arguments().any(|arg| arg.get_long() == Some("model"))
            && !command.get_positionals().any(is_positional)
    };
    if let [_, command, first, ..] = &args[..]
        && let Some(command) = command.to_str().and_then(|name| cli.find_subcommand(name)).filter(|c| takes_model(c))
        && !first.to_string_lossy().starts_with('-')
        && command.get_subcommands().all(|sub| first.to_str() != Some(sub.get_name()))
    {
        let path = Path::new(first);
        let is_gguf = path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"));
        let is_downloaded = || {
            let hub = first.to_str().and_then(|name| name.parse::<HubModel>().ok());
            hub.is_some_and(|model| HubCache::from_environment().is_some_and(|cache| cache.commit(&model).is_some()))
        };
        let has_text = || args.get(3).is_some_and(|next| next == "-" || !next.to_string_lossy().starts_with('-'));
        let mut positionals = command.get_positionals();
        let is_alone = positionals.next().is_none_or(|text| matches!(text.get_action(), ArgAction::Set) && has_text());
        if is_gguf || path.join("config.json").is_file() || is_alone || is_downloaded() {
            args.insert(2, "--model".into());
        }
    }
    args
}

#[derive(Debug, Subcommand)]
pub(crate) enum CliCommand {
    Generate(GenerateArgs),
    Chat(ChatArgs),
    Serve(ServeArgs),
    Embed(EmbedArgs),
    Classify(ClassifyArgs),
    Tokenize(TokenizeArgs),
    Bench(BenchArgs),
    Eval(EvalArgs),
    Inspect(InspectArgs),
    Launch(LaunchArgs),
    Pull(PullArgs),
    Doctor(DoctorArgs),
    Plan(PlanArgs),
    Convert(ConvertArgs),
    Quantize(QuantizeArgs),
    Train(TrainArgs),
    Data(DataArgs),
    Completions(CompletionsArgs),
    Man(ManArgs),
}

impl CliCommand {
    /// Runs the command.
    ///
    /// # Errors
    /// When the command fails.
    pub(crate) fn run(self) -> Result<()> {
        match self {
            Self::Generate(args) => generate::run(args),
            Self::Chat(args) => chat::run(args),
            Self::Convert(args) => convert::run(&args),
            Self::Quantize(args) => quantize::run(&args),
            Self::Train(args) => train::run(&args),
            Self::Data(args) => data::run(&args),
            Self::Embed(args) => embed::run(args),
            Self::Classify(args) => classify::run(args),
            Self::Serve(args) => serve::run(args),
            Self::Tokenize(args) => tokenize::run(&args),
            Self::Bench(args) => bench::run(args),
            Self::Eval(args) => eval::run(args),
            Self::Inspect(args) => inspect::run(args),
            Self::Launch(args) => launch::run(&args),
            Self::Doctor(args) => doctor::run(&args),
            Self::Completions(args) => shell::completions(&args, Cli::command()),
            Self::Man(args) => shell::man(&args, Cli::command()),
            Self::Plan(args) => plan::run(&args),
            Self::Pull(args) => pull::run(args),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_behind_a_command_is_its_model() {
        let named = |args: &[&str]| {
            let args = args.iter().map(OsString::from);
            let all = with_model_named(args, &Cli::command()).into_iter().map(|arg| arg.into_string().unwrap());
            all.collect::<Vec<_>>().join(" ")
        };
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/stories260K");
        assert_eq!(named(&["ridge", "generate", folder, "Once"]), format!("ridge generate --model {folder} Once"));
        assert_eq!(named(&["ridge", "chat", "none.GGUF"]), "ridge chat --model none.GGUF");
        assert_eq!(named(&["ridge", "chat", "Qwen/Qwen3-0.6B"]), "ridge chat --model Qwen/Qwen3-0.6B");
        assert_eq!(named(&["ridge", "generate", "a/b", "Once"]), "ridge generate --model a/b Once");
        assert_eq!(named(&["ridge", "generate", "a/b", "-"]), "ridge generate --model a/b -");
        for args in [
            "generate Once",
            "generate either/or",
            "inspect a.gguf",
            "quantize a.gguf b.gguf",
            "bench serve",
            "generate -n 3",
            "generate",
        ] {
            let args: Vec<&str> = ["ridge"].into_iter().chain(args.split(' ')).collect();
            assert_eq!(named(&args), args.join(" "));
        }
    }

    #[test]
    fn the_definition_of_the_arguments_is_consistent() {
        Cli::command().debug_assert();
    }
}

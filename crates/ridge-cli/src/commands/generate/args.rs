//! Arguments of `ridge generate`, and the settings that they resolve to.

use std::io::IsTerminal as _;
use std::path::PathBuf;

use clap::Args;

use crate::args::{
    LimitedDeviceArgs, MAX_COUNT, ModelSettings, NumberArgs, ParallelArgs, SamplingArgs, SamplingSettings, Speculate,
    speculate, whole,
};
use crate::error::{Result, refused};

/// Generate text from a prompt
///
/// Without a model, the embedded stories260K is used. Without PROMPT, generation starts from the begin token.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ridge generate --greedy
  ridge generate --model ~/Llama-3.2-1B --dtype bf16 \"The ridge point is\"
  ridge generate --seed 7 --stop $'\\n' - < prompt.txt
  ridge generate -- \"--greedy is a flag that\"  # after `--`, arguments are text
  ridge generate --model DIR --random-weights --prompt-tokens 512 -v

The first argument is the model if it is a GGUF file, a model folder or a downloaded ORG/NAME. Standard input is read \
only if the prompt is `-`. The sampling settings in generation_config.json are ignored, so that the same command uses the \
same settings for every model; its end tokens are used.

Text is streamed to standard output; everything else goes to standard error.
Exit codes: 0 done, 1 failed, 2 usage error, 130 interrupted.")]
pub(crate) struct GenerateArgs {
    /// Prompt; `-` reads it from standard input, without its last newline
    prompt: Option<String>,

    /// Model: a folder in the Hugging Face layout, a GGUF file, or the ORG/NAME of a model downloaded with `ridge pull`
    /// [default: the embedded model]
    #[arg(short, long, value_name = "MODEL")]
    model: Option<PathBuf>,

    /// Use random weights; the folder then only needs a config.json
    #[arg(long)]
    random_weights: bool,

    /// Use this many random tokens as the prompt
    #[arg(
        long, value_name = "N", value_parser = whole::<usize, 1, MAX_COUNT>,
        allow_negative_numbers = true, conflicts_with = "prompt"
    )]
    prompt_tokens: Option<usize>,

    /// Maximum number of tokens to generate
    #[arg(
        short = 'n', long, value_name = "N", value_parser = whole::<usize, 0, MAX_COUNT>,
        allow_negative_numbers = true, default_value_t = 200
    )]
    max_tokens: usize,

    /// Stop before this text; may be repeated
    #[arg(long, value_name = "STRING")]
    stop: Vec<String>,

    /// Continue past end tokens
    #[arg(long)]
    ignore_eos: bool,

    /// With --json, print the log-probability of each token and of the N most likely alternatives
    #[arg(long, value_name = "N", value_parser = whole::<u32, 0, 1024>, allow_negative_numbers = true, requires = "json")]
    logprobs: Option<u32>,

    #[command(flatten)]
    sampling: SamplingArgs,

    #[command(flatten)]
    numbers: NumberArgs,

    /// Context length in tokens, prompt plus generated text [default: as long as needed]
    #[arg(
        long, value_name = "N", value_parser = whole::<usize, 1, MAX_COUNT>,
        allow_negative_numbers = true, help_heading = "Running"
    )]
    context: Option<usize>,

    /// Maximum prompt tokens per step
    #[arg(
        long, value_name = "N", value_parser = whole::<usize, 1, MAX_COUNT>,
        allow_negative_numbers = true, default_value_t = 512, help_heading = "Running"
    )]
    chunk: usize,

    /// Speculative decoding with N tokens, or one, that the model's own multi-token prediction module drafts and the model verifies in
    /// one step; the text does not change; 0 is off
    #[arg(
        long, value_name = "mtp[:N]", value_parser = speculate, allow_negative_numbers = true, default_value = "0",
        help_heading = "Running"
    )]
    speculate: Speculate,

    #[command(flatten)]
    place: LimitedDeviceArgs,

    #[command(flatten)]
    parallel: ParallelArgs,

    /// Print the prompt before the generated text
    #[arg(long, help_heading = "Output", conflicts_with = "json")]
    echo: bool,

    /// Print only one JSON object, at the end: text, tokens, finish reason, times, settings
    #[arg(long, help_heading = "Output")]
    json: bool,

    /// Print timings even if standard error is not a terminal, and which programs were compiled and why
    #[arg(short, long, help_heading = "Output")]
    verbose: bool,

    /// Print only the text and errors
    #[arg(short, long, help_heading = "Output", conflicts_with = "verbose")]
    quiet: bool,
}

#[derive(Debug)]
pub(super) struct GenerateSettings {
    pub(super) model: ModelSettings,
    pub(super) random_weights: bool,
    pub(super) prompt: GeneratePrompt,
    pub(super) sampling: SamplingSettings,
    pub(super) stops: Vec<String>,
    pub(super) ignore_eos: bool,
    pub(super) max_tokens: usize,
    /// The prompt plus the maximum number of generated tokens, if `None`.
    pub(super) context: Option<usize>,
    pub(super) chunk: usize,
    /// Tokens that the model's own module drafts in each step.
    pub(super) drafts: usize,
    pub(super) place: LimitedDeviceArgs,
    pub(super) parallel: ParallelArgs,
    pub(super) echo: bool,
    pub(super) json: bool,
    /// Print what was compiled.
    pub(super) verbose: bool,
    /// Print the times.
    pub(super) timing: bool,
    /// Print notes, such as the seed.
    pub(super) notes: bool,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum GeneratePrompt {
    /// The begin token.
    Begin,
    Text(String),
    Stdin,
    /// This many random tokens.
    Random(usize),
}

impl GenerateArgs {
    pub(super) fn resolve(self) -> Result<GenerateSettings> {
        let mut sampling = self.sampling.resolve(self.prompt_tokens.is_some())?;
        sampling.values.logprobs = self.logprobs;
        if self.stop.iter().any(String::is_empty) {
            return Err(refused("--stop", "''", "must not be empty"));
        }
        Ok(GenerateSettings {
            model: self.numbers.settings(self.model)?,
            random_weights: self.random_weights,
            prompt: match (self.prompt_tokens, self.prompt) {
                (Some(count), _) => GeneratePrompt::Random(count),
                (None, None) => GeneratePrompt::Begin,
                (None, Some(text)) if text == "-" => GeneratePrompt::Stdin,
                (None, Some(text)) => GeneratePrompt::Text(text),
            },
            sampling,
            stops: self.stop,
            ignore_eos: self.ignore_eos,
            max_tokens: self.max_tokens,
            context: self.context,
            chunk: self.chunk,
            drafts: self.speculate.by_module()?,
            place: self.place,
            parallel: self.parallel,
            echo: self.echo,
            json: self.json,
            verbose: self.verbose,
            timing: self.verbose || !self.quiet && !self.json && std::io::stderr().is_terminal(),
            notes: !self.quiet,
        })
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::cli::{Cli, CliCommand};

    fn generate(args: &[&str]) -> Result<GenerateSettings> {
        match Cli::try_parse_from(["ridge", "generate"].iter().chain(args)).unwrap().command {
            CliCommand::Generate(args) => args.resolve(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn greedy_leaves_nothing_to_chance() {
        let s = generate(&["--greedy"]).unwrap();
        assert_eq!((s.sampling.values.temperature, s.sampling.values.top_k, s.sampling.values.top_p), (0.0, 0, 1.0));
        assert!(!s.sampling.tell_seed);
        assert!(generate(&["--greedy", "--prompt-tokens", "3"]).unwrap().sampling.tell_seed);
        assert!(!generate(&["--temperature", "0"]).unwrap().sampling.tell_seed);
    }

    #[test]
    fn a_seed_is_told_where_the_user_did_not_choose_it() {
        let (a, b) = (generate(&[]).unwrap(), generate(&[]).unwrap());
        assert!(a.sampling.tell_seed && a.sampling.values.seed != b.sampling.values.seed);
        let chosen = generate(&["--seed", "7"]).unwrap();
        assert!(!chosen.sampling.tell_seed && chosen.sampling.values.seed == 7);
    }

    #[test]
    fn values_out_of_range_are_named_with_their_flag_and_as_typed() {
        for (args, said) in [
            (["--temperature", "-1"], "'-1' for '--temperature <T>': must be 0 (greedy) or a positive number"),
            (["--temperature", "1e400"], "'1e400' for '--temperature <T>': must be 0 (greedy)"),
            (["--temperature", "nan"], "'nan' for '--temperature <T>': must be 0 (greedy)"),
            (["--top-p", "0"], "'0' for '--top-p <P>': must be above 0"),
            (["--top-p", "4294967296"], "'4294967296' for '--top-p <P>': must be above 0 and at most 1"),
            (["--top-p", "x"], "'x' for '--top-p <P>': must be a number"),
            (["--top-k", "3000000000"], "'3000000000' for '--top-k <K>': must be a whole number from 0 to 2147483647"),
            (["--chunk", "0"], "'0' for '--chunk <N>': must be a whole number from 1 to 18446744073709551615"),
            (["--threads", "5000"], "'5000' for '--threads <N>': must be a whole number from 1 to 1024"),
            (["--threads", "1.5"], "'1.5' for '--threads <N>': must be a whole number from 1 to 1024"),
            (["--max-tokens", "-1"], "'-1' for '--max-tokens <N>': must be a whole number from 0 to"),
            (["--prompt-tokens", "0"], "'0' for '--prompt-tokens <N>': must be a whole number from 1 to"),
            (["--seed", "-1"], "'-1' for '--seed <N>': must be a whole number from 0 to 18446744073709551615"),
        ] {
            let error = Cli::try_parse_from(["ridge", "generate"].iter().chain(&args)).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
        assert!(generate(&["--stop", ""]).unwrap_err().to_string().starts_with("--stop '': must not be empty"));
    }
}

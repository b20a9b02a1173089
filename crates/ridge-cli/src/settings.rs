//! What was typed, resolved: every default filled in and every value checked before anything runs.

use std::io::IsTerminal as _;
use std::path::PathBuf;

use ridge_graph::{DType, FormatRef};
use ridge_models::BuildOptions;

use crate::args::{
    ActivationsChoice, DeviceChoice, DoctorArgs, GenerateArgs, InspectArgs, NumberArgs, SamplingSettings,
};
use crate::error::{Error, Result};

/// Which model, and how its numbers are kept.
#[derive(Clone, Debug)]
pub(crate) struct ModelSettings {
    /// A folder or a configuration; the embedded model if `None`.
    pub(crate) path: Option<PathBuf>,
    pub(crate) format: Option<FormatRef>,
    /// Of activations; that of the weights if `None`.
    dtype: Option<DType>,
    /// Of keys and values; that of activations if `None`.
    cache_dtype: Option<DType>,
    /// How the CPU multiplies weights in formats.
    pub(crate) activations: ActivationsChoice,
}

#[derive(Debug)]
pub(crate) struct GenerateSettings {
    pub(crate) model: ModelSettings,
    pub(crate) random_weights: bool,
    pub(crate) prompt: Prompt,
    pub(crate) sampling: SamplingSettings,
    pub(crate) stops: Vec<String>,
    pub(crate) ignore_eos: bool,
    pub(crate) max_tokens: usize,
    /// As many tokens as prompt and answer need, if `None`.
    pub(crate) context: Option<usize>,
    pub(crate) chunk: usize,
    /// All usable cores, if `None`.
    pub(crate) threads: Option<usize>,
    pub(crate) device: DeviceChoice,
    pub(crate) echo: bool,
    pub(crate) json: bool,
    /// Print the times.
    pub(crate) timing: bool,
    /// Print notes, such as the seed.
    pub(crate) notes: bool,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Prompt {
    /// The token that begins a text.
    Begin,
    Text(String),
    Stdin,
    /// This many random tokens.
    Random(usize),
}

#[derive(Debug)]
pub(crate) struct InspectSettings {
    pub(crate) model: ModelSettings,
    pub(crate) context: Option<usize>,
    pub(crate) shown: Shown,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Shown {
    Tables,
    Json,
    Graph,
    LoweredGraph,
}

#[derive(Debug)]
pub(crate) struct DoctorSettings {
    pub(crate) json: bool,
}

impl GenerateArgs {
    pub(crate) fn resolve(self) -> Result<GenerateSettings> {
        let mut sampling = self.sampling.resolve(self.prompt_tokens.is_some())?;
        sampling.values.logprobs = self.logprobs;
        if self.stop.iter().any(String::is_empty) {
            return Err(refused("--stop", "''", "must not be empty, for every text ends with nothing"));
        }
        Ok(GenerateSettings {
            model: ModelSettings::new(self.model, &self.numbers)?,
            random_weights: self.random_weights,
            prompt: match (self.prompt_tokens, self.prompt) {
                (Some(count), _) => Prompt::Random(count),
                (None, None) => Prompt::Begin,
                (None, Some(text)) if text == "-" => Prompt::Stdin,
                (None, Some(text)) => Prompt::Text(text),
            },
            sampling,
            stops: self.stop,
            ignore_eos: self.ignore_eos,
            max_tokens: self.max_tokens,
            context: self.context,
            chunk: self.chunk,
            threads: self.threads,
            device: self.device,
            echo: self.echo,
            json: self.json,
            timing: self.verbose || !self.quiet && !self.json && std::io::stderr().is_terminal(),
            notes: !self.quiet,
        })
    }
}

impl InspectArgs {
    pub(crate) fn resolve(self) -> Result<InspectSettings> {
        Ok(InspectSettings {
            model: ModelSettings::new(self.path.or(self.model), &self.numbers)?,
            context: self.context,
            shown: match (self.graph, self.lowered) {
                (_, true) => Shown::LoweredGraph,
                (true, false) => Shown::Graph,
                (false, _) if self.json => Shown::Json,
                (false, _) => Shown::Tables,
            },
        })
    }
}

impl DoctorArgs {
    pub(crate) fn resolve(self) -> DoctorSettings {
        DoctorSettings { json: self.json }
    }
}

impl ModelSettings {
    pub(crate) fn new(path: Option<PathBuf>, numbers: &NumberArgs) -> Result<Self> {
        let dtype = |flag, name: &str| DType::from_name(name).ok_or_else(|| refused(flag, name, "is not a dtype"));
        let format =
            |name: &String| FormatRef::from_name(name).ok_or_else(|| refused("--format", name, "is not a format"));
        Ok(Self {
            path,
            format: numbers.format.as_ref().map(format).transpose()?,
            dtype: numbers.dtype.as_deref().map(|name| dtype("--dtype", name)).transpose()?,
            cache_dtype: match numbers.cache_dtype.as_deref() {
                Some("int8") => Some(DType::I8),
                name => name.map(|name| dtype("--cache-dtype", name)).transpose()?,
            },
            activations: numbers.activations,
        })
    }

    /// How a model is built whose configuration names `named` as its dtype.
    pub(crate) fn options(&self, named: Option<DType>) -> BuildOptions {
        let activations = self.dtype.or(named).unwrap_or(DType::F32);
        BuildOptions { activations, cache: self.cache_dtype.unwrap_or(activations), ..BuildOptions::default() }
    }
}

/// A mistake of use.
pub(crate) fn refused(flag: &str, value: impl ToString, why: &str) -> Error {
    Error::Setting { flag: flag.to_owned(), value: value.to_string(), why: why.to_owned() }
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory as _, Parser as _};

    use super::*;
    use crate::args::{Cli, Command};

    fn generate(args: &[&str]) -> Result<GenerateSettings> {
        match Cli::try_parse_from(["ridge", "generate"].iter().chain(args)).unwrap().command {
            Command::Generate(args) => args.resolve(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_definition_of_the_arguments_is_consistent() {
        Cli::command().debug_assert();
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

//! A flag for each key of the configuration file.

use clap::error::Error;
use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};
use ridge_train::settings::{KEYS, Key, KeyKind};

/// What was typed for keys: each `section.key` with its value.
#[derive(Clone, Debug, Default)]
pub(crate) struct KeyArgs(pub(crate) Vec<(String, String)>);

fn heading(section: &str) -> &'static str {
    match section {
        "model" => "Model",
        "data" => "Data",
        "train" => "Steps and numbers",
        "optimizer" => "Optimiser",
        "validation" => "Validation",
        "sample" => "Samples of text",
        "checkpoint" => "Checkpoints",
        _ => "Logs",
    }
}

fn value_name(kind: KeyKind) -> &'static str {
    match kind {
        KeyKind::Text | KeyKind::Tables => "TEXT",
        KeyKind::Number => "N",
        KeyKind::Flag => "BOOL",
        KeyKind::Texts => "TEXT,..",
        KeyKind::Numbers => "N,..",
    }
}

fn flags() -> impl Iterator<Item = &'static Key> {
    KEYS.iter().filter(|key| key.kind != KeyKind::Tables)
}

impl Args for KeyArgs {
    fn augment_args(command: Command) -> Command {
        flags().fold(command, |command, key| {
            let arg = Arg::new(key.path).long(key.path).help(key.help).help_heading(heading(key.section()));
            command.arg(arg.value_name(value_name(key.kind)).allow_negative_numbers(true))
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for KeyArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let typed = |key: &Key| Some((key.path.to_owned(), matches.get_one::<String>(key.path)?.clone()));
        Ok(Self(flags().filter_map(typed).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

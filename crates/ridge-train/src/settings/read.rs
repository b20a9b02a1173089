//! From a TOML file and flags to settings.

use toml::{Table, Value};

use super::keys::{KEYS, Key, KeyKind};
use super::sections::{DataSettings, LogSettings, OptimizerSettings, Settings, TrainSettings};
use crate::address::{is_remote, masked};
use crate::error::{Result, TrainError};

/// Reads the text of a configuration, then sets each of `flags`, a `section.key` and its value as typed. `file` stands for
/// the configuration in errors.
///
/// # Errors
/// Names the key: unknown ones with the nearest known, and values that are of another kind or have no meaning.
pub fn read_settings(file: &str, text: &str, flags: &[(String, String)]) -> Result<Settings> {
    let mut table: Table = text.parse().map_err(|error: toml::de::Error| TrainError::Path {
        path: file.into(),
        problem: format!("it is not TOML: {}", error.to_string().trim_end()),
        remedy: "fix the line".to_owned(),
    })?;
    check_keys(file, &table)?;
    for (path, typed) in flags {
        let key = known(path).ok_or_else(|| unknown("the command line", path))?;
        let section = table.entry(key.section()).or_insert_with(|| Value::Table(Table::new()));
        if let Value::Table(section) = section {
            section.insert(key.name().to_owned(), parsed(key, typed)?);
        }
    }
    let settings: Settings = deserialized(file, &table)?;
    check(&settings)?;
    Ok(settings)
}

/// The settings as the text of a configuration file.
pub fn shown_settings(settings: &Settings) -> String {
    toml::to_string(settings).unwrap_or_default()
}

fn known(path: &str) -> Option<&'static Key> {
    KEYS.iter().find(|key| key.path == path)
}

fn check_keys(file: &str, table: &Table) -> Result<()> {
    for (section, value) in table {
        let Value::Table(keys) = value else { return Err(unknown(file, section)) };
        if !KEYS.iter().any(|key| key.section() == section) {
            return Err(unknown(file, section));
        }
        for name in keys.keys() {
            let path = format!("{section}.{name}");
            if known(&path).is_none() {
                return Err(unknown(file, &path));
            }
        }
    }
    Ok(())
}

fn unknown(file: &str, path: &str) -> TrainError {
    let name = path.rsplit('.').next().unwrap_or(path);
    // A key of the same name in another section is nearer than any other spelling.
    let score = |key: &Key| distance(path, key.path).min(1 + distance(name, key.name()));
    let nearest = KEYS.iter().min_by_key(|key| score(key)).filter(|key| score(key) <= 1 + name.len() / 3);
    TrainError::UnknownKey {
        file: file.to_owned(),
        key: path.to_owned(),
        nearest: nearest.map(|key| key.path.to_owned()),
    }
}

/// How many characters are to be put in, taken out or replaced (Levenshtein 1966).
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(row[j + 1] + 1);
        }
    }
    row[b.len()]
}

fn parsed(key: &Key, typed: &str) -> Result<Value> {
    let wrong = |why: &str| TrainError::setting(key.path, typed, why);
    let number = |text: &str| {
        let text = text.trim();
        let int = || text.parse::<i64>().ok().map(Value::Integer);
        let float = || text.parse::<f64>().ok().filter(|value| value.is_finite()).map(Value::Float);
        int().or_else(float).ok_or_else(|| wrong("must be a number"))
    };
    let parts = || typed.split(',').filter(|part| !part.is_empty());
    Ok(match key.kind {
        KeyKind::Text => Value::String(typed.to_owned()),
        KeyKind::Number => number(typed)?,
        KeyKind::Flag => Value::Boolean(typed.parse().map_err(|_| wrong("must be true or false"))?),
        KeyKind::Texts => Value::Array(parts().map(|part| Value::String(part.to_owned())).collect()),
        KeyKind::Numbers => Value::Array(parts().map(number).collect::<Result<_>>()?),
        KeyKind::Tables => return Err(wrong("is given in the configuration file only")),
    })
}

/// The table as settings, key by key, so that an error names the one that is wrong.
fn deserialized(file: &str, table: &Table) -> Result<Settings> {
    for (section, keys) in table {
        let Value::Table(keys) = keys else { continue };
        for (name, value) in keys {
            let one = Table::from_iter([(name.clone(), value.clone())]);
            let whole = Table::from_iter([(section.clone(), Value::Table(one))]);
            if let Err(error) = Settings::deserialize_table(whole) {
                let path = format!("{section}.{name}");
                let text = error.message().to_owned();
                return Err(TrainError::setting(&path, value, text));
            }
        }
    }
    Settings::deserialize_table(table.clone())
        .map_err(|error| TrainError::path(file, error.message().to_owned(), "fix the value"))
}

impl Settings {
    fn deserialize_table(table: Table) -> Result<Self, toml::de::Error> {
        table.try_into()
    }
}

fn check(settings: &Settings) -> Result<()> {
    let Settings { model, data, train, optimizer, .. } = settings;
    let within = |key: &str, value: f64, ok: bool, why: &str| {
        if ok { Ok(()) } else { Err(TrainError::setting(key, value, why)) }
    };
    match (&model.config, &model.from) {
        (None, None) => {
            let why = "is missing; give a config.json to train from scratch, or model.from to continue from weights";
            return Err(TrainError::setting("model.config", "nothing", why));
        }
        (Some(_), Some(from)) => {
            let why = "cannot go with model.config; the folder has a config.json of its own";
            return Err(TrainError::setting("model.from", from.display(), why));
        }
        _ => {}
    }
    for (key, rate) in [("model.dropout", model.dropout), ("model.attention_dropout", model.attention_dropout)] {
        within(key, rate, (0.0..1.0).contains(&rate), "must be at least 0 and below 1")?;
    }
    let std = model.initialization_std;
    within("model.initialization_std", std, std > 0.0 && std.is_finite(), "must be above 0")?;
    let DataSettings { train: sources, weights, validation_fraction, sequence_length, .. } = data;
    if sources.is_empty() {
        let why = "is missing; name a text, a JSONL file, a token shard or a folder of these";
        return Err(TrainError::setting("data.train", "[]", why));
    }
    if !weights.is_empty() && weights.len() != sources.len() {
        let why = format!("must have a number for each of the {} of data.train", sources.len());
        return Err(TrainError::setting("data.weights", format!("{weights:?}"), why));
    }
    if let Some(weight) = weights.iter().find(|weight| !(weight.is_finite() && **weight > 0.0)) {
        return Err(TrainError::setting("data.weights", weight, "must be above 0"));
    }
    let fraction = *validation_fraction;
    within("data.validation_fraction", fraction, (0.0..1.0).contains(&fraction), "must be at least 0 and below 1")?;
    let TrainSettings { batch_size, accumulation, clip, spike, z_loss, .. } = train;
    let sizes = [
        ("data.sequence_length", *sequence_length, 1 << 24),
        ("train.batch_size", *batch_size, 1 << 20),
        ("train.accumulation", *accumulation, 1 << 20),
        ("train.fp8_history", train.fp8_history, 1 << 20),
    ];
    for (key, value, most) in sizes {
        if value == 0 || value > most {
            return Err(TrainError::setting(key, value, format!("must be from 1 to {most}")));
        }
    }
    within("train.clip", *clip, *clip >= 0.0 && clip.is_finite(), "must be 0 or more")?;
    within("train.z_loss", *z_loss, *z_loss >= 0.0 && z_loss.is_finite(), "must be 0 or more")?;
    within("train.spike", *spike, *spike >= 0.0 && spike.is_finite(), "must be 0 or more")?;
    check_log(&settings.log)?;
    settings.experts.check()?;
    check_optimizer(optimizer)
}

fn check_log(log: &LogSettings) -> Result<()> {
    if let Some(page) = &log.page
        && page.rsplit_once(':').is_none_or(|(host, port)| host.is_empty() || port.parse::<u16>().is_err())
    {
        return Err(TrainError::setting("log.page", page, "must be host:port, such as 127.0.0.1:7070"));
    }
    if let Some(store) = log.mlflow.as_ref().filter(|store| store.to_string_lossy().contains("://")) {
        let text = store.to_string_lossy();
        if let Some(masked) = masked(&text) {
            let why = "must have no user and password; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD";
            return Err(TrainError::setting("log.mlflow", masked, why));
        }
        if !is_remote(store) {
            let why = "must be a folder, or the http:// or https:// address of a server";
            return Err(TrainError::setting("log.mlflow", text, why));
        }
    }
    Ok(())
}

fn check_optimizer(optimizer: &OptimizerSettings) -> Result<()> {
    let o = optimizer;
    let rates =
        [("optimizer.learning_rate", o.learning_rate), ("optimizer.final_learning_rate", o.final_learning_rate)];
    let decays = [
        ("optimizer.beta1", o.beta1),
        ("optimizer.beta2", o.beta2),
        ("optimizer.momentum", o.momentum),
        ("optimizer.ema", o.ema),
    ];
    let others = [("optimizer.epsilon", o.epsilon), ("optimizer.weight_decay", o.weight_decay)];
    for (key, value) in rates.into_iter().chain(others) {
        if !(value.is_finite() && value >= 0.0) {
            return Err(TrainError::setting(key, value, "must be 0 or more"));
        }
    }
    for (key, value) in decays {
        if !(0.0..1.0).contains(&value) {
            return Err(TrainError::setting(key, value, "must be at least 0 and below 1"));
        }
    }
    for group in &o.groups {
        let numbers = [group.learning_rate_scale, group.weight_decay.unwrap_or(0.0)];
        if numbers.iter().any(|value| !(value.is_finite() && *value >= 0.0)) {
            let why = "learning_rate_scale and weight_decay must be 0 or more";
            return Err(TrainError::setting("optimizer.groups", &group.pattern, why));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &str = "[model]\nconfig = \"config.json\"\n[data]\ntrain = [\"a.txt\"]\n";

    fn error(text: &str, flags: &[(&str, &str)]) -> String {
        let flags: Vec<_> = flags.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        read_settings("c.toml", &format!("{SMALL}{text}"), &flags).expect_err("is wrong").to_string()
    }

    #[test]
    fn every_key_is_a_field_of_the_settings_and_every_field_a_key() {
        let mut settings = Settings::default();
        settings.model.config = Some("c".into());
        settings.model.from = Some("f".into());
        settings.model.initialization = Some(crate::settings::sections::Initialization::Llama);
        settings.data.vocabulary = Some("bytes".into());
        settings.train.memory = Some(ridge_hw::units::Bytes::from_gib(3));
        settings.log.mlflow = Some("m".into());
        settings.log.wandb = Some("w".into());
        settings.log.page = Some("p:1".into());
        settings.optimizer.groups = vec![crate::settings::sections::GroupSettings {
            pattern: "*".into(),
            learning_rate_scale: 1.0,
            weight_decay: None,
        }];
        let table: Table = shown_settings(&settings).parse().expect("is TOML");
        let fields: Vec<String> = table
            .iter()
            .flat_map(|(section, keys)| {
                keys.as_table().expect("a section").keys().map(move |k| format!("{section}.{k}"))
            })
            .collect();
        let mut keys: Vec<String> = KEYS.iter().map(|key| key.path.to_owned()).collect();
        let mut sorted = fields.clone();
        keys.sort();
        sorted.sort();
        assert_eq!(keys, sorted);
    }

    #[test]
    fn defaults_in_help_are_the_defaults() {
        let table: Table = shown_settings(&Settings::default()).parse().expect("is TOML");
        for key in KEYS {
            let Some((_, shown)) = key.help.rsplit_once("[default: ") else { continue };
            let shown = shown.trim_end_matches(']');
            match &table[key.section()].get(key.name()) {
                Some(Value::Integer(value)) => assert!(shown == value.to_string() || *value == 0, "{}", key.path),
                Some(Value::Float(value)) => assert_eq!(shown.parse::<f64>().ok(), Some(*value), "{}", key.path),
                Some(Value::Boolean(value)) => assert_eq!(shown, value.to_string(), "{}", key.path),
                Some(Value::String(value)) if value != "\n" => assert_eq!(shown, value, "{}", key.path),
                _ => {}
            }
        }
    }

    #[test]
    fn unknown_keys_are_named_with_the_nearest() {
        assert_eq!(
            error("[optimizer]\nlearning_rat = 1.0\n", &[]),
            "c.toml: unknown key optimizer.learning_rat; did you mean optimizer.learning_rate?"
        );
        assert_eq!(
            error("[train]\nlearning_rate = 1.0\n", &[]),
            "c.toml: unknown key train.learning_rate; did you mean optimizer.learning_rate?"
        );
        assert_eq!(error("[zzzzz]\n", &[]), "c.toml: unknown key zzzzz; `ridge train --help` lists the keys");
    }

    #[test]
    fn a_value_of_another_kind_is_named_with_its_key() {
        let text = error("[train]\nsteps = \"many\"\n", &[]);
        assert!(text.starts_with("train.steps = \"many\": invalid type"), "{text}");
        let text = error("[optimizer]\nname = \"adam\"\n", &[]);
        assert!(
            text.starts_with("optimizer.name = \"adam\": unknown variant `adam`, expected one of `adamw`"),
            "{text}"
        );
        let text = error("", &[("train.memory", "40")]);
        assert!(text.starts_with("train.memory = \"40\": ") && text.contains("add its unit"), "{text}");
        assert_eq!(error("", &[("train.steps", "x")]), "train.steps = x: must be a number");
        assert_eq!(error("", &[("train.batch_size", "0")]), "train.batch_size = 0: must be from 1 to 1048576");
        let text = error("", &[("log.mlflow", "https://user:secret@host:5000/path")]);
        assert_eq!(
            text,
            "log.mlflow = https://***@host:5000: must have no user and password; set MLFLOW_TRACKING_USERNAME and \
             MLFLOW_TRACKING_PASSWORD"
        );
        let text = error("", &[("log.mlflow", "HTTPS://user:sec/ret@host")]);
        assert!(text.starts_with("log.mlflow = HTTPS://***@host: must have no user and password"), "{text}");
        assert_eq!(
            error("", &[("log.mlflow", "databricks://profile")]),
            "log.mlflow = databricks://profile: must be a folder, or the http:// or https:// address of a server"
        );
        assert_eq!(error("", &[("optimizer.beta1", "1")]), "optimizer.beta1 = 1: must be at least 0 and below 1");
    }

    #[test]
    fn flags_replace_what_the_file_says() {
        let flags =
            [("optimizer.learning_rate", "1e-3"), ("data.train", "b.txt,c.jsonl"), ("optimizer.nesterov", "true")];
        let flags: Vec<_> = flags.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let settings = read_settings("c.toml", &format!("{SMALL}[train]\nmemory = \"1.5GiB\"\n"), &flags);
        let settings = settings.expect("is right");
        assert_eq!(settings.train.memory, Some(ridge_hw::units::Bytes(3 << 29)));
        assert_eq!(settings.optimizer.learning_rate, 1e-3);
        assert_eq!(settings.data.train, ["b.txt", "c.jsonl"].map(std::path::PathBuf::from));
        assert!(settings.optimizer.nesterov);
        let again = read_settings("shown", &shown_settings(&settings), &[]).expect("what is shown can be read");
        assert_eq!(again, settings);
    }
}

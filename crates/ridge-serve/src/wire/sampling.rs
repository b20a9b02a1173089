//! The settings that completions and chats share.

use std::hash::{BuildHasher as _, DefaultHasher, Hash as _, Hasher as _, RandomState};
use std::time::Duration;

use ridge_engine::Sampling;
use ridge_engine::service::Targets;
use ridge_graph::sampler_settings;
use serde_json::{Value, json};

use super::constraint::{self, Asked};
use super::fields::{RequestFields, shown, wrong};
use crate::error::{ApiError, ApiResult};

/// Answers to one prompt at most.
pub(crate) const MAX_ANSWERS: u64 = 128;
/// Alternatives told for each token at most.
pub(crate) const MAX_LOGPROBS: u64 = 20;
const MAX_STOPS: usize = 64;
const LONGEST_STOP: usize = 1024;
const MAX_BIASES: usize = 1024;

/// What may be asked of any answer.
#[derive(Clone, Debug)]
pub(crate) struct CommonParams {
    /// The model that is meant, if the request says.
    pub(crate) model: Option<String>,
    /// Its seed is that of the first answer.
    pub(crate) sampling: Sampling,
    /// Answers to give.
    pub(crate) n: usize,
    /// Tokens of an answer at most, if the request says.
    pub(crate) max_tokens: Option<usize>,
    /// The name by which the request says it.
    pub(crate) max_tokens_param: &'static str,
    /// Tokens of an answer at most where the request does not say and the context leaves room for them; else all that fit.
    pub(crate) usual_tokens: Option<usize>,
    pub(crate) min_tokens: usize,
    pub(crate) stops: Vec<String>,
    /// Tokens that end an answer besides those of the model.
    pub(crate) stop_tokens: Vec<u32>,
    pub(crate) ignore_eos: bool,
    /// Keep the last tokens of the prompt alone.
    pub(crate) truncate: Option<usize>,
    pub(crate) form: Option<Asked>,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    pub(crate) priority: i32,
    /// When tokens are wanted.
    pub(crate) targets: Targets,
    /// Prefixes in the cache are shared only between requests that have this in common.
    pub(crate) salt: u64,
    /// Tell the ids of prompt and answer.
    pub(crate) return_token_ids: bool,
    /// Write tokens as `token_id:7` where log-probabilities are told.
    pub(crate) tokens_as_ids: bool,
    /// Whom the client answers to; for logs.
    pub(crate) user: Option<String>,
}

/// Reads them. `max_tokens` are the names of its limit, the first one that is preferred first, and the least that it may
/// be: 0 asks for the prompt alone.
pub(crate) fn read(fields: &mut RequestFields, (max_tokens, least): (&[&'static str], u64)) -> ApiResult<CommonParams> {
    let model = fields.text("model")?;
    let mut sampling = Sampling { temperature: 1.0, seed: random(), ..Sampling::GREEDY };
    read_settings(fields, &mut sampling)?;
    sampling.seed = fields.seed("seed")?.unwrap_or(sampling.seed);
    sampling.logit_bias = logit_bias(fields)?;
    sampling.check()?;
    let most = u64::from(u32::MAX);
    let mut named_limit = None;
    for name in max_tokens {
        let value = fields.whole(name, least, most)?;
        named_limit = named_limit.or(value.map(|limit| (limit, *name)));
    }
    let limit = named_limit.map(|(limit, _)| limit);
    let allowed = match named_limit {
        Some((limit, name)) => format!("a whole number from 0 to {name}, which is {limit}"),
        None => "a whole number from 0 to the tokens that the context has room for behind the prompt".to_owned(),
    };
    let min_tokens = fields.whole_up_to("min_tokens", limit.unwrap_or(most), &allowed)?.unwrap_or(0);
    let stream = fields.bool("stream")?.unwrap_or(false);
    let options = fields.object("stream_options")?;
    let mut include_usage = false;
    if let Some(mut options) = options {
        if !stream {
            return Err(ApiError::param("stream_options", "requires a stream; set stream to true"));
        }
        include_usage = options.bool("include_usage")?.unwrap_or(false);
        options.only("include_obfuscation", &[json!(false)], "is not supported: give false")?;
        options.done()?;
    }
    // What other servers keep, count or route by. This one stores nothing, and answers are the same without.
    fields.bool("store")?;
    fields.object("metadata")?;
    fields.object("prediction")?;
    for key in ["safety_identifier", "prompt_cache_key", "prompt_cache_retention"] {
        fields.text(key)?;
    }
    fields.only("service_tier", &[json!("auto"), json!("default")], "is not supported; give auto")?;
    Ok(CommonParams {
        model,
        sampling,
        n: fields.whole("n", 1, MAX_ANSWERS)?.unwrap_or(1) as usize,
        max_tokens: limit.map(|n| n as usize),
        max_tokens_param: named_limit.map_or("max_tokens", |(_, name)| name),
        usual_tokens: None,
        min_tokens: min_tokens as usize,
        stops: stops(fields)?,
        stop_tokens: fields.ids("stop_token_ids")?.unwrap_or_default(),
        ignore_eos: fields.bool("ignore_eos")?.unwrap_or(false),
        truncate: fields.whole("truncate_prompt_tokens", 1, most)?.map(|n| n as usize),
        form: constraint::read(fields)?,
        stream,
        include_usage,
        priority: priority(fields)?,
        targets: targets(fields)?,
        salt: fields.text("cache_salt")?.map_or(0, |salt| hash(&salt)),
        return_token_ids: fields.bool("return_token_ids")?.unwrap_or(false),
        tokens_as_ids: fields.bool("return_tokens_as_token_ids")?.unwrap_or(false),
        user: fields.text("user")?,
    })
}

/// A number that nobody chose.
pub(crate) fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// `targets`: milliseconds to the first token and from token to token.
fn targets(fields: &mut RequestFields) -> ApiResult<Targets> {
    let Some(mut fields) = fields.object("targets")? else { return Ok(Targets::default()) };
    let mut millis = |key| fields.whole(key, 1, 1 << 32).map(|n| n.map(Duration::from_millis));
    let targets = Targets { ttft: millis("ttft_ms")?, tpot: millis("tpot_ms")? };
    fields.done()?;
    Ok(targets)
}

fn hash(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}

/// Declares the fields of settings, which have their names.
macro_rules! settings {
    (choose { $($chosen:ident: $ct:ident = $cn:expr, $cv:literal $cd:expr, $cok:expr, $cwhy:literal, $chelp:literal;)* }
     adjust { $($adjusted:ident: $at:ident = $an:expr, $av:literal $ad:expr, $aok:expr, $awhy:literal, $ahelp:literal;)* }) => {
        /// Reads all scalar settings that the request has.
        fn read_settings(fields: &mut RequestFields, to: &mut Sampling) -> ApiResult<()> {
            $(to.$chosen.read(fields, stringify!($chosen))?;)*
            $(to.$adjusted.read(fields, stringify!($adjusted))?;)*
            Ok(())
        }
    };
}

sampler_settings!(settings);

/// A setting that stays as it is where the request does not have it.
trait SettingField {
    fn read(&mut self, fields: &mut RequestFields, name: &'static str) -> ApiResult<()>;
}

impl SettingField for f32 {
    fn read(&mut self, fields: &mut RequestFields, name: &'static str) -> ApiResult<()> {
        *self = fields.float(name)?.unwrap_or(*self);
        Ok(())
    }
}

impl SettingField for u32 {
    /// Where 0 stands for all tokens, so does vLLM's -1.
    fn read(&mut self, fields: &mut RequestFields, name: &'static str) -> ApiResult<()> {
        *self = fields.whole_or_all(name, *self == 0)?.unwrap_or(*self);
        Ok(())
    }
}

fn priority(fields: &mut RequestFields) -> ApiResult<i32> {
    let Some(value) = fields.take("priority") else { return Ok(0) };
    let number = value.as_i64().and_then(|p| i32::try_from(p).ok());
    number.ok_or_else(|| wrong("priority", &value, "a 32-bit whole number; lower values run first"))
}

fn stops(fields: &mut RequestFields) -> ApiResult<Vec<String>> {
    let list = match fields.take("stop") {
        None => Vec::new(),
        Some(Value::Array(list)) => list,
        Some(text @ Value::String(_)) => vec![text],
        Some(other) => return Err(wrong("stop", &other, "a string or a list of strings")),
    };
    if list.len() > MAX_STOPS {
        return Err(ApiError::param("stop", format!("has {} strings; the maximum is {MAX_STOPS}", list.len())));
    }
    let text = |(i, v): (usize, &Value)| match v.as_str() {
        Some(text) if (1..=LONGEST_STOP).contains(&text.len()) => Ok(text.to_owned()),
        _ => Err(wrong(&format!("stop[{i}]"), v, &format!("a string of 1 to {LONGEST_STOP} bytes"))),
    };
    list.iter().enumerate().map(text).collect()
}

fn logit_bias(fields: &mut RequestFields) -> ApiResult<Vec<(u32, f32)>> {
    let map = match fields.take("logit_bias") {
        None => return Ok(Vec::new()),
        Some(Value::Object(map)) => map,
        Some(other) => return Err(wrong("logit_bias", &other, "an object of token ids and numbers")),
    };
    if map.len() > MAX_BIASES {
        return Err(ApiError::param("logit_bias", format!("has {} tokens; the maximum is {MAX_BIASES}", map.len())));
    }
    let bias = |(id, value): (&String, &Value)| {
        let number = value.as_f64().map(|x| x as f32).filter(|x| (-100.0..=100.0).contains(x));
        match (id.parse::<u32>(), number) {
            (Ok(id), Some(number)) => Ok((id, number)),
            (Ok(_), None) => Err(wrong(&format!("logit_bias.{id}"), value, "a number from -100 to 100")),
            (Err(_), _) => Err(wrong("logit_bias", &json!(id), "an object whose keys are token ids, whole numbers")),
        }
    };
    map.iter().map(bias).collect()
}

/// Refuses a model that is not `served`.
pub(crate) fn check_model(asked: Option<&str>, served: &str) -> ApiResult<()> {
    match asked.filter(|asked| *asked != served) {
        Some(asked) => {
            let asked = shown(&json!(asked));
            let message = format!("the model {asked} does not exist; this server has {served:?}");
            Err(ApiError { param: Some("model".to_owned()), ..ApiError::not_found("model_not_found", message) })
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn common(text: &str) -> ApiResult<CommonParams> {
        let mut fields = RequestFields::body(text.as_bytes())?;
        let common = read(&mut fields, (&["max_completion_tokens", "max_tokens"], 1))?;
        fields.done()?;
        Ok(common)
    }

    #[test]
    fn defaults_are_openais() {
        let c = common("{}").unwrap();
        assert_eq!((c.sampling.temperature, c.sampling.top_p, c.sampling.top_k, c.n), (1.0, 1.0, 0, 1));
        assert!(!c.stream && !c.ignore_eos && c.max_tokens.is_none() && c.stops.is_empty());
        assert_ne!(common("{}").unwrap().sampling.seed, common("{}").unwrap().sampling.seed);
    }

    #[test]
    fn settings_are_read() {
        let c = common(
            r#"{"temperature": 0, "top_k": -1, "seed": 7, "stop": "x", "logit_bias": {"5": -100}, "max_tokens": 3,
                "max_completion_tokens": 2, "stream": true, "stream_options": {"include_usage": true}, "n": 2.0}"#,
        )
        .unwrap();
        assert_eq!((c.sampling.temperature, c.sampling.seed, c.max_tokens, c.n), (0.0, 7, Some(2), 2));
        assert_eq!((c.stops, c.sampling.logit_bias, c.include_usage), (vec!["x".into()], vec![(5, -100.0)], true));
    }

    #[test]
    fn settings_that_change_no_answer_are_accepted() {
        let text = r#"{"store": true, "metadata": {"a": "b"}, "safety_identifier": "u1", "prompt_cache_key": "k",
            "prediction": {"type": "content", "content": "x"}, "stop": null, "functions": null}"#;
        assert!(common(text).is_ok());
    }

    #[test]
    fn a_minimum_out_of_range_is_told_the_range() {
        let refused = |text: &str| common(text).unwrap_err().message;
        let says = "min_tokens: must be a whole number from 0 to max_tokens, which is 4, but is 5";
        assert_eq!(refused(r#"{"min_tokens": 5, "max_tokens": 4}"#), says);
        let says = "min_tokens: must be a whole number from 0 to the tokens that the context has room for behind the prompt, but is -1";
        assert_eq!(refused(r#"{"min_tokens": -1}"#), says);
    }

    #[test]
    fn mistakes_are_named() {
        for (text, param) in [
            (r#"{"temperature": -1}"#, "temperature"),
            (r#"{"temperature": "hot"}"#, "temperature"),
            (r#"{"top_p": 0}"#, "top_p"),
            (r#"{"top_k": -2}"#, "top_k"),
            (r#"{"n": 0}"#, "n"),
            (r#"{"n": 129}"#, "n"),
            (r#"{"max_tokens": 0}"#, "max_tokens"),
            (r#"{"max_tokens": 1e99}"#, "max_tokens"),
            (r#"{"min_tokens": 5, "max_tokens": 4}"#, "min_tokens"),
            (r#"{"stop": ""}"#, "stop[0]"),
            (r#"{"stop": [1]}"#, "stop[0]"),
            (r#"{"stop": {}}"#, "stop"),
            (r#"{"logit_bias": {"a": 1}}"#, "logit_bias"),
            (r#"{"logit_bias": {"1": 101}}"#, "logit_bias.1"),
            (r#"{"logit_bias": [1]}"#, "logit_bias"),
            (r#"{"stream_options": {"include_usage": true}}"#, "stream_options"),
            (r#"{"stream": true, "stream_options": {"usage": true}}"#, "stream_options.usage"),
            (r#"{"store": "yes"}"#, "store"),
            (r#"{"metadata": "x"}"#, "metadata"),
            (r#"{"service_tier": "flex"}"#, "service_tier"),
            (r#"{"seed": 1.5}"#, "seed"),
            (r#"{"stop_token_ids": [-1]}"#, "stop_token_ids[0]"),
            (r#"{"functions": []}"#, "functions"),
            (r#"{"dry_base": 0.5}"#, "dry_base"),
            (r#"{"targets": {"ttft_ms": 0}}"#, "targets.ttft_ms"),
            (r#"{"priority": 1e10}"#, "priority"),
        ] {
            assert_eq!(common(text).unwrap_err().param.as_deref(), Some(param), "{text}");
        }
    }

    #[test]
    fn other_models_are_not_found() {
        assert!(check_model(None, "a").is_ok() && check_model(Some("a"), "a").is_ok());
        assert_eq!(check_model(Some("b"), "a").unwrap_err().status.as_u16(), 404);
    }
}

//! What sentence-transformers' files say of a model: the modules that its texts go through, and how each is set.

use std::borrow::Cow;

use ridge_files::json;
use serde_json::json;

use crate::config::Fields;
use crate::dense::DenseLayer;
use crate::error::{ModelError, Result};
use crate::pooling::Pooling;

/// What sentence-transformers' files say of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SentenceConfig {
    /// How a text becomes a vector.
    pub pooling: Pooling,
    /// Layers that the vector then goes through, in order.
    pub dense: Vec<DenseLayer>,
    /// Divided by its Euclidean norm?
    pub normalize: bool,
    /// Tokens of a text at most, if said.
    pub max_tokens: Option<usize>,
    /// Text in front of every text: the prompt that `default_prompt_name` names.
    pub prompt: Option<String>,
    /// Are the scores of a classifier sigmoids of its logits, or the logits themselves, if said?
    pub sigmoid: Option<bool>,
    /// How a decoder scores texts instead, if it does.
    pub words: Option<WordScore>,
}

/// How a decoder scores a text by what it would write after it, as rerankers do that were trained to answer yes or no.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WordScore {
    /// The token of a good answer: a score is its logit,
    pub yes: u32,
    /// less that of a bad answer, if there is one.
    pub no: Option<u32>,
    /// Is the score the sigmoid of that? With both tokens it is the probability of `yes` among the two.
    pub sigmoid: bool,
}

impl Default for SentenceConfig {
    /// The mean, and nothing behind it.
    fn default() -> Self {
        Self {
            pooling: Pooling::Mean,
            dense: Vec::new(),
            normalize: false,
            max_tokens: None,
            prompt: None,
            sigmoid: None,
            words: None,
        }
    }
}

impl SentenceConfig {
    /// The folder of the pooling module.
    pub(crate) const POOLING: &str = "1_Pooling";

    /// Files that say `pooling`, by name.
    pub(crate) fn texts(pooling: Pooling) -> [(String, String); 2] {
        let module = |idx: usize, path: &str, kind: &str| {
            json!({
                "idx": idx, "name": idx.to_string(), "path": path, "type": format!("sentence_transformers.models.{kind}"),
            })
        };
        let modules = json!([module(0, "", "Transformer"), module(1, Self::POOLING, "Pooling")]);
        let (key, ..) = MODES.iter().find(|(.., mode)| *mode == Some(pooling)).unwrap_or(&MODES[0]);
        let config = json!({ *key: true });
        let named = |name: String, json: serde_json::Value| (name, format!("{json:#}\n"));
        [named("modules.json".into(), modules), named(format!("{}/config.json", Self::POOLING), config)]
    }

    /// Reads `modules.json`, the `config.json` of each module (`read` gives the text of a file of the model) and
    /// `sentence_bert_config.json` and `config_sentence_transformers.json`. `file` says what errors call a file.
    ///
    /// # Errors
    /// When a file is damaged, or asks for a module or a way of pooling that Ridge does not do.
    pub fn read(
        modules: &str,
        file: &dyn Fn(&str) -> String,
        read: &dyn Fn(&str) -> Result<Option<String>>,
    ) -> Result<Self> {
        let name = file("modules.json");
        let wrong = |key: &str, value: &str, problem: &str, remedy: &str| ModelError::Value {
            file: name.clone(),
            key: key.to_owned(),
            value: value.to_owned(),
            problem: problem.to_owned(),
            remedy: remedy.to_owned(),
        };
        let list: serde_json::Value = serde_json::from_str(modules)
            .map_err(|e| wrong("", "", &format!("is not JSON: {e}"), "download it again"))?;
        let modules = list.as_array().filter(|modules| modules.len() <= 16);
        let modules = modules.ok_or_else(|| wrong("", "", "is not a list of modules", "download it again"))?;
        let (mut config, mut pools_prompt) = (Self::default(), true);
        // The settings of the module in folder `path`.
        let settings = |path: &str| {
            if path.is_empty() || !path.chars().all(|c| c.is_ascii_alphanumeric() || "_-".contains(c)) {
                return Err(wrong("path", path, "is no folder of the model", "download it again"));
            }
            let settings = format!("{path}/config.json");
            let text = read(&settings)?;
            let text = text.ok_or_else(|| wrong("path", path, "holds no config.json", "download the whole model"))?;
            Ok((file(&settings), text))
        };
        for module in modules {
            let text = |key: &str| module[key].as_str().unwrap_or_default();
            let (kind, path) = (text("type"), text("path"));
            let class = kind.rsplit('.').next().unwrap_or_default();
            if config.normalize || class == "Pooling" && !config.dense.is_empty() {
                let remedy = "Ridge does a Pooling module, Dense modules and a Normalize module, in this order";
                return Err(wrong("type", kind, "is out of order", remedy));
            }
            match class {
                "Transformer" => {}
                "Normalize" => config.normalize = true,
                "Pooling" => {
                    let (name, text) = settings(path)?;
                    (config.pooling, pools_prompt) = pooling(&name, &text)?;
                }
                "Dense" => {
                    let (name, text) = settings(path)?;
                    config.dense.push(DenseLayer::read(path, &name, &text)?);
                }
                "LogitScore" => {
                    let (name, text) = settings(path)?;
                    config.words = Some(word_score(&name, &text)?);
                }
                _ => {
                    let remedy = "Ridge does Transformer, Pooling, Dense, Normalize and LogitScore modules; `--pooling` \
                                  overrides the file";
                    return Err(wrong("type", kind, "is not supported", remedy));
                }
            }
        }
        if let Some(text) = read(LIBRARY)? {
            config.read_library(&file(LIBRARY), &text, pools_prompt)?;
        }
        if let Some(text) = read("sentence_bert_config.json")? {
            let name = file("sentence_bert_config.json");
            let map = json::object(&name, text.as_bytes())?;
            let mut f = Fields::new(&name, &map);
            // Lower case is the tokenizer's own business; the others say which of a model's outputs are taken, and how
            // batches are padded.
            f.harmless(&[
                "do_lower_case",
                "transformer_task",
                "modality_config",
                "module_output_name",
                "processing_kwargs",
                "unpad_inputs",
            ]);
            config.max_tokens = f.optional_size("max_seq_length", 1 << 30)?;
            f.finish()?;
        }
        Ok(config)
    }

    /// Reads the default prompt and the activation of scores from the text of [`LIBRARY`]. `pools_prompt`: do the tokens of a
    /// prompt take part in pooling?
    fn read_library(&mut self, name: &str, text: &str, pools_prompt: bool) -> Result<()> {
        let map = json::object(name, text.as_bytes())?;
        let mut f = Fields::new(name, &map);
        // The similarity function compares vectors, and does not change them.
        f.harmless(&["__version__", "model_type", "similarity_fn_name"]);
        let prompts = f.raw("prompts");
        if let Some(default) = f.optional::<&str>(DEFAULT_PROMPT)? {
            let Some(prompt) = prompts.and_then(|prompts| prompts[default].as_str()) else {
                return Err(f.wrong(DEFAULT_PROMPT, "is none of `prompts`", "download the file again"));
            };
            if !pools_prompt && !prompt.is_empty() {
                let problem = "names a prompt whose tokens the Pooling module leaves out (`include_prompt` is false)";
                let remedy = "Ridge pools all tokens: set it to null to embed texts without a prompt";
                return Err(f.wrong(DEFAULT_PROMPT, problem, remedy));
            }
            self.prompt = Some(prompt.to_owned()).filter(|prompt| !prompt.is_empty());
        }
        self.sigmoid = sigmoid(&mut f)?;
        if let (Some(words), Some(sigmoid)) = (&mut self.words, self.sigmoid) {
            words.sigmoid = sigmoid;
        }
        f.finish()
    }

    /// `text` behind the default prompt, if there is one.
    pub fn prompted<'a>(&self, text: &'a str) -> Cow<'a, str> {
        match &self.prompt {
            Some(prompt) => Cow::Owned(format!("{prompt}{text}")),
            None => Cow::Borrowed(text),
        }
    }
}

/// How a module's `config.json` spells the ways of pooling, by a key that is true, and in newer files by the value of
/// [`MODE`]; `None` are those that Ridge does not do.
const MODES: [(&str, &str, Option<Pooling>); 6] = [
    ("pooling_mode_cls_token", "cls", Some(Pooling::Cls)),
    ("pooling_mode_mean_tokens", "mean", Some(Pooling::Mean)),
    ("pooling_mode_max_tokens", "max", Some(Pooling::Max)),
    ("pooling_mode_lasttoken", "lasttoken", Some(Pooling::Last)),
    ("pooling_mode_mean_sqrt_len_tokens", "mean_sqrt_len_tokens", None),
    ("pooling_mode_weightedmean_tokens", "weightedmean", None),
];
const MODE: &str = "pooling_mode";

/// The way of pooling that a module's `config.json` chooses, and whether it pools the tokens of a prompt.
fn pooling(name: &str, text: &str) -> Result<(Pooling, bool)> {
    const REMEDY: &str = "choose a model that pools by mean, cls, max or last token";
    let map = json::object(name, text.as_bytes())?;
    let mut f = Fields::new(name, &map);
    f.harmless(&["word_embedding_dimension", "embedding_dimension"]);
    let pools_prompt = f.optional::<bool>("include_prompt")?.unwrap_or(true);
    let mut chosen = None;
    if let Some(mode) = f.optional::<&str>(MODE)? {
        chosen = MODES.iter().find(|(_, newer, _)| *newer == mode).and_then(|(_, _, pooling)| *pooling);
        if chosen.is_none() {
            return Err(f.wrong(MODE, "is not supported", REMEDY));
        }
    }
    for (key, _, pooling) in MODES {
        if f.optional::<bool>(key)?.unwrap_or(false) {
            match (pooling, chosen) {
                (Some(pooling), None) => chosen = Some(pooling),
                (_, Some(_)) => return Err(f.wrong(key, "is a second way of pooling", "Ridge does one at a time")),
                (None, _) => return Err(f.wrong(key, "is not supported", REMEDY)),
            }
        }
    }
    let none = f.wrong("pooling_mode_mean_tokens", "is not chosen, and nothing else is", "download the file again");
    f.finish()?;
    Ok((chosen.ok_or(none)?, pools_prompt))
}

/// The file of prompts and of what becomes of scores.
const LIBRARY: &str = "config_sentence_transformers.json";
const DEFAULT_PROMPT: &str = "default_prompt_name";

/// The tokens that a `LogitScore` module's `config.json` names.
fn word_score(name: &str, text: &str) -> Result<WordScore> {
    let map = json::object(name, text.as_bytes())?;
    let mut f = Fields::new(name, &map);
    f.must_be("module_input_name", "causal_logits")?;
    let words = WordScore { yes: f.required("true_token_id")?, no: f.optional("false_token_id")?, sigmoid: true };
    f.finish()?;
    Ok(words)
}

/// Does the file say that scores are sigmoids, or logits, or nothing?
fn sigmoid(f: &mut Fields<'_>) -> Result<Option<bool>> {
    let activation: Option<&str> = f.optional("activation_fn")?;
    match activation.map(|activation| activation.rsplit('.').next().unwrap_or_default()) {
        None => Ok(None),
        Some("Sigmoid") => Ok(Some(true)),
        Some("Identity") => Ok(Some(false)),
        Some(_) => Err(f.wrong("activation_fn", "is not supported", "Ridge applies Sigmoid or Identity to scores")),
    }
}

//! A `tokenizer.json` as metadata: the inverse of `read.rs`.

use std::collections::{BTreeMap, HashMap};

use ridge_files::gguf::GgufWriter;
use serde_json::Value as Json;

use super::pretokenizers::named;
use crate::error::{Result, TextError};
use crate::tokenizer::Tokenizer;

/// The files of a tokenizer that is to be written as metadata.
#[derive(Clone, Debug)]
pub struct TokenizerSource {
    /// Path or name of the model, for errors.
    pub name: String,
    /// The text of `tokenizer.json`.
    pub json: String,
    /// The text of `tokenizer_config.json`, if there is one.
    pub config: Option<String>,
    /// The text of `chat_template.jinja`, if there is one. It replaces the template of `config`.
    pub chat_template: Option<String>,
}

/// Adds `tokenizer`, which was read from `source`, to the metadata of a model of `vocab_size` tokens. `ends` are the ids of
/// the tokens that end a text.
///
/// # Errors
///
/// [`TextError::Tokenizer`] if GGUF cannot express the tokenizer.
pub fn write_tokenizer(
    source: &TokenizerSource,
    tokenizer: &Tokenizer,
    vocab_size: usize,
    ends: &[u32],
    to: &mut GgufWriter,
) -> Result<()> {
    let text = &source.json;
    let fail = |problem: String| TextError::Tokenizer {
        file: source.name.clone(),
        problem,
        remedy: "GGUF cannot express it: run the model from its folder".to_owned(),
    };
    let json: Json = serde_json::from_str(text).map_err(|e| fail(format!("tokenizer.json is not JSON: {e}")))?;
    let mut pieces = Pieces::read(&json, tokenizer, vocab_size);
    let model = &json["model"];
    match model["type"].as_str().unwrap_or("BPE") {
        "BPE" if byte_level(&json["pre_tokenizer"]) => {
            let pre = expressions(&json["pre_tokenizer"]);
            let whole = model["ignore_merges"].as_bool().unwrap_or(false);
            let name = named(&pre, whole).ok_or_else(|| fail(format!("its pre-tokenizer is {pre:?}")))?;
            to.text("tokenizer.ggml.model", "gpt2");
            to.text("tokenizer.ggml.pre", name);
            let merges: Vec<String> = merges(model).map(|(left, right)| format!("{left} {right}")).collect();
            to.texts("tokenizer.ggml.merges", merges.iter().map(String::as_str));
        }
        "BPE" => {
            to.text("tokenizer.ggml.model", "llama");
            to.text("tokenizer.ggml.pre", "default");
            to.f32s("tokenizer.ggml.scores", &pieces.scores(model));
            to.bool(
                "tokenizer.ggml.add_space_prefix",
                text.contains("\"Prepend\"") || text.contains("\"always\"") || text.contains("\"first\""),
            );
        }
        "WordPiece" => {
            let normalizer = &json["normalizer"];
            let prefix = model["continuing_subword_prefix"].as_str();
            if prefix != Some("##") || normalizer["type"] != "BertNormalizer" || normalizer["lowercase"] == false {
                return Err(fail("it is a WordPiece tokenizer, but not BERT's lower-case variant".to_owned()));
            }
            to.text("tokenizer.ggml.model", "bert");
            to.text("tokenizer.ggml.pre", "default");
            pieces.mark_words();
        }
        other => return Err(fail(format!("its model is of type {other}"))),
    }
    to.texts("tokenizer.ggml.tokens", pieces.tokens.iter().map(String::as_str));
    to.i32s("tokenizer.ggml.token_type", &pieces.types);
    if let Some(unknown) = model["unk_token"].as_str().and_then(|token| tokenizer.token_to_id(token)) {
        to.u32("tokenizer.ggml.unknown_token_id", unknown);
    }
    special(tokenizer, ends, model["type"] == "WordPiece", to)?;
    if let Some(template) = template(source) {
        to.text("tokenizer.chat_template", &template);
    }
    Ok(())
}

/// Begin and end tokens. Whether they are added is seen from what becomes of a text.
fn special(tokenizer: &Tokenizer, ends: &[u32], encoder: bool, to: &mut GgufWriter) -> Result<()> {
    let (with, without) = (tokenizer.encode("a", true)?, tokenizer.encode("a", false)?);
    let at = with.windows(without.len().max(1)).position(|part| part == without).unwrap_or(0);
    let (before, after) = (&with[..at], &with[(at + without.len()).min(with.len())..]);
    if let Some(bos) = before.first().copied().or(tokenizer.bos()) {
        to.u32("tokenizer.ggml.bos_token_id", bos);
    }
    if let Some(eos) = after.last().copied().or(tokenizer.eos()).or(ends.first().copied()) {
        to.u32("tokenizer.ggml.eos_token_id", eos);
        if let Some(turn) = ends.iter().find(|id| **id != eos) {
            to.u32("tokenizer.ggml.eot_token_id", *turn);
        }
    }
    // An encoder's first and last tokens have names of their own there (one of them spelt so).
    if encoder {
        for (key, token) in [("cls_token_id", before.first()), ("seperator_token_id", after.last())] {
            if let Some(id) = token {
                to.u32(&format!("tokenizer.ggml.{key}"), *id);
            }
        }
    }
    to.bool("tokenizer.ggml.add_bos_token", !before.is_empty());
    to.bool("tokenizer.ggml.add_eos_token", !after.is_empty());
    Ok(())
}

/// The default chat template.
fn template(source: &TokenizerSource) -> Option<String> {
    if source.chat_template.is_some() {
        return source.chat_template.clone();
    }
    let config: Option<Json> = source.config.as_deref().and_then(|text| serde_json::from_str(text).ok());
    match config.as_ref().map(|config| &config["chat_template"]) {
        Some(Json::String(template)) => Some(template.clone()),
        Some(Json::Array(several)) => {
            let default = several.iter().find(|t| t["name"] == "default").or(several.first());
            default.and_then(|t| t["template"].as_str()).map(str::to_owned)
        }
        _ => None,
    }
}

/// Is the alphabet that of bytes?
fn byte_level(pre_tokenizer: &Json) -> bool {
    match pre_tokenizer["type"].as_str() {
        Some("ByteLevel") => true,
        Some("Sequence") => parts(pre_tokenizer).iter().any(byte_level),
        _ => false,
    }
}

fn parts(pre_tokenizer: &Json) -> &[Json] {
    pre_tokenizer["pretokenizers"].as_array().map_or(&[], Vec::as_slice)
}

/// The expressions that a text is cut by, in the order of the cuts.
fn expressions(pre_tokenizer: &Json) -> Vec<String> {
    match pre_tokenizer["type"].as_str() {
        Some("Sequence") => parts(pre_tokenizer).iter().flat_map(expressions).collect(),
        Some("Split") => pre_tokenizer["pattern"]["Regex"].as_str().map(str::to_owned).into_iter().collect(),
        Some("Digits") => {
            vec![if pre_tokenizer["individual_digits"] == true { r"\p{N}" } else { r"\p{N}+" }.to_owned()]
        }
        Some("Punctuation") => vec!["punctuation".to_owned()],
        // GPT-2's own expression.
        Some("ByteLevel") if pre_tokenizer["use_regex"] != false => vec![super::pretokenizers::GPT_2.to_owned()],
        _ => Vec::new(),
    }
}

/// Pairs of tokens, in the order in which they are merged.
fn merges(model: &Json) -> impl Iterator<Item = (&str, &str)> {
    let all = model["merges"].as_array().map_or(&[][..], Vec::as_slice);
    all.iter().filter_map(|merge| match merge {
        Json::String(both) => both.split_once(' '),
        Json::Array(pair) => Some((pair.first()?.as_str()?, pair.get(1)?.as_str()?)),
        _ => None,
    })
}

/// Every token of the model, by id.
struct Pieces {
    tokens: Vec<String>,
    /// As `tokenizer.ggml.token_type` has it.
    types: Vec<i32>,
}

impl Pieces {
    fn read(json: &Json, tokenizer: &Tokenizer, vocab_size: usize) -> Self {
        const NORMAL: i32 = 1;
        const UNKNOWN: i32 = 2;
        const CONTROL: i32 = 3;
        const USER_DEFINED: i32 = 4;
        const UNUSED: i32 = 5;
        const BYTE: i32 = 6;
        let added: BTreeMap<u64, bool> = json["added_tokens"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|token| Some((token["id"].as_u64()?, token["special"] == true)))
            .collect();
        let unknown = json["model"]["unk_token"].as_str();
        let bytes = json["model"]["byte_fallback"] == true;
        let is_byte = |token: &str| {
            let digits = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
            digits.is_some_and(|d| d.len() == 2 && u8::from_str_radix(d, 16).is_ok())
        };
        let (mut tokens, mut types) = (Vec::new(), Vec::new());
        for id in 0..vocab_size as u32 {
            let token = tokenizer.id_to_token(id);
            types.push(match (&token, added.get(&u64::from(id))) {
                (None, _) => UNUSED,
                (Some(token), _) if unknown == Some(token) => UNKNOWN,
                (_, Some(true)) => CONTROL,
                (_, Some(false)) => USER_DEFINED,
                (Some(token), None) if bytes && is_byte(token) => BYTE,
                _ => NORMAL,
            });
            tokens.push(token.unwrap_or_else(|| format!("[PAD{id}]")));
        }
        Self { tokens, types }
    }

    /// Marks the beginnings of words, where word pieces mark what continues them.
    fn mark_words(&mut self) {
        const CONTROL: i32 = 3;
        for (token, kind) in self.tokens.iter_mut().zip(&mut self.types) {
            // Nothing stands for what is unknown there but a control token.
            if matches!(kind, 2 | 3) {
                *kind = CONTROL;
                continue;
            }
            *token = match token.strip_prefix("##") {
                Some(continues) => continues.to_owned(),
                None => format!("\u{2581}{token}"),
            };
        }
    }

    /// Scores that merge in the order of the model's merges: that of a token is how early it is made.
    fn scores(&self, model: &Json) -> Vec<f32> {
        let mut ranks: HashMap<String, usize> = HashMap::new();
        for (rank, (left, right)) in merges(model).enumerate() {
            ranks.entry(format!("{left}{right}")).or_insert(rank);
        }
        let last = ranks.len() as f32;
        let score = |(token, kind): (&String, &i32)| match (ranks.get(token), kind) {
            (Some(rank), _) => -(*rank as f32) - 1.0,
            // What is never made of others comes after all that is.
            (None, 1) => -last - 1.0,
            _ => 0.0,
        };
        self.tokens.iter().zip(&self.types).map(score).collect()
    }
}

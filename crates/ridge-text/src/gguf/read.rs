//! Metadata as a `tokenizer.json` and a `tokenizer_config.json`.

use std::collections::BTreeMap;

use ridge_files::Gguf;
use ridge_files::gguf::GgufType;
use serde_json::{Map, Value as Json, json};

use super::pretokenizers::cut;
use super::world;
use crate::error::Result;

/// What a token is for, as `tokenizer.ggml.token_type` says.
const UNKNOWN: u64 = 2;
const CONTROL: u64 = 3;
const USER_DEFINED: u64 = 4;
const BYTE: u64 = 6;

/// A space, as SentencePiece spells it.
const SPACE: &str = "▁";

/// Tokens that end an answer, as chat models spell them.
const ENDS: [&str; 8] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<turn|>",
    "<|tool_response>",
];

/// A vocabulary, and what the file says of it.
struct Vocabulary<'a> {
    gguf: &'a Gguf,
    /// `llama`, `gpt2`, `bert`, `t5`, `gemma4` or `rwkv`.
    model: String,
    tokens: Vec<String>,
    /// What each token is for; empty if the file does not say.
    types: Vec<u64>,
}

/// The texts of a `tokenizer.json` and a `tokenizer_config.json` that describe the tokenizer of `gguf`, chat templates
/// included.
///
/// # Errors
///
/// [`FilesError::Gguf`](ridge_files::FilesError::Gguf) if there is no tokenizer, or one of an unknown kind.
pub fn tokenizer_json(gguf: &Gguf) -> Result<(String, String)> {
    let vocabulary = Vocabulary::read(gguf)?;
    let (tokenizer, begins, ends) = match vocabulary.model.as_str() {
        "llama" => (vocabulary.sentencepiece()?, true, false),
        "gpt2" => vocabulary.byte_level()?,
        "bert" => (vocabulary.word_piece()?, true, true),
        "t5" => (vocabulary.unigram()?, false, true),
        "gemma4" => (vocabulary.merged_spaces()?, true, false),
        "rwkv" => (vocabulary.longest_match(), false, false),
        other => {
            let problem = format!("tokenizer.ggml.model = {other:?} is not a supported tokenizer type");
            return Err(gguf
                .fail(problem, "choose a model with a tokenizer of llama, gpt2, bert, t5, gemma4 or rwkv")
                .into());
        }
    };
    Ok((tokenizer.to_string(), vocabulary.config(begins, ends)?.to_string()))
}

/// The ids of the tokens that end an answer: those that the file names, and those with well-known spellings. Empty if it
/// has no tokenizer.
///
/// # Errors
///
/// [`FilesError::Gguf`](ridge_files::FilesError::Gguf) if a key has the wrong type.
pub fn end_tokens(gguf: &Gguf) -> Result<Vec<u64>> {
    if gguf.array("tokenizer.ggml.tokens")?.is_none() {
        return Ok(Vec::new());
    }
    let vocabulary = Vocabulary::read(gguf)?;
    let mut ends = Vec::new();
    for name in ["eos", "eot", "eom"] {
        ends.extend(vocabulary.id(name)?);
    }
    for (id, token) in vocabulary.tokens.iter().enumerate() {
        if ENDS.contains(&token.as_str()) && matches!(vocabulary.kind(id), CONTROL | USER_DEFINED) {
            ends.push(id as u64);
        }
    }
    let mut seen = Vec::new();
    ends.retain(|id| {
        !seen.contains(id) && {
            seen.push(*id);
            true
        }
    });
    Ok(ends)
}

impl<'a> Vocabulary<'a> {
    fn read(gguf: &'a Gguf) -> Result<Self> {
        const MODEL: &str = "tokenizer.ggml.model";
        const TOKENS: &str = "tokenizer.ggml.tokens";
        const TYPES: &str = "tokenizer.ggml.token_type";
        let model = gguf.needed(MODEL, gguf.text(MODEL)?)?.to_owned();
        let mut tokens = gguf.needed(TOKENS, gguf.texts(TOKENS)?)?;
        let types = match gguf.array(TYPES)? {
            None => Vec::new(),
            Some(array) if array.len != 0 && array.len != tokens.len() => {
                return Err(gguf
                    .wrong(TYPES, &format!("has {} entries for {} tokens", array.len, tokens.len()))
                    .into());
            }
            Some(array) => gguf.elements(array).map(|value| value.as_u64().unwrap_or_default()).collect(),
        };
        // A spelling stands for its first token; the others can be generated, not read.
        let mut seen = std::collections::HashSet::new();
        for (id, token) in tokens.iter_mut().enumerate() {
            if !seen.insert(token.clone()) {
                *token = format!("<duplicate {id}>");
            }
        }
        Ok(Self { gguf, model, tokens, types })
    }

    fn kind(&self, id: usize) -> u64 {
        self.types.get(id).copied().unwrap_or(1)
    }

    /// The token called `name`, such as `eos`, if the file names one of the vocabulary. The unknown token may be told by
    /// its type alone.
    fn id(&self, name: &str) -> Result<Option<u64>> {
        let mut id = self.gguf.int(&format!("tokenizer.ggml.{name}_token_id"))?;
        if id.is_none() && name == "unknown" {
            id = self.types.iter().position(|kind| *kind == UNKNOWN).map(|id| id as u64);
        }
        Ok(id.filter(|id| usize::try_from(*id).is_ok_and(|id| id < self.tokens.len())))
    }

    fn spelling(&self, name: &str) -> Result<Option<&str>> {
        Ok(self.id(name)?.map(|id| self.tokens[id as usize].as_str()))
    }

    fn flag(&self, name: &str, default: bool) -> Result<bool> {
        Ok(self.gguf.flag(&format!("tokenizer.ggml.{name}"))?.unwrap_or(default))
    }

    fn scores(&self) -> Result<Vec<f64>> {
        const SCORES: &str = "tokenizer.ggml.scores";
        let scores = self.gguf.needed(SCORES, self.gguf.floats(SCORES)?)?;
        if scores.len() != self.tokens.len() {
            let problem = format!("has {} entries for {} tokens", scores.len(), self.tokens.len());
            return Err(self.gguf.wrong(SCORES, &problem).into());
        }
        Ok(scores)
    }

    /// Ids by spelling.
    fn ids(&self) -> Map<String, Json> {
        self.spelt().map(|(id, token)| (token.clone(), Json::from(id))).collect()
    }

    /// Every token that stands for something, with its id.
    fn spelt(&self) -> impl Iterator<Item = (usize, &String)> {
        self.tokens.iter().enumerate().filter(|(id, _)| !self.is_filler(*id))
    }

    /// Does the entry only fill the vocabulary up to the rows of an embedding that has more of them than the tokenizer has
    /// tokens? Converters call it `[PAD151936]` by its id. Such an id stands for no text, as where the tokenizer is read from
    /// `tokenizer.json`.
    fn is_filler(&self, id: usize) -> bool {
        const NORMAL: u64 = 1;
        let digits = self.tokens[id].strip_prefix("[PAD").and_then(|rest| rest.strip_suffix(']'));
        digits.is_some_and(|digits| digits.parse() == Ok(id)) && self.kind(id) != NORMAL
    }

    /// Tokens that are found in a text before anything else is: control tokens, and those that the model's authors
    /// defined.
    fn added(&self) -> Vec<Json> {
        // Phi-3's tokens swallow the white space behind them.
        let phi = self.gguf.text("general.architecture").ok().flatten() == Some("phi3");
        let bare = ["<unk>", "<s>", "<|endoftext|>"];
        let added = self.spelt().filter(|(id, token)| {
            !token.is_empty() && (matches!(self.kind(*id), CONTROL | USER_DEFINED) || self.is_unknown(*id))
        });
        let entry = |(id, token): (usize, &String)| {
            json!({
                "id": id, "content": token, "single_word": false, "lstrip": false,
                "rstrip": phi && !bare.contains(&token.as_str()), "normalized": false,
                "special": self.kind(id) != USER_DEFINED,
            })
        };
        added.map(entry).collect()
    }

    /// Is it the one token for what is not in the vocabulary?
    fn is_unknown(&self, id: usize) -> bool {
        self.kind(id) == UNKNOWN && self.id("unknown").ok().flatten() == Some(id as u64)
    }

    fn parts(&self, model: Json, parts: [(&str, Json); 3]) -> Json {
        let mut out = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": self.added(),
            "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": null, "model": model,
        });
        for (name, part) in parts {
            out[name] = part;
        }
        out
    }

    /// SentencePiece's byte-pair encoding: of two neighbours that make a token, those whose token has the highest score
    /// are merged first. A merge's rank is that of its token's score.
    fn sentencepiece(&self) -> Result<Json> {
        let scores = self.scores()?;
        let ids: BTreeMap<&str, usize> = self.spelt().map(|(id, t)| (t.as_str(), id)).collect();
        let mut merges = Vec::new();
        for (id, token) in self.spelt() {
            if matches!(self.kind(id), UNKNOWN | CONTROL | BYTE) {
                continue;
            }
            for (at, _) in token.char_indices().skip(1) {
                let (left, right) = token.split_at(at);
                if let (Some(left), Some(right)) = (ids.get(left), ids.get(right)) {
                    merges.push((scores[id], id, *left, *right));
                }
            }
        }
        merges.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2, a.3).cmp(&(b.1, b.2, b.3))));
        let merges: Vec<Json> = merges.iter().map(|(_, _, l, r)| json!([self.tokens[*l], self.tokens[*r]])).collect();
        let bytes = (0..self.tokens.len()).any(|id| self.kind(id) == BYTE);
        let model = json!({
            "type": "BPE", "dropout": null, "unk_token": self.spelling("unknown")?, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": bytes, "ignore_merges": false,
            "vocab": self.ids(), "merges": merges,
        });
        self.of_spaces(model, Vec::new(), self.flag("add_space_prefix", true)?)
    }

    /// Byte-pair encoding of characters by merges, where spaces are letters: Gemma 4. Lines are cut apart, as llama.cpp cuts
    /// them.
    fn merged_spaces(&self) -> Result<Json> {
        let model = json!({
            "type": "BPE", "dropout": null, "unk_token": self.spelling("unknown")?, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": self.ids(), "merges": self.merges()?,
        });
        let mut tokenizer = self.of_spaces(model, Vec::new(), self.flag("add_space_prefix", false)?)?;
        tokenizer["pre_tokenizer"] =
            json!({ "type": "Split", "pattern": { "Regex": "[^\\n]+|\\n+" }, "behavior": "Isolated", "invert": false });
        Ok(tokenizer)
    }

    /// A tokenizer that sees spaces as letters, one of which is put before each text if there is a `prefix`, and is of bytes
    /// where it has no tokens. `normalizers` go ahead.
    fn of_spaces(&self, model: Json, mut normalizers: Vec<Json>, prefix: bool) -> Result<Json> {
        let mut decoders = vec![
            json!({ "type": "Replace", "pattern": { "String": SPACE }, "content": " " }),
            json!({ "type": "ByteFallback" }),
            json!({ "type": "Fuse" }),
        ];
        if prefix {
            normalizers.push(json!({ "type": "Prepend", "prepend": SPACE }));
            decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
        }
        normalizers.push(json!({ "type": "Replace", "pattern": { "String": " " }, "content": SPACE }));
        Ok(self.parts(
            model,
            [
                ("normalizer", json!({ "type": "Sequence", "normalizers": normalizers })),
                ("pre_tokenizer", Json::Null),
                ("decoder", json!({ "type": "Sequence", "decoders": decoders })),
            ],
        ))
    }

    /// Pairs of tokens that are merged, first those that come first.
    fn merges(&self) -> Result<Vec<Json>> {
        const MERGES: &str = "tokenizer.ggml.merges";
        let merges = self.gguf.needed(MERGES, self.gguf.texts(MERGES)?)?;
        let mut pairs = Vec::with_capacity(merges.len());
        for merge in &merges {
            // A token may begin with a space, and none has one elsewhere.
            let at = merge.char_indices().skip(1).find(|(_, c)| *c == ' ');
            let Some((at, _)) = at else {
                return Err(self.gguf.wrong(MERGES, &format!("has {merge:?}, which is not a pair of tokens")).into());
            };
            pairs.push(json!([merge[..at], merge[at + 1..]]));
        }
        Ok(pairs)
    }

    /// Byte-pair encoding of bytes, as GPT-2 has it.
    fn byte_level(&self) -> Result<(Json, bool, bool)> {
        let pre = self.gguf.text("tokenizer.ggml.pre")?.unwrap_or("default");
        let Some(cut) = cut(pre) else {
            let problem = format!("tokenizer.ggml.pre = {pre:?} is an unknown pre-tokenizer");
            return Err(self
                .gguf
                .fail(problem, "convert the model from its Hugging Face folder, or use that folder")
                .into());
        };
        let model = json!({
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": cut.whole,
            "vocab": self.ids(), "merges": self.merges()?,
        });
        let split = |expression: &&str| json!({ "type": "Split", "pattern": { "Regex": expression }, "behavior": "Isolated", "invert": false });
        let mut cuts: Vec<Json> = cut.expressions.iter().map(split).collect();
        let prefix = self.flag("add_space_prefix", false)?;
        cuts.push(json!({ "type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true, "use_regex": false }));
        let tokenizer = self.parts(
            model,
            [
                ("normalizer", Json::Null),
                ("pre_tokenizer", json!({ "type": "Sequence", "pretokenizers": cuts })),
                (
                    "decoder",
                    json!({ "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true }),
                ),
            ],
        );
        Ok((tokenizer, cut.bos, false))
    }

    /// The longest token of bytes that a text begins with: RWKV.
    fn longest_match(&self) -> Json {
        let bytes =
            json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false });
        let model = world::model(self.spelt(), |id| matches!(self.kind(id), CONTROL | USER_DEFINED));
        self.parts(model, [("normalizer", Json::Null), ("pre_tokenizer", bytes.clone()), ("decoder", bytes)])
    }

    /// BERT's word pieces. The file marks the beginnings of words, the library what continues them.
    fn word_piece(&self) -> Result<Json> {
        const PREFIX: &str = "##";
        let spelt = |(id, token): (usize, &String)| {
            let token = match token.strip_prefix(SPACE) {
                Some(begins) => begins.to_owned(),
                None if matches!(self.kind(id), CONTROL | UNKNOWN) => token.clone(),
                None => format!("{PREFIX}{token}"),
            };
            (token, Json::from(id))
        };
        let vocabulary: Map<String, Json> = self.tokens.iter().enumerate().map(spelt).collect();
        let unknown = self.spelling("unknown")?.unwrap_or("[UNK]");
        let model = json!({
            "type": "WordPiece", "unk_token": unknown, "continuing_subword_prefix": PREFIX,
            "max_input_chars_per_word": 100, "vocab": vocabulary,
        });
        Ok(self.parts(model, [
            ("normalizer", json!({
                "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null,
                "lowercase": true,
            })),
            ("pre_tokenizer", json!({ "type": "BertPreTokenizer" })),
            ("decoder", json!({ "type": "WordPiece", "prefix": PREFIX, "cleanup": true })),
        ]))
    }

    /// SentencePiece's unigram model.
    fn unigram(&self) -> Result<Json> {
        let scores = self.scores()?;
        let vocabulary: Vec<Json> = self.tokens.iter().zip(scores).map(|(t, s)| json!([t, s])).collect();
        let bytes = (0..self.tokens.len()).any(|id| self.kind(id) == BYTE);
        let model = json!({
            "type": "Unigram", "unk_id": self.id("unknown")?, "vocab": vocabulary, "byte_fallback": bytes,
        });
        let mut normalizers = Vec::new();
        if let Some(array) = self.gguf.array("tokenizer.ggml.precompiled_charsmap")?
            && matches!(array.kind, GgufType::U8 | GgufType::I8)
            && array.len > 0
        {
            let map = base64(self.gguf.array_bytes(array));
            normalizers.push(json!({ "type": "Precompiled", "precompiled_charsmap": map }));
        }
        if self.flag("remove_extra_whitespaces", false)? {
            for (spaces, one) in [("^ +| +$", ""), (" {2,}", " ")] {
                normalizers.push(json!({ "type": "Replace", "pattern": { "Regex": spaces }, "content": one }));
            }
        }
        self.of_spaces(model, normalizers, self.flag("add_space_prefix", true)?)
    }

    /// The text of `tokenizer_config.json`. `begins` and `ends` say what is added where the file does not.
    fn config(&self, begins: bool, ends: bool) -> Result<Json> {
        let (bos, eos) = match self.model.as_str() {
            "bert" => {
                (self.spelling("cls")?.or(self.spelling("bos")?), self.spelling("seperator")?.or(self.spelling("eos")?))
            }
            _ => (self.spelling("bos")?, self.spelling("eos")?),
        };
        let mut out = Map::new();
        let named = [("bos_token", bos), ("eos_token", eos), ("unk_token", self.spelling("unknown")?)];
        for (key, token) in named.into_iter().chain([("pad_token", self.spelling("padding")?)]) {
            if let Some(token) = token {
                out.insert(key.into(), token.into());
            }
        }
        out.insert("add_bos_token".into(), (self.flag("add_bos_token", begins)? && bos.is_some()).into());
        out.insert("add_eos_token".into(), (self.flag("add_eos_token", ends)? && eos.is_some()).into());
        let mut templates = Vec::new();
        if let Some(template) = self.gguf.text("tokenizer.chat_template")? {
            let template = if template == world::TEMPLATE_NAME { world::TEMPLATE } else { template };
            templates.push(("default".to_owned(), template.to_owned()));
        }
        for name in self.gguf.texts("tokenizer.chat_templates")?.unwrap_or_default() {
            if let Some(template) = self.gguf.text(&format!("tokenizer.chat_template.{name}"))? {
                templates.push((name, template.to_owned()));
            }
        }
        match &templates[..] {
            [] => {}
            [(name, only)] if name == "default" => {
                out.insert("chat_template".into(), only.as_str().into());
            }
            several => {
                let each = several.iter().map(|(name, template)| json!({ "name": name, "template": template }));
                out.insert("chat_template".into(), each.collect());
            }
        }
        Ok(Json::Object(out))
    }
}

/// Base64 with padding (RFC 4648, section 4).
fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let word = chunk.iter().enumerate().fold(0u32, |word, (i, b)| word | u32::from(*b) << (16 - 8 * i));
        for i in 0..4 {
            let symbol = ALPHABET[(word >> (18 - 6 * i) & 63) as usize];
            out.push(if i <= chunk.len() { char::from(symbol) } else { '=' });
        }
    }
    out
}

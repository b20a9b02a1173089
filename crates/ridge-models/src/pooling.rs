//! One vector for a text, from those of its tokens, as sentence-transformers makes them (Reimers and Gurevych 2019,
//! "Sentence-BERT", section 3).

use std::fmt;

use ridge_files::json;
use ridge_graph::{Builder, DType, Dim, Graph, GraphError, Result as GraphResult, Shape, Type, Var};
use serde_json::json;

use crate::config::Fields;
use crate::error::{ModelError, Result};
use crate::model::symbols;

/// How the vectors of a text's tokens become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// Their mean.
    Mean,
    /// The first token's, as BERT has a token for it.
    Cls,
    /// The last token's, which alone has seen all others in a decoder.
    Last,
    /// The largest of each element.
    Max,
}

impl Pooling {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Mean, Self::Cls, Self::Last, Self::Max];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mean => "mean",
            Self::Cls => "cls",
            Self::Last => "last",
            Self::Max => "max",
        }
    }

    /// The output of [`with_pooling`] that has it, divided by its Euclidean norm or not.
    pub fn output(self, normalized: bool) -> String {
        format!("{}{}", self.name(), if normalized { "_normalized" } else { "" })
    }
}

impl fmt::Display for Pooling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// `graph`, which has an output `hidden`, f32 `[tokens, hidden]`, with an f32 `[seqs, hidden]` output for each way of
/// pooling it over the rows of the step: see [`Pooling::output`].
///
/// # Errors
/// When the graph has no output `hidden`.
pub fn with_pooling(graph: &Graph) -> GraphResult<Graph> {
    let (mut g, mut outputs) = Builder::reopen(graph.clone());
    let hidden = outputs.iter().find(|(name, _)| name == "hidden").map(|(_, var)| *var);
    let hidden = hidden
        .ok_or_else(|| GraphError::Use { at: "pooling".into(), why: "the graph has no output `hidden`".to_owned() })?;
    for pooling in Pooling::ALL {
        let pooled = g.scoped("pooling", |g| pool(g, pooling, hidden))?;
        let normal = g.scoped("pooling", |g| normalize(g, pooled))?;
        outputs.extend([(pooling.output(false), pooled), (pooling.output(true), normal)]);
    }
    g.finish(outputs)
}

/// `hidden`, f32 `[tokens, hidden]`, pooled over the rows of the step: f32 `[seqs, hidden]`.
pub(crate) fn pool(g: &mut Builder, pooling: Pooling, hidden: Var) -> GraphResult<Var> {
    let (tokens, seqs) = (Dim::sym(symbols::TOKENS), Dim::sym(symbols::SEQS));
    let one = Dim::from(1);
    let width = g.ty(hidden)?.shape.last();
    let seq_ids = g.step_input("seq_ids", Type::tensor(DType::I32, [&tokens]))?;
    let starts = g.step_input("query_start", Type::tensor(DType::I32, [seqs.clone() + 1]))?;
    let bounds = |g: &mut Builder, from: usize| g.slice(starts, 0, from, &seqs);
    // Is each token of each row's text? `[seqs, tokens]`.
    let member = |g: &mut Builder| {
        let ids = g.reshape(seq_ids, Shape(vec![one.clone(), tokens.clone()]))?;
        let rows = g.iota(Shape(vec![seqs.clone(), one.clone()]), 0, DType::I32)?;
        g.eq(rows, ids)
    };
    match pooling {
        Pooling::Cls => {
            let first = bounds(g, 0)?;
            g.gather(hidden, first, 0)
        }
        Pooling::Last => {
            let end = bounds(g, 1)?;
            let one = g.constant(DType::I32, 1.0)?;
            let last = g.sub(end, one)?;
            g.gather(hidden, last, 0)
        }
        Pooling::Mean => {
            let member = member(g)?;
            let member = g.cast(member, DType::F32)?;
            let sum = g.matmul(member, hidden, false, false, DType::F32)?;
            let count = g.reduce_sum(member, 1)?;
            let least = g.constant(DType::F32, 1.0)?;
            let count = g.max(count, least)?;
            g.div(sum, count)
        }
        Pooling::Max => {
            let member = member(g)?;
            let member = g.reshape(member, Shape(vec![seqs.clone(), tokens.clone(), one.clone()]))?;
            let hidden = g.reshape(hidden, Shape(vec![one.clone(), tokens.clone(), width.clone()]))?;
            let least = g.constant(DType::F32, f64::from(f32::MIN))?;
            let of_row = g.select(member, hidden, least)?;
            let largest = g.reduce_max(of_row, 1)?;
            g.reshape(largest, Shape(vec![seqs.clone(), width]))
        }
    }
}

/// Rows divided by their Euclidean norms, which count as 1e-12 at least (torch's `normalize`).
fn normalize(g: &mut Builder, x: Var) -> GraphResult<Var> {
    let squares = g.mul(x, x)?;
    let sum = g.reduce_sum(squares, 1)?;
    let norm = g.sqrt(sum)?;
    let least = g.constant(DType::F32, 1e-12)?;
    let norm = g.max(norm, least)?;
    g.div(x, norm)
}

/// What sentence-transformers' files say of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SentenceConfig {
    /// How a text becomes a vector.
    pub pooling: Pooling,
    /// Divided by its Euclidean norm?
    pub normalize: bool,
    /// Tokens of a text at most, if said.
    pub max_tokens: Option<usize>,
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
        let (key, _) = MODES.iter().find(|(_, mode)| *mode == Some(pooling)).unwrap_or(&MODES[0]);
        let config = json!({ *key: true });
        let named = |name: String, json: serde_json::Value| (name, format!("{json:#}\n"));
        [named("modules.json".into(), modules), named(format!("{}/config.json", Self::POOLING), config)]
    }

    /// Reads `modules.json`, the pooling module's `config.json` (`read` gives the text of a file of the model) and
    /// `sentence_bert_config.json`. `file` says what errors call a file.
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
        let mut config = Self { pooling: Pooling::Mean, normalize: false, max_tokens: None };
        for module in modules {
            let text = |key: &str| module[key].as_str().unwrap_or_default();
            let (kind, path) = (text("type"), text("path"));
            match kind.rsplit('.').next().unwrap_or_default() {
                "Transformer" => {}
                "Normalize" => config.normalize = true,
                "Pooling" => {
                    if !path.chars().all(|c| c.is_ascii_alphanumeric() || "_-".contains(c)) {
                        return Err(wrong("path", path, "is no folder of the model", "download it again"));
                    }
                    let of_pooling = format!("{path}/config.json");
                    let text = read(&of_pooling)?
                        .ok_or_else(|| wrong("path", path, "holds no config.json", "download the whole model"))?;
                    config.pooling = pooling(&file(&of_pooling), &text)?;
                }
                _ => {
                    let remedy =
                        "Ridge does Transformer, Pooling and Normalize modules; `--pooling` overrides the file";
                    return Err(wrong("type", kind, "is not supported", remedy));
                }
            }
        }
        if let Some(text) = read("sentence_bert_config.json")? {
            let name = file("sentence_bert_config.json");
            let map = json::object(&name, text.as_bytes())?;
            let mut f = Fields::new(&name, &map);
            // Lower case is the tokenizer's own business.
            f.harmless(&["do_lower_case"]);
            config.max_tokens = f.optional_size("max_seq_length", 1 << 30)?;
            f.finish()?;
        }
        Ok(config)
    }
}

/// How a module's `config.json` spells the ways of pooling; `None` are those that Ridge does not do.
const MODES: [(&str, Option<Pooling>); 6] = [
    ("pooling_mode_cls_token", Some(Pooling::Cls)),
    ("pooling_mode_mean_tokens", Some(Pooling::Mean)),
    ("pooling_mode_max_tokens", Some(Pooling::Max)),
    ("pooling_mode_lasttoken", Some(Pooling::Last)),
    ("pooling_mode_mean_sqrt_len_tokens", None),
    ("pooling_mode_weightedmean_tokens", None),
];

/// The way of pooling that a module's `config.json` chooses.
fn pooling(name: &str, text: &str) -> Result<Pooling> {
    let map = json::object(name, text.as_bytes())?;
    let mut f = Fields::new(name, &map);
    f.harmless(&["word_embedding_dimension", "include_prompt"]);
    let mut chosen = None;
    for (key, pooling) in MODES {
        if f.optional::<bool>(key)?.unwrap_or(false) {
            match (pooling, chosen) {
                (Some(pooling), None) => chosen = Some(pooling),
                (_, Some(_)) => return Err(f.wrong(key, "is a second way of pooling", "Ridge does one at a time")),
                (None, _) => {
                    return Err(f.wrong(
                        key,
                        "is not supported",
                        "choose a model that pools by mean, cls, max or last token",
                    ));
                }
            }
        }
    }
    let none = f.wrong("pooling_mode_mean_tokens", "is not chosen, and nothing else is", "download the file again");
    f.finish()?;
    chosen.ok_or(none)
}

//! `/v1/rerank` (as Cohere, Jina and vLLM have it) and `/v1/score` (as vLLM has it): how well documents answer a query. A
//! cross-encoder scores each pair of texts, and an encoder of embeddings compares their vectors.

use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::http::{Response, StatusCode};
use ridge_engine::{TextTokens, similarities};
use ridge_text::Tokenizer;
use serde_json::{Value, json};

use crate::app::{App, ModelWorker, new_id, unix_now};
use crate::embedding::EmbedWorker;
use crate::error::{ApiError, ApiResult, json_response};
use crate::pairs::{render_pair, renders_instructions};
use crate::wire::fields::{RequestFields, wrong};
use crate::wire::sampling::check_model;

/// Documents of a request at most.
const MAX_DOCUMENTS: usize = 4096;

/// Texts whose relevance is asked for.
struct TextPairs {
    /// Tokens of what the worker computes: pairs, or texts alone, each once.
    texts: Vec<TextTokens>,
    /// Of texts alone, the indices of each pair's two.
    pairs: Vec<[usize; 2]>,
    tokens: usize,
}

/// The worker that scores texts.
fn scorer(app: &App) -> ApiResult<&EmbedWorker> {
    let unsupported = |why: String| ApiError::not_found("model_not_supported", format!("{} {why}", app.model.name));
    match &app.worker {
        ModelWorker::Embedder(worker) if worker.labels <= 1 => Ok(worker),
        ModelWorker::Embedder(worker) => {
            let labels = worker.labels;
            Err(unsupported(format!("is a classifier with {labels} labels; relevance needs a model with one")))
        }
        ModelWorker::Engine(_) => Err(unsupported(
            "is served to generate text; relevance needs an encoder, a decoder of embeddings, or one that was trained to answer yes \
             or no (`ridge serve --rerank`)"
                .to_owned(),
        )),
    }
}

/// How pairs are judged, besides their texts.
#[derive(Default)]
struct Judgement {
    /// What a query asks for, of a model whose template has a place for that.
    instruction: Option<String>,
    /// Tokens of a pair or a text at most; longer ones are cut.
    cut: Option<usize>,
}

impl Judgement {
    fn read(app: &App, fields: &mut RequestFields) -> ApiResult<Self> {
        let instruction = fields.text("instruction")?;
        if let Some(instruction) = &instruction {
            app.check_length("instruction", instruction)?;
            if !renders_instructions(&app.model.templates) {
                let message = "the model has no template with a place for instructions";
                return Err(ApiError::unsupported("instruction", message.to_owned()));
            }
        }
        let instruction = instruction.or_else(|| app.model.prompt.clone());
        let cut = fields.whole("truncate_prompt_tokens", 1, u64::from(u32::MAX))?.map(|n| n as usize);
        Ok(Self { instruction, cut })
    }
}

/// The tokens of `pairs` of texts, called so in errors, for a worker that takes at most `most` tokens and, if `classifies`,
/// pairs.
fn tokenised(
    app: &App,
    pairs: &[[(&str, &str); 2]],
    (most, classifies): (usize, bool),
    judgement: &Judgement,
) -> ApiResult<TextPairs> {
    let most = judgement.cut.map_or(most, |cut| cut.min(most));
    let mut made = TextPairs { texts: Vec::new(), pairs: Vec::new(), tokens: 0 };
    let mut seen: Vec<(&str, usize)> = Vec::new();
    for [first, second] in pairs {
        let tokenizer = app.tokenizer(second.0)?;
        if classifies {
            app.check_length(first.0, first.1)?;
            app.check_length(second.0, second.1)?;
            let named = |error| ApiError::param(second.0, error);
            made.pairs.push([made.texts.len(); 2]);
            made.texts.push(match app.model.templates.is_empty() {
                true => {
                    let (ids, segments) = tokenizer.encode_pair(first.1, second.1, most).map_err(named)?;
                    TextTokens { ids, segments }
                }
                false => prompt_tokens(app, tokenizer, most, judgement, [*first, *second])?.into(),
            });
            continue;
        }
        let mut places = [0; 2];
        for (place, (param, text)) in places.iter_mut().zip([first, second]) {
            *place = match seen.iter().find(|(known, _)| known == text) {
                Some((_, at)) => *at,
                None => {
                    app.check_length(param, text)?;
                    let prompt = app.model.prompt.as_deref().unwrap_or_default();
                    let ids = tokenizer
                        .encode_truncated(&format!("{prompt}{text}"), most)
                        .map_err(|e| ApiError::param(*param, e))?;
                    if ids.is_empty() {
                        return Err(ApiError::param(*param, "has no tokens"));
                    }
                    seen.push((text, made.texts.len()));
                    made.texts.push(TextTokens::from(ids));
                    made.texts.len() - 1
                }
            };
        }
        made.pairs.push(places);
    }
    made.tokens = made.texts.iter().map(|text| text.ids.len()).sum();
    Ok(made)
}

/// The tokens of the prompt of a query and a document, `most` at most: the document is cut where they are more.
fn prompt_tokens(
    app: &App,
    tokenizer: &Tokenizer,
    most: usize,
    judgement: &Judgement,
    [(query_name, query), (document_name, document)]: [(&str, &str); 2],
) -> ApiResult<Vec<u32>> {
    let encode = |instruction: Option<&str>, document: &str, most: usize| {
        let whole = |document: &str| render_pair(&app.model.templates, instruction, query, document);
        tokenizer.encode_within(document, most, whole)
    };
    let instruction = judgement.instruction.as_deref();
    encode(instruction, document, most).map_err(|error| {
        // What leaves no room for a document is what stands around it.
        let has_room = |instruction: Option<&str>| encode(instruction, "", most.saturating_sub(1)).is_ok();
        let param = match instruction {
            _ if has_room(instruction) => document_name,
            Some(_) if has_room(None) => "instruction",
            _ => query_name,
        };
        ApiError::param(param, error)
    })
}

/// The relevance of each pair, and how many tokens were computed.
async fn relevance(
    app: &Arc<App>,
    pairs: Vec<[(String, String); 2]>,
    judgement: Judgement,
) -> ApiResult<(Vec<f64>, usize)> {
    let worker = scorer(app)?;
    let classifies = worker.labels == 1;
    let takes = (worker.max_tokens.min(app.model.context), classifies);
    let made = app.blocking(move |app| {
        let borrowed: Vec<[(&str, &str); 2]> =
            pairs.iter().map(|pair| [0, 1].map(|i| (pair[i].0.as_str(), pair[i].1.as_str()))).collect();
        tokenised(app, &borrowed, takes, &judgement)
    });
    let TextPairs { texts, pairs, tokens } = made.await?;
    app.metrics.prompt_tokens.add(tokens as u64);
    let vectors = worker.embed(texts).await?;
    let score = |pair: &[usize; 2]| match (classifies, &vectors[pair[0]], &vectors[pair[1]]) {
        (true, scores, _) => scores.first().map_or(0.0, |score| f64::from(*score)),
        (false, first, second) => similarities(&[first.clone(), second.clone()])[0][1],
    };
    Ok((pairs.iter().map(score).collect(), tokens))
}

pub(super) async fn rerank(app: &Arc<App>, body: Bytes) -> ApiResult<Response<Body>> {
    scorer(app)?;
    let mut fields = RequestFields::body(&body)?;
    check_model(fields.text("model")?.as_deref(), &app.model.name)?;
    let query = fields.text("query")?;
    let query = fields.needed("query", query)?;
    let documents = fields.list("documents")?;
    let documents = fields.needed("documents", documents)?;
    let top = fields.whole("top_n", 1, u64::from(u32::MAX))?.map(|n| n as usize);
    let with_documents = fields.bool("return_documents")?.unwrap_or(true);
    let judgement = Judgement::read(app, &mut fields)?;
    fields.text("user")?;
    fields.done()?;
    if documents.is_empty() || documents.len() > MAX_DOCUMENTS {
        let message = format!("has {} documents; 1 to {MAX_DOCUMENTS} are possible", documents.len());
        return Err(ApiError::param("documents", message));
    }
    let text = |(i, document): (usize, &Value)| match document.as_str().or_else(|| document["text"].as_str()) {
        Some(text) => Ok((format!("documents[{i}]"), text.to_owned())),
        None => Err(wrong(&format!("documents[{i}]"), document, "a text or an object with a text")),
    };
    let texts = documents.iter().enumerate().map(text).collect::<ApiResult<Vec<_>>>()?;
    let pairs = texts.iter().map(|text| [("query".to_owned(), query.clone()), text.clone()]).collect();
    let (scores, tokens) = relevance(app, pairs, judgement).await?;
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
    let result = |index: usize| {
        let mut result = json!({ "index": index, "relevance_score": scores[index] });
        if with_documents {
            result["document"] = json!({ "text": texts[index].1 });
        }
        result
    };
    let results: Vec<Value> = order.into_iter().take(top.unwrap_or(usize::MAX)).map(result).collect();
    let usage = json!({ "prompt_tokens": tokens, "total_tokens": tokens });
    let response = json!({ "id": new_id("rerank-"), "model": app.model.name, "results": results, "usage": usage });
    Ok(json_response(StatusCode::OK, &response))
}

pub(super) async fn score(app: &Arc<App>, body: Bytes) -> ApiResult<Response<Body>> {
    scorer(app)?;
    let mut fields = RequestFields::body(&body)?;
    check_model(fields.text("model")?.as_deref(), &app.model.name)?;
    let mut sides = Vec::with_capacity(2);
    for name in ["text_1", "text_2"] {
        let given = fields.take(name);
        sides.push(texts(name, fields.needed(name, given)?)?);
    }
    let judgement = Judgement::read(app, &mut fields)?;
    fields.text("user")?;
    fields.done()?;
    let (firsts, seconds) = (&sides[0], &sides[1]);
    if firsts.len() != 1 && firsts.len() != seconds.len() {
        let message =
            format!("has {} texts, which are neither one nor as many as the {} of text_2", firsts.len(), seconds.len());
        return Err(ApiError::param("text_1", message));
    }
    let first = |i: usize| firsts[if firsts.len() == 1 { 0 } else { i }].clone();
    let pairs = seconds.iter().enumerate().map(|(i, second)| [first(i), second.clone()]).collect();
    let (scores, tokens) = relevance(app, pairs, judgement).await?;
    let datum = |(index, score): (usize, &f64)| json!({ "index": index, "object": "score", "score": score });
    let response = json!({
        "id": new_id("score-"), "object": "list", "created": unix_now(), "model": app.model.name,
        "data": scores.iter().enumerate().map(datum).collect::<Vec<_>>(),
        "usage": { "prompt_tokens": tokens, "total_tokens": tokens },
    });
    Ok(json_response(StatusCode::OK, &response))
}

/// The texts of field `name`: one or a list, each with what errors call it.
fn texts(name: &str, value: Value) -> ApiResult<Vec<(String, String)>> {
    match value {
        Value::String(text) => Ok(vec![(name.to_owned(), text)]),
        Value::Array(list) if (1..=MAX_DOCUMENTS).contains(&list.len()) => {
            let text = |(i, value): (usize, Value)| match value {
                Value::String(text) => Ok((format!("{name}[{i}]"), text)),
                other => Err(wrong(&format!("{name}[{i}]"), &other, "a text")),
            };
            list.into_iter().enumerate().map(text).collect()
        }
        other => Err(wrong(name, &other, &format!("a text or a list of 1 to {MAX_DOCUMENTS} texts"))),
    }
}

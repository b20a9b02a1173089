//! `/v1/embeddings`.

use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::http::{Response, StatusCode};
use ridge_engine::TextTokens;
use serde_json::{Value, json};

use crate::app::{App, ModelWorker};
use crate::error::{ApiError, ApiResult, json_response};
use crate::wire::completion::{PromptInput, prompts};
use crate::wire::fields::RequestFields;
use crate::wire::sampling::check_model;

struct EmbeddingRequest {
    texts: Vec<Vec<u32>>,
    base64: bool,
    dimensions: Option<usize>,
}

fn prepare(app: &App, most: usize, body: &[u8]) -> ApiResult<EmbeddingRequest> {
    let mut fields = RequestFields::body(body)?;
    check_model(fields.text("model")?.as_deref(), &app.model.name)?;
    let input = fields.take("input");
    let inputs = prompts(fields.needed("input", input)?).map_err(renamed)?;
    let base64 = fields.one_of("encoding_format", &["float", "base64"])? == Some("base64");
    let dimensions = fields.whole("dimensions", 1, u64::from(u32::MAX))?.map(|n| n as usize);
    let truncate = fields.whole("truncate_prompt_tokens", 1, u64::from(u32::MAX))?.map(|n| n as usize);
    fields.text("user")?;
    fields.done()?;
    let mut texts = Vec::with_capacity(inputs.len());
    let prompt = app.model.prompt.as_deref().unwrap_or_default();
    for (i, input) in inputs.iter().enumerate() {
        let param = if inputs.len() == 1 { "input".to_owned() } else { format!("input[{i}]") };
        let ids = match (input, truncate) {
            (PromptInput::Text(text), None) => app.encode(&param, &format!("{prompt}{text}"), true)?,
            (PromptInput::Text(text), Some(most)) => {
                let tokenizer = app.tokenizer(&param)?;
                tokenizer
                    .encode_truncated(&format!("{prompt}{text}"), most)
                    .map_err(|error| ApiError::param(&param, error))?
            }
            (PromptInput::Ids(ids), _) => ids.clone(),
        };
        if ids.is_empty() {
            return Err(ApiError::param(param, "has no tokens"));
        }
        if ids.len() > most {
            let message = format!(
                "has {} tokens, but the model's maximum is {most}; truncate_prompt_tokens truncates it",
                ids.len()
            );
            return Err(ApiError { code: Some("context_length_exceeded"), ..ApiError::param(param, message) });
        }
        texts.push(ids);
    }
    Ok(EmbeddingRequest { texts, base64, dimensions })
}

/// Renames the parameter `prompt` of an error to `input`.
fn renamed(error: ApiError) -> ApiError {
    let param = error.param.map(|p| p.replacen("prompt", "input", 1));
    ApiError { message: error.message.replacen("prompt", "input", 1), param, ..error }
}

pub(super) async fn embeddings(app: &Arc<App>, body: Bytes) -> ApiResult<Response<Body>> {
    let ModelWorker::Embedder(worker) = &app.worker else {
        let message = format!(
            "{} is served to generate text; embeddings are served of encoders, and of decoders whose files say how texts become \
             vectors (sentence-transformers' modules.json, or pooling_type of a GGUF file); `ridge embed` makes them with any \
             decoder",
            app.model.name
        );
        return Err(ApiError::not_found("model_not_supported", message));
    };
    if worker.labels > 0 {
        let message = format!("{} is a classifier of texts and makes no embeddings; use /v1/rerank", app.model.name);
        return Err(ApiError::not_found("model_not_supported", message));
    }
    let most = worker.max_tokens.min(app.model.context);
    let EmbeddingRequest { texts, base64, dimensions } = app.blocking(move |app| prepare(app, most, &body)).await?;
    let tokens: usize = texts.iter().map(Vec::len).sum();
    app.metrics.prompt_tokens.add(tokens as u64);
    let texts = texts.into_iter().map(TextTokens::from).collect();
    let vectors = worker.embed(texts).await.map_err(renamed)?;
    let size = vectors.first().map_or(0, Vec::len);
    if let Some(other) = dimensions.filter(|d| *d != size) {
        let why =
            format!("{other} is not supported: the model's embeddings have {size} dimensions and cannot be shortened");
        return Err(ApiError::unsupported("dimensions", why));
    }
    let embedding = |(index, vector): (usize, &Vec<f32>)| {
        let numbers = if base64 { json!(in_base64(vector)) } else { json!(vector) };
        json!({ "object": "embedding", "index": index, "embedding": numbers })
    };
    let data: Vec<Value> = vectors.iter().enumerate().map(embedding).collect();
    let usage = json!({ "prompt_tokens": tokens, "total_tokens": tokens });
    let response = json!({ "object": "list", "data": data, "model": app.model.name, "usage": usage });
    Ok(json_response(StatusCode::OK, &response))
}

/// The numbers as little-endian bytes in base64, the default encoding of OpenAI's client.
fn in_base64(vector: &[f32]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let bits = three.iter().fold(0u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - three.len()));
        for i in 0..4 {
            let digit = DIGITS[(bits >> (18 - 6 * i) & 63) as usize];
            text.push(if i <= three.len() { digit as char } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_that_of_rfc_4648() {
        assert_eq!(in_base64(&[1.0]), "AACAPw==");
        assert_eq!(in_base64(&[1.0, -2.5]), "AACAPwAAIMA=");
        assert_eq!(in_base64(&[1.0, -2.5, 0.1]), "AACAPwAAIMDNzMw9");
    }
}

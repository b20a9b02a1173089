//! `/tokenize` and `/detokenize`, compatible with vLLM.

use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::http::{Response, StatusCode};
use serde_json::json;

use super::chat::render;
use crate::app::App;
use crate::error::{ApiError, ApiResult, json_response};
use crate::wire::chat;
use crate::wire::fields::RequestFields;
use crate::wire::sampling::check_model;

/// A text, or the messages of a chat, to tokens.
pub(super) async fn tokenize(app: &Arc<App>, body: Bytes) -> ApiResult<Response<Body>> {
    let value = app
        .blocking(move |app| {
            let mut fields = RequestFields::body(&body)?;
            let strings = fields.bool("return_token_strs")?.unwrap_or(false);
            let ids = if let Some(text) = fields.text("prompt")? {
                check_model(fields.text("model")?.as_deref(), &app.model.name)?;
                let add_special = fields.bool("add_special_tokens")?.unwrap_or(true);
                fields.done()?;
                app.encode("prompt", &text, add_special)?
            } else {
                let request = chat::of_fields(fields)?;
                check_model(request.common.model.as_deref(), &app.model.name)?;
                app.encode("messages", &render(app, &request)?.0, request.add_special_tokens)?
            };
            let tokenizer = app.tokenizer("prompt")?;
            let spelt = || ids.iter().map(|id| tokenizer.id_to_token(*id).unwrap_or_default()).collect::<Vec<_>>();
            let strings = strings.then(spelt);
            Ok(json!({ "count": ids.len(), "max_model_len": app.model.context, "tokens": ids, "token_strs": strings }))
        })
        .await?;
    Ok(json_response(StatusCode::OK, &value))
}

/// Tokens to text.
pub(super) async fn detokenize(app: &Arc<App>, body: Bytes) -> ApiResult<Response<Body>> {
    let value = app
        .blocking(move |app| {
            let mut fields = RequestFields::body(&body)?;
            check_model(fields.text("model")?.as_deref(), &app.model.name)?;
            let ids = fields.ids("tokens")?;
            let ids = fields.needed("tokens", ids)?;
            fields.done()?;
            let tokenizer = app.tokenizer("tokens")?;
            if let Some((i, id)) = ids.iter().enumerate().find(|(_, id)| tokenizer.id_to_token(**id).is_none()) {
                return Err(ApiError::param(format!("tokens[{i}]"), format!("{id} is not in the vocabulary")));
            }
            Ok(json!({ "prompt": tokenizer.decode(&ids, false).map_err(|e| ApiError::param("tokens", e))? }))
        })
        .await?;
    Ok(json_response(StatusCode::OK, &value))
}

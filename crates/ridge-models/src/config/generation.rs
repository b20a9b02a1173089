//! `generation_config.json`: where a model's authors put what they learnt after `config.json` was written.

use super::fields::{Fields, TokenIds};
use crate::error::Result;
use ridge_files::json;

/// What `generation_config.json` says about when to stop.
///
/// The file also holds sampling defaults (temperature and the like). Those are the request's business and are not
/// read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GenerationConfig {
    /// The tokens that end a generation, if the file says so. Chat models often list more here than in `config.json`:
    /// end of text and end of turn.
    pub eos_token_ids: Option<Vec<u32>>,
}

impl GenerationConfig {
    /// Reads the text of a `generation_config.json`. `file` names it in errors.
    ///
    /// # Errors
    ///
    /// [`ModelError::Files`](crate::ModelError::Files) if it is not JSON,
    /// [`ModelError::Value`](crate::ModelError::Value) if `eos_token_id` is neither an id nor a list of ids.
    pub fn from_json(file: &str, text: &str) -> Result<Self> {
        let map = json::object(file, text.as_bytes())?;
        let ids: Option<TokenIds> = Fields::new(file, &map).optional("eos_token_id")?;
        Ok(Self { eos_token_ids: ids.map(|TokenIds(ids)| ids) })
    }
}

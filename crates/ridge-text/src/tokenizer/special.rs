//! `tokenizer_config.json`: which tokens begin and end a text, and whether they are added.

use ridge_files::json;
use serde_json::{Map, Value};

use crate::error::{Result, TextError};

/// Begin and end tokens.
#[derive(Clone, Debug, Default)]
pub(crate) struct Special {
    pub(crate) bos: Option<u32>,
    pub(crate) eos: Option<u32>,
    add_bos: Option<bool>,
    add_eos: Option<bool>,
}

impl Special {
    /// Reads the file's text; `id_of` looks a token up in the vocabulary.
    ///
    /// The file's other keys are for the library that wrote it (classes, lengths, padding) or read elsewhere (the chat
    /// template), so unknown ones are left alone.
    pub(crate) fn from_json(file: &str, text: &str, id_of: impl Fn(&str) -> Option<u32>) -> Result<Self> {
        let map = json::object(file, text.as_bytes())?;
        let config = ConfigFile { file, map: &map };
        let token = |key| -> Result<Option<u32>> {
            let Some(text) = config.optional(key, TOKEN, token_text)? else {
                return Ok(None);
            };
            match id_of(text) {
                Some(id) => Ok(Some(id)),
                None => Err(config.wrong(
                    key,
                    "is not in the vocabulary of tokenizer.json",
                    "download both files again, from the same revision",
                )),
            }
        };
        let special = Self {
            bos: token("bos_token")?,
            eos: token("eos_token")?,
            add_bos: config.optional("add_bos_token", FLAG, Value::as_bool)?,
            add_eos: config.optional("add_eos_token", FLAG, Value::as_bool)?,
        };
        for (key, add, id) in
            [("add_bos_token", special.add_bos, special.bos), ("add_eos_token", special.add_eos, special.eos)]
        {
            if add == Some(true) && id.is_none() {
                return Err(config.wrong(
                    key,
                    "asks for a token that the file does not name",
                    "name the token, or set this to false",
                ));
            }
        }
        Ok(special)
    }

    /// Does the file say which tokens to add?
    pub(crate) fn explicit(&self) -> bool {
        self.add_bos.is_some() || self.add_eos.is_some()
    }

    /// The begin and the end token that the file says to add.
    pub(crate) fn added(&self) -> (Option<u32>, Option<u32>) {
        (self.bos.filter(|_| self.add_bos == Some(true)), self.eos.filter(|_| self.add_eos == Some(true)))
    }

    /// `ids` with the tokens that the file says to add.
    pub(crate) fn surround(&self, ids: &[u32]) -> Vec<u32> {
        let (bos, eos) = self.added();
        bos.into_iter().chain(ids.iter().copied()).chain(eos).collect()
    }
}

const TOKEN: &str = "a token: a text, or an object with a text as content";
const FLAG: &str = "true or false";

fn token_text(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value.get("content")?.as_str())
}

/// The object of a `tokenizer_config.json`. `null` counts as absent, as it does for the library that writes the file.
struct ConfigFile<'a> {
    file: &'a str,
    map: &'a Map<String, Value>,
}

impl<'a> ConfigFile<'a> {
    /// The value of `key` as `read` gives it, or `None` if the key is absent; an error if it is not `expected`.
    fn optional<T>(&self, key: &str, expected: &str, read: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.map.get(key).filter(|value| !value.is_null()) else {
            return Ok(None);
        };
        match read(value) {
            Some(value) => Ok(Some(value)),
            None => Err(self.wrong(key, &format!("is not {expected}"), "mend the file or download it again")),
        }
    }

    fn wrong(&self, key: &str, problem: &str, remedy: &'static str) -> TextError {
        TextError::Value {
            file: self.file.to_owned(),
            key: key.to_owned(),
            value: json::shown(self.map.get(key).unwrap_or(&Value::Null)),
            problem: problem.to_owned(),
            remedy,
        }
    }
}

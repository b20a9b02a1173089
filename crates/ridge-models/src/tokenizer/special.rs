//! `tokenizer_config.json`: which tokens begin and end a text, and whether they are added.

use serde_json::Value;

use crate::config::{Field, Fields};
use crate::error::Result;
use crate::json;

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
        let mut fields = Fields::new(file, &map);
        let mut token = |key| -> Result<Option<u32>> {
            let Some(Token(text)) = fields.optional(key)? else {
                return Ok(None);
            };
            match id_of(text) {
                Some(id) => Ok(Some(id)),
                None => Err(fields.wrong(
                    key,
                    "is not in the vocabulary of tokenizer.json",
                    "download both files again, from the same revision",
                )),
            }
        };
        let special = Self {
            bos: token("bos_token")?,
            eos: token("eos_token")?,
            add_bos: fields.optional("add_bos_token")?,
            add_eos: fields.optional("add_eos_token")?,
        };
        for (key, add, id) in
            [("add_bos_token", special.add_bos, special.bos), ("add_eos_token", special.add_eos, special.eos)]
        {
            if add == Some(true) && id.is_none() {
                return Err(fields.wrong(
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

/// A token: a text, or an object that has it as `content`.
struct Token<'a>(&'a str);

impl<'a> Field<'a> for Token<'a> {
    const EXPECTED: &'static str = "a token: a text, or an object with a text as content";
    fn from_json(value: &'a Value) -> Option<Self> {
        value.as_str().or_else(|| value.get("content")?.as_str()).map(Self)
    }
}

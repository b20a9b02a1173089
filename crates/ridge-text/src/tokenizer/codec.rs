//! A tokenizer: text to token ids and back.

use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use ridge_files::read_text;
use tokenizers::{
    DecoderWrapper, EncodeInput, Encoding, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, TokenizerImpl,
};

use super::guard::{self, guarded};
use super::longest::{self, LongestMatch};
use super::special::Special;
use crate::error::{Result, TextError};

/// A tokenizer, read from a `tokenizer.json`. Cheap to clone: clones share the vocabulary.
#[derive(Clone)]
pub struct Tokenizer {
    inner: Arc<Library>,
    /// The file, for errors.
    file: Arc<str>,
    special: Special,
}

/// A tokenizer of the `tokenizers` crate, with a model of the crate or of this one.
enum Library {
    OfCrate(Box<tokenizers::Tokenizer>),
    LongestMatch(Box<LongestTokenizer>),
}

type LongestTokenizer =
    TokenizerImpl<LongestMatch, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

/// `$call` of the tokenizer `$inner` in `$library`, whichever its model is.
macro_rules! of_library {
    ($library:expr, $inner:ident => $call:expr) => {
        match $library {
            Library::OfCrate($inner) => $call,
            Library::LongestMatch($inner) => $call,
        }
    };
}

impl Library {
    fn encode<'s>(&self, input: impl Into<EncodeInput<'s>>, add_special: bool) -> tokenizers::Result<Encoding> {
        of_library!(self, inner => inner.encode(input.into(), add_special))
    }
}

impl Tokenizer {
    /// Reads the `tokenizer.json` at `path`.
    ///
    /// # Errors
    ///
    /// [`TextError::Files`] if the file cannot be read, else as for [`Tokenizer::from_bytes`].
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let text = read_text(path, "read the tokenizer")?;
        Self::from_bytes(&path.display().to_string(), text.as_bytes())
    }

    /// Reads the bytes of a `tokenizer.json`. `file` names it in errors.
    ///
    /// Truncation and padding that the file may ask for are left out: they belong to the training run that wrote it,
    /// and would cut or lengthen texts unseen.
    ///
    /// # Errors
    ///
    /// [`TextError::Tokenizer`] if the bytes are not a tokenizer, or one whose encoding is random (BPE dropout).
    pub fn from_bytes(file: &str, bytes: &[u8]) -> Result<Self> {
        let fail = |problem| TextError::Tokenizer {
            file: file.to_owned(),
            problem,
            remedy: "download it again, or convert the tokenizer again".to_owned(),
        };
        let kind = guard::check(bytes).map_err(fail)?;
        let read = || match kind.as_deref() {
            Some(longest::KIND) => Ok(Library::LongestMatch(Box::new(serde_json::from_slice(bytes)?))),
            _ => tokenizers::Tokenizer::from_bytes(bytes).map(|inner| Library::OfCrate(Box::new(inner))),
        };
        let mut inner = guarded(read).map_err(|e| fail(e.in_context("it is not a tokenizer")))?;
        of_library!(&mut inner, inner => {
            inner.with_truncation(None).map_err(|e| fail(e.to_string()))?.with_padding(None);
        });
        Ok(Self { inner: Arc::new(inner), file: file.into(), special: Special::default() })
    }

    /// This tokenizer with the begin and end tokens that the text of a `tokenizer_config.json` names, and with its
    /// `add_bos_token` and `add_eos_token`. `file` names it in errors.
    ///
    /// # Errors
    ///
    /// [`TextError::Files`] if it is not JSON, [`TextError::Value`] if a value has the wrong type or names a token that is not in the
    /// vocabulary or is to be added and not named.
    pub fn with_config(mut self, file: &str, text: &str) -> Result<Self> {
        self.special = Special::from_json(file, text, |token| self.token_to_id(token))?;
        Ok(self)
    }

    /// The ids of `text`.
    ///
    /// With `add_special`, begin and end tokens are added as the model was trained with them: as `add_bos_token` and
    /// `add_eos_token` of `tokenizer_config.json` say if either is there, and otherwise as the template in
    /// `tokenizer.json` says. Special tokens that are spelt out in `text` become those tokens in either case.
    ///
    /// # Errors
    ///
    /// [`TextError::Tokenizer`] if the text has a part that the vocabulary cannot spell.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        let explicit = self.special.explicit();
        let template = add_special && !explicit;
        let encoding = guarded(|| of_library!(&*self.inner, inner => inner.encode_fast(text, template)))
            .map_err(|e| self.fail(e.in_context("a text cannot be encoded")))?;
        let ids = encoding.get_ids();
        Ok(if add_special && explicit { self.special.surround(ids) } else { ids.to_vec() })
    }

    /// The ids of `text` as [`encode`](Self::encode) gives them, each with the bytes of `text` that it stands for. Those
    /// of tokens that were added are empty, and tokens that share a character may all have its bytes.
    ///
    /// # Errors
    ///
    /// As for [`encode`](Self::encode).
    pub fn encode_with_offsets(&self, text: &str, add_special: bool) -> Result<Vec<(u32, Range<usize>)>> {
        let explicit = self.special.explicit();
        let encoding = guarded(|| self.inner.encode(text, add_special && !explicit))
            .map_err(|e| self.fail(e.in_context("a text cannot be encoded")))?;
        let (ids, places) = (encoding.get_ids(), encoding.get_offsets());
        let placed = ids.iter().zip(places).map(|(id, (from, to))| (*id, *from..*to));
        if !(add_special && explicit) {
            return Ok(placed.collect());
        }
        let (bos, eos) = self.special.added();
        let end = text.len();
        Ok(bos.map(|id| (id, 0..0)).into_iter().chain(placed).chain(eos.map(|id| (id, end..end))).collect())
    }

    /// The ids of `text` with begin and end tokens, at most `max` of them: those of the end of the text are left out.
    ///
    /// # Errors
    ///
    /// As for [`Tokenizer::encode`], and if `max` leaves no room for a token beside those that are added.
    pub fn encode_truncated(&self, text: &str, max: usize) -> Result<Vec<u32>> {
        let (mut whole, bare) = (self.encode(text, true)?, self.encode(text, false)?);
        if whole.len() <= max {
            return Ok(whole);
        }
        let added = whole.len().saturating_sub(bare.len());
        let start = (0..=added).find(|start| whole[*start..].starts_with(&bare));
        match start {
            Some(start) if max > added => {
                whole.drain(start + max - added..start + bare.len());
                Ok(whole)
            }
            _ => Err(self.fail(format!("a text cannot be cut to {max} tokens, of which {added} are added to any"))),
        }
    }

    /// Two texts as one, with the special tokens that the file puts around and between them: the ids, and for each the
    /// segment that the file gives it. The second text is cut where they have more than `max` tokens together.
    ///
    /// # Errors
    ///
    /// As for [`encode`](Self::encode), and if the first text and the special tokens alone have `max` tokens or more.
    pub fn encode_pair(&self, first: &str, second: &str, max: usize) -> Result<(Vec<u32>, Vec<u32>)> {
        let whole = |second: &str| {
            guarded(|| self.inner.encode((first, second), true))
                .map_err(|e| self.fail(e.in_context("a pair of texts cannot be encoded")))
        };
        let encoding = self.fitting(second, max, whole)?;
        Ok((encoding.get_ids().to_vec(), encoding.get_type_ids().to_vec()))
    }

    /// The ids of `whole(text)`, without special tokens but those that it spells: `text` is cut where they are more than `max`.
    ///
    /// # Errors
    ///
    /// As for [`encode`](Self::encode) and `whole`, and if what surrounds `text` alone has `max` tokens or more.
    pub fn encode_within(&self, text: &str, max: usize, whole: impl Fn(&str) -> Result<String>) -> Result<Vec<u32>> {
        let whole = |text: &str| {
            let text = whole(text)?;
            guarded(|| self.inner.encode(text.as_str(), false))
                .map_err(|e| self.fail(e.in_context("a text cannot be encoded")))
        };
        Ok(self.fitting(text, max, whole)?.get_ids().to_vec())
    }

    /// `whole(text)`, with as much of `text` cut off its end as makes it `max` tokens or fewer.
    fn fitting(&self, text: &str, max: usize, whole: impl Fn(&str) -> Result<Encoding>) -> Result<Encoding> {
        let encoding = whole(text)?;
        if encoding.len() <= max {
            return Ok(encoding);
        }
        let bare = guarded(|| self.inner.encode(text, false))
            .map_err(|e| self.fail(e.in_context("a text cannot be encoded")))?;
        let beside = encoding.len().saturating_sub(bare.len());
        let ends = bare.get_offsets();
        // As many tokens as have room, or, where those of the shorter text are more, fewer, by bisection: at least `least` and
        // at most `most` of them fit.
        let (mut least, mut most) = (1, max.saturating_sub(beside).min(ends.len()));
        let (mut kept, mut fitting) = (most, None);
        while least <= most {
            let cut = ends.get(kept - 1).and_then(|(_, end)| text.get(..*end)).unwrap_or_default();
            let encoding = whole(cut)?;
            if encoding.len() <= max {
                fitting = Some(encoding);
                least = kept + 1;
            } else {
                most = kept - 1;
            }
            kept = least.midpoint(most);
        }
        fitting.ok_or_else(|| self.fail(format!("a pair of texts cannot be cut to {max} tokens")))
    }

    /// The text of `ids`, without special tokens if `skip_special`. Ids that stand for no token have no text: a
    /// model's vocabulary may be padded beyond its tokenizer's. Bytes that are not UTF-8 become U+FFFD.
    ///
    /// # Errors
    ///
    /// [`TextError::Tokenizer`] if the decoder that the file describes fails.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        if ids.is_empty() {
            return Ok(String::new());
        }
        guarded(|| of_library!(&*self.inner, inner => inner.decode(ids, skip_special)))
            .map_err(|e| self.fail(e.in_context("tokens cannot be decoded")))
    }

    /// The id of `token`, spelt as in the vocabulary (`▁the`, `<0x0A>`, `</s>`).
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        of_library!(&*self.inner, inner => inner.token_to_id(token))
    }

    /// The token with this id, spelt as in the vocabulary.
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        of_library!(&*self.inner, inner => inner.id_to_token(id))
    }

    /// Is this the id of a special token?
    pub fn is_special(&self, id: u32) -> bool {
        let added = of_library!(&*self.inner, inner => inner.get_added_vocabulary());
        self.id_to_token(id).is_some_and(|token| added.is_special_token(&token))
    }

    /// How many tokens there are, added ones included. Ids need not be contiguous.
    pub fn vocab_size(&self) -> usize {
        of_library!(&*self.inner, inner => inner.get_vocab_size(true))
    }

    /// The text of a `tokenizer.json` that describes it.
    ///
    /// # Errors
    ///
    /// [`TextError::Tokenizer`] if a part of it cannot be written.
    pub fn to_json(&self) -> Result<String> {
        of_library!(&*self.inner, inner => inner.to_string(false))
            .map_err(|e| self.fail(format!("it cannot be written: {e}")))
    }

    /// The id of the begin token, if `tokenizer_config.json` names one.
    pub fn bos(&self) -> Option<u32> {
        self.special.bos
    }

    /// The id of the end token, if `tokenizer_config.json` names one.
    pub fn eos(&self) -> Option<u32> {
        self.special.eos
    }

    fn fail(&self, problem: String) -> TextError {
        TextError::Tokenizer {
            file: self.file.to_string(),
            problem,
            remedy: "check that tokenizer.json belongs to this model".to_owned(),
        }
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("file", &self.file)
            .field("vocab_size", &self.vocab_size())
            .finish_non_exhaustive()
    }
}

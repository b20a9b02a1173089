//! Ids to text, one id at a time, handing out only what later ids cannot change.
//!
//! A token has no text of its own. It may hold a part of a character, whose other bytes come with later tokens; and
//! decoders in the manner of SentencePiece drop the space at the start of a text, so that `▁world` is `world` alone
//! and ` world` behind another token. So a window of ids is decoded as a whole, and the new text is what goes beyond
//! the text that the window had before. The window begins with ids whose text is out already and not empty, which
//! makes the decoder treat the rest as the middle of a text.

use super::codec::Tokenizer;
use crate::error::Result;

/// What decoders put where bytes are not (yet) a character.
const REPLACEMENT: char = '\u{fffd}';

/// A window this long is shortened even where a character is incomplete. A character has at most four bytes and a
/// token at least one, so the window then either walks from one character's middle to the next one's, or holds bytes
/// that will never be text.
const MAX_WINDOW: usize = 32;
/// What is kept at least of a window that is shortened.
const KEPT: usize = 8;
/// An incomplete character has at most three bytes, each of which decoders may show as one replacement.
const MAX_INCOMPLETE: usize = 3;

/// Decodes ids that come one at a time; made by [`Tokenizer::stream_decoder`].
///
/// The pieces, in order, and then [`finish`](Self::finish), make up what [`Tokenizer::decode`] makes of all ids at
/// once. They differ in one case: with byte-fallback tokens, bytes that are not UTF-8 turn the valid characters next
/// to them that are spelt by bytes into U+FFFD as well, and here those that are out already stay. A piece never ends
/// within a character. Each id costs a few decodes of at most 32 ids, and where so many
/// hold no whole character up to twice 24 of them.
#[derive(Clone, Debug)]
pub struct StreamDecoder {
    tokenizer: Tokenizer,
    skip_special: bool,
    window: Vec<u32>,
    /// The ids in the window before this place were decoded to whole characters, all handed out.
    settled: usize,
    /// What the window's ids had as text when they were last decoded, as far as it was handed out.
    shown: String,
}

impl Tokenizer {
    /// A decoder for ids that come one at a time. With `skip_special`, special tokens have no text.
    pub fn stream_decoder(&self, skip_special: bool) -> StreamDecoder {
        StreamDecoder::new(self.clone(), skip_special)
    }
}

impl StreamDecoder {
    fn new(tokenizer: Tokenizer, skip_special: bool) -> Self {
        Self { tokenizer, skip_special, window: Vec::new(), settled: 0, shown: String::new() }
    }

    /// Takes the next id and returns the text that has become certain; empty if that is none.
    ///
    /// # Errors
    ///
    /// [`TextError::Tokenizer`](crate::TextError::Tokenizer) if the decoder fails.
    pub fn push(&mut self, id: u32) -> Result<String> {
        // Whole decodes leave such ids out before the decoder sees them, so they must not separate what they stand
        // between. Leaving them out here keeps the window's text from being empty.
        let textless = self.tokenizer.id_to_token(id).is_none() || self.skip_special && self.tokenizer.is_special(id);
        if textless {
            return Ok(String::new());
        }
        self.window.push(id);
        let text = self.decode(&self.window)?;
        let certain = text.trim_end_matches(REPLACEMENT);
        if certain.len() == text.len() {
            let piece = self.beyond_shown(&text)?;
            self.settle(text)?;
            return Ok(piece);
        }
        let mut piece = String::new();
        if let Some(new) = certain.strip_prefix(self.shown.as_str()) {
            piece.push_str(new);
            self.shown.push_str(new);
        }
        if self.window.len() >= MAX_WINDOW {
            piece.push_str(&self.shorten(text)?);
        }
        Ok(piece)
    }

    /// Ends the stream: the text still held back, where an incomplete character has become U+FFFD. The decoder is
    /// then as new.
    ///
    /// # Errors
    ///
    /// [`TextError::Tokenizer`](crate::TextError::Tokenizer) if the decoder fails.
    pub fn finish(&mut self) -> Result<String> {
        let text = self.decode(&self.window)?;
        let rest = self.beyond_shown(&text)?;
        self.window.clear();
        self.settled = 0;
        self.shown.clear();
        Ok(rest)
    }

    fn decode(&self, ids: &[u32]) -> Result<String> {
        self.tokenizer.decode(ids, self.skip_special)
    }

    /// What `text`, the window's, has beyond what was handed out.
    fn beyond_shown(&self, text: &str) -> Result<String> {
        match text.strip_prefix(self.shown.as_str()) {
            Some(new) => Ok(new.to_owned()),
            // Bytes that turned out not to be text have changed what was shown: see the type's documentation.
            None => self.decode(&self.window[self.settled..]),
        }
    }

    /// Everything in the window, whose text is `text`, has been handed out. Drops the ids that the next one's text
    /// cannot depend on.
    fn settle(&mut self, text: String) -> Result<()> {
        self.shown = text;
        if self.settled > 0 {
            let keep = self.decode(&self.window[self.settled..])?;
            // Without text the decoder would take the next id for the start of a text.
            if !keep.is_empty() {
                self.window.drain(..self.settled);
                self.shown = keep;
            }
        }
        if self.window.len() >= MAX_WINDOW {
            self.window.drain(..self.window.len() - KEPT);
            self.shown = self.decode(&self.window)?;
        }
        self.settled = self.window.len();
        Ok(())
    }

    /// Shortens a window whose text ends in replacements, and returns what can no longer become other text.
    fn shorten(&mut self, text: String) -> Result<String> {
        if let Some(piece) = self.cut(&text)? {
            return Ok(piece);
        }
        let rest = self.beyond_shown(&text)?;
        self.settle(text)?;
        Ok(rest)
    }

    /// Drops ids in front that the text of later ones cannot depend on, and returns what is certain by that; `None` where
    /// no such place is found.
    fn cut(&mut self, text: &str) -> Result<Option<String>> {
        let Some(tail) = text.strip_prefix(self.shown.as_str()) else { return Ok(None) };
        // Where both sides of a cut make up the text, no character crosses the cut: the halves of one, or of what
        // could have become one, are more replacements than the whole.
        for kept in KEPT..self.window.len() {
            let (before, after) = self.window.split_at(self.window.len() - kept);
            let (before_text, after_text) = (self.decode(before)?, self.decode(after)?);
            if !after_text.is_empty() && text.strip_prefix(&before_text) == Some(&after_text) {
                let new = before_text.strip_prefix(&self.shown).unwrap_or("").to_owned();
                self.shown = self.shown.strip_prefix(&before_text).unwrap_or("").to_owned();
                (self.window, self.settled) = (after.to_vec(), 0);
                return Ok(Some(new));
            }
        }
        // Every token ends within a character: the rest of one may stand in front.
        let kept = &self.window[self.window.len() - KEPT..];
        let kept_text = self.decode(kept)?;
        if tail.chars().count() <= MAX_INCOMPLETE
            && let Some(shown) = kept_text.strip_suffix(tail)
            && !shown.is_empty()
        {
            (self.shown, self.window, self.settled) = (shown.to_owned(), kept.to_vec(), 0);
            return Ok(Some(String::new()));
        }
        Ok(None)
    }
}

//! From tokens to text that can be shown, up to a stop string.

use ridge_text::{StreamDecoder, Tokenizer};

use crate::error::Result;

/// How many tokens at the end of a prompt are decoded.
const PROMPT_END: usize = 64;

/// Decodes one sequence's tokens. Text is held back while it could still become part of a stop string, or of a
/// character that is not complete.
pub struct TextStream {
    decoder: StreamDecoder,
    stops: Vec<String>,
    /// Tokens within which no stop string ends the text.
    min_tokens: usize,
    /// Tokens of the answer so far.
    tokens: usize,
    held: String,
    /// Bytes of `held` within which no stop string ends the text: those of the tokens up to `min_tokens`.
    early: usize,
    /// Which of `stops` was met.
    stopped: Option<usize>,
}

impl TextStream {
    /// A stream that ends before the first of `stops`; empty strings stop nothing.
    pub fn new(tokenizer: &Tokenizer, stops: &[String]) -> Self {
        Self::of(tokenizer.stream_decoder(true), stops)
    }

    /// As [`new`](Self::new), with the text of special tokens left in.
    pub fn with_special(tokenizer: &Tokenizer, stops: &[String]) -> Self {
        Self::of(tokenizer.stream_decoder(false), stops)
    }

    fn of(decoder: StreamDecoder, stops: &[String]) -> Self {
        let stops = stops.iter().filter(|s| !s.is_empty()).cloned().collect();
        Self { decoder, stops, min_tokens: 0, tokens: 0, held: String::new(), early: 0, stopped: None }
    }

    /// The same, which ends only before a stop string that a token behind the first `tokens` completes.
    #[must_use]
    pub fn with_min_tokens(mut self, tokens: usize) -> Self {
        self.min_tokens = tokens;
        self
    }

    /// Takes the tokens of a prompt, whose text is not given: they decide whether the first token of the answer keeps
    /// its space.
    ///
    /// # Errors
    /// When the tokenizer cannot decode them.
    pub fn skip(&mut self, prompt: &[u32]) -> Result<()> {
        // The decoder looks back no further.
        for id in &prompt[prompt.len().saturating_sub(PROMPT_END)..] {
            self.decoder.push(*id)?;
        }
        Ok(())
    }

    /// The text that `id` makes certain.
    ///
    /// # Errors
    /// When the tokenizer cannot decode it.
    pub fn push(&mut self, id: u32) -> Result<String> {
        let text = self.decoder.push(id)?;
        self.tokens += 1;
        Ok(self.release(&text))
    }

    /// The rest of the text.
    ///
    /// # Errors
    /// When the tokenizer cannot decode it.
    pub fn finish(&mut self) -> Result<String> {
        let text = self.decoder.finish()?;
        let mut text = self.release(&text);
        if !self.stopped() {
            text.push_str(&std::mem::take(&mut self.held));
        }
        Ok(text)
    }

    /// Has a stop string been met?
    pub fn stopped(&self) -> bool {
        self.stopped.is_some()
    }

    /// The stop string that was met.
    pub fn stopped_by(&self) -> Option<&str> {
        self.stopped.map(|i| self.stops[i].as_str())
    }

    fn release(&mut self, text: &str) -> String {
        if self.stopped() {
            return String::new();
        }
        self.held.push_str(text);
        if self.min_tokens > 0 && self.tokens <= self.min_tokens {
            self.early = self.held.len();
        }
        // One that is complete too early may stay in `held`, where it begins another.
        let ends_text = |s: &str| {
            let mut places = self.held.char_indices().map(|(at, _)| at);
            places.find(|at| at + s.len() > self.early && self.held[*at..].starts_with(s))
        };
        let met = self.stops.iter().enumerate().filter_map(|(i, s)| Some((ends_text(s)?, i)));
        if let Some((at, which)) = met.min() {
            self.stopped = Some(which);
            self.held.truncate(at);
            return std::mem::take(&mut self.held);
        }
        // The longest end of the text that begins a stop string stays.
        let keep = self.stops.iter().map(|s| overlap(&self.held, s)).max().unwrap_or(0);
        let released = self.held.len() - keep;
        self.early = self.early.saturating_sub(released);
        let rest = self.held.split_off(released);
        std::mem::replace(&mut self.held, rest)
    }
}

/// Bytes of the longest proper prefix of `stop` that `text` ends with.
fn overlap(text: &str, stop: &str) -> usize {
    stop.char_indices().map(|(i, _)| i).filter(|i| text.ends_with(&stop[..*i])).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(stops: &[&str]) -> TextStream {
        let tokenizer = ridge_models::ModelFiles::open(None).and_then(|f| f.tokenizer()).unwrap();
        TextStream::new(&tokenizer, &stops.iter().map(ToString::to_string).collect::<Vec<_>>())
    }

    #[test]
    fn a_stop_string_that_is_complete_too_early_stays_so_where_it_begins_another() {
        let mut s = stream(&["\n", "\n\nUser"]).with_min_tokens(2);
        s.tokens = 1;
        assert_eq!(s.release("one\n"), "one");
        s.tokens = 3;
        assert_eq!(s.release("two"), "\ntwo");
        assert!(!s.stopped());
        assert_eq!(s.release("\nthree"), "");
        assert_eq!(s.stopped_by(), Some("\n"));
    }

    #[test]
    fn text_that_may_begin_a_stop_string_waits() {
        let mut s = stream(&["END", "aab"]);
        assert_eq!(s.release("one E"), "one ");
        assert_eq!(s.release("N"), "");
        assert_eq!(s.release("T a"), "ENT ");
        assert_eq!(s.release("a"), "");
        assert_eq!(s.release("ab!"), "a");
        assert_eq!(s.stopped_by(), Some("aab"));
        assert_eq!(s.release("more"), "");
    }

    #[test]
    fn the_answer_goes_on_where_the_prompt_ends() {
        let tokenizer = ridge_models::ModelFiles::open(None).and_then(|f| f.tokenizer()).unwrap();
        let (prompt, whole) = ("Lily went to the", "Lily went to the park. It was");
        let (prompt, whole) = (tokenizer.encode(prompt, true).unwrap(), tokenizer.encode(whole, true).unwrap());
        let answer = whole.strip_prefix(&*prompt).unwrap();
        let mut s = TextStream::new(&tokenizer, &[]);
        s.skip(&prompt).unwrap();
        let mut text: String = answer.iter().map(|id| s.push(*id).unwrap()).collect();
        text += &s.finish().unwrap();
        assert_eq!(text, " park. It was");
    }

    #[test]
    fn stop_strings_that_are_complete_before_the_minimum_end_nothing() {
        let tokenizer = ridge_models::ModelFiles::open(None).and_then(|f| f.tokenizer()).unwrap();
        let ids = tokenizer.encode("the park, the park, the park", false).unwrap();
        let length = |text: &str| tokenizer.encode(text, false).unwrap().len();
        let up_to_stop = |min_tokens: usize| {
            let mut s = TextStream::new(&tokenizer, &["park".to_owned()]).with_min_tokens(min_tokens);
            let mut text: String = ids.iter().map(|id| s.push(*id).unwrap()).collect();
            text += &s.finish().unwrap();
            (text.trim().to_owned(), s.stopped())
        };
        let first = length("the park");
        assert_eq!(up_to_stop(0), ("the".to_owned(), true));
        // One token more is needed than there are.
        assert_eq!(up_to_stop(first - 1), ("the".to_owned(), true));
        assert_eq!(up_to_stop(first), ("the park, the".to_owned(), true));
        assert_eq!(up_to_stop(ids.len()), ("the park, the park, the park".to_owned(), false));
    }

    #[test]
    fn held_text_comes_out_at_the_end() {
        let mut s = stream(&["stop"]);
        assert_eq!(s.release("don't sto"), "don't ");
        assert_eq!(s.finish().unwrap(), "sto");
    }
}

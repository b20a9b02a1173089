//! One choice: converts tokens to text, reasoning and tool calls.
//!
//! Streams and complete responses are built from the same pieces, so they cannot differ.

use ridge_engine::{Logprobs, TextStream};
use ridge_text::Tokenizer;
use serde_json::{Value, json};

use crate::error::ApiResult;
use crate::reasoning::Reasoning;
use crate::tools::{ToolCallParser, ToolOutputPart};

/// The end of a choice.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Ending {
    /// `stop`, `length` or `tool_calls`.
    pub(crate) reason: &'static str,
    /// The client's stop string or token that ended it, if any.
    pub(crate) by: Value,
}

/// The increment of a choice from one token.
#[derive(Clone, Debug, Default)]
pub(crate) struct AnswerPiece {
    pub(crate) text: String,
    pub(crate) reasoning: String,
    /// Tool calls and arguments, without text.
    pub(crate) calls: Vec<ToolOutputPart>,
    pub(crate) logprobs: Vec<TokenInfo>,
    pub(crate) ids: Vec<u32>,
    pub(crate) ending: Option<Ending>,
}

impl AnswerPiece {
    /// Whether it has no content for the client.
    pub(crate) fn is_empty(&self) -> bool {
        self.text.is_empty() && self.reasoning.is_empty() && self.calls.is_empty() && self.ending.is_none()
    }
}

/// Log-probability data of a token.
#[derive(Clone, Debug)]
pub(crate) struct TokenInfo {
    pub(crate) token: Spelt,
    /// `None` for the first token of a prompt.
    pub(crate) logprob: Option<f32>,
    pub(crate) top: Vec<(Spelt, f32)>,
    /// Character offset in the returned text, including the prompt if `echo` is set.
    pub(crate) offset: usize,
}

/// A token by itself.
#[derive(Clone, Debug)]
pub(crate) struct Spelt {
    pub(crate) text: String,
    /// Its bytes, where they are text.
    pub(crate) bytes: Option<Vec<u8>>,
}

/// Spells tokens.
#[derive(Clone)]
pub(crate) struct Speller {
    tokenizer: Option<Tokenizer>,
    /// A token with a text, and that text: what follows it is spelt as in the middle of one.
    anchor: Option<(u32, String)>,
    /// Write `token_id:7`.
    as_ids: bool,
}

impl Speller {
    pub(crate) fn new(tokenizer: Option<&Tokenizer>) -> Self {
        let anchor = tokenizer.and_then(|t| {
            let id = *t.encode("a", false).ok()?.last()?;
            Some((id, t.decode(&[id], false).ok()?)).filter(|(_, text)| !text.is_empty())
        });
        Self { tokenizer: tokenizer.cloned(), anchor, as_ids: false }
    }

    pub(crate) fn with_ids(mut self, as_ids: bool) -> Self {
        self.as_ids = as_ids;
        self
    }

    pub(crate) fn spell(&self, id: u32) -> Spelt {
        let text = self.text(id);
        let bytes = text.as_ref().filter(|t| !t.contains('\u{fffd}')).map(|t| t.as_bytes().to_vec());
        let text = if self.as_ids { format!("token_id:{id}") } else { text.unwrap_or_else(|| id.to_string()) };
        Spelt { text, bytes }
    }

    fn text(&self, id: u32) -> Option<String> {
        let tokenizer = self.tokenizer.as_ref()?;
        match &self.anchor {
            Some((anchor, before)) => {
                let both = tokenizer.decode(&[*anchor, id], false).ok()?;
                both.strip_prefix(before.as_str()).map(str::to_owned)
            }
            None => tokenizer.decode(&[id], false).ok(),
        }
    }
}

enum Text {
    Stream(Box<TextStream>),
    /// There is no tokenizer: ids stand for themselves.
    Ids,
}

/// Says where in a text, which grows by a token at a time, each begins.
enum TokenPlaces {
    Stream(Box<TextStream>, usize),
    /// There is no tokenizer: ids stand for themselves.
    Ids(usize),
}

impl TokenPlaces {
    /// Of a text behind `prompt`.
    fn behind(tokenizer: Option<&Tokenizer>, prompt: &[u32]) -> ApiResult<Self> {
        let Some(tokenizer) = tokenizer else { return Ok(Self::Ids(0)) };
        let mut stream = TextStream::new(tokenizer, &[]);
        stream.skip(prompt)?;
        Ok(Self::Stream(Box::new(stream), 0))
    }

    /// The characters before the next token, which is `id`. One that only completes a character begins with that.
    fn next(&mut self, id: u32) -> ApiResult<usize> {
        let (characters, length) = match self {
            Self::Stream(stream, characters) => (characters, stream.push(id)?.chars().count()),
            Self::Ids(characters) => (characters, format!("{id} ").len()),
        };
        let before = *characters;
        *characters += length;
        Ok(before)
    }
}

/// How a choice is parsed.
#[derive(Default)]
pub(crate) struct OutputParsing {
    pub(crate) reasoning: Option<Reasoning>,
    pub(crate) parser: Option<ToolCallParser>,
    /// End the choice after this many calls.
    pub(crate) most_calls: Option<usize>,
    /// Whether calls set the finish reason to `tool_calls`.
    pub(crate) calls_end: bool,
}

/// One choice.
pub(crate) struct AnswerChoice {
    text: Text,
    apart: OutputParsing,
    speller: Speller,
    /// Log-probabilities and ids that are sent with the next text.
    waiting: AnswerPiece,
    /// The tokens of the prompt, for `echo` with log-probabilities.
    echo: Vec<u32>,
    /// Text offsets of tokens, if log-probabilities were requested.
    places: Option<TokenPlaces>,
    /// Tokens so far.
    pub(crate) tokens: usize,
    pub(crate) ended: bool,
}

impl AnswerChoice {
    /// A choice for `prompt`, which ends before one of `stops` that is complete behind the first tokens, as many as the number
    /// beside them says.
    pub(crate) fn new(
        tokenizer: Option<&Tokenizer>,
        prompt: &[u32],
        (stops, min_tokens): (&[String], usize),
        apart: OutputParsing,
        speller: Speller,
    ) -> ApiResult<Self> {
        // Reasoning and tool-call markers are special tokens in some vocabularies.
        let marks = apart.reasoning.is_some() || apart.parser.is_some();
        let text = match tokenizer {
            Some(tokenizer) => {
                let new = if marks { TextStream::with_special } else { TextStream::new };
                let mut stream = new(tokenizer, stops).with_min_tokens(min_tokens);
                stream.skip(prompt)?;
                Text::Stream(Box::new(stream))
            }
            None => Text::Ids,
        };
        Ok(Self {
            text,
            apart,
            speller,
            waiting: AnswerPiece::default(),
            echo: Vec::new(),
            places: None,
            tokens: 0,
            ended: false,
        })
    }

    /// A choice for `prompt` with log-probabilities, including those of the prompt if `echo` is set.
    pub(crate) fn with_logprobs(
        mut self,
        tokenizer: Option<&Tokenizer>,
        prompt: &[u32],
        echo: bool,
    ) -> ApiResult<Self> {
        self.places = Some(TokenPlaces::behind(tokenizer, if echo { &[] } else { prompt })?);
        if echo {
            self.echo = prompt.to_vec();
        }
        Ok(self)
    }

    /// The log-probabilities of the prompt's tokens from the second on.
    pub(crate) fn prompt(&mut self, logprobs: &[Logprobs]) -> ApiResult<()> {
        let logprobs = std::iter::once(None).chain(logprobs.iter().map(Some));
        for (id, logprobs) in std::mem::take(&mut self.echo).into_iter().zip(logprobs) {
            let token_info = self.token_info(id, logprobs)?;
            self.waiting.logprobs.push(token_info);
        }
        Ok(())
    }

    /// Log-probability data of the next token.
    fn token_info(&mut self, id: u32, logprobs: Option<&Logprobs>) -> ApiResult<TokenInfo> {
        let offset = self.places.as_mut().map_or(Ok(0), |places| places.next(id))?;
        let top = logprobs.map_or(&[][..], |l| &l.top).iter();
        let top = top.map(|(id, logprob)| (self.speller.spell(*id), *logprob)).collect();
        Ok(TokenInfo { token: self.speller.spell(id), logprob: logprobs.map(|l| l.chosen), top, offset })
    }

    /// Adds a token. A choice that has ended ignores further tokens; see `ending`.
    pub(crate) fn token(&mut self, id: u32, logprobs: Option<&Logprobs>) -> ApiResult<AnswerPiece> {
        if self.ended {
            return Ok(AnswerPiece::default());
        }
        self.tokens += 1;
        self.waiting.ids.push(id);
        if let Some(logprobs) = logprobs {
            let token_info = self.token_info(id, Some(logprobs))?;
            self.waiting.logprobs.push(token_info);
        }
        let (text, stopped) = match &mut self.text {
            Text::Stream(stream) => {
                let text = stream.push(id)?;
                (text, stream.stopped_by().map(|s| json!(s)))
            }
            Text::Ids => (format!("{id} "), None),
        };
        let mut piece = self.apart(&text);
        let enough = self
            .apart
            .most_calls
            .is_some_and(|most| self.apart.parser.as_ref().is_some_and(|parser| parser.calls_ended() >= most));
        if stopped.is_some() || enough {
            self.end_with("stop", stopped.unwrap_or_default(), &mut piece);
        }
        Ok(self.with_waiting(piece))
    }

    /// The engine has ended the choice for `reason`, by the token `by` if it is one of the client's stop tokens.
    pub(crate) fn end(&mut self, reason: &'static str, by: Option<u32>) -> ApiResult<AnswerPiece> {
        if self.ended {
            return Ok(AnswerPiece::default());
        }
        let (rest, stopped) = match &mut self.text {
            Text::Stream(stream) => {
                let rest = stream.finish()?;
                (rest, stream.stopped_by().map(|s| json!(s)))
            }
            Text::Ids => (String::new(), None),
        };
        let mut piece = self.apart(&rest);
        let reason = if stopped.is_some() { "stop" } else { reason };
        self.end_with(reason, stopped.or(by.map(|id| json!(id))).unwrap_or_default(), &mut piece);
        Ok(self.with_waiting(piece))
    }

    fn end_with(&mut self, reason: &'static str, by: Value, piece: &mut AnswerPiece) {
        self.ended = true;
        if let Some(reasoning) = &mut self.apart.reasoning {
            let rest = reasoning.finish();
            piece.reasoning += &rest.reasoning;
            Self::parse(&mut self.apart.parser, &rest.answer, piece);
        }
        let mut called = false;
        if let Some(parser) = &mut self.apart.parser {
            let parts = parser.finish();
            called = parser.calls() > 0;
            take_parts(parts, piece);
        }
        if let Some(most) = self.apart.most_calls {
            piece.calls.retain(
                |part| !matches!(part, ToolOutputPart::Call { index, .. } | ToolOutputPart::Arguments { index, .. } if *index >= most),
            );
        }
        let calls = called && self.apart.calls_end && reason == "stop";
        piece.ending = Some(Ending { reason: if calls { "tool_calls" } else { reason }, by });
    }

    /// Parses `text`.
    fn apart(&mut self, text: &str) -> AnswerPiece {
        let mut piece = AnswerPiece::default();
        match &mut self.apart.reasoning {
            Some(reasoning) => {
                let split = reasoning.push(text);
                piece.reasoning = split.reasoning;
                Self::parse(&mut self.apart.parser, &split.answer, &mut piece);
            }
            None => Self::parse(&mut self.apart.parser, text, &mut piece),
        }
        piece
    }

    fn parse(parser: &mut Option<ToolCallParser>, text: &str, piece: &mut AnswerPiece) {
        match parser {
            Some(parser) => take_parts(parser.push(text), piece),
            None => piece.text.push_str(text),
        }
    }

    /// Attaches pending data to the first piece with content.
    fn with_waiting(&mut self, mut piece: AnswerPiece) -> AnswerPiece {
        if !piece.is_empty() {
            let waiting = std::mem::take(&mut self.waiting);
            (piece.logprobs, piece.ids) = (waiting.logprobs, waiting.ids);
        }
        piece
    }
}

fn take_parts(parts: Vec<ToolOutputPart>, piece: &mut AnswerPiece) {
    for part in parts {
        match part {
            ToolOutputPart::Text(text) => piece.text.push_str(&text),
            call => piece.calls.push(call),
        }
    }
}

#[cfg(test)]
mod tests {
    use ridge_models::ModelFiles;

    use super::*;
    use crate::tools::{Callable, ToolCallStyle};

    fn tokenizer() -> Tokenizer {
        ModelFiles::open(None).unwrap().tokenizer().unwrap()
    }

    fn choice(stops: &[&str], apart: OutputParsing) -> AnswerChoice {
        let tokenizer = tokenizer();
        let stops: Vec<String> = stops.iter().map(ToString::to_string).collect();
        AnswerChoice::new(Some(&tokenizer), &[1], (&stops, 0), apart, Speller::new(Some(&tokenizer))).unwrap()
    }

    fn said(choice: &mut AnswerChoice, text: &str) -> (String, Vec<ToolOutputPart>, Option<Ending>) {
        let (mut whole, mut calls, mut ending) = (String::new(), Vec::new(), None);
        let mut take = |piece: AnswerPiece| {
            whole += &piece.text;
            calls.extend(piece.calls);
            ending = ending.take().or(piece.ending);
        };
        for id in tokenizer().encode(text, false).unwrap() {
            take(choice.token(id, None).unwrap());
        }
        take(choice.end("length", None).unwrap());
        (whole, calls, ending)
    }

    #[test]
    fn stop_strings_end_answers_and_are_named() {
        let mut choice = choice(&["park", "zzz"], OutputParsing::default());
        let (text, _, ending) = said(&mut choice, "She went to the park. It was");
        assert_eq!(text.trim_start(), "She went to the ");
        assert_eq!(ending, Some(Ending { reason: "stop", by: json!("park") }));
    }

    #[test]
    fn one_call_ends_an_answer_that_may_make_but_one() {
        let call = "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>";
        let parser = || {
            Some(ToolCallParser::new(
                ToolCallStyle::Hermes,
                [Callable { name: "f".into(), parameters: json!({}) }].into(),
            ))
        };
        let count =
            |calls: &[ToolOutputPart]| calls.iter().filter(|c| matches!(c, ToolOutputPart::Call { .. })).count();
        let mut both = choice(&[], OutputParsing { parser: parser(), calls_end: true, ..OutputParsing::default() });
        let (_, calls, ending) = said(&mut both, &format!("{call}{call}"));
        assert_eq!((count(&calls), ending.unwrap().reason), (2, "length"));
        let apart =
            OutputParsing { parser: parser(), calls_end: true, most_calls: Some(1), ..OutputParsing::default() };
        let (_, calls, ending) = said(&mut choice(&[], apart), &format!("{call}{call}"));
        assert_eq!((count(&calls), ending.unwrap().reason), (1, "tool_calls"));
    }

    #[test]
    fn tokens_are_spelt_as_in_the_middle_of_a_text() {
        let tokenizer = tokenizer();
        let speller = Speller::new(Some(&tokenizer));
        let ids = tokenizer.encode("Lily went to", false).unwrap();
        let spelt: String = ids.iter().map(|id| speller.spell(*id).text).collect();
        assert_eq!(spelt.trim_start(), "Lily went to");
        assert_eq!(speller.with_ids(true).spell(7).text, "token_id:7");
    }
}

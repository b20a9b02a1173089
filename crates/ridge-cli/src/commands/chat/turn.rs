//! One turn: from the conversation to its uncached tokens and a reply.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ridge_engine::{Engine, Finish, Request, Sampling, SequenceId, TextStream};
use ridge_hw::units::Seconds;
use ridge_text::template::{ChatInput, Clock, Data};
use ridge_text::{ChatTemplates, Tokenizer};

use crate::conversation::Conversation;
use crate::error::{Error, Result};
use crate::output::count;

/// A model with the cached tokens of one conversation.
pub(super) struct ChatModel {
    pub(super) engine: Engine,
    pub(super) tokenizer: Tokenizer,
    pub(super) templates: ChatTemplates,
    /// The name of the template, if not the default.
    pub(super) template: Option<String>,
    pub(super) variables: Vec<(String, Data)>,
    pub(super) tools: Option<Vec<Data>>,
    pub(super) sampling: Sampling,
    pub(super) stops: Vec<String>,
    pub(super) stop_tokens: Vec<u32>,
    pub(super) max_tokens: usize,
    pub(super) context: usize,
    /// The longest context that the model supports.
    pub(super) max_context: usize,
    pub(super) chunk: usize,
    /// The sequence whose cached tokens are `cached`.
    pub(super) sequence: Option<SequenceId>,
    pub(super) cached: Vec<u32>,
}

/// Receives a reply as it is generated.
pub(super) trait AnswerObserver {
    /// Prompt progress: tokens processed, of the total that is not cached.
    fn reading(&mut self, done: usize, total: usize);

    /// The text continues.
    fn text(&mut self, text: &str) -> Result<()>;
}

/// A reply and its cost.
#[derive(Debug)]
pub(super) struct ChatAnswer {
    pub(super) text: String,
    pub(super) finish: Finish,
    /// Tokens of the conversation, and the number of cached ones among them.
    pub(super) prompt: usize,
    pub(super) reused: usize,
    pub(super) generated: usize,
    /// Total number of messages omitted to fit the context.
    pub(super) left_out: usize,
    reading: Duration,
    answering: Duration,
}

impl ChatAnswer {
    /// The partial reply after an interruption.
    pub(super) fn cancelled(text: String, left_out: usize) -> Self {
        Self {
            text,
            finish: Finish::Cancelled,
            prompt: 0,
            reused: 0,
            generated: 0,
            left_out,
            reading: Duration::ZERO,
            answering: Duration::ZERO,
        }
    }

    pub(super) fn line(&self) -> String {
        format!(
            "prompt {} ({} cached) in {}; generated {} in {}",
            count(self.prompt, "token"),
            self.reused,
            Seconds::from(self.reading),
            count(self.generated, "token"),
            Seconds::from(self.answering),
        )
    }
}

impl ChatModel {
    fn input(&self, messages: Vec<Data>) -> ChatInput {
        let mut input = ChatInput::new(messages, Clock::now_utc());
        input.tools.clone_from(&self.tools);
        input.variables.clone_from(&self.variables);
        input
    }

    fn ids(&self, conversation: &Conversation) -> Result<Vec<u32>> {
        let mut input = self.input(conversation.read()?);
        input.add_generation_prompt = true;
        let text = self.templates.render(self.template.as_deref(), &input)?.text;
        // Templates contain the begin token.
        Ok(self.tokenizer.encode(&text, false)?)
    }

    /// The special token with which the template ends a reply, if any.
    pub(super) fn end_of_turn(&self) -> Option<u32> {
        self.templates.end_of_turn(self.template.as_deref(), &self.input(Vec::new()), &self.tokenizer)
    }

    /// The tokens of the conversation, without its oldest turns if they leave too little room for a reply.
    fn fitting(&self, conversation: &mut Conversation) -> Result<Vec<u32>> {
        let mut ids = self.ids(conversation)?;
        let room = self.max_tokens.min(self.context / 4).max(1);
        if ids.len() + room <= self.context {
            return Ok(ids);
        }
        // Drop to half the context, so that the cached prefix stays valid over several turns.
        while ids.len() > self.context / 2 && conversation.leave_out_a_turn() {
            ids = self.ids(conversation)?;
        }
        if ids.len() >= self.context {
            return Err(Error::TurnBeyondContext { tokens: ids.len(), context: self.context });
        }
        Ok(ids)
    }

    /// Generates the reply to a conversation whose last message is the user's. `interrupted` ends the reply, or the prompt
    /// processing before it.
    pub(super) fn answer(
        &mut self,
        conversation: &mut Conversation,
        interrupted: &AtomicBool,
        observer: &mut dyn AnswerObserver,
    ) -> Result<ChatAnswer> {
        let started = Instant::now();
        let ids = self.fitting(conversation)?;
        // The last token is recomputed if it is cached: the first token of the reply is sampled from its logits.
        let same = ids.iter().zip(&self.cached).take_while(|(a, b)| a == b).count().min(ids.len().saturating_sub(1));
        let sequence = match self.sequence {
            Some(sequence) => sequence,
            None => self.engine.start(self.sampling.clone(), ids.len()).ok_or(Error::Interrupted)?,
        };
        self.sequence = Some(sequence);
        self.engine.truncate(sequence, same);
        // If a sliding window has freed the blocks needed there, the prompt is recomputed.
        let same = self.engine.length(sequence).unwrap_or(0).min(same);
        self.engine.set_prompt(sequence, ids.len());
        self.cached.truncate(same);
        let empty = ChatAnswer::cancelled(String::new(), conversation.left_out());
        let mut answer = ChatAnswer { prompt: ids.len(), reused: same, ..empty };
        // All but the last chunk here, to see an interruption between them.
        let mut new = &ids[same..];
        let total = new.len();
        observer.reading(0, total);
        while new.len() > self.chunk {
            if interrupted.load(Ordering::Relaxed) {
                return Ok(answer);
            }
            let (chunk, rest) = new.split_at(self.chunk);
            self.engine.step(&[(sequence, chunk)], false, &mut Vec::new())?;
            self.cached.extend(chunk);
            new = rest;
            observer.reading(total - new.len(), total);
        }
        let request = Request {
            prompt: new.to_vec(),
            sampling: self.sampling.clone(),
            max_tokens: self.max_tokens,
            stop_tokens: self.stop_tokens.clone(),
        };
        let mut stream = TextStream::new(&self.tokenizer, &self.stops);
        stream.skip(&ids)?;
        let (mut failure, mut first, mut stopped) = (None, None, false);
        let mut on_token = |id: u32, text: &mut String| -> Result<bool> {
            first.get_or_insert_with(Instant::now);
            let piece = stream.push(id)?;
            observer.text(&piece)?;
            text.push_str(&piece);
            stopped = stream.stopped();
            Ok(stopped || interrupted.load(Ordering::Relaxed))
        };
        let text = &mut answer.text;
        let generated = self.engine.resume(sequence, &request, |id| match on_token(id, text) {
            Ok(false) => ControlFlow::Continue(()),
            Ok(true) => ControlFlow::Break(()),
            Err(error) => {
                failure = Some(error);
                ControlFlow::Break(())
            }
        });
        self.cached.extend(new);
        self.cached.extend(generated.iter().flat_map(|g| &g.tokens));
        self.cached.truncate(self.engine.length(sequence).unwrap_or(0));
        let generated = generated?;
        if let Some(error) = failure {
            return Err(error);
        }
        let rest = stream.finish()?;
        observer.text(&rest)?;
        answer.text.push_str(&rest);
        answer.finish = if stopped { Finish::Stop } else { generated.finish };
        answer.generated = generated.tokens.len();
        let ended = Instant::now();
        let first = first.unwrap_or(ended);
        (answer.reading, answer.answering) = (first - started, ended - first);
        Ok(answer)
    }
}

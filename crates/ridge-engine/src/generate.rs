//! Generation of one sequence at a time, for a single user.

use std::ops::ControlFlow;

use crate::engine::{Engine, Row, SequenceId};
use crate::error::{EngineError, Result};
use crate::sampling::{Logprobs, Sampling};

/// What is to be generated.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Tokens of the prompt.
    pub prompt: Vec<u32>,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Tokens to generate at most.
    pub max_tokens: usize,
    /// Tokens that end the answer, and are not part of it.
    pub stop_tokens: Vec<u32>,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model ended it with one of the stop tokens.
    Stop,
    /// It has `max_tokens` tokens.
    Length,
    /// The context is full.
    Context,
    /// Whoever receives the tokens wanted no more.
    Cancelled,
}

/// A finished answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Generated {
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// The probabilities of each, if they were asked for.
    pub logprobs: Vec<Logprobs>,
    /// Why it ended.
    pub finish: Finish,
    /// What became of drafts.
    pub speculation: Speculation,
}

/// Candidates for tokens of an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Speculation {
    /// Those that steps computed.
    pub candidates: usize,
    /// Those that were accepted.
    pub accepted: usize,
}

impl Engine {
    /// Generates one answer. `on_token` is given each token as it comes, and can end the answer after it.
    ///
    /// # Errors
    /// When the request is not valid, all rows are taken, the cache is full, or the device fails.
    pub fn generate(
        &mut self,
        request: &Request,
        mut on_token: impl FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Generated> {
        self.check(request)?;
        let id = self.start(request.sampling.clone(), request.prompt.len()).ok_or_else(|| EngineError::Setting {
            name: "sequences",
            value: self.options.sequences.to_string(),
            why: "all of them are running; wait for one to end".into(),
        })?;
        let result = self.answer(id, 0, request, &mut on_token);
        self.end(id);
        result
    }

    /// Is `request` one that this engine can run?
    ///
    /// # Errors
    /// Says what is wrong with it.
    pub fn check(&self, request: &Request) -> Result<()> {
        self.check_after(0, request)
    }

    /// Is `request` one that can follow `cached` tokens?
    fn check_after(&self, cached: usize, request: &Request) -> Result<()> {
        self.check_parts(&request.sampling, &request.prompt)?;
        let (prompt, context) = (cached + request.prompt.len(), self.options.context);
        if request.max_tokens > 0 && prompt >= context {
            return Err(EngineError::PromptTooLong { prompt, context });
        }
        Ok(())
    }

    /// Are these settings and tokens that the model has?
    pub(crate) fn check_parts(&self, sampling: &Sampling, prompt: &[u32]) -> Result<()> {
        sampling.check()?;
        let mut biased = sampling.logit_bias.iter().map(|(id, _)| *id);
        if let Some(token) = biased.find(|id| *id as usize >= self.vocab) {
            return Err(EngineError::Setting {
                name: "logit_bias",
                value: token.to_string(),
                why: format!("is outside the vocabulary of {}", self.vocab),
            });
        }
        if prompt.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        self.known(prompt)
    }

    pub(crate) fn known(&self, tokens: &[u32]) -> Result<()> {
        let unknown = tokens.iter().find(|t| **t as usize >= self.vocab);
        unknown.map_or(Ok(()), |t| Err(EngineError::UnknownToken { token: *t, vocab: self.vocab }))
    }

    fn answer(
        &mut self,
        id: SequenceId,
        cached: usize,
        request: &Request,
        on_token: &mut impl FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Generated> {
        let mut tokens = Vec::with_capacity(request.max_tokens.min(self.options.context));
        let mut logprobs = Vec::new();
        if request.max_tokens == 0 {
            return Ok(Generated { tokens, logprobs, finish: Finish::Length, speculation: Speculation::default() });
        }
        let mut chunks = request.prompt.chunks(self.options.chunk).peekable();
        let mut step = (0, 0);
        while let Some(chunk) = chunks.next() {
            let follower = chunks.peek().map(|next| next[0]);
            step = self.run_row(&Row { sample: follower.is_none(), follower, ..Row::of(id, chunk) })?;
        }
        let (mut speculation, mut candidates) = (Speculation::default(), Vec::new());
        let prompt = cached + request.prompt.len();
        loop {
            let (accepted, next) = step;
            speculation.accepted += accepted;
            let new = candidates.drain(..).take(accepted).chain([next]);
            let finish = self.say(new, request, prompt, &mut tokens, on_token);
            logprobs.extend(self.logprobs(0).filter(|_| finish != Some(Finish::Stop)).cloned());
            if let Some(finish) = finish {
                // The answer may have ended before the last candidate that was accepted.
                self.truncate(id, prompt + tokens.len() - usize::from(finish != Finish::Stop));
                return Ok(Generated { tokens, logprobs, finish, speculation });
            }
            if request.sampling.logprobs.is_none() && self.takes_candidates(id, 1) {
                // The token behind them needs a place too.
                let left = (request.max_tokens - tokens.len()).min(self.options.context - prompt - tokens.len());
                candidates.extend(self.drafts(id).iter().take(left.saturating_sub(1)));
                speculation.candidates += candidates.len();
            }
            let last = [tokens[tokens.len() - 1]];
            step = self.run_row(&Row { sample: true, candidates: &candidates, ..Row::of(id, &last) })?;
        }
    }

    /// Adds new tokens to an answer behind `prompt` tokens. How does it end, if it does?
    fn say(
        &self,
        new: impl Iterator<Item = u32>,
        request: &Request,
        prompt: usize,
        tokens: &mut Vec<u32>,
        on_token: &mut impl FnMut(u32) -> ControlFlow<()>,
    ) -> Option<Finish> {
        for token in new {
            if request.stop_tokens.contains(&token) {
                return Some(Finish::Stop);
            }
            tokens.push(token);
            match on_token(token) {
                ControlFlow::Break(()) => return Some(Finish::Cancelled),
                ControlFlow::Continue(()) if tokens.len() == request.max_tokens => return Some(Finish::Length),
                ControlFlow::Continue(()) if prompt + tokens.len() == self.options.context => {
                    return Some(Finish::Context);
                }
                ControlFlow::Continue(()) => {}
            }
        }
        None
    }

    /// Goes on with a running sequence: `request.prompt` follows what it has in the cache, and the answer follows that.
    /// The last token of the answer is not in the cache yet, unless a stop token came after it.
    ///
    /// # Errors
    /// As for [`generate`](Self::generate), and when the sequence has ended.
    pub fn resume(
        &mut self,
        id: SequenceId,
        request: &Request,
        mut on_token: impl FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Generated> {
        let cached = self.length(id).ok_or_else(|| EngineError::Setting {
            name: "sequence",
            value: id.to_string(),
            why: "is not running".into(),
        })?;
        self.check_after(cached, request)?;
        self.set_sampling(id, &request.sampling);
        self.set_prompt(id, cached + request.prompt.len());
        self.answer(id, cached, request, &mut on_token)
    }
}

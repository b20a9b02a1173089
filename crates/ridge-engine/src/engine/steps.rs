//! Steps of an engine: run to completion one by one, or submitted and completed with two in flight.

use ridge_runtime::LaunchTime;

use super::pending::{PendingStep, StepSource};
use super::sequence::{Next, Outcome, Row, SAMPLED, SequenceId};
use super::{Engine, STEPS_IN_FLIGHT};
use crate::error::{EngineError, Result};
use crate::programs::MAX_CANDIDATES;
use crate::sampling::Logprobs;

impl Engine {
    /// Runs one step over `(sequence, tokens)` pairs: appends each sequence's tokens to the cache, and gives the token
    /// that follows each if `sample` says so. A sequence stands in it once.
    ///
    /// # Errors
    /// When the work is not valid (a sequence that ended or stands in it twice, no tokens, a token that is not of the
    /// vocabulary) or the cache is full, before anything has changed; when the device fails, or the logits are not
    /// finite.
    pub fn step(&mut self, work: &[(SequenceId, &[u32])], sample: bool, next: &mut Vec<u32>) -> Result<()> {
        next.clear();
        if work.is_empty() {
            return Ok(());
        }
        self.run(&rows(work, sample))?;
        self.tokens(next)
    }

    /// Runs a step of one row to its end: how many of its candidates were accepted, and the token after them, 0 where that is not
    /// asked for.
    pub(crate) fn run_row(&mut self, row: &Row<'_>) -> Result<(usize, u32)> {
        self.run(std::slice::from_ref(row))?;
        match self.outcomes.first().map(|outcome| (outcome.accepted, outcome.next)) {
            Some((accepted, Next::Token(token))) => Ok((accepted, token)),
            Some((_, Next::NotFinite(position))) => Err(EngineError::NotFinite { position }),
            Some((_, Next::NotAsked)) | None => Ok((0, 0)),
        }
    }

    /// Runs a step to its end, with the outcomes of its rows in `outcomes`.
    fn run(&mut self, rows: &[Row<'_>]) -> Result<()> {
        self.submit(rows)?;
        let mut outcomes = std::mem::take(&mut self.outcomes);
        let completed = self.complete(&mut outcomes);
        self.outcomes = outcomes;
        completed
    }

    /// Runs a step as [`Engine::step`] does, and tells what each of its launches took.
    ///
    /// # Errors
    /// As for [`Engine::step`], where the device does not time launches, and where tokens of prompts and of answers
    /// stand in one step though the model has a graph for each.
    pub fn step_timed(
        &mut self,
        work: &[(SequenceId, &[u32])],
        sample: bool,
        next: &mut Vec<u32>,
    ) -> Result<Vec<LaunchTime>> {
        next.clear();
        let mut step = self.prepare(&rows(work, sample))?;
        let times = self.rows.send().and_then(|()| step.timed(&mut self.programs));
        self.follow_weights();
        self.flights.push_back(step);
        let times = times.inspect_err(|_| self.lose_steps())?;
        let mut outcomes = std::mem::take(&mut self.outcomes);
        let collected = self.collect(&mut outcomes);
        self.outcomes = outcomes;
        collected?;
        self.tokens(next)?;
        Ok(times)
    }

    /// The tokens of the last step's outcomes.
    fn tokens(&self, next: &mut Vec<u32>) -> Result<()> {
        for outcome in &self.outcomes {
            match outcome.next {
                Next::NotAsked => {}
                Next::Token(token) => next.push(token),
                Next::NotFinite(position) => return Err(EngineError::NotFinite { position }),
            }
        }
        Ok(())
    }

    /// What row `row` of the last [`step`](Self::step) asked to know of its token's probability.
    pub fn logprobs(&self, row: usize) -> Option<&Logprobs> {
        self.outcomes.get(row)?.logprobs.as_ref()
    }

    /// Queues a step and returns at once; [`complete`](Self::complete) waits for it. A sequence stands in it once. There may be
    /// [`STEPS_IN_FLIGHT`] of them.
    ///
    /// # Errors
    /// As for [`step`](Self::step), and where as many steps are in flight as may be, or one waits for its masks. When the
    /// device failed, all steps in flight are lost, as [`complete`](Self::complete) says.
    pub fn submit(&mut self, rows: &[Row<'_>]) -> Result<()> {
        let mut step = self.prepare(rows)?;
        let submitted = self.rows.send().and_then(|()| step.submit(&mut self.programs));
        self.flights.push_back(step);
        if let Err(error) = submitted {
            self.lose_steps();
            return Err(error);
        }
        // What changed while the step was prepared may be in its blocks or not.
        self.follow_weights();
        Ok(())
    }

    /// Steps in flight.
    pub fn in_flight(&self) -> usize {
        self.flights.len()
    }

    /// Does the last step wait for the masks of its late rows?
    pub fn is_late(&self) -> bool {
        self.flights.back().is_some_and(PendingStep::is_late)
    }

    /// Tells the masks of the late rows of the last step, as [`Row::forbidden`] has them, and queues the rest of it. Nothing
    /// where it does not wait for any.
    ///
    /// # Errors
    /// When the device failed.
    pub fn release<'a>(&mut self, masks: impl Fn(SequenceId) -> &'a [u32]) -> Result<()> {
        match self.flights.back_mut() {
            Some(step) => step.release(&mut self.programs, masks),
            None => Ok(()),
        }
    }

    /// Waits until the first step in flight, if there is one, has sampled; what the model's module drafts behind it may still be
    /// computed. [`complete`](Self::complete) has its outcomes.
    ///
    /// # Errors
    /// As for [`complete`](Self::complete).
    pub fn wait_sampled(&mut self) -> Result<()> {
        let Some(step) = self.flights.front_mut() else { return Ok(()) };
        step.wait_sampled(&mut self.programs).inspect_err(|_| self.lose_steps())
    }

    /// Waits for the first step in flight, if there is one, and says what it brought each row. Sequences that ended
    /// meanwhile have no outcomes.
    ///
    /// # Errors
    /// When the device failed. All steps in flight are lost: their tokens are not in the cache, and sequences are as they
    /// were before.
    pub fn complete(&mut self, outcomes: &mut Vec<Outcome>) -> Result<()> {
        outcomes.clear();
        let Some(step) = self.flights.front_mut() else { return Ok(()) };
        let waited = step.wait(&mut self.programs);
        // What changed rows was queued before the step.
        let waited = waited.and_then(|()| if self.flights.len() == 1 { self.rows.wait() } else { Ok(()) });
        if let Err(error) = waited {
            self.lose_steps();
            return Err(error);
        }
        self.collect(outcomes)
    }

    /// Gives up all steps in flight, after one failed.
    fn lose_steps(&mut self) {
        while let Some(mut step) = self.flights.pop_front() {
            // It failed with the first.
            let _ = step.wait(&mut self.programs);
            step.clear();
            self.spare.push(step);
        }
        for sequence in self.sequences.iter_mut().flatten() {
            (sequence.length, sequence.flying, sequence.guesses) = (sequence.complete, 0, false);
            sequence.drafts.clear();
            self.states.iter_mut().for_each(|states| states.take_back(&mut sequence.state));
        }
        self.programs.forget();
        self.restore_rows();
    }

    /// Has the rows of all sequences sent again: nobody knows how far a step that failed came.
    fn restore_rows(&mut self) {
        self.rows.forget();
        for (row, sequence) in self.sequences.iter().enumerate() {
            let Some(sequence) = sequence else { continue };
            let (columns, rows) = (&self.columns, &mut self.rows);
            columns.set_sampling(rows, row, &sequence.sampling);
            columns.set_stream(rows, row, sequence.stream);
            columns.set_prompt(rows, row, sequence.prompt);
            columns.set_blocks(rows, row, 0, &sequence.blocks);
            let windows = sequence.windows.iter().enumerate();
            windows.for_each(|(nth, table)| columns.set_window(rows, row, nth, 0, table));
        }
    }

    /// Reserves blocks for a step and fills its inputs.
    fn prepare(&mut self, rows: &[Row<'_>]) -> Result<PendingStep> {
        if self.flights.len() >= STEPS_IN_FLIGHT || self.is_late() {
            return Err(EngineError::Setting {
                name: "steps",
                value: (self.flights.len() + 1).to_string(),
                why: "the maximum number of steps is queued, or one waits for masks; complete or release one first"
                    .into(),
            });
        }
        self.follow_weights();
        self.reserve(rows)?;
        self.reserve_drafts(rows);
        for Row { id, .. } in rows {
            if let (Some(states), Some(sequence)) = (&mut self.states, &mut self.sequences[id.row]) {
                states.submit(&mut sequence.state);
            }
        }
        let from = StepSource {
            sequences: &self.sequences,
            cache_blocks: self.blocks.count(),
            table: self.table,
            rows: self.options.sequences,
            vocab: self.vocab,
        };
        let mut step = self.spare.pop().unwrap_or_default();
        if let Err(error) = step.fill(rows, &from, &mut self.programs) {
            step.clear();
            self.spare.push(step);
            for Row { id, .. } in rows {
                if let (Some(states), Some(sequence)) = (&mut self.states, &mut self.sequences[id.row]) {
                    states.cancel(&mut sequence.state);
                }
            }
            return Err(error);
        }
        for Row { id, tokens, candidates, sample, .. } in rows {
            if let Some(sequence) = &mut self.sequences[id.row] {
                self.rows.set_length(id.row, sequence.length);
                sequence.length += tokens.len() + candidates.len();
                sequence.flying += usize::from(*sample);
                sequence.drafts.clear();
                sequence.guesses |= !candidates.is_empty();
                self.rows.moved(id.row, candidates.is_empty().then_some(sequence.length));
            }
        }
        Ok(step)
    }

    /// Reads the outcomes of the first step, which is complete.
    fn collect(&mut self, outcomes: &mut Vec<Outcome>) -> Result<()> {
        let Some(mut step) = self.flights.pop_front() else { return Ok(()) };
        let Self { programs, sequences, blocks, windows, block_size, .. } = self;
        let collected = step.collect(outcomes, programs, sequences, (blocks, windows), *block_size);
        for outcome in outcomes.iter() {
            if let (Some(states), Some(sequence)) = (&mut self.states, &mut self.sequences[outcome.id.row]) {
                let shared = sequence.shared.as_ref().filter(|shared| shared.rest.is_empty());
                states.complete(&mut sequence.state);
                if let Some(shared) = shared.filter(|_| sequence.complete <= sequence.prompt) {
                    states.keep(&sequence.state, shared.prefix);
                }
            }
        }
        for id in step.guessing() {
            // It stands in no step behind one with candidates.
            if let Some(sequence) = self.sequences[id.row].as_mut().filter(|s| s.number == id.number) {
                (sequence.length, sequence.guesses) = (sequence.complete, false);
                self.rows.moved(id.row, Some(sequence.length));
            }
        }
        step.clear();
        self.spare.push(step);
        collected
    }

    /// Gives every sequence the blocks that its tokens need, or none to any.
    fn reserve(&mut self, rows: &[Row<'_>]) -> Result<()> {
        let (mut total, mut windows) = (0, Vec::new());
        self.steps += 1;
        for Row { id, tokens, candidates, .. } in rows {
            let wrong =
                |why: &str| EngineError::Setting { name: "sequence", value: id.number.to_string(), why: why.into() };
            let sequence = self.sequences[id.row].as_ref().filter(|s| s.number == id.number);
            let sequence = sequence.ok_or_else(|| wrong("is not running"))?;
            if **tokens != [SAMPLED] || sequence.flying == 0 {
                self.known(tokens)?;
            }
            self.known(candidates)?;
            if candidates.len() > MAX_CANDIDATES {
                return Err(EngineError::Setting {
                    name: "candidates",
                    value: candidates.len().to_string(),
                    why: format!("a row has at most {MAX_CANDIDATES} draft tokens"),
                });
            }
            let may_guess = self.takes_candidates(*id, tokens.len());
            let sequence = self.sequences[id.row].as_mut().ok_or_else(|| wrong("is not running"))?;
            if std::mem::replace(&mut sequence.step, self.steps) == self.steps {
                return Err(wrong("appears twice in one step; give all its tokens together"));
            }
            if sequence.guesses || (!candidates.is_empty() && sequence.flying > 0) {
                return Err(wrong("has draft tokens and a step in flight; complete that first"));
            }
            if !may_guess && !candidates.is_empty() {
                return Err(wrong("has draft tokens, which the model does not support; see `takes_candidates`"));
            }
            if tokens.is_empty() {
                return Err(wrong("has no tokens in this step; leave it out"));
            }
            let needed = (sequence.length + tokens.len() + candidates.len()).div_ceil(self.block_size);
            if needed > self.table {
                return Err(EngineError::CacheFull { tokens: tokens.len() });
            }
            total += needed.saturating_sub(sequence.blocks.len());
            let length = sequence.length + tokens.len() + candidates.len();
            self.windows.needed(&sequence.windows, length, &mut windows);
        }
        if total > self.blocks.free() || !self.windows.have(&windows) {
            return Err(EngineError::CacheFull { tokens: rows.iter().map(|r| r.tokens.len()).sum() });
        }
        for row in rows {
            self.grow(row.id, row.tokens.len() + row.candidates.len());
        }
        Ok(())
    }

    /// Gives sequences blocks for what the prediction module adds to its cache behind a step's tokens, as far as there are some.
    /// Without, it adds nothing there and later drafts do not see earlier ones: the columns behind the blocks of the row may name
    /// those of another sequence by now, so they are cleared.
    fn reserve_drafts(&mut self, rows: &[Row<'_>]) {
        let behind = self.programs.drafts().saturating_sub(1);
        for row in rows.iter().filter(|row| row.sample && behind > 0) {
            let tokens = row.tokens.len() + row.candidates.len() + behind;
            if self.grow(row.id, tokens) {
                continue;
            }
            if let Some(sequence) = &self.sequences[row.id.row] {
                let needed = (sequence.length + tokens).div_ceil(self.block_size).min(self.table);
                self.columns.clear_blocks(&mut self.rows, row.id.row, sequence.blocks.len()..needed);
            }
        }
    }
}

fn rows<'a>(work: &[(SequenceId, &'a [u32])], sample: bool) -> Vec<Row<'a>> {
    work.iter().map(|(id, tokens)| Row { sample, ..Row::of(*id, tokens) }).collect()
}

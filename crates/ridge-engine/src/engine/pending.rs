//! A step from its rows to their outcomes: the program runs that compute it.
//!
//! If a model computes generated tokens and prompt tokens with different graphs, a step is up to two runs, prompts first, and a
//! row that spans the end of its prompt has a part in both. How a token is computed therefore depends only on its position.

use super::sequence::{Next, Outcome, Row, SAMPLED, Sequence, SequenceId, recycled};
use ridge_runtime::{LaunchTime, Slot, Ticket};

use crate::blocks::{Blocks, computed};
use crate::cache::WindowPools;
use crate::error::{EngineError, Result};
use crate::extents::{Extents, Wanted};
use crate::inputs::{Line, RowInputs, expand, fill, masks, tops};
use crate::programs::Programs;
use crate::sampling::{Logprobs, Sampling};

/// How rows are sampled whose next token is not asked for.
static NOT_SAMPLED: Sampling = Sampling::GREEDY;

/// Minimum number of columns of the block table.
const MIN_TABLE: usize = 16;

/// What the inputs of a step follow from, besides its rows.
pub(super) struct StepSource<'a> {
    /// The sequences, by [`SequenceId::row`].
    pub(super) sequences: &'a [Option<Sequence>],
    /// Blocks of the cache.
    pub(super) cache_blocks: usize,
    /// Maximum number of blocks of a sequence.
    pub(super) table: usize,
    /// Rows of the tables on the device.
    pub(super) rows: usize,
    pub(super) vocab: usize,
}

/// A step that is prepared, submitted, perhaps released, and then collected.
#[derive(Default)]
pub(super) struct PendingStep {
    /// Those of rows that were taken back meanwhile are none.
    rows: Vec<Option<SequenceId>>,
    /// Of tokens of prompts, or all where they are not told apart, and of tokens of answers.
    runs: [ProgramRun; 2],
    /// Of what is drafted behind the rows that sample, in a model with a prediction module.
    drafts: ProgramRun,
    /// Room for the inputs of rows; empty between steps.
    inputs: Vec<RowInputs<'static>>,
    /// Room for the place of each row's outcome.
    places: Vec<Option<usize>>,
}

/// A run of a program.
#[derive(Default)]
struct ProgramRun {
    wanted: Wanted,
    extents: Extents,
    parts: Vec<RowPart>,
    /// The tokens of all parts.
    tokens: Vec<u32>,
    lines: Vec<Line>,
    /// The words that a complete step sampled, one a line.
    sampled: Vec<[u8; 4]>,
    slot: Option<Slot>,
    ticket: Option<Ticket>,
    /// The masks of its rows, while some are not known.
    masks: Vec<u8>,
    late: bool,
}

/// What a run computes of a row.
struct RowPart {
    /// Number of the row.
    row: usize,
    tokens: usize,
    sample: bool,
    targets: usize,
    /// Candidates behind its tokens.
    candidates: usize,
    /// Is its mask told when the step is released?
    late: bool,
}

impl RowPart {
    /// Rows of the step that it is.
    fn lines(&self) -> usize {
        1 + self.candidates
    }
}

impl PendingStep {
    /// The runs that compute something, in order.
    fn runs(&mut self) -> impl Iterator<Item = &mut ProgramRun> {
        self.runs.iter_mut().chain([&mut self.drafts]).filter(|run| !run.parts.is_empty())
    }

    /// Queues the runs.
    pub(super) fn submit(&mut self, programs: &mut Programs) -> Result<()> {
        for run in self.runs() {
            let slot = run.slot.take().expect("filled before it is submitted");
            run.ticket = Some(programs.ready(run.wanted, run.extents)?.steps().submit(slot)?);
        }
        Ok(())
    }

    /// Does it wait for masks?
    pub(super) fn is_late(&self) -> bool {
        self.runs.iter().any(|run| run.late)
    }

    /// Queues what waits for masks; `of` has those of rows that were late.
    pub(super) fn release<'a>(&mut self, programs: &mut Programs, of: impl Fn(SequenceId) -> &'a [u32]) -> Result<()> {
        let Self { rows, runs, .. } = self;
        for run in runs.iter_mut().filter(|run| run.late) {
            run.late = false;
            let width = 4 * run.extents.forbidden;
            let mut line = 0;
            for part in &run.parts {
                if part.late {
                    let words = rows[part.row].map_or(&[][..], &of);
                    let to = run.masks[line * width..][..width].as_chunks_mut().0;
                    to.iter_mut().zip(words).for_each(|(to, word)| *to = word.to_le_bytes());
                }
                line += part.lines();
            }
            if let Some(ticket) = &run.ticket {
                programs.ready(run.wanted, run.extents)?.release(ticket, &run.masks)?;
            }
        }
        Ok(())
    }

    /// Waits for all runs, also where one failed; releases what is held.
    pub(super) fn wait(&mut self, programs: &mut Programs) -> Result<()> {
        let mut all = self.release(programs, |_| &[]);
        for run in self.runs() {
            let Some(ticket) = &run.ticket else { continue };
            let waited = programs.ready(run.wanted, run.extents).and_then(|ready| Ok(ready.steps().wait(ticket)?));
            all = all.and(waited);
        }
        all
    }

    /// Waits for the runs that sample, also where one waits for masks no longer, but not for what is drafted behind them.
    pub(super) fn wait_sampled(&mut self, programs: &mut Programs) -> Result<()> {
        self.release(programs, |_| &[])?;
        for run in self.runs.iter().filter(|run| !run.parts.is_empty()) {
            let Some(ticket) = &run.ticket else { continue };
            programs.ready(run.wanted, run.extents)?.steps().wait(ticket)?;
        }
        Ok(())
    }

    /// Gives up what was filled or submitted.
    pub(super) fn clear(&mut self) {
        self.rows.clear();
        for run in self.runs.iter_mut().chain([&mut self.drafts]) {
            run.parts.clear();
            (run.slot, run.ticket, run.late) = (None, None, false);
        }
    }

    /// The sequences of rows with candidates.
    pub(super) fn guessing(&self) -> impl Iterator<Item = SequenceId> {
        let guesses = |part: &&RowPart| part.candidates > 0;
        self.runs.iter().flat_map(|run| &run.parts).filter(guesses).filter_map(|part| self.rows[part.row])
    }

    /// Takes a sequence back: it has no outcome.
    pub(super) fn take_back(&mut self, id: SequenceId) {
        self.rows.iter_mut().filter(|row| **row == Some(id)).for_each(|row| *row = None);
    }

    /// Runs the step to its end and tells what each launch took, if it is one program. Nothing is drafted.
    pub(super) fn timed(&mut self, programs: &mut Programs) -> Result<Vec<LaunchTime>> {
        self.drafts.parts.clear();
        self.drafts.slot = None;
        let mut runs = self.runs();
        let (Some(run), None) = (runs.next(), runs.next()) else {
            return Err(EngineError::Setting {
                name: "step",
                value: "of prompts and answers".into(),
                why: "uses two programs; time a step of one kind".into(),
            });
        };
        let steps = programs.ready(run.wanted, run.extents)?.steps();
        let slot = run.slot.take().expect("filled before it is run");
        let times = steps.timed(&slot)?;
        run.ticket = Some(slot.into());
        Ok(times)
    }
}

/// Runs neutral steps in a bucket that the device learns from: they touch nothing that outlives a step.
///
/// # Errors
/// When the device failed.
pub(super) fn learn(programs: &mut Programs, wanted: Wanted, extents: Extents) -> Result<()> {
    let ready = programs.ready(wanted, extents)?;
    for _ in 0..ready.steps().steps_to_learn() {
        let slot = ready.steps().stage()?;
        let masks = vec![0; 4 * extents.seqs * extents.forbidden];
        fill(ready, &slot, &[], (&[], &[]), Some(&masks));
        let ticket = ready.steps().submit(slot)?;
        ready.steps().wait(&ticket)?;
    }
    Ok(())
}

/// What a row has of tokens before `border`, counted from its first, or of those behind it, and how many it has before
/// that part. `None` where that is nothing.
fn part<'a>(row: &Row<'a>, border: usize, behind: bool) -> Option<(usize, Row<'a>)> {
    let border = border.min(row.tokens.len());
    let tokens = row.tokens.split_at(border);
    let targets = row.targets.split_at(border.min(row.targets.len()));
    let last = behind || tokens.1.is_empty();
    let part = Row {
        id: row.id,
        tokens: if behind { tokens.1 } else { tokens.0 },
        sample: row.sample && last,
        targets: if behind { targets.1 } else { targets.0 },
        forbidden: if last { row.forbidden } else { &[] },
        candidates: if last { row.candidates } else { &[] },
        follower: if last { row.follower } else { tokens.1.first().copied() },
        late: row.late && last,
    };
    (!part.tokens.is_empty()).then_some((if behind { border } else { 0 }, part))
}

impl PendingStep {
    /// Takes over the rows of a step and fills its inputs. Their sequences have the blocks that they need.
    ///
    /// # Errors
    /// When a program does not compile, or memory runs out for its bucket.
    pub(super) fn fill(&mut self, rows: &[Row<'_>], from: &StepSource<'_>, programs: &mut Programs) -> Result<()> {
        self.clear();
        self.rows.extend(rows.iter().map(|row| Some(row.id)));
        for answer in [false, true].into_iter().take(1 + usize::from(programs.divide())) {
            self.fill_run(rows, answer, from, programs)?;
        }
        // Nothing is queued behind a step that waits for masks.
        if programs.drafts() > 0 && !self.is_late() { self.fill_drafts(rows, from, programs) } else { Ok(()) }
    }

    /// Fills the inputs of what drafts behind the rows that sample: each is one token, which the step samples.
    fn fill_drafts(&mut self, rows: &[Row<'_>], from: &StepSource<'_>, programs: &mut Programs) -> Result<()> {
        let run = &mut self.drafts;
        let mut inputs = recycled(std::mem::take(&mut self.inputs));
        for (at, row) in rows.iter().enumerate().filter(|(_, row)| row.sample) {
            let blocks = from.sequences[row.id.row].as_ref().expect("has blocks reserved").blocks.len();
            run.parts.push(RowPart { row: at, tokens: 1, sample: false, targets: 0, candidates: 0, late: false });
            let row = Row::of(row.id, &[SAMPLED]);
            inputs.push(RowInputs { row, at: row.id.row, blocks, sampling: &NOT_SAMPLED, state: [-1; 2] });
        }
        if !inputs.is_empty() {
            expand(&inputs, &mut run.lines);
            let (count, table) = (inputs.len(), inputs.iter().map(|line| line.blocks).max().unwrap_or(0));
            let table = table.next_power_of_two().max(MIN_TABLE).min(from.table);
            let extents = Extents {
                rows: from.rows,
                tokens: count,
                seqs: count,
                table,
                blocks: from.cache_blocks,
                ..Extents::default()
            };
            (run.wanted, run.extents) = programs.serving(Wanted { drafts: true, ..Wanted::default() }, extents, false);
            let ready = programs.ready(run.wanted, run.extents)?;
            let slot = ready.steps().stage()?;
            fill(ready, &slot, &[], (&inputs, &run.lines), None);
            run.slot = Some(slot);
        }
        self.inputs = recycled(inputs);
        Ok(())
    }

    /// Takes the drafts of a complete step over into the sequences that it sampled a token of.
    fn collect_drafts(
        &mut self,
        outcomes: &[Outcome],
        programs: &mut Programs,
        sequences: &mut [Option<Sequence>],
    ) -> Result<()> {
        let Self { drafts: run, places, .. } = self;
        let Some(ticket) = run.ticket.take() else { return Ok(()) };
        let count = programs.drafts();
        let ready = programs.ready(run.wanted, run.extents)?;
        let lines = ready.words(&ticket, 0).chunks_exact(count);
        for (part, drafts) in run.parts.iter().zip(lines) {
            let Some(outcome) = places[part.row].map(|place| &outcomes[place]) else { continue };
            let Some(sequence) = sequences[outcome.id.row].as_mut() else { continue };
            // Those of a step before this one, with which it was in flight, stood behind an earlier token.
            sequence.drafts.clear();
            if matches!(outcome.next, Next::Token(_)) {
                // Where none can be chosen, nothing follows.
                sequence.drafts.extend(drafts.iter().map_while(|word| u32::try_from(i32::from_le_bytes(*word)).ok()));
            }
        }
        Ok(())
    }

    /// Fills the inputs of the run of prompts or of answers.
    fn fill_run(
        &mut self,
        rows: &[Row<'_>],
        answer: bool,
        from: &StepSource<'_>,
        programs: &mut Programs,
    ) -> Result<()> {
        let run = &mut self.runs[usize::from(answer)];
        run.tokens.clear();
        let divide = programs.divide();
        // Of the most likely tokens in the places of targets.
        let (mut told, mut prompts) = (0, false);
        let mut inputs = recycled(std::mem::take(&mut self.inputs));
        for (at, row) in rows.iter().enumerate() {
            let sequence = from.sequences[row.id.row].as_ref().expect("has blocks reserved");
            let border = if divide { sequence.prompt.saturating_sub(sequence.length) } else { usize::MAX };
            let Some((before, row)) = part(row, border, answer) else { continue };
            prompts |= sequence.length < sequence.prompt;
            run.parts.push(RowPart {
                row: at,
                tokens: row.tokens.len(),
                sample: row.sample,
                targets: row.targets.len(),
                candidates: row.candidates.len(),
                late: row.late,
            });
            run.tokens.extend_from_slice(row.tokens);
            run.tokens.extend_from_slice(row.candidates);
            let sampling = if row.sample { &sequence.sampling } else { &NOT_SAMPLED };
            if !row.targets.is_empty() {
                told = told.max(tops(sequence.sampling.logprobs, from.vocab));
            }
            let state = sequence.state.of_step(before > 0);
            inputs.push(RowInputs { row, at: row.id.row, blocks: sequence.blocks.len(), sampling, state });
        }
        if inputs.is_empty() {
            return Ok(());
        }
        expand(&inputs, &mut run.lines);
        let mut wanted = Wanted { answer, ..Wanted::default() };
        let mut extents = Extents {
            rows: from.rows,
            tokens: run.tokens.len(),
            seqs: run.lines.len(),
            blocks: from.cache_blocks,
            ..Extents::default()
        };
        for line in &inputs {
            let row = line.row;
            wanted.candidates |= !row.candidates.is_empty();
            wanted.tokens |= row.sample;
            wanted.scores |= !row.targets.is_empty();
            wanted.adjusted |= line.sampling.adjusts() || row.late || !row.forbidden.is_empty();
            run.late |= row.late;
            wanted.logprobs |= line.sampling.logprobs.is_some();
            extents.table = extents.table.max(line.blocks);
            line.make_room(&mut extents, from.vocab);
        }
        extents.top = extents.top.max(told);
        extents.table = extents.table.next_power_of_two().max(MIN_TABLE).min(from.table);
        let (wanted, extents) = programs.serving(wanted, extents, prompts);
        (run.wanted, run.extents) = (wanted, extents);
        masks(extents, &inputs, &run.lines, &mut run.masks);
        let ready = programs.ready(wanted, extents)?;
        let slot = ready.steps().stage()?;
        fill(ready, &slot, &run.tokens, (&inputs, &run.lines), (!run.late).then_some(&run.masks[..]));
        run.slot = Some(slot);
        self.inputs = recycled(inputs);
        Ok(())
    }

    /// Reads the outcomes of the rows from the complete step, and takes its tokens over into the sequences. Rows that were
    /// taken back, and those whose sequence has ended, have none.
    ///
    /// # Errors
    /// When a program does not compile: never for one that ran.
    pub(super) fn collect(
        &mut self,
        outcomes: &mut Vec<Outcome>,
        programs: &mut Programs,
        sequences: &mut [Option<Sequence>],
        (blocks, pools): (&mut Blocks, &mut WindowPools),
        block_size: usize,
    ) -> Result<()> {
        outcomes.clear();
        let Self { rows, runs, places, .. } = self;
        let nothing =
            |id: SequenceId| Outcome { id, accepted: 0, next: Next::NotAsked, logprobs: None, scores: Vec::new() };
        places.clear();
        places.resize(rows.len(), None);
        for (place, id) in places.iter_mut().zip(rows.iter()) {
            let Some(id) = id.filter(|id| sequences[id.row].as_ref().is_some_and(|s| s.number == id.number)) else {
                continue;
            };
            *place = Some(outcomes.len());
            outcomes.push(nothing(id));
        }
        let (float, tells_prompts) = (f32::from_le_bytes, programs.tells_prompts());
        for run in runs.iter_mut().filter(|run| !run.parts.is_empty()) {
            let Some(ticket) = run.ticket.take() else { continue };
            let ready = programs.ready(run.wanted, run.extents)?;
            let (mut first, mut line) = (0, 0);
            run.sampled.clear();
            if run.wanted.tokens {
                run.sampled.extend_from_slice(ready.words(&ticket, 0));
            }
            for part in &run.parts {
                let (its, row) = (first..first + part.tokens, line);
                (first, line) = (its.end + part.candidates, line + part.lines());
                let Some(place) = places[part.row] else { continue };
                let outcome = &mut outcomes[place];
                let sequence = sequences[outcome.id.row].as_mut().expect("looked up above");
                if part.targets > 0 {
                    let asked = sequence.sampling.logprobs.unwrap_or(0) as usize;
                    for at in its.clone().take(part.targets) {
                        let chosen = float(ready.scores(&ticket, 0)[at]);
                        let tops = at * run.extents.top..at * run.extents.top + asked;
                        let ids = ready.scores(&ticket, 1)[tops.clone()].iter().map(|id| u32::from_le_bytes(*id));
                        let ids: Vec<u32> = ids.collect();
                        let logprobs = ready.scores(&ticket, 2)[tops].iter().map(|word| float(*word));
                        outcome.scores.push(Logprobs { chosen, top: ids.into_iter().zip(logprobs).collect() });
                    }
                }
                let sampled = |nth: usize| u32::try_from(i32::from_le_bytes(run.sampled[row + nth]));
                let candidates = run.tokens[its.end..first].iter().enumerate();
                outcome.accepted = candidates.take_while(|(nth, token)| sampled(*nth).as_ref() == Ok(*token)).count();
                let its = its.start..its.end + outcome.accepted;
                sequence.complete += its.len();
                if let Some(shared) = &mut sequence.shared {
                    let last = sequence.last;
                    let known = |token: &u32| if *token == SAMPLED { last.unwrap_or_default() } else { *token };
                    let in_prompt = if tells_prompts { sequence.prompt } else { usize::MAX };
                    let in_prompt = in_prompt.saturating_sub(sequence.complete - its.len());
                    let tokens = run.tokens[its].iter().enumerate();
                    let tokens = tokens.map(|(nth, token)| computed(known(token), nth >= in_prompt));
                    let owned = (&sequence.blocks[..], &sequence.windows[..]);
                    shared.take(tokens, owned, sequence.complete, block_size, (blocks, pools));
                }
                pools.retire(&mut sequence.windows, sequence.complete);
                if part.sample {
                    sequence.flying -= 1;
                    let token = sampled(outcome.accepted);
                    sequence.last = token.ok();
                    outcome.next = token.map_or(Next::NotFinite(sequence.complete), Next::Token);
                    outcome.logprobs = sequence.sampling.logprobs.map(|asked| {
                        let mut top = |nth, i| ready.words(&ticket, nth)[row * run.extents.top + i];
                        let pairs = (0..asked as usize).map(|i| (u32::from_le_bytes(top(2, i)), float(top(3, i))));
                        let top = pairs.collect();
                        Logprobs { chosen: float(ready.words(&ticket, 1)[row]), top }
                    });
                }
            }
        }
        self.collect_drafts(outcomes, programs, sequences)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Whatever is asked of a row, its two parts are asked for together, each thing once and of its place.
        #[test]
        fn the_parts_of_a_row_are_the_row(
            tokens in prop::collection::vec(0..100u32, 1..20), targets in 0..20usize, border in 0..25usize,
            sample in any::<bool>(), forbids in any::<bool>()
        ) {
            let next: Vec<u32> = tokens[1..].iter().chain(&[7]).copied().collect();
            let forbidden = if forbids { &[1, 2][..] } else { &[] };
            let targets = &next[..targets.min(tokens.len())];
            let id = SequenceId { row: 3, number: 5 };
            let row = Row { sample, targets, forbidden, follower: Some(9), ..Row::of(id, &tokens) };
            let parts: Vec<(usize, Row<'_>)> = [false, true].iter().filter_map(|b| part(&row, border, *b)).collect();
            prop_assert!(parts.iter().all(|(_, part)| part.id == row.id && !part.tokens.is_empty()));
            let mut at = 0;
            for (before, part) in &parts {
                prop_assert_eq!(*before, at);
                prop_assert!(part.targets.len() <= part.tokens.len());
                at += part.tokens.len();
                prop_assert!(at <= border || *before >= border, "a part lies on both sides of {}", border);
                let last = at == tokens.len();
                prop_assert_eq!((part.sample, part.forbidden), if last { (sample, forbidden) } else { (false, &[][..]) });
                prop_assert_eq!(part.follower, tokens.get(at).copied().or(Some(9)));
            }
            let joined = |of: fn(&Row<'_>) -> Vec<u32>| parts.iter().flat_map(|(_, p)| of(p)).collect::<Vec<u32>>();
            prop_assert_eq!(joined(|p| p.tokens.to_vec()), &tokens[..]);
            prop_assert_eq!(joined(|p| p.targets.to_vec()), targets);
            // Targets are of a part's first tokens: those before the border fill it, if there are any behind.
            if let [(_, first), (_, second)] = &parts[..] {
                prop_assert!(second.targets.is_empty() || first.targets.len() == first.tokens.len());
            }
        }
    }
}

//! A step from its rows to their outcomes: the runs of programs that compute it.
//!
//! Where a model computes tokens of answers otherwise than those of prompts, a step is up to two runs, prompts first, and
//! a row that crosses the end of its prompt has a part in both. So how a token is computed depends on its place alone.

use super::sequence::{Next, Outcome, Row, Sequence, SequenceId};
use crate::blocks::{Blocks, computed};
use crate::cache::WindowPools;
use crate::error::{EngineError, Result};
use crate::inputs::{RowInputs, fill, rounded};
use crate::programs::{Extents, Programs, Wanted};
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
    pub(super) vocab: usize,
}

/// A step that is prepared, submitted, and then collected.
#[derive(Default)]
pub(super) struct PendingStep {
    rows: Vec<SequenceId>,
    /// Of tokens of prompts, or all where they are not told apart, and of tokens of answers.
    runs: [ProgramRun; 2],
}

/// A run of a program.
#[derive(Default)]
struct ProgramRun {
    wanted: Wanted,
    extents: Extents,
    parts: Vec<RowPart>,
    /// The tokens of all parts.
    tokens: Vec<u32>,
}

/// What a run computes of a row.
struct RowPart {
    /// Number of the row.
    row: usize,
    tokens: usize,
    sample: bool,
    targets: usize,
}

impl PendingStep {
    /// The runs that compute something, in order.
    fn runs(&self) -> impl Iterator<Item = &ProgramRun> {
        self.runs.iter().filter(|run| !run.parts.is_empty())
    }

    /// Queues the runs.
    pub(super) fn submit(&self, programs: &mut Programs) -> Result<()> {
        for (before, run) in self.runs().enumerate() {
            if let Err(error) = programs.ready(run.wanted, run.extents)?.bucket.submit() {
                // What was queued must not outlive the step.
                for run in self.runs().take(before) {
                    programs.ready(run.wanted, run.extents)?.bucket.wait()?;
                }
                return Err(error.into());
            }
        }
        Ok(())
    }

    /// Waits for all runs, also where one failed.
    pub(super) fn wait(&self, programs: &mut Programs) -> Result<()> {
        let mut all = Ok(());
        for run in self.runs() {
            let waited = programs.ready(run.wanted, run.extents).and_then(|ready| Ok(ready.bucket.wait()?));
            all = all.and(waited);
        }
        all
    }

    /// What the program of the step is, if it is one.
    pub(super) fn only(&self) -> Result<(Wanted, Extents)> {
        let mut runs = self.runs();
        match (runs.next(), runs.next()) {
            (Some(run), None) => Ok((run.wanted, run.extents)),
            _ => Err(EngineError::Setting {
                name: "step",
                value: "of prompts and answers".into(),
                why: "is run by two programs; time one of either".into(),
            }),
        }
    }
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
    };
    (!part.tokens.is_empty()).then_some((if behind { border } else { 0 }, part))
}

impl PendingStep {
    /// Takes over the rows of a step and fills its inputs. Their sequences have the blocks that they need.
    ///
    /// # Errors
    /// When a program does not compile, or memory runs out for its bucket.
    pub(super) fn fill(&mut self, rows: &[Row<'_>], from: &StepSource<'_>, programs: &mut Programs) -> Result<()> {
        self.rows.clear();
        self.rows.extend(rows.iter().map(|row| row.id));
        for answer in [false, true] {
            self.fill_run(rows, answer, from, programs)?;
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
        run.parts.clear();
        run.tokens.clear();
        let divide = programs.divide();
        let lines: Vec<RowInputs<'_>> = (rows.iter().enumerate())
            .filter_map(|(at, row)| {
                let sequence = from.sequences[row.id.row].as_ref().expect("has blocks reserved");
                let border = if divide { sequence.prompt.saturating_sub(sequence.length) } else { usize::MAX };
                let (before, row) = part(row, border, answer)?;
                let (tokens, sample, targets) = (row.tokens.len(), row.sample, row.targets.len());
                run.parts.push(RowPart { row: at, tokens, sample, targets });
                run.tokens.extend_from_slice(row.tokens);
                Some(RowInputs {
                    row,
                    length: sequence.length + before,
                    prompt: sequence.prompt,
                    blocks: &sequence.blocks,
                    windows: &sequence.windows,
                    sampling: if row.sample { &sequence.sampling } else { &NOT_SAMPLED },
                    stream: sequence.stream,
                })
            })
            .collect();
        if lines.is_empty() {
            return Ok(());
        }
        let mut wanted = Wanted { answer, ..Wanted::default() };
        let mut extents = Extents {
            tokens: rounded(run.tokens.len()),
            seqs: rounded(lines.len()),
            blocks: from.cache_blocks,
            ..Extents::default()
        };
        for line in &lines {
            let row = line.row;
            wanted.tokens |= row.sample;
            wanted.scores |= !row.targets.is_empty();
            wanted.adjusted |= line.sampling.adjusts() || !row.forbidden.is_empty();
            wanted.logprobs |= line.sampling.logprobs.is_some();
            extents.table = extents.table.max(line.blocks.len());
            line.make_room(&mut extents, from.vocab);
        }
        extents.table = extents.table.next_power_of_two().max(MIN_TABLE).min(from.table);
        (run.wanted, run.extents) = (wanted, extents);
        fill(programs.ready(wanted, extents)?, extents, &run.tokens, &lines);
        Ok(())
    }

    /// Reads the outcomes of the rows from the complete step, and takes its tokens over into the sequences.
    ///
    /// # Errors
    /// When a program does not compile: never for one that ran.
    pub(super) fn collect(
        &self,
        outcomes: &mut Vec<Outcome>,
        programs: &mut Programs,
        sequences: &mut [Option<Sequence>],
        (blocks, pools): (&mut Blocks, &mut WindowPools),
        block_size: usize,
    ) -> Result<()> {
        outcomes.clear();
        let nothing = |id: &SequenceId| Outcome { id: *id, next: Next::NotAsked, logprobs: None, scores: Vec::new() };
        outcomes.extend(self.rows.iter().map(nothing));
        let float = |word: &[u8; 4]| f32::from_le_bytes(*word);
        for run in self.runs() {
            let ready = programs.ready(run.wanted, run.extents)?;
            let mut first = 0;
            for (row, part) in run.parts.iter().enumerate() {
                let its = first..first + part.tokens;
                first = its.end;
                let outcome = &mut outcomes[part.row];
                if part.targets > 0 {
                    outcome.scores.extend(ready.scores()[its.clone()][..part.targets].iter().map(float));
                }
                let id = outcome.id;
                let Some(sequence) = sequences[id.row].as_mut().filter(|s| s.number == id.number) else {
                    continue;
                };
                sequence.length += part.tokens;
                if part.sample {
                    let token = u32::try_from(i32::from_le_bytes(ready.output(0)[row]));
                    outcome.next = token.map_or(Next::NotFinite(sequence.length), Next::Token);
                    outcome.logprobs = sequence.sampling.logprobs.map(|asked| {
                        let top = row * run.extents.top..row * run.extents.top + asked as usize;
                        let pairs = ready.output(2)[top.clone()].iter().zip(&ready.output(3)[top]);
                        Logprobs {
                            chosen: float(&ready.output(1)[row]),
                            top: pairs.map(|(id, logprob)| (u32::from_le_bytes(*id), float(logprob))).collect(),
                        }
                    });
                }
                if let Some(shared) = &mut sequence.shared {
                    let tokens = run.tokens[its].iter().map(|token| computed(*token, run.wanted.answer));
                    shared.take(
                        tokens,
                        (&sequence.blocks, &sequence.windows),
                        sequence.length,
                        block_size,
                        (blocks, pools),
                    );
                }
                pools.retire(&mut sequence.windows, sequence.length);
            }
        }
        Ok(())
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
            let row = Row { id: SequenceId { row: 3, number: 5 }, tokens: &tokens, sample, targets, forbidden };
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

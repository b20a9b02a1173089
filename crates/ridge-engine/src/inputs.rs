//! The inputs of a step: its tokens and the rows that they belong to, padded to the extents of its bucket.

use ridge_graph::ops::AcceptCandidates;
use ridge_runtime::Slot;

use crate::engine::Row;
use crate::extents::Extents;
use crate::programs::{ReadyBucket, StepInput};
use crate::sampling::Sampling;

/// A row of a step with what its sequence has.
pub(crate) struct RowInputs<'a> {
    pub(crate) row: Row<'a>,
    /// The row of the tables.
    pub(crate) at: usize,
    /// Blocks that it has.
    pub(crate) blocks: usize,
    pub(crate) sampling: &'a Sampling,
    /// The lines of its fixed-size state that the step reads and writes; negative for none.
    pub(crate) state: [i32; 2],
}

impl RowInputs<'_> {
    /// Enlarges the extents of a step for the lists of the row; by powers of two, so that few buckets serve all lengths.
    pub(crate) fn make_room(&self, extents: &mut Extents, vocab: usize) {
        let sampling = self.sampling;
        extents.biases = extents.biases.max(room(sampling.logit_bias.len()));
        extents.breakers = extents.breakers.max(room(sampling.dry_breakers.len()));
        extents.top = extents.top.max(tops(sampling.logprobs, vocab));
        let words = if self.row.late { vocab.div_ceil(32) } else { self.row.forbidden.len() };
        extents.forbidden = extents.forbidden.max(words);
    }
}

/// Room for so many items of a row's list.
fn room(items: usize) -> usize {
    if items == 0 { 0 } else { items.next_power_of_two() }
}

/// Room for the most likely tokens that are asked for.
pub(crate) fn tops(asked: Option<u32>, vocab: usize) -> usize {
    asked.map_or(0, |n| room(n as usize).min(vocab))
}

/// A row of a step as its program has it: the tokens of a sequence, or one candidate behind them.
#[derive(Clone, Copy)]
pub(crate) struct Line {
    /// Which of the [`RowInputs`] it belongs to.
    of: usize,
    /// The row of the tables.
    at: usize,
    tokens: usize,
    /// Tokens of the sequence that stand before it in the step.
    offset: usize,
    /// Of a candidate the line that it follows.
    parent: i32,
}

/// The lines of rows: of each its own, then those of its candidates, which are a chain.
pub(crate) fn expand(rows: &[RowInputs<'_>], lines: &mut Vec<Line>) {
    lines.clear();
    for (of, RowInputs { row, at, .. }) in rows.iter().enumerate() {
        let at = *at;
        lines.push(Line { of, at, tokens: row.tokens.len(), offset: 0, parent: AcceptCandidates::ROOT });
        for nth in 0..row.candidates.len() {
            let parent = lines.len() as i32 - 1;
            lines.push(Line { of, at, tokens: 1, offset: row.tokens.len() + nth, parent });
        }
    }
}

/// Fills the inputs of a step of these rows, whose `masks` come later where there are none. Padding tokens belong to no
/// sequence, and padding lines are rows of no table.
pub(crate) fn fill<'a>(
    ready: &mut ReadyBucket,
    slot: &Slot,
    tokens: &[u32],
    (rows, lines): (&'a [RowInputs<'a>], &'a [Line]),
    masks: Option<&[u8]>,
) {
    let i32s = |x: usize| i32::try_from(x).unwrap_or(i32::MAX).to_le_bytes();
    let all = || lines.iter();
    ready.fill(slot, StepInput::TokenIds, tokens.iter().map(|t| (*t as i32).to_le_bytes()), 0i32.to_le_bytes());
    let ids = all().enumerate().flat_map(|(at, line)| std::iter::repeat_n((at as i32).to_le_bytes(), line.tokens));
    ready.fill(slot, StepInput::SeqIds, ids, (-1i32).to_le_bytes());
    let mut end = 0;
    let ends = all().map(|line| {
        end += line.tokens;
        i32s(end)
    });
    ready.fill(slot, StepInput::QueryStart, std::iter::once(i32s(0)).chain(ends), i32s(tokens.len()));
    ready.fill(slot, StepInput::Rows, all().map(|line| i32s(line.at)), (-1i32).to_le_bytes());
    ready.fill(slot, StepInput::Offsets, all().map(|line| i32s(line.offset)), i32s(0));
    let states = all().flat_map(|line| rows[line.of].state.map(i32::to_le_bytes));
    ready.fill(slot, StepInput::StateLines, states, (-1i32).to_le_bytes());
    let parents = all().map(|line| line.parent.to_le_bytes());
    ready.fill(slot, StepInput::Parents, parents, AcceptCandidates::NONE.to_le_bytes());
    let followers = rows.iter().flat_map(|RowInputs { row, .. }| {
        let said = row.tokens.iter().chain(row.candidates).skip(1).chain(&row.follower);
        let count = row.tokens.len() + row.candidates.len();
        said.map(|token| *token as i32).chain(std::iter::repeat(-1)).take(count).map(i32::to_le_bytes)
    });
    ready.fill(slot, StepInput::Followers, followers, (-1i32).to_le_bytes());
    let targets = rows.iter().flat_map(|RowInputs { row, .. }| {
        let count = row.tokens.len() + row.candidates.len();
        (0..count).map(move |i| row.targets.get(i).map_or(-1, |t| *t as i32).to_le_bytes())
    });
    ready.fill(slot, StepInput::Targets, targets, (-1i32).to_le_bytes());
    if let Some(masks) = masks {
        ready.fill(slot, StepInput::Forbidden, masks.as_chunks().0.iter().copied(), [0; 4]);
    }
    ready.filled();
}

/// The masks of a step's lines, one after another; a line without one has zeros, which forbid nothing.
pub(crate) fn masks(extents: Extents, rows: &[RowInputs<'_>], lines: &[Line], to: &mut Vec<u8>) {
    to.clear();
    if extents.forbidden == 0 {
        return;
    }
    for line in lines {
        let end = to.len() + 4 * extents.forbidden;
        let words = if line.parent == AcceptCandidates::ROOT { rows[line.of].row.forbidden } else { &[] };
        to.extend(words.iter().take(extents.forbidden).flat_map(|word| word.to_le_bytes()));
        to.resize(end, 0);
    }
    to.resize(4 * extents.seqs * extents.forbidden, 0);
}

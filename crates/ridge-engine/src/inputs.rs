//! What a step's inputs hold: the tables of its rows, padded to the extents of its bucket.

use crate::blocks::BlockId;
use crate::cache::WindowTable;
use crate::engine::Row;
use crate::programs::{Extents, ReadyBucket, StepInput};
use crate::sampling::Sampling;

/// A row of a step with what its sequence has.
pub(crate) struct RowInputs<'a> {
    pub(crate) row: Row<'a>,
    /// Tokens in the cache before the step.
    pub(crate) length: usize,
    /// Tokens before the answer.
    pub(crate) prompt: usize,
    pub(crate) blocks: &'a [BlockId],
    /// Of each window.
    pub(crate) windows: &'a [WindowTable],
    pub(crate) sampling: &'a Sampling,
    pub(crate) stream: u64,
}

impl RowInputs<'_> {
    /// Enlarges the extents of a step for the lists of the row; by powers of two, so that few buckets serve all lengths.
    pub(crate) fn make_room(&self, extents: &mut Extents, vocab: usize) {
        let sampling = self.sampling;
        let room = |len: usize| if len == 0 { 0 } else { len.next_power_of_two() };
        extents.biases = extents.biases.max(room(sampling.logit_bias.len()));
        extents.breakers = extents.breakers.max(room(sampling.dry.breakers.len()));
        extents.top = extents.top.max(sampling.logprobs.map_or(0, |n| room(n as usize).min(vocab)));
        extents.forbidden = extents.forbidden.max(self.row.forbidden.len());
    }
}

/// The extent of a bucket for `n` tokens or sequences: few buckets serve all steps, and at most a quarter of one is
/// padding.
pub(crate) fn rounded(n: usize) -> usize {
    n.next_multiple_of((n.next_power_of_two() / 8).max(1))
}

/// Fills the inputs of a step of these rows. Padding tokens belong to no sequence, and padding rows
/// have none and are sampled greedily, to be dropped.
pub(crate) fn fill<'a>(ready: &mut ReadyBucket, extents: Extents, tokens: &[u32], lines: &'a [RowInputs<'a>]) {
    let i32s = |x: usize| i32::try_from(x).unwrap_or(i32::MAX).to_le_bytes();
    let all = || lines.iter();
    ready.fill(StepInput::TokenIds, tokens.iter().map(|t| (*t as i32).to_le_bytes()), 0i32.to_le_bytes());
    let ids =
        all().enumerate().flat_map(|(row, l)| std::iter::repeat_n((row as i32).to_le_bytes(), l.row.tokens.len()));
    ready.fill(StepInput::SeqIds, ids, (-1i32).to_le_bytes());
    let mut end = 0;
    let ends = all().map(|l| {
        end += l.row.tokens.len();
        i32s(end)
    });
    ready.fill(StepInput::QueryStart, std::iter::once(i32s(0)).chain(ends), i32s(tokens.len()));
    ready.fill(StepInput::Lengths, all().map(|l| i32s(l.length)), i32s(0));
    let blocks = |row: usize, to: &mut [[u8; 4]]| {
        let blocks = lines.get(row).map_or(&[][..], |l| l.blocks);
        // A sequence may own blocks beyond those of this step only where the table is wide enough for all.
        let (used, rest) = to.split_at_mut(blocks.len().min(to.len()));
        for (to, block) in used.iter_mut().zip(blocks) {
            *to = (block.0 as i32).to_le_bytes();
        }
        rest.fill((-1i32).to_le_bytes());
    };
    ready.fill_rows(StepInput::BlockTable, extents.table, blocks);
    for nth in 0..lines.first().map_or(0, |l| l.windows.len()) {
        ready.fill_window(nth, extents.table, |row, to| {
            let table = lines.get(row).map(|l| &l.windows[nth]);
            for (place, to) in to.iter_mut().enumerate() {
                *to = table.and_then(|t| t.get(place)).map_or(-1, |block| block.0 as i32).to_le_bytes();
            }
        });
    }
    let targets = all().flat_map(|l| {
        let row = l.row;
        (0..row.tokens.len()).map(move |i| row.targets.get(i).map_or(-1, |t| *t as i32).to_le_bytes())
    });
    ready.fill(StepInput::Targets, targets, (-1i32).to_le_bytes());

    let none = &Sampling::GREEDY;
    let mut float = |input, of: fn(&Sampling) -> f32| {
        ready.fill(input, all().map(|l| of(l.sampling).to_le_bytes()), of(none).to_le_bytes());
    };
    float(StepInput::Temperature, |s| s.temperature);
    float(StepInput::TopP, |s| s.top_p);
    float(StepInput::MinP, |s| s.min_p);
    float(StepInput::TypicalP, |s| s.typical_p);
    float(StepInput::Repetition, |s| s.repetition_penalty);
    float(StepInput::Frequency, |s| s.frequency_penalty);
    float(StepInput::Presence, |s| s.presence_penalty);
    float(StepInput::DryMultiplier, |s| s.dry.multiplier);
    float(StepInput::DryBase, |s| s.dry.base);
    let mut int = |input, of: fn(&Sampling) -> u32| {
        ready.fill(input, all().map(|l| i32s(of(l.sampling) as usize)), i32s(of(none) as usize));
    };
    int(StepInput::TopK, |s| s.top_k);
    int(StepInput::DryAllowed, |s| s.dry.allowed_length);
    int(StepInput::DryRange, |s| s.dry.range);
    ready.fill(StepInput::PromptLengths, all().map(|l| i32s(l.prompt)), i32s(0));
    ready.fill(StepInput::Seed, all().map(|l| (l.sampling.seed as i64).to_le_bytes()), [0; 8]);
    ready.fill(StepInput::Sequence, all().map(|l| (l.stream as i64).to_le_bytes()), [0; 8]);
    let breaker = |l: &'a RowInputs<'a>| {
        (0..extents.breakers).map(move |i| l.sampling.dry.breakers.get(i).map_or(-1, |id| *id as i32).to_le_bytes())
    };
    ready.fill(StepInput::DryBreakers, all().flat_map(breaker), (-1i32).to_le_bytes());
    let bias = |l: &'a RowInputs<'a>| (0..extents.biases).map(move |i| l.sampling.logit_bias.get(i).copied());
    let ids = all().flat_map(bias).map(|b| b.map_or(-1, |(id, _)| id as i32).to_le_bytes());
    ready.fill(StepInput::BiasIds, ids, (-1i32).to_le_bytes());
    let values = all().flat_map(bias).map(|b| b.map_or(0.0, |(_, value)| value).to_le_bytes());
    ready.fill(StepInput::BiasValues, values, 0f32.to_le_bytes());
    let forbidden = |row: usize, to: &mut [[u8; 4]]| {
        let words = lines.get(row).map_or(&[][..], |l| l.row.forbidden);
        let (used, rest) = to.split_at_mut(words.len().min(to.len()));
        for (to, word) in used.iter_mut().zip(words) {
            *to = word.to_le_bytes();
        }
        rest.fill([0; 4]);
    };
    ready.fill_rows(StepInput::Forbidden, extents.forbidden, forbidden);
}

#[cfg(test)]
mod tests {
    use super::rounded;

    #[test]
    fn few_extents_serve_all_and_a_quarter_at_most_is_padding() {
        let extents: std::collections::BTreeSet<usize> = (1..=4096).map(rounded).collect();
        assert_eq!(extents.len(), 4 + 4 * 10);
        for n in 1..=4096 {
            assert!(rounded(n) >= n && (rounded(n) - n) * 4 <= n, "{n} becomes {}", rounded(n));
        }
        // Whatever a test or a benchmark is likely to ask for exactly, it gets.
        assert!([1, 2, 4, 8, 16, 32, 64, 128, 256, 512].into_iter().all(|n| rounded(n) == n));
    }
}

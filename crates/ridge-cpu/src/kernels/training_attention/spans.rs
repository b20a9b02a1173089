//! Which tokens see which: runs of one sequence, spans of the other side, and what of a tile counts.

use std::ops::Range;

use ridge_graph::ops::RaggedAttention;

use super::call::SPAN;
use crate::simd::vectorised;

/// Tokens of one sequence that stand together.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct SequenceRun {
    /// The tokens.
    pub(super) tokens: Range<usize>,
    /// All of the sequence's tokens, and perhaps others between them.
    pub(super) sequence: Range<usize>,
}

/// The runs of `tokens`, without padding.
pub(super) fn runs(ids: &[i32], tokens: Range<usize>) -> Vec<SequenceRun> {
    let mut runs = Vec::new();
    let mut start = tokens.start;
    while start < tokens.end {
        let id = ids[start];
        let end = (start..tokens.end).find(|at| ids[*at] != id).unwrap_or(tokens.end);
        if id >= 0 {
            let first = ids.iter().position(|other| *other == id).unwrap_or(start);
            let last = ids.iter().rposition(|other| *other == id).unwrap_or(start);
            runs.push(SequenceRun { tokens: start..end, sequence: first..last + 1 });
        }
        start = end;
    }
    runs
}

/// The spans of `sequence` that overlap `wanted`, counted from its first token.
pub(super) fn spans(sequence: &Range<usize>, wanted: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
    let (sequence, wanted) = (sequence.clone(), wanted.clone());
    let skipped = wanted.start.saturating_sub(sequence.start) / SPAN * SPAN;
    let end = wanted.end.min(sequence.end);
    (sequence.start + skipped..end).step_by(SPAN).map(move |at| at..(at + SPAN).min(sequence.end))
}

/// The keys that queries in `queries` see.
pub(super) fn keys_of(op: &RaggedAttention, run: &SequenceRun) -> Range<usize> {
    let start = match op.window {
        Some(window) => (run.tokens.start + 1).saturating_sub(window).max(run.sequence.start),
        None => run.sequence.start,
    };
    let end = match op.window {
        _ if op.causal => run.tokens.end,
        Some(window) => (run.tokens.end - 1).saturating_add(window).min(run.sequence.end),
        None => run.sequence.end,
    };
    start..end
}

/// The queries that see keys in `keys`.
pub(super) fn queries_of(op: &RaggedAttention, run: &SequenceRun) -> Range<usize> {
    let start = match op.window {
        _ if op.causal => run.tokens.start,
        Some(window) => (run.tokens.start + 1).saturating_sub(window).max(run.sequence.start),
        None => run.sequence.start,
    };
    let end = match op.window {
        Some(window) => (run.tokens.end - 1).saturating_add(window).min(run.sequence.end),
        None => run.sequence.end,
    };
    start..end
}

/// The keys of `span` that `query` may see, as places in it, but for their ids.
pub(super) fn seen(op: &RaggedAttention, query: usize, span: &Range<usize>) -> Range<usize> {
    let end = match op.window {
        _ if op.causal => (query + 1).clamp(span.start, span.end),
        Some(window) => query.saturating_add(window).clamp(span.start, span.end),
        None => span.end,
    };
    let start = op.window.map_or(span.start, |window| (query + 1).saturating_sub(window).clamp(span.start, end));
    start - span.start..end - span.start
}

/// The queries of `span` that may see `key`, as places in it, but for their ids.
pub(super) fn seeing(op: &RaggedAttention, key: usize, span: &Range<usize>) -> Range<usize> {
    let start = match op.window {
        _ if op.causal => key.clamp(span.start, span.end),
        Some(window) => (key + 1).saturating_sub(window).clamp(span.start, span.end),
        None => span.start,
    };
    let end = op.window.map_or(span.end, |window| key.saturating_add(window).clamp(start, span.end));
    start - span.start..end - span.start
}

/// Sets what of `row`, for the tokens of `ids`, is outside `kept` or not of `id` to `to`.
pub(super) fn mask(row: &mut [f32], ids: &[i32], id: i32, kept: &Range<usize>, to: f32) {
    row[..kept.start].fill(to);
    row[kept.end..].fill(to);
    keep(&mut row[kept.clone()], &ids[kept.clone()], id, to);
}

vectorised! {
    fn keep(row: &mut [f32], ids: &[i32], id: i32, to: f32) {
        for (x, other) in row.iter_mut().zip(ids) {
            *x = if *other == id { *x } else { to };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_counted_from_the_first_token_of_a_sequence() {
        let ids = [vec![3; 5], vec![-1; 2], vec![7; 200]].concat();
        let found = runs(&ids, 2..150);
        assert_eq!(
            found,
            [SequenceRun { tokens: 2..5, sequence: 0..5 }, SequenceRun { tokens: 7..150, sequence: 7..207 }]
        );
        let of = |wanted| spans(&found[1].sequence, &wanted).collect::<Vec<_>>();
        assert_eq!(of(7..150), [7..71, 71..135, 135..199]);
        assert_eq!(of(80..207), [71..135, 135..199, 199..207]);
        assert!(of(71..71).is_empty());
    }
}

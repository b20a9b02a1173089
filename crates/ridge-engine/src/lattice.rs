//! The set of buckets that serves all steps of an engine, bound before serving starts.
//!
//! A step of single tokens has as many tokens as lines. A step of prompts has many tokens and few or the maximum number of lines,
//! each with one row of logits. Steps also differ in their outputs: steps that only sample have the finest lattice, because nearly
//! all steps are of this kind; other outputs have fewer points, of which the last provides all outputs.

use crate::extents::{Extents, Wanted};

/// Tokens whose log-probabilities are told in ready buckets. A request for more has buckets of its own.
const TOP: usize = 32;

/// Tokens that DRY does not go over in ready buckets. A request with more has buckets of its own.
const BREAKERS: usize = 64;

/// Lines of a step of prompts that has few.
const FEW_LINES: usize = 4;

/// Tokens of the smallest step of prompts.
const LEAST_TOKENS: usize = 16;

/// What the buckets of an engine have in common.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LatticeOptions {
    /// Tokens of a step at most.
    pub(crate) tokens: usize,
    /// Lines of a step at most: fewer than tokens where [`Lattice::cover`] is asked for `prompts`.
    pub(crate) lines: usize,
    /// Are tokens of answers computed by a graph of their own?
    pub(crate) divide: bool,
    /// May rows have candidates?
    pub(crate) candidates: bool,
    /// Are there programs that draft tokens?
    pub(crate) drafts: bool,
    /// Words of a row's mask.
    pub(crate) words: usize,
    /// The extents that all have: tables and pools.
    pub(crate) common: Extents,
}

/// The buckets, cheapest first of those that give the same.
#[derive(Clone, Debug)]
pub(crate) struct Lattice {
    points: Vec<(Wanted, Extents)>,
}

impl Lattice {
    pub(crate) fn new(options: &LatticeOptions, [biases, vocab]: [usize; 2]) -> Self {
        let LatticeOptions { tokens, lines, divide, candidates, drafts, words, common } = *options;
        let most = lines.min(tokens);
        let plain = Wanted { tokens: true, candidates, ..Wanted::default() };
        let adjusted = Wanted { adjusted: true, ..plain };
        let told = Wanted { logprobs: true, ..adjusted };
        let scored = Wanted { scores: true, ..told };
        let lists = Extents { biases, breakers: BREAKERS, ..common };
        let masked = Extents { forbidden: words, ..lists };
        let top = TOP.min(vocab);
        let told_masked = Extents { top, ..masked };
        let mut points = Vec::new();
        let mut add = |wanted: Wanted, of: Extents, sizes: Vec<[usize; 2]>| {
            points.extend(sizes.into_iter().map(|[tokens, seqs]| (wanted, Extents { tokens, seqs, ..of })));
        };
        let answers: &[bool] = if divide { &[false, true] } else { &[false] };
        for answer in answers.iter().copied() {
            // Of tokens of prompts alone no step has one a line, and of those of answers only what is computed again has many.
            let singles = answer == divide;
            let prompts = !answer;
            let of = |wanted: Wanted| Wanted { answer, ..wanted };
            let square = |of: fn(usize) -> bool| -> Vec<[usize; 2]> {
                if singles {
                    sizes(most).filter(|n| of(*n) || *n == most).map(|n| [n, n]).collect()
                } else {
                    Vec::new()
                }
            };
            let chunks = |lines: usize, of: fn(usize) -> bool| -> Vec<[usize; 2]> {
                let sizes = sizes(tokens).filter(|n| *n >= LEAST_TOKENS.max(lines) && of(*n) || *n == tokens);
                let sizes = sizes.filter(|n| prompts || *n == tokens);
                sizes.map(|n| [n, lines]).collect()
            };
            add(of(plain), common, square(|_| true));
            if most > FEW_LINES && prompts {
                add(of(plain), common, chunks(FEW_LINES, |_| true));
            }
            add(of(plain), common, chunks(most, |n| n.is_power_of_two() && n.ilog2() % 2 == 0));
            add(of(adjusted), lists, square(usize::is_power_of_two));
            add(of(adjusted), lists, chunks(most, |n| n == 128));
            for (wanted, of_it) in [(adjusted, masked), (told, told_masked)] {
                add(of(wanted), of_it, square(|n| matches!(n, 1 | 8 | 64)));
                add(of(wanted), of_it, chunks(most, |n| n == 128));
            }
            add(of(scored), told_masked, chunks(most, |n| n == 128));
        }
        if drafts {
            let wanted = Wanted { drafts, ..Wanted::default() };
            add(wanted, common, sizes(common.rows).map(|rows| [rows, rows]).collect());
        }
        // The same size may come of two rules.
        let mut kept: Vec<(Wanted, Extents)> = Vec::with_capacity(points.len());
        points.into_iter().for_each(|point| {
            if !kept.contains(&point) {
                kept.push(point);
            }
        });
        Self { points: kept }
    }

    /// The buckets.
    pub(crate) fn points(&self) -> &[(Wanted, Extents)] {
        &self.points
    }

    /// The cheapest bucket that serves a step which needs this much; none where there is no such bucket. With `prompts` one that has
    /// more tokens than lines.
    pub(crate) fn cover(&self, wanted: Wanted, extents: Extents, prompts: bool) -> Option<(Wanted, Extents)> {
        let serves = |(gives, room): &&(Wanted, Extents)| {
            gives.covers(wanted) && room.cover(extents) && !(prompts && room.tokens <= room.seqs)
        };
        self.points.iter().filter(serves).min_by_key(|(gives, room)| (gives.rank(), room.rank())).copied()
    }
}

/// Tokens up to which a step takes little longer for half as many more: it is bound by weights.
const COARSE: usize = 128;

/// Sizes of steps: all up to 4, up to [`COARSE`] powers of two and what lies between them, then four to each power of two.
fn sizes(most: usize) -> impl Iterator<Item = usize> {
    let next = |n: usize| match n {
        ..4 => n + 1,
        4..COARSE => rounded_coarsely(n + 1),
        _ => rounded(n + 1),
    };
    std::iter::successors(Some(1), move |n| (*n < most).then(|| next(*n).min(most)))
}

/// The next power of two or one and a half times one.
fn rounded_coarsely(n: usize) -> usize {
    let above = n.next_power_of_two();
    if above >= 4 && n <= above / 4 * 3 { above / 4 * 3 } else { above }
}

/// The extent of a bucket for `n` tokens or sequences: few buckets serve all steps, and at most a quarter of one is
/// padding.
fn rounded(n: usize) -> usize {
    n.next_multiple_of((n.next_power_of_two() / 8).max(1))
}

/// The extents of a step of an engine without ready buckets, with more tokens than lines if `prompts`: no more than those of the most
/// tokens, if steps of prompts have fewer lines than that.
pub(crate) fn exactly(wanted: Wanted, mut extents: Extents, prompts: bool) -> (Wanted, Extents) {
    let lines = extents.seqs;
    (extents.tokens, extents.seqs) = (rounded(extents.tokens), rounded(lines));
    if prompts && extents.tokens <= extents.seqs {
        extents.tokens = extents.tokens.max(rounded(lines + 1));
        extents.seqs = extents.seqs.min(extents.tokens - 1);
    }
    (wanted, extents)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const WORDS: usize = 7;

    fn options(tokens: usize, lines: usize, divide: bool, candidates: bool) -> LatticeOptions {
        let common = Extents { rows: lines, table: 64, blocks: 640, ..Extents::default() };
        LatticeOptions { tokens, lines, divide, candidates, drafts: false, words: WORDS, common }
    }

    fn lattice(options: &LatticeOptions) -> Lattice {
        Lattice::new(options, [1024, 224])
    }

    #[test]
    fn few_buckets_serve_usual_servers() {
        for (tokens, lines, most) in [(512, 32, 49), (512, 256, 58), (2048, 256, 66), (64, 2, 30), (1, 1, 10)] {
            let count = lattice(&options(tokens, lines, false, false)).points().len();
            assert!(count <= most, "{count} buckets for {tokens} tokens and {lines} lines");
        }
    }

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

    #[test]
    fn sizes_grow_by_half_and_by_a_quarter_where_rows_cost() {
        let sizes: Vec<usize> = sizes(512).collect();
        assert_eq!(sizes, [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512]);
        assert_eq!(super::sizes(5).collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
    }

    #[test]
    fn every_number_of_rows_that_drafts_has_a_bucket() {
        let options = LatticeOptions { drafts: true, ..options(48, 20, false, true) };
        let lattice = lattice(&options);
        for rows in 1..=20 {
            let wanted = Wanted { drafts: true, ..Wanted::default() };
            let found = lattice.cover(wanted, Extents { tokens: rows, seqs: rows, ..options.common }, false);
            assert!(found.is_some_and(|(gives, room)| gives.drafts && room.seqs * 2 <= rows * 3), "{rows}: {found:?}");
        }
    }

    proptest! {
        /// Every step that a service makes has a bucket, and one of the plain kind if it only samples. Of prompts that attention is told
        /// of, it has more tokens than lines, if a step has at most one line less than tokens.
        #[test]
        fn every_step_has_a_bucket(
            most in 1usize..600, rows in 1usize..300, tokens in 1usize..600, lines in 1usize..300,
            divide in any::<bool>(), candidates in any::<bool>(), answer in any::<bool>(),
            adjusted in any::<bool>(), logprobs in any::<bool>(), scores in any::<bool>(), masked in any::<bool>(),
            told in any::<bool>(), prompts in any::<bool>(),
        ) {
            let told = told && !divide && most > 1;
            let (rows, prompts) = (rows.min(most - usize::from(told)), prompts && told);
            let (tokens, lines) = (tokens.min(most), lines.min(rows).min(tokens));
            let options = options(most, rows, divide, candidates);
            let wanted = Wanted { tokens: true, adjusted: adjusted || masked, logprobs, scores, answer: answer && divide, candidates, drafts: false };
            let extents = Extents {
                tokens,
                seqs: lines,
                biases: usize::from(adjusted),
                breakers: usize::from(adjusted),
                top: if logprobs { 20 } else { 0 },
                forbidden: if masked { WORDS } else { 0 },
                ..options.common
            };
            let found = lattice(&options).cover(wanted, extents, prompts);
            prop_assert!(found.is_some(), "{wanted:?} {extents:?}");
            let (gives, room) = found.unwrap();
            prop_assert!(gives.covers(wanted) && room.cover(extents) && room.tokens <= most);
            prop_assert!(!prompts || room.tokens > room.seqs, "{room:?}");
            prop_assert_eq!(gives.scores, scores);
            if !adjusted && !logprobs && !scores && !masked {
                prop_assert!(!gives.adjusted && !gives.logprobs);
            }
        }

        /// Nor do the extents of a step without a ready bucket exceed those of the most tokens.
        #[test]
        fn steps_without_a_bucket_stay_below_the_largest(
            most in 2usize..600, tokens in 1usize..600, lines in 1usize..600, prompts in any::<bool>(),
        ) {
            let tokens = tokens.min(most);
            let lines = lines.min(tokens).min(most - usize::from(prompts));
            let extents = Extents { tokens, seqs: lines, ..Extents::default() };
            let (_, room) = exactly(Wanted::default(), extents, prompts);
            prop_assert!(room.cover(extents) && room.tokens <= rounded(most), "{room:?}");
            prop_assert!(if prompts { room.tokens > room.seqs } else { room.seqs == rounded(lines) }, "{room:?}");
        }
    }
}

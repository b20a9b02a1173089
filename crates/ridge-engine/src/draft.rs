//! Draft tokens: those of the model's prediction module, or by n-gram lookup in the sequence itself (Saxena 2023, "Prompt Lookup
//! Decoding"), without a second model: if the last tokens occurred earlier in the sequence, their continuation there is proposed.

use std::collections::HashMap;

/// How candidates are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ngram {
    /// The most candidates of a step.
    pub candidates: usize,
    /// The longest run of last tokens that is looked for; the longest that is found is taken.
    pub longest: usize,
    /// The shortest.
    pub shortest: usize,
}

impl Ngram {
    /// At most `candidates` of them, behind runs of two to four tokens.
    pub fn new(candidates: usize) -> Self {
        Self { candidates, longest: 4, shortest: 2 }
    }
}

/// What proposes candidates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Drafts {
    /// The sequence's own tokens.
    Ngram(Ngram),
    /// The model's prediction module, which drafts in each step.
    Module,
}

/// The same, of one sequence.
#[derive(Debug)]
pub(crate) enum SequenceDraft {
    Ngram(NgramDraft),
    Module,
}

impl SequenceDraft {
    pub(crate) fn new(drafts: Drafts) -> Self {
        match drafts {
            Drafts::Ngram(options) => Self::Ngram(NgramDraft::new(options)),
            Drafts::Module => Self::Module,
        }
    }

    /// What may follow `tokens`, behind which the model's module has drafted `drafted`; at most `most`. Appends to `to`.
    pub(crate) fn propose(&mut self, tokens: &[u32], drafted: &[u32], most: usize, to: &mut Vec<u32>) {
        match self {
            Self::Ngram(draft) => draft.propose(tokens, most, to),
            Self::Module => to.extend(drafted.iter().take(most)),
        }
    }

    /// Takes over how many of the candidates of a step were accepted.
    pub(crate) fn accepted(&mut self, accepted: usize, proposed: usize) {
        match self {
            Self::Ngram(draft) => draft.accepted(accepted, proposed),
            Self::Module => {}
        }
    }
}

/// Where each run of tokens of one sequence ended last, and how many candidates its steps take.
#[derive(Debug)]
pub(crate) struct NgramDraft {
    options: Ngram,
    /// By a hash of the run and its length: how many tokens there were up to its end, when it was last followed by one.
    ends: HashMap<u64, u32>,
    /// Tokens whose runs are in `ends`.
    indexed: usize,
    /// Candidates of the next step at most.
    limit: usize,
}

impl NgramDraft {
    pub(crate) fn new(options: Ngram) -> Self {
        Self { options, ends: HashMap::new(), indexed: 0, limit: options.candidates }
    }

    /// What may follow `tokens`, all of the sequence so far; at most `most`. Appends to `to`.
    pub(crate) fn propose(&mut self, tokens: &[u32], most: usize, to: &mut Vec<u32>) {
        self.index(tokens);
        let most = most.min(self.limit);
        let lengths = self.options.shortest..=self.options.longest.min(tokens.len());
        for length in lengths.rev() {
            let run = &tokens[tokens.len() - length..];
            let Some(end) = self.ends.get(&hash(run)).map(|end| *end as usize) else { continue };
            if tokens[end - length..end] != *run {
                // Another run with this hash.
                continue;
            }
            // Where the run overlaps its continuation, this repeats with their distance as its period.
            let period = tokens.len() - end;
            to.extend((0..most).map(|i| tokens[end + i % period]));
            return;
        }
    }

    /// Takes over how many of the candidates of a step were accepted: few are tried where few were right.
    pub(crate) fn accepted(&mut self, accepted: usize, proposed: usize) {
        self.limit = match accepted == proposed {
            true => (self.limit * 2).min(self.options.candidates),
            false => (accepted + 1).min(self.options.candidates),
        };
    }

    /// Adds the runs that are followed by a token.
    fn index(&mut self, tokens: &[u32]) {
        let followed = tokens.len().saturating_sub(1);
        for end in self.indexed + 1..=followed {
            for length in self.options.shortest..=self.options.longest.min(end) {
                self.ends.insert(hash(&tokens[end - length..end]), end as u32);
            }
        }
        self.indexed = self.indexed.max(followed);
    }
}

/// FNV-1a over the tokens and their number.
fn hash(run: &[u32]) -> u64 {
    let step = |hash: u64, word: u32| (hash ^ u64::from(word)).wrapping_mul(0x0100_0000_01b3);
    run.iter().fold(step(0xcbf2_9ce4_8422_2325, run.len() as u32), |hash, token| step(hash, *token))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The same by looking through all tokens, from the last on.
    fn plain(options: Ngram, tokens: &[u32], most: usize) -> Vec<u32> {
        for length in (options.shortest..=options.longest.min(tokens.len())).rev() {
            let run = &tokens[tokens.len() - length..];
            let end = (length..tokens.len()).rev().find(|end| tokens[end - length..*end] == *run);
            if let Some(end) = end {
                let mut all = tokens.to_vec();
                (0..most).for_each(|i| all.push(all[end + i]));
                return all[tokens.len()..].to_vec();
            }
        }
        Vec::new()
    }

    proptest! {
        #[test]
        fn candidates_follow_the_last_place_of_the_longest_run(
            tokens in prop::collection::vec(0..4u32, 0..80), most in 0..8usize, longest in 1..5usize
        ) {
            let options = Ngram { candidates: 8, longest, shortest: 1 };
            let mut draft = NgramDraft::new(options);
            for length in 0..=tokens.len() {
                let mut to = Vec::new();
                draft.propose(&tokens[..length], most, &mut to);
                prop_assert_eq!(to, plain(options, &tokens[..length], most));
            }
        }
    }

    #[test]
    fn few_candidates_are_tried_where_few_were_right() {
        let mut draft = NgramDraft::new(Ngram::new(8));
        let said: Vec<u32> = (0..20).map(|i| i % 5).collect();
        let count = |draft: &mut NgramDraft| {
            let mut to = Vec::new();
            draft.propose(&said, 100, &mut to);
            to.len()
        };
        assert_eq!(count(&mut draft), 8);
        draft.accepted(1, 8);
        assert_eq!(count(&mut draft), 2);
        draft.accepted(2, 2);
        assert_eq!(count(&mut draft), 4);
        draft.accepted(0, 4);
        assert_eq!(count(&mut draft), 1);
    }
}

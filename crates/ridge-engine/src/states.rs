//! Lines of fixed-size states: one pool for running sequences and for snapshots.
//!
//! A step reads the state of a sequence from one line and writes it to another. The state after the completed tokens therefore
//! survives while steps are in flight, and nothing has to be undone for a failed or cancelled step. A line that is identified by the
//! preceding prefix is a snapshot: it is never written again, a sequence that starts there reads it in place, and it is reused when
//! no sequence owns it, in least-recently-used order.

use std::collections::VecDeque;

use crate::blocks::{BlockId, Blocks, Prefix};

/// The lines of a sequence.
#[derive(Debug, Default)]
pub(crate) struct SequenceState {
    /// The state behind the tokens that are complete; zeros if none.
    now: Option<BlockId>,
    /// What each step in flight writes.
    flying: VecDeque<BlockId>,
}

impl SequenceState {
    /// The lines that the last step in flight reads and writes, or its second part; negative for none.
    pub(crate) fn of_step(&self, second: bool) -> [i32; 2] {
        let index = |line: Option<BlockId>| line.map_or(-1, |line| line.0 as i32);
        let to = self.flying.back().copied();
        let before = self.flying.len().checked_sub(2).map(|nth| self.flying[nth]).or(self.now);
        [index(if second { to } else { before }), index(to)]
    }
}

/// All lines.
#[derive(Debug)]
pub(crate) struct States {
    lines: Blocks,
}

impl States {
    /// `count` free lines: at least one for each sequence that runs and one for each of its steps in flight.
    pub(crate) fn new(count: usize) -> Self {
        Self { lines: Blocks::new(count) }
    }

    /// The lines as a pool: named ones are snapshots.
    pub(crate) fn lines(&self) -> &Blocks {
        &self.lines
    }

    /// How many of the blocks that end these prefixes a sequence may start with: up to the last with a snapshot behind it.
    pub(crate) fn found(&self, prefixes: &[Prefix]) -> usize {
        prefixes.iter().rposition(|prefix| self.lines.find(*prefix, &[]).is_some()).map_or(0, |nth| nth + 1)
    }

    /// The state of a sequence that starts behind a prefix that was [found](Self::found), or from nothing.
    pub(crate) fn start(&mut self, prefix: Option<&Prefix>) -> SequenceState {
        let now = prefix.and_then(|prefix| self.lines.find(*prefix, &[])).map(|(line, _)| line);
        now.into_iter().for_each(|line| self.lines.share(line));
        SequenceState { now, flying: VecDeque::new() }
    }

    /// Takes a line for what a further step writes.
    ///
    /// # Panics
    /// When more steps are in flight than there are lines for, which is a mistake of ours.
    pub(crate) fn submit(&mut self, state: &mut SequenceState) {
        state.flying.push_back(self.lines.take().expect("there is a line for each step in flight"));
    }

    /// Gives back the line of the last step, which was not submitted after all.
    pub(crate) fn cancel(&mut self, state: &mut SequenceState) {
        state.flying.pop_back().into_iter().for_each(|line| self.lines.give_back(line));
    }

    /// Takes over that the first step in flight is complete.
    pub(crate) fn complete(&mut self, state: &mut SequenceState) {
        if let Some(line) = state.flying.pop_front() {
            state.now.replace(line).into_iter().for_each(|line| self.lines.give_back(line));
        }
    }

    /// Makes the state a snapshot behind `prefix`.
    pub(crate) fn keep(&mut self, state: &SequenceState, prefix: Prefix) {
        if let Some(line) = state.now {
            self.lines.name(line, prefix, &[]);
        }
    }

    /// Gives up what steps in flight write. It may be reused at once, since steps run in order.
    pub(crate) fn take_back(&mut self, state: &mut SequenceState) {
        state.flying.drain(..).for_each(|line| self.lines.give_back(line));
    }

    /// Gives up all of a sequence, which has no tokens then.
    pub(crate) fn end(&mut self, state: &mut SequenceState) {
        self.take_back(state);
        state.now.take().into_iter().for_each(|line| self.lines.give_back(line));
    }

    /// Makes all snapshots unfindable.
    pub(crate) fn forget_all(&mut self) {
        self.lines.forget_all();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Whatever sequences do, no line that one owns is handed out, the pool does not grow, a snapshot that is found is
        /// the line that was kept, and nothing is left over.
        #[test]
        fn lines_are_handed_out_once(spare in 0..5usize, acts in prop::collection::vec((0..3usize, 0..7u8, 0..6u64), 1..200)) {
            let count = 3 * 3 + spare;
            let mut states = States::new(count);
            let mut all: Vec<SequenceState> = (0..3).map(|_| SequenceState::default()).collect();
            for (of, act, prefix) in acts {
                let owned: Vec<BlockId> = all.iter().flat_map(|s| s.now.iter().chain(&s.flying)).copied().collect();
                let prefix = Prefix::Tokens(prefix);
                let state = &mut all[of];
                match act {
                    0 | 1 if state.flying.len() < 2 => {
                        let before = state.of_step(false)[1];
                        states.submit(state);
                        let [from, to] = state.of_step(false);
                        prop_assert!(!owned.contains(&BlockId(to as u32)), "line {to} is owned");
                        prop_assert!(before < 0 || from == before, "a step reads what the one before it writes");
                        prop_assert_eq!(state.of_step(true), [to, to]);
                    }
                    2 => states.complete(state),
                    3 => {
                        // A prefix has one state; lines with a name are not written, so they keep theirs.
                        let named = state.now.is_none_or(|line| states.lines.is_named(line));
                        if !named {
                            let known = states.found(&[prefix]) == 1;
                            states.keep(state, prefix);
                            prop_assert_eq!(states.found(&[prefix]), 1);
                            let line = states.lines.find(prefix, &[]).map(|(line, _)| line);
                            prop_assert!(known || line == state.now);
                        }
                    }
                    4 => states.take_back(state),
                    5 => states.end(state),
                    6 if state.now.is_none() && state.flying.is_empty() && states.found(&[prefix]) == 1 => {
                        *state = states.start(Some(&prefix));
                        prop_assert!(state.now.is_some_and(|line| states.lines.is_named(line)));
                    }
                    _ => {}
                }
                prop_assert_eq!(states.lines.count(), count);
            }
            all.iter_mut().for_each(|state| states.end(state));
            prop_assert_eq!(states.lines.free(), count);
        }
    }
}

//! Cache blocks of layer groups with a sliding window: each window has its own pool, and a sequence holds a block only while the
//! window can still reach it.
//!
//! Blocks before a window are freed when a step completes. Steps in flight then start at the completed length or later, so none of
//! them reads a freed block. A freed block keeps its identity until it is reused: the prefix that ends with the block of the full
//! group at the same position. A prefix match is the longest length at which all groups have the blocks that the next token reads.

use std::collections::VecDeque;

use crate::blocks::{BlockId, Blocks, Prefix};

/// Maximum number of blocks that a sequence holds of a group with this window, where steps in flight process at most
/// `tokens` tokens of it together.
///
/// The first of these tokens attends to the `window - 1` before it, so blocks of `window - 1 + tokens` successive positions
/// are held. `n` positions that start at the last of a block touch `1 + ceil((n - 1) / block_size)` blocks, and no others
/// touch more.
pub const fn window_blocks(window: usize, tokens: usize, block_size: usize) -> usize {
    let positions = window.saturating_sub(1) + tokens;
    if positions == 0 { 0 } else { 1 + (positions - 1).div_ceil(block_size) }
}

/// First block that a token at `position` reads of a group with this window.
fn first_block(window: usize, position: usize, block_size: usize) -> usize {
    (position + 1).saturating_sub(window) / block_size
}

/// The blocks that a sequence holds of one pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct WindowTable {
    /// Number of blocks of the sequence that lie before them.
    first: usize,
    blocks: VecDeque<BlockId>,
}

impl WindowTable {
    /// The block at place `nth` of the sequence, if it is held.
    pub(crate) fn get(&self, nth: usize) -> Option<BlockId> {
        self.blocks.get(nth.checked_sub(self.first)?).copied()
    }

    /// Place of the first block that is held.
    pub(crate) fn first(&self) -> usize {
        self.first
    }

    /// Blocks of the sequence up to the last that is held.
    pub(crate) fn end(&self) -> usize {
        self.first + self.blocks.len()
    }
}

/// A pool of blocks.
#[derive(Debug)]
struct WindowPool {
    window: usize,
    blocks: Blocks,
}

/// The pools of all windows of a model. A sequence has a [`WindowTable`] for each, in the same order.
#[derive(Debug)]
pub(crate) struct WindowPools {
    pools: Vec<WindowPool>,
    block_size: usize,
}

impl WindowPools {
    /// Pools of `(window, blocks)` each.
    pub(crate) fn new(pools: impl Iterator<Item = (usize, usize)>, block_size: usize) -> Self {
        let pools = pools.map(|(window, count)| WindowPool { window, blocks: Blocks::new(count) }).collect();
        Self { pools, block_size }
    }

    /// Blocks of the pools, in order.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = &Blocks> {
        self.pools.iter().map(|pool| &pool.blocks)
    }

    /// How many of the blocks that end these prefixes a sequence may start with: the most after which every pool has what
    /// the next token reads.
    pub(crate) fn found(&self, prefixes: &[Prefix]) -> usize {
        let mut hits = vec![true; prefixes.len() + 1];
        for WindowPool { window, blocks } in &self.pools {
            // Blocks before `end` that are found without a gap.
            let mut run = 0;
            for (end, hit) in hits.iter_mut().enumerate() {
                if end > 0 {
                    run = if blocks.find(prefixes[end - 1], &[]).is_some() { run + 1 } else { 0 };
                }
                *hit &= run >= end - first_block(*window, end * self.block_size, self.block_size);
            }
        }
        hits.iter().rposition(|hit| *hit).unwrap_or(0)
    }

    /// The tables of a sequence that starts with the blocks that end these prefixes, as many as are
    /// [found](Self::found).
    pub(crate) fn share(&mut self, prefixes: &[Prefix]) -> Vec<WindowTable> {
        let size = self.block_size;
        let table = |WindowPool { window, blocks }: &mut WindowPool| {
            let first = first_block(*window, prefixes.len() * size, size);
            let found: VecDeque<BlockId> =
                prefixes[first..].iter().map_while(|end| Some(blocks.find(*end, &[])?.0)).collect();
            found.iter().for_each(|block| blocks.share(*block));
            WindowTable { first, blocks: found }
        };
        self.pools.iter_mut().map(table).collect()
    }

    /// Blocks that each pool must give so that the sequence holds those up to `length`, added to `more`.
    pub(crate) fn needed(&self, tables: &[WindowTable], length: usize, more: &mut Vec<usize>) {
        more.resize(self.pools.len(), 0);
        for (more, table) in more.iter_mut().zip(tables) {
            *more += length.div_ceil(self.block_size).saturating_sub(table.end());
        }
    }

    /// Has each pool as many free blocks?
    pub(crate) fn have(&self, more: &[usize]) -> bool {
        self.pools.iter().zip(more).all(|(pool, more)| *more <= pool.blocks.free())
    }

    /// Gives a sequence the blocks up to `length`, which the pools [have](Self::have).
    pub(crate) fn grow(&mut self, tables: &mut [WindowTable], length: usize) {
        for (pool, table) in self.pools.iter_mut().zip(tables) {
            let more = length.div_ceil(self.block_size).saturating_sub(table.end());
            table.blocks.extend((0..more).filter_map(|_| pool.blocks.take()));
        }
    }

    /// Gives back the blocks that no token behind the first `length` reads.
    pub(crate) fn retire(&mut self, tables: &mut [WindowTable], length: usize) {
        for (pool, table) in self.pools.iter_mut().zip(tables) {
            while table.first < first_block(pool.window, length, self.block_size) {
                let Some(block) = table.blocks.pop_front() else { break };
                pool.blocks.give_back(block);
                table.first += 1;
            }
        }
    }

    /// Can a sequence go back to its first `length` tokens? Not where blocks that the next token reads were given back.
    pub(crate) fn reaches(&self, tables: &[WindowTable], length: usize) -> bool {
        let first = |pool: &WindowPool| first_block(pool.window, length, self.block_size);
        self.pools.iter().zip(tables).all(|(pool, table)| table.first <= first(pool))
    }

    /// Gives back the blocks behind the first `length` tokens; all where there are none.
    pub(crate) fn truncate(&mut self, tables: &mut [WindowTable], length: usize) {
        for (pool, table) in self.pools.iter_mut().zip(tables) {
            let kept = length.div_ceil(self.block_size).saturating_sub(table.first);
            // From the last on, so that beginnings stay longest.
            while table.blocks.len() > kept {
                table.blocks.pop_back().into_iter().for_each(|block| pool.blocks.give_back(block));
            }
            if length == 0 {
                table.first = 0;
            }
        }
    }

    /// Says that the block at place `nth` of a sequence ends `prefix`.
    pub(crate) fn name(&mut self, tables: &[WindowTable], nth: usize, prefix: Prefix) {
        for (pool, table) in self.pools.iter_mut().zip(tables) {
            if let Some(block) = table.get(nth) {
                pool.blocks.name(block, prefix, &[]);
            }
        }
    }

    /// Takes all blocks' names away.
    pub(crate) fn forget_all(&mut self) {
        self.pools.iter_mut().for_each(|pool| pool.blocks.forget_all());
    }

    /// Positions of the blocks that a sequence of `length` tokens holds and that have no token.
    pub(crate) fn unwritten(&self, tables: &[WindowTable], length: usize) -> usize {
        tables.iter().map(|table| (table.end() * self.block_size).saturating_sub(length)).sum()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Whatever chunks a sequence comes in, it holds what its tokens read, no more than the closed form says, and that
        /// many at some alignment.
        #[test]
        fn held_blocks_are_those_of_the_closed_form(
            window in 1..40usize, block_size in 1..9usize, chunk in 1..20usize, steps in 1..60usize
        ) {
            let most = window_blocks(window, chunk, block_size);
            let mut pools = WindowPools::new([(window, most)].into_iter(), block_size);
            let mut tables = pools.share(&[]);
            let (mut length, mut largest) = (0, 0);
            for step in 0..steps + window * block_size {
                let tokens = if step % 3 == 0 { 1 } else { chunk };
                let mut more = Vec::new();
                pools.needed(&tables, length + tokens, &mut more);
                prop_assert!(pools.have(&more), "{} tokens behind {length}", tokens);
                pools.grow(&mut tables, length + tokens);
                let read = (length + 1).saturating_sub(window)..length + tokens;
                prop_assert!(read.clone().all(|position| tables[0].get(position / block_size).is_some()));
                largest = largest.max(tables[0].blocks.len());
                length += tokens;
                pools.retire(&mut tables, length);
            }
            prop_assert!(largest <= most);
            // Positions of every alignment come first in some step where chunks are of one token.
            if chunk == 1 {
                prop_assert_eq!(largest, most);
            }
            pools.truncate(&mut tables, 0);
            prop_assert!(pools.blocks().all(|blocks| blocks.free() == most));
        }
    }

    #[test]
    fn a_prefix_is_found_where_the_window_behind_it_is() {
        let mut pools = WindowPools::new([(5, 8)].into_iter(), 2);
        let prefixes: Vec<Prefix> = (0..6).map(Prefix::Tokens).collect();
        let mut tables = pools.share(&[]);
        pools.grow(&mut tables, 12);
        (2..5).for_each(|nth| pools.name(&tables, nth, prefixes[nth]));
        // A token at position 2 n reads two blocks before it; there are none before the first.
        assert_eq!([0, 1, 2, 3, 4, 5, 6].map(|n| pools.found(&prefixes[..n])), [0, 0, 0, 0, 4, 5, 5]);
        let shared = pools.share(&prefixes[..4]);
        assert_eq!(shared[0].first, 2);
        assert_eq!([1, 2, 3, 4].map(|nth| shared[0].get(nth)), [None, tables[0].get(2), tables[0].get(3), None]);
        assert!(pools.reaches(&shared, 8) && !pools.reaches(&shared, 6));
    }
}

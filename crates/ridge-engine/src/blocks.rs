//! Allocation, ownership and sharing of cache blocks.
//!
//! A block has one owner per sequence that reads it. Only full blocks are identified (by the prefix that they end), and a full block
//! is never written again, so sharing needs no copies: sequences with a common prefix share its full blocks, and each computes its
//! last, partial block itself. A block without owners keeps its identity until it is reused, in least-recently-used order.

use ahash::AHashMap;

/// A block of the cache, the same index in every layer's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

/// The tokens up to the end of some block, or none of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Prefix {
    /// No tokens yet, of requests of this salt. Different salts share nothing.
    Root(u64),
    /// No tokens yet, of one request alone.
    Alone(u64),
    /// Those that were given this number when they were first in the cache. It is never given to others, so equal
    /// numbers are equal tokens, each computed in the same way: no hash is trusted.
    Tokens(u64),
}

/// A token as blocks are named by it: with whether it was computed as one of an answer, by a graph or sums of its own. So a prompt
/// finds what was computed as a prompt alone, and what it finds never shows in a result.
pub(crate) fn computed(token: u32, answer: bool) -> u32 {
    // Graphs have token ids of 31 bits.
    token | u32::from(answer) << 31
}

/// A block's tokens behind those before it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Name {
    before: Prefix,
    tokens: Box<[u32]>,
}

#[derive(Debug, Default)]
struct Block {
    owners: u32,
    name: Option<Name>,
    /// Neighbours in the list of blocks without owners.
    before: u32,
    after: u32,
}

/// All blocks.
#[derive(Debug)]
pub struct Blocks {
    /// The last is no block: it is both ends of the list of those without owners, which are taken from its front.
    blocks: Vec<Block>,
    free: usize,
    named: AHashMap<Name, (BlockId, u64)>,
    /// Named blocks without owners.
    cached: usize,
    prefixes: u64,
}

impl Blocks {
    /// `count` free blocks.
    pub fn new(count: usize) -> Self {
        let mut blocks: Vec<Block> = (0..=count).map(|_| Block::default()).collect();
        let end = count as u32;
        (blocks[count].before, blocks[count].after) = (end, end);
        let mut all = Self { blocks, free: 0, named: AHashMap::new(), cached: 0, prefixes: 0 };
        (0..end).for_each(|i| all.link(BlockId(i), end));
        all
    }

    /// Number of blocks without owners, those that hold a prefix among them.
    pub fn free(&self) -> usize {
        self.free
    }

    /// Number of blocks without owners that hold a prefix.
    pub fn cached(&self) -> usize {
        self.cached
    }

    /// Number of all blocks.
    pub fn count(&self) -> usize {
        self.blocks.len() - 1
    }

    /// Sequences that own a block.
    pub fn owners(&self, block: BlockId) -> usize {
        self.blocks[block.0 as usize].owners as usize
    }

    /// Does a block hold a prefix?
    pub fn is_named(&self, block: BlockId) -> bool {
        self.blocks[block.0 as usize].name.is_some()
    }

    /// Takes the block without owners that was left longest ago. The prefix that it held is gone.
    pub fn take(&mut self) -> Option<BlockId> {
        let first = self.blocks[self.count()].after;
        if first as usize == self.count() {
            return None;
        }
        let block = BlockId(first);
        self.forget(block);
        self.unlink(block);
        self.blocks[first as usize].owners = 1;
        Some(block)
    }

    /// Takes one owner from a block.
    ///
    /// # Panics
    /// When it has none: two sequences would come to share it, which is a mistake of ours.
    pub fn give_back(&mut self, block: BlockId) {
        let entry = &mut self.blocks[block.0 as usize];
        assert!(entry.owners > 0, "{block:?} is given back twice");
        entry.owners -= 1;
        if entry.owners == 0 {
            // What holds nothing is taken first, what was used last is taken last.
            let before = if entry.name.is_some() { self.count() as u32 } else { self.blocks[self.count()].after };
            self.cached += usize::from(self.blocks[block.0 as usize].name.is_some());
            self.link(block, before);
        }
    }

    /// The block that holds `tokens` behind the prefix `before`, if one does, and the prefix that ends with it.
    pub fn find(&self, before: Prefix, tokens: &[u32]) -> Option<(BlockId, Prefix)> {
        let (block, prefix) = self.named.get(&Name { before, tokens: tokens.into() })?;
        Some((*block, Prefix::Tokens(*prefix)))
    }

    /// Makes a sequence an owner of a block that [`find`](Self::find) found.
    pub fn share(&mut self, block: BlockId) {
        if self.blocks[block.0 as usize].owners == 0 {
            self.unlink(block);
            self.cached -= usize::from(self.blocks[block.0 as usize].name.is_some());
        }
        self.blocks[block.0 as usize].owners += 1;
    }

    /// Says that `block` holds `tokens` behind the prefix `before`, and gives the prefix that ends with it. Where another
    /// block holds the same, that one stays the one that is found.
    pub fn name(&mut self, block: BlockId, before: Prefix, tokens: &[u32]) -> Prefix {
        let name = Name { before, tokens: tokens.into() };
        if let Some((_, prefix)) = self.named.get(&name) {
            return Prefix::Tokens(*prefix);
        }
        self.forget(block);
        let prefix = self.prefixes;
        self.prefixes += 1;
        self.named.insert(name.clone(), (block, prefix));
        self.cached += usize::from(self.owners(block) == 0);
        self.blocks[block.0 as usize].name = Some(name);
        Prefix::Tokens(prefix)
    }

    /// Takes a block's name away, so that nobody finds it.
    pub fn forget(&mut self, block: BlockId) {
        if let Some(name) = self.blocks[block.0 as usize].name.take() {
            self.named.remove(&name);
            self.cached -= usize::from(self.owners(block) == 0);
        }
    }

    /// Takes all blocks' names away.
    pub(crate) fn forget_all(&mut self) {
        (0..self.count() as u32).for_each(|block| self.forget(BlockId(block)));
    }

    /// A prefix that no block ends and none will: what is named behind it is found by nobody else.
    pub(crate) fn unreachable(&mut self) -> Prefix {
        self.prefixes += 1;
        Prefix::Tokens(self.prefixes - 1)
    }

    /// Puts a block without owners into the list, in front of `after`.
    fn link(&mut self, block: BlockId, after: u32) {
        let before = self.blocks[after as usize].before;
        (self.blocks[block.0 as usize].before, self.blocks[block.0 as usize].after) = (before, after);
        self.blocks[before as usize].after = block.0;
        self.blocks[after as usize].before = block.0;
        self.free += 1;
    }

    fn unlink(&mut self, block: BlockId) {
        let (before, after) = (self.blocks[block.0 as usize].before, self.blocks[block.0 as usize].after);
        self.blocks[before as usize].after = after;
        self.blocks[after as usize].before = before;
        self.free -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    const COUNT: usize = 12;

    proptest! {
        /// Beside a plain model: who owns what, and what each block was last said to hold.
        #[test]
        fn a_block_is_free_or_owned_and_found_only_for_what_it_holds(
            steps in prop::collection::vec((0..5u8, any::<u8>(), 0..3u32), 0..300)
        ) {
            let mut blocks = Blocks::new(COUNT);
            // Each owner's block; a block stands in it once an owner.
            let mut owned: Vec<BlockId> = Vec::new();
            let mut holds: HashMap<BlockId, (Prefix, u32)> = HashMap::new();
            let mut prefixes = vec![Prefix::Root(0), Prefix::Root(1)];
            for (what, which, token) in steps {
                let prefix = prefixes[which as usize % prefixes.len()];
                match what {
                    0 if !owned.is_empty() => blocks.give_back(owned.swap_remove(which as usize % owned.len())),
                    1 => {
                        let taken = blocks.take();
                        let distinct: std::collections::HashSet<_> = owned.iter().collect();
                        prop_assert_eq!(taken.is_none(), distinct.len() == COUNT);
                        if let Some(block) = taken {
                            prop_assert!(!owned.contains(&block), "{:?} has an owner", block);
                            prop_assert!(!blocks.is_named(block));
                            holds.remove(&block);
                            owned.push(block);
                        }
                    }
                    2 if !owned.is_empty() => {
                        let block = owned[which as usize % owned.len()];
                        if !blocks.is_named(block) {
                            let end = blocks.name(block, prefix, &[token]);
                            if blocks.is_named(block) {
                                holds.insert(block, (prefix, token));
                                prop_assert!(!prefixes.contains(&end), "{:?} is given twice", end);
                            }
                            prefixes.push(end);
                        }
                    }
                    3 => if let Some((block, end)) = blocks.find(prefix, &[token]) {
                        prop_assert_eq!(holds.get(&block), Some(&(prefix, token)));
                        prop_assert!(prefixes.contains(&end));
                        blocks.share(block);
                        owned.push(block);
                    },
                    4 if !owned.is_empty() => {
                        let block = owned[which as usize % owned.len()];
                        blocks.forget(block);
                        holds.remove(&block);
                    }
                    _ => {}
                }
                let mut counts = [0; COUNT];
                owned.iter().for_each(|b| counts[b.0 as usize] += 1);
                prop_assert!((0..COUNT).all(|i| blocks.owners(BlockId(i as u32)) == counts[i]));
                let free = (0..COUNT as u32).map(BlockId).filter(|b| counts[b.0 as usize] == 0);
                prop_assert_eq!(blocks.free(), free.clone().count());
                prop_assert_eq!(blocks.cached(), free.filter(|b| blocks.is_named(*b)).count());
            }
        }
    }

    #[test]
    fn what_was_left_longest_ago_is_taken_first_and_what_holds_nothing_before_it() {
        let mut blocks = Blocks::new(3);
        let taken: Vec<BlockId> = (0..3).filter_map(|_| blocks.take()).collect();
        assert_eq!(taken, [BlockId(0), BlockId(1), BlockId(2)]);
        let first = blocks.name(taken[0], Prefix::Root(0), &[1]);
        blocks.name(taken[1], first, &[2]);
        // The end of a sequence is left before its beginning, so that beginnings stay longest.
        for block in taken.iter().rev() {
            blocks.give_back(*block);
        }
        assert_eq!((blocks.free(), blocks.cached()), (3, 2));
        assert_eq!(blocks.take(), Some(taken[2]));
        assert_eq!(blocks.take(), Some(taken[1]));
        assert_eq!(blocks.find(first, &[2]), None);
        assert_eq!(blocks.find(Prefix::Root(0), &[1]), Some((taken[0], first)));
        assert_eq!(blocks.find(Prefix::Root(1), &[1]), None, "another salt");
        blocks.share(taken[0]);
        assert_eq!((blocks.free(), blocks.cached(), blocks.take()), (0, 0, None));
    }

    #[test]
    fn of_two_blocks_that_hold_the_same_the_first_is_found() {
        let mut blocks = Blocks::new(2);
        let [a, b] = [(); 2].map(|()| blocks.take().expect("two are free"));
        let prefix = blocks.name(a, Prefix::Root(7), &[1, 2]);
        assert_eq!(blocks.name(b, Prefix::Root(7), &[1, 2]), prefix);
        assert_eq!((blocks.find(Prefix::Root(7), &[1, 2]), blocks.is_named(b)), (Some((a, prefix)), false));
    }

    #[test]
    #[should_panic(expected = "given back twice")]
    fn a_block_cannot_be_freed_twice() {
        let mut blocks = Blocks::new(1);
        let block = blocks.take().unwrap();
        blocks.give_back(block);
        blocks.give_back(block);
    }
}

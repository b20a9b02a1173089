//! Which blocks of the cache are free.

/// A block of the cache, the same index in every layer's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

/// The free blocks. A block has one owner; prefix sharing will give it more.
#[derive(Debug)]
pub struct Blocks {
    free: Vec<BlockId>,
    taken: Vec<bool>,
}

impl Blocks {
    /// `count` free blocks.
    pub fn new(count: usize) -> Self {
        // Taken from the end: lowest indices first.
        Self { free: (0..count as u32).rev().map(BlockId).collect(), taken: vec![false; count] }
    }

    /// Number of free blocks.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Takes a free block.
    pub fn take(&mut self) -> Option<BlockId> {
        let block = self.free.pop()?;
        self.taken[block.0 as usize] = true;
        Some(block)
    }

    /// Gives a block back.
    ///
    /// # Panics
    /// When it is free already: two owners would share it, which is a mistake of ours.
    pub fn give_back(&mut self, block: BlockId) {
        assert!(std::mem::take(&mut self.taken[block.0 as usize]), "{block:?} is given back twice");
        self.free.push(block);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_block_never_has_two_owners(steps in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut blocks = Blocks::new(16);
            let mut owned: Vec<BlockId> = Vec::new();
            for step in steps {
                if step % 3 == 0 && !owned.is_empty() {
                    blocks.give_back(owned.swap_remove(step as usize % owned.len()));
                } else {
                    let taken = blocks.take();
                    prop_assert_eq!(taken.is_none(), owned.len() == 16);
                    owned.extend(taken);
                }
                prop_assert_eq!(owned.iter().collect::<HashSet<_>>().len(), owned.len());
                prop_assert_eq!(blocks.free() + owned.len(), 16);
            }
        }
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

//! What a warp's access costs: sectors of global memory, passes through the banks of shared memory.
//!
//! Source: CUDA C++ Programming Guide and Best Practices Guide, "Coalesced Access to Global Memory" (sectors of 32 bytes)
//! and "Shared Memory and Memory Banks" (32 banks of 4 bytes).

use std::collections::{BTreeMap, BTreeSet};

use crate::PlanError;

const LANES: u64 = 32;
const SECTOR: u64 = 32;
const BANKS: u64 = 32;
const WORD: u64 = 4;

/// Lane `i` of a warp reads `width` bytes at `offset + i * stride`, all in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    offset: u64,
    stride: u64,
    width: u64,
}

impl Access {
    /// An access of `width` bytes a lane (1, 2, 4, 8 or 16).
    ///
    /// # Errors
    ///
    /// A width that no instruction has, an address that is no multiple of it, or one past 2^40.
    pub fn new(offset: u64, stride: u64, width: u64) -> Result<Self, PlanError> {
        if ![1, 2, 4, 8, 16].contains(&width) {
            return Err(PlanError::setting(
                "width",
                width,
                "bytes are not a valid load width",
                "use 1, 2, 4, 8 or 16 bytes",
            ));
        }
        for (what, value) in [("offset", offset), ("stride", stride)] {
            if value % width != 0 || value > 1 << 40 {
                let nearest = (value / width * width).min(1 << 40);
                return Err(PlanError::setting(
                    what,
                    value,
                    format!("must be a multiple of the {width} bytes that a lane reads, and at most 2^40"),
                    format!("the nearest below is {nearest}"),
                ));
            }
        }
        Ok(Self { offset, stride, width })
    }

    fn lanes(self) -> impl Iterator<Item = u64> {
        (0..LANES).map(move |lane| self.offset + lane * self.stride)
    }

    /// Distinct sectors of 32 bytes that the warp touches.
    #[must_use]
    pub fn sectors(self) -> usize {
        self.lanes().map(|at| at / SECTOR).collect::<BTreeSet<_>>().len()
    }

    /// Bytes that the lanes ask for over bytes of the sectors they touch; a value read by all lanes counts once.
    #[must_use]
    pub fn efficiency(self) -> f64 {
        let asked = self.lanes().collect::<BTreeSet<_>>().len() as u64 * self.width;
        asked as f64 / (self.sectors() as u64 * SECTOR) as f64
    }

    /// Passes through shared memory: for each group of lanes that is served together (all 32 up to 4 bytes, 16 of 8
    /// bytes, 8 of 16 bytes), the most distinct words that one bank must give.
    #[must_use]
    pub fn shared_passes(self) -> usize {
        let together = (LANES * WORD / self.width.max(WORD)) as usize;
        let addresses: Vec<u64> = self.lanes().collect();
        addresses.chunks(together).map(|group| self.passes_of(group)).sum()
    }

    /// Passes through shared memory over those of an access without conflicts: 1 is none, 32 the worst.
    #[must_use]
    pub fn conflict_ways(self) -> f64 {
        self.shared_passes() as f64 / (self.width.max(WORD) / WORD) as f64
    }

    fn passes_of(self, group: &[u64]) -> usize {
        let mut banks: BTreeMap<u64, BTreeSet<u64>> = BTreeMap::new();
        for at in group {
            for word in at / WORD..(at + self.width).div_ceil(WORD) {
                banks.entry(word % BANKS).or_default().insert(word);
            }
        }
        banks.values().map(BTreeSet::len).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(offset: u64, stride: u64, width: u64) -> Access {
        Access::new(offset, stride, width).unwrap()
    }

    #[test]
    fn neighbouring_words_fill_their_sectors_and_an_offset_costs_one_more() {
        assert_eq!((access(0, 4, 4).sectors(), access(4, 4, 4).sectors()), (4, 5));
        assert!((access(0, 4, 4).efficiency() - 1.0).abs() < 1e-12);
        assert_eq!(access(0, 16, 16).sectors(), 16);
    }

    #[test]
    fn a_column_of_a_matrix_takes_a_sector_a_lane() {
        assert_eq!(access(0, 4096, 4).sectors(), 32);
        assert!((access(0, 4096, 4).efficiency() - 0.125).abs() < 1e-12);
    }

    #[test]
    fn a_tile_of_32_words_conflicts_32_ways_and_of_33_not_at_all() {
        assert_eq!(access(0, 128, 4).shared_passes(), 32);
        assert_eq!(access(0, 132, 4).shared_passes(), 1);
        assert_eq!(access(0, 8, 4).shared_passes(), 2);
    }

    #[test]
    fn one_word_for_all_lanes_is_one_pass() {
        assert_eq!(access(0, 0, 4).shared_passes(), 1);
        assert_eq!(access(0, 2, 2).shared_passes(), 1);
    }

    #[test]
    fn wide_loads_take_more_passes_without_a_conflict() {
        assert_eq!(access(0, 16, 16).shared_passes(), 4);
        assert!((access(0, 16, 16).conflict_ways() - 1.0).abs() < 1e-12);
    }

    #[test]
    fn an_access_off_its_alignment_is_refused_with_the_nearest() {
        let message = Access::new(6, 4, 4).unwrap_err().to_string();
        assert!(message.contains("offset = 6") && message.contains("is 4"), "{message}");
        assert!(Access::new(0, 3, 3).is_err());
    }
}

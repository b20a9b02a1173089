//! Which sequence comes next. Everything here is a function of seed and number, so that it depends on no reader and
//! goes on anywhere.

/// A permutation of `0..n`: a Feistel network over the next power of 4, walked until it is within (Black and Rogaway 2002,
/// "Ciphers with Arbitrary Finite Domains").
#[derive(Clone, Copy, Debug)]
pub struct Permutation {
    n: u64,
    half_bits: u32,
    key: u64,
}

impl Permutation {
    const ROUNDS: u64 = 6;

    /// That of `key`.
    pub fn new(n: u64, key: u64) -> Self {
        let bits = u64::BITS - n.saturating_sub(1).leading_zeros();
        Self { n, half_bits: bits.div_ceil(2).max(1), key }
    }

    /// Where `index` goes.
    pub fn at(&self, index: u64) -> u64 {
        if self.n <= 1 {
            return 0;
        }
        let mut value = index % self.n;
        loop {
            value = self.turned(value);
            if value < self.n {
                return value;
            }
        }
    }

    fn turned(&self, value: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let (mut left, mut right) = (value >> self.half_bits, value & mask);
        for round in 0..Self::ROUNDS {
            let mixed = mix(self.key ^ mix(right ^ (round << 56)));
            (left, right) = (right, left ^ (mixed & mask));
        }
        (left << self.half_bits) | right
    }
}

/// A number of all bits of `x` (the finaliser of SplitMix64; Steele, Lea and Flood 2014).
pub fn mix(x: u64) -> u64 {
    let mut z = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The source that the next sequence comes from, of which `taken` have been taken: the one that is furthest behind its
/// share. Any beginning of the run has each source within one sequence of its share.
pub fn next_source(shares: &[f64], taken: &[u64]) -> usize {
    let next = taken.iter().sum::<u64>() + 1;
    let behind = |source: usize| shares[source] * next as f64 - taken[source] as f64;
    (0..shares.len()).rev().max_by(|a, b| behind(*a).total_cmp(&behind(*b))).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permutations_have_every_index_once_and_differ_by_key() {
        for n in [1, 2, 3, 16, 17, 1000, 4097] {
            let order = |key| (0..n).map(|i| Permutation::new(n, key).at(i)).collect::<Vec<_>>();
            let mut sorted = order(7);
            sorted.sort_unstable();
            assert_eq!(sorted, (0..n).collect::<Vec<_>>());
            assert!(n < 16 || (order(7) != order(8) && order(7) != sorted), "{n}");
        }
        // Neighbours do not stay neighbours.
        let near =
            (0..999).filter(|i| Permutation::new(1000, 1).at(*i).abs_diff(Permutation::new(1000, 1).at(i + 1)) < 10);
        assert!(near.count() < 60);
    }

    #[test]
    fn every_beginning_of_a_mixture_has_its_shares() {
        let shares = [0.5, 0.3, 0.15, 0.05];
        let mut taken = [0; 4];
        for n in 1..=2000_u64 {
            taken[next_source(&shares, &taken)] += 1;
            for (share, taken) in shares.iter().zip(taken) {
                assert!((share * n as f64 - taken as f64).abs() < 1.0 + 1e-9, "{n}: {taken} of {share}");
            }
        }
    }
}

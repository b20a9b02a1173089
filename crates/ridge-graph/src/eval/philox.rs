//! Philox4x32-10: random numbers as a function of a counter and a key (Salmon, Moraes, Dror and Shaw 2011, "Parallel
//! random numbers: as easy as 1, 2, 3", section 3.3).

const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
/// The golden ratio and the square root of 3, less 1: what the key is raised by each round.
const WEYL: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];
const ROUNDS: usize = 10;

/// Four random words for a counter and a key.
#[inline]
pub fn philox4x32(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let mut c = counter;
    let mut k = key;
    for _ in 0..ROUNDS {
        let product = |word: u32, by: u32| u64::from(word) * u64::from(by);
        let (p0, p1) = (product(c[0], MULTIPLIERS[0]), product(c[2], MULTIPLIERS[1]));
        c = [(p1 >> 32) as u32 ^ c[1] ^ k[0], p1 as u32, (p0 >> 32) as u32 ^ c[3] ^ k[1], p0 as u32];
        k = [k[0].wrapping_add(WEYL[0]), k[1].wrapping_add(WEYL[1])];
    }
    c
}

/// Uniform in `[0, 1)`, a multiple of 2^-24: the meaning of [`Prim::Random`](crate::Prim::Random). The key is `seed`,
/// low word first; the counter is the low words of `(index, position, sequence, stream)`.
pub fn uniform(seed: i64, stream: u32, sequence: i64, position: i64, index: i64) -> f32 {
    let key = [seed as u32, (seed >> 32) as u32];
    let word = philox4x32([index as u32, position as u32, sequence as u32, stream], key)[0];
    (word >> 8) as f32 * (1.0 / 16_777_216.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers published with the paper's implementation (Random123, `kat_vectors`).
    #[test]
    fn philox_gives_the_published_answers() {
        let zeros = philox4x32([0; 4], [0; 2]);
        assert_eq!(zeros, [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        let ones = philox4x32([u32::MAX; 4], [u32::MAX; 2]);
        assert_eq!(ones, [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let pi = philox4x32([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]);
        assert_eq!(pi, [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
    }

    #[test]
    fn uniform_numbers_are_keyed_by_every_part_and_fill_the_unit_interval() {
        let one = uniform(1, 2, 3, 4, 5);
        for other in [uniform(2, 2, 3, 4, 5), uniform(1, 3, 3, 4, 5), uniform(1, 2, 4, 4, 5), uniform(1, 2, 3, 5, 5)] {
            assert_ne!(one, other);
        }
        assert_ne!(uniform(1, 2, 3, 4, 5), uniform(1 + (1 << 32), 2, 3, 4, 5));
        let numbers: Vec<f32> = (0..4096).map(|i| uniform(7, 0, 0, 0, i)).collect();
        assert!(numbers.iter().all(|x| (0.0..1.0).contains(x)));
        let mean = numbers.iter().sum::<f32>() / 4096.0;
        assert!((mean - 0.5).abs() < 0.02, "{mean}");
    }
}

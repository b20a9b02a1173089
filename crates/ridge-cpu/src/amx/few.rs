//! Products of few rows of x with rows that lie anywhere: of queries with keys, and of their weights with values.

use std::arch::asm;

use half::bf16;

use super::config::{DEPTH, LINE, SIDE, TileSession, Words};
use super::tiles::{Tiles, two_by_one};

/// Tiles of this thread, some of which have only as many rows as there are queries.
pub(crate) struct FewQueries {
    _configured: TileSession,
    count: usize,
}

impl FewQueries {
    /// For `count` queries, at most 16.
    pub(crate) fn begin(count: usize) -> Self {
        let (whole, few) = ([SIDE, LINE], [count, LINE]);
        Self { _configured: TileSession::with([whole, few, whole, few, whole, whole, whole, few]), count }
    }

    /// Adds the products of two times 16 `keys`, whose rows of `depth` tiles are `stride` elements apart, with a tile of
    /// columns `x` to two tiles of sums, or sets them.
    pub(crate) fn score(&self, [low, high]: [&[bf16]; 2], stride: usize, x: &[Words], sums: &mut [Words], fresh: bool) {
        let depth = x.len();
        let inside = |rows: &[bf16]| rows.len() >= (SIDE - 1) * stride + depth * DEPTH;
        assert!(depth > 0 && inside(low) && inside(high) && sums.len() == 2 && self.count <= SIDE);
        let size = size_of::<bf16>();
        let (low, high) = (low.as_ptr().cast(), high.as_ptr().cast());
        let at = Tiles { low, high, stride: stride * size, step: DEPTH * size };
        // SAFETY: the tiles are configured; rows, columns and sums are as many as is checked here.
        unsafe { two_by_one(&at, x.as_ptr(), depth, sums.as_mut_ptr(), fresh) }
    }

    /// Adds the products of `weights`, a row of pairs of keys for each query in a tile for each 32 keys, with `values`,
    /// two tiles for each 32 keys, to the rows of two tiles of sums.
    pub(crate) fn weigh(&self, weights: &[Words], values: &[Words], sums: &mut [Words]) {
        assert!(!weights.is_empty() && values.len() >= 2 * weights.len() && sums.len() == 2 && self.count <= SIDE);
        // SAFETY: the tiles are configured, and all are as many as is checked here; the tile registers are used by
        // nothing else.
        unsafe {
            asm!(
                "tileloadd tmm1, [{sums} + {line}*1]",
                "tileloadd tmm3, [{sums} + {line}*1 + 1024]",
                "2:",
                "tileloadd tmm7, [{a} + {line}*1]",
                "tileloadd tmm4, [{b} + {line}*1]",
                "tdpbf16ps tmm1, tmm7, tmm4",
                "tileloadd tmm5, [{b} + {line}*1 + 1024]",
                "tdpbf16ps tmm3, tmm7, tmm5",
                "add {a}, 1024",
                "add {b}, 2048",
                "dec {n}",
                "jnz 2b",
                "tilestored [{sums} + {line}*1], tmm1",
                "tilestored [{sums} + {line}*1 + 1024], tmm3",
                sums = in(reg) sums.as_mut_ptr(),
                line = in(reg) LINE,
                a = inout(reg) weights.as_ptr() => _,
                b = inout(reg) values.as_ptr() => _,
                n = inout(reg) weights.len() => _,
                out("tmm1") _, out("tmm3") _, out("tmm4") _, out("tmm5") _, out("tmm7") _,
                options(nostack),
            );
        }
    }
}

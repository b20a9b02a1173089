//! The tile instructions.

use std::arch::asm;

use super::Words;

/// Where 32 rows of a weight lie.
pub(super) struct Tiles {
    pub(super) low: *const u8,
    /// The second 16 rows.
    pub(super) high: *const u8,
    /// Bytes from a row to the next.
    pub(super) stride: usize,
    /// Bytes from a tile to the next along K.
    pub(super) step: usize,
}

/// Four rows that are needed next, of which a product brings a line to cache for each tile of K.
#[derive(Clone, Copy)]
pub(super) struct Next {
    pub(super) at: *const u8,
    /// Bytes from a row to the next.
    pub(super) stride: usize,
}

/// Two tiles of rows by two tiles of columns, which takes one load of a tile for each product. The four tiles of sums
/// lie together: by the first rows, then by the second.
///
/// # Safety
/// Tiles are configured; `w` and each of `x` have `steps` tiles of K, `steps` is not 0, and `sums` are four tiles.
/// `next` may be anywhere.
pub(super) unsafe fn two_by_two(
    w: &Tiles,
    x: [*const Words; 2],
    steps: usize,
    sums: *mut Words,
    fresh: bool,
    next: Option<Next>,
) {
    macro_rules! product {
        ([$($fetch:literal,)*] $($name:ident = $value:expr,)*) => {
            asm!(
                "test {fresh:e}, {fresh:e}",
                "jz 2f",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "jmp 3f",
                "2:",
                "tileloadd tmm0, [{sums} + {line}*1]",
                "tileloadd tmm1, [{sums} + {line}*1 + 1024]",
                "tileloadd tmm2, [{sums} + {line}*1 + 2048]",
                "tileloadd tmm3, [{sums} + {line}*1 + 3072]",
                "3:",
                "tileloadd tmm4, [{a} + {stride}*1]",
                "tileloadd tmm6, [{x} + {line}*1]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{y} + {line}*1]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{b} + {stride}*1]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                $($fetch,)*
                "add {a}, {step}",
                "add {b}, {step}",
                "add {x}, 1024",
                "add {y}, 1024",
                "dec {n}",
                "jnz 3b",
                "tilestored [{sums} + {line}*1], tmm0",
                "tilestored [{sums} + {line}*1 + 1024], tmm1",
                "tilestored [{sums} + {line}*1 + 2048], tmm2",
                "tilestored [{sums} + {line}*1 + 3072], tmm3",
                fresh = in(reg) u32::from(fresh),
                sums = in(reg) sums,
                line = in(reg) 64usize,
                a = inout(reg) w.low => _,
                b = inout(reg) w.high => _,
                stride = in(reg) w.stride,
                step = in(reg) w.step,
                x = inout(reg) x[0] => _,
                y = inout(reg) x[1] => _,
                n = inout(reg) steps => _,
                $($name = inout(reg) $value => _,)*
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            )
        };
    }
    // SAFETY: by the caller's promise every address is inside of what it points into, and fetching ahead touches
    // nothing; the tile registers are used by nothing else.
    unsafe {
        match next {
            None => product!([]),
            Some(next) => product!(
                [
                    "prefetcht1 [{next}]",
                    "prefetcht1 [{next} + {row}]",
                    "prefetcht1 [{next} + {row}*2]",
                    "prefetcht1 [{next} + {rows}]",
                    "add {next}, 64",
                ]
                next = next.at,
                row = next.stride,
                rows = 3 * next.stride,
            ),
        }
    }
}

/// Two tiles of rows by one of columns; the two tiles of sums lie together.
///
/// # Safety
/// As [`two_by_two`], with one tile of columns.
pub(super) unsafe fn two_by_one(w: &Tiles, x: *const Words, steps: usize, sums: *mut Words, fresh: bool) {
    // SAFETY: as above.
    unsafe {
        asm!(
            "test {fresh:e}, {fresh:e}",
            "jz 2f",
            "tilezero tmm0",
            "tilezero tmm2",
            "jmp 3f",
            "2:",
            "tileloadd tmm0, [{sums} + {line}*1]",
            "tileloadd tmm2, [{sums} + {line}*1 + 1024]",
            "3:",
            "tileloadd tmm6, [{x} + {line}*1]",
            "tileloadd tmm4, [{a} + {stride}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm5, [{b} + {stride}*1]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "add {a}, {step}",
            "add {b}, {step}",
            "add {x}, 1024",
            "dec {n}",
            "jnz 3b",
            "tilestored [{sums} + {line}*1], tmm0",
            "tilestored [{sums} + {line}*1 + 1024], tmm2",
            fresh = in(reg) u32::from(fresh),
            sums = in(reg) sums,
            line = in(reg) 64usize,
            a = inout(reg) w.low => _,
            b = inout(reg) w.high => _,
            stride = in(reg) w.stride,
            step = in(reg) w.step,
            x = inout(reg) x => _,
            n = inout(reg) steps => _,
            out("tmm0") _, out("tmm2") _, out("tmm4") _, out("tmm5") _, out("tmm6") _,
            options(nostack),
        );
    }
}

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

/// Two tiles of rows by two tiles of columns.
///
/// # Safety
/// Tiles are configured; `w`, `x` and `x_next` have `steps` tiles of K, `steps` is not 0, `low` and `high` are two tiles
/// of sums each.
pub(super) unsafe fn two_by_two(
    w: &Tiles,
    x: *const Words,
    x_next: *const Words,
    steps: usize,
    low: *mut Words,
    high: *mut Words,
    fresh: bool,
) {
    // SAFETY: by the caller's promise every address is inside of what it points into; the tile registers are used by
    // nothing else.
    unsafe {
        asm!(
            "test {fresh:e}, {fresh:e}",
            "jz 2f",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "jmp 3f",
            "2:",
            "tileloadd tmm0, [{low} + {line}*1]",
            "tileloadd tmm1, [{low} + {line}*1 + 1024]",
            "tileloadd tmm2, [{high} + {line}*1]",
            "tileloadd tmm3, [{high} + {line}*1 + 1024]",
            "3:",
            "tileloadd tmm4, [{a} + {stride}*1]",
            "tileloadd tmm6, [{x} + {line}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{y} + {line}*1]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{b} + {stride}*1]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {a}, {step}",
            "add {b}, {step}",
            "add {x}, 1024",
            "add {y}, 1024",
            "dec {n}",
            "jnz 3b",
            "tilestored [{low} + {line}*1], tmm0",
            "tilestored [{low} + {line}*1 + 1024], tmm1",
            "tilestored [{high} + {line}*1], tmm2",
            "tilestored [{high} + {line}*1 + 1024], tmm3",
            fresh = in(reg) u32::from(fresh),
            low = in(reg) low,
            high = in(reg) high,
            line = in(reg) 64usize,
            a = inout(reg) w.low => _,
            b = inout(reg) w.high => _,
            stride = in(reg) w.stride,
            step = in(reg) w.step,
            x = inout(reg) x => _,
            y = inout(reg) x_next => _,
            n = inout(reg) steps => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// Two tiles of rows by one of columns.
///
/// # Safety
/// As [`two_by_two`], with one tile of columns.
pub(super) unsafe fn two_by_one(
    w: &Tiles,
    x: *const Words,
    steps: usize,
    low: *mut Words,
    high: *mut Words,
    fresh: bool,
) {
    // SAFETY: as above.
    unsafe {
        asm!(
            "test {fresh:e}, {fresh:e}",
            "jz 2f",
            "tilezero tmm0",
            "tilezero tmm2",
            "jmp 3f",
            "2:",
            "tileloadd tmm0, [{low} + {line}*1]",
            "tileloadd tmm2, [{high} + {line}*1]",
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
            "tilestored [{low} + {line}*1], tmm0",
            "tilestored [{high} + {line}*1], tmm2",
            fresh = in(reg) u32::from(fresh),
            low = in(reg) low,
            high = in(reg) high,
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

//! The tile instructions.

use std::arch::asm;

use super::ahead::Streams;
use super::config::{BLOCK, DEPTH, Words};

/// Where 32 rows of a weight lie.
pub(crate) struct Tiles {
    pub(crate) low: *const u8,
    /// The second 16 rows.
    pub(crate) high: *const u8,
    /// Bytes from a row to the next.
    pub(crate) stride: usize,
    /// Bytes from a tile to the next along K.
    pub(crate) step: usize,
}

/// Two tiles of rows by three of columns, which asks L2 for five tiles for six products. The tiles of sums lie together:
/// by the first rows, then by the second.
///
/// # Safety
/// Tiles are configured; `w` and each of `x` have `steps` tiles of K, `steps` is not 0, and `sums` are six tiles.
pub(crate) unsafe fn two_by_three(w: &Tiles, x: [*const Words; 3], steps: usize, sums: *mut Words, fresh: bool) {
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
            "tilezero tmm4",
            "tilezero tmm5",
            "jmp 3f",
            "2:",
            "tileloadd tmm0, [{sums} + {line}*1]",
            "tileloadd tmm1, [{sums} + {line}*1 + 1024]",
            "tileloadd tmm2, [{sums} + {line}*1 + 2048]",
            "tileloadd tmm3, [{sums} + {line}*1 + 3072]",
            "tileloadd tmm4, [{sums} + {line}*1 + 4096]",
            "tileloadd tmm5, [{sums} + {line}*1 + 5120]",
            "3:",
            "tileloadd tmm6, [{a} + {stride}*1]",
            "tileloadd tmm7, [{x} + {line}*1]",
            "tdpbf16ps tmm0, tmm6, tmm7",
            "tileloadd tmm7, [{y} + {line}*1]",
            "tdpbf16ps tmm1, tmm6, tmm7",
            "tileloadd tmm7, [{z} + {line}*1]",
            "tdpbf16ps tmm2, tmm6, tmm7",
            "tileloadd tmm6, [{b} + {stride}*1]",
            "tdpbf16ps tmm5, tmm6, tmm7",
            "tileloadd tmm7, [{y} + {line}*1]",
            "tdpbf16ps tmm4, tmm6, tmm7",
            "tileloadd tmm7, [{x} + {line}*1]",
            "tdpbf16ps tmm3, tmm6, tmm7",
            "add {a}, {step}",
            "add {b}, {step}",
            "add {x}, 1024",
            "add {y}, 1024",
            "add {z}, 1024",
            "dec {n}",
            "jnz 3b",
            "tilestored [{sums} + {line}*1], tmm0",
            "tilestored [{sums} + {line}*1 + 1024], tmm1",
            "tilestored [{sums} + {line}*1 + 2048], tmm2",
            "tilestored [{sums} + {line}*1 + 3072], tmm3",
            "tilestored [{sums} + {line}*1 + 4096], tmm4",
            "tilestored [{sums} + {line}*1 + 5120], tmm5",
            fresh = in(reg) u32::from(fresh),
            sums = in(reg) sums,
            line = in(reg) 64usize,
            a = inout(reg) w.low => _,
            b = inout(reg) w.high => _,
            stride = in(reg) w.stride,
            step = in(reg) w.step,
            x = inout(reg) x[0] => _,
            y = inout(reg) x[1] => _,
            z = inout(reg) x[2] => _,
            n = inout(reg) steps => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// Two tiles of rows by two of columns, as [`two_by_three`].
///
/// # Safety
/// As [`two_by_three`], with two tiles of columns and four of sums.
pub(crate) unsafe fn two_by_two(w: &Tiles, x: [*const Words; 2], steps: usize, sums: *mut Words, fresh: bool) {
    // SAFETY: as above.
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
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// Two tiles of rows by one of columns; the two tiles of sums lie together.
///
/// # Safety
/// As [`two_by_three`], with one tile of columns and two of sums.
pub(crate) unsafe fn two_by_one(w: &Tiles, x: *const Words, steps: usize, sums: *mut Words, fresh: bool) {
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

/// Tiles of the weight that lie together in `room`, the second 16 rows behind the first, by two or three tiles of columns,
/// as [`two_by_three`]. Meanwhile brings what is needed next to cache.
///
/// # Safety
/// As [`two_by_three`], with as many tiles of columns as `x` has, two or three, and twice as many of sums; `room` has
/// twice [`BLOCK`] elements of K. What is brought may be anywhere.
pub(crate) unsafe fn from_room(
    room: &[Words],
    x: &[*const Words],
    steps: usize,
    sums: *mut Words,
    fresh: bool,
    ahead: Streams,
) {
    macro_rules! product {
        (
            zero: [$($zero:literal,)*] load: [$($load:literal,)*] body: [$($body:literal,)*] store: [$($store:literal,)*]
            $($name:ident: $operand:expr,)*
        ) => {
            asm!(
                "test {c:e}, {c:e}",
                "jz 2f",
                $($zero,)*
                "jmp 3f",
                "2:",
                $($load,)*
                "3:",
                $($body,)*
                "mov {c:e}, {streams:e}",
                "mov {fetch}, {ahead}",
                "test {c:e}, {c:e}",
                "jz 5f",
                "4:",
                "prefetcht1 [{fetch}]",
                "add {fetch}, {apart}",
                "dec {c:e}",
                "jnz 4b",
                "5:",
                "add {ahead}, 64",
                "add {w}, 1024",
                "dec {n:e}",
                "jnz 3b",
                $($store,)*
                c = inout(reg) u64::from(fresh) => _,
                sums = in(reg) sums,
                line = in(reg) 64usize,
                w = inout(reg) room.as_ptr() => _,
                n = inout(reg) steps => _,
                fetch = out(reg) _,
                ahead = inout(reg) ahead.at => _,
                apart = in(reg) ahead.apart,
                streams = in(reg) ahead.count,
                $($name = inout(reg) $operand => _,)*
                high = const BLOCK / DEPTH * size_of::<Words>(),
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            )
        };
    }
    // SAFETY: as above.
    unsafe {
        match *x {
            [x, y] => product!(
                zero: ["tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",]
                load: [
                    "tileloadd tmm0, [{sums} + {line}*1]",
                    "tileloadd tmm1, [{sums} + {line}*1 + 1024]",
                    "tileloadd tmm2, [{sums} + {line}*1 + 2048]",
                    "tileloadd tmm3, [{sums} + {line}*1 + 3072]",
                ]
                body: [
                    "tileloadd tmm4, [{w} + {line}*1]",
                    "tileloadd tmm6, [{x} + {line}*1]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tileloadd tmm7, [{y} + {line}*1]",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tileloadd tmm5, [{w} + {line}*1 + {high}]",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    "add {x}, 1024",
                    "add {y}, 1024",
                ]
                store: [
                    "tilestored [{sums} + {line}*1], tmm0",
                    "tilestored [{sums} + {line}*1 + 1024], tmm1",
                    "tilestored [{sums} + {line}*1 + 2048], tmm2",
                    "tilestored [{sums} + {line}*1 + 3072], tmm3",
                ]
                x: x,
                y: y,
            ),
            [x, y, z] => product!(
                zero: [
                    "tilezero tmm0", "tilezero tmm1", "tilezero tmm2",
                    "tilezero tmm3", "tilezero tmm4", "tilezero tmm5",
                ]
                load: [
                    "tileloadd tmm0, [{sums} + {line}*1]",
                    "tileloadd tmm1, [{sums} + {line}*1 + 1024]",
                    "tileloadd tmm2, [{sums} + {line}*1 + 2048]",
                    "tileloadd tmm3, [{sums} + {line}*1 + 3072]",
                    "tileloadd tmm4, [{sums} + {line}*1 + 4096]",
                    "tileloadd tmm5, [{sums} + {line}*1 + 5120]",
                ]
                body: [
                    "tileloadd tmm6, [{w} + {line}*1]",
                    "tileloadd tmm7, [{x} + {line}*1]",
                    "tdpbf16ps tmm0, tmm6, tmm7",
                    "tileloadd tmm7, [{y} + {line}*1]",
                    "tdpbf16ps tmm1, tmm6, tmm7",
                    "tileloadd tmm7, [{z} + {line}*1]",
                    "tdpbf16ps tmm2, tmm6, tmm7",
                    "tileloadd tmm6, [{w} + {line}*1 + {high}]",
                    "tdpbf16ps tmm5, tmm6, tmm7",
                    "tileloadd tmm7, [{y} + {line}*1]",
                    "tdpbf16ps tmm4, tmm6, tmm7",
                    "tileloadd tmm7, [{x} + {line}*1]",
                    "tdpbf16ps tmm3, tmm6, tmm7",
                    "add {x}, 1024",
                    "add {y}, 1024",
                    "add {z}, 1024",
                ]
                store: [
                    "tilestored [{sums} + {line}*1], tmm0",
                    "tilestored [{sums} + {line}*1 + 1024], tmm1",
                    "tilestored [{sums} + {line}*1 + 2048], tmm2",
                    "tilestored [{sums} + {line}*1 + 3072], tmm3",
                    "tilestored [{sums} + {line}*1 + 4096], tmm4",
                    "tilestored [{sums} + {line}*1 + 5120], tmm5",
                ]
                x: x,
                y: y,
                z: z,
            ),
            _ => unreachable!("{} tiles of columns", x.len()),
        }
    }
}

//! Blocks of 8 rows of a weight taken apart with their rows as lanes, by the vectors of [`eight`]: a vector holds four codes of K of each row, and a
//! vector of floats the scales of all rows.
//!
//! Bytes are interleaved before they are taken apart, so that what interleaves them is paid for by the byte and not by the
//! code, and so that scales need no instructions other than codes do.

use std::marker::PhantomData;

use ridge_graph::format::{
    E2M1, Iq4Nl, Iq4Xs, Mxfp4, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, SignedBytes, UNEVEN,
};

use super::eight::{
    self, Floats, Words, and, as_floats, equal_bytes, float, halves, left, left_by, mul, negate, or, right, right_by,
    right_signed, shuffle_bytes, splat, splat_bytes, sub, table, xor,
};
use super::rows::EightRows;
use super::scale::{Above, EIGHT, GROUP};

/// A group of K, or the first part of one, of 8 rows.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(super) struct InterleavedCodes {
    /// Four of each row for each four elements, as [`eight::put_codes`] puts them.
    pub(super) codes: [[u8; 4 * EIGHT]; GROUP / 4],
    /// For each 16 or 32 elements that share one.
    pub(super) scales: [[f32; EIGHT]; GROUP / 16],
    /// As scales, where the format has them.
    pub(super) minima: [[f32; EIGHT]; GROUP / 16],
    /// As scales, what sums of products begin with: the instructions of some say so.
    #[cfg(target_arch = "x86_64")]
    pub(super) begin: [[i32; EIGHT]; GROUP / 16],
}

/// Where the codes, scales and minima of a block of format `B` go: to eight lanes of vectors of `LANES`.
pub(super) struct InterleavedPlace<B, const LANES: usize> {
    codes: *mut u8,
    scales: *mut f32,
    minima: *mut f32,
    of: PhantomData<B>,
}

impl<B: Above> InterleavedPlace<B, EIGHT> {
    /// Those of block `nth`.
    pub(super) fn of_block(to: &mut InterleavedCodes, nth: usize) -> Self {
        assert!((nth + 1) * B::ELEMENTS <= GROUP);
        let (word, group) = (nth * B::ELEMENTS / 4, nth * B::ELEMENTS / B::GROUP);
        Self::new(
            to.codes[word..].as_mut_ptr().cast(),
            to.scales[group..].as_mut_ptr().cast(),
            to.minima[group..].as_mut_ptr().cast(),
        )
    }
}

impl<B: Above, const LANES: usize> InterleavedPlace<B, LANES> {
    pub(super) fn new(codes: *mut u8, scales: *mut f32, minima: *mut f32) -> Self {
        Self { codes, scales, minima, of: PhantomData }
    }
}

/// What becomes of blocks of format `B` that are taken apart: they are put into memory, or multiplied at once.
///
/// # Safety
/// There are the instructions, and the block has what is named: so it is for each function.
pub(super) trait TakenApart<B: Above> {
    /// Takes the codes of 16 elements from `4 * first` on, four in a word, which are bytes that are above codes.
    unsafe fn codes(&mut self, first: usize, codes: [Words; 4]);

    /// Takes the scales of a group, of which all codes were taken. Groups come in order, each with its scales before its minima.
    unsafe fn scale(&mut self, group: usize, scales: Floats);

    /// Takes the minima of a group.
    unsafe fn minimum(&mut self, group: usize, minima: Floats);
}

impl<B: Above, const LANES: usize> TakenApart<B> for InterleavedPlace<B, LANES> {
    #[inline]
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    unsafe fn codes(&mut self, first: usize, codes: [Words; 4]) {
        for (nth, codes) in codes.into_iter().enumerate() {
            // SAFETY: 32 bytes, aligned as what they lie in.
            unsafe { eight::put_codes(self.codes.add(4 * LANES * (first + nth)), codes, B::ABOVE) };
        }
    }

    #[inline]
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    unsafe fn scale(&mut self, group: usize, scales: Floats) {
        // SAFETY: as above.
        unsafe { eight::put_floats(self.scales.add(LANES * group), scales) };
    }

    #[inline]
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    unsafe fn minimum(&mut self, group: usize, minima: Floats) {
        // SAFETY: as above.
        unsafe { eight::put_floats(self.minima.add(LANES * group), minima) };
    }
}

/// The lower half of the block's first word, an f16, as its scale, and the upper one as what is added.
///
/// # Safety
/// As for [`Interleaved::unpack`].
#[inline]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
unsafe fn front<B: Above>(rows: impl EightRows, to: &mut impl TakenApart<B>) {
    // SAFETY: a block has 16 bytes and a group.
    unsafe {
        let both = rows.words(0)[0];
        to.scale(0, halves(both));
        if B::MINIMA {
            to.minimum(0, negate(upper_halves(both)));
        }
    }
}

/// The nibbles of 16 bytes as 32 elements from word `first` on, the lower ones being elements from 0 on and the upper ones from
/// 16 on; `of` makes codes of a word of nibbles, whose first element it is told.
///
/// # Safety
/// As above.
#[inline]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
unsafe fn both_nibbles<B: Above>(
    to: &mut impl TakenApart<B>,
    first: usize,
    bytes: [Words; 4],
    of: impl Fn(usize, Words) -> Words,
) {
    let [mut low, mut high] = nibbles(bytes);
    for nth in 0..4 {
        low[nth] = of(4 * nth, low[nth]);
        high[nth] = of(4 * nth + 16, high[nth]);
    }
    // SAFETY: a block has 32 elements at least.
    unsafe {
        to.codes(first, low);
        to.codes(first + 4, high);
    }
}

/// A block format that is taken apart with rows as lanes.
pub(super) trait Interleaved: Above {
    /// The largest byte that codes come as.
    const LARGEST: u8;

    /// Takes a block of each row apart.
    ///
    /// # Safety
    /// There are the instructions, and there are whole blocks at `rows` and room for one at `to`.
    unsafe fn unpack(rows: impl EightRows, to: &mut impl TakenApart<Self>);
}

/// The upper halves of words, which are f16.
#[inline]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
fn upper_halves(words: Words) -> Floats {
    halves(right::<16>(words))
}

/// The `mask` bits of words from bit `first` on.
#[inline]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
fn field(words: Words, first: usize, mask: i32) -> Words {
    and(right_by(words, first), splat(mask))
}

/// The `mask` bits of bytes from bit `first` on, at bit `to`.
#[inline]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
fn moved(bytes: Words, first: usize, to: usize, mask: u8) -> Words {
    let at = if first > to { right_by(bytes, first - to) } else { left_by(bytes, to - first) };
    and(at, splat_bytes(mask << to))
}

/// Lower and upper nibbles.
#[inline]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
fn nibbles(bytes: [Words; 4]) -> [[Words; 4]; 2] {
    let (mut low, mut high) = (bytes, bytes);
    for nth in 0..4 {
        low[nth] = moved(bytes[nth], 0, 0, 15);
        high[nth] = moved(bytes[nth], 4, 0, 15);
    }
    [low, high]
}

/// Runs a block of code for each of some numbers, as a text of its own: places of words in blocks are then known when it is
/// compiled, and products stay in registers.
macro_rules! each {
    ($number:ident in [$($value:literal),*] => $body:block) => {
        $({
            let $number: usize = $value;
            $body
        })*
    };
}

/// `codes`, with 16 more where a bit is set of the four of each word from `first`, a multiple of four, on.
#[inline]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
fn with_fifths(codes: Words, words: Words, first: usize) -> Words {
    // The byte that has them, four times.
    let byte: [u8; 16] = std::array::from_fn(|at| (at / 4 * 4 + first / 8) as u8);
    let each = splat(if first.is_multiple_of(8) { 0x0804_0201 } else { 0x8040_2010_u32.cast_signed() });
    let set = equal_bytes(and(shuffle_bytes(words, byte), each), each);
    or(codes, and(set, splat_bytes(16)))
}

/// Entries of a table of 16 instead of nibbles, each `above` what it is.
#[inline]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
fn entries(of: &[i8; 16], above: u8, nibbles: Words) -> Words {
    table(of.map(|entry| entry.cast_unsigned().wrapping_add(above)), nibbles)
}

/// Implements [`Interleaved`] with functions that have the instructions.
macro_rules! interleaved {
    ($($format:ident: $largest:literal, |$rows:ident, $to:ident| $body:expr;)*) => {
        $(impl Interleaved for $format {
            const LARGEST: u8 = $largest;

            #[inline]
            #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
            unsafe fn unpack($rows: impl EightRows, $to: &mut impl TakenApart<Self>) {
                // SAFETY: all that is read and written is inside of a block.
                unsafe { $body }
            }
        })*
    };
}

interleaved! {
    Q8_0: 255, |rows, to| {
        for part in 0..2 {
            let mut codes = rows.words(2 + 16 * part);
            for codes in &mut codes {
                *codes = xor(*codes, splat_bytes(128));
            }
            to.codes(4 * part, codes);
        }
        front(rows, to);
    };
    SignedBytes: 255, |rows, to| {
        for part in 0..2 {
            let mut codes = rows.words(16 * part);
            for codes in &mut codes {
                *codes = xor(*codes, splat_bytes(128));
            }
            to.codes(4 * part, codes);
        }
        to.scale(0, float(splat(1)));
    };
    Q4_0: 15, |rows, to| {
        both_nibbles(to, 0, rows.words(2), |_, nibbles| nibbles);
        front(rows, to);
    };
    Q4_1: 15, |rows, to| {
        both_nibbles(to, 0, rows.words(4), |_, nibbles| nibbles);
        front(rows, to);
    };
    Q5_0: 31, |rows, to| {
        let fifths = rows.words(2)[0];
        both_nibbles(to, 0, rows.words(6), |first, nibbles| with_fifths(nibbles, fifths, first));
        front(rows, to);
    };
    Q5_1: 31, |rows, to| {
        let fifths = rows.words(4)[0];
        both_nibbles(to, 0, rows.words(8), |first, nibbles| with_fifths(nibbles, fifths, first));
        front(rows, to);
    };
    Iq4Nl: 255, |rows, to| {
        both_nibbles(to, 0, rows.words(2), |_, nibbles| entries(&UNEVEN, 128, nibbles));
        front(rows, to);
    };
    Iq4Xs: 255, |rows, to| {
        let scales = rows.words(0);
        each!(group in [0, 1, 2, 3, 4, 5, 6, 7] => {
            both_nibbles(to, 8 * group, rows.words(8 + 16 * group), |_, nibbles| entries(&UNEVEN, 128, nibbles));
            to.scale(group, uneven_scale(scales, group));
        });
    };
    Mxfp4: 24, |rows, to| {
        both_nibbles(to, 0, rows.words(1), |_, nibbles| entries(&E2M1, 12, nibbles));
        to.scale(0, powers(field(rows.words(0)[0], 0, 255)));
    };
    Q2K: 3, |rows, to| {
        let (groups, both) = (rows.words(0), rows.words(68)[3]);
        each!(half in [0, 1] => {
            quarters(rows, to, 16, half, |_, _, codes| codes);
            halves_of_bytes(groups, both, half, to);
        });
    };
    Q3K: 7, |rows, to| {
        let thirds = [rows.words(0), rows.words(16)];
        each!(half in [0, 1] => {
            quarters(rows, to, 32, half, |group, nth, codes| {
                or(codes, moved(thirds[nth / 4][nth % 4], group, 2, 1))
            });
            thirds_scales(rows, half, to);
        });
    };
    Q4K: 15, |rows, to| {
        let scales = PackedScales::new(rows.words(0));
        each!(pair in [0, 1, 2, 3] => {
            each!(part in [0, 1] => {
                let [low, high] = nibbles(rows.words(16 + 32 * pair + 16 * part));
                to.codes(16 * pair + 4 * part, low);
                to.codes(16 * pair + 8 + 4 * part, high);
            });
            scales.put_pair(pair, to);
        });
    };
    Q5K: 31, |rows, to| {
        let scales = PackedScales::new(rows.words(0));
        let fifths = [rows.words(16), rows.words(32)];
        each!(pair in [0, 1, 2, 3] => {
            each!(part in [0, 1] => {
                let fifths = fifths[part];
                let [mut low, mut high] = nibbles(rows.words(48 + 32 * pair + 16 * part));
                for nth in 0..4 {
                    low[nth] = or(low[nth], moved(fifths[nth], 2 * pair, 4, 1));
                    high[nth] = or(high[nth], moved(fifths[nth], 2 * pair + 1, 4, 1));
                }
                to.codes(16 * pair + 4 * part, low);
                to.codes(16 * pair + 8 + 4 * part, high);
            });
            scales.put_pair(pair, to);
        });
    };
    Q6K: 63, |rows, to| {
        let (groups, scale) = (rows.words(192), upper_halves(rows.words(194)[3]));
        each!(half in [0, 1] => {
            // In the order in which words of interleaved rows lie: upper bits with the lower ones that they complete.
            each!(part in [0, 1] => {
                let upper = rows.words(128 + 32 * half + 16 * part);
                each!(upper_half in [0, 1] => {
                    let first = 32 * half + 4 * part + 8 * upper_half;
                    let [mut low, mut high] = nibbles(rows.words(64 * half + 16 * part + 32 * upper_half));
                    for nth in 0..4 {
                        low[nth] = or(low[nth], moved(upper[nth], 2 * upper_half, 4, 3));
                        high[nth] = or(high[nth], moved(upper[nth], 4 + 2 * upper_half, 4, 3));
                    }
                    to.codes(first, low);
                    to.codes(first + 16, high);
                });
            });
            signed_scales([groups[2 * half], groups[2 * half + 1]], scale, half, to);
        });
    };
}

/// Two bits at a time of the 32 bytes of half `half` of those from byte `at` on, which are 128 elements; `of` makes codes of two bits
/// of word `nth` of a group of 32.
///
/// # Safety
/// As for [`Interleaved::unpack`], of a block of 256 elements; so it is for the functions below.
#[inline]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
unsafe fn quarters<B: Above>(
    rows: impl EightRows,
    to: &mut impl TakenApart<B>,
    at: usize,
    half: usize,
    of: impl Fn(usize, usize, Words) -> Words,
) {
    each!(part in [0, 1] => {
        // SAFETY: by the caller's promise.
        let bytes = unsafe { rows.words(at + 32 * half + 16 * part) };
        each!(quarter in [0, 1, 2, 3] => {
            let (group, first) = (4 * half + quarter, 4 * part);
            let mut codes = bytes;
            for (nth, codes) in codes.iter_mut().enumerate() {
                *codes = of(group, first + nth, moved(*codes, 2 * quarter, 0, 3));
            }
            // SAFETY: by the caller's promise.
            unsafe { to.codes(8 * group + first, codes) };
        });
    });
}

/// Scales and minima of Q4_K and Q5_K.
struct PackedScales {
    scale: Floats,
    minimum: Floats,
    /// Those of the first four groups, a byte each, and of the last four: in lower bits of 6.
    scales: [Words; 2],
    minima: [Words; 2],
}

impl PackedScales {
    /// From a block's first words: an f16 of each, then 6 bits for each group.
    #[inline]
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    fn new([both, scales, minima, rest]: [Words; 4]) -> Self {
        // Byte `i` of each word is of groups `i` and `i + 4`.
        let last = |nibbles: Words, packed: Words| or(field(nibbles, 0, 0x0f0f_0f0f), field(packed, 2, 0x3030_3030));
        Self {
            scale: halves(both),
            minimum: upper_halves(both),
            scales: [scales, last(rest, scales)],
            minima: [minima, last(right::<4>(rest), minima)],
        }
    }

    /// Gives those of groups `2 pair` and the next.
    ///
    /// # Safety
    /// As for [`TakenApart::scale`].
    #[inline]
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    unsafe fn put_pair<B: Above>(&self, pair: usize, to: &mut impl TakenApart<B>) {
        for group in [2 * pair, 2 * pair + 1] {
            let float = |words: [Words; 2]| float(field(words[group / 4], group % 4 * 8, 63));
            // SAFETY: by the caller's promise.
            unsafe {
                to.scale(group, mul(self.scale, float(self.scales)));
                to.minimum(group, mul(self.minimum, float(self.minima)));
            }
        }
    }
}

/// Scales and minima of a half of Q2_K: nibbles of a byte for each group, and an f16 of each.
///
/// # Safety
/// As above.
#[inline]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
unsafe fn halves_of_bytes<B: Above>(groups: [Words; 4], both: Words, half: usize, to: &mut impl TakenApart<B>) {
    let (scale, minimum) = (halves(both), upper_halves(both));
    for group in 8 * half..8 * half + 8 {
        let float = |first: usize| float(field(groups[group / 4], group % 4 * 8 + first, 15));
        // SAFETY: by the caller's promise.
        unsafe {
            to.scale(group, mul(scale, float(0)));
            to.minimum(group, mul(minimum, float(4)));
        }
    }
}

/// Scales of a half of Q3_K: eight bytes of nibbles, four of the two bits above them, and an f16 in the block's last two bytes.
///
/// # Safety
/// As above.
#[inline]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
unsafe fn thirds_scales<B: Above>(rows: impl EightRows, half: usize, to: &mut impl TakenApart<B>) {
    // SAFETY: by the caller's promise.
    let ([_, first, last, upper], scale) = unsafe { (rows.words(92), upper_halves(rows.words(94)[3])) };
    for group in 8 * half..8 * half + 8 {
        let byte = group % 4 * 8;
        let low = field([first, last][group / 4 % 2], byte + group / 8 * 4, 15);
        let high = left::<4>(field(upper, byte + group / 4 * 2, 3));
        let of_group = sub(or(low, high), splat(32));
        // SAFETY: by the caller's promise.
        unsafe { to.scale(group, mul(scale, float(of_group))) };
    }
}

/// Scales of a half of Q6_K: a byte for each group, and an f16 for all.
///
/// # Safety
/// As above.
#[inline]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
unsafe fn signed_scales<B: Above>(groups: [Words; 2], scale: Floats, half: usize, to: &mut impl TakenApart<B>) {
    for group in 0..8 {
        let above = left_by(groups[group / 4], 24 - group % 4 * 8);
        let of_group = float(right_signed::<24>(above));
        // SAFETY: by the caller's promise.
        unsafe { to.scale(8 * half + group, mul(scale, of_group)) };
    }
}

/// The scale of a group of IQ4_XS, whose block begins with an f16, two upper bits for each group, then four lower ones.
#[inline]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
fn uneven_scale([front, low, ..]: [Words; 4], group: usize) -> Floats {
    let upper = left::<4>(field(front, 16 + 2 * group, 3));
    let whole = or(field(low, 4 * group, 15), upper);
    mul(halves(front), float(sub(whole, splat(32))))
}

/// Scales of MXFP4 in their unit, `2^(exponent - 144)`: the product of two powers that are floats for every exponent.
#[inline]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
fn powers(exponents: Words) -> Floats {
    let half = right::<1>(exponents);
    let power = |exponent: Words| {
        let biased = sub(exponent, splat(72 - 127));
        as_floats(left::<23>(biased))
    };
    mul(power(half), power(sub(exponents, half)))
}

//! Blocks of 16 rows of a weight taken apart into codes and scales, with instructions of their own for each format, so
//! that few rows of x wait for memory and not for them.
//!
//! Codes come as four vectors for 256 elements, in whatever order a format's bits give cheapest, each so much above its
//! value that none is negative: as the instructions want them that multiply bytes. Scales and minima come for 16 rows at
//! once, gathered a word at a time.

use std::arch::x86_64::{
    __m128i, __m256i, __m512, __m512i, _mm_loadu_si128, _mm_storeu_si128, _mm256_loadu_si256, _mm512_and_si512,
    _mm512_broadcast_i32x4, _mm512_broadcast_i64x4, _mm512_castsi128_si512, _mm512_castsi256_si512,
    _mm512_castsi512_si256, _mm512_cvtepi32_epi16, _mm512_cvtepi32_ps, _mm512_cvtph_ps, _mm512_extracti32x4_epi32,
    _mm512_i32gather_epi32, _mm512_inserti32x4, _mm512_inserti64x4, _mm512_loadu_si512, _mm512_mask_add_epi8,
    _mm512_mul_ps, _mm512_or_si512, _mm512_set1_epi8, _mm512_set1_epi16, _mm512_set1_epi32, _mm512_set1_ps,
    _mm512_shuffle_epi8, _mm512_slli_epi32, _mm512_sllv_epi16, _mm512_sllv_epi32, _mm512_srai_epi32, _mm512_srli_epi16,
    _mm512_srli_epi32, _mm512_srlv_epi16, _mm512_srlv_epi32, _mm512_storeu_ps, _mm512_storeu_si512, _mm512_sub_epi8,
    _mm512_sub_epi32, _mm512_test_epi8_mask, _mm512_xor_ps, _mm512_xor_si512,
};

use ridge_graph::format::{
    BlockFormat, E2M1, Iq4Nl, Iq4Xs, Mxfp4, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, UNEVEN,
};

use super::scale::{Above, GROUP, SIDE, SUMMED, apart};

/// The same blocks of up to 16 rows, of one group of K or the last part of one.
pub(in crate::kernels) struct OfRows<'a> {
    /// From the blocks of the first row on.
    pub(in crate::kernels) data: &'a [u8],
    /// Bytes from a row to the next.
    pub(in crate::kernels) stride: usize,
    /// Blocks of a row.
    pub(in crate::kernels) blocks: usize,
    pub(in crate::kernels) rows: usize,
}

/// What they hold.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(in crate::kernels) struct Unpacked {
    /// Of each row.
    pub(in crate::kernels) codes: [[i8; GROUP]; SIDE],
    pub(in crate::kernels) scales: Scales,
}

/// What codes are multiplied with.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(in crate::kernels) struct Scales {
    /// Of the rows, for each 16 or 32 elements that share one.
    pub(in crate::kernels) scales: [[f32; SIDE]; GROUP / 16],
    /// As scales, where the format has them.
    pub(in crate::kernels) minima: [[f32; SIDE]; GROUP / 16],
}

/// Takes blocks apart. Rows that are not there are left as they are, elements behind the last block are nothing in
/// particular.
pub(in crate::kernels) type Unpack = fn(&OfRows<'_>, &mut Unpacked);

/// Bytes that blocks of 256 elements are copied to where fewer of them are left: the most that 8 blocks have.
pub(in crate::kernels) const PADDED: usize = 8 * Q8_0::BYTES;

/// Units of 16 elements that the four lanes of each vector of codes hold.
type Order = [usize; GROUP / SUMMED];

/// Each vector has the next 64 elements.
const IN_ORDER: Order = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

/// Four times 16 bytes, the lower nibbles being the first half of 32 elements and the upper ones the second.
const HALVES: Order = [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15];

/// Twice 32 bytes, the lower nibbles being 32 elements and the upper ones the next 32.
const PAIRS: Order = [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15];

/// Two bits at a time of twice 32 bytes, which are 128 elements each.
const QUARTERS: Order = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15];

const fn places(order: &Order) -> Order {
    let (mut places, mut at) = ([0; GROUP / SUMMED], 0);
    while at < places.len() {
        places[order[at]] = at;
        at += 1;
    }
    places
}

/// A block format whose codes come in vectors.
pub(in crate::kernels) trait Vectors: Above {
    /// Which elements they are.
    const ORDER: Order;
    /// Where units of elements are, in order.
    const PLACES: Order = places(&Self::ORDER);

    /// The bytes of 256 elements.
    ///
    /// # Safety
    /// There is AVX-512, and the blocks of 256 elements are from `block` on.
    unsafe fn load(block: *const u8) -> [__m512i; 4];

    /// Scales and minima.
    ///
    /// # Safety
    /// There is AVX-512, all blocks are inside of the data, and there is a row at least.
    unsafe fn scales(blocks: &OfRows<'_>, to: &mut Scales) {
        for row in 0..blocks.rows {
            let of_row = &blocks.data[row * blocks.stride..][..blocks.blocks * Self::BYTES];
            for (nth, block) in of_row.chunks_exact(Self::BYTES).enumerate() {
                let (mut codes, mut scales, mut minima) = ([0; GROUP], [0.0; GROUP / 16], [0.0; GROUP / 16]);
                apart::<Self>(block, &mut codes, &mut scales, &mut minima);
                let groups = Self::ELEMENTS / Self::GROUP;
                for group in 0..groups {
                    to.scales[nth * groups + group][row] = scales[group];
                    to.minima[nth * groups + group][row] = minima[group];
                }
            }
        }
    }
}

/// The 256 elements of a row from byte `at` on, of which `blocks` blocks are left; copied to `padded`, if those are fewer
/// elements.
///
/// # Safety
/// The blocks are inside of the data.
#[inline]
pub(in crate::kernels) unsafe fn whole<B: BlockFormat>(
    at: *const u8,
    blocks: usize,
    padded: &mut [u8; PADDED],
) -> *const u8 {
    let bytes = blocks * B::BYTES;
    if blocks * B::ELEMENTS == GROUP {
        return at;
    }
    // SAFETY: by the caller's promise, and no 256 elements take more bytes than there are.
    unsafe { at.copy_to_nonoverlapping(padded.as_mut_ptr(), bytes.min(PADDED)) };
    padded.as_ptr()
}

/// Takes blocks apart for matrix tiles.
pub(in crate::kernels) fn unpack<B: Vectors>(blocks: &OfRows<'_>, to: &mut Unpacked) {
    check::<B>(blocks);
    // SAFETY: what is unpacked so is multiplied on tiles, and every machine that has them has AVX-512.
    unsafe {
        in_order::<B>(blocks, &mut to.codes);
        B::scales(blocks, &mut to.scales);
    }
}

/// That the blocks are where they are said to be.
pub(in crate::kernels) fn check<B: BlockFormat>(blocks: &OfRows<'_>) {
    assert!((1..=SIDE).contains(&blocks.rows) && blocks.blocks * B::ELEMENTS <= GROUP);
    assert!(blocks.data.len() >= (blocks.rows - 1) * blocks.stride + blocks.blocks * B::BYTES);
    assert!(blocks.stride < 1 << 26);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
unsafe fn in_order<B: Vectors>(blocks: &OfRows<'_>, to: &mut [[i8; GROUP]; SIDE]) {
    let above = _mm512_set1_epi8(B::ABOVE as i8);
    let mut padded = [0; PADDED];
    for (row, to) in to.iter_mut().enumerate().take(blocks.rows) {
        let at = blocks.data[row * blocks.stride..].as_ptr();
        // SAFETY: the blocks are inside of the data, and unit after unit of 16 bytes inside of the 256.
        unsafe {
            let vectors = B::load(whole::<B>(at, blocks.blocks, &mut padded)).map(|v| _mm512_sub_epi8(v, above));
            for (nth, vector) in vectors.into_iter().enumerate() {
                if B::ORDER == IN_ORDER {
                    _mm512_storeu_si512(to.as_mut_ptr().add(64 * nth).cast(), vector);
                    continue;
                }
                let units = &B::ORDER[4 * nth..][..4];
                let mut put = |lane: usize, unit: __m128i| {
                    _mm_storeu_si128(to.as_mut_ptr().add(SUMMED * units[lane]).cast(), unit);
                };
                put(0, _mm512_extracti32x4_epi32::<0>(vector));
                put(1, _mm512_extracti32x4_epi32::<1>(vector));
                put(2, _mm512_extracti32x4_epi32::<2>(vector));
                put(3, _mm512_extracti32x4_epi32::<3>(vector));
            }
        }
    }
}

/// Words of all rows at once.
struct Words<'a> {
    data: &'a [u8],
    places: __m512i,
}

impl<'a> Words<'a> {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    fn new(blocks: &OfRows<'a>) -> Self {
        let places: [i32; SIDE] = std::array::from_fn(|row| (row.min(blocks.rows - 1) * blocks.stride) as i32);
        // SAFETY: 64 bytes.
        Self { data: blocks.data, places: unsafe { _mm512_loadu_si512(places.as_ptr().cast()) } }
    }

    /// The 32-bit word at byte `at` of each row; of a row that is not there that of the last one.
    ///
    /// # Safety
    /// The words are inside of the data.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    unsafe fn at(&self, at: usize) -> __m512i {
        // SAFETY: inside of the data by the caller's promise.
        unsafe { _mm512_i32gather_epi32::<1>(self.places, self.data.as_ptr().add(at).cast()) }
    }
}

/// The lower halves of words, which are f16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn halves(words: __m512i) -> __m512 {
    _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words))
}

/// Bits of words as floats.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn small(words: __m512i, mask: i32) -> __m512 {
    _mm512_cvtepi32_ps(_mm512_and_si512(words, _mm512_set1_epi32(mask)))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn put(to: &mut [f32; SIDE], values: __m512) {
    // SAFETY: 64 bytes.
    unsafe { _mm512_storeu_ps(to.as_mut_ptr(), values) };
}

/// The f16 at the beginning of each block as its scale, and the one after it as what is added.
///
/// # Safety
/// As for [`Vectors::scales`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
unsafe fn at_the_front<B: BlockFormat>(blocks: &OfRows<'_>, to: &mut Scales) {
    let words = Words::new(blocks);
    for nth in 0..blocks.blocks {
        // SAFETY: a block has more than four bytes.
        let both = unsafe { words.at(nth * B::BYTES) };
        put(&mut to.scales[nth], halves(both));
        if B::MINIMA {
            let added = halves(_mm512_srli_epi32::<16>(both));
            put(&mut to.minima[nth], _mm512_xor_ps(added, _mm512_set1_ps(-0.0)));
        }
    }
}

/// Twice 32 bytes, `step` bytes apart.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
unsafe fn two(at: *const u8, step: usize) -> __m512i {
    // SAFETY: by the caller's promise that they are there.
    unsafe {
        let low: __m256i = _mm256_loadu_si256(at.cast());
        _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), _mm256_loadu_si256(at.add(step).cast()))
    }
}

/// Four times 16 bytes, `step` bytes apart.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
unsafe fn four(at: *const u8, step: usize) -> __m512i {
    // SAFETY: by the caller's promise that they are there.
    unsafe {
        let unit = |nth: usize| _mm_loadu_si128(at.add(nth * step).cast());
        let v = _mm512_castsi128_si512(unit(0));
        let v = _mm512_inserti32x4::<1>(v, unit(1));
        let v = _mm512_inserti32x4::<2>(v, unit(2));
        _mm512_inserti32x4::<3>(v, unit(3))
    }
}

/// 64 bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
unsafe fn all(at: *const u8) -> __m512i {
    // SAFETY: by the caller's promise that they are there.
    unsafe { _mm512_loadu_si512(at.cast()) }
}

/// 32 bytes, twice.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
unsafe fn twice(at: *const u8) -> __m512i {
    // SAFETY: by the caller's promise that they are there.
    unsafe { _mm512_broadcast_i64x4(_mm256_loadu_si256(at.cast())) }
}

/// Lower and upper nibbles.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn nibbles(bytes: __m512i) -> [__m512i; 2] {
    let low = _mm512_set1_epi8(15);
    [_mm512_and_si512(bytes, low), _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), low)]
}

/// Bits of `bits` that are `first` in the lower 32 bytes and `second` in the upper ones, as `value` above `codes`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn with_bits(codes: __m512i, bits: __m512i, [first, second]: [u32; 2], value: i8) -> __m512i {
    let of = |bit: u32| _mm512_set1_epi8((1u8 << bit) as i8);
    let asked = _mm512_inserti64x4::<1>(of(first), _mm512_castsi512_si256(of(second)));
    let above = _mm512_set1_epi8(value);
    _mm512_mask_add_epi8(codes, _mm512_test_epi8_mask(bits, asked), codes, above)
}

/// The nibbles of four blocks' 16 bytes each, in [`HALVES`], with a fifth bit from the four bytes before them.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
unsafe fn fifths(at: *const u8, step: usize) -> [__m512i; 2] {
    // SAFETY: by the caller's promise that the four bytes and the 16 bytes after them are there.
    let (of_block, [low, high]) = unsafe {
        let of_block: [u64; 4] = std::array::from_fn(|nth| {
            let word = at.add(nth * step).cast::<u32>().read_unaligned();
            u64::from(u32::from_le(word))
        });
        (of_block, nibbles(four(at.add(4), step)))
    };
    let mask = |shift: u32| of_block.iter().rev().fold(0, |mask, bits| mask << 16 | (bits >> shift & 0xffff));
    let above = _mm512_set1_epi8(16);
    [_mm512_mask_add_epi8(low, mask(0), low, above), _mm512_mask_add_epi8(high, mask(16), high, above)]
}

/// Entries of a table of 16 instead of nibbles, each `ABOVE` what it is.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn entries(table: &[i8; 16], above: u8, nibbles: [__m512i; 2]) -> [__m512i; 2] {
    let table: [u8; 16] = table.map(|entry| entry.cast_unsigned().wrapping_add(above));
    // SAFETY: 16 bytes.
    let table = _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(table.as_ptr().cast()) });
    nibbles.map(|nibbles| _mm512_shuffle_epi8(table, nibbles))
}

/// Implements [`Vectors`] with functions that have AVX-512.
macro_rules! vectors {
    ($($format:ident: $order:ident, |$block:ident| $codes:expr $(, $scales:path)?;)*) => {
        $(impl Vectors for $format {
            const ORDER: Order = $order;

            #[inline]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
            unsafe fn load($block: *const u8) -> [__m512i; 4] {
                // SAFETY: all that is read is inside of the blocks of 256 elements.
                unsafe { $codes }
            }

            $(
                #[inline]
                #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
                unsafe fn scales(blocks: &OfRows<'_>, to: &mut Scales) {
                    // SAFETY: by the caller's promise.
                    unsafe { $scales(blocks, to) }
                }
            )?
        })*
    };
}

vectors! {
    Q8_0: IN_ORDER, |block| {
        let sign = _mm512_set1_epi8(-128);
        [0, 2, 4, 6].map(|nth| _mm512_xor_si512(two(block.add(nth * 34 + 2), 34), sign))
    }, at_the_front::<Q8_0>;
    Q4_0: HALVES, |block| join([0, 4].map(|nth| nibbles(four(block.add(nth * 18 + 2), 18)))), at_the_front::<Q4_0>;
    Q4_1: HALVES, |block| join([0, 4].map(|nth| nibbles(four(block.add(nth * 20 + 4), 20)))), at_the_front::<Q4_1>;
    Q5_0: HALVES, |block| join([0, 4].map(|nth| fifths(block.add(nth * 22 + 2), 22))), at_the_front::<Q5_0>;
    Q5_1: HALVES, |block| join([0, 4].map(|nth| fifths(block.add(nth * 24 + 4), 24))), at_the_front::<Q5_1>;
    Iq4Nl: HALVES, |block| {
        join([0, 4].map(|nth| entries(&UNEVEN, 128, nibbles(four(block.add(nth * 18 + 2), 18)))))
    }, at_the_front::<Iq4Nl>;
    Iq4Xs: HALVES, |block| {
        join([0, 1].map(|nth| entries(&UNEVEN, 128, nibbles(all(block.add(8 + 64 * nth))))))
    }, uneven_scales;
    Mxfp4: HALVES, |block| {
        join([0, 4].map(|nth| entries(&E2M1, 12, nibbles(four(block.add(nth * 17 + 1), 17)))))
    };
    Q2K: QUARTERS, |block| {
        let pairs = all(block.add(16));
        let two = |shifted| _mm512_and_si512(shifted, _mm512_set1_epi8(3));
        [
            two(pairs),
            two(_mm512_srli_epi16::<2>(pairs)),
            two(_mm512_srli_epi16::<4>(pairs)),
            two(_mm512_srli_epi16::<6>(pairs)),
        ]
    };
    Q3K: QUARTERS, |block| {
        let (thirds, codes) = (twice(block), <Q2K as Vectors>::load(block.add(16)));
        let with = |nth: usize| with_bits(codes[nth], thirds, [nth as u32, nth as u32 + 4], 4);
        [with(0), with(1), with(2), with(3)]
    };
    Q4K: PAIRS, |block| join([16, 80].map(|at| nibbles(all(block.add(at))))), packed_scales;
    Q5K: PAIRS, |block| {
        let fifths = twice(block.add(16));
        let [a, b, c, d] = join([48, 112].map(|at| nibbles(all(block.add(at)))));
        let with = |codes, bits| with_bits(codes, fifths, bits, 16);
        [with(a, [0, 2]), with(b, [1, 3]), with(c, [4, 6]), with(d, [5, 7])]
    }, packed_scales;
    Q6K: IN_ORDER, |block| {
        let shifts = |low: i16, high: i16| {
            let high = _mm512_castsi512_si256(_mm512_set1_epi16(high));
            _mm512_inserti64x4::<1>(_mm512_set1_epi16(low), high)
        };
        let upper = |bits| _mm512_and_si512(bits, _mm512_set1_epi8(0x30));
        join([0, 1].map(|half| {
            let (bits, [low, high]) = (twice(block.add(128 + 32 * half)), nibbles(all(block.add(64 * half))));
            [
                _mm512_or_si512(low, upper(_mm512_sllv_epi16(bits, shifts(4, 2)))),
                _mm512_or_si512(high, upper(_mm512_srlv_epi16(bits, shifts(0, 2)))),
            ]
        }))
    }, signed_scales;
}

/// Two pairs as four.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn join([[a, b], [c, d]]: [[__m512i; 2]; 2]) -> [__m512i; 4] {
    [a, b, c, d]
}

/// Scales and minima of Q4_K and Q5_K: an f16 of each, then 6 bits for each group.
///
/// # Safety
/// A block of at least 16 bytes of each row is inside of the data.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
unsafe fn packed_scales(blocks: &OfRows<'_>, to: &mut Scales) {
    let words = Words::new(blocks);
    // SAFETY: by the caller's promise.
    let [both, scales, minima, rest] = [0, 4, 8, 12].map(|at| unsafe { words.at(at) });
    let (scale, minimum) = (halves(both), halves(_mm512_srli_epi32::<16>(both)));
    // Byte `i` of each word is of groups `i` and `i + 4`.
    let (nibble, upper) = (_mm512_set1_epi32(0x0f0f_0f0f), _mm512_set1_epi32(0x3030_3030));
    let above = |packed: __m512i| _mm512_and_si512(_mm512_srli_epi32::<2>(packed), upper);
    let of_last = |rest: __m512i, packed: __m512i| _mm512_or_si512(_mm512_and_si512(rest, nibble), above(packed));
    let quads = [[scales, of_last(rest, scales)], [minima, of_last(_mm512_srli_epi32::<4>(rest), minima)]];
    for (i, [of_scales, of_minima]) in [[quads[0][0], quads[1][0]], [quads[0][1], quads[1][1]]].into_iter().enumerate()
    {
        let byte = |words: __m512i, nth: usize| match nth {
            0 => small(words, 63),
            1 => small(_mm512_srli_epi32::<8>(words), 63),
            2 => small(_mm512_srli_epi32::<16>(words), 63),
            _ => small(_mm512_srli_epi32::<24>(words), 63),
        };
        for nth in 0..4 {
            put(&mut to.scales[4 * i + nth], _mm512_mul_ps(scale, byte(of_scales, nth)));
            put(&mut to.minima[4 * i + nth], _mm512_mul_ps(minimum, byte(of_minima, nth)));
        }
    }
}

/// Scales of Q6_K: a byte for each group, and an f16 in the block's last two bytes.
///
/// # Safety
/// A block of each row is inside of the data.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
unsafe fn signed_scales(blocks: &OfRows<'_>, to: &mut Scales) {
    let words = Words::new(blocks);
    // SAFETY: bytes 192 to 210 of a block.
    let scale = halves(_mm512_srli_epi32::<16>(unsafe { words.at(206) }));
    for quad in 0..4 {
        // SAFETY: as above.
        let packed = unsafe { words.at(192 + 4 * quad) };
        for nth in 0..4 {
            let above = _mm512_sllv_epi32(packed, _mm512_set1_epi32(24 - 8 * nth as i32));
            let of_group = _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(above));
            put(&mut to.scales[4 * quad + nth], _mm512_mul_ps(scale, of_group));
        }
    }
}

/// Scales of IQ4_XS: an f16, two upper bits for each group, then four lower ones.
///
/// # Safety
/// A block of each row is inside of the data.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
unsafe fn uneven_scales(blocks: &OfRows<'_>, to: &mut Scales) {
    let words = Words::new(blocks);
    // SAFETY: the first 8 bytes of a block.
    let [front, low] = [0, 4].map(|at| unsafe { words.at(at) });
    let scale = halves(front);
    let field = |words: __m512i, at: usize, mask: i32| {
        _mm512_and_si512(_mm512_srlv_epi32(words, _mm512_set1_epi32(at as i32)), _mm512_set1_epi32(mask))
    };
    for group in 0..GROUP / 32 {
        let upper = _mm512_slli_epi32::<4>(field(front, 16 + 2 * group, 3));
        let whole = _mm512_or_si512(field(low, 4 * group, 15), upper);
        let of_group = _mm512_cvtepi32_ps(_mm512_sub_epi32(whole, _mm512_set1_epi32(32)));
        put(&mut to.scales[group], _mm512_mul_ps(scale, of_group));
    }
}

#[cfg(test)]
mod tests;

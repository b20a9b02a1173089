//! What the block formats of GGUF files share. A row is a sequence of blocks of `ELEMENTS` values in `BYTES` bytes:
//! scales, minima and codes lie together. The bytes are one component, as the file has them, so a mapped file is
//! used in place.
//!
//! Each format says its layout three times: as graph ops ([`BlockFormat::meaning`]), as a loop that a compiler turns
//! into vector instructions ([`BlockFormat::codes`]), and in reverse ([`BlockFormat::write`]). Tests hold the loop to the
//! meaning bit for bit, and both to values of the Python package `gguf`.
#![allow(clippy::inline_always)] // a loop over blocks must compile with its caller's instruction set

use std::fmt;
use std::hash::Hash;

use half::f16;

use super::decoding::{Decoding, DecodingValue};
use super::layout::{Format, FormatComponent};
use crate::dim::Dim;
use crate::dtype::DType;
use crate::prim::{Binary, Compare};
use crate::shape::Shape;
use crate::why::Why;

/// Values of the largest block.
const LARGEST: usize = 256;

/// A format of blocks along the innermost axis.
pub trait BlockFormat: fmt::Debug + Copy + Eq + Hash + Send + Sync + 'static {
    /// Name in the text form and on the command line.
    const NAME: &'static str;
    /// Values of a block.
    const ELEMENTS: usize;
    /// Bytes of a block.
    const BYTES: usize;
    /// Values that share a scale: 16 or 32.
    const GROUP: usize;
    /// Have groups a minimum, which is taken away from their values?
    const MINIMA: bool = false;

    /// The values of all blocks, f32 `[.., blocks, ELEMENTS]` with any factorisation of the last axis.
    fn meaning(block: &mut BlockBytes<'_>) -> BlockValue;

    /// Takes apart one block of [`Self::BYTES`] bytes. Value `i` of group `g` is `scales[g] * codes[i] - minima[g]`, where
    /// there are [`Self::MINIMA`], and `scales[g] * codes[i]` otherwise, each operation rounded to f32.
    fn codes(block: &[u8], codes: &mut [i8], scales: &mut [f32], minima: &mut [f32]);

    /// The values of one block of [`Self::BYTES`] bytes into [`Self::ELEMENTS`] floats.
    #[inline(always)]
    fn read(block: &[u8], out: &mut [f32]) {
        let (mut codes, mut scales, mut minima) = ([0; LARGEST], [0.0; LARGEST / 16], [0.0; LARGEST / 16]);
        Self::codes(block, &mut codes[..Self::ELEMENTS], &mut scales, &mut minima);
        let groups = out[..Self::ELEMENTS].chunks_exact_mut(Self::GROUP).zip(codes.chunks_exact(Self::GROUP));
        for ((out, codes), (scale, minimum)) in groups.zip(scales.iter().zip(&minima)) {
            for (out, code) in out.iter_mut().zip(codes) {
                let scaled = scale * f32::from(*code);
                *out = if Self::MINIMA { scaled - minimum } else { scaled };
            }
        }
    }

    /// Quantises [`Self::ELEMENTS`] values into a block. `importance` has as many weights of their squared errors.
    fn write(values: &[f32], importance: Option<&[f32]>, block: &mut [u8]);
}

impl<B: BlockFormat> Format for B {
    fn name(&self) -> &'static str {
        B::NAME
    }

    fn granularity(&self, rank: usize) -> Vec<usize> {
        let mut multiples = vec![1; rank];
        if let Some(last) = multiples.last_mut() {
            *last = B::ELEMENTS;
        }
        multiples
    }

    fn check(&self, shape: &Shape) -> Result<(), Why> {
        match shape.0.last() {
            Some(last) if last.div_exact(B::ELEMENTS as i64).is_some() => Ok(()),
            _ => Err(format!(
                "{} stores blocks of {} along the innermost axis, which {shape} does not divide into",
                B::NAME,
                B::ELEMENTS
            )),
        }
    }

    fn components(&self, shape: &Shape) -> Vec<FormatComponent> {
        let (mut dims, blocks) = blocks(shape, B::ELEMENTS);
        dims.push(blocks * B::BYTES as i64);
        vec![FormatComponent { name: "blocks", dtype: DType::U8, shape: Shape(dims) }]
    }

    fn decode(&self, decoding: &mut Decoding, shape: &Shape) -> DecodingValue {
        let (mut lead, blocks) = blocks(shape, B::ELEMENTS);
        lead.push(blocks);
        let mut whole = lead.clone();
        whole.push(B::BYTES.into());
        let bytes = decoding.cast(DecodingValue::Component(0), DType::I32);
        let bytes = decoding.reshape(bytes, Shape(whole));
        let values = B::meaning(&mut BlockBytes { decoding, bytes, lead });
        decoding.reshape(values.value, shape.clone())
    }

    fn encode(&self, values: &[f32], shape: &[usize], importance: Option<&[f32]>) -> Vec<Vec<u8>> {
        let mut out = vec![0; values.len() / B::ELEMENTS * B::BYTES];
        let row = shape.last().map_or(1, |n| (n / B::ELEMENTS).max(1));
        for (i, (values, block)) in values.chunks_exact(B::ELEMENTS).zip(out.chunks_exact_mut(B::BYTES)).enumerate() {
            B::write(values, importance.map(|all| &all[i % row * B::ELEMENTS..][..B::ELEMENTS]), block);
        }
        vec![out]
    }

    fn values(&self, components: &[&[u8]], _shape: &[usize]) -> Vec<f32> {
        let mut out = vec![0.0; components[0].len() / B::BYTES * B::ELEMENTS];
        for (block, out) in components[0].chunks_exact(B::BYTES).zip(out.chunks_exact_mut(B::ELEMENTS)) {
            B::read(block, out);
        }
        out
    }
}

/// All extents but the innermost, and how many blocks that makes.
fn blocks(shape: &Shape, elements: usize) -> (Vec<Dim>, Dim) {
    let mut dims = shape.0.clone();
    let last = dims.pop().unwrap_or_else(|| Dim::from(1));
    let blocks = last.div_exact(elements as i64).unwrap_or(last);
    (dims, blocks)
}

/// A value of a block format's decoding, of the blocks' leading axes.
#[derive(Clone, Copy, Debug)]
pub struct BlockValue {
    value: DecodingValue,
    /// Its last extent.
    extent: usize,
}

/// The bytes of all blocks of a parameter, as integers, and ops to take fields out of them.
pub struct BlockBytes<'a> {
    decoding: &'a mut Decoding,
    /// I32 `[.., blocks, BYTES]`.
    bytes: DecodingValue,
    /// All axes but the last.
    lead: Vec<Dim>,
}

impl BlockBytes<'_> {
    /// `len` bytes of each block from `start` on: I32 `[.., len]` in 0..256.
    pub fn at(&mut self, start: usize, len: usize) -> BlockValue {
        BlockValue { value: self.decoding.slice(self.bytes, self.lead.len(), start, len), extent: len }
    }

    /// As [`BlockBytes::at`], of signed bytes.
    pub fn signed(&mut self, start: usize, len: usize) -> BlockValue {
        let x = self.at(start, len);
        let high = self.field(x, 7, 1);
        let high = self.times(high, 256);
        self.binary(Binary::Sub, x, high)
    }

    /// Fields of `bits` bits of I32 `x` from bit `shift` on.
    pub fn field(&mut self, x: BlockValue, shift: u32, bits: u32) -> BlockValue {
        let (below, above) = (self.int(1 << shift), self.int(1 << bits));
        let x = self.binary(Binary::Div, x, below);
        self.binary(Binary::Rem, x, above)
    }

    /// Fields of `bits` bits of each `run` bytes of `x`, first from bit `shifts[0]` of all of the run, then from the next
    /// shift: `[.., n]` to `[.., n * shifts]`.
    pub fn fields(&mut self, x: BlockValue, run: usize, shifts: &[u32], bits: u32) -> BlockValue {
        let n = x.extent;
        let x = self.split(x, &[n / run, 1, run]);
        let below: Vec<f64> = shifts.iter().map(|shift| f64::from(1u32 << shift)).collect();
        let below = self.decoding.table(DType::I32, &below);
        let below = self.decoding.reshape(below, Shape::from([shifts.len(), 1]));
        let below = BlockValue { value: below, extent: 1 };
        let above = self.int(1 << bits);
        let x = self.binary(Binary::Div, x, below);
        let x = self.binary(Binary::Rem, x, above);
        self.split(x, &[n * shifts.len()])
    }

    /// The last axes of `x` as `tail`.
    pub fn split(&mut self, x: BlockValue, tail: &[usize]) -> BlockValue {
        let mut dims = self.lead.clone();
        dims.extend(tail.iter().map(|n| Dim::from(*n)));
        let value = self.decoding.reshape(x.value, Shape(dims));
        BlockValue { value, extent: tail.last().copied().unwrap_or(1) }
    }

    /// `a` and behind it `b`, along the last axis.
    pub fn join(&mut self, a: BlockValue, b: BlockValue) -> BlockValue {
        let value = self.decoding.concat(&[a.value, b.value], self.lead.len());
        BlockValue { value, extent: a.extent + b.extent }
    }

    /// `low + high * 2^shift`, integers.
    pub fn with_high(&mut self, low: BlockValue, high: BlockValue, shift: u32) -> BlockValue {
        let high = self.times(high, 1 << shift);
        self.binary(Binary::Add, low, high)
    }

    /// Integer `x - offset` as f32.
    pub fn centred(&mut self, x: BlockValue, offset: i32) -> BlockValue {
        let offset = self.int(offset);
        let x = self.binary(Binary::Sub, x, offset);
        self.float(x)
    }

    /// Integer `x` as f32.
    pub fn float(&mut self, x: BlockValue) -> BlockValue {
        BlockValue { value: self.decoding.cast(x.value, DType::F32), ..x }
    }

    /// `scale * x`, broadcasting.
    pub fn scaled(&mut self, scale: BlockValue, x: BlockValue) -> BlockValue {
        self.binary(Binary::Mul, scale, x)
    }

    /// `scale * x + offset`, broadcasting.
    pub fn above(&mut self, scale: BlockValue, x: BlockValue, offset: BlockValue) -> BlockValue {
        let x = self.scaled(scale, x);
        self.binary(Binary::Add, x, offset)
    }

    /// `scale * x - offset`, broadcasting.
    pub fn below(&mut self, scale: BlockValue, x: BlockValue, offset: BlockValue) -> BlockValue {
        let x = self.scaled(scale, x);
        self.binary(Binary::Sub, x, offset)
    }

    /// The f32 entries of `table` at integers `x`.
    pub fn lookup(&mut self, table: &[f32], x: BlockValue) -> BlockValue {
        let table: Vec<f64> = table.iter().map(|v| f64::from(*v)).collect();
        let table = self.decoding.table(DType::F32, &table);
        BlockValue { value: self.decoding.gather(table, x.value), ..x }
    }

    /// The f16 in bytes `start` and `start + 1`, as f32 `[.., 1]`: significand times a power of two, in which infinity is
    /// that of 1 and NaN that of 0.
    pub fn f16(&mut self, start: usize) -> BlockValue {
        let (low, high) = (self.at(start, 1), self.at(start + 1, 1));
        let exponent = self.field(high, 2, 5);
        let mantissa = self.field(high, 0, 2);
        let mantissa = self.with_high(low, mantissa, 8);
        let [none, leading, largest, one] = [self.int(0), self.int(1024), self.int(31), self.int(1)];
        let normal = self.compare(Compare::Gt, exponent, none);
        let leading = self.select(normal, leading, none);
        let finite = self.binary(Binary::Add, mantissa, leading);
        let exact = self.compare(Compare::Eq, mantissa, none);
        let special = self.select(exact, one, none);
        let beyond = self.compare(Compare::Eq, exponent, largest);
        let significand = self.select(beyond, special, finite);
        let powers: [f32; 32] = std::array::from_fn(|e| match e {
            31 => f32::INFINITY,
            e => 2f32.powi(e.max(1) as i32 - 25),
        });
        let power = self.lookup(&powers, exponent);
        let sign = self.field(high, 7, 1);
        let sign = self.times(sign, -2);
        let sign = self.binary(Binary::Add, sign, one);
        let (significand, sign) = (self.float(significand), self.float(sign));
        let magnitude = self.scaled(significand, power);
        self.scaled(magnitude, sign)
    }

    fn times(&mut self, x: BlockValue, by: i32) -> BlockValue {
        let by = self.int(by);
        self.binary(Binary::Mul, x, by)
    }

    fn int(&mut self, value: i32) -> BlockValue {
        BlockValue { value: self.decoding.constant(DType::I32, f64::from(value)), extent: 1 }
    }

    fn binary(&mut self, op: Binary, a: BlockValue, b: BlockValue) -> BlockValue {
        BlockValue { value: self.decoding.binary(op, a.value, b.value), extent: a.extent.max(b.extent) }
    }

    fn compare(&mut self, op: Compare, a: BlockValue, b: BlockValue) -> BlockValue {
        BlockValue { value: self.decoding.compare(op, a.value, b.value), extent: a.extent.max(b.extent) }
    }

    fn select(&mut self, cond: BlockValue, a: BlockValue, b: BlockValue) -> BlockValue {
        let value = self.decoding.select(cond.value, a.value, b.value);
        BlockValue { value, extent: cond.extent.max(a.extent).max(b.extent) }
    }
}

/// The f16 at bytes `at` and `at + 1`, in bit operations that need no instruction of the machine.
#[inline(always)]
pub(super) fn half_at(block: &[u8], at: usize) -> f32 {
    let bits = u32::from(u16::from_le_bytes([block[at], block[at + 1]]));
    let (code, sign) = (bits & 0x7fff, (bits & 0x8000) << 16);
    let magnitude = code << 13;
    // A subnormal code as the fraction of the smallest normal number, which is then taken away: exact.
    const UNIT: u32 = 113 << 23;
    let subnormal = f32::from_bits(magnitude + UNIT) - f32::from_bits(UNIT);
    let bits = match code {
        0..0x400 => subnormal.to_bits(),
        0x400..0x7c00 => magnitude + (112 << 23),
        _ => magnitude | 0x7f80_0000,
    };
    f32::from_bits(bits | sign)
}

/// Writes `value` as f16 to bytes `at` and `at + 1`, and gives what it is then.
pub(super) fn put_half(block: &mut [u8], at: usize, value: f32) -> f32 {
    let value = f16::from_f32(value);
    block[at..at + 2].copy_from_slice(&value.to_le_bytes());
    value.to_f32()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Bindings;
    use crate::eval::{Precision, evaluate};
    use crate::format::all;
    use crate::graph::Builder;
    use crate::sample::Rng;
    use crate::tensor::{Tensor, Value};
    use crate::types::Type;

    #[test]
    fn a_half_is_read_as_the_library_reads_it() {
        for bits in 0..=u16::MAX {
            let (is, should) = (half_at(&bits.to_le_bytes(), 0), f16::from_bits(bits).to_f32());
            assert!(is.to_bits() == should.to_bits() || is.is_nan() && should.is_nan(), "{bits:#x}: {is} {should}");
        }
    }

    /// Blocks of random bytes, infinite and NaN scales among them.
    #[test]
    fn the_loop_reads_what_the_graph_means() {
        for format in all() {
            let shape = Shape::from([40usize, 512]);
            let component = format.components(&shape).remove(0);
            let bytes = Rng::new(7).integers(DType::U8, &component.shape.as_const().unwrap(), 0, 256);
            let mut g = Builder::new();
            let ty = Type::tensor(DType::F32, shape).stored_as(format.clone());
            let w = g.weight("w", ty).unwrap();
            let y = g.decoded(w, DType::F32).unwrap();
            let graph = g.finish(vec![("y".into(), y)]).unwrap();
            let raw = bytes.to_bytes();
            let stored = Value::Stored {
                format: format.clone(),
                dtype: DType::F32,
                shape: vec![40, 512],
                components: vec![Tensor::from_bytes(DType::U8, &bytes.shape, &raw)],
            };
            let value = |_: &crate::Arg| Some(stored.clone());
            let meant = evaluate(&graph, &value, &Bindings::new(), Precision::Rounded).unwrap();
            let read = format.values(&[&raw], &[40, 512]);
            for (i, (read, meant)) in read.iter().zip(meant[0].1.tensor().floats()).enumerate() {
                let meant = *meant as f32;
                let same = read.to_bits() == meant.to_bits() || read.is_nan() && meant.is_nan();
                assert!(same, "{} element {i}: {read} {meant}", format.name());
            }
        }
    }

    /// What a format leaves of values must be about as near as its bits allow: a bound for each on the error's
    /// share of normal values.
    #[test]
    fn what_is_quantised_comes_back_as_near_as_the_bits_allow() {
        let values: Vec<f32> =
            Rng::new(3).normal(DType::F32, &[16, 512]).floats().iter().map(|v| *v as f32 * 0.02).collect();
        let all_equal = vec![1.0; 512];
        for format in all() {
            let share = |importance: Option<&[f32]>| {
                let bytes = format.encode(&values, &[16, 512], importance);
                let back = format.values(&[&bytes[0]], &[16, 512]);
                let error: f64 = back.iter().zip(&values).map(|(a, b)| f64::from(a - b).powi(2)).sum();
                let whole: f64 = values.iter().map(|v| f64::from(*v).powi(2)).sum();
                (error / whole).sqrt()
            };
            let most = match format.name() {
                "q8_0" => 0.006,
                "q6_k" => 0.02,
                "q5_k" => 0.04,
                "q5_0" | "q5_1" => 0.05,
                "q4_k" => 0.075,
                "iq4_nl" | "iq4_xs" => 0.08,
                "q4_0" | "q4_1" => 0.1,
                "mxfp4" => 0.13,
                "q3_k" => 0.17,
                _ => 0.3,
            };
            let (plain, weighed) = (share(None), share(Some(&all_equal)));
            assert!(plain < most && plain > most / 4.0, "{}: {plain}", format.name());
            // Weighing all errors alike is what this measure counts.
            assert!(weighed < plain * 1.02, "{}: {weighed} with equal importance, {plain} without", format.name());
        }
    }

    #[test]
    fn nothing_but_zeros_and_not_a_number_are_stored_without_a_panic() {
        for format in all() {
            let zeros = format.encode(&[0.0; 512], &[1, 512], None);
            assert!(format.values(&[&zeros[0]], &[1, 512]).iter().all(|v| *v == 0.0), "{}", format.name());
            for odd in [f32::NAN, f32::INFINITY, f32::MAX, f32::MIN_POSITIVE, -1e-40] {
                let mut values = [0.5f32; 512];
                values[3] = odd;
                format.encode(&values, &[1, 512], None);
                format.encode(&values, &[1, 512], Some(&[0.0; 512]));
                format.encode(&[odd; 512], &[1, 512], Some(&[1.0; 512]));
            }
        }
    }

    #[test]
    fn a_ragged_row_is_refused() {
        for format in all() {
            let refused = format.check(&Shape::from([4usize, 33])).unwrap_err();
            assert!(refused.contains("blocks of"), "{refused}");
            assert!(format.check(&Shape::from([4usize, 512])).is_ok());
        }
    }
}

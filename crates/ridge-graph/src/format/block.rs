//! What the block formats of GGUF files share. A row is a sequence of blocks of `ELEMENTS` values in `BYTES` bytes:
//! scales, minima and codes lie together. The bytes are one component, as the file has them, so a mapped file is
//! used in place.
//!
//! Each format says its layout three times: as graph ops ([`BlockFormat::meaning`]), as a loop that a compiler turns
//! into vector instructions ([`BlockFormat::codes`]), and in reverse ([`BlockFormat::write`]). Tests hold the loop to the
//! meaning bit for bit, and both to values of the Python package `gguf`.
#![allow(clippy::inline_always)] // a loop over blocks must compile with its caller's instruction set

use std::fmt;

use half::f16;

use super::{Component, Format};
use crate::builder::Builder;
use crate::dim::Dim;
use crate::dtype::DType;
use crate::error::{Result, Why};
use crate::graph::Var;
use crate::types::{Shape, Type};

/// Values of the largest block.
const LARGEST: usize = 256;

/// A format of blocks along the innermost axis.
pub trait BlockFormat: fmt::Debug + Copy + Send + Sync + 'static {
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
    ///
    /// # Errors
    /// Those of the ops it builds.
    fn meaning(block: &mut Bytes<'_>) -> Result<Var>;

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

    fn components(&self, shape: &Shape) -> Vec<Component> {
        let (mut dims, blocks) = blocks(shape, B::ELEMENTS);
        dims.push(blocks * B::BYTES as i64);
        vec![Component { name: "blocks", ty: Type::tensor(DType::U8, Shape(dims)) }]
    }

    fn decode(&self, g: &mut Builder, components: &[Var], shape: &Shape) -> Result<Var> {
        let (mut lead, blocks) = blocks(shape, B::ELEMENTS);
        lead.push(blocks);
        let mut whole = lead.clone();
        whole.push(B::BYTES.into());
        let bytes = g.cast(components[0], DType::I32)?;
        let bytes = g.reshape(bytes, Shape(whole))?;
        let values = B::meaning(&mut Bytes { g, bytes, lead })?;
        g.reshape(values, shape.clone())
    }

    fn encode(&self, values: &[f32], shape: &[usize], importance: Option<&[f32]>) -> Vec<Vec<u8>> {
        let mut out = vec![0; values.len() / B::ELEMENTS * B::BYTES];
        let row = shape.last().map_or(1, |n| (n / B::ELEMENTS).max(1));
        for (i, (values, block)) in values.chunks_exact(B::ELEMENTS).zip(out.chunks_exact_mut(B::BYTES)).enumerate() {
            B::write(values, importance.map(|all| &all[i % row * B::ELEMENTS..][..B::ELEMENTS]), block);
        }
        vec![out]
    }

    fn values(&self, components: &[&[u8]]) -> Vec<f32> {
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

/// The bytes of all blocks of a parameter, as integers, and ops to take fields out of them.
pub struct Bytes<'a> {
    g: &'a mut Builder,
    /// I32 `[.., blocks, BYTES]`.
    bytes: Var,
    /// All axes but the last.
    lead: Vec<Dim>,
}

impl Bytes<'_> {
    /// `len` bytes of each block from `start` on: I32 `[.., len]` in 0..256.
    pub(super) fn at(&mut self, start: usize, len: usize) -> Result<Var> {
        self.g.slice(self.bytes, self.lead.len(), start, len)
    }

    /// As [`Bytes::at`], of signed bytes.
    pub(super) fn signed(&mut self, start: usize, len: usize) -> Result<Var> {
        let x = self.at(start, len)?;
        let high = self.field(x, 7, 1)?;
        let high = self.times(high, 256)?;
        self.g.sub(x, high)
    }

    /// Fields of `bits` bits of I32 `x` from bit `shift` on.
    pub(super) fn field(&mut self, x: Var, shift: u32, bits: u32) -> Result<Var> {
        let (below, above) = (self.int(1 << shift)?, self.int(1 << bits)?);
        let x = self.g.div(x, below)?;
        self.g.rem(x, above)
    }

    /// Fields of `bits` bits of each `run` bytes of `x`, first from bit `shifts[0]` of all of the run, then from the next
    /// shift: `[.., n]` to `[.., n * shifts]`.
    pub(super) fn fields(&mut self, x: Var, run: usize, shifts: &[u32], bits: u32) -> Result<Var> {
        let n = self.g.ty(x)?.shape.last().as_const().unwrap_or_default();
        let x = self.split(x, &[n / run, 1, run])?;
        let below: Vec<f64> = shifts.iter().map(|shift| f64::from(1u32 << shift)).collect();
        let below = self.g.table(DType::I32, &below)?;
        let below = self.g.reshape(below, [shifts.len(), 1])?;
        let above = self.int(1 << bits)?;
        let x = self.g.div(x, below)?;
        let x = self.g.rem(x, above)?;
        self.split(x, &[n * shifts.len()])
    }

    /// The last axes of `x` as `tail`.
    pub(super) fn split(&mut self, x: Var, tail: &[usize]) -> Result<Var> {
        let mut dims = self.lead.clone();
        dims.extend(tail.iter().map(|n| Dim::from(*n)));
        self.g.reshape(x, Shape(dims))
    }

    /// `a` and behind it `b`, along the last axis.
    pub(super) fn join(&mut self, a: Var, b: Var) -> Result<Var> {
        self.g.concat(&[a, b], self.lead.len())
    }

    /// `low + high * 2^shift`, integers.
    pub(super) fn with_high(&mut self, low: Var, high: Var, shift: u32) -> Result<Var> {
        let high = self.times(high, 1 << shift)?;
        self.g.add(low, high)
    }

    /// Integer `x - offset` as f32.
    pub(super) fn centred(&mut self, x: Var, offset: i32) -> Result<Var> {
        let offset = self.int(offset)?;
        let x = self.g.sub(x, offset)?;
        self.float(x)
    }

    /// Integer `x` as f32.
    pub(super) fn float(&mut self, x: Var) -> Result<Var> {
        self.g.cast(x, DType::F32)
    }

    /// `scale * x`, broadcasting.
    pub(super) fn scaled(&mut self, scale: Var, x: Var) -> Result<Var> {
        self.g.mul(scale, x)
    }

    /// `scale * x + offset`, broadcasting.
    pub(super) fn above(&mut self, scale: Var, x: Var, offset: Var) -> Result<Var> {
        let x = self.g.mul(scale, x)?;
        self.g.add(x, offset)
    }

    /// `scale * x - offset`, broadcasting.
    pub(super) fn below(&mut self, scale: Var, x: Var, offset: Var) -> Result<Var> {
        let x = self.g.mul(scale, x)?;
        self.g.sub(x, offset)
    }

    /// The f32 entries of `table` at integers `x`.
    pub(super) fn lookup(&mut self, table: &[f32], x: Var) -> Result<Var> {
        let table: Vec<f64> = table.iter().map(|v| f64::from(*v)).collect();
        let table = self.g.table(DType::F32, &table)?;
        self.g.gather(table, x, 0)
    }

    /// The f16 in bytes `start` and `start + 1`, as f32 `[.., 1]`: significand times a power of two, in which infinity is
    /// that of 1 and NaN that of 0.
    pub(super) fn f16(&mut self, start: usize) -> Result<Var> {
        let (low, high) = (self.at(start, 1)?, self.at(start + 1, 1)?);
        let exponent = self.field(high, 2, 5)?;
        let mantissa = self.field(high, 0, 2)?;
        let mantissa = self.with_high(low, mantissa, 8)?;
        let [none, leading, largest, one] = [self.int(0)?, self.int(1024)?, self.int(31)?, self.int(1)?];
        let normal = self.g.gt(exponent, none)?;
        let leading = self.g.select(normal, leading, none)?;
        let finite = self.g.add(mantissa, leading)?;
        let exact = self.g.eq(mantissa, none)?;
        let special = self.g.select(exact, one, none)?;
        let beyond = self.g.eq(exponent, largest)?;
        let significand = self.g.select(beyond, special, finite)?;
        let powers: [f32; 32] = std::array::from_fn(|e| match e {
            31 => f32::INFINITY,
            e => 2f32.powi(e.max(1) as i32 - 25),
        });
        let power = self.lookup(&powers, exponent)?;
        let sign = self.field(high, 7, 1)?;
        let sign = self.times(sign, -2)?;
        let sign = self.g.add(sign, one)?;
        let (significand, sign) = (self.float(significand)?, self.float(sign)?);
        let magnitude = self.g.mul(significand, power)?;
        self.g.mul(magnitude, sign)
    }

    fn times(&mut self, x: Var, by: i32) -> Result<Var> {
        let by = self.int(by)?;
        self.g.mul(x, by)
    }

    fn int(&mut self, value: i32) -> Result<Var> {
        self.g.constant(DType::I32, f64::from(value))
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
    use crate::sample::Rng;
    use crate::tensor::{Tensor, Value};

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
            let component = format.components(&shape).remove(0).ty;
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
            let read = format.values(&[&raw]);
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
                let back = format.values(&[&bytes[0]]);
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
            assert!(format.values(&[&zeros[0]]).iter().all(|v| *v == 0.0), "{}", format.name());
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

//! Quantisation of values that a graph computes: codes with scales as one formatted value, and its inverse.
//!
//! Gradients pass straight through (Bengio, Leonard and Courville 2013, "Estimating or Propagating Gradients Through
//! Stochastic Neurons for Conditional Computation"): the cotangent of what is quantised is that of its quantised value.

use super::require::{takes, want_float};
use crate::cost::Cost;
use crate::dim::Dim;
use crate::dtype::DType;
use crate::error::Result;
use crate::format::{CodeType, Format, FormatRef, ScaleLayout, ScaledFormat};
use crate::graph::{Builder, Composite, CompositeRef, Gradient, Var};
use crate::prim::Prim;
use crate::sample::{Check, Rng, Sample};
use crate::shape::Shape;
use crate::shard::{Placement, ShardingRule, rowwise_rules};
use crate::tensor::Tensor;
use crate::types::Type;
use crate::why::Why;

/// `x` as codes with scales: one value of the dtype and shape of `x`, stored in `format`. See [`format`](crate::format) for
/// what scales and codes are; scales follow from the values (dynamic quantisation).
///
/// `x`: `[.., K]` of any float dtype, taken as f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantize {
    /// Codes, and which of them share a scale.
    pub format: ScaledFormat,
}

/// The values that a formatted value of `dtype` stands for, as f32 `[.., K]`: not rounded to its logical dtype.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dequantize {
    /// The logical dtype of the input.
    pub dtype: DType,
}

/// The gradient of [`Quantize`] and [`Dequantize`]: the cotangent itself, as `dtype`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StraightThrough {
    /// The dtype that it is cast to; its own if `None`.
    pub dtype: Option<DType>,
}

fn straight_through(forward: CompositeRef, dtype: Option<DType>) -> Gradient {
    let backward = CompositeRef::new(StraightThrough { dtype });
    Gradient::Explicit { forward, saved: Vec::new(), backward, wrt: vec![0] }
}

/// How a tensor is cut into units that share a scale: each axis that is cut becomes two.
struct Units {
    /// Of the elements as they are cut.
    split: Vec<Dim>,
    /// The axes of `split` that units extend over.
    within: Vec<usize>,
    /// Of the elements with what is padded to whole units.
    whole: Vec<Dim>,
}

impl Units {
    fn new(format: ScaledFormat, shape: &Shape, scales: &Shape) -> Self {
        let (mut split, mut within, mut whole) = (Vec::new(), Vec::new(), shape.0.clone());
        let shared = format.shared(shape.rank());
        for (axis, dim) in shape.0.iter().enumerate() {
            if let Some((_, size)) = shared.iter().find(|(a, _)| *a == axis) {
                let groups = scales.0[axis].clone();
                whole[axis] = groups.clone() * *size as i64;
                split.extend([groups, Dim::from(*size)]);
            } else {
                split.push(dim.clone());
                let row = format.scales == ScaleLayout::Row && axis + 1 == shape.rank();
                if !row && format.scales != ScaleLayout::Tensor {
                    continue;
                }
            }
            within.push(split.len() - 1);
        }
        Self { split, within, whole }
    }

    /// `x` of `shape`, cut.
    fn cut(&self, g: &mut Builder, mut x: Var, shape: &Shape) -> Result<Var> {
        for (axis, (dim, whole)) in shape.0.iter().zip(&self.whole).enumerate().filter(|(_, (dim, whole))| dim != whole)
        {
            x = g.pad(x, axis, 0, whole - dim, 0.0)?;
        }
        g.reshape(x, Shape(self.split.clone()))
    }

    /// `x`, cut, as `shape` again.
    fn join(&self, g: &mut Builder, x: Var, shape: &Shape) -> Result<Var> {
        let mut x = g.reshape(x, Shape(self.whole.clone()))?;
        for (axis, (dim, _)) in shape.0.iter().zip(&self.whole).enumerate().filter(|(_, (dim, whole))| dim != whole) {
            x = g.slice(x, axis, 0, dim.clone())?;
        }
        Ok(x)
    }
}

/// The largest magnitude of `x` along `axes`, which stay with extent 1.
pub(super) fn largest_magnitude(g: &mut Builder, x: Var, axes: impl DoubleEndedIterator<Item = usize>) -> Result<Var> {
    let magnitudes = g.abs(x)?;
    let amax = axes.rev().try_fold(magnitudes, |amax, axis| g.reduce_max(amax, axis))?;
    // The largest of no elements is minus infinity.
    let zero = g.constant(DType::F32, 0.0)?;
    g.max(amax, zero)
}

/// Integers nearest to `x` by 127 of `amax`, of two the upper one.
fn int8(g: &mut Builder, x: Var, amax: Var) -> Result<Var> {
    let number = |g: &mut Builder, value| g.constant(DType::F32, value);
    let [zero, one, half, most, least] =
        [number(g, 0.0)?, number(g, 1.0)?, number(g, 0.5)?, number(g, 127.0)?, number(g, -127.0)?];
    // Of nothing but zeros every code is zero.
    let none = g.eq(amax, zero)?;
    let divisor = g.select(none, one, amax)?;
    // 127 / 128 and then 128, so that no product is too large. Both are exact where x has 16 bits.
    let [share, whole] = [number(g, 127.0 / 128.0)?, number(g, 128.0)?];
    let share = g.mul(x, share)?;
    let share = g.div(share, divisor)?;
    let scaled = g.mul(share, whole)?;
    let above = g.add(scaled, half)?;
    let code = g.floor(above)?;
    // The smallest numbers are rounded far.
    let code = g.min(code, most)?;
    let code = g.max(code, least)?;
    g.cast(code, DType::I8)
}

/// `x / scale` rounded to the nearest 8-bit float, ties to even, and no farther than the largest. A cast would not round in
/// the exact evaluation, so the rounding is written out.
pub(super) fn float8(g: &mut Builder, x: Var, scale: Var, codes: CodeType) -> Result<Var> {
    // Bits behind the point, and the powers of two from which neighbours are farther apart than the smallest numbers.
    let (bits, powers) = if codes == CodeType::F8E5M2 { (2, -13..=15) } else { (3, -5..=8) };
    let number = |g: &mut Builder, value| g.constant(DType::F32, value);
    let [zero, half, one, two] = [number(g, 0.0)?, number(g, 0.5)?, number(g, 1.0)?, number(g, 2.0)?];
    let largest = f64::from(codes.largest());
    let [most, least] = [number(g, largest)?, number(g, -largest)?];
    let none = g.eq(scale, zero)?;
    let divisor = g.select(none, one, scale)?;
    let scaled = g.div(x, divisor)?;
    let scaled = g.min(scaled, most)?;
    let scaled = g.max(scaled, least)?;
    let magnitude = g.abs(scaled)?;
    // The distance of neighbours, which doubles at each power of two.
    let mut quantum = number(g, 2f64.powi(powers.start() - bits - 1))?;
    for power in powers {
        let (from, wider) = (number(g, 2f64.powi(power))?, number(g, 2f64.powi(power - bits))?);
        let reached = g.ge(magnitude, from)?;
        quantum = g.select(reached, wider, quantum)?;
    }
    // Below 16, so that everything from here on is exact.
    let quanta = g.div(magnitude, quantum)?;
    let below = g.floor(quanta)?;
    let rest = g.sub(quanta, below)?;
    let odd = g.rem(below, two)?;
    let odd = g.eq(odd, one)?;
    let tie = g.eq(rest, half)?;
    let (nearer, even) = (g.gt(rest, half)?, g.and(tie, odd)?);
    let up = g.or(nearer, even)?;
    let more = g.select(up, one, zero)?;
    let nearest = g.add(below, more)?;
    let nearest = g.mul(nearest, quantum)?;
    let negative = g.lt(scaled, zero)?;
    let opposite = g.neg(nearest)?;
    let code = g.select(negative, opposite, nearest)?;
    g.cast(code, codes.dtype())
}

impl Composite for Quantize {
    fn name(&self) -> &'static str {
        "quantize"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [x] = inputs else { return Err(takes("x", inputs)) };
        want_float("x", x)?;
        self.format.check(&x.shape)?;
        Ok(vec![x.clone().stored_as(FormatRef::new(self.format))])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let ty = g.ty(inputs[0])?.clone();
        let components = self.format.components(&ty.shape);
        let units = Units::new(self.format, &ty.shape, &components[1].shape);
        let x = g.cast(inputs[0], DType::F32)?;
        let x = units.cut(g, x, &ty.shape)?;
        let amax = largest_magnitude(g, x, units.within.iter().copied())?;
        let largest = g.constant(DType::F32, f64::from(self.format.codes.largest()))?;
        let scale = g.div(amax, largest)?;
        let codes = match self.format.codes {
            CodeType::Int8 => int8(g, x, amax)?,
            codes => float8(g, x, scale, codes)?,
        };
        let codes = units.join(g, codes, &ty.shape)?;
        let scales = g.reshape(scale, components[1].shape.clone())?;
        let prim = Prim::Assemble { format: FormatRef::new(self.format), dtype: ty.dtype, shape: ty.shape };
        g.prim(prim, &[codes, scales])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        // The largest magnitude, then a product, a rounding and a conversion for each element.
        Cost { vector_flops: inputs[0].shape.elements() * 4, ..Cost::moving(inputs, outputs) }
    }

    fn gradient(&self) -> Gradient {
        straight_through(CompositeRef::new(*self), None)
    }

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        let shape = &inputs[0].shape;
        if self.format.scales == ScaleLayout::Tensor {
            return Vec::new();
        }
        let mut rules = rowwise_rules(shape, 1, 1);
        let cuts =
            self.format.shared(shape.rank()).into_iter().map(|(dim, multiple)| Placement::Shard { dim, multiple });
        if self.format.scales == ScaleLayout::Block {
            // A row of blocks has 128 rows.
            rules.retain(|rule| rule.outputs[0] != Placement::shard(shape.rank() - 2));
        }
        rules.extend(cuts.map(|cut| ShardingRule { inputs: vec![cut], outputs: vec![cut] }));
        rules
    }
}

impl Composite for Dequantize {
    fn name(&self) -> &'static str {
        "dequantize"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [x] = inputs else { return Err(takes("x", inputs)) };
        if x.format.is_none() || x.state || x.dtype != self.dtype {
            return Err(format!("x must be a {} value stored in a format, got {x}", self.dtype));
        }
        Ok(vec![Type::tensor(DType::F32, x.shape.clone())])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        Ok(vec![g.decoded(inputs[0], DType::F32)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        Cost { vector_flops: outputs[0].shape.elements() * 2, ..Cost::moving(inputs, outputs) }
    }

    fn gradient(&self) -> Gradient {
        straight_through(CompositeRef::new(*self), Some(self.dtype))
    }

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        let Some(format) = &inputs[0].format else { return Vec::new() };
        let granules = format.granularity(inputs[0].shape.rank()).into_iter().enumerate();
        let cut = |(dim, multiple)| Placement::Shard { dim, multiple };
        granules.map(cut).map(|cut| ShardingRule { inputs: vec![cut], outputs: vec![cut] }).collect()
    }
}

impl Composite for StraightThrough {
    fn name(&self) -> &'static str {
        "straight_through"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [cotangent] = inputs else { return Err(takes("a cotangent", inputs)) };
        want_float("the cotangent", cotangent)?;
        Ok(vec![Type { dtype: self.dtype.unwrap_or(cotangent.dtype), ..cotangent.clone() }])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let dtype = g.ty(inputs[0])?.dtype;
        Ok(vec![g.cast(inputs[0], self.dtype.unwrap_or(dtype))?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        Cost::moving(inputs, outputs)
    }

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        let cuts = (0..inputs[0].shape.rank()).map(Placement::shard);
        cuts.map(|cut| ShardingRule { inputs: vec![cut], outputs: vec![cut] }).collect()
    }
}

impl Builder {
    /// `x` as codes with scales; see [`Quantize`].
    ///
    /// # Errors
    /// When `x` is not a plain float tensor, or `format` does not fit its shape.
    pub fn quantize(&mut self, x: Var, format: ScaledFormat) -> Result<Var> {
        Ok(self.composite(Quantize { format }, &[x])?[0])
    }

    /// The values of `x`, plain or stored in a format, as f32; see [`Dequantize`].
    ///
    /// # Errors
    /// When `x` is no float value.
    pub fn dequantize(&mut self, x: Var) -> Result<Var> {
        let ty = self.ty(x)?;
        if ty.format.is_none() {
            return self.cast(x, DType::F32);
        }
        let dtype = ty.dtype;
        Ok(self.composite(Dequantize { dtype }, &[x])?[0])
    }
}

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let mut samples = Vec::new();
    for format in ScaledFormat::all() {
        let block = format.scales == ScaleLayout::Block;
        for shape in [&[0, 64][..], &[1, 1], if block { &[140, 7] } else { &[7] }, &[5, 300], &[2, 3, 64], &[9, 512]] {
            samples.push(Sample::new(Quantize { format }).input(rng.normal(dtype, shape)).judged(Check::Codes));
        }
        // A row of zeros, and small numbers beside large ones; then what is not finite.
        let rows = rng.normal(dtype, &[4, 70]);
        let spread = |(i, x): (usize, &f64)| if i < 70 { 0.0 } else { x * 2f64.powi(i as i32 % 12 - 8) };
        let finite = Tensor::float(dtype, &[4, 70], rows.floats().iter().enumerate().map(spread).collect()).rounded();
        let mut odd = rows.floats().to_vec();
        (odd[3], odd[75]) = (f64::NAN, f64::INFINITY);
        for x in [finite, Tensor::float(dtype, &[4, 70], odd).rounded()] {
            samples.push(Sample::new(Quantize { format }).input(x).judged(Check::Codes));
        }
    }
    samples
}

pub(super) fn samples_dequantize(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let mut samples = Vec::new();
    for format in ScaledFormat::all() {
        for shape in [&[0, 64], &[1, 1], &[5, 300], &[140, 64]] {
            let x = rng.normal(dtype, shape);
            samples.push(Sample::new(Dequantize { dtype }).stored(&x, &FormatRef::new(format)));
        }
    }
    samples
}

pub(super) fn samples_straight_through(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let to = [None, Some(DType::F32), Some(dtype)];
    to.map(|dtype_to| Sample::new(StraightThrough { dtype: dtype_to }).input(rng.normal(dtype, &[3, 40]))).to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Bindings;
    use crate::eval::{Precision, evaluate};
    use crate::tensor::Value;

    const GROUP: usize = 256;

    /// Each row is a largest magnitude with all elements of bf16 that lie just between two of its codes, the largest
    /// numbers among them.
    #[test]
    fn an_element_between_two_codes_takes_the_upper_one_in_f32_too() {
        let (mut rows, mut wanted) = (Vec::new(), Vec::new());
        for power in [-100, -3, 0, 120] {
            for significand in 128..256 {
                let largest = f64::from(significand) * 2f64.powi(power);
                let mut row = vec![0.0; GROUP];
                let mut codes = row.clone();
                (row[0], codes[0]) = (largest, 127.0);
                let mut filled = 1;
                for twice in (-253..255).step_by(2) {
                    let x = largest * f64::from(twice) / 254.0;
                    if x * 254.0 == largest * f64::from(twice) && DType::BF16.round(x) == x {
                        (row[filled], codes[filled]) = (x, f64::from(twice + 1) / 2.0);
                        filled += 1;
                    }
                }
                assert!(filled > 2, "half of the largest is there");
                wanted.extend(codes.iter().map(|c| c * largest / 127.0));
                rows.extend(row);
            }
        }
        let count = rows.len() / GROUP;
        let mut g = Builder::new();
        let x = g.step_input("x", Type::tensor(DType::F32, [count, GROUP])).unwrap();
        let y = g.quantize(x, ScaledFormat::INT8_G256).unwrap();
        let y = g.dequantize(y).unwrap();
        let graph = g.finish(vec![("y".into(), y)]).unwrap();
        let rows = Value::Plain(Tensor::float(DType::F32, &[count, GROUP], rows));
        for precision in [Precision::Exact, Precision::Rounded] {
            let value = |_: &crate::Arg| Some(rows.clone());
            let got = evaluate(&graph, &value, &Bindings::new(), precision).unwrap();
            for (i, (got, wanted)) in got[0].1.tensor().floats().iter().zip(&wanted).enumerate() {
                let error = (got - wanted).abs();
                assert!(error <= wanted.abs() * 1e-6, "{precision:?}, element {i}: {got} and not {wanted}");
            }
        }
    }

    /// What quantising and decoding leave of `x` in `precision`.
    fn there_and_back(format: ScaledFormat, x: &Tensor, precision: Precision) -> Vec<f64> {
        let mut g = Builder::new();
        let var = g.step_input("x", x.ty()).unwrap();
        let y = g.quantize(var, format).unwrap();
        let y = g.dequantize(y).unwrap();
        let graph = g.finish(vec![("y".into(), y)]).unwrap();
        let value = |_: &crate::Arg| Some(Value::Plain(x.clone()));
        evaluate(&graph, &value, &Bindings::new(), precision).unwrap()[0].1.tensor().floats().to_vec()
    }

    #[test]
    fn no_element_moves_by_more_than_half_a_step() {
        let shape = [13, 300];
        for seed in 0..8 {
            let mut rng = Rng::new(seed);
            let x = rng.normal(DType::F32, &shape);
            let spread = x.floats().iter().map(|x| x * 2f64.powi(rng.below(20) as i32)).collect();
            let x = Tensor::float(DType::F32, &shape, spread).rounded();
            for format in ScaledFormat::all() {
                let largest =
                    |range: std::ops::Range<usize>| x.floats()[range].iter().fold(0f64, |m, v| m.max(v.abs()));
                let got = there_and_back(format, &x, Precision::Rounded);
                for (i, (x, got)) in x.floats().iter().zip(&got).enumerate() {
                    let (row, column) = (i / 300, i % 300);
                    let amax = match format.scales {
                        ScaleLayout::Group(size) => {
                            let from = column / size * size;
                            largest(row * 300 + from..row * 300 + (from + size).min(300))
                        }
                        ScaleLayout::Row => largest(row * 300..row * 300 + 300),
                        ScaleLayout::Tensor => largest(0..x_len(&shape)),
                        ScaleLayout::Block => (0..13)
                            .map(|r| r * 300 + column / 128 * 128)
                            .fold(0f64, |m, from| m.max(largest(from..(from + 128).min(from / 300 * 300 + 300)))),
                    };
                    let allowed = match format.codes {
                        CodeType::Int8 => amax / 127.0 / 2.0,
                        // Half of the last bit, or of the distance of the smallest numbers.
                        CodeType::F8E4M3 => (x.abs() / 16.0).max(amax / 448.0 / 1024.0),
                        CodeType::F8E5M2 => (x.abs() / 8.0).max(amax / 57344.0 / 2f64.powi(17)),
                    };
                    let error = (x - got).abs();
                    assert!(error <= allowed * (1.0 + 1e-4), "{format:?}, element {i}: {got} of {x}");
                }
            }
        }
    }

    fn x_len(shape: &[usize]) -> usize {
        shape.iter().product()
    }

    #[test]
    fn zeros_stay_and_a_unit_with_what_is_not_finite_is_nan() {
        for format in ScaledFormat::all() {
            let zeros = there_and_back(format, &Tensor::zeros(DType::BF16, &[3, 70]), Precision::Rounded);
            assert!(zeros.iter().all(|v| *v == 0.0), "{format:?}");
            for odd in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                let mut values = vec![1.0; 140];
                values[40] = odd;
                let got = there_and_back(format, &Tensor::float(DType::BF16, &[2, 70], values), Precision::Rounded);
                let shared = |i: usize| match format.scales {
                    // Both rows are in one block.
                    ScaleLayout::Tensor | ScaleLayout::Block => true,
                    ScaleLayout::Row => i < 70,
                    ScaleLayout::Group(size) => i < 70 && i / size == 40 / size,
                };
                for (i, v) in got.iter().enumerate() {
                    assert_eq!(v.is_nan(), shared(i), "{format:?} {odd}, element {i}: {v}");
                }
            }
        }
    }

    /// How values are stored is said twice: by the graph, and by a loop for weights and samples.
    #[test]
    fn the_loop_stores_what_the_graph_means() {
        for format in ScaledFormat::all() {
            for shape in [[3, 300], [1, 1], [40, 64]] {
                let x = Rng::new(5).normal(DType::F32, &shape);
                let values: Vec<f32> = x.floats().iter().map(|v| *v as f32).collect();
                let bytes = format.encode(&values, &shape, None);
                let bytes: Vec<&[u8]> = bytes.iter().map(Vec::as_slice).collect();
                let meant = there_and_back(format, &x, Precision::Rounded);
                for (i, (read, meant)) in format.values(&bytes, &shape).into_iter().zip(meant).enumerate() {
                    assert!(f64::from(read) == meant, "{format:?} {shape:?} element {i}: {read} and not {meant}");
                }
            }
        }
    }
}

//! Random instances of every primitive, edge cases included. Collectives have none: they are tested on a mesh.
//!
//! Float tensors have the dtype asked for. What does not depend on it (integers, booleans) comes with F32 only, so
//! that a walk over the float dtypes tests it once.

mod moves;
mod operands;
mod recurrence;

pub(crate) use recurrence::samples as recurrences;

use operands::{SHAPES, any, once, with_others};

use super::{Binary, Combine, Compare, Literal, Prim, Unary};
use crate::dtype::DType;
use crate::registry::{OpEntry, OpRegistry};
use crate::sample::{Check, Rng, Sample};
use crate::shape::Shape;
use crate::tensor::Tensor;

/// Every primitive but the collectives, with its samples; see [`crate::ops::registry`] for the composites.
pub fn prim_registry() -> OpRegistry {
    OpRegistry::new([
        OpEntry::new("const", constants),
        OpEntry::new("iota", iotas),
        OpEntry::new("unary", unary),
        OpEntry::new("binary", binary),
        OpEntry::new("compare", compare),
        OpEntry::new("select", select),
        OpEntry::new("cast", cast),
        OpEntry::new("reduce", reduce),
        OpEntry::new("argmax", argmax),
        OpEntry::new("scan", scan),
        OpEntry::new("matmul", matmul),
        OpEntry::new("gather", moves::gather),
        OpEntry::new("scatter", moves::scatter),
        OpEntry::new("slice", moves::slice),
        OpEntry::new("concat", moves::concat),
        OpEntry::new("pad", moves::pad),
        OpEntry::new("reshape", moves::reshape),
        OpEntry::new("transpose", moves::transpose),
        OpEntry::new("broadcast", moves::broadcast),
        OpEntry::new("random", random),
        OpEntry::new("sort", sort),
        OpEntry::new("linear_recurrence", recurrence::samples),
        OpEntry::new("linear_recurrence_gradient", recurrence::samples_gradient),
        OpEntry::new("move", moves::between_memories),
        OpEntry::new("state", moves::state),
        OpEntry::new("component", moves::component),
        OpEntry::new("assemble", moves::assemble),
        OpEntry::new("fetch", moves::fetch),
    ])
}

const INTEGERS: [DType; 4] = [DType::I8, DType::U8, DType::I32, DType::I64];

/// Zeros, units, infinities and NaN, which kernels of large numbers treat apart.
const SPECIAL: [f64; 8] = [0.0, -0.0, 1.0, -1.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 0.5];

fn float(dtype: DType, shape: &[usize], values: impl IntoIterator<Item = f64>) -> Tensor {
    Tensor::float(dtype, shape, values.into_iter().collect()).rounded()
}

fn special(dtype: DType) -> Tensor {
    float(dtype, &[SPECIAL.len()], SPECIAL)
}

/// Every pair of special numbers, as two tensors.
fn special_pairs(dtype: DType) -> (Tensor, Tensor) {
    let n = SPECIAL.len();
    let a = (0..n * n).map(|i| SPECIAL[i / n]);
    let b = (0..n * n).map(|i| SPECIAL[i % n]);
    (float(dtype, &[n, n], a), float(dtype, &[n, n], b))
}

/// Every element, positive.
fn positive(tensor: Tensor) -> Tensor {
    let values = tensor.floats().iter().map(|x| x.abs()).collect();
    Tensor::float(tensor.dtype, &tensor.shape.clone(), values)
}

fn constants(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let mut out = Vec::new();
    for dtype in with_others(dtype) {
        for (count, vector) in [(1, false), (1, true), (0, true), (37, true)] {
            let values = if dtype.is_float() {
                rng.normal(DType::F32, &[count]).floats().into()
            } else {
                any(rng, dtype, &[count]).ints().iter().map(|x| *x as f64).collect()
            };
            out.push(Sample::prim(Prim::Const(Literal { dtype, values, vector })).judged(Check::Exact));
        }
    }
    out
}

fn iotas(_rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let mut out = Vec::new();
    for dtype in with_others(dtype) {
        for shape in [&[0][..], &[1], &[37], &[3, 0], &[3, 1, 5]] {
            for axis in 0..shape.len() {
                let prim = Prim::Iota { shape: Shape::new(shape.iter().copied()), axis, dtype };
                out.push(Sample::prim(prim).judged(Check::Exact));
            }
        }
    }
    out
}

fn unary(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let mut out = Vec::new();
    let all = [
        Unary::Neg,
        Unary::Abs,
        Unary::Exp,
        Unary::Log,
        Unary::Sqrt,
        Unary::Rsqrt,
        Unary::Sin,
        Unary::Cos,
        Unary::Tanh,
        Unary::Erf,
        Unary::Sigmoid,
        Unary::Floor,
    ];
    for op in all {
        let mut push = |x: Tensor| out.push(Sample::prim(Prim::Unary(op)).input(x));
        for shape in SHAPES {
            let x = rng.normal(dtype, shape);
            push(if matches!(op, Unary::Log | Unary::Sqrt | Unary::Rsqrt) { positive(x) } else { x });
        }
        push(special(dtype));
        // Far from 0: where functions saturate, overflow, or have many periods behind them.
        let far: Vec<f64> = (0..64).map(|i| f64::from(i - 32) * 3.0).collect();
        push(float(dtype, &[64, 1], far));
        push(float(dtype, &[64], (0..64).map(|i| f64::from(i) * 97.0)));
    }
    for dtype in once(dtype, &INTEGERS) {
        for op in [Unary::Neg, Unary::Abs] {
            out.push(Sample::prim(Prim::Unary(op)).input(any(rng, dtype, &[3, 37])));
            let low = if dtype == DType::U8 { 255 } else { -128 };
            out.push(Sample::prim(Prim::Unary(op)).input(Tensor::int(dtype, &[2], vec![low, 0])));
        }
    }
    for dtype in once(dtype, &[DType::Bool]) {
        for shape in SHAPES {
            out.push(Sample::prim(Prim::Unary(Unary::Not)).input(any(rng, dtype, shape)));
        }
    }
    out
}

fn binary(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let mut out = Vec::new();
    let sample = |op, a, b| Sample::prim(Prim::Binary(op)).input(a).input(b);
    for op in [Binary::Add, Binary::Sub, Binary::Mul, Binary::Div, Binary::Max, Binary::Min, Binary::Pow] {
        for shape in SHAPES {
            let a = rng.normal(dtype, shape);
            let a = if op == Binary::Pow { positive(a) } else { a };
            out.push(sample(op, a, rng.normal(dtype, shape)));
        }
        let (a, b) = special_pairs(dtype);
        out.push(sample(op, a, b));
    }
    let a = float(dtype, &[5], [-2.0, -2.0, -2.0, 3.0, 0.0]);
    out.push(sample(Binary::Pow, a, float(dtype, &[5], [3.0, 2.0, 0.5, -2.0, -1.0])));
    // A remainder jumps, so its operands are small integers, whose quotients no precision rounds across an integer.
    let a = float(dtype, &[17, 4], (0..68).map(|i| f64::from(i / 4 - 8)));
    let b = float(dtype, &[17, 4], (0..68).map(|i| [1.0, 4.0, -2.0, 0.0][i % 4]));
    out.push(sample(Binary::Rem, a, b).judged(Check::Exact));
    for dtype in once(dtype, &INTEGERS) {
        for op in [Binary::Add, Binary::Sub, Binary::Mul, Binary::Div, Binary::Rem, Binary::Max, Binary::Min] {
            out.push(sample(op, any(rng, dtype, &[3, 37]), any(rng, dtype, &[3, 37])));
            let edges: &[i64] = if dtype == DType::U8 { &[0, 1, 7, 255] } else { &[-128, -7, -1, 0, 1, 2, 7, 127] };
            let n = edges.len();
            let grid = |at: &dyn Fn(usize) -> usize| (0..n * n).map(|i| edges[at(i)]).collect();
            let (a, b) = (grid(&|i| i / n), grid(&|i| i % n));
            out.push(sample(op, Tensor::int(dtype, &[n, n], a), Tensor::int(dtype, &[n, n], b)));
        }
    }
    for dtype in once(dtype, &[DType::Bool]) {
        for op in [Binary::And, Binary::Or] {
            out.push(sample(op, any(rng, dtype, &[3, 37]), any(rng, dtype, &[3, 37])));
        }
    }
    out
}

fn compare(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let mut out = Vec::new();
    for op in [Compare::Eq, Compare::Ne, Compare::Lt, Compare::Le, Compare::Gt, Compare::Ge] {
        let mut push = |a, b| out.push(Sample::prim(Prim::Compare(op)).input(a).input(b));
        let (a, b) = special_pairs(dtype);
        push(a, b);
        for dtype in with_others(dtype) {
            for shape in [&[][..], &[0], &[3, 37]] {
                push(any(rng, dtype, shape), any(rng, dtype, shape));
            }
        }
    }
    out
}

fn select(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let mut out = Vec::new();
    for dtype in with_others(dtype) {
        for shape in SHAPES {
            let cond = any(rng, DType::Bool, shape);
            let (a, b) = (any(rng, dtype, shape), any(rng, dtype, shape));
            out.push(Sample::prim(Prim::Select).input(cond).input(a).input(b).judged(Check::Exact));
        }
    }
    out
}

fn cast(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let mut out = Vec::new();
    let mut push = |from: Tensor, to: DType| {
        // Between floats there is one right rounding. From integers, rounding to f32 on the way is fair.
        let check = if from.dtype.is_float() { Check::Exact } else { Check::Norm };
        out.push(Sample::prim(Prim::Cast(to)).input(from).judged(check));
    };
    for to in DType::ALL {
        for shape in SHAPES {
            push(rng.normal(dtype, shape), to);
        }
        push(special(dtype), to);
        let powers = (-40..40).flat_map(|e| [1.37 * 2f64.powi(e), -1.5 * 2f64.powi(e)]);
        push(float(dtype, &[160], powers), to);
    }
    for from in [DType::I8, DType::U8, DType::I32, DType::I64, DType::Bool] {
        let targets: &[DType] = if dtype == DType::F32 { &DType::ALL } else { &[dtype] };
        for &to in targets {
            push(any(rng, from, &[3, 37]), to);
            if matches!(from, DType::I32 | DType::I64) {
                push(rng.integers(from, &[100], -(1 << 30), 1 << 30), to);
            }
        }
    }
    out
}

/// What is combined along each axis: no elements, one, few, many.
fn along_axes(rng: &mut Rng, dtype: DType) -> Vec<(Tensor, usize)> {
    let mut out = Vec::new();
    for dtype in with_others(dtype) {
        for shape in [&[0][..], &[1], &[0, 4], &[4, 0], &[3, 7, 5], &[2, 1000], &[129, 3]] {
            for axis in 0..shape.len() {
                out.push((any(rng, dtype, shape), axis));
            }
        }
    }
    let edges = [f64::NEG_INFINITY, f64::NEG_INFINITY, 1.0, f64::INFINITY, 2.0, f64::NAN];
    out.push((float(dtype, &[2, 3], edges), 0));
    out.push((float(dtype, &[2, 3], edges), 1));
    out
}

fn reduce(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    combined(rng, dtype, |op, axis| Prim::Reduce { op, axis })
}

fn scan(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    combined(rng, dtype, |op, axis| Prim::Scan { op, axis })
}

fn combined(rng: &mut Rng, dtype: DType, prim: fn(Combine, usize) -> Prim) -> Vec<Sample> {
    let mut out = Vec::new();
    for op in [Combine::Sum, Combine::Max, Combine::Min] {
        for (x, axis) in along_axes(rng, dtype) {
            out.push(Sample::prim(prim(op, axis)).input(x));
        }
    }
    out
}

/// Small integers as elements, so that many are equal.
fn ties(rng: &mut Rng, dtype: DType, shape: &[usize]) -> Tensor {
    let values = rng.integers(DType::I32, shape, -3, 4);
    float(dtype, shape, values.ints().iter().map(|x| *x as f64))
}

fn argmax(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let mut inputs = along_axes(rng, dtype);
    inputs.push((ties(rng, dtype, &[5, 40]), 1));
    inputs.push((ties(rng, dtype, &[40, 5]), 0));
    inputs.into_iter().map(|(x, axis)| Sample::prim(Prim::ArgMax { axis }).input(x)).collect()
}

fn sort(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let mut inputs = along_axes(rng, dtype);
    inputs.push((ties(rng, dtype, &[5, 40]), 1));
    inputs.push((ties(rng, dtype, &[40, 5]), 0));
    let mut out = Vec::new();
    for (x, axis) in inputs {
        let extent = x.shape[axis];
        for (descending, keep) in [(false, extent), (true, extent), (true, extent.min(3)), (false, 0)] {
            let prim = Prim::Sort { axis, descending, keep: keep.into() };
            out.push(Sample::prim(prim).input(x.clone()).judged(Check::Exact));
        }
    }
    // Few of many: of different ones, of many equal ones, and of equal ones alone.
    let equal = float(dtype, &[1, 2500], vec![1.0; 2500]);
    for (x, keep) in [(any(rng, dtype, &[3, 5000]), 20), (ties(rng, dtype, &[2, 3000]), 700), (equal, 1024)] {
        for descending in [false, true] {
            let prim = Prim::Sort { axis: 1, descending, keep: keep.into() };
            out.push(Sample::prim(prim).input(x.clone()).judged(Check::Exact));
        }
    }
    out
}

fn matmul(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let mut out = Vec::new();
    let mut push = |rng: &mut Rng, batch: &[usize], [m, k, n]: [usize; 3], trans: (bool, bool), from, to| {
        let (trans_a, trans_b) = trans;
        let a = [batch, &if trans_a { [k, m] } else { [m, k] }].concat();
        let b = [batch, &if trans_b { [n, k] } else { [k, n] }].concat();
        let prim = Prim::MatMul { trans_a, trans_b, out: to };
        out.push(Sample::prim(prim).input(any(rng, from, &a)).input(any(rng, from, &b)));
    };
    for trans in [(false, false), (true, false), (false, true), (true, true)] {
        for size in [[1, 1, 1], [0, 3, 2], [3, 0, 2], [3, 2, 0], [1, 200, 33], [17, 33, 65], [64, 96, 80]] {
            push(rng, &[], size, trans, dtype, dtype);
        }
        for batch in [&[3][..], &[2, 0], &[2, 1, 3]] {
            push(rng, batch, [5, 40, 7], trans, dtype, dtype);
        }
        if dtype != DType::F32 {
            push(rng, &[], [17, 33, 65], trans, dtype, DType::F32);
        }
        for from in once(dtype, &[DType::I8]) {
            push(rng, &[], [5, 70, 9], trans, from, DType::I32);
        }
    }
    out
}

fn random(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let mut out = Vec::new();
    for of in once(dtype, &[DType::I64]) {
        for (shape, stream) in [(&[][..], 0), (&[0], 1), (&[3, 37], 2), (&[1000], u32::MAX)] {
            // Keys use all 64 bits of the seed; the counters are below 2^32.
            let seed = (0..shape.iter().product::<usize>()).map(|_| rng.bits() as i64).collect();
            let mut sample = Sample::prim(Prim::Random { stream }).input(Tensor::int(of, shape, seed));
            for _ in 0..3 {
                sample = sample.input(rng.integers(of, shape, 0, 1 << 32));
            }
            out.push(sample.judged(Check::Exact));
        }
    }
    out
}

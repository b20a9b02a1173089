//! Samples of the primitives that move elements, and of the access to states and stored parameters.

use super::operands::{SHAPES, any, with_others};
use crate::dim::Dim;
use crate::dtype::DType;
use crate::format::{FormatRef, ScaledFormat};
use crate::prim::{Fetch, Memory, Prim};
use crate::sample::{Check, Rng, Sample};
use crate::shape::Shape;
use crate::tensor::{Tensor, Value};

/// Index tensors for rows along an extent: in range and out of it on both sides, with duplicates, of several ranks.
fn indices(rng: &mut Rng, dtype: DType, extent: usize) -> Vec<Tensor> {
    let extent = extent as i64;
    let edges = Tensor::int(dtype, &[6], vec![0, extent - 1, -1, extent, extent + 1000, 0]);
    let any = |rng: &mut Rng, shape: &[usize]| rng.integers(dtype, shape, -1, extent + 1);
    vec![edges, any(rng, &[0]), any(rng, &[1]), any(rng, &[19]), any(rng, &[]), any(rng, &[2, 3]), any(rng, &[3, 0])]
}

/// Data, an axis of it, and indices along that.
fn indexed(rng: &mut Rng, dtype: DType) -> Vec<(Tensor, usize, Tensor)> {
    let mut out = Vec::new();
    for dtype in with_others(dtype) {
        for shape in [&[7][..], &[1, 5], &[6, 33], &[2, 4, 3], &[0, 3]] {
            for axis in 0..shape.len() {
                let of = if axis == 0 { DType::I32 } else { DType::I64 };
                for at in indices(rng, of, shape[axis]) {
                    out.push((any(rng, dtype, shape), axis, at));
                }
            }
        }
    }
    out
}

pub(super) fn gather(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let inputs = indexed(rng, dtype).into_iter();
    let sample = |(x, axis, at)| Sample::prim(Prim::Gather { axis }).input(x).input(at).judged(Check::Exact);
    inputs.map(sample).collect()
}

pub(super) fn between_memories(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let mut out = Vec::new();
    for dtype in with_others(dtype) {
        for shape in SHAPES {
            for memory in [Memory::Host, Memory::Device] {
                out.push(Sample::prim(Prim::Move(memory)).input(any(rng, dtype, shape)).judged(Check::Exact));
            }
        }
    }
    out
}

pub(super) fn scatter(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let mut out = Vec::new();
    for add in [false, true] {
        for (x, axis, at) in indexed(rng, dtype) {
            let mut shape = x.shape.clone();
            shape.splice(axis..=axis, at.shape.iter().copied());
            let updates = any(rng, x.dtype, &shape);
            let check = if add { Check::Norm } else { Check::Exact };
            out.push(Sample::prim(Prim::Scatter { axis, add }).input(x).input(at).input(updates).judged(check));
        }
    }
    out
}

pub(super) fn slice(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let mut out = Vec::new();
    for dtype in with_others(dtype) {
        for (shape, axis, start, len) in [
            (&[0][..], 0, 0, 0),
            (&[5], 0, 2, 3),
            (&[5], 0, 5, 0),
            (&[3, 37], 0, 1, 1),
            (&[3, 37], 1, 5, 31),
            (&[2, 4, 3], 1, 0, 4),
        ] {
            let prim = Prim::Slice { axis, start: Dim::from(start), len: Dim::from(len) };
            out.push(Sample::prim(prim).input(any(rng, dtype, shape)).judged(Check::Exact));
        }
    }
    out
}

pub(super) fn concat(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let mut out = Vec::new();
    for dtype in with_others(dtype) {
        for extents in [&[4][..], &[1, 0, 33], &[7, 7], &[0, 0]] {
            for axis in 0..3 {
                let mut sample = Sample::prim(Prim::Concat { axis }).judged(Check::Exact);
                for &extent in extents {
                    let mut shape = [2, 3, 5];
                    shape[axis] = extent;
                    sample = sample.input(any(rng, dtype, &shape));
                }
                out.push(sample);
            }
        }
    }
    out
}

pub(super) fn pad(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let mut out = Vec::new();
    for dtype in with_others(dtype) {
        let lowest = if dtype.is_float() { f64::NEG_INFINITY } else { 1.0 };
        for (shape, axis, before, after, value) in [
            (&[0][..], 0, 2, 1, 1.0),
            (&[5], 0, 0, 0, 1.0),
            (&[3, 37], 0, 1, 0, lowest),
            (&[3, 37], 1, 0, 27, 0.0),
            (&[2, 4, 3], 1, 3, 2, 1.0),
        ] {
            let prim = Prim::Pad { axis, before: Dim::from(before), after: Dim::from(after), value };
            out.push(Sample::prim(prim).input(any(rng, dtype, shape)).judged(Check::Exact));
        }
    }
    out
}

pub(super) fn reshape(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let mut out = Vec::new();
    for dtype in with_others(dtype) {
        for (from, to) in
            [(&[][..], &[1][..]), (&[0, 3], &[5, 0]), (&[6, 10], &[60]), (&[60], &[3, 4, 5]), (&[1, 1], &[])]
        {
            let prim = Prim::Reshape(Shape::new(to.iter().copied()));
            out.push(Sample::prim(prim).input(any(rng, dtype, from)).judged(Check::Exact));
        }
    }
    out
}

pub(super) fn transpose(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let mut out = Vec::new();
    for dtype in with_others(dtype) {
        for (shape, perm) in [
            (&[][..], &[][..]),
            (&[37], &[0]),
            (&[33, 65], &[1, 0]),
            (&[0, 4], &[1, 0]),
            (&[3, 5, 7], &[0, 2, 1]),
            (&[3, 5, 7], &[2, 0, 1]),
            (&[2, 3, 4, 5], &[0, 2, 1, 3]),
            (&[2, 1, 4, 3], &[3, 2, 1, 0]),
        ] {
            out.push(Sample::prim(Prim::Transpose(perm.to_vec())).input(any(rng, dtype, shape)).judged(Check::Exact));
        }
    }
    out
}

pub(super) fn broadcast(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let mut out = Vec::new();
    for dtype in with_others(dtype) {
        for (from, to) in [
            (&[][..], &[][..]),
            (&[], &[3, 37]),
            (&[37], &[3, 37]),
            (&[3, 1], &[3, 37]),
            (&[1, 5, 1], &[2, 4, 5, 3]),
            (&[1], &[0]),
        ] {
            let prim = Prim::Broadcast(Shape::new(to.iter().copied()));
            out.push(Sample::prim(prim).input(any(rng, dtype, from)).judged(Check::Exact));
        }
    }
    out
}

pub(super) fn state(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let mut out = Vec::new();
    for dtype in with_others(dtype) {
        for shape in SHAPES {
            let now = any(rng, dtype, shape);
            out.push(Sample::prim(Prim::StateRead).state(now.clone()).judged(Check::Exact));
            let next = any(rng, dtype, shape);
            out.push(Sample::prim(Prim::StateWrite).state(now).input(next).judged(Check::Exact));
        }
    }
    out
}

pub(super) fn component(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let mut out = Vec::new();
    for format in crate::format::all() {
        for shape in [&[1, format.granularity(1)[0]][..], &[3, format.granularity(1)[0] * 2]] {
            let logical = Shape::new(shape.iter().copied());
            if format.check(&logical).is_err() || dtype.size_bytes() == 1 {
                continue;
            }
            let count = format.components(&logical).len();
            for index in 0..count {
                let sample = Sample::prim(Prim::Component(index));
                out.push(stored(sample, rng, dtype, shape, &format).judged(Check::Exact));
            }
        }
    }
    out
}

/// Stored values taken apart, which the primitive puts together again.
pub(super) fn assemble(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let mut out = Vec::new();
    for format in ScaledFormat::all() {
        for shape in [&[0, 64], &[1, 1], &[3, 300], &[130, 257]] {
            let value = Value::stored(&rng.normal(dtype, shape), &FormatRef::new(format));
            let Value::Stored { format, dtype, components, .. } = value else { continue };
            let prim = Prim::Assemble { format, dtype, shape: Shape::new(shape.iter().copied()) };
            out.push(components.into_iter().fold(Sample::prim(prim), Sample::input).judged(Check::Exact));
        }
    }
    out
}

/// Copied, and where the plan would leave the copy out if the value were not what the graph gives; in every format.
pub(super) fn fetch(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let mut out = Vec::new();
    for in_place in [0, 8] {
        let prim = Prim::Fetch(Fetch { rows: 4.into(), in_place, reached: None });
        for dtype in with_others(dtype) {
            for shape in SHAPES {
                out.push(Sample::prim(prim.clone()).input(any(rng, dtype, shape)).judged(Check::Exact));
            }
        }
        for format in crate::format::all() {
            let shape = [3, format.granularity(1)[0] * 2];
            if format.check(&Shape::new(shape)).is_ok() && dtype.size_bytes() > 1 {
                out.push(stored(Sample::prim(prim.clone()), rng, dtype, &shape, &format).judged(Check::Exact));
            }
        }
    }
    out
}

fn stored(sample: Sample, rng: &mut Rng, dtype: DType, shape: &[usize], format: &FormatRef) -> Sample {
    sample.stored(&rng.normal(dtype, shape), format)
}

//! How the components of a format become values, as data: a straight-line program of primitives. It stands below the
//! graph, so that a parameter's type can name its format; [`Builder::decoded`](crate::Builder::decoded) makes nodes of it.

use crate::dim::Dim;
use crate::dtype::DType;
use crate::prim::{Binary, Compare, Literal};
use crate::shape::Shape;

/// A value of a [`Decoding`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecodingValue {
    /// A component of the stored parameter, by index.
    Component(usize),
    /// What a step gives, by index.
    Step(usize),
}

/// What a step does: a few of the primitives, which stand above this file since one of them names a format.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // fields: as those of the primitives
pub enum DecodingOp {
    /// A constant.
    Const(Literal),
    /// Elementwise, broadcasting.
    Binary(Binary),
    /// Elementwise, broadcasting; gives `Bool`.
    Compare(Compare),
    /// `(cond, a, b)`: `a` where `cond` holds, else `b`; all broadcast.
    Select,
    /// Conversion to another element type.
    Cast(DType),
    /// The same elements under another shape.
    Reshape(Shape),
    /// `len` elements along `axis` from `start`.
    Slice { axis: usize, start: Dim, len: Dim },
    /// `after` zeros behind `axis`.
    Pad { axis: usize, after: Dim },
    /// Joins along `axis`.
    Concat { axis: usize },
    /// Entries of a vector at integers.
    Gather,
}

/// An operation on values before it.
#[derive(Clone, Debug, PartialEq)]
pub struct DecodingStep {
    /// The operation. It has one output.
    pub op: DecodingOp,
    /// Its inputs.
    pub inputs: Vec<DecodingValue>,
}

/// A straight-line program of primitives. A cast or a reshape that changes nothing makes no node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Decoding {
    /// The steps, each after those whose values it takes.
    pub steps: Vec<DecodingStep>,
}

impl Decoding {
    /// Appends a step.
    pub fn apply(&mut self, op: DecodingOp, inputs: &[DecodingValue]) -> DecodingValue {
        self.steps.push(DecodingStep { op, inputs: inputs.to_vec() });
        DecodingValue::Step(self.steps.len() - 1)
    }

    /// A scalar constant.
    pub fn constant(&mut self, dtype: DType, value: f64) -> DecodingValue {
        self.apply(DecodingOp::Const(Literal { dtype, values: [value].into(), vector: false }), &[])
    }

    /// A constant vector.
    pub fn table(&mut self, dtype: DType, values: &[f64]) -> DecodingValue {
        self.apply(DecodingOp::Const(Literal { dtype, values: values.into(), vector: true }), &[])
    }

    /// Elementwise, broadcasting.
    pub fn binary(&mut self, op: Binary, a: DecodingValue, b: DecodingValue) -> DecodingValue {
        self.apply(DecodingOp::Binary(op), &[a, b])
    }

    /// Elementwise, broadcasting; gives `Bool`.
    pub fn compare(&mut self, op: Compare, a: DecodingValue, b: DecodingValue) -> DecodingValue {
        self.apply(DecodingOp::Compare(op), &[a, b])
    }

    /// `a` where `cond` holds, else `b`; all three broadcast.
    pub fn select(&mut self, cond: DecodingValue, a: DecodingValue, b: DecodingValue) -> DecodingValue {
        self.apply(DecodingOp::Select, &[cond, a, b])
    }

    /// `x` as `dtype`.
    pub fn cast(&mut self, x: DecodingValue, dtype: DType) -> DecodingValue {
        self.apply(DecodingOp::Cast(dtype), &[x])
    }

    /// The same elements under another shape.
    pub fn reshape(&mut self, x: DecodingValue, shape: Shape) -> DecodingValue {
        self.apply(DecodingOp::Reshape(shape), &[x])
    }

    /// `len` elements along `axis` from `start`.
    pub fn slice(&mut self, x: DecodingValue, axis: usize, start: usize, len: usize) -> DecodingValue {
        self.apply(DecodingOp::Slice { axis, start: Dim::from(start), len: Dim::from(len) }, &[x])
    }

    /// `after` zeros behind the elements of `axis`.
    pub fn pad(&mut self, x: DecodingValue, axis: usize, after: usize) -> DecodingValue {
        self.apply(DecodingOp::Pad { axis, after: Dim::from(after) }, &[x])
    }

    /// Joins along `axis`.
    pub fn concat(&mut self, parts: &[DecodingValue], axis: usize) -> DecodingValue {
        self.apply(DecodingOp::Concat { axis }, parts)
    }

    /// Entries of the vector `table` at the integers `indices`.
    pub fn gather(&mut self, table: DecodingValue, indices: DecodingValue) -> DecodingValue {
        self.apply(DecodingOp::Gather, &[table, indices])
    }
}

//! How the components of a format become values, as data: a straight-line program of primitives. It stands below the
//! graph, so that a parameter's type can name its format; [`Builder::decoded`](crate::Builder::decoded) makes nodes of it.

use crate::dim::Dim;
use crate::dtype::DType;
use crate::prim::{Binary, Compare, Literal, Prim};
use crate::shape::Shape;

/// A value of a [`Decoding`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecodingValue {
    /// A component of the stored parameter, by index.
    Component(usize),
    /// What a step gives, by index.
    Step(usize),
}

/// A primitive applied to values before it.
#[derive(Clone, Debug, PartialEq)]
pub struct DecodingStep {
    /// The primitive. It has one output.
    pub prim: Prim,
    /// Its inputs. Those of `Binary`, `Compare` and `Select` broadcast.
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
    pub fn apply(&mut self, prim: Prim, inputs: &[DecodingValue]) -> DecodingValue {
        self.steps.push(DecodingStep { prim, inputs: inputs.to_vec() });
        DecodingValue::Step(self.steps.len() - 1)
    }

    /// A scalar constant.
    pub fn constant(&mut self, dtype: DType, value: f64) -> DecodingValue {
        self.apply(Prim::Const(Literal { dtype, values: [value].into(), vector: false }), &[])
    }

    /// A constant vector.
    pub fn table(&mut self, dtype: DType, values: &[f64]) -> DecodingValue {
        self.apply(Prim::Const(Literal { dtype, values: values.into(), vector: true }), &[])
    }

    /// Elementwise, broadcasting.
    pub fn binary(&mut self, op: Binary, a: DecodingValue, b: DecodingValue) -> DecodingValue {
        self.apply(Prim::Binary(op), &[a, b])
    }

    /// Elementwise, broadcasting; gives `Bool`.
    pub fn compare(&mut self, op: Compare, a: DecodingValue, b: DecodingValue) -> DecodingValue {
        self.apply(Prim::Compare(op), &[a, b])
    }

    /// `a` where `cond` holds, else `b`; all three broadcast.
    pub fn select(&mut self, cond: DecodingValue, a: DecodingValue, b: DecodingValue) -> DecodingValue {
        self.apply(Prim::Select, &[cond, a, b])
    }

    /// `x` as `dtype`.
    pub fn cast(&mut self, x: DecodingValue, dtype: DType) -> DecodingValue {
        self.apply(Prim::Cast(dtype), &[x])
    }

    /// The same elements under another shape.
    pub fn reshape(&mut self, x: DecodingValue, shape: Shape) -> DecodingValue {
        self.apply(Prim::Reshape(shape), &[x])
    }

    /// `len` elements along `axis` from `start`.
    pub fn slice(&mut self, x: DecodingValue, axis: usize, start: usize, len: usize) -> DecodingValue {
        self.apply(Prim::Slice { axis, start: Dim::from(start), len: Dim::from(len) }, &[x])
    }

    /// Joins along `axis`.
    pub fn concat(&mut self, parts: &[DecodingValue], axis: usize) -> DecodingValue {
        self.apply(Prim::Concat { axis }, parts)
    }

    /// Entries of the vector `table` at the integers `indices`.
    pub fn gather(&mut self, table: DecodingValue, indices: DecodingValue) -> DecodingValue {
        self.apply(Prim::Gather { axis: 0 }, &[table, indices])
    }
}

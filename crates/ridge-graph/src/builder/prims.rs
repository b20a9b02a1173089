//! A builder method for each primitive. Elementwise methods of two tensors broadcast as NumPy does, by inserting
//! the broadcasts.

use crate::dim::Dim;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Builder, Var};
use crate::prim::{Binary, Combine, Compare, Literal, Prim, Unary};
use crate::shape::Shape;

macro_rules! unary {
    ($($method:ident => $op:ident),* $(,)?) => {
        impl Builder {$(
            #[doc = concat!("Elementwise `", stringify!($method), "`.")]
            ///
            /// # Errors
            /// When the dtype does not fit.
            pub fn $method(&mut self, x: Var) -> Result<Var> {
                self.one(Prim::Unary(Unary::$op), &[x])
            }
        )*}
    };
}

unary! {
    neg => Neg, abs => Abs, exp => Exp, log => Log, sqrt => Sqrt, rsqrt => Rsqrt, sin => Sin, cos => Cos,
    tanh => Tanh, erf => Erf, sigmoid => Sigmoid, floor => Floor, not => Not,
}

macro_rules! binary {
    ($($method:ident => $prim:expr),* $(,)?) => {
        impl Builder {$(
            #[doc = concat!("Elementwise `", stringify!($method), "`, broadcasting.")]
            ///
            /// # Errors
            /// When shapes do not broadcast or dtypes do not fit.
            pub fn $method(&mut self, a: Var, b: Var) -> Result<Var> {
                self.broadcast_one($prim, a, b)
            }
        )*}
    };
}

binary! {
    add => Prim::Binary(Binary::Add), sub => Prim::Binary(Binary::Sub), mul => Prim::Binary(Binary::Mul),
    div => Prim::Binary(Binary::Div), rem => Prim::Binary(Binary::Rem), pow => Prim::Binary(Binary::Pow),
    max => Prim::Binary(Binary::Max), min => Prim::Binary(Binary::Min), and => Prim::Binary(Binary::And),
    or => Prim::Binary(Binary::Or), eq => Prim::Compare(Compare::Eq), ne => Prim::Compare(Compare::Ne),
    lt => Prim::Compare(Compare::Lt), le => Prim::Compare(Compare::Le), gt => Prim::Compare(Compare::Gt),
    ge => Prim::Compare(Compare::Ge),
}

impl Builder {
    pub(super) fn one(&mut self, prim: Prim, inputs: &[Var]) -> Result<Var> {
        Ok(self.prim(prim, inputs)?[0])
    }

    /// A primitive of two tensors, which are broadcast to one shape first.
    pub(super) fn broadcast_one(&mut self, prim: Prim, a: Var, b: Var) -> Result<Var> {
        let (a, b) = self.broadcast_pair(a, b)?;
        self.one(prim, &[a, b])
    }

    fn broadcast_pair(&mut self, a: Var, b: Var) -> Result<(Var, Var)> {
        let (sa, sb) = (self.ty(a)?.shape.clone(), self.ty(b)?.shape.clone());
        if sa == sb {
            return Ok((a, b));
        }
        let rank = sa.rank().max(sb.rank());
        let at = |s: &Shape, axis: usize| {
            (axis + s.rank()).checked_sub(rank).map_or_else(|| Dim::from(1), |i| s.0[i].clone())
        };
        let dims = (0..rank).map(|axis| {
            let (da, db) = (at(&sa, axis), at(&sb, axis));
            if da.is_one() { db } else { da }
        });
        let shape = Shape(dims.collect());
        Ok((self.broadcast(a, shape.clone())?, self.broadcast(b, shape)?))
    }

    /// A scalar constant.
    pub fn constant(&mut self, dtype: DType, value: f64) -> Result<Var> {
        self.one(Prim::Const(Literal { dtype, values: [value].into(), vector: false }), &[])
    }

    /// A constant vector.
    pub fn table(&mut self, dtype: DType, values: &[f64]) -> Result<Var> {
        self.one(Prim::Const(Literal { dtype, values: values.into(), vector: true }), &[])
    }

    /// A scalar constant of the dtype of `like`.
    pub fn constant_like(&mut self, like: Var, value: f64) -> Result<Var> {
        let dtype = self.ty(like)?.dtype;
        self.constant(dtype, value)
    }

    /// `x` divided by the extent `dim`, which may be symbolic.
    pub fn div_by_dim(&mut self, x: Var, dim: &Dim) -> Result<Var> {
        let count = self.dim_value(dim)?;
        let dtype = self.ty(x)?.dtype;
        let count = self.cast(count, dtype)?;
        self.div(x, count)
    }

    /// The extent `dim` as an I64 scalar: a constant, or for a symbol the last index of an iota plus one.
    pub fn dim_value(&mut self, dim: &Dim) -> Result<Var> {
        if let Some(n) = dim.as_const() {
            return self.constant(DType::I64, n as f64);
        }
        // One element more than the extent, so that the last index is the extent itself.
        let iota = self.iota(Shape(vec![dim.clone() + 1]), 0, DType::I64)?;
        let last = self.slice(iota, 0, dim.clone(), 1)?;
        self.reshape(last, Shape::default())
    }

    /// `value` everywhere in the shape and dtype of `like`.
    pub fn full_like(&mut self, like: Var, value: f64) -> Result<Var> {
        let shape = self.ty(like)?.shape.clone();
        let c = self.constant_like(like, value)?;
        self.broadcast(c, shape)
    }

    /// `shape` filled with indices along `axis`.
    pub fn iota(&mut self, shape: impl Into<Shape>, axis: usize, dtype: DType) -> Result<Var> {
        self.one(Prim::Iota { shape: shape.into(), axis, dtype }, &[])
    }

    /// `a` where `cond` holds, else `b`; all three broadcast.
    pub fn select(&mut self, cond: Var, a: Var, b: Var) -> Result<Var> {
        let (a, b) = self.broadcast_pair(a, b)?;
        let (cond, a) = self.broadcast_pair(cond, a)?;
        let (a, b) = self.broadcast_pair(a, b)?;
        self.one(Prim::Select, &[cond, a, b])
    }

    /// `x` as `dtype`; `x` itself if it is that already.
    pub fn cast(&mut self, x: Var, dtype: DType) -> Result<Var> {
        if self.ty(x)?.dtype == dtype { Ok(x) } else { self.one(Prim::Cast(dtype), &[x]) }
    }

    /// Combines along `axis`, kept with extent 1.
    pub fn reduce(&mut self, op: Combine, x: Var, axis: usize) -> Result<Var> {
        self.one(Prim::Reduce { op, axis }, &[x])
    }

    /// Sum along `axis`, kept with extent 1.
    pub fn reduce_sum(&mut self, x: Var, axis: usize) -> Result<Var> {
        self.reduce(Combine::Sum, x, axis)
    }

    /// Largest along `axis`, kept with extent 1.
    pub fn reduce_max(&mut self, x: Var, axis: usize) -> Result<Var> {
        self.reduce(Combine::Max, x, axis)
    }

    /// Index of the largest along `axis`, I32, kept with extent 1.
    pub fn argmax(&mut self, x: Var, axis: usize) -> Result<Var> {
        self.one(Prim::ArgMax { axis }, &[x])
    }

    /// Inclusive prefix combination along `axis`.
    pub fn scan(&mut self, op: Combine, x: Var, axis: usize) -> Result<Var> {
        self.one(Prim::Scan { op, axis }, &[x])
    }

    /// Inclusive prefix sums along `axis`.
    pub fn scan_sum(&mut self, x: Var, axis: usize) -> Result<Var> {
        self.scan(Combine::Sum, x, axis)
    }

    /// `[batch.., m, k] x [batch.., k, n]` with optional transpositions, to dtype `out`.
    pub fn matmul(&mut self, a: Var, b: Var, trans_a: bool, trans_b: bool, out: DType) -> Result<Var> {
        self.one(Prim::MatMul { trans_a, trans_b, out }, &[a, b])
    }

    /// Rows of `data` along `axis`, which the axes of `indices` replace; out of range gives zeros.
    pub fn gather(&mut self, data: Var, indices: Var, axis: usize) -> Result<Var> {
        self.one(Prim::Gather { axis }, &[data, indices])
    }

    /// `data` with rows along `axis` replaced; an index out of range is dropped.
    pub fn scatter(&mut self, data: Var, indices: Var, updates: Var, axis: usize) -> Result<Var> {
        self.one(Prim::Scatter { axis, add: false }, &[data, indices, updates])
    }

    /// `data` with rows along `axis` added to; an index out of range is dropped.
    pub fn scatter_add(&mut self, data: Var, indices: Var, updates: Var, axis: usize) -> Result<Var> {
        self.one(Prim::Scatter { axis, add: true }, &[data, indices, updates])
    }

    /// `len` elements along `axis` from `start`.
    pub fn slice(&mut self, x: Var, axis: usize, start: impl Into<Dim>, len: impl Into<Dim>) -> Result<Var> {
        self.one(Prim::Slice { axis, start: start.into(), len: len.into() }, &[x])
    }

    /// Joins along `axis`.
    pub fn concat(&mut self, parts: &[Var], axis: usize) -> Result<Var> {
        self.one(Prim::Concat { axis }, parts)
    }

    /// `before` and `after` elements of `value` around `axis`.
    pub fn pad(
        &mut self,
        x: Var,
        axis: usize,
        before: impl Into<Dim>,
        after: impl Into<Dim>,
        value: f64,
    ) -> Result<Var> {
        self.one(Prim::Pad { axis, before: before.into(), after: after.into(), value }, &[x])
    }

    /// The same elements under another shape; `x` itself if it has that already.
    pub fn reshape(&mut self, x: Var, shape: impl Into<Shape>) -> Result<Var> {
        let shape = shape.into();
        if self.ty(x)?.shape == shape { Ok(x) } else { self.one(Prim::Reshape(shape), &[x]) }
    }

    /// Axis `i` of the result is axis `perm[i]` of `x`.
    pub fn transpose(&mut self, x: Var, perm: &[usize]) -> Result<Var> {
        self.one(Prim::Transpose(perm.to_vec()), &[x])
    }

    /// Repeats extents of 1 and missing leading axes; `x` itself if it has that shape already.
    pub fn broadcast(&mut self, x: Var, shape: impl Into<Shape>) -> Result<Var> {
        let shape = shape.into();
        if self.ty(x)?.shape == shape { Ok(x) } else { self.one(Prim::Broadcast(shape), &[x]) }
    }

    /// Uniform f32 in `[0, 1)` from counters; see [`Prim::Random`].
    pub fn random(&mut self, seed: Var, sequence: Var, position: Var, index: Var, stream: u32) -> Result<Var> {
        self.one(Prim::Random { stream }, &[seed, sequence, position, index])
    }

    /// The first `keep` values along `axis` in sorted order, and their I32 indices.
    pub fn sort(&mut self, x: Var, axis: usize, descending: bool, keep: impl Into<Dim>) -> Result<(Var, Var)> {
        let out = self.prim(Prim::Sort { axis, descending, keep: keep.into() }, &[x])?;
        Ok((out[0], out[1]))
    }

    /// `(y, state)` of a linear recurrence, from `[q, k, v, log_decay, state, query_start]` and `[erase, write]` if it has a part
    /// of low rank; see [`Prim::LinearRecurrence`].
    pub fn linear_recurrence(&mut self, inputs: [Var; 6], low_rank: Option<[Var; 2]>) -> Result<[Var; 2]> {
        let prim = Prim::LinearRecurrence { low_rank: low_rank.is_some() };
        let inputs: Vec<Var> = inputs.into_iter().chain(low_rank.into_iter().flatten()).collect();
        let out = self.prim(prim, &inputs)?;
        Ok([out[0], out[1]])
    }

    /// The tensor that a state holds now.
    pub fn state_read(&mut self, state: Var) -> Result<Var> {
        self.one(Prim::StateRead, &[state])
    }

    /// The state with a new value.
    pub fn state_write(&mut self, state: Var, value: Var) -> Result<Var> {
        self.one(Prim::StateWrite, &[state, value])
    }
}

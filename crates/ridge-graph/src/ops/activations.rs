//! How a product takes its activations: as they are, or rounded to 8-bit codes, which a machine multiplies faster by
//! weights that are codes themselves. The rounding is part of the product's meaning, so a graph says where it is done.

use crate::builder::Builder;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::Var;
use crate::op::Gradient;
use crate::types::Shape;

/// How the rows of x enter a product.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Activations {
    /// As they are.
    #[default]
    Exact,
    /// As codes of 8 bits. Each row is cut into groups of [`Activations::GROUP`] elements, the last perhaps shorter.
    /// With scale = largest magnitude / 127, an element's code is the integer nearest to x / scale (the upper of two),
    /// and its value code * scale.
    Int8,
}

impl Activations {
    /// Elements of a row that share a scale.
    pub const GROUP: usize = 256;

    /// Name on the command line and in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Int8 => "int8",
        }
    }

    /// Of a product that takes activations so: none passes the steps of a rounding.
    pub(super) fn gradient(self) -> Gradient {
        match self {
            Self::Exact => Gradient::Derived,
            Self::Int8 => Gradient::None,
        }
    }

    /// The values of f32 `x` of `[rows, K]`, K being a number.
    pub(super) fn apply(self, g: &mut Builder, x: Var) -> Result<Var> {
        let shape = g.ty(x)?.shape.clone();
        let inner = shape.last().as_const().unwrap_or_default();
        if self == Self::Exact || inner == 0 {
            return Ok(x);
        }
        let rows = shape.0[0].clone();
        let groups = inner.div_ceil(Self::GROUP);
        let missing = groups * Self::GROUP - inner;
        let padded = if missing > 0 { g.pad(x, 1, 0, missing, 0.0)? } else { x };
        let grouped = g.reshape(padded, Shape(vec![rows.clone(), groups.into(), Self::GROUP.into()]))?;
        let magnitudes = g.abs(grouped)?;
        let largest = g.reduce_max(magnitudes, 2)?;
        let number = |g: &mut Builder, value| g.constant(DType::F32, value);
        let [zero, one, half, most, least] =
            [number(g, 0.0)?, number(g, 1.0)?, number(g, 0.5)?, number(g, 127.0)?, number(g, -127.0)?];
        let scale = g.div(largest, most)?;
        // Of nothing but zeros every code is zero.
        let none = g.eq(scale, zero)?;
        let divisor = g.select(none, one, scale)?;
        let scaled = g.div(grouped, divisor)?;
        let above = g.add(scaled, half)?;
        let code = g.floor(above)?;
        // Of the smallest numbers the scale is rounded far.
        let code = g.min(code, most)?;
        let code = g.max(code, least)?;
        let values = g.mul(code, scale)?;
        let values = g.reshape(values, Shape(vec![rows, (groups * Self::GROUP).into()]))?;
        if missing > 0 { g.slice(values, 1, 0, inner) } else { Ok(values) }
    }
}

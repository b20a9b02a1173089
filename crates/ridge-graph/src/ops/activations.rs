//! How a product takes its activations: as they are, or rounded to 8-bit codes, which a machine multiplies faster by
//! weights that are codes themselves. The rounding is part of the product's meaning, so a graph says where it is done.

use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Builder, Gradient, Var};
use crate::shape::Shape;

/// How the rows of x enter a product.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Activations {
    /// As they are.
    #[default]
    Exact,
    /// As codes of 8 bits. Each row is cut into groups of [`Activations::GROUP`] elements, the last perhaps shorter.
    /// An element's code is the integer nearest to x * 127 / largest magnitude (the upper of two), and its value code *
    /// scale, the scale being largest magnitude / 127. An element of 16 bits that lies just between two codes does so
    /// in f32 as well as exactly.
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
        let none = g.eq(largest, zero)?;
        let divisor = g.select(none, one, largest)?;
        // 127 / 128 and then 128, so that no product is too large. Both are exact where x has 16 bits.
        let [share, whole] = [number(g, 127.0 / 128.0)?, number(g, 128.0)?];
        let share = g.mul(grouped, share)?;
        let share = g.div(share, divisor)?;
        let scaled = g.mul(share, whole)?;
        let above = g.add(scaled, half)?;
        let code = g.floor(above)?;
        // The smallest numbers are rounded far.
        let code = g.min(code, most)?;
        let code = g.max(code, least)?;
        let values = g.mul(code, scale)?;
        let values = g.reshape(values, Shape(vec![rows, (groups * Self::GROUP).into()]))?;
        if missing > 0 { g.slice(values, 1, 0, inner) } else { Ok(values) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Bindings;
    use crate::eval::{Precision, evaluate};
    use crate::tensor::{Tensor, Value};
    use crate::types::Type;

    /// Each row is a largest magnitude with all elements of bf16 that lie just between two of its codes, the largest
    /// numbers among them.
    #[test]
    fn an_element_between_two_codes_takes_the_upper_one_in_f32_too() {
        let (mut rows, mut wanted) = (Vec::new(), Vec::new());
        for power in [-100, -3, 0, 120] {
            for significand in 128..256 {
                let largest = f64::from(significand) * 2f64.powi(power);
                let mut row = vec![0.0; Activations::GROUP];
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
        let count = rows.len() / Activations::GROUP;
        let mut g = Builder::new();
        let x = g.step_input("x", Type::tensor(DType::F32, [count, Activations::GROUP])).unwrap();
        let y = Activations::Int8.apply(&mut g, x).unwrap();
        let graph = g.finish(vec![("y".into(), y)]).unwrap();
        let rows = Value::Plain(Tensor::float(DType::F32, &[count, Activations::GROUP], rows));
        for precision in [Precision::Exact, Precision::Rounded] {
            let value = |_: &crate::Arg| Some(rows.clone());
            let got = evaluate(&graph, &value, &Bindings::new(), precision).unwrap();
            for (i, (got, wanted)) in got[0].1.tensor().floats().iter().zip(&wanted).enumerate() {
                let error = (got - wanted).abs();
                assert!(error <= wanted.abs() * 1e-6, "{precision:?}, element {i}: {got} and not {wanted}");
            }
        }
    }
}

//! Functions of elements at one index.

use super::precision::Precision;
use crate::dtype::DType;
use crate::prim::{Binary, Compare, Unary};
use crate::tensor::{Data, Tensor};
use crate::why::Why;

pub(super) fn unary(op: Unary, x: &Tensor, precision: Precision) -> Data {
    match &x.data {
        Data::Float(v) => {
            let f: fn(f64) -> f64 = match op {
                Unary::Neg => |x| -x,
                Unary::Abs => f64::abs,
                Unary::Exp => f64::exp,
                Unary::Log => f64::ln,
                Unary::Sqrt => f64::sqrt,
                Unary::Rsqrt => |x| 1.0 / x.sqrt(),
                Unary::Sin => f64::sin,
                Unary::Cos => f64::cos,
                Unary::Tanh => f64::tanh,
                Unary::Erf => libm::erf,
                Unary::Sigmoid => |x| 1.0 / (1.0 + (-x).exp()),
                Unary::Floor => f64::floor,
                Unary::Not => |x| f64::from(u8::from(x == 0.0)),
            };
            let is_exact = matches!(op, Unary::Neg | Unary::Abs | Unary::Sqrt | Unary::Floor | Unary::Not);
            let of = |(i, x): (usize, &f64)| if is_exact { f(*x) } else { precision.library_function(i, f(*x)) };
            Data::Float(v.iter().enumerate().map(of).collect())
        }
        Data::Int(v) => {
            let f: fn(i64) -> i64 = match op {
                Unary::Neg => i64::wrapping_neg,
                Unary::Abs => i64::wrapping_abs,
                Unary::Not => |x| i64::from(x == 0),
                // Typing admits floats alone.
                _ => |x| x,
            };
            Data::Int(v.iter().map(|x| f(*x)).collect())
        }
    }
}

pub(super) fn binary(op: Binary, a: &Tensor, b: &Tensor) -> Result<Data, Why> {
    match (&a.data, &b.data) {
        (Data::Float(a), Data::Float(b)) => {
            let f: fn(f64, f64) -> f64 = match op {
                Binary::Add => |a, b| a + b,
                Binary::Sub => |a, b| a - b,
                Binary::Mul => |a, b| a * b,
                Binary::Div => |a, b| a / b,
                Binary::Rem => float_rem,
                Binary::Pow => f64::powf,
                Binary::Max => float_max,
                Binary::Min => float_min,
                Binary::And => |a, b| f64::from(u8::from(a != 0.0 && b != 0.0)),
                Binary::Or => |a, b| f64::from(u8::from(a != 0.0 || b != 0.0)),
            };
            Ok(Data::Float(a.iter().zip(b).map(|(a, b)| f(*a, *b)).collect()))
        }
        (Data::Int(a), Data::Int(b)) => {
            let f: fn(i64, i64) -> i64 = match op {
                Binary::Add => i64::wrapping_add,
                Binary::Sub => i64::wrapping_sub,
                Binary::Mul => i64::wrapping_mul,
                Binary::Div => int_div,
                Binary::Rem => int_rem,
                // Typing admits floats alone.
                Binary::Pow => |a, _| a,
                Binary::Max => i64::max,
                Binary::Min => i64::min,
                Binary::And => |a, b| a & b,
                Binary::Or => |a, b| a | b,
            };
            Ok(Data::Int(a.iter().zip(b).map(|(a, b)| f(*a, *b)).collect()))
        }
        _ => Err(mixed(a.dtype, b.dtype)),
    }
}

pub(super) fn compare(op: Compare, a: &Tensor, b: &Tensor) -> Result<Data, Why> {
    fn all<T: PartialOrd>(op: Compare, a: &[T], b: &[T]) -> Data {
        let f: fn(&T, &T) -> bool = match op {
            Compare::Eq => T::eq,
            Compare::Ne => T::ne,
            Compare::Lt => T::lt,
            Compare::Le => T::le,
            Compare::Gt => T::gt,
            Compare::Ge => T::ge,
        };
        Data::Int(a.iter().zip(b).map(|(a, b)| i64::from(f(a, b))).collect())
    }
    match (&a.data, &b.data) {
        (Data::Float(a), Data::Float(b)) => Ok(all(op, a, b)),
        (Data::Int(a), Data::Int(b)) => Ok(all(op, a, b)),
        _ => Err(mixed(a.dtype, b.dtype)),
    }
}

pub(super) fn select(cond: &Tensor, a: &Tensor, b: &Tensor) -> Result<Data, Why> {
    fn all<T: Copy>(cond: &[i64], a: &[T], b: &[T]) -> Vec<T> {
        cond.iter().zip(a.iter().zip(b)).map(|(c, (a, b))| if *c == 0 { *b } else { *a }).collect()
    }
    match (&a.data, &b.data) {
        (Data::Float(a), Data::Float(b)) => Ok(Data::Float(all(cond.ints(), a, b))),
        (Data::Int(a), Data::Int(b)) => Ok(Data::Int(all(cond.ints(), a, b))),
        _ => Err(mixed(a.dtype, b.dtype)),
    }
}

fn mixed(a: DType, b: DType) -> Why {
    format!("cannot take {a} with {b}")
}

/// The larger; NaN if either is.
pub(super) fn float_max(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}

/// The smaller; NaN if either is.
pub(super) fn float_min(a: f64, b: f64) -> f64 {
    if a.is_nan() || a < b { a } else { b }
}

/// The remainder with the sign of the divisor. Exact, since `%` is.
fn float_rem(a: f64, b: f64) -> f64 {
    let r = a % b;
    if r != 0.0 && (r < 0.0) != (b < 0.0) { r + b } else { r }
}

/// Rounded towards minus infinity; 0 for a divisor of 0.
fn int_div(a: i64, b: i64) -> i64 {
    if b == 0 {
        return 0;
    }
    let quotient = a.wrapping_div(b);
    if int_rem(a, b) != a.wrapping_rem(b) { quotient - 1 } else { quotient }
}

/// With the sign of the divisor; 0 for a divisor of 0.
fn int_rem(a: i64, b: i64) -> i64 {
    if b == 0 {
        return 0;
    }
    let r = a.wrapping_rem(b);
    if r != 0 && (r < 0) != (b < 0) { r + b } else { r }
}

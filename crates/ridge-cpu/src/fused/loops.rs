//! The loop of each op over a tile in registers. Booleans are 0 and 1 in f32.
//!
//! Functions with several steps inside take them in f64, so that a result is rounded once, as its op says.

use ridge_graph::{Binary, Combine, Compare, DType, Unary};

use super::load::wrap;
use crate::simd::{self, LANES, vectorised};

macro_rules! map {
    ($($name:ident: |$x:ident| $value:expr;)*) => {$(
        vectorised! {
            fn $name(x: &[f32], out: &mut [f32]) {
                for (out, $x) in out.iter_mut().zip(x) {
                    let $x = *$x;
                    *out = $value;
                }
            }
        }
    )*};
}

macro_rules! zip {
    ($($name:ident: |$a:ident, $b:ident| $value:expr;)*) => {$(
        vectorised! {
            fn $name(a: &[f32], b: &[f32], out: &mut [f32]) {
                for ((out, $a), $b) in out.iter_mut().zip(a).zip(b) {
                    let ($a, $b) = (*$a, *$b);
                    *out = $value;
                }
            }
        }
    )*};
}

macro_rules! compares {
    ($($name:ident: $op:tt;)*) => {
        zip! { $($name: |a, b| if a $op b { 1.0 } else { 0.0 };)* }
    };
}

map! {
    neg: |x| -x;
    abs: |x| x.abs();
    sqrt: |x| x.sqrt();
    rsqrt: |x| (1.0 / f64::from(x).sqrt()) as f32;
    floor: |x| x.floor();
    exp: |x| exp64::<FMA>(f64::from(x)) as f32;
    sigmoid: |x| (1.0 / (1.0 + exp64::<FMA>(-f64::from(x)))) as f32;
    tanh: |x| tanh64::<FMA>(f64::from(x)) as f32;
    not: |x| if x == 0.0 { 1.0 } else { 0.0 };
}

zip! {
    add: |a, b| a + b;
    sub: |a, b| a - b;
    mul: |a, b| a * b;
    div: |a, b| a / b;
    max: |a, b| larger(a, b);
    min: |a, b| smaller(a, b);
    and: |a, b| if a != 0.0 && b != 0.0 { 1.0 } else { 0.0 };
    or: |a, b| if a != 0.0 || b != 0.0 { 1.0 } else { 0.0 };
}

compares! { eq: ==; ne: !=; lt: <; le: <=; gt: >; ge: >=; }

/// 1 / k! from k = 11 down to 0.
const TAYLOR: [f64; 12] = [
    1.0 / 39_916_800.0,
    1.0 / 3_628_800.0,
    1.0 / 362_880.0,
    1.0 / 40_320.0,
    1.0 / 5040.0,
    1.0 / 720.0,
    1.0 / 120.0,
    1.0 / 24.0,
    1.0 / 6.0,
    0.5,
    1.0,
    1.0,
];

/// `e^x` of an f32 to some 13 digits, so that rounding it to f32 is the only error that counts; a loop of it becomes
/// vector code. By `2^n e^r` with `|r| <= ln(2) / 2`, of which the last term of the series is below 1e-13.
#[inline(always)]
#[allow(clippy::inline_always)] // must compile with its caller's instruction set
fn exp64<const FMA: bool>(x: f64) -> f64 {
    /// Adding it leaves the nearest integer in the low bits.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    // Beyond these an f32 is 0 or infinite. As comparisons, which leave NaN as it is.
    let x = if x < -200.0 { -200.0 } else { x };
    let x = if x > 200.0 { 200.0 } else { x };
    let shifted = x * std::f64::consts::LOG2_E + ROUND;
    let r = x - (shifted - ROUND) * std::f64::consts::LN_2;
    let mut sum = 0.0;
    for term in TAYLOR {
        sum = if FMA { f64::mul_add(sum, r, term) } else { sum * r + term };
    }
    let scale = f64::from_bits((shifted.to_bits() << 52).wrapping_add(1023 << 52));
    sum * scale
}

/// The hyperbolic tangent, as precise: near zero by its series, where the difference would cancel.
#[inline(always)]
#[allow(clippy::inline_always)] // must compile with its caller's instruction set
fn tanh64<const FMA: bool>(x: f64) -> f64 {
    let far = 1.0 - 2.0 / (exp64::<FMA>(2.0 * x) + 1.0);
    let near = x - x * x * x * (1.0 / 3.0);
    if x.abs() < 1e-3 { near } else { far }
}

/// The larger; NaN if either is.
#[inline(always)]
#[allow(clippy::inline_always)] // must compile with its caller's instruction set
pub(crate) fn larger(a: f32, b: f32) -> f32 {
    if a.is_nan() || a > b { a } else { b }
}

/// The smaller; NaN if either is.
#[inline(always)]
#[allow(clippy::inline_always)] // must compile with its caller's instruction set
pub(crate) fn smaller(a: f32, b: f32) -> f32 {
    if a.is_nan() || a < b { a } else { b }
}

fn each<T: Copy, R>(x: &[T], out: &mut [R], f: impl Fn(T) -> R) {
    out.iter_mut().zip(x).for_each(|(out, x)| *out = f(*x));
}

fn pairs<T: Copy, R>(a: &[T], b: &[T], out: &mut [R], f: impl Fn(T, T) -> R) {
    out.iter_mut().zip(a.iter().zip(b)).for_each(|(out, (a, b))| *out = f(*a, *b));
}

/// An elementwise function of floats, or `Not` of booleans.
pub(crate) fn unary(op: Unary, x: &[f32], out: &mut [f32]) {
    match op {
        Unary::Neg => neg(x, out),
        Unary::Abs => abs(x, out),
        Unary::Exp => exp(x, out),
        Unary::Log => each(x, out, f32::ln),
        Unary::Sqrt => sqrt(x, out),
        Unary::Rsqrt => rsqrt(x, out),
        Unary::Sin => each(x, out, f32::sin),
        Unary::Cos => each(x, out, f32::cos),
        Unary::Tanh => tanh(x, out),
        // In f64: in f32 it would be wrong by more than one rounding.
        Unary::Erf => each(x, out, |x| libm::erf(f64::from(x)) as f32),
        Unary::Sigmoid => sigmoid(x, out),
        Unary::Floor => floor(x, out),
        Unary::Not => not(x, out),
    }
}

/// An elementwise function of integers of `dtype`.
pub(crate) fn unary_ints(op: Unary, dtype: DType, x: &[i64], out: &mut [i64]) {
    match op {
        Unary::Abs => each(x, out, |x| wrap(dtype, x.wrapping_abs())),
        // Typing admits no other.
        _ => each(x, out, |x| wrap(dtype, x.wrapping_neg())),
    }
}

/// An elementwise function of two floats, or of two booleans.
pub(crate) fn binary(op: Binary, a: &[f32], b: &[f32], out: &mut [f32]) {
    match op {
        Binary::Add => add(a, b, out),
        Binary::Sub => sub(a, b, out),
        Binary::Mul => mul(a, b, out),
        Binary::Div => div(a, b, out),
        Binary::Rem => pairs(a, b, out, float_rem),
        Binary::Pow => pairs(a, b, out, f32::powf),
        Binary::Max => max(a, b, out),
        Binary::Min => min(a, b, out),
        Binary::And => and(a, b, out),
        Binary::Or => or(a, b, out),
    }
}

/// The remainder with the sign of the divisor.
fn float_rem(a: f32, b: f32) -> f32 {
    let r = a % b;
    if r != 0.0 && (r < 0.0) != (b < 0.0) { r + b } else { r }
}

/// An elementwise function of two integers of `dtype`.
pub(crate) fn binary_ints(op: Binary, dtype: DType, a: &[i64], b: &[i64], out: &mut [i64]) {
    match op {
        Binary::Add => pairs(a, b, out, |a, b| wrap(dtype, a.wrapping_add(b))),
        Binary::Sub => pairs(a, b, out, |a, b| wrap(dtype, a.wrapping_sub(b))),
        Binary::Mul => pairs(a, b, out, |a, b| wrap(dtype, a.wrapping_mul(b))),
        Binary::Div => pairs(a, b, out, |a, b| wrap(dtype, int_div(a, b))),
        Binary::Rem => pairs(a, b, out, int_rem),
        Binary::Max => pairs(a, b, out, i64::max),
        Binary::Min => pairs(a, b, out, i64::min),
        // Typing admits neither powers nor logic.
        Binary::Pow | Binary::And | Binary::Or => out.copy_from_slice(a),
    }
}

/// Rounded towards minus infinity; 0 for a divisor of 0.
fn int_div(a: i64, b: i64) -> i64 {
    match b {
        0 => 0,
        _ if int_rem(a, b) == a.wrapping_rem(b) => a.wrapping_div(b),
        _ => a.wrapping_div(b) - 1,
    }
}

/// With the sign of the divisor; 0 for a divisor of 0.
fn int_rem(a: i64, b: i64) -> i64 {
    if b == 0 {
        return 0;
    }
    let r = a.wrapping_rem(b);
    if r != 0 && (r < 0) != (b < 0) { r + b } else { r }
}

/// 1 where the comparison holds, else 0.
pub(crate) fn compare(op: Compare, a: &[f32], b: &[f32], out: &mut [f32]) {
    match op {
        Compare::Eq => eq(a, b, out),
        Compare::Ne => ne(a, b, out),
        Compare::Lt => lt(a, b, out),
        Compare::Le => le(a, b, out),
        Compare::Gt => gt(a, b, out),
        Compare::Ge => ge(a, b, out),
    }
}

/// 1 where the comparison holds, else 0.
pub(crate) fn compare_ints(op: Compare, a: &[i64], b: &[i64], out: &mut [f32]) {
    let holds: fn(&i64, &i64) -> bool = match op {
        Compare::Eq => i64::eq,
        Compare::Ne => i64::ne,
        Compare::Lt => i64::lt,
        Compare::Le => i64::le,
        Compare::Gt => i64::gt,
        Compare::Ge => i64::ge,
    };
    pairs(a, b, out, |a, b| f32::from(u8::from(holds(&a, &b))));
}

vectorised! {
    /// `a` where `cond` is not 0, else `b`.
    pub(crate) fn select(cond: &[f32], a: &[f32], b: &[f32], out: &mut [f32]) {
        for (((out, c), a), b) in out.iter_mut().zip(cond).zip(a).zip(b) {
            *out = if *c == 0.0 { *b } else { *a };
        }
    }
}

/// `a` where `cond` is not 0, else `b`.
pub(crate) fn select_ints(cond: &[f32], a: &[i64], b: &[i64], out: &mut [i64]) {
    for (((out, c), a), b) in out.iter_mut().zip(cond).zip(a).zip(b) {
        *out = if *c == 0.0 { *b } else { *a };
    }
}

vectorised! {
    /// Sum, in an order that the length alone decides.
    pub(crate) fn sum(x: &[f32]) -> f32 {
        let mut lanes = [0f32; LANES];
        let (chunks, rest) = x.as_chunks::<LANES>();
        for chunk in chunks {
            for i in 0..LANES {
                lanes[i] += chunk[i];
            }
        }
        for (lane, x) in lanes.iter_mut().zip(rest) {
            *lane += x;
        }
        simd::sum_lanes(lanes)
    }
}

vectorised! {
    /// The largest; NaN if there is one, minus infinity of none.
    pub(crate) fn largest(x: &[f32]) -> f32 {
        let mut lanes = [f32::NEG_INFINITY; LANES];
        let (chunks, rest) = x.as_chunks::<LANES>();
        for chunk in chunks {
            for i in 0..LANES {
                lanes[i] = larger(lanes[i], chunk[i]);
            }
        }
        let rest = rest.iter().fold(f32::NEG_INFINITY, |a, b| larger(a, *b));
        lanes.iter().fold(rest, |a, b| larger(a, *b))
    }
}

vectorised! {
    /// The smallest; NaN if there is one, infinity of none.
    pub(crate) fn smallest(x: &[f32]) -> f32 {
        let mut lanes = [f32::INFINITY; LANES];
        let (chunks, rest) = x.as_chunks::<LANES>();
        for chunk in chunks {
            for i in 0..LANES {
                lanes[i] = smaller(lanes[i], chunk[i]);
            }
        }
        let rest = rest.iter().fold(f32::INFINITY, |a, b| smaller(a, *b));
        lanes.iter().fold(rest, |a, b| smaller(a, *b))
    }
}

/// Combines floats, or booleans, of which the sum is whether any is true.
pub(crate) fn reduce(op: Combine, dtype: DType, x: &[f32]) -> f32 {
    match (op, dtype) {
        (Combine::Sum | Combine::Max, DType::Bool) => largest(x).max(0.0),
        (Combine::Min, DType::Bool) => smallest(x).min(1.0),
        (Combine::Sum, _) => sum(x),
        (Combine::Max, _) => largest(x),
        (Combine::Min, _) => smallest(x),
    }
}

/// Combines integers of `dtype`.
pub(crate) fn reduce_ints(op: Combine, dtype: DType, x: &[i64]) -> i64 {
    let all = x.iter().copied();
    match op {
        Combine::Sum => wrap(dtype, all.fold(0, i64::wrapping_add)),
        Combine::Max => all.fold(int_start(op, dtype), i64::max),
        Combine::Min => all.fold(int_start(op, dtype), i64::min),
    }
}

/// What a combination of no integers gives.
pub(crate) fn int_start(op: Combine, dtype: DType) -> i64 {
    let (low, high) = match dtype {
        DType::I8 => (i8::MIN.into(), i8::MAX.into()),
        DType::U8 => (0, u8::MAX.into()),
        DType::I32 => (i32::MIN.into(), i32::MAX.into()),
        DType::Bool => (0, 1),
        _ => (i64::MIN, i64::MAX),
    };
    match op {
        Combine::Sum => 0,
        Combine::Max => low,
        Combine::Min => high,
    }
}

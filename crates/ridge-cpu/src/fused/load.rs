//! Tiles between storage and registers: f32 for floats and booleans (0 and 1), i64 for integers.

use std::ops::Range;

use half::{bf16, f16};
use ridge_graph::DType;

use super::view::View;
use crate::bytes::Pod;
use crate::io::KernelIo;
use crate::simd;

/// Is a value of this dtype kept in i64, not in f32?
pub(crate) fn is_int(dtype: DType) -> bool {
    dtype.is_int()
}

/// Elements `range` of a view of input `index` as f32: floats exactly, booleans as 0 and 1, integers rounded.
pub(crate) fn floats(io: &KernelIo<'_>, index: usize, dtype: DType, view: &View, range: Range<usize>, out: &mut [f32]) {
    view.runs(range, |run| {
        let to = &mut out[run.at..run.at + run.len];
        match run.stride {
            1 => contiguous(io, index, dtype, run.from, to),
            0 => {
                let (first, rest) = to.split_at_mut(1);
                contiguous(io, index, dtype, run.from, first);
                rest.fill(first[0]);
            }
            stride => strided(io, index, dtype, run.from, stride, to),
        }
    });
}

/// Elements from `at` on as f32.
pub(crate) fn contiguous(io: &KernelIo<'_>, index: usize, dtype: DType, at: usize, out: &mut [f32]) {
    let end = at + out.len();
    match dtype {
        DType::Bool => widen(&io.input::<u8>(index)[at..end], out, |x| f32::from(u8::from(x != 0))),
        DType::I8 => widen(&io.input::<i8>(index)[at..end], out, f32::from),
        DType::U8 => widen(&io.input::<u8>(index)[at..end], out, f32::from),
        DType::I32 => widen(&io.input::<i32>(index)[at..end], out, |x| x as f32),
        DType::I64 => widen(&io.input::<i64>(index)[at..end], out, |x| x as f32),
        _ => simd::load(io, index, dtype, at, out),
    }
}

/// Elements `stride` apart, from `at` on, as f32.
pub(crate) fn strided(io: &KernelIo<'_>, index: usize, dtype: DType, at: usize, stride: usize, out: &mut [f32]) {
    fn pick<T: Pod>(from: &[T], stride: usize, out: &mut [f32], f: impl Fn(T) -> f32) {
        out.iter_mut().zip(from.iter().step_by(stride.max(1))).for_each(|(to, x)| *to = f(*x));
    }
    match dtype {
        DType::F32 => pick(&io.input::<f32>(index)[at..], stride, out, |x| x),
        DType::BF16 => pick(&io.input::<bf16>(index)[at..], stride, out, bf16::to_f32),
        DType::F16 => pick(&io.input::<f16>(index)[at..], stride, out, f16::to_f32),
        _ => out.iter_mut().enumerate().for_each(|(i, to)| {
            contiguous(io, index, dtype, at + i * stride, std::slice::from_mut(to));
        }),
    }
}

/// Elements `range` of a view of input `index`, of an integer dtype.
pub(crate) fn ints(io: &KernelIo<'_>, index: usize, dtype: DType, view: &View, range: Range<usize>, out: &mut [i64]) {
    view.runs(range, |run| {
        let to = &mut out[run.at..run.at + run.len];
        if run.stride == 0 {
            let (first, rest) = to.split_at_mut(1);
            contiguous_ints(io, index, dtype, run.from, 1, first);
            rest.fill(first[0]);
        } else {
            contiguous_ints(io, index, dtype, run.from, run.stride, to);
        }
    });
}

/// Elements `stride` apart, from `at` on, of an integer or boolean dtype.
pub(crate) fn contiguous_ints(
    io: &KernelIo<'_>,
    index: usize,
    dtype: DType,
    at: usize,
    stride: usize,
    out: &mut [i64],
) {
    fn pick<T: Pod + Into<i64>>(from: &[T], stride: usize, out: &mut [i64]) {
        out.iter_mut().zip(from.iter().step_by(stride)).for_each(|(to, x)| *to = (*x).into());
    }
    match dtype {
        DType::I8 => pick(&io.input::<i8>(index)[at..], stride, out),
        DType::U8 | DType::Bool => pick(&io.input::<u8>(index)[at..], stride, out),
        DType::I32 => pick(&io.input::<i32>(index)[at..], stride, out),
        DType::I64 => pick(&io.input::<i64>(index)[at..], stride, out),
        _ => unreachable!("{dtype} is kept in f32"),
    }
}

/// Writes floats or booleans to output `index` from element `at` on, rounded to `dtype`.
///
/// # Safety
/// These elements belong to the pieces that the caller was given.
pub(crate) unsafe fn store_floats(io: &KernelIo<'_>, index: usize, dtype: DType, at: usize, values: &[f32]) {
    // SAFETY: passed on to the caller.
    unsafe {
        if dtype == DType::Bool {
            narrow(values, io.output::<u8>(index).part(at..at + values.len()), |x| u8::from(x != 0.0));
        } else {
            simd::store(io, index, dtype, at, values);
        }
    }
}

/// Writes integers to output `index` from element `at` on, modulo the size of `dtype`.
///
/// # Safety
/// These elements belong to the pieces that the caller was given.
pub(crate) unsafe fn store_ints(io: &KernelIo<'_>, index: usize, dtype: DType, at: usize, values: &[i64]) {
    let range = at..at + values.len();
    // SAFETY: passed on to the caller.
    unsafe {
        match dtype {
            DType::I8 => narrow(values, io.output::<i8>(index).part(range), |x| x as i8),
            DType::U8 => narrow(values, io.output::<u8>(index).part(range), |x| x as u8),
            DType::Bool => narrow(values, io.output::<u8>(index).part(range), |x| u8::from(x != 0)),
            DType::I32 => narrow(values, io.output::<i32>(index).part(range), |x| x as i32),
            DType::I64 => io.output::<i64>(index).part(range).copy_from_slice(values),
            _ => unreachable!("{dtype} is kept in f32"),
        }
    }
}

/// `value` in the range of an integer dtype, modulo its size.
pub(crate) fn wrap(dtype: DType, value: i64) -> i64 {
    match dtype {
        DType::I8 => i64::from(value as i8),
        DType::U8 => i64::from(value as u8),
        DType::I32 => i64::from(value as i32),
        _ => value,
    }
}

/// A float as an element of an integer dtype: towards zero, saturating, NaN to zero.
pub(crate) fn to_int(dtype: DType, value: f32) -> i64 {
    match dtype {
        DType::I8 => i64::from(value as i8),
        DType::U8 => i64::from(value as u8),
        DType::I32 => i64::from(value as i32),
        _ => value as i64,
    }
}

fn widen<T: Pod>(from: &[T], to: &mut [f32], f: impl Fn(T) -> f32) {
    to.iter_mut().zip(from).for_each(|(to, x)| *to = f(*x));
}

fn narrow<S: Copy, T: Pod>(from: &[S], to: &mut [T], f: impl Fn(S) -> T) {
    to.iter_mut().zip(from).for_each(|(to, x)| *to = f(*x));
}

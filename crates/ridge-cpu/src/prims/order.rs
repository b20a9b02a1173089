//! Sorting, and the index of the largest.
//!
//! A line's elements become integers that order as they do, with the index below: then no two are equal, so any sort is
//! stable, and where few are kept the others need no order.

use std::ops::Range;

use ridge_graph::DType;

use crate::bytes::Pod;
use crate::fused::load::{self, is_int};
use crate::fused::{loops, view::View};
use crate::io::KernelIo;
use crate::kernel::CpuKernel;
use crate::scratch::Scratch;

/// Index of the first of the largest along the middle axis of `[outer, extent, inner]`.
pub(super) fn argmax(dtype: DType, split: (usize, usize, usize)) -> Box<dyn CpuKernel> {
    Box::new(ArgMax { dtype, split })
}

struct ArgMax {
    dtype: DType,
    split: (usize, usize, usize),
}

/// Elements that are looked at together.
const PART: usize = 512;

impl ArgMax {
    fn floats(&self, io: &KernelIo<'_>, first: usize, part: &mut [f32]) -> usize {
        let (_, extent, inner) = self.split;
        let mut best = (0, f32::NEG_INFINITY);
        let mut found = false;
        for at in (0..extent).step_by(PART) {
            let part = &mut part[..PART.min(extent - at)];
            match inner {
                1 => load::contiguous(io, 0, self.dtype, first + at, part),
                _ => load::strided(io, 0, self.dtype, first + at * inner, inner, part),
            }
            let top = loops::largest(part);
            if !found || top > best.1 || (top.is_nan() && !best.1.is_nan()) {
                let is_top = |x: &f32| if top.is_nan() { x.is_nan() } else { *x == top };
                best = (at + part.iter().position(is_top).unwrap_or(0), top);
                found = true;
            }
        }
        best.0
    }

    fn ints(&self, io: &KernelIo<'_>, first: usize, part: &mut [i64]) -> usize {
        let (_, extent, inner) = self.split;
        let mut best: Option<(usize, i64)> = None;
        for at in (0..extent).step_by(PART) {
            let part = &mut part[..PART.min(extent - at)];
            load::contiguous_ints(io, 0, self.dtype, first + at * inner, inner, part);
            for (i, x) in part.iter().enumerate() {
                if best.is_none_or(|(_, top)| *x > top) {
                    best = Some((at + i, *x));
                }
            }
        }
        best.map_or(0, |(i, _)| i)
    }
}

impl CpuKernel for ArgMax {
    fn pieces(&self) -> usize {
        self.split.0 * self.split.2
    }

    fn nanos_per_piece(&self) -> f64 {
        self.split.1 as f64 * 0.5
    }

    fn run(&self, io: &KernelIo<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        let (_, extent, inner) = self.split;
        for line in pieces {
            let first = line / inner * extent * inner + line % inner;
            let index = if is_int(self.dtype) {
                let [part] = scratch.slices::<i64, 1>([PART]);
                self.ints(io, first, part)
            } else {
                let [part] = scratch.slices::<f32, 1>([PART]);
                self.floats(io, first, part)
            };
            // SAFETY: this line is ours.
            let to = unsafe { io.output::<i32>(0).part(line..line + 1) };
            to[0] = index as i32;
        }
    }
}

/// The first `keep` along the middle axis of `[outer, extent, inner]` in sorted order, with their indices.
pub(super) fn sort(dtype: DType, split: (usize, usize, usize), descending: bool, keep: usize) -> Box<dyn CpuKernel> {
    Box::new(Sort { dtype, split, descending, keep })
}

struct Sort {
    dtype: DType,
    split: (usize, usize, usize),
    descending: bool,
    keep: usize,
}

/// An integer that orders as the floats do, with equal zeros, and below that of NaN even when inverted.
fn float_key(x: f32) -> u32 {
    let bits = (x + 0.0).to_bits();
    if bits >> 31 == 0 { bits | 1 << 31 } else { !bits }
}

impl Sort {
    fn floats(&self, io: &KernelIo<'_>, line: usize, view: &View, scratch: &mut Scratch) {
        let extent = self.split.1;
        let [keys] = scratch.slices::<u64, 1>([extent]);
        let mut values = [0f32; PART];
        let mut at = 0;
        for part in keys.chunks_mut(PART) {
            let values = &mut values[..part.len()];
            load::floats(io, 0, self.dtype, view, at..at + values.len(), values);
            for (key, x) in part.iter_mut().zip(values) {
                let ordered = if self.descending { !float_key(*x) } else { float_key(*x) };
                *key = u64::from(if x.is_nan() { u32::MAX } else { ordered }) << 32 | at as u64;
                at += 1;
            }
        }
        self.write_first(io, line, keys, |key| key as u32 as usize);
    }

    fn ints(&self, io: &KernelIo<'_>, line: usize, view: &View, scratch: &mut Scratch) {
        let extent = self.split.1;
        let [words] = scratch.slices::<u64, 1>([extent * 2]);
        // SAFETY: any bits are a u128, twice as many u64 cover as many bytes, and scratch is aligned to 64 bytes.
        let keys = unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast::<u128>(), extent) };
        let mut values = [0i64; PART];
        let mut at = 0;
        for part in keys.chunks_mut(PART) {
            let values = &mut values[..part.len()];
            load::ints(io, 0, self.dtype, view, at..at + values.len(), values);
            for (key, x) in part.iter_mut().zip(values) {
                let ordered = (*x as u64) ^ (1 << 63);
                *key = u128::from(if self.descending { !ordered } else { ordered }) << 64 | at as u128;
                at += 1;
            }
        }
        self.write_first(io, line, keys, |key| key as u64 as usize);
    }

    /// Writes the elements of the first keys, and their indices.
    fn write_first<K: Ord + Copy>(&self, io: &KernelIo<'_>, line: usize, keys: &mut [K], index: impl Fn(K) -> usize) {
        if self.keep < keys.len() {
            keys.select_nth_unstable(self.keep);
        }
        let kept = &mut keys[..self.keep];
        kept.sort_unstable();
        match self.dtype.size_bytes() {
            1 => self.write::<u8, K>(io, line, kept, index),
            2 => self.write::<u16, K>(io, line, kept, index),
            4 => self.write::<u32, K>(io, line, kept, index),
            _ => self.write::<u64, K>(io, line, kept, index),
        }
    }

    fn write<T: Pod, K: Copy>(&self, io: &KernelIo<'_>, line: usize, keys: &[K], index: impl Fn(K) -> usize) {
        let (_, extent, inner) = self.split;
        let (outer, column) = (line / inner, line % inner);
        let from = io.input::<T>(0);
        for (k, key) in keys.iter().enumerate() {
            let index = index(*key);
            let to = (outer * self.keep + k) * inner + column;
            // SAFETY: this line is ours.
            let (value, place) = unsafe { (io.output::<T>(0).part(to..to + 1), io.output::<i32>(1).part(to..to + 1)) };
            value[0] = from[(outer * extent + index) * inner + column];
            place[0] = index as i32;
        }
    }
}

impl CpuKernel for Sort {
    fn pieces(&self) -> usize {
        if self.keep == 0 { 0 } else { self.split.0 * self.split.2 }
    }

    fn nanos_per_piece(&self) -> f64 {
        let extent = self.split.1 as f64;
        extent * 5.0 + self.keep as f64 * (2.0 + extent.log2().max(0.0))
    }

    fn run(&self, io: &KernelIo<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        let (_, extent, inner) = self.split;
        for line in pieces {
            let view = View::new(&[extent], &[inner], line / inner * extent * inner + line % inner);
            if is_int(self.dtype) {
                self.ints(io, line, &view, scratch);
            } else {
                self.floats(io, line, &view, scratch);
            }
        }
    }
}
